"""Average 8 M gradients of two ranks over a slow link and without one, beside gloo's own float32 all-reduce.

    python -m benchmarks slow_allreduce [--bandwidth 100mbit] [--values 8000000] [--rounds 7] [--out FOLDER]
                                        [--redraw]

The link is a kernel-shaped one between two network namespaces (root and iproute2 needed); "loopback" is 127.0.0.1.
Every round runs each method once, gloo's all-reduce first, between the same two processes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import page
from benchmarks.page import Row, prose
from benchmarks.runner import Runs, arguments, digest

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
HERE = "127.0.0.1"
PARTS = ("quantize", "wait", "reduce", "decode")


def one_rank(rank: int, world: int, note: Any, values: int, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds, bytes and error of each method on this rank; medians over the rounds."""
    import torch
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
    results = {}
    for name, times in seconds.items():
        stats = states[name].stats() if name in states else None
        sent = values * 4 if stats is None else stats["bytes_sent"] / stats["calls"]
        parts = {} if stats is None else {part: s / stats["calls"] for part, s in stats["seconds"].items()}
        results[name] = {"seconds": statistics.median(times), "bytes": sent, "error": errors[name], **parts}
    dist.barrier()
    for state in states.values():
        state.close()
    dist.destroy_process_group()
    return results


def measure(where: str, values: int, rounds: int) -> Row:
    """All methods at one place: HERE, or over a link of that bandwidth."""
    from pipecomp.distributed.local_launcher import run_ranks
    from pipecomp.netlab.lab import Lab

    if where == HERE:
        ranks = run_ranks(2, one_rank, values, rounds, timeout_s=600)
    else:
        with Lab(nodes=2, bandwidth=where) as lab:
            ranks = lab.run(one_rank, values, rounds, timeout_s=900)
    # a step ends when both ranks are done; the rest is one rank's
    methods = [
        {"method": name, **one, "seconds": max(rank[name]["seconds"] for rank in ranks.values())}
        for name, one in ranks[0].items()
    ]
    return {"where": where, "values": values, "rounds": rounds, "methods": methods}


def results(rows: list[Row]) -> list[str]:
    """The page."""
    text = f"""
        # Averages over a slow link

        `python -m benchmarks slow_allreduce`, two ranks on {page.machine(rows)}, one thread each;
        {rows[0]["values"]:,} float32 values, medians of {rows[0]["rounds"]} rounds.

        Times faster: than gloo's float32 all-reduce in the same rounds. Bytes are one rank's. The error is that of the
        mean.
    """
    lines = prose(text)
    for row in rows:
        gloo = next(method["seconds"] for method in row["methods"] if method["method"] == GLOO)
        cells = {
            "method": lambda method: method["method"],
            "ms": lambda method: f"{1e3 * method['seconds']:.0f}",
            "times faster": lambda method, gloo=gloo: f"{gloo / method['seconds']:.2f}",
            "MB sent": lambda method: f"{method['bytes'] / 1e6:.2f}",
            "relative error": lambda method: f"{method['error']:.3f}",
            **{
                f"{part} ms": lambda method, part=part: f"{1e3 * method[part]:.0f}" if part in method else ""
                for part in PARTS
            },
        }
        lines += [f"## {row['where']}", "", *page.columns(cells, row["methods"])]
    return lines


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    own = {"values": (8_000_000, "of the gradient"), "rounds": (7, "after the first, which warms up")}
    given = arguments(argv, __doc__, bandwidth=("100mbit", "of the slow link"), **own)
    setup = digest([METHODS, given.values, given.rounds])
    Runs(given, "slow_allreduce", setup, ("where",)).complete(
        measure,
        [(HERE,), (given.bandwidth,)],
        given.values,
        given.rounds,
        line=lambda row: "  ".join(f"{method['method']} {1e3 * method['seconds']:.0f} ms" for method in row["methods"]),
        page=results,
    )
