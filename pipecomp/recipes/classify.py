"""Classification of sentences and of pairs of sentences: files, samples without padding, what held-out data show.

B micro-batch, S tokens of its longest sample, C classes.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipecomp.distributed.collectives import broadcast
from pipecomp.errors import DataError, require
from pipecomp.interfaces import TrainingEngine
from pipecomp.recipes.text import check_sources, dataset_split, read_sources, read_text

LABEL = "label"


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is classified, and the form of its files.

    Attributes:
        texts: Columns with text, one or two; the column "label" is added to them.
        labels: Names of the classes; files and datasets may have their numbers instead.
        max_tokens: Of a sample, special tokens included.
        columns: Those of a file whose first line does not name them.
    """

    texts: tuple[str, ...]
    labels: tuple[str, ...]
    max_tokens: int
    columns: tuple[str, ...] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        """Name the columns that a file or a dataset must have."""
        return (*self.texts, LABEL)


class Row(NamedTuple):
    """One sample as it was read: its texts, as many as the task has, and the number of its class."""

    texts: tuple[str, ...]
    label: int


QNLI = Task(texts=("question", "sentence"), labels=("entailment", "not_entailment"), max_tokens=256)
COLA = Task(
    texts=("sentence",),
    labels=("unacceptable", "acceptable"),
    max_tokens=128,
    columns=("source", LABEL, "mark", "sentence"),
)


def add_arguments(parser: argparse.ArgumentParser, task: Task) -> None:
    """Add the arguments of classification to a recipe's."""
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=task.max_tokens,
        metavar="S",
        help=f"longer samples are truncated to this many tokens (default {task.max_tokens})",
    )
    parser.add_argument(
        "--dropout", type=float, metavar="P", help="dropout of embeddings, attention and blocks (default: the model's)"
    )


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ConfigError for what can be seen without reading anything."""
    require(args.max_tokens >= 4, "--max-tokens", args.max_tokens, "a whole number of at least 4")
    check_sources(args)


# -- rows


def read(args: argparse.Namespace, task: Task) -> tuple[list[Row], list[Row] | None]:
    """Read training and held-out samples; see `text.read_sources`."""
    return read_sources(
        args, lambda path: read_rows(path, task), lambda splits: dataset_rows(args.dataset, splits, task)
    )


def read_rows(path: str, task: Task) -> list[Row]:
    """Read the samples of a TSV file: one per line, tabs between columns, quotes without a meaning.

    Args:
        path: Its first line names the columns, or they are the task's.
        task: What is classified.

    Raises:
        DataError: With the number of a line that is wrong.
    """
    lines = read_text(path).split("\n")  # splitlines() ends lines at U+2028 too
    names = tuple(lines[0].split("\t"))
    named = set(task.needed) <= set(names)
    if not named and not task.columns:
        needed = ", ".join(task.needed)
        raise DataError(f"{path}, line 1 must name the columns with tabs between them; needed: {needed}")
    columns = names if named else task.columns
    places = [columns.index(name) for name in task.texts]
    rows = []
    for number, line in enumerate(lines, 1):
        if (named and number == 1) or not line:
            continue
        fields = line.split("\t")
        if len(fields) != len(columns):
            raise DataError(
                f"{path}, line {number} has {len(fields)} columns, not {len(columns)}: {', '.join(columns)}"
            )
        label = _label(fields[columns.index(LABEL)], task, f"{path}, line {number}")
        rows.append(Row(tuple(fields[place] for place in places), label))
    if not rows:
        raise DataError(f"{path} has no samples")
    return rows


def dataset_rows(name: str, splits: tuple[str, ...], task: Task) -> list[Row]:
    """Read the samples of a dataset.

    Args:
        name: For `datasets.load_dataset`, NAME or NAME:CONFIG.
        splits: The first one that it has is taken.
        task: What is classified.

    Raises:
        ConfigError: If there is no such dataset.
        DataError: For what is in it.
    """
    found = dataset_split(name, splits, task.needed)
    texts = zip(*(found[column] for column in task.texts), strict=True)
    return [
        Row(tuple(row), _label(str(label), task, f"dataset {name}, sample {number}"))
        for number, (row, label) in enumerate(zip(texts, found[LABEL], strict=True))
    ]


def _label(text: str, task: Task, where: str) -> int:
    numbers = [str(number) for number in range(len(task.labels))]
    for known in (task.labels, numbers):
        if text in known:
            return known.index(text)
    raise DataError(f"{where}: label {text!r}, allowed: {', '.join((*task.labels, *numbers))}")


# -- samples


class Samples(torch.utils.data.Dataset):
    """Tokenized rows, each as long as it is: input_ids and, with `types`, token_type_ids as lists, labels a number."""

    def __init__(self, tokenizer: Any, rows: Sequence[Row], max_tokens: int, *, vocabulary: int, types: bool) -> None:
        """Tokenize rows.

        Args:
            tokenizer: The model's.
            rows: What to tokenize.
            max_tokens: Longer samples are truncated.
            vocabulary: Tokens that the model knows.
            types: Whether the model tells the two texts apart by token_type_ids.

        Raises:
            DataError: If the tokenizer makes tokens that the model does not know.
        """
        columns = list(zip(*(row.texts for row in rows), strict=True))
        encoded = tokenizer(
            *(list(column) for column in columns),
            truncation="longest_first",
            max_length=max_tokens,
            padding=False,
            return_attention_mask=False,
            return_token_type_ids=types,
        )
        self._fields = {key: encoded[key] for key in ("input_ids", "token_type_ids") if key in encoded}
        self._fields["labels"] = [row.label for row in rows]
        largest = max(map(max, self._fields["input_ids"]))
        if largest >= vocabulary:
            raise DataError(
                f"the tokenizer makes token {largest}, the model knows {vocabulary}: they do not belong together"
            )

    def __len__(self) -> int:
        return len(self._fields["labels"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {key: values[index] for key, values in self._fields.items()}

    def lengths(self) -> list[int]:
        """Count the tokens of each sample."""
        return [len(ids) for ids in self._fields["input_ids"]]

    def digest(self) -> str:
        """Give a short hash of all samples."""
        return hashlib.sha256(repr(sorted(self._fields.items())).encode()).hexdigest()[:16]


class Padding:
    """Collates samples to int64 [B, S], padded on the right; attention_mask is 1 on real tokens, labels are [B]."""

    def __init__(self, pad_token_id: int) -> None:
        self._fill = {"input_ids": pad_token_id, "token_type_ids": 0}

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Collate samples."""
        counts = [len(sample["input_ids"]) for sample in samples]
        longest = max(counts)
        batch = {
            key: torch.tensor([sample[key] + [fill] * (longest - len(sample[key])) for sample in samples])
            for key, fill in self._fill.items()
            if key in samples[0]
        }
        batch["attention_mask"] = torch.tensor([[1] * count + [0] * (longest - count) for count in counts])
        batch["labels"] = torch.tensor([sample["labels"] for sample in samples])
        return batch


# -- evaluation


def evaluate(engine: TrainingEngine, batches: list) -> dict[str, float]:
    """Evaluate held-out data on every replica.

    Args:
        engine: What to evaluate.
        batches: From `eval_batches`.

    Returns:
        Loss, accuracy and Matthews correlation over all samples, the same on every rank.
    """
    mean_loss = engine.module.loss_fn

    def judge(logits_BC: Tensor, labels_B: Tensor | None) -> Tensor:
        assert labels_B is not None, "Padding makes them"
        return counts(logits_BC, labels_B, mean_loss(logits_BC, labels_B))

    found = engine.eval_batch(iter(batches), num_micro_batches=len(batches), on_logits=judge)
    total = torch.stack(found).sum(0).tolist() if engine.is_last_stage() else None
    return scores(broadcast(total, engine.grid._topo.get_rank(pipe=engine.num_stages - 1, data=0)))


def counts(logits_BC: Tensor, labels_B: Tensor, mean_loss: Tensor) -> Tensor:
    """Return what `scores` needs of one micro-batch, to be added up.

    Args:
        logits_BC: Floating point.
        labels_B: int64.
        mean_loss: Of the micro-batch, in nats.

    Returns:
        float64 [1 + C * C]: the sum of losses, then for each true class how often each class was predicted.
    """
    labels_B, classes = labels_B.to(logits_BC.device), logits_BC.shape[-1]
    said = torch.bincount(labels_B * classes + logits_BC.argmax(-1), minlength=classes * classes)
    return torch.cat([mean_loss.double().reshape(1) * len(labels_B), said.double()])


def scores(total: Sequence[float]) -> dict[str, float]:
    """Return mean loss in nats, accuracy, and Matthews correlation: 0 for guessing, 1 for no mistake.

    With more than two classes it is the correlation of Gorodkin (2004), which is the same for two; it is 0 where all
    samples are, or are predicted to be, of one class.

    Args:
        total: The sum of `counts`.
    """
    loss, *said = total
    classes = math.isqrt(len(said))
    by_class = [said[row * classes : (row + 1) * classes] for row in range(classes)]
    samples, right = sum(said), sum(by_class[c][c] for c in range(classes))
    true, guessed = [sum(row) for row in by_class], [sum(column) for column in zip(*by_class, strict=True)]
    covariance = right * samples - sum(t * g for t, g in zip(true, guessed, strict=True))
    spread = [samples**2 - sum(x * x for x in found) for found in (true, guessed)]
    matthews = covariance / math.sqrt(spread[0] * spread[1]) if spread[0] and spread[1] else 0.0
    return {"loss": loss / samples, "accuracy": right / samples, "matthews": matthews}
