"""One bucket on its way: who averages it, its random numbers, where its time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipecomp.allreduce.group import Group
from pipecomp.kernels import ops
from pipecomp.kernels.staging import Copy, FinishedCopy, HostStaging, Staging

Name = int | str  # of a parameter
Slices = tuple[tuple[Name, int], ...]  # what a bucket is made of: (parameter, its values)
PARTS = ("quantize", "wait", "reduce", "decode")
_HOST = HostStaging()
_NOTHING = torch.empty(0, dtype=torch.uint8)
SAMPLE = 1 << 16  # values of a bucket's beginning of which the compression's error is measured


@dataclass(slots=True)
class Counters:
    """What a state has done so far, on this rank.

    bytes_raw: what a ring all-reduce of the buckets in their own dtype puts on this rank's links. bytes_sent: what was
    put there. seconds by part: quantize (norms too), wait (for other ranks), reduce (of other ranks' values), decode.
    """

    calls: int = 0
    bytes_raw: int = 0
    bytes_sent: int = 0
    error_sum: float = 0.0
    error_count: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside."""
        began = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - began

    def add_error(self, x: Tensor, decoded: Tensor) -> None:
        """Count ‖x − decoded‖ / ‖x‖ of a part of one bucket."""
        x = x.to(torch.float64)  # float32 does not hold the squares of all of its values
        norm = float(torch.linalg.vector_norm(x))
        if norm > 0:
            self.error_sum += float(torch.linalg.vector_norm(x - decoded)) / norm
            self.error_count += 1

    def as_dict(self) -> dict:
        """For reports."""
        return {
            "calls": self.calls,
            "bytes_raw": self.bytes_raw,
            "bytes_sent": self.bytes_sent,
            "relative_error": self.error_sum / self.error_count if self.error_count else None,
            "seconds": dict(self.seconds),
        }


@dataclass(frozen=True, slots=True)
class Call:
    """One averaging.

    number: how many came before it, the same on all ranks. key: whose error-feedback residual it uses. norm: the
    values' norm over all workers where that is known already, and nobody has to be asked. staging: between where values
    are quantized and the host, from which their codes travel.
    """

    group: Group
    counters: Counters
    seed: int
    number: int
    key: str
    slices: Slices | None = None
    norm: float | None = None
    staging: Staging = _HOST

    def to_host(self, codes: Tensor) -> Copy:
        """Start copying codes, uint8, to where they are sent from."""
        return self.staging.to_host(codes) if codes.numel() else FinishedCopy(_NOTHING)

    def to_device(self, received: Tensor) -> Copy:
        """Start copying received bytes to where they are decoded."""
        return self.staging.to_device(received) if received.numel() else FinishedCopy(received)

    def draw(self, *what: int) -> int:
        """A seed for random numbers that all ranks agree on."""
        return ops.mix_seed(self.seed, self.number, *what)
