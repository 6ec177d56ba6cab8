"""QSGD-MN: linear levels under the largest L2 norm of all workers, with one scale or several. Unbiased.

Source: arXiv:2109.12497.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pipecomp.allreduce.call import Call
from pipecomp.allreduce.dithering import (
    DitheredAverage,
    LeastIndexCode,
    LinearCode,
    count_error,
    levels_of,
    linear_plan,
)
from pipecomp.allreduce.error_feedback import Residuals
from pipecomp.allreduce.exchanges import Piece, Plan, Shapes, packed, scattered, to_all
from pipecomp.allreduce.method import Average, LinearLevels, Method, many_widths, option, widths
from pipecomp.allreduce.norms import finish_without_codes, shared_norm
from pipecomp.allreduce.reduce_scatter import reduce_bucket
from pipecomp.kernels import ops

MAX_OF_L2 = (2.0, math.inf)


@dataclass(frozen=True, kw_only=True)
class QsgdMn(LinearLevels):
    """`qsgd_mn`. bits: of a value."""

    def average(self, residuals: Residuals) -> Average:
        return DitheredAverage(self.bits, MAX_OF_L2)

    def plan(self, d: int, n: int, shapes: Shapes | None = None) -> Plan:
        return Plan((to_all(8, n),), (linear_plan(d, n, self.bits),))


@dataclass(frozen=True, kw_only=True)
class QsgdMnTs(Method):
    """`qsgd_mn_ts`. bits: of the scales, the narrow one first; codes are as wide as that."""

    bits: tuple[int, ...] = option((4, 8), widths)

    measured: ClassVar = ({"bits": (4, 8)},)

    def check(self, name: str) -> None:
        many_widths(self.bits, name)

    def average(self, residuals: Residuals) -> Average:
        return MultiScaleAverage(self.bits)

    def plan(self, d: int, n: int, shapes: Shapes | None = None) -> Plan:
        return Plan((to_all(8, n),), multi_scale_plan(d, n, self.bits))


def multi_scale_plan(d: int, n: int, bits: tuple[int, ...]) -> tuple[tuple[Piece, ...], ...]:
    """First which scale each value has, then its code."""
    return scattered(d, n, packed((len(bits) - 1).bit_length())), linear_plan(d, n, bits[0])


class MultiScaleAverage:
    """Of two or more scales each value gets the finest that fits it on every worker."""

    def __init__(self, bits: tuple[int, ...]) -> None:
        self._bits = bits[0]
        self._levels = tuple(levels_of(b) for b in bits)

    def mean(self, x_d: Tensor, out_d: Tensor, call: Call, sent_d: Tensor | None = None) -> None:
        """See DitheredAverage. Scales are picked before anything is rounded: picking by what was drawn is a bias."""
        norm = shared_norm(x_d, MAX_OF_L2, call)
        if finish_without_codes(norm, out_d):
            return
        with call.counters.part("quantize"):
            index_d = ops.multiscale_index(x_d, norm, self._levels)
        reduce_bucket(index_d, index_d, LeastIndexCode(len(self._levels)), call)
        code = LinearCode(norm, self._bits, call, levels=self._levels, scale_index_d=index_d)
        count_error(x_d, code, call, sent_d)
        reduce_bucket(x_d, out_d, code, call)
