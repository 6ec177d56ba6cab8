"""The page and the picture of `throughput.py`."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipecomp.bench_lines import COARSE, REPLICAS, SIXTEEN, STOCK, TWICE, UNTHROTTLED, Line
from pipecomp.bench_pipeline import summary
from pipecomp.bf16_products import cpu_multiplies_bf16

Row = dict[str, Any]
HEADINGS = ("line", "s", "least", "most", "× DeepSpeed FP32", "of its own unthrottled", "MB a step", "in flight")


def summaries(runs: Sequence[Row]) -> dict[tuple[str, float, str], Row]:
    """By setting, r and line: all rounds together."""
    rounds: dict[tuple[str, float, str], list[Row]] = {}
    for run in sorted(runs, key=lambda run: run["turn"]):
        rounds.setdefault((run["setting"], run["r"], run["line"]), []).append(run)
    return {key: {**summary(found), "rounds": len(found)} for key, found in rounds.items()}


def write_report(folder: Path, runs: Sequence[Row], settings: Sequence[str], lines: Sequence[Line]) -> None:
    """Write throughput.md and throughput.png."""
    import torch

    rows = summaries(runs)
    against = {line.name: line.against for line in lines}
    page = [
        "# Training steps over slow links",
        "",
        f"`python benchmarks/throughput.py`, on {os.cpu_count()} cores ({platform.machine()}, no GPU), torch "
        f"{torch.__version__}, load average {os.getloadavg()[1]:.1f}.",
        "",
        "GPT-2 of 4 blocks, width 512, 256 tokens, a vocabulary of 512 (so that stages take about equally long); 16 "
        "samples a step in 8 micro-batches, or 16 where the line says so. Each stage is a process with one thread in a "
        "network namespace of its own; links are shaped by the kernel (`tbf`). r: the time that a micro-batch's "
        "float32 messages take, both ways, over the time a stage computes on it. s: median step; \"MB a step\": on all "
        "interfaces. Stock DeepSpeed is 0.19.8's own pipeline engine."
        + ("" if cpu_multiplies_bf16() else " This processor has no BF16 products: lines in BF16, stock DeepSpeed's "
           "too, compute them in float32 and round (`pipecomp/bf16_products.py`)."),
        "",
        "![steps a second over the link's rate](throughput.png)",
        "",
        "## How many times faster than stock DeepSpeed FP32 at the same link",
        "",
        *(f"- {text}" for text in findings(rows)),
        "",
        "Differences of a few percent are in [paired.md](paired.md), where lines take turns step by step: here a line "
        "runs alone, and the machine's speed changes by more than that from one run to the next.",
    ]  # fmt: skip
    order = [line.name for line in lines]
    for setting in settings:
        for r in sorted({key[1] for key in rows if key[0] == setting}):
            mine = {key[2]: row for key, row in rows.items() if key[:2] == (setting, r)}
            rate = next(iter(mine.values()))["bits_per_s"]
            link = "no limit" if rate is None else f"r = {r:g} ({rate / 1e6:.1f} Mbit/s)"
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

    def ratio(one: tuple[str, float, str], other: tuple[str, float, str]) -> float | None:
        return rows[one]["seconds"] / rows[other]["seconds"] if one in rows and other in rows else None

    two, twice = "2 stages", "2 stages, 2 replicas"
    every: list[tuple[str, float | None]] = [
        (f"{SIXTEEN}, at r = 5.8: {{:.2f}} × (aim: 6).", ratio((two, 5.8, STOCK), (two, 5.8, SIXTEEN))),
        (f"{COARSE}, at r = 12: {{:.2f}} × (aim: 10).", ratio((two, 12.0, STOCK), (two, 12.0, COARSE))),
        ("2 × 2 replicas, 4-bit gradients, at r = 5.8: {:.2f} × (aim: 8),",
         ratio((twice, 5.8, TWICE), (twice, 5.8, REPLICAS[4]))),
        ("… and with 1-bit gradients {:.2f} ×.", ratio((twice, 5.8, TWICE), (twice, 5.8, REPLICAS[1]))),
        ("The schedule by itself, FP32 at r = 5.8: {:.2f} ×.", ratio((two, 5.8, STOCK), (two, 5.8, "FP32"))),
        ("Stock DeepSpeed in BF16, at r = 5.8: {:.2f} ×.", ratio((two, 5.8, STOCK), (two, 5.8, "DeepSpeed BF16"))),
    ]  # fmt: skip
    return [text.format(value) for text, value in every if value is not None]


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
