"""The page and the picture of `throughput.py`."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipecomp.bench.bf16 import cpu_multiplies_bf16
from pipecomp.bench.configurations import (
    COARSE,
    LINES,
    REPLICAS,
    SIXTEEN,
    STOCK,
    TWICE,
    UNTHROTTLED,
    Line,
    Model,
    message_bytes,
)
from pipecomp.bench.pipeline import summary

Row = dict[str, Any]
HEADINGS = ("line", "s", "least", "most", "× DeepSpeed FP32", "of its own unthrottled", "MB a step", "in flight")


def summaries(runs: Sequence[Row]) -> dict[tuple[str, float, str], Row]:
    """By setting, r and line: all rounds together."""
    rounds: dict[tuple[str, float, str], list[Row]] = {}
    for run in sorted(runs, key=lambda run: run["turn"]):
        rounds.setdefault((run["setting"], run["r"], run["line"]), []).append(run)
    return {key: {**summary(found), "rounds": len(found)} for key, found in rounds.items()}


def real_r(row: Row, rows: dict[tuple[str, float, str], Row]) -> float:
    """r of a row's link, by what its stages computed on a micro-batch in the median line without a limit.

    Links are set before most lines have run, by a single run, and a machine's speed changes.
    """
    in_float32 = {line.name for line in LINES if line.dtype == "fp32"}
    seconds = [
        free["compute_s"] * free["micro_batches"] / 8
        for (setting, r, name), free in rows.items()
        if (setting, r) == (f"{row['stages']} stages", UNTHROTTLED) and name in in_float32 and free["compute_s"]
    ]
    return 8 * message_bytes(Model()) / (row["bits_per_s"] * statistics.median(seconds))


def write_report(folder: Path, runs: Sequence[Row], settings: Sequence[str], lines: Sequence[Line]) -> None:
    """Write throughput.md and throughput.png."""
    import torch

    rows = summaries(runs)
    against = {line.name: line.against for line in lines}
    page = [
        "# Training steps over slow links",
        "",
        f"`python benchmarks/throughput.py`, on {os.cpu_count()} cores ({platform.machine()}, no GPU), torch "
        f"{torch.__version__}.",
        "",
        "GPT-2 of 4 blocks, width 512, 256 tokens, a vocabulary of 512 (so that stages take about equally long); 16 "
        "samples a step in 8 micro-batches, or 16 where the line says so. Each stage is a process with one thread in a "
        "network namespace of its own; links are shaped by the kernel (`tbf`). r: the time that a micro-batch's "
        "float32 messages take, both ways, over the time a stage computes on it, the median of all lines without a "
        'limit that compute in float32. s: median step; "MB a step": on all '
        "interfaces. Stock DeepSpeed is 0.19.8's own pipeline engine."
        + (
            ""
            if cpu_multiplies_bf16()
            else " This processor has no BF16 products: lines in BF16, stock DeepSpeed's "
            "too, compute them in float32 and round (`pipecomp/bench/bf16.py`)."
        ),
        "",
        "![steps a second over the link's rate](throughput.png)",
        "",
        "## How many times faster than stock DeepSpeed FP32 at the same link",
        "",
        *(f"- {text}" for text in findings(rows)),
        "",
        "Differences of a few percent, and the first two of these with links set anew, are in [paired.md](paired.md), "
        "where lines take turns step by step: here a line runs alone, and the machine's speed changes by more than "
        "that from one run to the next.",
    ]
    order = [line.name for line in lines]
    for setting in settings:
        for r in sorted({key[1] for key in rows if key[0] == setting}):
            mine = {key[2]: row for key, row in rows.items() if key[:2] == (setting, r)}
            link = "no limit" if r == UNTHROTTLED else _link(next(iter(mine.values())), rows)
            page += ["", f"### {setting}, {link}", "", f"| {' | '.join(HEADINGS)} |", "|" + "---|" * len(HEADINGS)]
            for name in sorted(mine, key=order.index):
                base = rows.get((setting, r, against[name])) or rows.get((setting.split(",")[0], r, against[name]))
                free = rows.get((setting, UNTHROTTLED, name)) or rows.get((setting.split(",")[0], UNTHROTTLED, name))
                page.append(_cells(name, mine[name], base, free))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "throughput.md").write_text("\n".join(page) + "\n")
    _draw(folder / "throughput.png", rows, order)


def _cells(name: str, row: Row, base: Row | None, free: Row | None) -> str:
    cells = [name, *(f"{row[key]:.2f}" for key in ("seconds", "least", "most"))]
    cells.append("" if base is None else f"{base['seconds'] / row['seconds']:.2f}")
    cells.append("" if free is None else f"{free['seconds'] / row['seconds']:.2f}")
    cells += [f"{row['bytes'] / 1e6:.1f}", "" if row["in_flight"] is None else str(row["in_flight"])]
    return f"| {' | '.join(cells)} |"


def findings(rows: dict[tuple[str, float, str], Row]) -> list[str]:
    """Each comparison for which both sides were measured."""
    two, twice = "2 stages", "2 stages, 2 replicas"
    every: list[tuple[str, tuple[str, float, str], tuple[str, float, str]]] = [
        (f"{SIXTEEN}, at {{}}: {{:.2f}} × (aim: 6 at r = 5.8).", (two, 5.8, STOCK), (two, 5.8, SIXTEEN)),
        (f"{COARSE}, at {{}}: {{:.2f}} × (aim: 10 at r = 12).", (two, 12.0, STOCK), (two, 12.0, COARSE)),
        (
            "2 × 2 replicas, 4-bit gradients, at {}: {:.2f} × (aim: 8 at r = 5.8).",
            (twice, 5.8, TWICE),
            (twice, 5.8, REPLICAS[4]),
        ),
        ("The same with 1-bit gradients, at {}: {:.2f} ×.", (twice, 5.8, TWICE), (twice, 5.8, REPLICAS[1])),
        (f"4 stages, {SIXTEEN}, at {{}}: {{:.2f}} ×.", ("4 stages", 5.8, STOCK), ("4 stages", 5.8, SIXTEEN)),
        ("The schedule by itself, FP32 at {}: {:.2f} ×.", (two, 5.8, STOCK), (two, 5.8, "FP32")),
        ("Stock DeepSpeed in BF16, at {}: {:.2f} ×.", (two, 5.8, STOCK), (two, 5.8, "DeepSpeed BF16")),
    ]
    return [
        text.format(_link(rows[one], rows), rows[one]["seconds"] / rows[other]["seconds"])
        for text, one, other in every
        if one in rows and other in rows
    ]


def _link(row: Row, rows: dict[tuple[str, float, str], Row]) -> str:
    return f"r = {real_r(row, rows):.2g} ({row['bits_per_s'] / 1e6:.1f} Mbit/s)"


def _draw(path: Path, rows: dict[tuple[str, float, str], Row], order: Sequence[str]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 5))
    names = [name for name in order if len({r for s, r, n in rows if (s, n) == ("2 stages", name)}) > 2]
    for name in names:
        points = sorted(
            (row["bits_per_s"] / 1e6, 1 / row["seconds"])
            for (setting, r, line), row in rows.items()
            if (setting, line) == ("2 stages", name) and r != UNTHROTTLED
        )
        line = axis.plot(*zip(*points, strict=True), marker="o", label=name)[0]
        free = rows.get(("2 stages", UNTHROTTLED, name))
        if free is not None:
            axis.axhline(1 / free["seconds"], color=line.get_color(), linewidth=0.5, linestyle=":")
    axis.set(xscale="log", xlabel="Mbit/s each way", ylabel="steps a second", ylim=(0, None))
    axis.set_title("2 stages; dotted: without a limit")
    if names:
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
