"""Do replicas' averages hold up the pipeline on the link that both use? Steps with and without one in flight.

    python -m benchmarks precedence [--pairs 3] [--only NAME ...] [--out FOLDER] [--redraw]

Two stages with two replicas train on four nodes of a network lab; replicas average after several steps, while the next
ones go on. In every other interval the average gives way to the pipeline's packets, as it always does outside of this
script; in the others it does not. What counts is a step with an average in flight over one without, of the same
interval. Needs root.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks import page
from benchmarks.page import Row, prose
from benchmarks.paired import MODEL, REFERENCES, STAGES
from benchmarks.runner import Runs, arguments, chosen, digest
from pipecomp.bench.configurations import EIGHT, Line, aqsgd, rate_for
from pipecomp.bench.pipeline import reference_compute, start_engine

REPLICAS, R = 2, 5.8
LOCAL_STEPS, OVERLAP = 8, 4  # an interval; its first steps have an average in flight, the last ones none
WARM_UP = 2  # intervals
METHODS: dict[str, dict[str, Any]] = {
    "float32": {"method": "none"},
    "double_squeeze, 8 bits": {"method": "double_squeeze", "bits": 8},
}
WAYS = ("gives way", "does not")


def run(name: str, compute_s: float, pairs: int) -> Row:
    """One method: for each way, for each of its intervals, seconds of its steps with and without an average."""
    from pipecomp.netlab import Lab

    rate = rate_for(MODEL, R, compute_s)
    with Lab(nodes=STAGES * REPLICAS, bandwidth=f"{rate}bit") as lab, tempfile.TemporaryDirectory() as folder:
        ranks = lab.run(one_rank, name, pairs, folder, timeout_s=3600)
    steps = [max(each) for each in zip(*(seconds for seconds, _ in ranks.values()), strict=True)]
    intervals = [steps[at : at + LOCAL_STEPS] for at in range(0, len(steps), LOCAL_STEPS)]
    return {
        "name": name,
        "rate": rate,
        "compute_s": compute_s,
        "intervals": {way: intervals[i::2] for i, way in enumerate(WAYS)},
        "late": {way: sum(late[i] for _, late in ranks.values()) / len(ranks) for i, way in enumerate(WAYS)},
    }


def one_rank(
    rank: int, world: int, note: Any, name: str, pairs: int, folder: str
) -> tuple[list[float], tuple[float, float]]:
    """Seconds of the steps, and seconds for which averages came late, each way."""
    import torch

    torch.set_num_threads(1)
    gradients = {**METHODS[name], "local_steps": LOCAL_STEPS, "overlap": OVERLAP}
    line = Line(name=name, replicas=REPLICAS, section={**aqsgd(3, 6), "gradients": gradients})
    engine = start_engine(line, MODEL, STAGES, folder)
    outer = engine.local.exchanges.outer
    gives_way = next(state.group.give_way for _, state in outer.states())
    for _ in range(WARM_UP * LOCAL_STEPS):
        engine.train_batch()
    seconds, late = [], [0.0, 0.0]
    for interval in range(2 * pairs):
        ways: tuple[Callable[[], None], ...] = (gives_way, _goes_on)
        outer.give_way(ways[interval % 2])  # what is in flight from here on, until the middle of the interval
        for _ in range(LOCAL_STEPS):
            began, waited = time.perf_counter(), _waited(engine)
            engine.train_batch()
            seconds.append(time.perf_counter() - began)
            late[interval % 2] += _waited(engine) - waited
    engine.close()
    return seconds, (late[0], late[1])


def _goes_on() -> None:
    return


def _waited(engine: Any) -> float:
    return float(engine.comm_stats()["seconds"]["reduce"])


def _ratios(row: Row, way: str) -> list[float]:
    """Of an interval's steps with an average in flight, but the last, which may wait for it, to those without."""
    return [
        statistics.fmean(steps[: OVERLAP - 1]) / statistics.fmean(steps[OVERLAP:-1]) for steps in row["intervals"][way]
    ]


def results(rows: list[Row]) -> list[str]:
    """The page."""
    first = rows[0]
    text = f"""
        # Averages of replicas beside a pipeline's packets

        `python -m benchmarks precedence`, {STAGES} stages × {REPLICAS} replicas on {page.machine(rows)}, each rank in a
        network namespace of its own, at {first["rate"] / 1e6:.1f} Mbit/s both ways (r = {R:g}). The model and the
        links' bits are those of [throughput.md](throughput.md), {EIGHT}. Replicas average after {LOCAL_STEPS} steps,
        and take {OVERLAP} more while they do. Every other average waits with each slice while packets of the pipeline
        are leaving the machine, as averages do; the others do not. The ratio is the median over intervals of a step
        with an average in flight to a step without; "late" are the seconds that a rank waited for the average in the
        end.
    """
    lines = [(row, way) for row in rows for way in WAYS]
    cells = {
        "average": lambda line: line[0]["name"],
        "": lambda line: line[1],
        "step with it in flight, over one without": lambda line: f"**{statistics.median(_ratios(*line)):.3f}**",
        "least, most": lambda line: f"{min(_ratios(*line)):.3f}, {max(_ratios(*line)):.3f}",
        "late, s an interval": lambda line: f"{line[0]['late'][line[1]] / len(line[0]['intervals'][line[1]]):.2f}",
    }
    return [*prose(text), *page.columns(cells, lines)]


def _line(row: Row) -> str:
    return "  ".join(f"{way} {statistics.median(_ratios(row, way)):.3f}" for way in WAYS)


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    given = arguments(argv, __doc__, "only", pairs=(3, "of intervals"))
    setup = digest([asdict(MODEL), METHODS, STAGES, REPLICAS, R, LOCAL_STEPS, OVERLAP, WARM_UP])
    runs = Runs(given, "precedence", setup, ("name",))
    cases = [(name,) for name in chosen(METHODS, given.only)]
    compute_s = runs.rows[0]["compute_s"] if runs.rows else 0.0
    if not compute_s and runs.missing(cases):
        compute_s = reference_compute(MODEL, STAGES, REFERENCES)
    runs.complete(run, cases, compute_s, given.pairs, line=_line, page=results)
