"""Compare quantizing with memcpy: medians of repeated measurements of the kernels.

    python -m benchmarks kernels [--rounds N] [--seconds S] [--threads N] [--torch] [--out FOLDER] [--redraw]

`pipecomp bench kernels` measures once. This takes every case in each of several rounds, minutes apart from each other,
because on a machine that others use too one minute is not like the next.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks import page
from benchmarks.page import Row, prose, values
from benchmarks.runner import Runs, arguments, digest
from pipecomp.bench.kernels import bench_kernels
from pipecomp.kernels import dispatch

KEY = ("operation", "bits", "shape", "backend", "threads")


def measure(backend: str, turn: int, seconds: float, threads: int) -> Row:
    """One round of all cases."""
    cases = bench_kernels(backends=(backend,), seconds=seconds, threads=threads)
    return {"backend": backend, "round": turn, "code": dispatch.status()[0].reason, "cases": cases}


def medians(rounds: list[list[Row]]) -> list[Row]:
    """One row per case: medians over the rounds, and the least and largest ratio."""
    merged = []
    for rows in page.grouped((row for one in rounds for row in one), *KEY):
        middle = {name: statistics.median(values(rows, name)) for name in rows[0] if name not in KEY}
        ratios = values(rows, "ratio")
        merged.append({key: rows[0][key] for key in KEY} | middle | {"least": min(ratios), "most": max(ratios)})
    return merged


def results(rows: list[Row]) -> list[str]:
    """The page."""
    rows = sorted(rows, key=lambda row: (row["backend"], row["round"]))
    rounds = sum(row["backend"] == "auto" for row in rows)
    text = f"""
        # Kernels

        `python -m benchmarks kernels`, {rounds} rounds, on {page.machine(rows)}, {rows[0]["code"]}, threads:
        {rows[0]["cases"][0]["threads"]}.

        GB/s: bytes that must move (inputs read once, outputs written once) by the second. memcpy: as many bytes, half
        of them read and half written, in turn with the kernel in the same process. ratio: memcpy's time over the
        kernel's, the median of neighbouring pairs, and of the rounds; the last column has the least and largest round.
        Activations, and the cached ones, are float32.
    """
    cells = {
        "operation": lambda row: row["operation"],
        "bits": lambda row: "" if row["bits"] is None else row["bits"],
        "shape": lambda row: row["shape"],
        "backend": lambda row: row["backend"],
        "ms": lambda row: f"{row['ms']:.3f}",
        "GB/s": lambda row: f"{row['gb_per_s']:.1f}",
        "memcpy GB/s": lambda row: f"{row['memcpy_gb_per_s']:.1f}",
        "ratio": lambda row: f"{row['ratio']:.2f}",
        "of rounds": lambda row: f"{row['least']:.2f}–{row['most']:.2f}",
    }
    return [*prose(text), *page.columns(cells, medians(values(rows, "cases")))]


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    given = arguments(
        argv,
        __doc__,
        rounds=(5, "how often each case is taken"),
        seconds=(0.3, "for one case in one round"),
        threads=(1, "of torch and the kernels"),
        torch=(False, "plain torch operations too, in one round"),
    )
    cases = [*(("auto", turn) for turn in range(given.rounds)), *([("torch", 0)] if given.torch else [])]
    Runs(given, "kernels", digest([given.seconds, given.threads]), ("backend", "round")).complete(
        measure,
        cases,
        given.seconds,
        given.threads,
        line=lambda row: f"median ratio {statistics.median(values(row['cases'], 'ratio')):.2f}",
        page=results,
        workers=0,
    )
