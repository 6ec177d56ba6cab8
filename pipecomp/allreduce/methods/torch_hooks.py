"""torch's own DDP hooks, their traffic counted, also for tensors without DDP; half precision is one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from pipecomp.allreduce.adaptive_options import Adaptive
from pipecomp.allreduce.call import Counters, Name
from pipecomp.allreduce.exchanges import Piece, Plan, Shapes, ring
from pipecomp.allreduce.method import HookAverage, Method
from pipecomp.errors import ConfigError
from pipecomp.stats import ring_bytes


@dataclass(frozen=True, kw_only=True)
class Half(Method):
    """`fp16`: half precision."""

    def hook(self, group: Any, adaptive: Adaptive | None = None) -> HookAverage:
        return HalfHook(started("fp16", group))

    def plain_hook(self, group: Any) -> Callable[[Any], Any]:
        """torch's own function, for comparison."""
        return lambda bucket: default_hooks.fp16_compress_hook(group, bucket)

    def plan(self, d: int, n: int, shapes: Shapes | None = None) -> Plan:
        return Plan((), ((Piece(ring(2 * d, n)),),))


def started(name: str, group: Any) -> Any:
    """`group`, if there is torch.distributed; ConfigError otherwise."""
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

    def run(self, bucket: Any, key: str, counters: Counters, layers: Sequence[Name]) -> torch.futures.Future[Tensor]:
        """See HookAverage."""
        values = bucket.buffer().numel()
        future = timed(lambda: default_hooks.fp16_compress_hook(self._group, bucket), counters)
        counters.bytes_sent += ring_bytes(2 * values, dist.get_world_size(self._group))
        return future


def timed(start: Callable[[], Any], counters: Counters) -> torch.futures.Future[Tensor]:
    """What a hook's future has, its time counted as waiting."""
    began = time.perf_counter()
    return start().then(lambda done: _counted(done, began, counters))


def _counted(future: Any, began: float, counters: Counters) -> Tensor:
    value = future.value()
    counters.seconds["wait"] += time.perf_counter() - began
    tensor: Tensor = value[0] if isinstance(value, list) else value
    return tensor
