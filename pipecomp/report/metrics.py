"""Figures computed from a run's files: loss curves, bytes per link, time per rank, time to a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, mean
from typing import Any

from pipecomp.report.reader import RunRecord, number

SMOOTH = 8  # steps
_POINTS = 60  # points of a curve, if the run has as many steps
PARTS = ("compute", "quantize + store", "wait for packets", "reduce", "update", "other")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Losses over steps and, if known, over seconds since the start.

    not_finite: Steps whose recorded loss is NaN or infinite (null in the file).
    """

    steps: list[int]
    seconds: list[float] | None
    losses: list[float]
    not_finite: list[int] = field(default_factory=list)

    def smooth(self) -> list[float]:
        """Return means over the last `SMOOTH` steps, over fewer at the beginning."""
        return [fmean(self.losses[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(self.losses))]


def training_curve(run: RunRecord) -> Curve:
    """Return the losses of all steps that have one."""
    return _curve([(line, line) for line in run.steps])


def held_out_curve(run: RunRecord) -> Curve:
    """Return the losses of the evaluations."""
    return _curve([(line, line["eval"]) for line in run.evaluations])


def _curve(found: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> Curve:
    losses = [(line, number(holder.get("loss"))) for line, holder in found]
    known = [(line, loss) for line, loss in losses if loss is not None]
    seconds = [number(line.get("seconds")) for line, _ in known]
    return Curve(
        steps=[line["step"] for line, _ in known],
        seconds=[s for s in seconds if s is not None] if seconds and None not in seconds else None,
        losses=[loss for _, loss in known],
        not_finite=[line["step"] for line, holder in found if "loss" in holder and number(holder["loss"]) is None],
    )


def seconds_to(curve: Curve, loss: float) -> float | None:
    """Return when the mean of `SMOOTH` steps first reached the loss; None if never, or if times are unknown."""
    if curve.seconds is None:
        return None
    whole = zip(curve.seconds[SMOOTH - 1 :], curve.smooth()[SMOOTH - 1 :], strict=True)
    return next((s for s, found in whole if found <= loss), None)


def common_loss(curves: Sequence[Curve]) -> float | None:
    """Return the lowest loss that at least two runs reach; None if fewer have a curve over seconds."""
    means = [curve.smooth()[SMOOTH - 1 :] for curve in curves if curve.seconds]
    lowest = sorted(min(found) for found in means if found)
    return lowest[1] if len(lowest) > 1 else None


# -- links


@dataclass(frozen=True, kw_only=True)
class LinkUse:
    """Traffic of one link since the start of the run: bytes raw and sent in each direction.

    Attributes:
        waited: Share of the training time that the endpoint with the longest wait waited; None if unknown.
        hit_rate: Share of samples that crossed as a change of a cached activation.
    """

    name: str
    forward: tuple[int, int]
    backward: tuple[int, int]
    waited: float | None
    hit_rate: float | None

    @property
    def raw(self) -> int:
        """Bytes in the training dtype, both directions."""
        return self.forward[0] + self.backward[0]

    @property
    def sent(self) -> int:
        """Bytes sent, both directions."""
        return self.forward[1] + self.backward[1]


def link_use(run: RunRecord) -> list[LinkUse]:
    """Return all links as of the last step with counters."""
    last = _last_counters(run)
    spent = sum(number(line.get("step_s")) or 0.0 for line in run.steps if line["step"] <= last.get("step", 0))
    found = []
    for name, counts in last.get("links", {}).items():
        waited = number(last.get("waits", {}).get(name))
        share = None if waited is None or not spent else min(1.0, waited / spent)
        deltas, samples = last.get("hits", {}).get(name, (0, 0))
        pairs = [(int(counts[f"{way}_bytes_raw"]), int(counts[f"{way}_bytes_sent"])) for way in ("forward", "backward")]
        found.append(
            LinkUse(
                name=str(name),
                forward=pairs[0],
                backward=pairs[1],
                waited=share,
                hit_rate=deltas / samples if samples else None,
            )
        )
    return found


def exchanged(run: RunRecord) -> tuple[int, int]:
    """Return raw and sent bytes of gradients and weights exchanged between ranks since the start."""
    groups = _last_counters(run).get("groups", {}).values()
    raw, sent = (sum(int(counts[kind]) for counts in groups) for kind in ("bytes_raw", "bytes_sent"))
    return raw, sent


def _last_counters(run: RunRecord) -> dict[str, Any]:
    """The last step's line with counters."""
    return next((line for line in reversed(run.steps) if isinstance(line.get("links"), dict)), {})


def hit_rates(run: RunRecord) -> tuple[list[int], list[float]]:
    """Return steps and the store's hit rate over all links since the previous of these steps."""
    lines = [line for line in run.steps if isinstance(line.get("hits"), dict) and line["hits"]]
    steps, rates, before = [], [], (0, 0)
    for line in lines[:: max(1, len(lines) // _POINTS)]:
        now = tuple(sum(int(pair[i]) for pair in line["hits"].values()) for i in (0, 1))
        if now[1] > before[1]:
            steps.append(line["step"])
            rates.append((now[0] - before[0]) / (now[1] - before[1]))
        before = (now[0], now[1])
    return steps, rates


def bits(run: RunRecord) -> tuple[list[int], list[list[float | None]]]:
    """Return steps and, forward and back, the mean bits per quantized value since the previous of these steps.

    None where nothing was quantized.
    """
    lines = [line for line in run.steps if isinstance(line.get("bits"), dict) and line["bits"]]
    steps: list[int] = []
    means: list[list[float | None]] = [[], []]
    before = [0, 0, 0, 0]
    for line in lines[:: max(1, len(lines) // _POINTS)]:
        now = [sum(int(counts[i]) for counts in line["bits"].values()) for i in range(4)]
        steps.append(line["step"])
        for way, series in enumerate(means):
            spent, values = (now[2 * way + i] - before[2 * way + i] for i in (0, 1))
            series.append(spent / values if values > 0 else None)
        before = now
    return steps, means


# -- ranks


@dataclass(frozen=True, kw_only=True)
class RankTime:
    """Seconds of a rank's training steps by `PARTS`."""

    rank: int
    stage: int
    replica: int
    parts: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds of all its steps."""
        return sum(self.parts.values())


def rank_times(run: RunRecord) -> list[RankTime]:
    """Return the times of all ranks since the run started or resumed."""
    stats = run.ranks.get("end") or run.ranks.get("halfway") or []
    first = int(number(run.ranks.get("first_step")) or 0)
    steps = {rank["steps"] for rank in stats}
    last = max(steps, default=0)
    spent = sum(number(line.get("step_s")) or 0.0 for line in run.steps if first < line["step"] <= last)
    return [
        RankTime(rank=r["rank"], stage=r["stage"], replica=r["replica"], parts=_parts(r["seconds"], spent))
        for r in stats
    ]


def _parts(seconds: Mapping[str, float], spent: float) -> dict[str, float]:
    known = {
        "compute": seconds["forward"] + seconds["backward"],
        "quantize + store": seconds["encode"] + seconds["decode"],
        "wait for packets": seconds["wait"],
        "reduce": seconds["reduce"],
        "update": seconds["update"],
    }
    return {**known, "other": max(0.0, spent - sum(known.values()))}


def step_seconds(run: RunRecord) -> float | None:
    """Return the mean seconds of a step in the second half of the run; None if unknown."""
    later = run.steps[len(run.steps) // 2 :]
    known = [s for s in (number(line.get("step_s")) for line in later) if s is not None]
    return mean(known) if known else None


def seconds(run: RunRecord) -> float | None:
    """Return the seconds of the whole run, evaluations included."""
    return number(run.facts.get("seconds")) or number(run.steps[-1].get("seconds"))
