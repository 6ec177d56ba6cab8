"""GRandK: the same K random coordinates on every worker; the other values are zero, or kept for later.

With error feedback the residual also holds the quantization error of the chosen values, so that nothing is lost.
Coordinates are drawn by a generator of their own, seeded by run and call, which leaves torch's global one untouched.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch
from torch import Tensor

from pipecomp.allreduce.call import LARGEST, Call, all_within, squared_norm
from pipecomp.allreduce.error_feedback import Residuals
from pipecomp.allreduce.method import Average, ExchangePlan, GradientMethod, Shapes, to_all
from pipecomp.allreduce.methods.qsgd import (
    DitheredAverage,
    MultiScaleAverage,
    linear_pieces,
    multi_scale_passes,
)
from pipecomp.config.gradients import GrandKMultiScaleOptions, GrandKOptions, RandomKOptions
from pipecomp.kernels import ops

_COORDINATES, _ORDER = 2, 5  # purposes of random draws
SUMMABLE = 2.0**100  # magnitude up to which float32 holds the L2 norm of any number of values


class GrandK(GradientMethod):
    """`grandk_mn` and `grandk_mn_ts`: QSGD-MN or, with several widths, QSGD-MN-TS on K coordinates."""

    options: GrandKOptions | GrandKMultiScaleOptions

    def average(self, residuals: Residuals) -> Average:
        bits, exponents = self.options.bits, self.options.exponents
        inner = MultiScaleAverage(bits, exponents) if isinstance(bits, tuple) else DitheredAverage(bits, exponents)
        kind = WalkingKAverage if self.options.coordinates == "walk" else RandomKAverage
        return kind(inner, self.options, residuals)

    def plan(self, d: int, n: int, shapes: Shapes | None = None) -> ExchangePlan:
        """Exchange the smallest and the largest value, then the norm, then codes."""
        bits, count = self.options.bits, self.options.count_of(d)
        passes = multi_scale_passes(count, n, bits) if isinstance(bits, tuple) else (linear_pieces(count, n, bits),)
        exact = self.options.coordinates == "random" or d % count == 0
        return ExchangePlan((to_all(16, n), to_all(8, n)), passes, exact=exact)


def random_coordinates(d: int, count: int, seed: int) -> Tensor:
    """Draw `count` different coordinates of d, uniformly over all sets; int64 [count], ascending."""
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
    """`inner` on K random coordinates, the same on all ranks. `rescale` multiplies by d/K, which keeps it unbiased."""

    exponents = None

    def __init__(
        self, inner: DitheredAverage | MultiScaleAverage, options: RandomKOptions, residuals: Residuals
    ) -> None:
        self._inner, self._options, self._residuals = inner, options, residuals
        self.largest = SUMMABLE if options.error_feedback else LARGEST

    def mean(self, x_d: Tensor, out_d: Tensor, call: Call) -> None:
        """Average. If a rank has NaN, Inf or a value above `largest`, all ranks get NaN and residuals are unchanged."""
        if self._options.error_feedback:
            with self._residuals.added_to(x_d, out_d, call, SUMMABLE) as sums:
                if sums is not None:
                    self._mean(*sums, out_d, call)
        elif all_within(x_d, call, LARGEST):  # of all values, chosen or not: loss scaling must see it
            self._mean(None, x_d, out_d, call)
        else:
            out_d.fill_(math.nan)

    def _mean(self, e_d: Tensor | None, sum_d: Tensor, out_d: Tensor, call: Call) -> None:
        """Average x + e; the residual, if there is one, becomes what is left out."""
        d = sum_d.numel()
        count = self._options.count_of(d)
        with call.counters.part("quantize"):
            index = self._coordinates(d, count, call).to(sum_d.device)
            chosen = sum_d[index]
        count = index.numel()
        mean = torch.empty(count, device=sum_d.device, dtype=torch.float32)
        sent = torch.zeros_like(mean)
        self._inner.mean(chosen, mean, call, sent_d=None if e_d is None else sent)
        with call.counters.part("decode"):
            if e_d is not None:
                e_d.copy_(sum_d)
                e_d[index] -= sent
            out_d.zero_()
            out_d[index] = mean * (d / count) if self._options.rescale else mean

    def _coordinates(self, d: int, count: int, call: Call) -> Tensor:
        """Choose `count` of d coordinates, int64."""
        return random_coordinates(d, count, call.draw(_COORDINATES))

    def squared_error(self, x_d: Tensor, call: Call) -> float:
        """Return the squared error of dropped coordinates, the mean over all sets; quantization adds little."""
        share = self._options.count_of(x_d.numel()) / x_d.numel()
        left_out = 1 / share - 1 if self._options.rescale else 1 - share
        return left_out * squared_norm(x_d)


class WalkingKAverage(RandomKAverage):
    """The next K coordinates of a random order of all, as in the code of the paper (arXiv:2109.12497).

    Every coordinate is chosen once before any is chosen again. The last part of an order may be shorter.
    """

    saved_as = "walks"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._taken: dict[str, int] = {}  # calls by key
        self._orders: dict[str, tuple[int, Tensor]] = {}  # number of a key's order, and the order

    def _coordinates(self, d: int, count: int, call: Call) -> Tensor:
        taken = self._taken.get(call.key, 0)
        self._taken[call.key] = taken + 1
        number, place = divmod(taken, -(-d // count))
        known, order = self._orders.get(call.key, (-1, torch.empty(0, dtype=torch.int64)))
        if known != number or order.numel() != d:
            seed = ops.mix_seed(call.seed, _ORDER, zlib.crc32(call.key.encode()), number)
            order = torch.randperm(d, generator=torch.Generator().manual_seed(seed))
            self._orders[call.key] = number, order
        return order[place * count : (place + 1) * count]

    def state_dict(self) -> dict[Any, Any]:
        """Return the calls by key, from which the orders follow."""
        return dict(self._taken)

    def load_state_dict(self, state: dict[Any, Any], device: torch.device) -> None:
        """Restore the calls by key."""
        self._taken, self._orders = dict(state), {}
