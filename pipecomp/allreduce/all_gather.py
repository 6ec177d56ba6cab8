"""All-gather of codes: methods with local norms (QSGD, TernGrad, NUQSGD), and sparse codes.

Each rank decodes all ranks' codes and adds them in the same order, so all have the same bits. A rank sends its codes
to n − 1 others, which suits few ranks or few non-zeros.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from pipecomp.allreduce.call import (
    LARGEST,
    SAMPLE,
    Call,
    finish_without_codes,
    local_norm,
    shared_norm,
    squared_norm,
)
from pipecomp.allreduce.group import Pending
from pipecomp.allreduce.reduce_scatter import PIECE, Span, levels_of, packed_bytes, run_pipelined, sending, spans
from pipecomp.errors import WireError
from pipecomp.kernels import ops
from pipecomp.kernels.reference.reproducible import divisor
from pipecomp.kernels.staging import Copy


class LocalCode(Protocol):
    """Conversion of one rank's values to bytes, and addition of the decoded values."""

    def encode(self, x: Tensor, start: int) -> Tensor:
        """Encode this rank's values, uint8 on their device."""

    def encoded_bytes(self, count: int) -> int | None:
        """Return the bytes of `count` values; None if they depend on the values."""

    def add(self, codes: Tensor, norm: float, out: Tensor) -> None:
        """Add the values of a rank with this norm to out (float32); both are on the same device."""


class LocalDithering:
    """Levels of |x| / ‖x‖: powers of two if `exponential` (NUQSGD), else l/s (QSGD; TernGrad with the maximum)."""

    def __init__(self, norm: float, bits: int, call: Call, *, exponential: bool) -> None:
        self._norm, self._bits, self._levels, self._exponential = norm, bits, levels_of(bits), exponential
        self._seed = call.draw(call.group.rank)

    def encode(self, x: Tensor, start: int) -> Tensor:
        """Encode to packed levels with their signs."""
        if self._exponential:
            return ops.exponential_encode(x, self._norm, bits=self._bits, seed=self._seed, start=start)
        return ops.linear_encode(x, self._norm, self._levels, bits=self._bits, seed=self._seed, start=start)

    def encoded_bytes(self, count: int) -> int:
        """Return the bytes of `count` values."""
        return packed_bytes(count, self._bits)

    def add(self, codes: Tensor, norm: float, out: Tensor) -> None:
        """out += level · norm."""
        if self._exponential:
            ops.exponential_decode(codes, out.numel(), norm, bits=self._bits, add_to=out)
        else:
            ops.linear_decode(codes, out.numel(), norm, self._levels, bits=self._bits, add_to=out)


class SparseCode:
    """The non-zero codes of a dithering: their count (4 bytes), positions and codes.

    Positions are a bitmap or indices, whichever is shorter. With one level on each side of zero a code is its sign, one
    bit.
    Source: arXiv:2305.18627 (Global-QSGD), section 3.3 (Theorem 3.3).
    """

    def __init__(self, inner: LocalDithering, bits: int, *, linear: bool) -> None:
        self._inner, self._bits = inner, bits
        self._zero = levels_of(bits) if linear else 0
        self._signs_only = linear and bits == 2

    def encode(self, x: Tensor, start: int) -> Tensor:
        """Encode to count, positions and codes."""
        d = x.numel()
        codes = ops.unpack_bits(self._inner.encode(x, start), self._bits, d)
        index = torch.nonzero(codes != self._zero).flatten()
        nonzero = codes[index]
        if self._signs_only:
            nonzero = (nonzero > self._zero).to(torch.int32)
        count = torch.tensor([index.numel()], dtype=torch.int32, device=x.device).view(torch.uint8)
        if not index.numel():
            return count
        positions = ops.pack_positions(index.to(torch.int32), d)
        return torch.cat([count, positions, ops.pack_bits(nonzero, 1 if self._signs_only else self._bits)])

    def encoded_bytes(self, count: int) -> None:
        """The size depends on the values."""
        return None

    def add(self, codes: Tensor, norm: float, out: Tensor) -> None:
        """Add the values at their positions."""
        d = out.numel()
        count = int(codes[:4].view(torch.int32)) if codes.numel() >= 4 else -1
        if count == 0 and codes.numel() == 4:
            return
        width = 1 if self._signs_only else self._bits
        if not 0 < count <= d or codes.numel() != 4 + ops.position_bytes(d, count)[1] + packed_bytes(count, width):
            raise WireError(f"sparse gradient of {codes.numel()} bytes for {count} of {d} values")
        middle = 4 + ops.position_bytes(d, count)[1]
        index = ops.unpack_positions(codes[4:middle], d, count).to(torch.int64)
        nonzero = ops.unpack_bits(codes[middle:], width, count)
        if self._signs_only:
            nonzero = nonzero * 2
        dense = ops.pack_bits(nonzero, self._bits)
        values = torch.zeros(count, device=out.device, dtype=torch.float32)
        self._inner.add(dense, norm, values)
        out.index_add_(0, index, values)


def average_gathered(x_d: Tensor, out_d: Tensor, code: LocalCode, norms: list[float], call: Call) -> None:
    """Write the mean of all ranks' decoded x to out, which may be x. norms: of each rank's codes."""
    run_pipelined(
        spans(0, x_d.numel(), PIECE),
        *sending(
            call,
            lambda piece: _encode(piece, x_d, code, norms[call.group.rank], call),
            lambda piece, encoded: _send(piece, encoded, code, call),
        ),
        lambda piece, sent: _add_all(piece, sent, out_d, code, norms, call),
    )


def _encode(piece: Span, x_d: Tensor, code: LocalCode, norm: float, call: Call) -> Copy:
    """Quantize a piece and start to copy its codes to the host."""
    with call.counters.part("quantize"):
        codes = code.encode(piece.of(x_d), piece.start)
    if not piece.start and norm:
        _count_error(piece.of(x_d), codes, code, norm, call)
    return call.to_host(codes)


def _send(piece: Span, encoded: Copy, code: LocalCode, call: Call) -> Pending:
    with call.counters.part("quantize"):
        codes = encoded.wait()
    counts = None
    if code.encoded_bytes(piece.count) is None:
        with call.counters.part("wait"):
            counts = [int(row[0]) for row in call.group.gather_numbers([codes.numel()])]
    return call.group.gather(codes, counts)


def _count_error(x: Tensor, codes: Tensor, code: LocalCode, norm: float, call: Call) -> None:
    """Count the error of the leading values; sparse codes cannot be cut, and are decoded whole."""
    sample = x[:SAMPLE]
    size = code.encoded_bytes(sample.numel())
    own = torch.zeros(x.numel() if size is None else sample.numel(), device=x.device, dtype=torch.float32)
    code.add(codes[:size], norm, own)
    call.counters.add_error(sample, own[: sample.numel()])


def _add_all(piece: Span, sent: Pending, out_d: Tensor, code: LocalCode, norms: list[float], call: Call) -> None:
    with call.counters.part("wait"):
        rows = sent.wait()
    with call.counters.part("decode"):
        out = piece.of(out_d)
        out.zero_()
        arriving = [call.to_device(codes) for codes in rows]
        for copy, norm in zip(arriving, norms, strict=True):
            if norm:
                code.add(copy.wait(), norm, out)
        out.div_(divisor(len(rows), out))
    with call.counters.part("wait"):
        sent.finish()


class GatheredAverage:
    """Dithering with each worker's own norm (a number q), or a shared one ((q, p), non-zero codes only). Unbiased."""

    largest = LARGEST

    def __init__(self, bits: int, norm: float | tuple[float, float], *, exponential: bool = False) -> None:
        self._bits, self._norm = bits, norm
        self._exponential = exponential
        self.exponents = norm if isinstance(norm, tuple) else (norm, math.inf)

    def mean(self, x_d: Tensor, out_d: Tensor, call: Call) -> None:
        """Average. A value that is not finite makes the mean NaN on all ranks."""
        norms = self._norms(x_d, call)
        if finish_without_codes(max(norms) if all(n <= LARGEST for n in norms) else math.nan, out_d):
            return
        inner = LocalDithering(norms[call.group.rank], self._bits, call, exponential=self._exponential)
        sparse = isinstance(self._norm, tuple)
        code: LocalCode = SparseCode(inner, self._bits, linear=not self._exponential) if sparse else inner
        average_gathered(x_d, out_d, code, norms, call)

    def _norms(self, x_d: Tensor, call: Call) -> list[float]:
        if call.norm is not None or isinstance(self._norm, tuple):
            return [shared_norm(x_d, self.exponents, call)] * call.group.size
        with call.counters.part("quantize"):
            own = local_norm(x_d, self._norm)
        with call.counters.part("wait"):
            return [row[0] for row in call.group.gather_numbers([own])]

    def squared_error(self, x_d: Tensor, call: Call) -> float:
        """Return the squared error of this rank's codes."""
        code = LocalDithering(1.0, self._bits, call, exponential=self._exponential)
        sent = torch.zeros_like(x_d)
        code.add(code.encode(x_d, 0), 1.0, sent)
        return squared_norm(x_d - sent)
