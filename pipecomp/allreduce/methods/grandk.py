"""The same K random coordinates on every worker (GRandK): what is not chosen is zero, or kept for later.

With error feedback the residual also has what quantizing the chosen values left out, so that nothing is lost.

Coordinates come from a generator of their own, keyed by seed and call, so that torch's global one stays as it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pipecomp.allreduce.call import Call
from pipecomp.allreduce.dithering import DitheredAverage, linear_plan
from pipecomp.allreduce.error_feedback import Residuals
from pipecomp.allreduce.exchanges import Plan, Shapes, to_all
from pipecomp.allreduce.finite_check import with_residual, within
from pipecomp.allreduce.method import Average, Method, flag, many_widths, one_width, option, widths
from pipecomp.allreduce.methods.qsgd_mn import MAX_OF_L2, MultiScaleAverage, multi_scale_plan
from pipecomp.allreduce.norms import LARGEST, squared
from pipecomp.errors import ConfigError

_COORDINATES = 2  # what a random draw is for
SUMMABLE = 2.0**100  # values of which float32 holds the L2 norm, however many there are


def _k(key: str, value: Any) -> int | float:
    share = isinstance(value, float) and 0 < value < 1
    if not share and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(key, value, "a whole number of at least 1, or a share between 0 and 1")
    number: int | float = value
    return number


@dataclass(frozen=True, kw_only=True)
class GrandKMn(Method):
    """`grandk_mn`: QSGD-MN on K coordinates.

    bits: of a value. k: coordinates, a number of them or a share below 1. rescale: multiply by d/k, which makes it
    unbiased. error_feedback: keep what was not sent for later.
    """

    bits: Any = option(8, widths)
    k: int | float = option(10_000, _k)
    rescale: bool = option(False, flag)
    error_feedback: bool = option(False, flag)

    measured: ClassVar = ({"k": 10_000},)

    def check(self, name: str) -> None:
        one_width(self.bits, name)
        if self.rescale and self.error_feedback:
            raise ConfigError("gradients.rescale", True, "false with error_feedback: what is kept would be sent twice")

    def adaptable(self) -> tuple[str, tuple[Any, ...]] | None:
        """See Method. A number of coordinates would be one for each group of layers, however large."""
        return ("k", (self.k / 4, self.k / 2, min(2 * self.k, 0.99))) if isinstance(self.k, float) else None

    def average(self, residuals: Residuals) -> Average:
        return RandomKAverage(DitheredAverage(self.bits, MAX_OF_L2), self, residuals)

    def plan(self, d: int, n: int, shapes: Shapes | None = None) -> Plan:
        return Plan(_told_before(n), (linear_plan(self.kept(d), n, self.bits),))

    def kept(self, d: int) -> int:
        """K for a bucket of d values."""
        return min(d, max(1, round(self.k * d)) if isinstance(self.k, float) else self.k)


@dataclass(frozen=True, kw_only=True)
class GrandKMnTs(GrandKMn):
    """`grandk_mn_ts`: QSGD-MN-TS on K coordinates. bits: of the scales, the narrow one first."""

    bits: Any = option((4, 8), widths)

    def check(self, name: str) -> None:
        many_widths(self.bits, name)

    def average(self, residuals: Residuals) -> Average:
        return RandomKAverage(MultiScaleAverage(self.bits), self, residuals)

    def plan(self, d: int, n: int, shapes: Shapes | None = None) -> Plan:
        return Plan(_told_before(n), multi_scale_plan(self.kept(d), n, self.bits))


def _told_before(n: int) -> tuple[Any, ...]:
    """The least and the largest value, then the norm."""
    return to_all(16, n), to_all(8, n)


def random_coordinates(d: int, count: int, seed: int) -> Tensor:
    """`count` different coordinates of d, all sets alike likely, ascending: int64 [count]."""
    if count >= d:
        return torch.arange(d)
    generator = torch.Generator().manual_seed(seed)
    if count > d // 4:
        return torch.randperm(d, generator=generator)[:count].sort().values
    chosen = torch.empty(0, dtype=torch.int64)
    while chosen.numel() < count:
        more = torch.randint(d, (count - chosen.numel() + 16,), generator=generator)
        chosen = torch.cat([chosen, more]).unique()
    surplus = torch.randperm(chosen.numel(), generator=generator)[:count]
    return chosen[surplus].sort().values


class RandomKAverage:
    """`inner` on K shared random coordinates. rescale multiplies by d/K, which makes an unbiased method unbiased."""

    exponents = None

    def __init__(self, inner: DitheredAverage | MultiScaleAverage, options: GrandKMn, residuals: Residuals) -> None:
        self._inner, self._options, self._residuals = inner, options, residuals
        self.largest = SUMMABLE if options.error_feedback else LARGEST

    def mean(self, x_d: Tensor, out_d: Tensor, call: Call) -> None:
        """See Average. With NaN, Inf or a value above `largest` on any rank all get NaN, and no residual changes."""
        d = x_d.numel()
        count = self._options.kept(d)
        sum_d, e_d = x_d, None
        if self._options.error_feedback:
            found = with_residual(x_d, out_d, self._residuals, call, SUMMABLE)
            if found is None:
                return
            e_d, sum_d = found
        elif not within(x_d, call, LARGEST):  # also where nothing was chosen: loss scaling has to see it
            out_d.fill_(math.nan)
            return
        with call.counters.part("quantize"):
            index = random_coordinates(d, count, call.draw(_COORDINATES)).to(x_d.device)
            chosen = sum_d[index]
        mean = torch.empty(count, device=x_d.device, dtype=torch.float32)
        sent = torch.zeros_like(mean)
        self._inner.mean(chosen, mean, call, sent_d=None if e_d is None else sent)
        with call.counters.part("decode"):
            if e_d is not None:
                e_d.copy_(sum_d)
                e_d[index] -= sent
            out_d.zero_()
            out_d[index] = mean * (d / count) if self._options.rescale else mean

    def squared_error(self, x_d: Tensor, call: Call) -> float:
        """See LayerAverage: of leaving coordinates out alone, the mean over all sets of them."""
        share = self._options.kept(x_d.numel()) / x_d.numel()
        left_out = 1 / share - 1 if self._options.rescale else 1 - share
        return left_out * squared(x_d)
