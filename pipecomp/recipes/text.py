"""Language modelling on text: tokenizers, blocks of consecutive tokens, models with and without weights.

N blocks, S tokens in a block.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Iterable
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipecomp.data.sources import hub_errors, read_text
from pipecomp.distributed.collectives import broadcast
from pipecomp.errors import DataError, require

T = TypeVar("T")
END_OF_TEXT = "<|endoftext|>"
TINY = {"n_embd": 128, "n_layer": 4, "n_head": 4}
MAX_BLOCK = 1024
_LINES_AT_ONCE = 1000  # tokenization needs more than a hundred bytes of memory per token
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of language modelling to a recipe's."""
    parser.add_argument(
        "--block-size",
        type=int,
        metavar="S",
        help=f"tokens per sample (default: the model's maximum, at most {MAX_BLOCK})",
    )
    parser.add_argument(
        "--dropout", type=float, metavar="P", help="dropout of embeddings, attention and blocks (default: the model's)"
    )


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ConfigError for arguments that are wrong regardless of data and model."""
    require(
        args.block_size is None or args.block_size >= 2, "--block-size", args.block_size, "a whole number of at least 2"
    )
    check_sources(args)


def check_sources(args: argparse.Namespace) -> None:
    """Raise ConfigError if --dropout is wrong, or there is not exactly one source of training data."""
    require(args.dropout is None or 0 <= args.dropout < 1, "--dropout", args.dropout, "a number from 0 to below 1")
    check_one_source(args)


def check_one_source(args: argparse.Namespace) -> None:
    """Raise ConfigError unless data come either from files or from a dataset, whose own split is held out."""
    require(
        (args.train_file is None) != (args.dataset is None),
        "--train-file",
        args.train_file,
        "either --train-file or --dataset",
    )
    require(
        args.dataset is None or args.eval_file is None,
        "--eval-file",
        args.eval_file,
        "only with --train-file; --dataset has its own split",
    )


# -- text


def read_sources(
    args: argparse.Namespace, of_file: Callable[[str], list[T]], of_splits: Callable[[tuple[str, ...]], list[T]]
) -> tuple[list[T], list[T] | None]:
    """Read the samples of --train-file and --eval-file, or of --dataset.

    Args:
        args: The recipe's arguments.
        of_file: Reads a file.
        of_splits: Reads the first of these splits that the dataset has.

    Returns:
        Training samples in the order of the files, and held-out samples or None.
    """
    if args.dataset is not None:
        return of_splits(("train",)), of_splits(("validation", "test"))
    training = list(chain.from_iterable(map(of_file, args.train_file)))
    return training, None if args.eval_file is None else of_file(args.eval_file)


def read(args: argparse.Namespace) -> tuple[list[str], list[str] | None]:
    """Read training and held-out text as lines with their line ends; see `read_sources`.

    A training file that does not end with a line end gets one if another file follows.
    """
    last = args.train_file[-1] if args.train_file else None

    def of_file(path: str) -> list[str]:
        lines = read_lines(path)
        if path not in (last, args.eval_file) and lines and not lines[-1].endswith("\n"):
            lines[-1] += "\n"
        return lines

    return read_sources(args, of_file, lambda splits: _dataset_lines(args.dataset, splits))


def read_lines(path: str) -> list[str]:
    """Read the lines of a UTF-8 text file; each ends with LF, also where the file has CR LF. Raises DataError."""
    lines = read_text(path).replace("\r\n", "\n").split("\n")
    return [*(f"{line}\n" for line in lines[:-1]), *lines[-1:]] if lines[-1] else [f"{line}\n" for line in lines[:-1]]


def _dataset_lines(name: str, splits: tuple[str, ...]) -> list[str]:
    texts = dataset_split(name, splits, ("text",))["text"]
    return [line if line.endswith("\n") else line + "\n" for line in texts]


def dataset_split(name: str, splits: tuple[str, ...], columns: tuple[str, ...]) -> Any:
    """Load the first of these splits that a dataset has.

    Args:
        name: For `datasets.load_dataset`, NAME or NAME:CONFIG.
        splits: In order of preference.
        columns: Required columns.

    Raises:
        ConfigError: If there is no such dataset.
        DataError: If it lacks a column, or all of the splits.
    """
    path, _, config = name.partition(":")
    with hub_errors("--dataset", name):
        from datasets import load_dataset

        dataset = load_dataset(path, config or None)
    split = next((split for split in splits if split in dataset), None)
    if split is None:
        raise DataError(f"dataset {name} has the splits {', '.join(sorted(dataset))}; needed: {' or '.join(splits)}")
    names = dataset[split].column_names
    if not set(columns) <= set(names):
        raise DataError(f"dataset {name} has the columns {', '.join(names)}; needed: {', '.join(columns)}")
    return dataset[split]


class Blocks(torch.utils.data.Dataset):
    """Samples of S consecutive tokens, as input_ids and labels int64 [S]. Sample i is always the i-th block."""

    def __init__(self, tokens: Tensor, size: int, what: str = "text") -> None:
        """Cut tokens into blocks.

        Args:
            tokens: int32 [any]; tokens that do not fill the last block are dropped.
            size: Tokens of a block.
            what: Name of the text, for the error.

        Raises:
            DataError: If no block is full.
        """
        count = len(tokens) // size
        if count == 0:
            raise DataError(f"the {what} has {len(tokens)} tokens, too few for one block of {size}")
        self.tokens_NS = tokens[: count * size].view(count, size)

    def __len__(self) -> int:
        return len(self.tokens_NS)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens_S = self.tokens_NS[index].long()
        return {"input_ids": tokens_S, "labels": tokens_S}

    def digest(self) -> str:
        """Return a short hash of all blocks."""
        return hashlib.sha256(self.tokens_NS.numpy().tobytes()).hexdigest()[:16]


def blocks(
    tokenizer: Any, lines: Iterable[str], size: int, *, vocabulary: int, end: int | None = None, what: str = "text"
) -> Blocks:
    """Tokenize lines as one stream, cut into blocks.

    Args:
        tokenizer: The model's tokenizer.
        lines: The text.
        size: Tokens of a block.
        vocabulary: The size of the model's vocabulary.
        end: A token to append to each line.
        what: Name of the text, for errors.

    Raises:
        DataError: If a token is not in the model's vocabulary, or the text does not fill one block.
    """
    parts, rest = [torch.empty(0, dtype=torch.int32)], iter(lines)
    while some := list(islice(rest, _LINES_AT_ONCE)):
        encoded = tokenizer(some, add_special_tokens=False)["input_ids"]
        if end is not None:
            encoded = [[*tokens, end] for tokens in encoded]
        parts.append(torch.tensor(list(chain.from_iterable(encoded)), dtype=torch.int32))
    tokens = torch.cat(parts)
    if len(tokens) and int(tokens.max()) >= vocabulary:
        raise DataError(
            f"the tokenizer makes token {int(tokens.max())}, the model's vocabulary has {vocabulary}: they do not match"
        )
    return Blocks(tokens, size, what)


# -- tokenizers


def load_tokenizer(name: str, lines: list[str]) -> Any:
    """Load a tokenizer, or train one.

    Args:
        name: A folder (GPT-2's vocab.json and merges.txt are enough) or a hub name. "train:V" trains a byte-level BPE
            of at most V tokens on rank 0 and broadcasts it; then every rank must call this.
        lines: Training text.

    Raises:
        ConfigError: If there is no such tokenizer.
    """
    import transformers

    if name.startswith("train:"):
        made = train_for_all_ranks(name, lines, 257, _train_bytes)
        return transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)

    folder = Path(name)
    bare = (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()
    described = any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json", "config.json"))
    loader = transformers.GPT2Tokenizer if bare and not described else transformers.AutoTokenizer
    with hub_errors("--tokenizer", name):
        tokenizer = loader.from_pretrained(name)
    check_tokenizer(name, tokenizer)
    tokenizer.model_max_length = 10**9  # no warning about long texts, which are cut into blocks
    return tokenizer


def check_tokenizer(name: str, tokenizer: Any) -> None:
    """Raise ConfigError for a tokenizer with only special tokens, which transformers makes if files are missing."""
    files = "a folder or hub name with a tokenizer's files; this tokenizer has only special tokens"
    require(len(tokenizer) > len(set(tokenizer.all_special_ids)), "--tokenizer", name, files)


def train_for_all_ranks(name: str, texts: list[str], least: int, train: Callable[[list[str], int], Any]) -> Any:
    """Train a `tokenizers` tokenizer on rank 0 and broadcast it. Every rank must call this.

    Args:
        name: "train:V" for at most V tokens.
        texts: Training texts.
        least: The smallest possible V.
        train: Trains a tokenizer, given texts and V.

    Raises:
        ConfigError: If V is too small or not a number.
    """
    from tokenizers import Tokenizer

    size = name.removeprefix("train:")
    fits = size.isdecimal() and len(size) < 10 and int(size) >= least  # tokens are int32
    require(fits, "--tokenizer", name, f"'train:V' with V of at least {least}: all bytes and the special tokens")
    made = train(texts, int(size)).to_str() if dist.get_rank() == 0 else None
    return Tokenizer.from_str(broadcast(made))


def _train_bytes(texts: list[str], vocabulary: int) -> Any:
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts, vocab_size=vocabulary, min_frequency=2, special_tokens=[END_OF_TEXT], show_progress=False
    )
    return bpe


# -- models


def causal_model(args: argparse.Namespace, tokenizer: Any) -> tuple[Any, Any]:
    """Return the model of `--model`, as `pipecomp.initialize` takes it, and its config.

    "tiny" is a GPT-2 of 4 blocks and width 128 with random weights, without dropout, with the tokenizer's vocabulary. A
    .json file is the config of a model with random weights. Other names are from_pretrained folders or hub names.
    `--dropout` replaces the model's own.

    Args:
        args: The recipe's arguments.
        tokenizer: For the vocabulary of "tiny".

    Raises:
        ConfigError: If there is no such model, or it does not support `--dropout`.
    """
    from transformers import GPT2Config

    from pipecomp.stages import pretrained
    from pipecomp.stages.partition.loading import resolve

    name = args.model
    settings = {} if args.dropout is None else dict.fromkeys(DROPOUTS, args.dropout)
    if name == "tiny":
        end = tokenizer.eos_token_id
        config = GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=args.block_size or 128,
            bos_token_id=end,
            eos_token_id=end,
            **{**TINY, **dict.fromkeys(DROPOUTS, 0.0), **settings},
        )
        return resolve(config), config
    config = model_config(name)
    check_dropout(args, settings, config)
    if name.endswith(".json"):
        for key, value in settings.items():
            setattr(config, key, value)
        return resolve(config), config
    if not settings:
        return name, config
    source = pretrained(name, **settings)
    source.config.dtype = torch.float32  # as initialize does for a name; mixed-precision engines cast the weights
    return source, config


def check_dropout(args: argparse.Namespace, settings: Iterable[str], config: Any) -> None:
    """Raise ConfigError if `--dropout` is set and the model's config lacks one of these settings."""
    for key in settings:
        allowed = f"only with a model that has {key}, not {config.model_type}"
        require(hasattr(config, key), "--dropout", args.dropout, allowed)


def model_config(name: str) -> Any:
    """Return the config of a causal language model from a folder, a .json file or a hub name.

    Raises ConfigError if there is none, or the model is not a causal language model.
    """
    from transformers import AutoConfig

    from pipecomp.stages.partition.architectures import architecture_of
    from pipecomp.stages.partition.losses import causal_lm

    with hub_errors("--model", name):
        config = AutoConfig.from_pretrained(name)
    architecture = architecture_of(config)
    kind = (config.architectures or [architecture.default_head])[0]
    head = architecture.heads.get(kind)
    require(head is None or head.loss is causal_lm, "--model", f"{name}, a {kind}", "a causal language model")
    return config


def block_size(args: argparse.Namespace, config: Any) -> int:
    """Return the tokens of a sample: --block-size or the model's maximum. Raises ConfigError if the maximum is less."""
    positions = int(getattr(config, "max_position_embeddings", MAX_BLOCK))
    size: int = args.block_size or min(positions, MAX_BLOCK)
    require(size <= positions, "--block-size", size, f"at most {positions}, the positions of the model")
    return size
