"""The order of a stage's work in one training step, and the number of micro-batches in flight.

1F1B with eager sends: a stage runs as many forwards ahead as there are stages from it to the end, or more, and then
alternates between backwards and forwards. Packets are sent as soon as they exist. A transport accepts packets at any
time, so a receive waits only for its own packet and no order of the two ends can deadlock.

Note: [Where the schedule lives] The engine runs this schedule, and the planner simulates it. It is a module of its own,
below both, so that a plan loads neither the engine nor DeepSpeed.

K stages, M micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

_WORTH_SHARE = 0.02  # waits shorter than this share of a step are not worth memory
_IMPROVEMENT = 0.9  # waits must shrink to this share, or the last increase is undone
_WINDOW = 2  # steps observed for one setting
_RETRY = 100  # steps after which a settled number is tried anew, because links change
_MEMORY_SHARE = 0.25  # share of the free memory for activations of additional micro-batches


class StageAction(NamedTuple):
    """One action of a stage for one micro-batch.

    kind: "receive activation", "load", "forward", "send activation", "receive gradient", "backward", "send gradient".
    """

    kind: str
    micro_batch: int


def train_order(
    stage: int, stages: int, micro_batches: int, in_flight: int, lowest: int = 0
) -> Iterator[list[StageAction]]:
    """Yield the actions of one step of stage `stage` of `stages`, a list for each forward or backward.

    in_flight: forwards that run ahead of their backwards, 1 to `micro_batches`. lowest: `SplitPlan.lowest_trained`;
    the stages before it have no backwards.
    """
    if stage < lowest:
        for micro_batch in range(micro_batches):
            yield forward_actions(stage, stages, micro_batch)
        return
    for micro_batch in range(in_flight):
        yield forward_actions(stage, stages, micro_batch)
    for micro_batch in range(micro_batches):
        yield _backward_actions(stage, stages, micro_batch, lowest)
        if micro_batch + in_flight < micro_batches:
            yield forward_actions(stage, stages, micro_batch + in_flight)


def forward_actions(stage: int, stages: int, micro_batch: int) -> list[StageAction]:
    """List the actions of one forward; the first and the last stage load data."""
    first, last = stage == 0, stage == stages - 1
    kinds = {"receive activation": not first, "load": first or last, "forward": True, "send activation": not last}
    return [StageAction(kind, micro_batch) for kind, done in kinds.items() if done]


def _backward_actions(stage: int, stages: int, micro_batch: int, lowest: int) -> list[StageAction]:
    kinds = {"receive gradient": stage < stages - 1, "backward": True, "send gradient": stage > lowest}
    return [StageAction(kind, micro_batch) for kind, done in kinds.items() if done]


def in_flight_counts(slack: int, stages: int, micro_batches: int, lowest: int = 0) -> tuple[int, ...]:
    """Micro-batches in flight of each stage: `slack` more than at the next stage; a slack of 1 is 1F1B.

    Every stage must have more than the next one. Otherwise its next forward would come before a backward that is ready,
    and wait for an activation that its neighbour sends only after that backward. Stages before `lowest` keep nothing
    for a backward: 1.
    """
    return tuple(1 if k < lowest else min(micro_batches, 1 + (stages - 1 - k) * slack) for k in range(stages))


def slack_of(setting: int, stages: int, lowest: int = 0) -> int:
    """Return the slack with which the first stage that has backwards has at most `setting` micro-batches in flight."""
    return max(1, (setting - 1) // max(1, stages - 1 - lowest))


class InFlight:
    """The number of micro-batches in flight of one stage.

    Note: [Running ahead] 1F1B holds one micro-batch for each stage from here to the end, which keeps all stages busy if
    packets take no time. On slow or distant links a stage would wait for gradients that are still in transit. With
    "auto" all stages run further ahead as long as that shortens the waits and memory allows it. The order of additions
    does not change, so results are the same bit for bit.

    Args:
        setting: The number of the first stage that has backwards, or "auto".
        stage: Index of this stage.
        stages: K.
        micro_batches: M.
        lowest: `SplitPlan.lowest_trained`.
    """

    def __init__(self, setting: int | str, stage: int, stages: int, micro_batches: int, lowest: int = 0) -> None:
        later = stages - 1 - lowest  # stages that send gradients
        self._auto = setting == "auto" and later > 0
        self._stage, self._stages, self._micro_batches, self._lowest = stage, stages, micro_batches, lowest
        self.slack = 1
        self.limit = max(1, -(-(micro_batches - 1) // max(1, later)))  # of slack
        if isinstance(setting, int):
            self.slack = min(self.limit, slack_of(setting, stages, lowest))
        self._waits: list[float] = []
        self._wait_before: float | None = None  # with one less
        self._settled_steps: int | None = None  # since the number was settled; None while it is being searched

    @property
    def value(self) -> int:
        """The number of this stage."""
        return in_flight_counts(self.slack, self._stages, self._micro_batches, self._lowest)[self._stage]

    @property
    def observing(self) -> bool:
        """True if the next `observe` uses its arguments; the same on all stages."""
        return self._auto and self._settled_steps is None

    def observe(self, waited_s: float, step_s: float) -> None:
        """Choose the number for the next step. All stages must pass the same values, so that all change together.

        Args:
            waited_s: Seconds of the last step spent waiting for gradients of micro-batches other than the first; the
                maximum over stages.
            step_s: Seconds of the last step; the maximum over stages.
        """
        if not self._auto:
            return
        if self._settled_steps is not None:
            self._settled_steps += 1
            if self._settled_steps >= _RETRY:
                self._settled_steps, self._wait_before = None, None
            return
        self._waits.append(waited_s)
        if len(self._waits) < _WINDOW:
            return
        waited_s = min(self._waits)
        self._waits.clear()
        if self._wait_before is not None and waited_s > _IMPROVEMENT * self._wait_before:
            self.slack -= 1
            self._settled_steps = 0
        elif waited_s > _WORTH_SHARE * step_s and self.slack < self.limit:
            self.slack, self._wait_before = self.slack + 1, waited_s
        else:
            self._settled_steps = 0

    def limit_by_memory(self, bytes_each: int, free_bytes: int) -> None:
        """Lower `limit` to what fits. bytes_each: saved for the backward of one micro-batch."""
        later_stages = self._stages - 1 - self._stage
        if self._auto and bytes_each and later_stages:
            fitting = later_stages + int(_MEMORY_SHARE * free_bytes / bytes_each)
            self.limit = max(1, min(self.limit, fitting // later_stages))


class SavedTensorBytes:
    """Counts the bytes that a forward saves for its backward.

    exclude: tensors that do not count, such as parameters.
    """

    def __init__(self, exclude: Iterable[torch.Tensor] = ()) -> None:
        self.bytes = 0
        self._exclude = {tensor.untyped_storage()._cdata for tensor in exclude}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the storages that autograd saves in the body, each once. Fake tensors, without an address, count."""
        counted: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no address is reused

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in counted and storage._cdata not in self._exclude:
                counted[storage._cdata] = storage
                self.bytes += storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
