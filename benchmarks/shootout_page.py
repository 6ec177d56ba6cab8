"""The page of `shootout.py`: losses over bytes, what equal bytes buy, and seconds over slow links by the simulation.

K stages, M micro-batches of a step.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks import direct, page
from benchmarks.page import Row, spread, values
from benchmarks.training import in_order as by_method
from pipecomp.demo.results import epoch_means, steps_to
from pipecomp.plan.prediction import best_in_flight
from pipecomp.plan.simulation import StageCosts, StepSpec, uniform

REFERENCE = "FP32"
LINKS = (5.8, 18)  # r: float32 transfer over compute of a micro-batch
WITHIN = 0.005
BUDGETS = (0.09, 0.11, 0.13, 0.16, 0.2)  # shares of FP32's bytes
COMPARED = (*direct.names("DirectQ"), "AQ-SGD")
METRICS = {"QNLI": "accuracy", "CoLA": "Matthews correlation"}
FORWARD = 1 / 3  # of a micro-batch's compute
SECONDS = f"""Seconds: until the mean training loss over an epoch's number of steps is at most {100 * WITHIN:g} % above
what FP32 ends with; in brackets how many of the seeds get there, where not all do. By the simulation of
`pipecomp plan`, not measured: stages alike, whose compute is FP32's processor time here; links on which the float32
activations and gradients of a micro-batch take r times a stage's compute on it; each epoch's packets of their mean
size. What methods compute themselves is not in it."""


def in_order(rows: Sequence[Row], order: Mapping[str, Sequence[str]]) -> list[Row]:
    """The rows of known methods and settings, in the order in which they stand in tables."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    known = by_method(rows, order, "method", "seed")
    return sorted(
        known,
        key=lambda row: (
            tasks.index(row["task"]),
            row["dropout"] != "without",
            row["stages"],
            list(order).index(row["method"]),
            order[row["method"]].index(row["setting"]),
        ),
    )


# -- one run, and a method's runs beside FP32's


def total(row: Row) -> int:
    """Bytes of the whole training, both ways."""
    return sum(row["bytes"][-1])


def share(row: Row) -> float:
    """Return the share of FP32's bytes, headers not counted."""
    return total(row) / sum(row["raw_bytes"])


def references(rows: Sequence[Row], like: Row) -> list[Row]:
    """FP32's runs of the same task, dropout and K."""
    keys = ("task", "dropout", "stages")
    return [row for row in rows if row["method"] == REFERENCE and all(row[key] == like[key] for key in keys)]


def compute_seconds(exact: Sequence[Row]) -> float:
    """Return the seconds of one stage on one micro-batch."""
    return statistics.mean(
        row["cpu_seconds"] / (len(row["losses"]) * row["micro_batches"] * row["stages"]) for row in exact
    )


@functools.cache
def step_seconds(K: int, M: int, compute_s: float, rate: float, forward: float, backward: float) -> float:
    """A step whose packets have so many bytes, on links of `rate` bit/s each way."""
    stage = StageCosts(forward_s=FORWARD * compute_s, backward_s=(1 - FORWARD) * compute_s)
    step = StepSpec(
        stages=[stage] * K,
        micro_batches=M,
        forward_bytes=[forward] * (K - 1),
        backward_bytes=[backward] * (K - 1),
    )
    return best_in_flight(step, uniform(K, rate))[1].seconds


def seconds_to(row: Row, loss: float, r: float, compute_s: float) -> float | None:
    """Seconds until the mean over an epoch's steps is at most `loss`; None if it never is."""
    K, M = row["stages"], row["micro_batches"]
    per_epoch = len(row["losses"]) // len(row["bytes"])
    steps = steps_to(row["losses"], per_epoch, loss)
    if steps is None:
        return None
    packets = per_epoch * M * (K - 1)  # of an epoch, each way
    rate = 8 * sum(row["raw_bytes"]) / (packets * len(row["bytes"])) / (r * compute_s)
    epoch_seconds = [
        step_seconds(K, M, compute_s, rate, *((b - a) / packets for a, b in zip(before, after, strict=True)))
        for before, after in itertools.pairwise([[0, 0], *row["bytes"]])
    ]
    return sum(epoch_seconds[step // per_epoch] for step in range(steps))


def _seconds(group: Sequence[Row], exact: Sequence[Row], r: float) -> str:
    goals = {row["seed"]: epoch_means(row["losses"], len(row["losses"]) // len(row["bytes"]))[-1] for row in exact}
    runs = [row for row in group if row["seed"] in goals]
    if not runs:
        return "–"
    compute_s = compute_seconds(exact)
    times = [seconds_to(row, goals[row["seed"]] * (1 + WITHIN), r, compute_s) for row in runs]
    reached = [seconds for seconds in times if seconds is not None]
    if not reached:
        return "–"
    return f"{statistics.mean(reached):.1f}" + (f" ({len(reached)})" if len(reached) < len(runs) else "")


def curve(groups: Sequence[Sequence[Row]], exact: Sequence[Row]) -> list[tuple[float, float]]:
    """A method's settings, fewest bytes first: share of FP32's bytes, training loss above FP32's in percent."""
    points = []
    for group in groups:
        above = page.above(group, exact, "train_loss")
        if above:
            level = statistics.mean(values(exact, "train_loss"))
            points.append((statistics.mean(map(share, group)), 100 * statistics.mean(above) / level))
    return sorted(points)


def at_most(points: Sequence[tuple[float, float]], budget: float) -> float | None:
    """The loss on a curve at so many bytes, between two settings by the logarithm of bytes.

    Beyond the setting with the most bytes that setting's; None below the one with the fewest.
    """
    if not points or points[0][0] > budget:
        return None
    sizes, losses = zip(*points, strict=True)
    return float(np.interp(math.log(budget), [math.log(size) for size in sizes], losses))


# -- the page


def tables(rows: Sequence[Row]) -> list[str]:
    """Two tables for each task."""
    lines = []
    for group in page.grouped(rows, "task"):
        task = group[0]["task"]
        text = f"""
            ### {task}: training loss above FP32 with no more than these bytes

            Shares of FP32's bytes, both ways and the whole training. Between two settings of a method by the logarithm
            of bytes; beyond its setting with the most bytes, that one's; "–" where it needs more.
        """
        lines += [f"## {task}", "", *_best_direct(task, group), *_all(task, group), *page.prose(text), *_equal(group)]
    return lines


def _best_direct(task: str, rows: Sequence[Row]) -> list[str]:
    """AQ-SGD beside the best form of plain quantization with the same bits; no runs between them are assumed.

    Classifiers are compared by their metric: plain quantization can have less training loss than FP32, and be worse.
    """
    metric = METRICS.get(task)

    def worse(group: Sequence[Row], base: Sequence[Row]) -> float:
        """By how much the group is worse than FP32."""
        difference = statistics.mean(page.above(group, base, "metric" if metric else "train_loss"))
        return -difference if metric else difference

    def cell(group: Sequence[Row], base: Sequence[Row]) -> str:
        level = statistics.mean(values(base, "train_loss"))
        shown = (
            f"{statistics.mean(values(group, 'metric')):.3f}"
            if metric
            else f"{100 * worse(group, base) / level:+.2f} %"
        )
        return f"{shown} ({100 * share(group[0]):.1f} %)"

    lines = []
    for own in page.grouped(rows, "dropout", "stages", "setting"):
        base, by_name = references(rows, own[0]), {name: [r for r in own if r["method"] == name] for name in COMPARED}
        forms = [group for name, group in by_name.items() if name != "AQ-SGD" and page.above(group, base, "train_loss")]
        delta = by_name["AQ-SGD"]
        if not forms or not page.above(delta, base, "train_loss"):
            continue
        best = min(forms, key=lambda group: worse(group, base))
        gap = worse(best, base)
        closed = f"{1 - worse(delta, base) / gap:.2f}" if gap > 0 else "–"
        key = [own[0][name] for name in ("dropout", "stages", "setting")]
        lines.append([*key, best[0]["method"], cell(best, base), cell(delta, base), closed])
    if not lines:
        return []
    kind = metric or "above FP32"
    headings = [
        "dropout",
        "K",
        "bits",
        "best DirectQ",
        f"{kind} (bytes)",
        f"AQ-SGD: {kind} (bytes)",
        "of the gap closed",
    ]
    return page.table(headings, lines)


def _all(task: str, rows: Sequence[Row]) -> list[str]:
    def above(group: list[Row]) -> str:
        base = references(rows, group[0])
        differences = page.above(group, base, "train_loss")
        if group[0]["method"] == REFERENCE or not differences:
            return "–"
        return f"{100 * statistics.mean(differences) / statistics.mean(values(base, 'train_loss')):+.2f} %"

    def megabytes(group: list[Row], way: int) -> str:
        return f"{statistics.mean(row['bytes'][-1][way] for row in group) / 1e6:.2f}"

    cells = {
        "dropout": lambda group: group[0]["dropout"],
        "K": lambda group: group[0]["stages"],
        "method": lambda group: group[0]["method"],
        "setting": lambda group: group[0]["setting"],
        "seeds": len,
        "training loss": lambda group: spread(values(group, "train_loss")),
        "above FP32": above,
        "held-out loss": lambda group: spread(values(group, "eval_loss")),
    }
    if task in METRICS:
        cells[METRICS[task]] = lambda group: spread(values(group, "metric"), 3)
    cells |= {
        "MB forward": lambda group: megabytes(group, 0),
        "MB back": lambda group: megabytes(group, 1),
        "of FP32's": lambda group: f"{100 * statistics.mean(map(share, group)):.1f} %",
    }
    for r in LINKS:
        heading = f"s to FP32's loss, r = {r:g}"
        cells[heading] = lambda group, r=r: _seconds(group, references(rows, group[0]), r)
    cells["remembered MB"] = lambda group: f"{statistics.mean(values(group, 'store_bytes')) / 1e6:.1f}"
    return page.columns(cells, page.grouped(rows, "dropout", "stages", "method", "setting"))


def _curves(rows: Sequence[Row]) -> dict[tuple[str, int, str], list[tuple[float, float]]]:
    """By dropout, K and method."""
    return {
        (group[0]["dropout"], group[0]["stages"], group[0]["method"]): curve(
            page.grouped(group, "setting"), references(rows, group[0])
        )
        for group in page.grouped(rows, "dropout", "stages", "method")
        if group[0]["method"] != REFERENCE
    }


def _equal(rows: Sequence[Row]) -> list[str]:
    def cell(points: Sequence[tuple[float, float]], budget: float) -> str:
        difference = at_most(points, budget)
        return "–" if difference is None else f"{difference:+.2f} %"

    headings = ["dropout", "K", "method", *(f"{100 * budget:g} %" for budget in BUDGETS)]
    lines = [[*key, *(cell(points, budget) for budget in BUDGETS)] for key, points in _curves(rows).items()]
    return page.table(headings, lines)


def draw(rows: Sequence[Row], file: Path) -> None:
    """Loss over bytes, a curve for each method; dashed with dropout. Of each task the largest K."""
    tasks = page.grouped(rows, "task")
    methods = list(dict.fromkeys(row["method"] for row in rows))
    with page.picture(file, across=len(tasks), size=(5 * len(tasks) + 2, 5)) as axes:
        import matplotlib
        from matplotlib.ticker import FormatStrFormatter

        colors = matplotlib.colormaps["tab20"]
        for axis, group in zip(axes, tasks, strict=True):
            K = max(values(group, "stages"))
            for (dropout, stages, method), points in _curves(group).items():
                if stages == K and points:
                    style = {"color": colors(methods.index(method)), "marker": "o", "markersize": 3}
                    style |= {"linestyle": "-" if dropout == "without" else "--"}
                    axis.plot(*zip(*((100 * size, loss) for size, loss in points), strict=True), **style)
            axis.set(title=f"{group[0]['task']}, K = {K}", xlabel="bytes, % of FP32's", ylabel="loss above FP32's, %")
            axis.set_xscale("log")
            axis.set_yscale("symlog", linthresh=1)
            axis.xaxis.set_major_formatter(FormatStrFormatter("%g"))
            axis.xaxis.set_minor_formatter(FormatStrFormatter("%g"))
            axis.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        curves = [matplotlib.lines.Line2D([], [], color=colors(i)) for i in range(len(methods))]
        named = [(curve, method) for curve, method in zip(curves, methods, strict=True) if method != REFERENCE]
        axes[-1].legend(*zip(*named, strict=True), fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
