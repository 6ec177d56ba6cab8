"""Dithering of gradients: Global-QSGD, QSGD-MN (one or several scales), QSGD, NUQSGD and TernGrad. Unbiased.

With one norm for all workers (Global-QSGD, QSGD-MN) codes are reduced by the chunks' owners; with local norms (QSGD,
NUQSGD, TernGrad) all codes go to all ranks.
Sources: arXiv:2305.18627 (Global-QSGD), arXiv:2109.12497 (QSGD-MN), arXiv:1610.02132 (QSGD), arXiv:1908.06077 (NUQSGD),
arXiv:1705.07878 (TernGrad).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pipecomp.allreduce.all_gather import GatheredAverage
from pipecomp.allreduce.call import LARGEST, SAMPLE, Call, finish_without_codes, shared_norm, squared_norm
from pipecomp.allreduce.error_feedback import Residuals
from pipecomp.allreduce.method import (
    Average,
    ExchangePlan,
    GradientMethod,
    PiecePlan,
    Shapes,
    packed,
    scattered,
    to_all,
)
from pipecomp.allreduce.reduce_scatter import PIECE, levels_of, packed_bytes, reduce_bucket, spans
from pipecomp.config.gradients import GlobalQsgdOptions, LinearOptions, MultiScaleOptions, NuQsgdOptions
from pipecomp.kernels import ops

MAX_OF_L2 = (2.0, math.inf)
_ENCODE, _REDUCE = 0, 1  # purposes of random draws

# -- codes with one norm for all workers


class LinearCode:
    """Signed levels l/s of |x| / norm, summed exactly; sums have just enough bits for 2·n·s + 1 values.

    levels: s of each scale; scale_index_d (uint8 [d]) selects a value's scale, the same on all ranks.
    Source: arXiv:2305.18627 (Global-QSGD), section 3; multi-scale: QSGD-MN-TS.
    """

    def __init__(
        self, norm: float, bits: int, call: Call, *, levels: tuple[int, ...] = (), scale_index_d: Tensor | None = None
    ) -> None:
        self._norm, self._bits, self._n = norm, bits, call.group.size
        self._least = levels_of(bits)
        self._levels: int | tuple[int, ...] = levels or self._least
        self._index_d = scale_index_d
        self._sum_bits = ops.linear_bits(self._least, self._n)
        self._seed = call.draw(_ENCODE, call.group.rank)

    def encoded_bytes(self, count: int) -> int:
        """Return the bytes of one rank's `count` values."""
        return packed_bytes(count, self._bits)

    def reduced_bytes(self, count: int) -> int:
        """Return the bytes of `count` sums."""
        return packed_bytes(count, self._sum_bits)

    def _index(self, start: int, count: int) -> Tensor | None:
        return None if self._index_d is None else self._index_d[start : start + count]

    def encode(self, x: Tensor, start: int) -> Tensor:
        """Encode to signed levels, offset by s and packed."""
        index = self._index(start, x.numel())
        return ops.linear_encode(
            x, self._norm, self._levels, bits=self._bits, scale_index=index, seed=self._seed, start=start
        )

    def reduce(self, parts: list[Tensor], count: int, start: int) -> Tensor:
        """Return the sums, offset by n·s and packed."""
        return ops.linear_reduce(parts, count, self._least, bits=self._bits)

    def decode(self, reduced: Tensor, out: Tensor, start: int) -> None:
        """out = norm / (s·n) · sum."""
        index = self._index(start, out.numel())
        ops.linear_decode(reduced, out.numel(), self._norm, self._levels, workers=self._n, scale_index=index, out=out)

    def round_trip(self, x: Tensor) -> Tensor:
        """Return the decoded codes of this rank's leading values x."""
        codes, index = self.encode(x, 0), self._index(0, x.numel())
        return ops.linear_decode(codes, x.numel(), self._norm, self._levels, bits=self._bits, scale_index=index)


class ExponentialCode:
    """Signed powers of two, reduced along a tree of depth ⌈log2 n⌉ by Algorithm 2; 8 or 4 bits both ways.

    Source: arXiv:2305.18627 (Global-QSGD), appendix B.
    """

    def __init__(self, norm: float, bits: int, call: Call) -> None:
        self._norm, self._bits, self._call = norm, bits, call
        self._n = call.group.size
        self._seed = call.draw(_ENCODE, call.group.rank)

    def encoded_bytes(self, count: int) -> int:
        """Return the bytes of one rank's `count` values."""
        return packed_bytes(count, self._bits)

    reduced_bytes = encoded_bytes

    def encode(self, x: Tensor, start: int) -> Tensor:
        """Encode to signs and exponents."""
        return ops.exponential_encode(x, self._norm, bits=self._bits, workers=self._n, seed=self._seed, start=start)

    def reduce(self, parts: list[Tensor], count: int, start: int) -> Tensor:
        """Reduce neighbours in pairs, level by level; a rank without a neighbour moves up unchanged."""
        level = 0
        while len(parts) > 1:
            upper = []
            for i in range(0, len(parts) - 1, 2):
                seed = self._call.draw(_REDUCE, start, level, i)
                upper.append(ops.exponential_reduce_(parts[i], parts[i + 1], count, bits=self._bits, seed=seed))
            parts = upper + (parts[-1:] if len(parts) % 2 else [])
            level += 1
        return parts[0]

    def decode(self, reduced: Tensor, out: Tensor, start: int) -> None:
        """out = sign · 2^(1 + depth − e) · norm / n."""
        ops.exponential_decode(reduced, out.numel(), self._norm, bits=self._bits, workers=self._n, out=out)

    def round_trip(self, x: Tensor) -> Tensor:
        """Return the decoded codes of this rank's leading values x."""
        codes = self.encode(x, 0)
        return ops.exponential_decode(codes, x.numel(), self._norm, bits=self._bits, workers=self._n, divide=False)


class MinIndexCode:
    """The minimum of all ranks' scale indices, value by value, in ⌈log2 N⌉ bits each."""

    def __init__(self, choices: int) -> None:
        self._bits = (choices - 1).bit_length()

    def encoded_bytes(self, count: int) -> int:
        """Return the bytes of one rank's `count` values."""
        return packed_bytes(count, self._bits)

    reduced_bytes = encoded_bytes

    def encode(self, x: Tensor, start: int) -> Tensor:
        """Pack indices (uint8)."""
        return ops.pack_bits(x, self._bits)

    def reduce(self, parts: list[Tensor], count: int, start: int) -> Tensor:
        """Return the minimum; of one-bit indices it is their conjunction."""
        if self._bits == 1:
            least = parts[0]
            for codes in parts[1:]:
                least = least & codes
            return least
        values = ops.unpack_bits(parts[0], self._bits, count)
        for codes in parts[1:]:
            values = torch.minimum(values, ops.unpack_bits(codes, self._bits, count))
        return ops.pack_bits(values, self._bits)

    def decode(self, reduced: Tensor, out: Tensor, start: int) -> None:
        """Unpack indices (uint8)."""
        out.copy_(ops.unpack_bits(reduced, self._bits, out.numel()))


def count_error(x_d: Tensor, code: LinearCode | ExponentialCode, call: Call, sent_d: Tensor | None) -> None:
    """Count the error of a bucket's leading values; sent_d: see `DitheredAverage.mean`."""
    if sent_d is not None:
        sent_d.copy_(code.round_trip(x_d))
    sample = x_d[:SAMPLE]
    call.counters.add_error(sample, code.round_trip(sample) if sent_d is None else sent_d[:SAMPLE])


class DitheredAverage:
    """Dithering with one norm for all workers, linear or exponential levels, reduced by the chunks' owners."""

    largest = LARGEST

    def __init__(self, bits: int, exponents: tuple[float, float], *, exponential: bool = False) -> None:
        self.exponents = exponents
        self._bits, self._code = bits, ExponentialCode if exponential else LinearCode

    def mean(self, x_d: Tensor, out_d: Tensor, call: Call, sent_d: Tensor | None = None) -> None:
        """Average. sent_d: zeros, replaced by the decoded codes of this rank's values."""
        norm = shared_norm(x_d, self.exponents, call)
        if not finish_without_codes(norm, out_d):
            code = self._code(norm, self._bits, call)
            count_error(x_d, code, call, sent_d)
            reduce_bucket(x_d, out_d, code, call)

    def squared_error(self, x_d: Tensor, call: Call) -> float:
        """Return the squared error of this rank's codes."""
        return squared_norm(x_d - self._code(1.0, self._bits, call).round_trip(x_d))


class MultiScaleAverage:
    """Dithering with several scales: each value has the finest scale that fits it on every worker."""

    def __init__(self, bits: tuple[int, ...], exponents: tuple[float, float]) -> None:
        self._bits, self._exponents = bits[0], exponents
        self._levels = tuple(levels_of(b) for b in bits)

    def mean(self, x_d: Tensor, out_d: Tensor, call: Call, sent_d: Tensor | None = None) -> None:
        """Average, as DitheredAverage.mean.

        Note:
            Scales are selected before anything is rounded; a selection that depends on rounding would bias the mean.
        """
        norm = shared_norm(x_d, self._exponents, call)
        if finish_without_codes(norm, out_d):
            return
        with call.counters.part("quantize"):
            index_d = ops.multiscale_index(x_d, norm, self._levels)
        reduce_bucket(index_d, index_d, MinIndexCode(len(self._levels)), call)
        code = LinearCode(norm, self._bits, call, levels=self._levels, scale_index_d=index_d)
        count_error(x_d, code, call, sent_d)
        reduce_bucket(x_d, out_d, code, call)


# -- methods


class GlobalQsgd(GradientMethod):
    """`global_qsgd`: one norm for all workers, linear or exponential levels, dense or sparse codes."""

    options: GlobalQsgdOptions

    def average(self, residuals: Residuals) -> Average:
        kind: Any = GatheredAverage if self.options.sparse else DitheredAverage
        average: Average = kind(self.options.bits, self.options.exponents, exponential=self.options.exponential)
        return average

    def plan(self, d: int, n: int, shapes: Shapes | None = None) -> ExchangePlan:
        norm, bits, exponential = (to_all(8, n),), self.options.bits, self.options.exponential
        if self.options.sparse:
            return ExchangePlan(norm, (_sparse_pieces(d, n, bits, linear=not exponential),), exact=False)
        return ExchangePlan(norm, (scattered(d, n, packed(bits)) if exponential else linear_pieces(d, n, bits),))


class QsgdMn(GradientMethod):
    """`qsgd_mn`: linear levels under the largest L2 norm of all workers."""

    options: LinearOptions

    def average(self, residuals: Residuals) -> Average:
        return DitheredAverage(self.options.bits, MAX_OF_L2)

    def plan(self, d: int, n: int, shapes: Shapes | None = None) -> ExchangePlan:
        return ExchangePlan((to_all(8, n),), (linear_pieces(d, n, self.options.bits),))


class QsgdMnTs(GradientMethod):
    """`qsgd_mn_ts`: several scales of linear levels."""

    options: MultiScaleOptions

    def average(self, residuals: Residuals) -> Average:
        return MultiScaleAverage(self.options.bits, self.options.exponents)

    def plan(self, d: int, n: int, shapes: Shapes | None = None) -> ExchangePlan:
        return ExchangePlan((to_all(8, n),), multi_scale_passes(d, n, self.options.bits))


class Qsgd(GradientMethod):
    """`qsgd`: linear levels of each worker's L2 norm."""

    options: LinearOptions | NuQsgdOptions

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.options.bits

    def average(self, residuals: Residuals) -> Average:
        return GatheredAverage(self.bits, 2.0)

    def plan(self, d: int, n: int, shapes: Shapes | None = None) -> ExchangePlan:
        """Every rank's norm and codes to all others."""
        pieces = tuple(PiecePlan(to_all(packed_bytes(span.count, self.bits), n)) for span in spans(0, d, PIECE))
        return ExchangePlan((to_all(8, n),), (pieces,))


class NuQsgd(Qsgd):
    """`nuqsgd`: powers of two of each worker's L2 norm."""

    def average(self, residuals: Residuals) -> Average:
        return GatheredAverage(self.bits, 2.0, exponential=True)


class TernGrad(Qsgd):
    """`terngrad`: −1, 0 or 1 times each worker's largest magnitude."""

    bits = 2

    def average(self, residuals: Residuals) -> Average:
        return GatheredAverage(self.bits, math.inf)


def linear_pieces(d: int, n: int, bits: int) -> tuple[PiecePlan, ...]:
    """Codes of `bits` bits to their owners, and sums of n of them back."""
    return scattered(d, n, packed(bits), packed(ops.linear_bits(levels_of(bits), n)))


def multi_scale_passes(d: int, n: int, bits: tuple[int, ...]) -> tuple[tuple[PiecePlan, ...], ...]:
    """Each value's scale, then its code."""
    return scattered(d, n, packed((len(bits) - 1).bit_length())), linear_pieces(d, n, bits[0])


def _sparse_pieces(d: int, n: int, bits: int, *, linear: bool) -> tuple[PiecePlan, ...]:
    """Non-zero codes and their positions, spread evenly: at most s·√(n·d) on all ranks together.

    A value x is sent with a probability of at most s·|x| / ‖x‖₂, with 1/s the smallest level and ‖x‖₂ the norm of the
    bucket over all workers; the sum is largest if all values are equal.
    """
    s = levels_of(bits) if linear else 1 << (ops.exponential_levels(bits) - 1)
    share = min(1.0, s / math.sqrt(n * d))
    pieces = []
    for span in spans(0, d, PIECE):
        count = round(share * span.count)
        size = 4
        if count:
            size += ops.position_bytes(span.count, count)[1] + packed_bytes(count, 1 if linear and bits == 2 else bits)
        pieces.append(PiecePlan(to_all(size, n), lengths=to_all(8, n)))
    return tuple(pieces)
