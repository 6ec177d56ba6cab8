"""PowerSGD and half precision: torch's own DDP hooks, their traffic counted, also for tensors without DDP."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from pipecomp.allreduce.call import Counters
from pipecomp.errors import ConfigError
from pipecomp.gradient_config import Gradients


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


class TorchHook:
    """ "powersgd" or "fp16". Bytes are those of a ring all-reduce of what the hook reduces."""

    def __init__(self, options: Gradients, group: Any) -> None:
        if not dist.is_initialized():
            raise ConfigError(
                "gradients.method", options.method, "a method other than torch's own hooks without torch.distributed"
            )
        self._group, self._rank = group, options.rank or 0
        self._states: dict[str, Any] = {}
        self._fp16 = options.method == "fp16"
        self._size = dist.get_world_size(group)
        self._last: torch.futures.Future[Tensor] | None = None

    def _state(self, key: str) -> Any:
        """PowerSGD's memory: DDP's buckets share one, each lone tensor has its own, as its count of steps does."""
        if key not in self._states:
            self._states[key] = powerSGD_hook.PowerSGDState(
                self._group,
                matrix_approximation_rank=self._rank,
                start_powerSGD_iter=2,
                min_compression_rate=1,
            )
        return self._states[key]

    def run(self, bucket: Any, key: str, counters: Counters) -> torch.futures.Future[Tensor]:
        """The mean of a bucket."""
        counters.bytes_sent += self._ring(self._sent_values(bucket, key))
        began = time.perf_counter()
        if self._fp16:
            future = default_hooks.fp16_compress_hook(self._group, bucket)
        else:
            # Its callbacks wait, in gloo's few threads, for more of gloo's work: two at a time can block each other.
            if self._last is not None:
                self._last.wait()
            future = self._last = powerSGD_hook.powerSGD_hook(self._state(key), bucket)
        done: Callable[[Any], Tensor] = lambda f: _counted(f, began, counters)  # noqa: E731
        return future.then(done)

    def _ring(self, size: int) -> int:
        return 2 * size * (self._size - 1) // self._size

    def _sent_values(self, bucket: Any, key: str) -> int:
        """Bytes that enter an all-reduce."""
        buffer = bucket.buffer()
        if self._fp16:
            return 2 * int(buffer.numel())
        if self._state(key).iter < 2:
            return int(buffer.numel() * buffer.element_size())
        values = 0
        for g in bucket.gradients():
            n, m = (g.shape[0], g.numel() // g.shape[0]) if g.dim() > 1 else (1, g.numel())
            rank = min(n, m, self._rank)
            small = g.dim() <= 1 or n * m <= (n + m) * rank
            values += g.numel() if small else (n + m) * rank
        return values * int(buffer.element_size())


def _counted(future: Any, began: float, counters: Counters) -> Tensor:
    value = future.value()
    counters.seconds["wait"] += time.perf_counter() - began
    tensor: Tensor = value[0] if isinstance(value, list) else value
    return tensor
