"""The uncompressed mean, through the same collective: the baseline, and what warm-up steps use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipecomp.allreduce.call import Call
from pipecomp.allreduce.error_feedback import Residuals
from pipecomp.allreduce.exchanges import FLOAT, Plan, Shapes, scattered
from pipecomp.allreduce.method import Average, Method
from pipecomp.allreduce.reduce_scatter import reduce_bucket


@dataclass(frozen=True, kw_only=True)
class Uncompressed(Method):
    """`none`: values in the dtype that they have."""

    def average(self, residuals: Residuals) -> Average:
        return PlainAverage()

    def plan(self, d: int, n: int, shapes: Shapes | None = None) -> Plan:
        """See Method; of float32 values."""
        return Plan((), (scattered(d, n, lambda count: FLOAT * count),))


class FloatCode:
    """Values in the bucket's own dtype, added in float32 in the order of ranks."""

    def __init__(self, dtype: torch.dtype, call: Call) -> None:
        self._dtype, self._n = dtype, call.group.size

    def encoded_bytes(self, count: int) -> int:
        """Bytes of one rank's `count` values."""
        return count * self._dtype.itemsize

    reduced_bytes = encoded_bytes

    def encode(self, x: Tensor, start: int) -> Tensor:
        """The values' bytes."""
        return x.view(torch.uint8)

    def reduce(self, parts: list[Tensor], count: int, start: int) -> Tensor:
        """The mean's bytes."""
        total = parts[0].view(self._dtype).to(torch.float32, copy=True)
        for part in parts[1:]:
            total += part.view(self._dtype)
        return total.div_(self._n).to(self._dtype).view(torch.uint8)

    def decode(self, reduced: Tensor, out: Tensor, start: int) -> None:
        """The mean."""
        out.copy_(reduced.view(self._dtype))


class PlainAverage:
    """The mean of all ranks' values."""

    def mean(self, x_d: Tensor, out_d: Tensor, call: Call) -> None:
        """NaN and Inf stay what they are."""
        reduce_bucket(x_d, out_d, FloatCode(x_d.dtype, call), call)
