"""DoubleSqueeze: workers and owners both quantize what they send to b bits, and both remember what they left out.

Each worker quantizes g + e and sends chunks to their owners; the owner averages, adds its own memory, quantizes again
and sends to all. Nearest rounding with a scale for each group of values: the memories stay bounded by the largest value
over 2^b − 1. One bit: the sign times the group's mean magnitude. Groups are small, because a group's small values are
lost beside its large ones, and Adam makes much of small values (benchmarks/results/replicas.md); so scales are
bfloat16.
Source: arXiv:1905.05957 (DoubleSqueeze); as 1-bit Adam exchanges its momentum, arXiv:2102.02888.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pipecomp.allreduce.call import SAMPLE, Call
from pipecomp.allreduce.error_feedback import Residuals
from pipecomp.allreduce.exchanges import Plan, Shapes, scattered, to_all
from pipecomp.allreduce.finite_check import within
from pipecomp.allreduce.method import REQUIRED, Average, Method, one_width, option, whole, widths
from pipecomp.allreduce.norms import squared
from pipecomp.allreduce.reduce_scatter import Span, owned_spans, reduce_bucket
from pipecomp.kernels import ops

SCALE_BYTES = 2
LARGEST = 2.0**100


@dataclass(frozen=True, kw_only=True)
class DoubleSqueeze(Method):
    """`double_squeeze`. bits: of a value. group_size: values that share a scale."""

    bits: int = option(4, widths)
    group_size: int = option(128, whole(1))

    measured: ClassVar[Any] = ({"bits": 4},)

    def check(self, name: str) -> None:
        one_width(self.bits, name, least=1)

    def adaptable(self) -> tuple[str, tuple[Any, ...]] | None:
        return "bits", (1, 2, 3, 4, 5, 6, 8)

    def average(self, residuals: Residuals) -> Average:
        return SqueezedAverage(self, residuals)

    def plan(self, d: int, n: int, shapes: Shapes | None = None) -> Plan:
        return Plan((to_all(16, n),), (scattered(d, n, self.encoded_bytes),))

    @property
    def quantizer(self) -> Any:
        """Arguments of the kernels."""
        return {"group_size": self.group_size, "scale": "mean" if self.bits == 1 else "max"}

    def code_bytes(self, count: int) -> int:
        """Of `count` values without their scales."""
        return ops.row_bytes(count, self.bits, self.group_size)

    def encoded_bytes(self, count: int) -> int:
        """Codes, then a bfloat16 scale for each group."""
        return self.code_bytes(count) + SCALE_BYTES * ops.groups(count, self.group_size) if count else 0


@dataclass(frozen=True, kw_only=True)
class MomentumSqueeze(DoubleSqueeze):
    """`quantized_adam`: an optimizer exchanges its momentum so. freeze_step: step at which the variance is frozen."""

    freeze_step: int = option(REQUIRED, whole(1))

    in_optimizer: ClassVar = True
    measured: ClassVar = ()

    def adaptable(self) -> tuple[str, tuple[Any, ...]] | None:
        return None


class SqueezedCode:
    """Groups of values as codes and bfloat16 scales, nearest rounding; `encode` and `reduce` change the residuals.

    e_d: the worker's residual of the bucket. owner_e: that of the chunks `owned` by this rank, one after the other.
    """

    def __init__(self, options: DoubleSqueeze, e_d: Tensor, owner_e: Tensor, owned: list[Span]) -> None:
        self._options, self._e_d = options, e_d
        self._owner_e = {span.start: e for span, e in zip(owned, owner_e.split([s.count for s in owned]), strict=True)}
        self._bits, self._quantizer = options.bits, options.quantizer

    def encoded_bytes(self, count: int) -> int:
        """Codes, then scales."""
        return self._options.encoded_bytes(count)

    reduced_bytes = encoded_bytes

    def encode(self, x: Tensor, start: int) -> Tensor:
        """This rank's values; the memory becomes what is missing in them."""
        if not x.numel():
            return torch.empty(0, dtype=torch.uint8)
        e = Span(start, start + x.numel()).of(self._e_d)
        return _joined(*ops.feedback_quantize_(x, e, self._bits, **self._quantizer))

    def _split(self, data: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Codes and scales; the latter need not start at a multiple of two bytes."""
        at = self._options.code_bytes(count)
        return data[:at], data[at:].clone().view(torch.bfloat16).to(torch.float32)

    def reduce(self, parts: list[Tensor], count: int, start: int) -> Tensor:
        """The quantized mean and memory of the owner, which keeps the rest."""
        if not count:
            return torch.empty(0, dtype=torch.uint8)
        codes, scales = zip(*(self._split(data, count) for data in parts), strict=True)
        return _joined(*ops.feedback_reduce_(codes, scales, self._bits, self._owner_e[start], **self._quantizer))

    def decode(self, reduced: Tensor, out: Tensor, start: int) -> None:
        """The mean that every rank gets."""
        if out.numel():
            codes, scale = self._split(reduced, out.numel())
            ops.dequantize(codes, scale, self._bits, (out.numel(),), group_size=self._options.group_size, out=out)


def _joined(codes: Tensor, scale: Tensor) -> Tensor:
    """As it is sent."""
    return torch.cat([codes, scale.to(torch.bfloat16).view(torch.uint8)])


class SqueezedAverage:
    """b bits both ways with error-feedback residuals at workers and owners."""

    exponents = None
    largest = LARGEST

    def __init__(self, options: DoubleSqueeze, residuals: Residuals) -> None:
        self._options, self._residuals = options, residuals

    def mean(self, x_d: Tensor, out_d: Tensor, call: Call) -> None:
        """See Average. With NaN, Inf or a value above 2**100 on any rank all get NaN, and no residual changes.

        Where a value is above that only together with its residual, all get NaN for its group.
        """
        if not within(x_d, call, LARGEST):
            out_d.fill_(math.nan)
            return
        d, n = x_d.numel(), call.group.size
        e_d = self._residuals.worker(call.key, call.slices, d, x_d.device)
        owner_e = self._residuals.owner(call.key, call.slices, d)
        code = SqueezedCode(self._options, e_d, owner_e, owned_spans(d, n, call.group.rank))
        sample = x_d[:SAMPLE].to(torch.float32) + e_d[:SAMPLE]
        reduce_bucket(x_d, out_d, code, call)
        call.counters.add_error(sample, sample - e_d[:SAMPLE])

    def squared_error(self, x_d: Tensor, call: Call) -> float:
        """See LayerAverage: of the worker's rounding, without what earlier steps left out."""
        e_d = torch.zeros_like(x_d)
        ops.feedback_quantize_(x_d, e_d, self._options.bits, **self._options.quantizer)
        return squared(e_d)
