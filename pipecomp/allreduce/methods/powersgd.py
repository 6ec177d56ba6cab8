"""PowerSGD: torch's own DDP hook, one rank for all matrices; `powersgd_layers.py` has ranks that differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from pipecomp.allreduce.adaptive_options import Adaptive
from pipecomp.allreduce.call import Counters, Name
from pipecomp.allreduce.exchanges import FLOAT, Exchange, Piece, Plan, Shapes
from pipecomp.allreduce.method import HookAverage, Method, option, whole
from pipecomp.allreduce.methods.powersgd_layers import (
    COMPRESSES_FROM,
    LayerwisePowerSgd,
    averaged,
    new_state,
    sent_values,
)
from pipecomp.allreduce.methods.torch_hooks import started
from pipecomp.stats import ring_bytes

_KEPT = ("error_dict", "p_memory_dict", "q_memory_dict")  # what torch keeps of each bucket


@dataclass(frozen=True, kw_only=True)
class PowerSgd(Method):
    """`powersgd`. rank: of the matrices. Source: arXiv:1905.13727."""

    rank: int = option(1, whole(1))

    by_matrix: ClassVar = True
    measured: ClassVar = ({"rank": 1}, {"rank": 2})

    def adaptable(self) -> tuple[str, tuple[Any, ...]] | None:
        return "rank", (max(1, self.rank // 4), max(1, self.rank // 2), 2 * self.rank, 4 * self.rank)

    def hook(self, group: Any, adaptive: Adaptive | None = None) -> HookAverage:
        group = started("powersgd", group)
        return PowerSgdHook(self.rank, group) if adaptive is None else LayerwisePowerSgd(self.rank, adaptive, group)

    def plain_hook(self, group: Any) -> Callable[[Any], Any]:
        """torch's own function, for comparison."""
        memory = new_state(self.rank, group)
        return lambda bucket: powerSGD_hook.powerSGD_hook(memory, bucket)

    def plan(self, d: int, n: int, shapes: Shapes | None = None) -> Plan:
        """See Method: from the step on that compresses. shapes: None for one vector."""
        flat, factors = sent_values(shapes or [(d,)], self.rank)
        sent = ring_bytes(FLOAT * (flat + factors), n)
        reductions = (flat > 0) + 2 * (factors > 0)
        return Plan((), ((Piece(Exchange((sent,) * n, sent, hops=2 * (n - 1) * reductions)),),))


class PowerSgdHook:
    """torch's hook; bytes are those of ring all-reduces of what it reduces."""

    saved_as = "torch"

    def __init__(self, rank: int, group: Any) -> None:
        self._rank, self._group = rank, group
        self._states: dict[str, Any] = {}
        self._last: torch.futures.Future[Tensor] | None = None

    def _state(self, key: str) -> Any:
        """DDP's buckets share one, each lone tensor has its own, as its count of steps does."""
        if key not in self._states:
            self._states[key] = new_state(self._rank, self._group)
        return self._states[key]

    def run(self, bucket: Any, key: str, counters: Counters, layers: Sequence[Name]) -> torch.futures.Future[Tensor]:
        """See HookAverage."""
        state, buffer = self._state(key), bucket.buffer()
        values = buffer.numel()
        if state.iter >= COMPRESSES_FROM:
            values = sum(sent_values([g.shape for g in bucket.gradients()], self._rank))
        # Its callbacks wait, in gloo's few threads, for more of gloo's work: two at a time can block each other.
        if self._last is not None:
            self._last.wait()
        future = self._last = averaged(state, bucket, counters)
        counters.bytes_sent += ring_bytes(values * buffer.element_size(), dist.get_world_size(self._group))
        return future

    def state_dict(self) -> dict[Any, Any]:
        """See Stateful."""
        return {
            key: {name: {i: kept.cpu().clone() for i, kept in getattr(state, name).items()} for name in _KEPT}
            for key, state in self._states.items()
        }

    def load_state_dict(self, state: dict[Any, Any], device: torch.device) -> None:
        """See Stateful. Two steps are sent uncompressed, as at the start: DDP may make its buckets anew meanwhile."""
        for key, kept in state.items():
            for name in _KEPT:
                setattr(self._state(key), name, {i: x.to(device, copy=True) for i, x in kept[name].items()})
