"""What a training step takes over a link of a given rate, from measured compute and bytes.

The engine's own schedule is played through event by event: a stage computes one thing at a time, a link carries one
message at a time in each direction, both directions at once, and nothing waits but for what it needs.

K stages, M micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """forward_s, backward_s: seconds of one micro-batch per stage, quantizing included. forward_bytes,
    backward_bytes: of one micro-batch's message per link. update_s: seconds after the last backward, per step.
    update_bytes: what is reduced between stages after the last backward, one way.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    forward_bytes: Sequence[float]
    backward_bytes: Sequence[float]
    micro_batches: int
    update_s: float = 0.0
    update_bytes: float = 0.0


def order_of_work(stage: int, stages: int, micro_batches: int, in_flight: int | None = None) -> list[tuple[str, int]]:
    """What stage `stage` computes, in order: ("forward" or "backward", micro-batch), as `schedule.TrainSchedule`."""
    least = stages - stage
    ahead = max(1, min(micro_batches, least if in_flight is None or least == 1 else max(least, in_flight)))
    work = [("forward", m) for m in range(ahead)]
    for m in range(micro_batches):
        work.append(("backward", m))
        if m + ahead < micro_batches:
            work.append(("forward", m + ahead))
    return work


def step_seconds(costs: StepCosts, bits_per_s: float, latency_s: float = 0.0, in_flight: int | None = None) -> float:
    """Seconds from the first forward to the end of the update, over links of `bits_per_s` in each direction.

    in_flight: as in the configuration; None is 1F1B's number, micro_batches is what "auto" may reach.
    """
    stages = len(costs.forward_s)
    pending = [order_of_work(k, stages, costs.micro_batches, in_flight) for k in range(stages)]
    position = [0] * stages
    free = [0.0] * stages
    arrived: dict[tuple[str, int, int], float] = {}  # (work, stage, micro-batch) -> when its input is there
    link_free = {(way, k): 0.0 for way in ("forward", "backward") for k in range(stages)}
    for m in range(costs.micro_batches):
        arrived["forward", 0, m] = 0.0
    finished_forward: dict[tuple[int, int], float] = {}
    while any(position[k] < len(pending[k]) for k in range(stages)):
        moved = False
        for k in range(stages):
            while position[k] < len(pending[k]):
                what, m = pending[k][position[k]]
                if what == "backward" and k == stages - 1:
                    ready = finished_forward.get((k, m))
                else:
                    ready = arrived.get((what, k, m))
                if ready is None:
                    break
                seconds = costs.forward_s[k] if what == "forward" else costs.backward_s[k]
                free[k] = max(free[k], ready) + seconds
                position[k] += 1
                moved = True
                if what == "forward":
                    finished_forward[k, m] = free[k]
                target = k + 1 if what == "forward" else k - 1
                if 0 <= target < stages:
                    link = (what, min(k, target))
                    size = (costs.forward_bytes if what == "forward" else costs.backward_bytes)[link[1]]
                    link_free[link] = max(link_free[link], free[k]) + 8 * size / bits_per_s
                    arrived[what, target, m] = link_free[link] + latency_s
        assert moved, "the schedule waits for itself"
    return max(free) + costs.update_s + 8 * costs.update_bytes / bits_per_s
