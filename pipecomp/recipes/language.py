"""The run that the recipes for causal language models share, and texts that come as documents, one abstract each."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from pipecomp.errors import ConfigError, DataError
from pipecomp.recipes import run, text
from pipecomp.recipes.resume import DATA, what_is_trained

Texts = list[str]


def fine_tune(
    args: argparse.Namespace,
    read: Callable[[argparse.Namespace], tuple[Texts, Texts | None]],
    *,
    documents: bool,
    load: Callable[[argparse.Namespace, Any], tuple[Any, Any]] = text.causal_model,
    meanings: Callable[[argparse.Namespace, Any], Mapping[str, Any]] = lambda args, model: {},
) -> None:
    """One rank of a run, from text to saved model.

    read(args): training texts and held-out ones, which are joined to one stream each. documents: put the tokenizer's
    end-of-text token after each text. load(args, tokenizer): the model, as `pipecomp.initialize` takes it, and its
    config. meanings(args, model): what its arguments mean, see `recipe_resume.what_is_trained`. Raises this project's
    errors.
    """
    text.check_arguments(args)
    run.join(args)
    with run.together():
        training_texts, held_out_texts = read(args)
    with run.together() as same:
        tokenizer = text.load_tokenizer(args.tokenizer, training_texts)
        end = None
        if documents:
            end = tokenizer.eos_token_id
            if end is None:
                raise ConfigError("--tokenizer", args.tokenizer, "one with an end-of-text token (eos_token)")
        model, config = load(args, tokenizer)
        size = text.block_size(args, config)
        training = text.blocks(tokenizer, training_texts, size, vocabulary=config.vocab_size, end=end)
        held_out = None
        if held_out_texts is not None:
            held_out = text.blocks(tokenizer, held_out_texts, size, vocabulary=config.vocab_size, end=end)
        digest = training.digest()
        same("the training data or the tokenizer", digest)
        same("the held-out data", None if held_out is None else held_out.digest())
        trained = what_is_trained(args, {"--block-size": size, DATA: digest, **meanings(args, model)}, config)
    run.train(
        args,
        model=model,
        training=training,
        trained=trained,
        held_out=held_out,
        measures=text.perplexity,
        tokenizer=tokenizer,
    )


# -- documents


def add_document_arguments(parser: argparse.ArgumentParser) -> None:
    """What documents add to the arguments of language modelling."""
    parser.add_argument(
        "--field",
        default="abstract",
        metavar="NAME",
        help="key of the text in JSON lines, or column of --dataset (default abstract)",
    )


def read_documents(args: argparse.Namespace) -> tuple[Texts, Texts | None]:
    """The documents of --train-file and --eval-file, or of --dataset. Raises DataError, ConfigError."""
    if args.dataset is not None:
        training, held_out = (
            text.dataset_split(args.dataset, splits, (args.field,))[args.field]
            for splits in (("train",), ("validation", "test"))
        )
        return _cleaned(training), _cleaned(held_out)
    training = list(chain.from_iterable(documents_of(path, args.field) for path in args.train_file))
    return training, None if args.eval_file is None else documents_of(args.eval_file, args.field)


def documents_of(path: str, field: str) -> Texts:
    """The documents of a file: the lines of a text, or a string in each line of a .jsonl or .json file, under `field`.

    Runs of white space become one space; empty documents are left out. Raises DataError naming file and line.
    """
    lines = text.read_lines(path)
    if not path.endswith((".jsonl", ".json")):
        return _cleaned(lines)
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not JSON: {error}") from error
        document = value.get(field) if isinstance(value, dict) else value
        if not isinstance(document, str):
            has = f"the keys {', '.join(value)}" if isinstance(value, dict) else type(value).__name__
            raise DataError(f"{path}, line {number}: has {has}; needed: an object with a text under {field!r}")
        found.append(document)
    return _cleaned(found)


def _cleaned(texts: Texts) -> Texts:
    return [cleaned for document in texts if (cleaned := " ".join(document.split()))]
