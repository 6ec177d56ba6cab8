"""The run that the recipes for causal language models share, and texts that come as documents, one abstract each."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pipecomp.distributed import rendezvous
from pipecomp.errors import DataError, require
from pipecomp.interfaces import TrainingEngine
from pipecomp.recipes import run, text
from pipecomp.recipes.resume import DATA, data_facts, what_is_trained

Texts = list[str]


def fine_tune(
    args: argparse.Namespace,
    read: Callable[[argparse.Namespace], tuple[Texts, Texts | None]],
    *,
    documents: bool,
    load: Callable[[argparse.Namespace, Any], tuple[Any, Any]] = text.causal_model,
    meanings: Callable[[argparse.Namespace, Any], Mapping[str, Any]] = lambda args, model: {},
    configure: Callable[[argparse.Namespace, Any, int, int], tuple[dict[str, Any], Sequence[int]]] | None = None,
) -> None:
    """Run a recipe on this rank, from text to saved model.

    Args:
        args: The recipe's arguments.
        read: Given them, returns training texts and held-out ones, each of which are joined to one stream.
        documents: Whether the tokenizer's end-of-text token comes after each text.
        load: Given arguments and tokenizer, returns the model, as `pipecomp.initialize` takes it, and its config.
        meanings: Given arguments and model, returns what the arguments mean, see `resume.what_is_trained`.
        configure: Given arguments, the model's config, tokens of a sample and samples, returns DeepSpeed's
            configuration and where the model is cut; None to read --deepspeed_config. Every rank calls it.

    Raises:
        PipecompError: On every rank, if one of them has an error.
    """
    text.check_arguments(args)
    rendezvous.start_processes(args.seed, args.deepspeed_config)
    ranks = rendezvous.all_ranks()
    with ranks.collective_errors():
        training_texts, held_out_texts = read(args)
    with ranks.collective_errors():
        tokenizer = text.load_tokenizer(args.tokenizer, training_texts)
        end = None
        if documents:
            end = tokenizer.eos_token_id
            require(end is not None, "--tokenizer", args.tokenizer, "one with an end-of-text token (eos_token)")
        model, config = load(args, tokenizer)
        size = text.block_size(args, config)
        blocks = partial(text.blocks, tokenizer, size=size, vocabulary=config.vocab_size, end=end)
        training = blocks(training_texts)
        held_out = None if held_out_texts is None else blocks(held_out_texts, what="held-out text")
        trained = what_is_trained(
            args, {"--block-size": size, DATA: training.digest(), **meanings(args, model)}, config
        )
    ranks.assert_same_on_all_ranks(data_facts(training, held_out))
    ds_config, cuts = (None, None) if configure is None else configure(args, config, size, len(training))
    run.train(
        args,
        run.Workload(
            model=model,
            training=training,
            trained=trained,
            held_out=held_out,
            evaluation=evaluate,
            tokenizer=tokenizer,
            cuts=cuts,
            config=ds_config,
        ),
    )


def evaluate(engine: TrainingEngine, batches: list) -> dict[str, float]:
    """Evaluate held-out data on every replica.

    Args:
        engine: What to evaluate.
        batches: From `eval_batches`.

    Returns:
        Loss, in nats a token, and perplexity.
    """
    loss = run.evaluate(engine, batches)["loss"]
    return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}


# -- documents


def add_document_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that only documents have."""
    parser.add_argument(
        "--field",
        default="abstract",
        metavar="NAME",
        help="key of the text in JSON lines, or column of --dataset (default abstract)",
    )


def read_documents(args: argparse.Namespace) -> tuple[Texts, Texts | None]:
    """Read the documents of --train-file and --eval-file, or of --dataset.

    Returns:
        Training and held-out documents, None for the latter if none were given.

    Raises:
        ConfigError: If there is no such dataset.
        DataError: For what is in it, or in the files.
    """

    def of_splits(splits: tuple[str, ...]) -> Texts:
        return _cleaned(text.dataset_split(args.dataset, splits, (args.field,))[args.field])

    return text.read_sources(args, lambda path: documents_of(path, args.field), of_splits)


def is_json_lines(path: str) -> bool:
    """Say by its name whether a file holds JSON lines."""
    return path.lower().endswith((".jsonl", ".json"))


def documents_of(path: str, field: str) -> Texts:
    """Read the documents of a file. Runs of white space become one space; empty documents are left out.

    Args:
        path: A text with a document per line, or a .jsonl or .json file with an object or a string per line.
        field: The document's key in an object.

    Raises:
        DataError: Naming file and line.
    """
    lines = text.read_lines(path)
    if not is_json_lines(path):
        return _cleaned(lines)
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: not JSON: {error}") from error
        document = value.get(field) if isinstance(value, dict) else value
        if not isinstance(document, str):
            in_object = isinstance(value, dict) and field not in value
            has = f"the keys {', '.join(value)}" if in_object else f"a value of type {type(document).__name__}"
            raise DataError(f"{path}, line {number}: has {has}; needed: an object with a text under {field!r}")
        try:
            document.encode()
        except UnicodeEncodeError as error:  # no tokenizer takes it
            half = f"\\u{ord(document[error.start]):04x}"
            message = f"{path}, line {number}: {half} is half of a character, and its other half is not there"
            raise DataError(message) from error
        found.append(document)
    return _cleaned(found)


def _cleaned(texts: Texts) -> Texts:
    return [cleaned for document in texts if (cleaned := " ".join(document.split()))]
