"""How many micro-batches a stage has under way: forwards that it runs ahead of their backwards.

1F1B holds one for each stage from here to the end, which is enough where packets take no time. On slow or distant
links a stage would wait for gradients that are still on their way, so all run further ahead, as long as that makes them
wait less and memory allows it. The order of additions does not change: results are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

_SHARE = 0.02  # of a step: waiting less than that is not worth memory
_BETTER = 0.9  # waiting must shrink to this, or one micro-batch less is as good
_WINDOW = 2  # steps that one setting is looked at
_AGAIN = 100  # steps after which a settled number is tried anew: links change
_MEMORY = 0.25  # of the free memory that running ahead may take


def numbers(slack: int, stages: int, micro_batches: int) -> tuple[int, ...]:
    """Each stage's number: `slack` more than the next stage's, so that every link has as many under way; 1 is 1F1B.

    A stage must not have as many as the one before it, or more: its next forward would come before a backward that is
    ready, and wait for an activation that its neighbour sends only after that backward.
    """
    return tuple(min(micro_batches, 1 + (stages - 1 - k) * slack) for k in range(stages))


class InFlight:
    """The numbers of all stages. setting: a fixed number for the first stage, or "auto"; micro_batches: of a step.

    With "auto" every stage must be told the same in `observe`, so that all change together.
    """

    def __init__(self, setting: int | str, stage: int, stages: int, micro_batches: int) -> None:
        self._auto = setting == "auto" and stages > 1
        self._place = (stage, stages, micro_batches)
        self.slack = 1
        self.limit = max(1, -(-(micro_batches - 1) // max(1, stages - 1)))
        if isinstance(setting, int) and stages > 1:
            self.slack = min(self.limit, max(1, (setting - 1) // (stages - 1)))
        self._waits: list[float] = []
        self._before: float | None = None
        self._settled_for: int | None = None

    @property
    def value(self) -> int:
        """This stage's number."""
        stage, stages, micro_batches = self._place
        return numbers(self.slack, stages, micro_batches)[stage]

    @property
    def observing(self) -> bool:
        """Whether the next `observe` looks at what it is told; the same on all stages."""
        return self._auto and self._settled_for is None

    def observe(self, waited_s: float, step_s: float) -> None:
        """Settle the next step's numbers, after a step.

        waited_s: for gradients of other micro-batches than the first; step_s: of the whole step; the most of any stage.
        """
        if not self._auto:
            return
        if self._settled_for is not None:
            self._settled_for += 1
            if self._settled_for >= _AGAIN:
                self._settled_for, self._before = None, None
            return
        self._waits.append(waited_s)
        if len(self._waits) < _WINDOW:
            return
        waited_s = min(self._waits)
        self._waits.clear()
        if self._before is not None and waited_s > _BETTER * self._before:
            self.slack -= 1
            self._settled_for = 0
        elif waited_s > _SHARE * step_s and self.slack < self.limit:
            self.slack, self._before = self.slack + 1, waited_s
        else:
            self._settled_for = 0

    def allow(self, bytes_each: int, free_bytes: int) -> None:
        """Limit the number by memory: what one micro-batch keeps for its backward, and what is free."""
        stage, stages, _ = self._place
        after = stages - 1 - stage
        if self._auto and bytes_each and after:
            self.limit = max(1, min(self.limit, (after + int(_MEMORY * free_bytes / bytes_each)) // after))


class KeptBytes:
    """Counts what a forward keeps for its backward. without: tensors that do not count, such as parameters."""

    def __init__(self, without: Iterable[torch.Tensor] = ()) -> None:
        self.bytes = 0
        self._without = {tensor.untyped_storage()._cdata for tensor in without}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the storages that autograd saves inside, each once. Fake ones, which have no address, count too."""
        seen: dict[int, torch.UntypedStorage] = {}  # alive, so that no number is given twice

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in seen and storage._cdata not in self._without:
                seen[storage._cdata] = storage
                self.bytes += storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
