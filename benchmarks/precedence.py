"""Time steps with and without a replicas' average in flight on the link that the pipeline uses.

    python -m benchmarks precedence [--pairs 6] [--only NAME ...] [--out FOLDER] [--redraw]

Two stages with two replicas train on four nodes of a network lab; replicas average after several steps, while the next
ones go on. In every other interval the average gives way to the pipeline's packets, as it always does outside of this
script; in the others it does not. What counts is a step with an average in flight over one without, of the same
interval. Stages sleep instead of computing, as they do where a GPU computes: with real work, four ranks on two cores
would hold each other up by more than links do. Needs root.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks import page
from benchmarks.page import Row, prose
from benchmarks.paired import MODEL, STAGES
from benchmarks.runner import Runs, arguments, chosen, digest
from pipecomp.bench.training import aqsgd, rate_for

REPLICAS, R, COMPUTE_S = 2, 5.8, 0.2  # of a micro-batch on a stage, a third of it forward
MICRO_BATCHES, STAGE_WEIGHTS = 8, (2000, 1000)
LOCAL_STEPS, OVERLAP = 8, 4  # an interval; its first steps have an average in flight, the last ones none
WARM_UP = 2  # intervals
FORWARD, BACKWARD = 2, 4  # bits: links that stages fill alone, as with 6 bits back, have no room for averages
METHODS: dict[str, dict[str, Any]] = {
    "double_squeeze, 8 bits": {"method": "double_squeeze", "bits": 8},
    "double_squeeze, 1 bit": {"method": "double_squeeze", "bits": 1},
}
WAYS = ("gives way", "does not")


def run(name: str, pairs: int) -> Row:
    """One method: for each way, for each of its intervals, seconds of its steps with and without an average."""
    from pipecomp.netlab import Lab

    rate = rate_for(MODEL, R, COMPUTE_S)
    with Lab(nodes=STAGES * REPLICAS, bandwidth=f"{rate}bit") as lab, tempfile.TemporaryDirectory() as folder:
        ranks = lab.run(one_rank, name, pairs, folder, timeout_s=3600)
    steps = [max(each) for each in zip(*(seconds for seconds, _ in ranks.values()), strict=True)]
    intervals = [steps[at : at + LOCAL_STEPS] for at in range(0, len(steps), LOCAL_STEPS)]
    return {
        "name": name,
        "rate": rate,
        "intervals": {way: intervals[i::2] for i, way in enumerate(WAYS)},
        "late": {way: sum(late[i] for _, late in ranks.values()) / len(ranks) for i, way in enumerate(WAYS)},
    }


def one_rank(
    rank: int, world: int, note: Any, name: str, pairs: int, folder: str
) -> tuple[list[float], tuple[float, float]]:
    """Seconds of the steps, and seconds for which averages came late, each way."""
    import torch

    torch.set_num_threads(1)
    engine = _engine({**METHODS[name], "local_steps": LOCAL_STEPS, "overlap": OVERLAP}, folder)
    outer = engine.local.exchanges.outer
    groups = [state.group for _, state in outer.states()]
    gives_way = groups[0].give_way
    for _ in range(WARM_UP * LOCAL_STEPS):
        engine.train_batch()
    seconds, late = [], [0.0, 0.0]
    for interval in range(2 * pairs):
        for step in range(LOCAL_STEPS):
            if step == LOCAL_STEPS - 1:  # nothing is in flight; at the end of this step the next average leaves
                for group in groups:
                    group.give_way = (gives_way, None)[(interval + 1) % 2]
            began, waited = time.perf_counter(), _waited(engine)
            engine.train_batch()
            seconds.append(time.perf_counter() - began)
            late[interval % 2] += _waited(engine) - waited
    engine.close()
    return seconds, (late[0], late[1])


def _engine(gradients: dict[str, Any], folder: str) -> Any:
    """An engine whose packets are those of paired.py's model, and whose stages sleep."""
    import torch

    import pipecomp
    from pipecomp.stages import modules

    class Pause(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            time.sleep(COMPUTE_S / 3)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            time.sleep(COMPUTE_S * 2 / 3)
            return gradient

    class Work(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(*STAGE_WEIGHTS))

        def forward(self, x: Any) -> Any:
            return Pause.apply(x * (1 + self.weight.mean()))

    shape, samples = (MODEL.tokens, MODEL.width), MODEL.samples * REPLICAS
    x = torch.randn(samples, *shape, generator=torch.Generator().manual_seed(0))
    section = aqsgd(FORWARD, BACKWARD)
    config = {
        "train_micro_batch_size_per_gpu": MODEL.samples // MICRO_BATCHES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
        "steps_per_print": 10**9,
        "pipecomp": {**section, "store": {**section["store"], "path": folder}, "gradients": gradients},
    }
    return pipecomp.initialize(
        modules(torch.nn.Sequential(*(Work() for _ in range(STAGES))), shape),
        num_stages=STAGES,
        config=config,
        training_data=[{"pixel_values": one, "labels": 0} for one in x],
        loss_fn=lambda out, labels: out.square().mean(),
    )


def _waited(engine: Any) -> float:
    return float(engine.comm_stats()["seconds"]["reduce"])


def _ratios(row: Row, way: str) -> list[float]:
    """Return, per interval, the mean step with an average in flight over that without; the last step is left out."""
    return [
        statistics.fmean(steps[: OVERLAP - 1]) / statistics.fmean(steps[OVERLAP:-1]) for steps in row["intervals"][way]
    ]


def results(rows: list[Row]) -> list[str]:
    """The page."""
    weights = math.prod(STAGE_WEIGHTS) / 1e6
    text = f"""
        # Averages of replicas beside a pipeline's packets

        `python -m benchmarks precedence`, {STAGES} stages × {REPLICAS} replicas on {page.machine(rows)}, each rank in a
        network namespace of its own, at {rows[0]["rate"] / 1e6:.1f} Mbit/s both ways (r = {R:g}). Packets are those of
        the model of [throughput.md](throughput.md), AQ-SGD fw{FORWARD} bw{BACKWARD}; stages sleep for
        {1000 * COMPUTE_S:.0f} ms a micro-batch instead of computing, so that nothing but the links can hold them up,
        and average {weights:g} M weights each. Replicas average after {LOCAL_STEPS} steps, and take {OVERLAP} more
        while they do. Every other average is sent in slices, each of which waits while the one before it or a packet of
        the pipeline is leaving the machine, as averages do; the others are sent at once. The ratio is the median over
        intervals of a step with an average in flight to a step without; "late" are the seconds that a rank waited for
        the average in the end.
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
    given = arguments(argv, __doc__, "only", pairs=(6, "of intervals"))
    settings = [
        STAGES,
        REPLICAS,
        FORWARD,
        BACKWARD,
        R,
        COMPUTE_S,
        MICRO_BATCHES,
        STAGE_WEIGHTS,
        LOCAL_STEPS,
        OVERLAP,
        WARM_UP,
    ]
    runs = Runs(given, "precedence", digest([asdict(MODEL), METHODS, settings]), ("name",))
    cases = [(name,) for name in chosen(METHODS, given.only)]
    runs.complete(run, cases, given.pairs, line=_line, page=results)
