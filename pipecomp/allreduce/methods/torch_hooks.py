"""PowerSGD and half precision: torch's own DDP hooks, their traffic counted, also for tensors without DDP."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from pipecomp.allreduce.call import Counters
from pipecomp.allreduce.exchanges import FLOAT, Exchange, Piece, Plan, Shapes, ring
from pipecomp.allreduce.method import HookAverage, Method, option, whole
from pipecomp.errors import ConfigError
from pipecomp.stats import ring_bytes

COMPRESSES_FROM = 2  # PowerSGD's step; before that it sends all values
_KEPT = ("error_dict", "p_memory_dict", "q_memory_dict")  # what PowerSGD keeps of each bucket


@dataclass(frozen=True, kw_only=True)
class PowerSgd(Method):
    """ "powersgd". rank: of the matrices. Source: arXiv:1905.13727."""

    rank: int = option(1, whole(1))

    by_matrix: ClassVar = True
    measured: ClassVar = ({"rank": 1}, {"rank": 2})

    def hook(self, group: Any) -> HookAverage:
        """See Method."""
        return PowerSgdHook(self, _started("powersgd", group))

    def plain_hook(self, group: Any) -> Callable[[Any], Any]:
        """torch's own function, for comparison."""
        memory = self.new_state(group)
        return lambda bucket: powerSGD_hook.powerSGD_hook(memory, bucket)

    def plan(self, d: int, n: int, shapes: Shapes | None = None) -> Plan:
        """See Method: from the step on that compresses. shapes: None for one vector."""
        flat, factors = self.sent_values(shapes or [(d,)])
        sent = ring_bytes(FLOAT * (flat + factors), n)
        reductions = (flat > 0) + 2 * (factors > 0)
        return Plan((), ((Piece(Exchange((sent,) * n, sent, hops=2 * (n - 1) * reductions)),),))

    def sent_values(self, shapes: Shapes) -> tuple[int, int]:
        """Values that enter all-reduces: of what is too small or flat to compress, and of the matrices P and Q."""
        flat = factors = 0
        for shape in shapes:
            rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
            r = min(rows, columns, self.rank)
            if len(shape) <= 1 or rows * columns <= (rows + columns) * r:
                flat += rows * columns
            else:
                factors += (rows + columns) * r
        return flat, factors

    def new_state(self, group: Any) -> Any:
        """What torch's hook keeps from step to step."""
        return powerSGD_hook.PowerSGDState(
            group,
            matrix_approximation_rank=self.rank,
            start_powerSGD_iter=COMPRESSES_FROM,
            min_compression_rate=1,
        )


@dataclass(frozen=True, kw_only=True)
class Half(Method):
    """ "fp16": half precision."""

    def hook(self, group: Any) -> HookAverage:
        """See Method."""
        return HalfHook(_started("fp16", group))

    def plain_hook(self, group: Any) -> Callable[[Any], Any]:
        """torch's own function, for comparison."""
        return lambda bucket: default_hooks.fp16_compress_hook(group, bucket)

    def plan(self, d: int, n: int, shapes: Shapes | None = None) -> Plan:
        """See Method."""
        return Plan((), ((Piece(ring(2 * d, n)),),))


def _started(name: str, group: Any) -> Any:
    """`group`, if there is torch.distributed."""
    if not dist.is_initialized():
        raise ConfigError("gradients.method", name, "a method other than torch's own hooks without torch.distributed")
    return group


class LoneBucket:
    """One tensor in the form in which DDP gives buckets to hooks."""

    def __init__(self, tensor: Tensor, number: int) -> None:
        self._tensor, self._number = tensor, number

    def index(self) -> int:
        """Whose error-feedback residual."""
        return self._number

    def buffer(self) -> Tensor:
        """The values, flat."""
        return self._tensor.view(-1)

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the values."""
        self._tensor.view(-1).copy_(buffer)

    def gradients(self) -> list[Tensor]:
        """The values in their shape."""
        return [self._tensor]

    def parameters(self) -> list[Tensor]:
        """As `gradients`: there is no parameter."""
        return [self._tensor]

    def is_last(self) -> bool:
        """It is a step of its own."""
        return True


class HalfHook:
    """torch's hook; bytes are those of a ring all-reduce."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def run(self, bucket: Any, key: str, counters: Counters) -> torch.futures.Future[Tensor]:
        """See HookAverage."""
        counters.bytes_sent += ring_bytes(2 * bucket.buffer().numel(), dist.get_world_size(self._group))
        return _timed(lambda: default_hooks.fp16_compress_hook(self._group, bucket), counters)


class PowerSgdHook:
    """torch's hook; bytes are those of ring all-reduces of what it reduces."""

    saved_as = "torch"

    def __init__(self, options: PowerSgd, group: Any) -> None:
        self._options, self._group = options, group
        self._states: dict[str, Any] = {}
        self._last: torch.futures.Future[Tensor] | None = None

    def _state(self, key: str) -> Any:
        """DDP's buckets share one, each lone tensor has its own, as its count of steps does."""
        if key not in self._states:
            self._states[key] = self._options.new_state(self._group)
        return self._states[key]

    def run(self, bucket: Any, key: str, counters: Counters) -> torch.futures.Future[Tensor]:
        """See HookAverage."""
        state, buffer = self._state(key), bucket.buffer()
        values = buffer.numel()
        if state.iter >= COMPRESSES_FROM:
            values = sum(self._options.sent_values([g.shape for g in bucket.gradients()]))
        counters.bytes_sent += ring_bytes(values * buffer.element_size(), dist.get_world_size(self._group))
        # Its callbacks wait, in gloo's few threads, for more of gloo's work: two at a time can block each other.
        if self._last is not None:
            self._last.wait()
        future = self._last = _timed(lambda: powerSGD_hook.powerSGD_hook(state, bucket), counters)
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
                setattr(self._state(key), name, {bucket: tensor.to(device) for bucket, tensor in kept[name].items()})


def _timed(start: Callable[[], Any], counters: Counters) -> torch.futures.Future[Tensor]:
    began = time.perf_counter()
    return start().then(lambda done: _counted(done, began, counters))


def _counted(future: Any, began: float, counters: Counters) -> Tensor:
    value = future.value()
    counters.seconds["wait"] += time.perf_counter() - began
    tensor: Tensor = value[0] if isinstance(value, list) else value
    return tensor
