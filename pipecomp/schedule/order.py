"""The order of a stage's work within one training step or evaluation, as plain data.

The engine's schedule turns it into DeepSpeed's instructions, the simulation plays it through: both do the same.

1F1B with eager sends: a stage runs as many forwards ahead as there are stages from it to the end (or more, see
`in_flight`), then one backward and one forward in turn. What is sent leaves as soon as it exists, and a receive waits
only for what arrives: transports take packets in at any time, so no order of the two ends can block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Work(NamedTuple):
    """One thing that a stage does for one micro-batch.

    what: "receive activation", "load", "forward", "send activation", "receive gradient", "backward", "send gradient".
    """

    what: str
    micro_batch: int


def train_order(stage: int, stages: int, micro_batches: int, ahead: int) -> Iterator[list[Work]]:
    """List what stage `stage` of `stages` does in one step, a list for each forward or backward.

    ahead: forwards that run ahead of their backwards, 1 to `micro_batches`.
    """
    for micro_batch in range(ahead):
        yield forward_work(stage, stages, micro_batch)
    for micro_batch in range(micro_batches):
        yield _backward_work(stage, stages, micro_batch)
        if micro_batch + ahead < micro_batches:
            yield forward_work(stage, stages, micro_batch + ahead)


def forward_work(stage: int, stages: int, micro_batch: int) -> list[Work]:
    """One forward with what belongs to it; the first and the last stage load data."""
    first, last = stage == 0, stage == stages - 1
    steps = {"receive activation": not first, "load": first or last, "forward": True, "send activation": not last}
    return [Work(what, micro_batch) for what, done in steps.items() if done]


def _backward_work(stage: int, stages: int, micro_batch: int) -> list[Work]:
    steps = {"receive gradient": stage < stages - 1, "backward": True, "send gradient": stage > 0}
    return [Work(what, micro_batch) for what, done in steps.items() if done]
