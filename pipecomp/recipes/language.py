"""The run of recipes for causal language models, and reading of documents, such as one abstract per line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from pipecomp.data import default_collate
from pipecomp.data.sources import JSON, DataSource
from pipecomp.distributed import rendezvous
from pipecomp.errors import DataError, require
from pipecomp.recipes import run, text
from pipecomp.recipes.resume import DATA, data_facts, what_is_trained

Texts = list[str]


class Samples(NamedTuple):
    """Training and held-out samples, with `digest()`, and what makes a micro-batch of them; see `run.Workload`."""

    training: Any
    held_out: Any
    collate: Callable[[list], Any] = default_collate
    padding: Callable[[list], Any] | None = None


def fine_tune(
    args: argparse.Namespace,
    read: Callable[[argparse.Namespace], tuple[Texts, Texts | None]],
    *,
    documents: bool,
    samples: Callable[[argparse.Namespace, Any, int, int], Samples] | None = None,
    load: Callable[[argparse.Namespace, Any], tuple[Any, Any]] = text.causal_model,
    meanings: Callable[[argparse.Namespace, Any], Mapping[str, Any]] = lambda args, model: {},
    configure: Callable[[argparse.Namespace, Any, int, int], tuple[dict[str, Any], Sequence[int]]] | None = None,
    schedule: Callable[[int, Any], Any] | None = None,
    finish: Callable[[Any, str], None] | None = None,
    on_step: Callable[[Sequence[Mapping[str, Any]]], None] | None = None,
) -> None:
    """Run a recipe on this rank, from text to saved model.

    Args:
        args: The recipe's arguments.
        read: Takes the arguments and returns training and held-out texts. Each list is joined to one stream.
        documents: Append the tokenizer's end-of-text token to each text.
        samples: Takes the arguments, the tokenizer, tokens per sample and the vocabulary's size, and returns the
            samples; None to cut the texts into blocks.
        load: Takes arguments and tokenizer and returns the model, as `pipecomp.initialize` takes it, and its config.
        meanings: Takes arguments and model and returns the `meanings` of `resume.what_is_trained`.
        configure: Takes arguments, the model's config (or the model, if it has an adapter), tokens per sample and
            number of samples, and returns DeepSpeed's configuration and the model's cuts; None to read
            --deepspeed_config. Called on every rank.
        schedule: See `run.Workload`.
        finish: Takes the model and the folder of --save once that is written; called on every rank.
        on_step: See `run.Workload`.

    Raises:
        PipecompError: On every rank, if one has an error.
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
            require(end is not None, "--tokenizer", args.tokenizer, "a tokenizer with an end-of-text token (eos_token)")
        model, config = load(args, tokenizer)
        size = text.block_size(args, config)
        if samples is not None:
            training, held_out, collate, padding = samples(args, tokenizer, size, config.vocab_size)
        else:
            blocks = partial(text.blocks, tokenizer, size=size, vocabulary=config.vocab_size, end=end)
            training = blocks(training_texts)
            held_out = None if held_out_texts is None else blocks(held_out_texts, what="held-out text")
            collate, padding = default_collate, None
        trained = what_is_trained(
            args, {"--block-size": size, DATA: training.digest(), **meanings(args, model)}, config
        )
    ranks.assert_same_on_all_ranks(data_facts(training, held_out))
    ds_config, cuts = None, None
    if configure is not None:
        planned = config if getattr(model, "adapter", None) is None else model
        ds_config, cuts = configure(args, planned, size, len(training))
    run.train(
        args,
        run.Workload(
            model=model,
            training=training,
            trained=trained,
            held_out=held_out,
            collate=collate,
            padding=padding,
            derived=perplexity,
            measures=("loss", "perplexity"),
            tokenizer=tokenizer,
            cuts=cuts,
            config=ds_config,
            schedule=schedule,
            on_step=on_step,
        ),
    )
    if finish is not None:
        finish(model, args.save)


def perplexity(loss: float) -> dict[str, float]:
    """Return the perplexity of a mean loss in nats per token."""
    return {"perplexity": math.exp(loss) if loss < 700 else math.inf}


# -- documents


def add_document_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of recipes for documents."""
    parser.add_argument(
        "--field",
        default="abstract",
        metavar="NAME",
        help="key of the text in JSON lines, or column of --dataset (default abstract)",
    )


def read_documents(args: argparse.Namespace, *, join: bool = False) -> tuple[Texts, Texts | None]:
    """Read the documents of --train-file and --eval-file, or of --dataset.

    Args:
        args: The recipe's arguments.
        join: Make one space of each run of white space, line ends included.

    Returns:
        Training documents, and held-out documents or None.

    Raises:
        ConfigError: If there is no such dataset.
        DataError: If the dataset or a file is wrong.
    """

    def of_splits(splits: tuple[str, ...]) -> Texts:
        return _documents(text.dataset_split(args.dataset, splits, (args.field,))[args.field], join)

    return text.read_sources(args, lambda path: documents_of(path, args.field, join=join), of_splits)


def is_json_lines(path: str) -> bool:
    """Return whether a file's suffix is that of JSON lines."""
    return path.lower().endswith((".jsonl", ".json"))


def documents_of(path: str, field: str, *, join: bool = False) -> Texts:
    """Read the documents of a file as they are. Those of white space only are dropped.

    Args:
        path: A text with a document per line, or a .jsonl or .json file with an object or a string per line.
        field: The document's key in an object.
        join: Make one space of each run of white space.

    Raises:
        DataError: If a line is wrong; the error names file and line.
    """
    if not is_json_lines(path):
        return _documents((line.removesuffix("\n") for line in text.read_lines(path)), join)
    documents = []
    for values, where in DataSource(path, JSON).records():
        document = values.get(field)
        if set(values) == {"text"} and field not in values:
            document = values["text"]  # a line with a string
        if not isinstance(document, str):
            missing = field not in values
            has = f"the keys {', '.join(values)}" if missing else f"a value of type {type(document).__name__}"
            raise DataError(f"{where}: has {has}; needed: an object with a text under {field!r}")
        documents.append(document)
    return _documents(documents, join)


def _documents(texts: Iterable[str], join: bool) -> Texts:
    return [" ".join(document.split()) if join else document for document in texts if document.strip()]
