"""Measure the kernels several times over and print the medians; `--markdown FILE` writes them where results are kept.

    python benchmarks/kernels.py [--rounds N] [--seconds S] [--threads N] [--torch] [--json FILE] [--markdown FILE]

`pipecomp bench kernels` measures once. This takes every case in each of several rounds, minutes apart from each other,
because on a machine that others use too one minute is not like the next.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import torch
from rich.console import Console

from pipecomp.bench.kernels import Row, bench_kernels, kernels_table
from pipecomp.kernels import dispatch

KEY = ("operation", "bits", "shape", "backend", "threads")
HEADINGS = ("operation", "bits", "shape", "backend", "ms", "GB/s", "memcpy GB/s", "ratio", "of rounds")


def medians(rounds: list[list[Row]]) -> list[Row]:
    """One row per case: medians over the rounds, and the least and largest ratio."""
    cases: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for rows in rounds:
        for row in rows:
            cases[tuple(row[k] for k in KEY)].append(row)
    merged = []
    for key, rows in cases.items():
        ratios = [row["ratio"] for row in rows]
        middle = {name: statistics.median(r[name] for r in rows) for name in rows[0] if name not in KEY}
        merged.append(dict(zip(KEY, key, strict=True)) | middle | {"least": min(ratios), "most": max(ratios)})
    return merged


def processor() -> str:
    """The CPU's name, where Linux tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def markdown(rows: list[Row], rounds: int, command: str) -> str:
    """The table with what it was measured on and what its columns mean."""
    lines = [
        "# Kernels",
        "",
        f"`{command}`, on {os.cpu_count()} cores ({processor()}), {dispatch.status()[0].reason}, torch "
        f"{torch.__version__}, threads: {rows[0]['threads']}.",
        "",
        "GB/s: bytes that must move (inputs read once, outputs written once) by the second. memcpy: as many bytes, "
        "half of them read and half written, in turn with the kernel in the same process. ratio: memcpy's time over "
        f"the kernel's, the median of neighbouring pairs, and of {rounds} rounds; the last column has the least and "
        "largest round. Activations and messages are float32.",
        "",
        f"| {' | '.join(HEADINGS)} |",
        "|" + "---|" * len(HEADINGS),
    ]
    for row in rows:
        cells = [
            row["operation"],
            "" if row["bits"] is None else str(row["bits"]),
            row["shape"],
            row["backend"],
            f"{row['ms']:.3f}",
            f"{row['gb_per_s']:.1f}",
            f"{row['memcpy_gb_per_s']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['least']:.2f}–{row['most']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="for one case in one round")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--torch", action="store_true", help="plain torch operations too, in one round")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--markdown", type=Path, default=None)
    options = parser.parse_args()
    measured = {"seconds": options.seconds, "threads": options.threads}
    rounds = [bench_kernels(backends=("auto",), **measured) for _ in range(options.rounds)]
    if options.torch:
        rounds.append(bench_kernels(backends=("torch",), **measured))
    rows = medians(rounds)
    Console().print(kernels_table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.markdown:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        command = "python benchmarks/kernels.py " + " ".join(sys.argv[1:])
        options.markdown.write_text(markdown(rows, options.rounds, command))


if __name__ == "__main__":
    main()
