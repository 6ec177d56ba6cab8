"""One averaging call: its context and counters, and the norms and limits that ranks agree on before they send codes.

Norms over workers are ‖x‖_{q,p} = (Σ_i ‖x_i‖_q^p)^(1/p), with x_i the values of worker i.
Shape suffix: d values of a bucket.
"""

from __future__ import annotations

import math
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
Slices = tuple[tuple[Name, int], ...]  # (parameter, number of values) for each parameter of a bucket
PARTS = ("quantize", "wait", "reduce", "decode")
SAMPLE = 1 << 16  # leading values of a bucket whose compression error is measured
LARGEST = float(torch.finfo(torch.float32).max)
_SAFE = (1e-12, 1e15)  # norms between these cannot have lost squares of float32 values to under- or overflow
_HOST = HostStaging()
_NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(slots=True)
class Counters:
    """Totals of a state on this rank.

    Attributes:
        calls: averages.
        bytes_raw: what ring all-reduces of the buckets in their own dtype would have sent.
        bytes_sent: bytes sent.
        error_sum, error_count: sum and number of relative errors, see `add_error`.
        seconds: by part: quantize (with norms), wait (for other ranks), reduce (other ranks' values), decode.
    """

    calls: int = 0
    bytes_raw: int = 0
    bytes_sent: int = 0
    error_sum: float = 0.0
    error_count: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of the body to a part."""
        began = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - began

    def add_error(self, x: Tensor, decoded: Tensor) -> None:
        """Add the relative error ‖x − decoded‖ / ‖x‖ of a part of a bucket."""
        x = x.to(torch.float64)  # float32 cannot hold the squares of all float32 values
        norm = float(torch.linalg.vector_norm(x))
        if norm > 0:
            self.error_sum += float(torch.linalg.vector_norm(x - decoded)) / norm
            self.error_count += 1

    def as_dict(self) -> dict:
        """Return plain values for reports."""
        return {
            "calls": self.calls,
            "bytes_raw": self.bytes_raw,
            "bytes_sent": self.bytes_sent,
            "relative_error": self.error_sum / self.error_count if self.error_count else None,
            "seconds": dict(self.seconds),
        }


@dataclass(frozen=True, slots=True)
class Call:
    """Context of one averaging call.

    Attributes:
        group: the ranks.
        counters: counters of the state.
        seed: seed of the run.
        number: calls before this one, the same on all ranks.
        key: names the error-feedback residual.
        slices: parameters of the bucket; None for a tensor by itself.
        norm: norm over all workers, if it is known already.
        staging: copies codes between the device that quantizes and the host that sends.
        may_drop: whether the mean of a parameter without gradient on any rank is dropped, as DDP does.
    """

    group: Group
    counters: Counters
    seed: int
    number: int
    key: str
    slices: Slices | None = None
    norm: float | None = None
    staging: Staging = _HOST
    may_drop: bool = False

    def to_host(self, codes: Tensor) -> Copy:
        """Start to copy codes (uint8) to the host."""
        return self.staging.to_host(codes) if codes.numel() else FinishedCopy(_NOTHING)

    def to_device(self, received: Tensor) -> Copy:
        """Start to copy received bytes to the device."""
        return self.staging.to_device(received) if received.numel() else FinishedCopy(received)

    def draw(self, *purpose: int) -> int:
        """Return a seed for random numbers that is the same on all ranks."""
        return ops.mix_seed(self.seed, self.number, *purpose)


# -- norms and limits


def local_norm(x_d: Tensor, q: float) -> float:
    """Return ‖x‖_q of one worker, q in [1, inf], for magnitudes from 1e-37 to 1e38; NaN or Inf if x holds any."""
    if x_d.numel() == 0:
        return 0.0
    x_d = x_d.detach()
    if math.isinf(q):
        low, high = torch.aminmax(x_d)  # both are NaN if any value is
        return float(torch.maximum(high, -low))
    if q in (1.0, 2.0):
        norm = float(torch.linalg.vector_norm(x_d, q, dtype=torch.float32))
        if _SAFE[0] < norm < _SAFE[1]:
            return norm
    largest = local_norm(x_d, math.inf)
    if not math.isfinite(largest) or largest == 0:
        return largest
    relative = x_d.to(torch.float64) / largest
    return largest * float(torch.linalg.vector_norm(relative, q))


def squared_norm(x_d: Tensor) -> float:
    """Return ‖x‖₂² of float32 values, computed in float64."""
    return float(torch.linalg.vector_norm(x_d, dtype=torch.float64)) ** 2


def combine_norms(norms: list[float], p: float) -> float:
    """Return the p-norm of the workers' norms; NaN if one is not finite."""
    if not all(map(math.isfinite, norms)):
        return math.nan
    largest = max(norms)
    if math.isinf(p) or largest == 0:
        return largest
    return float(largest * sum((n / largest) ** p for n in norms) ** (1 / p))


def shared_norm(x_d: Tensor, exponents: tuple[float, float], call: Call) -> float:
    """Return ‖x‖_{q,p} over all workers, the same number on every rank; `call.norm` if that is set.

    It is NaN if any worker's x is not finite, or if float32 cannot hold the norm.
    """
    if call.norm is not None:
        return call.norm
    with call.counters.part("quantize"):
        local = local_norm(x_d, exponents[0])
    with call.counters.part("wait"):
        norm = combine_norms([row[0] for row in call.group.gather_numbers([local])], exponents[1])
    return norm if norm <= LARGEST else math.nan


def finish_without_codes(norm: float, out_d: Tensor) -> bool:
    """Write zeros for a norm of zero, NaN for one that is not finite; return False for others, which need codes."""
    if norm == 0:
        out_d.zero_()
    elif not math.isfinite(norm):
        out_d.fill_(math.nan)
    else:
        return False
    return True


def all_within(x_d: Tensor, call: Call, largest: float) -> bool:
    """Return whether all values of all ranks are finite and at most `largest`; the same answer on every rank."""
    return _within(_gather_limits(x_d, call), largest)


def unused_parameters(x_d: Tensor, g_d: Tensor, call: Call, largest: float) -> list[int] | None:
    """Find the parameters of a bucket without gradient on any rank, if their means are dropped.

    Note:
        Ranks with such a parameter send their limits in reverse order, so that no bytes are added. Only if all do, they
        compare which parameters it is.

    Args:
        x_d: values to be sent; their limits are exchanged.
        g_d: gradients, without residuals.
        call: context of the bucket's call.
        largest: allowed magnitude of x.

    Returns:
        Indices in `call.slices`, the same on every rank; None if a value of any rank is not finite or too large.
    """
    sizes = [count for _, count in call.slices or ()] if call.may_drop else []
    with call.counters.part("quantize"):
        starts = torch.tensor([0, *sizes]).cumsum(0)[:-1].clamp(max=max(0, g_d.numel() - 1))
        firsts = g_d[starts.to(g_d.device)].tolist() if sizes else []  # mostly enough to see that there is a gradient
        parts = zip(firsts, g_d.split(sizes) if sizes else (), strict=True)
        zero = torch.tensor([first == 0 and not bool(part.any()) for first, part in parts], dtype=torch.uint8)
    limits = _gather_limits(x_d, call, reverse=bool(zero.any()))
    if not _within(limits, largest):
        return None
    if not sizes or not all(first >= second for first, second in limits):
        return []
    with call.counters.part("wait"):
        pending = call.group.gather(zero)
        everywhere = torch.stack(pending.wait()).amin(0)
        pending.finish()
    return everywhere.nonzero().flatten().tolist()


def _gather_limits(x_d: Tensor, call: Call, *, reverse: bool = False) -> list[list[float]]:
    """Gather the smallest and the largest value of every rank."""
    with call.counters.part("quantize"):
        limits = [float(limit) for limit in torch.aminmax(x_d)]
    with call.counters.part("wait"):
        return call.group.gather_numbers(limits[::-1] if reverse else limits)


def _within(limits: list[list[float]], largest: float) -> bool:
    return all(abs(value) <= largest for row in limits for value in row)
