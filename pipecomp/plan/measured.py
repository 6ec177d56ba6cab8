"""What a run's own counters (`engine.comm_stats`) say of each stage, for the simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipecomp.plan.simulation import StageCosts


def measured_costs(stats: Mapping[str, Any], micro_batches: int) -> StageCosts:
    """Means over a rank's steps so far. stats: its `comm_stats`; micro_batches: of a step."""
    seconds = stats["seconds"]
    each = stats["steps"] * micro_batches
    messages = max(1, each * len(stats["links"]))  # one each way on every link for every micro-batch
    return StageCosts(
        forward_s=seconds["forward"] / each,
        backward_s=seconds["backward"] / each,
        encode_s=seconds["encode"] / messages,
        decode_s=seconds["decode"] / messages,
    )


def measured_end(stats: Sequence[Mapping[str, Any]]) -> float:
    """Seconds of a step after its last backward, from all ranks' `comm_stats`.

    Reductions and the global norm wait for the slowest stage; the rank that spends least there is the one that the
    others wait for.
    """
    return min((s["seconds"]["reduce"] + s["seconds"]["update"]) / s["steps"] for s in stats)
