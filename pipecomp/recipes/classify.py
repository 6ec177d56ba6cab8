"""Classification of sentences and pairs of sentences: files, samples, collation, evaluation.

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

from pipecomp.data.sources import read_text
from pipecomp.errors import DataError, require
from pipecomp.recipes.text import check_sources, dataset_split, read_sources

LABEL = "label"


@dataclass(frozen=True, kw_only=True)
class ClassificationTask:
    """A classification task and the format of its files.

    Attributes:
        texts: Columns with text, one or two, besides the column "label".
        labels: Names of the classes; files and datasets may have class numbers instead.
        max_tokens: Longest sample, special tokens included.
        columns: The columns of a file without a header line.
    """

    texts: tuple[str, ...]
    labels: tuple[str, ...]
    max_tokens: int
    columns: tuple[str, ...] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns that a file or a dataset must have."""
        return (*self.texts, LABEL)


class Row(NamedTuple):
    """One sample before tokenization: its texts and the number of its class."""

    texts: tuple[str, ...]
    label: int


QNLI = ClassificationTask(texts=("question", "sentence"), labels=("entailment", "not_entailment"), max_tokens=256)
COLA = ClassificationTask(
    texts=("sentence",),
    labels=("unacceptable", "acceptable"),
    max_tokens=128,
    columns=("source", LABEL, "mark", "sentence"),
)


def add_arguments(parser: argparse.ArgumentParser, task: ClassificationTask) -> None:
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
    """Raise ConfigError for arguments that are wrong regardless of data and model."""
    require(args.max_tokens >= 4, "--max-tokens", args.max_tokens, "a whole number of at least 4")
    check_sources(args)


# -- rows


def read(args: argparse.Namespace, task: ClassificationTask) -> tuple[list[Row], list[Row] | None]:
    """Read training and held-out samples; see `text.read_sources`."""
    return read_sources(
        args, lambda path: read_rows(path, task), lambda splits: dataset_rows(args.dataset, splits, task)
    )


def read_rows(path: str, task: ClassificationTask) -> list[Row]:
    """Read the samples of a TSV file: one per line, columns separated by tabs, quotes not interpreted.

    Args:
        path: The file. Its first line names the columns, unless the task does.
        task: The classification task.

    Raises:
        DataError: If a line is wrong; the error has its number.
    """
    lines = read_text(path, nul=True).replace("\r\n", "\n").split("\n")
    names = tuple(lines[0].split("\t"))
    named = set(task.needed) <= set(names)
    if not named and not task.columns:
        needed = ", ".join(task.needed)
        raise DataError(f"{path}: line 1 must name the columns, separated by tabs; needed: {needed}")
    columns = names if named else task.columns
    indices = [columns.index(name) for name in task.texts]
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
        rows.append(Row(tuple(fields[index] for index in indices), label))
    if not rows:
        raise DataError(f"{path} has no samples")
    return rows


def dataset_rows(name: str, splits: tuple[str, ...], task: ClassificationTask) -> list[Row]:
    """Read the samples of a dataset.

    Args:
        name: For `datasets.load_dataset`, NAME or NAME:CONFIG.
        splits: The first one that exists is read.
        task: The classification task.

    Raises:
        ConfigError: If there is no such dataset.
        DataError: If a sample is wrong.
    """
    split = dataset_split(name, splits, task.needed)
    texts = zip(*(split[column] for column in task.texts), strict=True)
    return [
        Row(tuple(row), _label(str(label), task, f"dataset {name}, sample {number}"))
        for number, (row, label) in enumerate(zip(texts, split[LABEL], strict=True))
    ]


def _label(text: str, task: ClassificationTask, where: str) -> int:
    numbers = [str(number) for number in range(len(task.labels))]
    for known in (task.labels, numbers):
        if text in known:
            return known.index(text)
    raise DataError(f"{where}: label {text!r}, allowed: {', '.join((*task.labels, *numbers))}")


# -- samples


class ClassificationSamples(torch.utils.data.Dataset):
    """Tokenized rows without padding: lists input_ids and, with `types`, token_type_ids, and a number labels."""

    def __init__(self, tokenizer: Any, rows: Sequence[Row], max_tokens: int, *, vocabulary: int, types: bool) -> None:
        """Tokenize rows.

        Args:
            tokenizer: The model's tokenizer.
            rows: The rows.
            max_tokens: Longer samples are truncated.
            vocabulary: The size of the model's vocabulary.
            types: Make token_type_ids, by which the model distinguishes two texts.

        Raises:
            DataError: If a token is not in the model's vocabulary.
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
                f"the tokenizer makes token {largest}, the model's vocabulary has {vocabulary}: they do not match"
            )

    def __len__(self) -> int:
        return len(self._fields["labels"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {key: values[index] for key, values in self._fields.items()}

    def lengths(self) -> list[int]:
        """Count the tokens of each sample."""
        return [len(ids) for ids in self._fields["input_ids"]]

    def digest(self) -> str:
        """Return a short hash of all samples."""
        return hashlib.sha256(repr(sorted(self._fields.items())).encode()).hexdigest()[:16]


class Padding:
    """A collator: int64 [B, S] padded on the right, attention_mask 1 for real tokens, labels [B]."""

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


def compute_metrics(predicted: Any) -> dict[str, float]:
    """Compute accuracy and Matthews correlation, for `PipelineTrainer`.

    Args:
        predicted: transformers' EvalPrediction, logits [N, C] and labels [N].
    """
    logits_NC, labels_N = torch.as_tensor(predicted.predictions), torch.as_tensor(predicted.label_ids)
    found = scores(counts(logits_NC, labels_N, torch.zeros(())).tolist())
    return {name: found[name] for name in ("accuracy", "matthews")}


def counts(logits_BC: Tensor, labels_B: Tensor, mean_loss: Tensor) -> Tensor:
    """Count one micro-batch's predictions. Sums of these counts are the input of `scores`.

    Args:
        logits_BC: Floating point.
        labels_B: int64.
        mean_loss: Mean loss of the micro-batch in nats.

    Returns:
        float64 [1 + C * C]: the sum of losses, then the confusion matrix, a row for each true class.
    """
    labels_B, classes = labels_B.to(logits_BC.device), logits_BC.shape[-1]
    confusion = torch.bincount(labels_B * classes + logits_BC.argmax(-1), minlength=classes * classes)
    return torch.cat([mean_loss.double().reshape(1) * len(labels_B), confusion.double()])


def scores(total: Sequence[float]) -> dict[str, float]:
    """Return mean loss in nats, accuracy, and Matthews correlation: 0 for random guesses, 1 without errors.

    With more classes than two it is the generalization of Gorodkin (2004). It is 0 if all samples, or all predictions,
    are of one class.

    Args:
        total: The sum of `counts`.
    """
    loss, *confusion = total
    classes = math.isqrt(len(confusion))
    by_class = [confusion[row * classes : (row + 1) * classes] for row in range(classes)]
    samples, right = sum(confusion), sum(by_class[c][c] for c in range(classes))
    true, guessed = [sum(row) for row in by_class], [sum(column) for column in zip(*by_class, strict=True)]
    covariance = right * samples - sum(t * g for t, g in zip(true, guessed, strict=True))
    spread = [samples**2 - sum(x * x for x in totals) for totals in (true, guessed)]
    matthews = covariance / math.sqrt(spread[0] * spread[1]) if spread[0] and spread[1] else 0.0
    return {"loss": loss / samples, "accuracy": right / samples, "matthews": matthews}
