"""Linear and exponential dithering with one norm for all workers: codes, and the average that they make."""

from __future__ import annotations

import torch
from torch import Tensor

from pipecomp.allreduce.call import SAMPLE, Call
from pipecomp.allreduce.exchanges import Piece, packed, scattered
from pipecomp.allreduce.norms import LARGEST, finish_without_codes, shared_norm, squared
from pipecomp.allreduce.reduce_scatter import packed_bytes, reduce_bucket
from pipecomp.kernels import ops

_ENCODE, _REDUCE = 0, 1  # what a random draw is for


def levels_of(bits: int) -> int:
    """s, the levels on each side of zero that b-bit signed codes hold: 2^(b−1) − 1."""
    return (1 << (bits - 1)) - 1


class LinearCode:
    """Signed levels l/s of |x| / norm, summed exactly; the sum comes back in just enough bits for 2·n·s + 1 values.

    levels: s, or several, of which scale_index_d picks one a value, alike on all ranks.
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
        """Bytes of one rank's `count` values."""
        return packed_bytes(count, self._bits)

    def reduced_bytes(self, count: int) -> int:
        """Bytes of `count` sums."""
        return packed_bytes(count, self._sum_bits)

    def _index(self, start: int, count: int) -> Tensor | None:
        return None if self._index_d is None else self._index_d[start : start + count]

    def encode(self, x: Tensor, start: int) -> Tensor:
        """Signed levels, offset by s, packed."""
        index = self._index(start, x.numel())
        return ops.linear_encode(
            x, self._norm, self._levels, bits=self._bits, scale_index=index, seed=self._seed, start=start
        )

    def reduce(self, parts: list[Tensor], count: int, start: int) -> Tensor:
        """The sums, offset by n·s, packed."""
        return ops.linear_reduce(parts, count, self._least, bits=self._bits)

    def decode(self, reduced: Tensor, out: Tensor, start: int) -> None:
        """norm / (s·n) · sum."""
        index = self._index(start, out.numel())
        ops.linear_decode(reduced, out.numel(), self._norm, self._levels, workers=self._n, scale_index=index, out=out)

    def own(self, x: Tensor) -> Tensor:
        """What this rank's first values are sent as: the compression's error alone."""
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
        """Bytes of one rank's `count` values."""
        return packed_bytes(count, self._bits)

    reduced_bytes = encoded_bytes

    def encode(self, x: Tensor, start: int) -> Tensor:
        """Signs and exponents."""
        return ops.exponential_encode(x, self._norm, bits=self._bits, workers=self._n, seed=self._seed, start=start)

    def reduce(self, parts: list[Tensor], count: int, start: int) -> Tensor:
        """Neighbours in pairs, level by level; a rank without a neighbour goes up as it is."""
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
        """sign · 2^(1 + depth − e) · norm / n."""
        ops.exponential_decode(reduced, out.numel(), self._norm, bits=self._bits, workers=self._n, out=out)

    def own(self, x: Tensor) -> Tensor:
        """What this rank's first values are sent as: the compression's error alone."""
        codes = self.encode(x, 0)
        return ops.exponential_decode(codes, x.numel(), self._norm, bits=self._bits, workers=self._n, divide=False)


class LeastIndexCode:
    """The least of all ranks' scale indices, value by value, in ⌈log2 N⌉ bits each."""

    def __init__(self, choices: int) -> None:
        self._bits = (choices - 1).bit_length()

    def encoded_bytes(self, count: int) -> int:
        """Bytes of one rank's `count` values."""
        return packed_bytes(count, self._bits)

    reduced_bytes = encoded_bytes

    def encode(self, x: Tensor, start: int) -> Tensor:
        """Indices (uint8), packed."""
        return ops.pack_bits(x, self._bits)

    def reduce(self, parts: list[Tensor], count: int, start: int) -> Tensor:
        """The least; of one-bit indices that is their conjunction."""
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
        """Indices, uint8."""
        out.copy_(ops.unpack_bits(reduced, self._bits, out.numel()))


def count_error(x_d: Tensor, code: LinearCode | ExponentialCode, call: Call, sent_d: Tensor | None) -> None:
    """Count the error of a bucket's beginning; sent_d: see `DitheredAverage.mean`."""
    if sent_d is not None:
        sent_d.copy_(code.own(x_d))
    sample = x_d[:SAMPLE]
    call.counters.add_error(sample, code.own(sample) if sent_d is None else sent_d[:SAMPLE])


class DitheredAverage:
    """One norm for all workers, linear or exponential levels, reduced by the chunks' owners. Unbiased."""

    largest = LARGEST

    def __init__(self, bits: int, exponents: tuple[float, float], *, exponential: bool = False) -> None:
        self.exponents = exponents
        self._bits, self._code = bits, ExponentialCode if exponential else LinearCode

    def mean(self, x_d: Tensor, out_d: Tensor, call: Call, sent_d: Tensor | None = None) -> None:
        """See Average. sent_d: zeros, which become what this rank's values are sent as."""
        norm = shared_norm(x_d, self.exponents, call)
        if not finish_without_codes(norm, out_d):
            code = self._code(norm, self._bits, call)
            count_error(x_d, code, call, sent_d)
            reduce_bucket(x_d, out_d, code, call)

    def squared_error(self, x_d: Tensor, call: Call) -> float:
        """See LayerAverage."""
        return squared(x_d - self._code(1.0, self._bits, call).own(x_d))


def linear_plan(d: int, n: int, bits: int) -> tuple[Piece, ...]:
    """Codes of `bits` bits to their owners, and back sums of n of them."""
    return scattered(d, n, packed(bits), packed(ops.linear_bits(levels_of(bits), n)))
