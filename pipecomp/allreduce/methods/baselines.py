"""The uncompressed mean, and half precision by torch's hook; helpers for torch's DDP hooks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from pipecomp.allreduce.call import Call, Counters, Name
from pipecomp.allreduce.error_feedback import Residuals
from pipecomp.allreduce.method import (
    FLOAT,
    Average,
    ExchangePlan,
    GradientMethod,
    HookAverage,
    PiecePlan,
    Shapes,
    ring,
    scattered,
)
from pipecomp.allreduce.reduce_scatter import reduce_bucket
from pipecomp.config.gradients import Adaptive
from pipecomp.errors import ConfigError
from pipecomp.stats import ring_bytes


class Uncompressed(GradientMethod):
    """`none`: values in their own dtype. The plan is that of float32."""

    def average(self, residuals: Residuals) -> Average:
        return PlainAverage()

    def plan(self, d: int, n: int, shapes: Shapes | None = None) -> ExchangePlan:
        return ExchangePlan((), (scattered(d, n, lambda count: FLOAT * count),))


class FloatCode:
    """Values in the bucket's own dtype, added in float32 in the order of ranks."""

    def __init__(self, dtype: torch.dtype, call: Call) -> None:
        self._dtype, self._n = dtype, call.group.size

    def encoded_bytes(self, count: int) -> int:
        """Return the bytes of `count` values."""
        return count * self._dtype.itemsize

    reduced_bytes = encoded_bytes

    def encode(self, x: Tensor, start: int) -> Tensor:
        """Return the values' bytes."""
        return x.view(torch.uint8)

    def reduce(self, parts: list[Tensor], count: int, start: int) -> Tensor:
        """Return the mean's bytes."""
        total = parts[0].view(self._dtype).to(torch.float32, copy=True)
        for part in parts[1:]:
            total += part.view(self._dtype)
        return total.div_(self._n).to(self._dtype).view(torch.uint8)

    def decode(self, reduced: Tensor, out: Tensor, start: int) -> None:
        """Write the mean."""
        out.copy_(reduced.view(self._dtype))


class PlainAverage:
    """The mean of all ranks' values."""

    def mean(self, x_d: Tensor, out_d: Tensor, call: Call) -> None:
        """Average. NaN and Inf propagate as in a sum."""
        reduce_bucket(x_d, out_d, FloatCode(x_d.dtype, call), call)


class HalfPrecision(GradientMethod):
    """`fp16`: torch's hook."""

    def hook(self, group: Any, adaptive: Adaptive | None = None) -> HookAverage:
        return HalfPrecisionHook(require_distributed("fp16", group))

    def plan(self, d: int, n: int, shapes: Shapes | None = None) -> ExchangePlan:
        return ExchangePlan((), ((PiecePlan(ring(2 * d, n)),),))


class HalfPrecisionHook:
    """torch's hook; counts the bytes of a ring all-reduce."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def run(self, bucket: Any, key: str, counters: Counters, layers: Sequence[Name]) -> torch.futures.Future[Tensor]:
        """Average a bucket."""
        values = bucket.buffer().numel()
        future = count_wait(lambda: default_hooks.fp16_compress_hook(self._group, bucket), counters)
        counters.bytes_sent += ring_bytes(2 * values, dist.get_world_size(self._group))
        return future


# -- torch's DDP hooks


def require_distributed(method: str, group: Any) -> Any:
    """Return `group`. Raises ConfigError if torch.distributed is not initialized."""
    if not dist.is_initialized():
        hint = "torch's hooks need torch.distributed."
        raise ConfigError("gradients.method", method, "a method other than 'fp16' and 'powersgd'", hint)
    return group


class SingleTensorBucket:
    """A single tensor in the form of a DDP bucket, for hooks. number: index of its error-feedback residual."""

    def __init__(self, tensor: Tensor, number: int) -> None:
        self._tensor, self._number = tensor, number

    def index(self) -> int:
        """Return the number of the residual."""
        return self._number

    def buffer(self) -> Tensor:
        """Return the flat values."""
        return self._tensor.view(-1)

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the values."""
        self._tensor.view(-1).copy_(buffer)

    def gradients(self) -> list[Tensor]:
        """Return the values in their shape."""
        return [self._tensor]

    def parameters(self) -> list[Tensor]:
        """Return the same as `gradients`: there is no parameter."""
        return [self._tensor]

    def is_last(self) -> bool:
        """Each tensor is a step of its own."""
        return True


def count_wait(start: Callable[[], Any], counters: Counters) -> torch.futures.Future[Tensor]:
    """Start a hook, and count the time until its future is done as waiting."""
    began = time.perf_counter()

    def done(future: Any) -> Tensor:
        value = future.value()
        counters.seconds["wait"] += time.perf_counter() - began
        tensor: Tensor = value[0] if isinstance(value, list) else value
        return tensor

    return start().then(done)
