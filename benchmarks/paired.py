"""Differences of a few percent: steps of two engines in turn, in the same processes.

    python -m benchmarks paired [--pairs 8] [--only NAME ...] [--out FOLDER] [--redraw]

A shared machine's speed changes by more from run to run than what is to be shown. Here two engines with the model of
`throughput.py` live in the same processes; one makes a step, then the other, and what counts is the ratio of two steps
that follow each other. Where they differ in the link's rate, it is set before each step. Needs root.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import page
from benchmarks.page import Row, prose
from benchmarks.runner import Runs, arguments, chosen, digest
from benchmarks.shootout import constant_error
from benchmarks.steps import COARSE, EIGHT, LINES, MEMORY, SIXTEEN, UNTHROTTLED, reference_compute
from pipecomp.bench.training import STOCK, Line, Model, aqsgd, rate_for, start_engine

MODEL = Model()
DIRECT, FEW = "DirectQ fw3 bw6, 16 micro-batches", "AQ-SGD fw2 bw2, 16 micro-batches"
CHANGES_BACK = f"{FEW}, changes back"
CONSTANT = "AQ-SGD constant error 0.05/0.1, at most fw3 bw6, 16 micro-batches"
CHANNELS, STOCK_SIXTEEN = "AQ-SGD fw3 bw6, 16 micro-batches, channel scales", "DeepSpeed FP32, 16 micro-batches"


def _aqsgd(forward: int, backward: int, **more: Any) -> dict[str, Any]:
    section = aqsgd(forward, backward)
    return {**section, "activations": {**section["activations"], **more}}


BY_NAME = {
    line.name: line
    for line in (
        *LINES,
        Line(
            name=DIRECT,
            micro_batches=16,
            section={"activations": {"method": "direct", "forward_bits": 3, "backward_bits": 6}},
        ),
        Line(name=FEW, micro_batches=16, section=_aqsgd(2, 2, first_visit=8)),
        Line(name=CHANGES_BACK, micro_batches=16, section=_aqsgd(2, 2, first_visit=8, backward_method="delta")),
        Line(name=CHANNELS, micro_batches=16, section=_aqsgd(3, 6, scale="channels", gain="unbiased")),
        Line(name=STOCK_SIXTEEN, engine="deepspeed", micro_batches=16),
        Line(name=CONSTANT, micro_batches=16, section={**aqsgd(3, 6), "activations": constant_error(1, (3, 6))}),
    )
}
STAGES, REFERENCES = 2, 5  # runs from which a stage's seconds for a micro-batch come, which r counts in
WARM_UP = 8  # steps of an engine that do not count: samples go uncompressed, the number in flight is found
NO_LIMIT = "10gbit"  # where the other engine's link is slow
DELAY = "20ms"


@dataclass(frozen=True)
class Side:
    """A line of `bench_pipeline` at a link. delayed: by `DELAY` each way."""

    line: str
    r: float = UNTHROTTLED
    delayed: bool = False

    def __str__(self) -> str:
        link = "no limit" if self.r == UNTHROTTLED else f"r = {self.r:g}"
        return f"{self.line}, {link}{f', {DELAY} each way' if self.delayed else ''}"


@dataclass(frozen=True)
class Comparison:
    """aim: what one's step time over the other's shall be at most. pairs: at most so many, where steps are long."""

    name: str
    one: Side
    other: Side
    aim: float
    pairs: int = 100

    @property
    def sides(self) -> tuple[Side, Side]:
        """Both, in turn."""
        return self.one, self.other


COMPARISONS = (
    Comparison("stock", Side(EIGHT), Side(STOCK), 1.03),
    Comparison("stock, slow link", Side(SIXTEEN, 5.8), Side(STOCK, 5.8), 1 / 6, pairs=6),
    Comparison("stock, slower link", Side(COARSE, 12.0), Side(STOCK, 12.0), 1 / 10, pairs=4),
    Comparison("store", Side(SIXTEEN), Side(MEMORY), 1.02),
    Comparison("store, slow link", Side(SIXTEEN, 5.8), Side(MEMORY, 5.8), 1.02),
    Comparison("slow link", Side(SIXTEEN, 5.8), Side(SIXTEEN), 1 / 0.95),
    Comparison("slower link", Side(COARSE, 12.0), Side(COARSE), 1 / 0.9),
    Comparison("delay, slow link", Side(SIXTEEN, 5.8, delayed=True), Side(SIXTEEN, 5.8), 1.05),
    Comparison("delay, slower link", Side(COARSE, 12.0, delayed=True), Side(COARSE, 12.0), 1.05),
    Comparison("changes back, stock", Side(CHANGES_BACK), Side(STOCK), 1.03),
    Comparison("changes back, stock, r = 18", Side(CHANGES_BACK, 18.0), Side(STOCK, 18.0), 1 / 15, pairs=3),
    Comparison("changes back, r = 18", Side(CHANGES_BACK, 18.0), Side(CHANGES_BACK), 1 / 0.9),
    Comparison("changes back, store", Side(CHANGES_BACK), Side(FEW), 1.02),
    Comparison("constant error, stock", Side(CONSTANT), Side(STOCK), 1.03),
    Comparison("constant error, r = 18", Side(CONSTANT, 18.0), Side(CONSTANT), 1 / 0.9),
    Comparison("channel scales", Side(CHANNELS), Side(SIXTEEN), 1.01),
    Comparison("channel scales, stock", Side(CHANNELS), Side(STOCK_SIXTEEN), 1.02),
    Comparison("max scales, stock", Side(SIXTEEN), Side(STOCK_SIXTEEN), 1.02),
    Comparison("AQ-SGD, DirectQ", Side(SIXTEEN), Side(DIRECT), 1.05),
)
BY_COMPARISON = {comparison.name: comparison for comparison in COMPARISONS}


def run(name: str, compute_s: float, pairs: int) -> Row:
    """One comparison: seconds of both steps of each pair. compute_s: of a micro-batch on a stage, which r counts in."""
    from pipecomp.netlab import Lab, NetlabError

    comparison = BY_COMPARISON[name]
    pairs = min(pairs, comparison.pairs)
    sides = comparison.sides
    rates = [NO_LIMIT if side.r == UNTHROTTLED else f"{rate_for(MODEL, side.r, compute_s)}bit" for side in sides]
    limited = any(side.r != UNTHROTTLED for side in sides)
    delay = DELAY if any(side.delayed for side in sides) else None
    with (
        Lab(nodes=STAGES, bandwidth=rates[0] if limited else None, delay=delay) as lab,
        tempfile.TemporaryDirectory() as folder,
    ):
        if delay is not None and lab.network.delay_by == "netem":
            raise NetlabError(
                f"{name}: this kernel delays both sides of a comparison, of which one shall have no delay"
            )

        def set_rate(rank: int, wish: tuple[int, int]) -> None:
            number, side = wish
            lab.set_bandwidth(rates[side])
            _set(folder).write_text(f"{number}.")

        ranks = lab.run(one_rank, name, pairs, limited, folder, on_note=set_rate, timeout_s=3600)
    steps = [[max(end) for end in zip(*both, strict=True)] for both in zip(*ranks.values(), strict=True)]
    return {
        "name": name,
        "sides": [str(side) for side in comparison.sides],
        "pairs": steps,
        "compute_s": compute_s,
        "rates": rates if limited else None,
    }


def _set(folder: str) -> Path:
    """Names the change of rate that was made last, with a full stop behind it."""
    return Path(folder) / "rate"


def one_rank(rank: int, world: int, note: Any, name: str, pairs: int, limited: bool, folder: str) -> list[list[float]]:
    """Seconds of both steps of each pair. limited: whether the link's rate is set before each step."""
    import torch
    import torch.distributed as dist

    from pipecomp.netlab.software import VARIABLE

    torch.set_num_threads(1)
    delaying = os.environ.pop(VARIABLE, None)
    engines = []
    sides = BY_COMPARISON[name].sides
    for index, side in enumerate(sides):
        if side.delayed and delaying is not None:
            os.environ[VARIABLE] = delaying  # for the links that are opened now
        engines.append(start_engine(BY_NAME[side.line], MODEL, STAGES, f"{folder}/{index}"))
        os.environ.pop(VARIABLE, None)
    changes = 0

    def step(side: int) -> float:
        nonlocal changes
        if limited:
            changes += 1
            if rank == 0:
                note((changes, side))
            while not (_set(folder).exists() and _set(folder).read_text() == f"{changes}."):
                time.sleep(0.02)
        dist.barrier()
        began = time.perf_counter()
        engines[side].train_batch()
        dist.barrier()
        return time.perf_counter() - began

    for index, side in enumerate(sides):
        for _ in range(1 if BY_NAME[side.line].engine == "deepspeed" else WARM_UP):
            step(index)
    step_pairs = []
    for number in range(pairs):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        seconds = {side: step(side) for side in order}
        step_pairs.append([seconds[0], seconds[1]])
    for engine in engines:
        if hasattr(engine, "close"):
            engine.close()
    return step_pairs


def results(rows: list[Row]) -> list[str]:
    """The page."""
    text = f"""
        # Differences of a few percent

        `python -m benchmarks paired`, on {page.machine(rows)}. Two engines in the same processes make a step in turn;
        the ratio is the median over pairs of steps that follow each other, with the quarters of pairs below and above.
        The model and the meaning of r are those of [throughput.md](throughput.md); a stage computes
        {1000 * rows[0]["compute_s"]:.0f} ms on a micro-batch, the median of {REFERENCES} runs before. The first
        {WARM_UP} steps of each do not count (of stock DeepSpeed, whose steps are all alike, one). "No limit" is
        {NO_LIMIT} where the other one's link is slow.
    """
    pairs = {row["name"]: row["pairs"] for row in rows}

    def quarter(c: Comparison, number: int) -> str:
        return f"{statistics.quantiles([one / other for one, other in pairs[c.name]], n=4)[number]:.3f}"

    def seconds(c: Comparison) -> str:
        return " and ".join(f"{statistics.median(side):.2f}" for side in zip(*pairs[c.name], strict=True))

    cells = {
        "what": lambda c: c.one,
        "against": lambda c: c.other,
        "ratio of step times": lambda c: f"**{quarter(c, 1)}**",
        "a quarter below": lambda c: quarter(c, 0),
        "a quarter above": lambda c: quarter(c, 2),
        "aim": lambda c: f"{c.aim:.3f}",
        "s a step": seconds,
    }
    return [*prose(text), *page.columns(cells, [c for c in COMPARISONS if c.name in pairs])]


def _line(row: Row) -> str:
    ratio = statistics.median(one / other for one, other in row["pairs"])
    return f"{ratio:.3f}  {' '.join(f'{one:.2f}/{other:.2f}' for one, other in row['pairs'])} s"


def compute_seconds(runs: Runs, cases: Sequence[tuple[str]]) -> float:
    """Return a stage's seconds per micro-batch: from finished rows, else measured if any case is missing."""
    if runs.rows:
        return float(runs.rows[0]["compute_s"])
    return reference_compute(MODEL, STAGES, REFERENCES) if runs.missing(cases) else 0.0


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    given = arguments(argv, __doc__, "only", pairs=(8, "of steps"))
    setup = digest([asdict(MODEL), [asdict(line) for line in LINES], WARM_UP])
    sides = {c.name: list(map(str, c.sides)) for c in COMPARISONS}
    runs = Runs(given, "paired", setup, ("name",), current=lambda row: row["sides"] == sides.get(row["name"]))
    cases = [(name,) for name in chosen(BY_COMPARISON, given.only)]
    compute_s = compute_seconds(runs, cases)
    runs.complete(run, cases, compute_s, given.pairs, line=_line, page=results)
