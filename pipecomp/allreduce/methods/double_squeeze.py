"""DoubleSqueeze: workers and owners both send b-bit codes, with error feedback on both sides.

Each worker quantizes g + e and sends chunks to their owners; the owner averages, adds its own residual, quantizes again
and sends to all. Nearest rounding with a scale for each group of values bounds the residuals by the largest value over
2^b − 1. With one bit, a value is its sign times the group's mean magnitude. Source: arXiv:1905.05957 (DoubleSqueeze);
as 1-bit Adam exchanges its momentum, arXiv:2102.02888.

Note: [Small groups]
    A group's small values are lost beside its large ones, and Adam amplifies small values
    (benchmarks/results/replicas.md). Groups are therefore small, and scales are bfloat16 to keep them cheap.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pipecomp.allreduce.call import SAMPLE, Call, squared_norm, unused_parameters
from pipecomp.allreduce.error_feedback import Residuals, kept_for_later, spans_of
from pipecomp.allreduce.method import Average, ExchangePlan, GradientMethod, Shapes, scattered, to_all
from pipecomp.allreduce.reduce_scatter import Span, owned_spans, reduce_bucket
from pipecomp.config.gradients import DoubleSqueezeOptions
from pipecomp.kernels import ops

SCALE_BYTES = 2
LARGEST_GRADIENT = 2.0**100


class DoubleSqueeze(GradientMethod):
    """`double_squeeze`, and the exchange of `quantized_adam`."""

    options: DoubleSqueezeOptions

    def average(self, residuals: Residuals) -> Average:
        return SqueezedAverage(self, residuals)

    def plan(self, d: int, n: int, shapes: Shapes | None = None) -> ExchangePlan:
        return ExchangePlan((to_all(16, n),), (scattered(d, n, self.encoded_bytes),))

    @property
    def quantizer(self) -> Any:
        """Arguments of the kernels."""
        return {"group_size": self.options.group_size, "scale": "mean" if self.options.bits == 1 else "max"}

    def code_bytes(self, count: int) -> int:
        """Return the bytes of `count` values without scales."""
        return ops.row_bytes(count, self.options.bits, self.options.group_size)

    def encoded_bytes(self, count: int) -> int:
        """Return the bytes of `count` values: codes, then a bfloat16 scale for each group."""
        return self.code_bytes(count) + SCALE_BYTES * ops.groups(count, self.options.group_size) if count else 0


class SqueezedCode:
    """Groups of values as codes and bfloat16 scales, rounded to nearest. `encode` and `reduce` update the residuals.

    e_d: the worker's residual of the bucket. owner_e: the owner's residual of its chunks `owned`, concatenated.
    """

    def __init__(self, method: DoubleSqueeze, e_d: Tensor, owner_e: Tensor, owned: list[Span]) -> None:
        self._method, self._e_d = method, e_d
        self._owner_e = {span.start: e for span, e in zip(owned, owner_e.split([s.count for s in owned]), strict=True)}
        self._bits, self._quantizer = method.options.bits, method.quantizer

    def owned_residuals(self, span: Span) -> list[Tensor]:
        """Return the owner's residuals of the values in a span, as views."""
        return [e[max(span.start - start, 0) : max(span.end - start, 0)] for start, e in self._owner_e.items()]

    def encoded_bytes(self, count: int) -> int:
        """Return the bytes of codes and scales."""
        return self._method.encoded_bytes(count)

    reduced_bytes = encoded_bytes

    def encode(self, x: Tensor, start: int) -> Tensor:
        """Encode this rank's values plus residual; the residual becomes the quantization error."""
        if not x.numel():
            return torch.empty(0, dtype=torch.uint8)
        e = Span(start, start + x.numel()).of(self._e_d)
        return _joined(*ops.feedback_quantize_(x, e, self._bits, **self._quantizer))

    def _split(self, data: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Split codes from scales, which are copied because they may start at an odd byte."""
        at = self._method.code_bytes(count)
        return data[:at], data[at:].clone().view(torch.bfloat16).to(torch.float32)

    def reduce(self, parts: list[Tensor], count: int, start: int) -> Tensor:
        """Quantize the mean plus the owner's residual; the residual becomes the quantization error."""
        if not count:
            return torch.empty(0, dtype=torch.uint8)
        codes, scales = zip(*(self._split(data, count) for data in parts), strict=True)
        return _joined(*ops.feedback_reduce_(codes, scales, self._bits, self._owner_e[start], **self._quantizer))

    def decode(self, reduced: Tensor, out: Tensor, start: int) -> None:
        """Write the mean."""
        if out.numel():
            codes, scale = self._split(reduced, out.numel())
            ops.dequantize(
                codes, scale, self._bits, (out.numel(),), group_size=self._method.options.group_size, out=out
            )


def _joined(codes: Tensor, scale: Tensor) -> Tensor:
    """Concatenate codes and scales."""
    return torch.cat([codes, scale.to(torch.bfloat16).view(torch.uint8)])


class SqueezedAverage:
    """b bits both ways, with error-feedback residuals at workers and owners."""

    exponents = None
    largest = LARGEST_GRADIENT

    def __init__(self, method: DoubleSqueeze, residuals: Residuals) -> None:
        self._method, self._residuals = method, residuals

    def mean(self, x_d: Tensor, out_d: Tensor, call: Call) -> None:
        """Average. If any rank has NaN, Inf or a value above 2**100, all ranks get NaN and residuals are unchanged.

        If only the sum of a value and its residual is above 2**100, the mean of its group is NaN.
        """
        unused = unused_parameters(x_d, x_d, call, LARGEST_GRADIENT)
        if unused is None:
            out_d.fill_(math.nan)
            return
        d, n = x_d.numel(), call.group.size
        e_d = self._residuals.worker(call.key, call.slices, d, x_d.device)
        owner_e = self._residuals.owner(call.key, call.slices, d)
        owned, spans = owned_spans(d, n, call.group.rank), spans_of(unused, call)
        code = SqueezedCode(self._method, e_d, owner_e, owned)
        kept = [span.of(e_d) for span in spans]
        kept += [chunk for span in spans for chunk in code.owned_residuals(span)]
        with kept_for_later(kept, [span.of(out_d) for span in spans]):
            sample = x_d[:SAMPLE].to(torch.float32) + e_d[:SAMPLE]
            reduce_bucket(x_d, out_d, code, call)
            call.counters.add_error(sample, sample - e_d[:SAMPLE])

    def squared_error(self, x_d: Tensor, call: Call) -> float:
        """Return the squared error of the worker's rounding, without earlier residuals."""
        e_d = torch.zeros_like(x_d)
        ops.feedback_quantize_(x_d, e_d, self._method.options.bits, **self._method.quantizer)
        return squared_norm(e_d)
