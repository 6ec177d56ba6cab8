"""The convergence benchmark's table: mean ± standard deviation over seeds, from the single runs."""

from __future__ import annotations

import math
import os
import platform
import statistics
from pathlib import Path
from typing import Any

import torch
import transformers
from convergence import BATCH, BITS, EPOCHS, LEARNING_RATE, MICRO_BATCH, WARM_UP
from wikitext import HELD_OUT, LENGTH, PRETRAINING, TRAINING, VOCABULARY

Run = dict[str, Any]
HEADINGS = (
    *("method", "K", "seeds", "training loss", "above FP32", "held-out loss"),
    *("forward sent", "after epoch 1", "backward sent", "stores MB"),
)


def write_report(folder: Path, runs: list[Run], order: list[str]) -> None:
    """Write convergence.md; `order`: the methods as they stand in the table."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = sorted(runs, key=lambda run: (order.index(run["method"]), -run["stages"], run["seed"]))
    (folder / "convergence.md").write_text("\n".join([*_head(runs), *_gaps(runs), *_table(runs)]) + "\n")


def _head(runs: list[Run]) -> list[str]:
    before = _spread([r["eval_loss_before"] for r in runs if r["method"] == "FP32"])
    seconds = statistics.mean(r["cpu_seconds"] for r in runs)
    return [
        "# Convergence with compressed links",
        "",
        f"`python benchmarks/convergence.py`, on {os.cpu_count()} cores ({platform.machine()}, no GPU), torch "
        f"{torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}; a run "
        f"takes one thread and {seconds:.0f} s of it.",
        "",
        f"GPT-2 with 8 layers, d = 128, 4 heads, {VOCABULARY} tokens (byte-level BPE) and no dropout, pre-trained once "
        f"per seed on {int(PRETRAINING['tokens']) // 1000}k tokens of WikiText-2's training text, then fine-tuned "
        f"{EPOCHS} epochs on {TRAINING} sequences of {LENGTH} tokens from articles of its validation text; held out: "
        f"{HELD_OUT} more sequences of these articles, on which the loss before fine-tuning is {before} (random "
        f"weights: {math.log(VOCABULARY):.2f}). AdamW, learning rate {LEARNING_RATE:g} with {WARM_UP} steps of warm-up "
        f"and linear decay, {BATCH} samples a step in micro-batches of {MICRO_BATCH}, gradients clipped at norm 1. A "
        "seed sets initial weights, pre-training data and order; all else is the same for all methods. The stages run "
        "in one process (`inprocess.py`) with the engine's losses, bit for bit (`tests/benchmarks/test_inprocess.py`); "
        "after every run the two ends of every link held the same messages.",
        "",
        "Training loss: mean over the last epoch. ± is the standard deviation over seeds, most of which is the seed's "
        "own pre-training; above FP32 is the mean of the differences to FP32 (to BF16 for BF16 training) with the same "
        "seed.",
        "",
    ]


def _gaps(runs: list[Run]) -> list[str]:
    """How much of what DirectQ loses AQ-SGD wins back."""
    lines = [
        "## The gap that AQ-SGD closes",
        "",
        "(DirectQ − AQ-SGD) / (DirectQ − FP32) of the means over seeds; in brackets the single seeds.",
        "",
        "| bits | K | seeds | training loss | held-out loss |",
        "|---|---|---|---|---|",
    ]
    exact = _losses(runs, "FP32")
    for stages in sorted({r["stages"] for r in runs}, reverse=True):
        for forward, backward in BITS:
            direct = _losses(runs, f"DirectQ fw{forward} bw{backward}", stages)
            delta = _losses(runs, f"AQ-SGD fw{forward} bw{backward}", stages)
            seeds = sorted(direct.keys() & delta.keys() & exact.keys())
            if seeds:
                columns = [[losses[s] for s in seeds] for losses in (direct, delta, exact)]
                shares = [_closed(*columns, which) for which in (0, 1)]
                lines.append(f"| fw{forward} bw{backward} | {stages} | {len(seeds)} | {shares[0]} | {shares[1]} |")
    return [*lines, ""]


def _closed(direct: list[tuple], delta: list[tuple], exact: list[tuple], which: int) -> str:
    d, a, e = ([pair[which] for pair in losses] for losses in (direct, delta, exact))
    single = ", ".join(f"{(x - y) / (x - z):.2f}" for x, y, z in zip(d, a, e, strict=True))
    return f"{(sum(d) - sum(a)) / (sum(d) - sum(e)):.3f} ({single})"


def _losses(runs: list[Run], method: str, stages: int | None = None) -> dict[int, tuple[float, float]]:
    return {
        run["seed"]: (run["train_loss"], run["eval_loss"])
        for run in runs
        if run["method"] == method and stages in (None, run["stages"])
    }


def _table(runs: list[Run]) -> list[str]:
    """One line per method and K. Bytes are those of training over all links."""
    lines = [
        "## All methods",
        "",
        "Sent: bytes of whole messages, headers and scales included, as a share of the values' bytes in the training "
        "dtype; forward over all epochs and without the first, in which samples are sent whole. FP32 is the same, bit "
        "for bit, for every K. Stores: all ends of all links together. Matrix products of BF16 training are computed "
        "in float32 and rounded (`pipecomp/bench/bf16.py`).",
        "",
        f"| {' | '.join(HEADINGS)} |",
        "|" + "---|" * len(HEADINGS),
    ]
    groups: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        groups.setdefault((run["method"], run["stages"]), []).append(run)
    for (method, stages), group in groups.items():
        reference = _losses(runs, "BF16" if method.startswith("BF16") else "FP32")
        above = [r["train_loss"] - reference[r["seed"]][0] for r in group if r["seed"] in reference]
        base = statistics.mean(reference[r["seed"]][0] for r in group if r["seed"] in reference) if above else 1.0
        share = (
            "–"
            if method in ("FP32", "BF16") or not above
            else (f"{statistics.mean(above):+.4f} ({100 * statistics.mean(above) / base:+.2f} %)")
        )
        first = group[0]
        cells = [
            method,
            "any" if method == "FP32" else str(stages),
            str(len(group)),
            _spread([r["train_loss"] for r in group]),
            share,
            _spread([r["eval_loss"] for r in group]),
            f"{100 * first['forward_bytes_sent'] / first['forward_bytes_raw']:.1f} %",
            f"{_after(first):.1f} %",
            f"{100 * first['backward_bytes_sent'] / first['backward_bytes_raw']:.1f} %",
            f"{first['store_bytes'] / 1e6:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _after(run: Run) -> float:
    return 100 * run["forward_bytes_sent_after_first_epoch"] / run["forward_bytes_raw_after_first_epoch"]


def _spread(values: list[float]) -> str:
    if not values:
        return "–"
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{deviation}"
