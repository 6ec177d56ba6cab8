"""DoubleSqueeze: workers and owners both quantize what they send to b bits, and both remember what they left out.

Each worker quantizes g + e and sends chunks to their owners; the owner averages, adds its own memory, quantizes again
and sends to all. Nearest rounding with a scale for each group of values: the memories stay bounded by the largest value
over 2^b − 1. One bit: the sign times the group's mean magnitude.
Source: arXiv:1905.05957 (DoubleSqueeze); as 1-bit Adam exchanges its momentum, arXiv:2102.02888.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pipecomp.allreduce.call import SAMPLE, Call
from pipecomp.allreduce.dense import Span, chunks, on_device, on_host, piece_length, reduce_bucket, spans
from pipecomp.allreduce.feedback import with_memory
from pipecomp.allreduce.memory import ErrorMemory
from pipecomp.errors import NonFiniteError
from pipecomp.gradient_config import Gradients
from pipecomp.kernels import ops

LARGEST = 2.0**100  # what the quantizer takes


class NearestCode:
    """Groups of values as codes and float32 scales, nearest rounding; the owner's memory is changed by `reduce`.

    owner_e: the memory of the chunks that this rank owns, one after the other. starts: where in it the chunk that
    begins at a value of the bucket lies.
    """

    def __init__(self, bits: int, group_size: int, owner_e: Tensor, starts: dict[int, int]) -> None:
        self._bits, self._group_size = bits, group_size
        self._owner_e, self._starts = owner_e, starts

    def encoded_bytes(self, count: int) -> int:
        """Codes, then scales."""
        if not count:
            return 0
        return self._code_bytes(count) + 4 * ops.groups(count, self._group_size)

    reduced_bytes = encoded_bytes

    def _code_bytes(self, count: int) -> int:
        return ops.row_bytes(count, self._bits, self._group_size)

    def quantize(self, x: Tensor) -> Tensor:
        """x to bytes, where x is."""
        if not x.numel():
            return torch.empty(0, dtype=torch.uint8)
        if self._bits == 1:
            codes, scale = self._signs(x)
        else:
            codes, scale = ops.quantize(x, self._bits, group_size=self._group_size)
        return torch.cat([codes, scale.view(torch.uint8)])

    def _signs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """One-bit codes decode to ± half their scale: twice the mean magnitude is the scale."""
        whole = x.numel() // self._group_size * self._group_size
        means = [x[:whole].view(-1, self._group_size).abs().mean(dim=1)]
        if whole < x.numel():
            means.append(x[whole:].abs().mean().reshape(1))
        scale = 2 * torch.cat(means)
        codes, _ = ops.quantize(x, 1, group_size=self._group_size)
        return codes, scale

    def dequantize(self, data: Tensor, count: int, *, add_to: Tensor | None = None, out: Tensor | None = None) -> None:
        """Add the values of `quantize`'s bytes to a tensor, or write them."""
        if not count:
            return
        split = self._code_bytes(count)
        # scales need not start at a multiple of four bytes
        scale = data[split:].clone().view(torch.float32)
        ops.dequantize(data[:split], scale, self._bits, (count,), group_size=self._group_size, add_to=add_to, out=out)

    def encode(self, x: Tensor, start: int) -> Tensor:
        """This rank's values."""
        return on_host(self.quantize(x))

    def reduce(self, parts: list[Tensor], count: int, start: int) -> Tensor:
        """The quantized mean and memory of the owner, which keeps the rest."""
        mean = torch.empty(count)
        self.dequantize(parts[0], count, out=mean)
        for data in parts[1:]:
            self.dequantize(data, count, add_to=mean)
        e = self._owner_e[self._starts[start] : self._starts[start] + count]
        mean.div_(len(parts)).add_(e)
        try:
            reduced = self.quantize(mean)
        except NonFiniteError:  # the memory on top of values near the limit
            return self._not_a_number(count)
        self.dequantize(reduced, count, out=e)
        torch.sub(mean, e, out=e)
        return reduced

    def _not_a_number(self, count: int) -> Tensor:
        """What every rank decodes to NaN."""
        codes = torch.zeros(self._code_bytes(count), dtype=torch.uint8)
        return torch.cat([codes, torch.full((ops.groups(count, self._group_size),), math.nan).view(torch.uint8)])

    def decode(self, reduced: Tensor, out: Tensor, start: int) -> None:
        """The mean that every rank gets."""
        self.dequantize(on_device(reduced, out), out.numel(), out=out)


class DoubleSqueeze:
    """b bits both ways with error memories at workers and owners."""

    def __init__(self, options: Gradients, memory: ErrorMemory) -> None:
        assert isinstance(options.bits, int)
        assert options.group_size is not None
        self._bits, self._group_size, self._memory = options.bits, options.group_size, memory

    def mean(self, x_d: Tensor, out_d: Tensor, call: Call) -> None:
        """See Method. With NaN or Inf on any rank all get NaN, and no memory changes."""
        d, n = x_d.numel(), call.group.size
        found = with_memory(x_d, out_d, self._memory, call, LARGEST)
        if found is None:
            return
        e_d, sum_d = found
        owned = [chunks(piece, n)[call.group.rank] for piece in spans(0, d, piece_length(n))]
        starts, total = {}, 0
        for chunk in owned:
            starts[chunk.start] = total
            total += chunk.count
        owner_e = self._memory.owner(call.key, call.parts, total)
        code = _Remembering(self._bits, self._group_size, owner_e, starts, sum_d, e_d)
        reduce_bucket(sum_d, out_d, code, call)
        call.counters.add_error(sum_d[:SAMPLE], sum_d[:SAMPLE] - e_d[:SAMPLE])


class _Remembering(NearestCode):
    """Also keeps what the worker's own codes left out: e ← x − deq."""

    def __init__(
        self, bits: int, group_size: int, owner_e: Tensor, starts: dict[int, int], x_d: Tensor, e_d: Tensor
    ) -> None:
        super().__init__(bits, group_size, owner_e, starts)
        self._x_d, self._e_d = x_d, e_d

    def encode(self, x: Tensor, start: int) -> Tensor:
        """This rank's values; the memory becomes what is missing in them."""
        data = self.quantize(x)
        e = Span(start, start + x.numel()).of(self._e_d)
        self.dequantize(data, x.numel(), out=e)
        torch.sub(x, e, out=e)
        return on_host(data)
