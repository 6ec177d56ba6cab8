"""The classification benchmark's tables: mean ± standard deviation over seeds, from the single runs."""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from classification import BATCH, EPOCHS, LEARNING_RATE, MICRO_BATCH
from classification_tasks import INSTALL, PARTS

Run = dict[str, Any]
METRICS = {"QNLI": "accuracy", "CoLA": "matthews"}
HEADINGS = (
    *("method", "K", "seeds", "{}", "beside FP32", "training loss", "above FP32", "held-out loss"),
    *("forward sent", "after epoch 1", "backward sent", "stores MB"),
)


def write_report(folder: Path, runs: list[Run], order: list[str]) -> None:
    """Write classification.md; `order`: the methods as they stand in the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = sorted(runs, key=lambda r: (r["task"] != "QNLI", order.index(r["method"]), r["stages"], r["seed"]))
    lines = _head(runs)
    for task in METRICS:
        of_task = [run for run in runs if run["task"] == task]
        if of_task:
            lines += _table(task, of_task)
    (folder / "classification.md").write_text("\n".join(lines) + "\n")


def _head(runs: list[Run]) -> list[str]:
    seconds = statistics.mean(r["cpu_seconds"] for r in runs)
    return [
        "# Classification with a pre-trained encoder over compressed links",
        "",
        f"`python benchmarks/classification.py` after `{INSTALL}`, on {os.cpu_count()} cores ({platform.machine()}, no "
        f"GPU), torch {torch.__version__}, transformers {transformers.__version__}, Python "
        f"{platform.python_version()}; a run takes one thread and {seconds:.0f} s of it.",
        "",
        "MiniLM (a BERT with 6 blocks of width 384, really pre-trained) with a new head, fine-tuned "
        f"{EPOCHS} epochs without dropout: AdamW, learning rate {LEARNING_RATE:g} with warm-up over a tenth of the "
        f"steps and linear decay, {BATCH} samples a step in micro-batches of {MICRO_BATCH}, each padded to its longest "
        "sample, gradients clipped at norm 1. A seed sets the head and the order of samples; all else is the same for "
        "all methods. The stages run in one process (`inprocess.py`) with the engine's arithmetic; after every run the "
        "two ends of every link held the same messages.",
        "",
        "± is the standard deviation over seeds. Beside and above FP32: mean of the differences to FP32 with the same "
        "seed. Training loss: mean over the last epoch. Sent: bytes of whole messages, headers and scales included, as "
        "a share of the float32 values of the real tokens; padding is never sent, nor kept. Forward over all epochs "
        "and without the first, in which samples are sent whole. FP32 does not depend on K.",
        "",
        "Held-out samples are judged without quantization: that is the model that is saved and used. With DirectQ it "
        'was trained on quantized activations, and loses by that difference too; the lines "judged quantized" are '
        "trained with the same settings and judged with DirectQ's quantization. AQ-SGD's messages approach the "
        "activations themselves: with it the difference vanishes.",
        "",
    ]


def _table(task: str, runs: list[Run]) -> list[str]:
    part, metric = PARTS[task], METRICS[task]
    tokens = runs[0]["real_tokens"]
    heading = "accuracy" if metric == "accuracy" else "Matthews correlation"
    lines = [
        f"## {task}",
        "",
        f"{part.training} training samples of at most {part.max_tokens} tokens ({tokens:,} tokens in all), "
        f"{part.held_out} held out: their choice alone moves the {heading} by {_noise(task, runs)} (standard error).",
        "",
        f"| {' | '.join(HEADINGS).format(heading)} |",
        "|" + "---|" * len(HEADINGS),
    ]
    exact = {run["seed"]: run for run in runs if run["method"] == "FP32"}
    groups: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        groups.setdefault((run["method"], run["stages"]), []).append(run)
    for (method, stages), group in groups.items():
        pairs = [(run, exact[run["seed"]]) for run in group if run["seed"] in exact]
        alone = method == "FP32" or not pairs
        first = group[0]
        cells = [
            method,
            "any" if method == "FP32" else str(stages),
            str(len(group)),
            _spread(run[metric] for run in group),
            "–" if alone else f"{statistics.mean(run[metric] - base[metric] for run, base in pairs):+.3f}",
            _spread(run["train_loss"] for run in group),
            "–" if alone else f"{statistics.mean(run['train_loss'] - base['train_loss'] for run, base in pairs):+.3f}",
            _spread(run["eval_loss"] for run in group),
            _share(first, "forward_bytes_{}"),
            _share(first, "forward_bytes_{}_after_first_epoch"),
            _share(first, "backward_bytes_{}"),
            f"{first['store_bytes'] / 1e6:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _noise(task: str, runs: list[Run]) -> str:
    """Standard error of the metric, at FP32's level, over the choice of held-out samples."""
    found = [run[METRICS[task]] for run in runs if run["method"] == "FP32"] or [0.0]
    level, n = statistics.mean(found), PARTS[task].held_out
    # Accuracy: binomial. Matthews correlation: that of a correlation of two signs, 1 - r², over n samples.
    variance = level * (1 - level) / n if METRICS[task] == "accuracy" else (1 - level**2) ** 2 / n
    return f"{math.sqrt(variance):.3f}"


def _share(run: Run, key: str) -> str:
    return f"{100 * run[key.format('sent')] / run[key.format('raw')]:.1f} %"


def _spread(values: Iterable[float]) -> str:
    found = list(values)
    deviation = f" ± {statistics.stdev(found):.3f}" if len(found) > 1 else ""
    return f"{statistics.mean(found):.3f}{deviation}"
