"""Average 8 M gradients of two ranks over a slow link and without one, beside gloo's own float32 all-reduce.

    python benchmarks/slow_allreduce.py [--bandwidth 100mbit] [--values 8000000] [--rounds 3] [--markdown FILE]

The link is a kernel-shaped one between two network namespaces (root and iproute2 needed); "loopback" is 127.0.0.1.
Every round runs each method once, gloo's all-reduce first, between the same two processes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

METHODS: dict[str, dict[str, Any]] = {
    "global_qsgd, exponential, 8 bits": {"method": "global_qsgd", "bits": 8},
    "global_qsgd, linear, 8 bits": {"method": "global_qsgd", "levels": "linear", "bits": 8},
    "global_qsgd, exponential, 4 bits": {"method": "global_qsgd", "bits": 4},
    "global_qsgd, linear, 4 bits": {"method": "global_qsgd", "levels": "linear", "bits": 4},
    "qsgd_mn_ts, 4 and 8 bits": {"method": "qsgd_mn_ts", "bits": [4, 8]},
    "double_squeeze, 4 bits": {"method": "double_squeeze", "bits": 4},
    "double_squeeze, 1 bit": {"method": "double_squeeze", "bits": 1},
    "nuqsgd, 4 bits": {"method": "nuqsgd", "bits": 4},
    "casq, 4 bits": {"method": "casq", "bits": 4},
    "fp16": {"method": "fp16"},
}
GLOO = "gloo, float32"
PARTS = ("quantize", "wait", "reduce", "decode")


def measure(rank: int, world: int, note: Any, values: int, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds, bytes and error of each method on this rank; medians over the rounds."""
    import torch.distributed as dist

    from pipecomp.allreduce import State

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    states = {name: State(**options) for name, options in METHODS.items()}
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(values, generator=draw)
    exact = x.clone()
    dist.all_reduce(exact)
    exact /= world
    out = torch.empty_like(x)
    seconds: dict[str, list[float]] = {name: [] for name in (GLOO, *METHODS)}
    errors: dict[str, float] = {GLOO: 0.0}
    for turn in range(rounds + 1):  # the first one warms up
        for name in seconds:
            dist.barrier()
            began = time.perf_counter()
            if name == GLOO:
                out.copy_(x)
                dist.all_reduce(out)
                out /= world
            else:
                states[name].submit(x, "gradient", out=out).wait()
            if turn:
                seconds[name].append(time.perf_counter() - began)
            if name != GLOO:
                errors[name] = float((out - exact).norm() / exact.norm())
        note(turn)
    found = {}
    for name, times in seconds.items():
        stats = states[name].stats() if name in states else None
        sent = values * 4 if stats is None else stats["bytes_sent"] / stats["calls"]
        parts = {} if stats is None else {part: s / stats["calls"] for part, s in stats["seconds"].items()}
        found[name] = {"seconds": statistics.median(times), "bytes": sent, "error": errors[name], **parts}
    dist.barrier()
    for state in states.values():
        state.close()
    dist.destroy_process_group()
    return found


def rows_of(found: dict[int, dict[str, dict[str, float]]]) -> list[list[str]]:
    """A line for each method; a step ends when both ranks are done."""
    base = max(rank[GLOO]["seconds"] for rank in found.values())
    rows = []
    for name, first in found[0].items():
        seconds = max(rank[name]["seconds"] for rank in found.values())
        parts = [f"{1e3 * first[part]:.0f}" if part in first else "" for part in PARTS]
        figures = [f"{1e3 * seconds:.0f}", f"{base / seconds:.2f}", f"{first['bytes'] / 1e6:.2f}"]
        rows.append([name, *figures, f"{first['error']:.3f}", *parts])
    return rows


HEADINGS = [
    "method",
    "ms",
    "times faster",
    "MB sent",
    "relative error",
    "quantize ms",
    "wait ms",
    "reduce ms",
    "decode ms",
]


def main() -> None:
    """Run from the command line."""
    import slow_allreduce as this  # processes of the lab import it by name

    from pipecomp.cluster.local_ranks import run_ranks
    from pipecomp.netlab.lab import Lab

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", default="100mbit")
    parser.add_argument("--values", type=int, default=8_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--markdown", type=Path, default=None)
    options = parser.parse_args()
    tables = {}
    tables["127.0.0.1"] = rows_of(run_ranks(2, measure, options.values, options.rounds, timeout_s=600))
    with Lab(nodes=2, bandwidth=options.bandwidth) as lab:
        found = lab.run(this.measure, options.values, options.rounds, timeout_s=900)
        tables[options.bandwidth] = rows_of(found)
    lines = [
        "# Averages over a slow link",
        "",
        f"`python benchmarks/slow_allreduce.py {' '.join(sys.argv[1:])}`, two ranks on {os.cpu_count()} cores, one "
        f"thread each, torch {torch.__version__}; {options.values:,} float32 values, medians of {options.rounds} "
        "rounds.",
        "",
        "Times faster: than gloo's float32 all-reduce in the same rounds. Bytes are one rank's. The error is that of "
        "the mean.",
    ]
    for where, rows in tables.items():
        table = Table(title=f"{options.values:,} values, two ranks, {where}")
        for heading in HEADINGS:
            table.add_column(heading, justify="left" if heading == "method" else "right")
        lines += ["", f"## {where}", "", "| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
        for row in rows:
            table.add_row(*row)
            lines.append("| " + " | ".join(row) + " |")
        Console(width=130).print(table)
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
