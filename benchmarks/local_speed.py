"""Time steps of two stages with two replicas that average after several steps, or momentum, over slow links.

    python -m benchmarks local_speed [--only NAME ...] [--out FOLDER] [--redraw]

Steps of throughput.py's model on four nodes of a network lab, beside stock DeepSpeed's. With "sites" each replica is at
a site of its own, and what joins the two has a tenth of the rate of a node's link. Needs root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from benchmarks import page
from benchmarks.page import Row, prose
from benchmarks.paired import MODEL, STAGES, compute_seconds
from benchmarks.runner import Runs, arguments, chosen, digest
from benchmarks.steps import ADAM, LINES, TWICE, UNTHROTTLED, local_lines, measure
from pipecomp.bench.training import STOCK, rate_for

LOCAL_STEPS, STEPS = 16, 2
SLOWER = 10  # times, of what joins sites
SITES = "0,2/1,3"  # a replica's two stages at each
COARSE, COARSEST = local_lines(LOCAL_STEPS)[3:]
RATES = (5.8, 12.0)


class Case(NamedTuple):
    """A line of the bench over links of r. sites: whether replicas are at sites of their own."""

    line: str
    r: float = UNTHROTTLED
    sites: bool = False

    @property
    def name(self) -> str:
        """For --only."""
        limit = f"r = {self.r:g}" if self.r else "no limit"
        return f"{self.line}; {limit}{', sites' if self.sites else ''}"


CASES = (
    *(Case(line, r) for r in RATES for line in (STOCK, TWICE)),
    *(Case(line, r) for line in (COARSE.name, COARSEST.name) for r in (UNTHROTTLED, *RATES)),
    *(Case(COARSEST.name, r, sites=True) for r in RATES),
    *(Case(ADAM.name, r) for r in (UNTHROTTLED, *RATES)),
)
BY_NAME = {line.name: line for line in (*LINES, COARSE, COARSEST, ADAM)}


def run(name: str, compute_s: float) -> Row:
    """One case: seconds of a step. compute_s: of a micro-batch on a stage, which r counts in."""
    case = next(case for case in CASES if case.name == name)
    rate = rate_for(MODEL, case.r, compute_s) if case.r else None
    network: dict[str, Any] = {}
    if case.sites:
        assert rate is not None
        network = {"sites": f"{SITES}@{rate // SLOWER}bit"}
    measurement = measure(BY_NAME[case.line], MODEL, STAGES, STEPS, rate, None, **network)
    row = {
        "name": name,
        "compute_s": compute_s,
        "rate": rate,
        "steps": measurement["steps"],
        "bytes": measurement["bytes"],
    }
    return {**row, "line": digest(asdict(BY_NAME[case.line]))}


def _current(row: Row) -> bool:
    """Return True if the row's line has the settings that it was measured with."""
    line = BY_NAME.get(row["name"].rpartition("; ")[0])
    return line is not None and row["line"] == digest(asdict(line))


def results(rows: list[Row]) -> list[str]:
    """The page."""
    text = f"""
        # Speed of replicas that average after {LOCAL_STEPS} steps

        `python -m benchmarks local_speed`, {STAGES} stages, with two replicas four processes of one thread each in
        network namespaces of their own on {page.machine(rows)}. The model is that of [throughput.md](throughput.md), as
        is r; a stage computes {1000 * rows[0]["compute_s"]:.0f} ms on a micro-batch while one replica alone computes.
        Seconds a sample: of the fastest of {STEPS} times as many steps as there are between averages (of stock
        DeepSpeed: of {STEPS} steps). "Of its own rate": samples a second over those without a limit. With "sites", what
        joins the replicas has a {SLOWER}th of the rate of a node's link. QuantizedAdam averages momentum after every
        step; steps are timed once its variance is frozen.
    """
    seconds = {row["name"]: min(row["steps"]) / _samples(row) for row in rows}

    def over(row: Row, other: Case) -> str:
        return f"{seconds[other.name] / seconds[row['name']]:.2f}" if other.name in seconds else "–"

    cases = {case.name: case for case in CASES}
    ordered = [row for name in cases for row in rows if row["name"] == name]
    cells = {
        "line": lambda row: cases[row["name"]].line,
        "links": lambda row: row["name"].rpartition("; ")[2],
        "Mbit/s": lambda row: f"{row['rate'] / 1e6:.1f}" if row["rate"] else "–",
        "s a sample": lambda row: f"{seconds[row['name']]:.3f}",
        "× stock FP32, 2 replicas": lambda row: over(row, Case(TWICE, cases[row["name"]].r)),
        "of its own rate": lambda row: over(row, Case(cases[row["name"]].line)),
        "MB a step": lambda row: f"{row['bytes'] / 1e6:.2f}",
    }
    return [*prose(text), *page.columns(cells, ordered)]


def _samples(row: Row) -> int:
    line = BY_NAME[row["name"].rpartition("; ")[0]]
    return MODEL.samples * line.replicas


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    given = arguments(argv, __doc__, "only")
    names = [case.name for case in CASES]
    setup = digest([asdict(MODEL), SITES, SLOWER, STEPS])
    runs = Runs(given, "local_speed", setup, ("name",), current=_current)
    cases = [(name,) for name in chosen(names, given.only)]
    compute_s = compute_seconds(runs, cases)
    runs.complete(run, cases, compute_s, line=lambda row: f"{min(row['steps']):.3f} s a step", page=results)
