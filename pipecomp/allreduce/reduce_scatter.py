"""Reduce-scatter and all-gather of codes in pieces, the collective of all dense methods.

Every rank owns one chunk of each piece of the bucket. It receives that chunk's codes from all ranks, reduces them, and
sends the result to all, so that all ranks decode the same bits. A rank sends 2 (n − 1)/n of the codes' bytes, for any
n. While one piece is quantized or reduced, its neighbours are on the link. On a GPU, values are quantized and decoded
on the device and reduced on the host; the next piece is quantized while codes are copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from pipecomp.allreduce.call import Call
from pipecomp.allreduce.group import Pending
from pipecomp.kernels.staging import Copy

PIECE = 1 << 20  # values
ALIGN = 64  # values: chunks start at whole bytes for any width
Step = Callable[["Span", Any], Any]  # takes a piece and the result of the step before


class DenseCode(Protocol):
    """Conversion of a bucket's values to bytes. `start` is the index of the first value in the bucket."""

    def encoded_bytes(self, count: int) -> int:
        """Return the bytes of `count` values of one rank."""

    def encode(self, x: Tensor, start: int) -> Tensor:
        """Encode this rank's values, uint8 on their device."""

    def reduced_bytes(self, count: int) -> int:
        """Return the bytes of `count` reduced values."""

    def reduce(self, parts: list[Tensor], count: int, start: int) -> Tensor:
        """Reduce all ranks' codes of the same values to one, uint8 on the host."""

    def decode(self, reduced: Tensor, out: Tensor, start: int) -> None:
        """Write the mean to out; both are on the same device."""


@dataclass(frozen=True, slots=True)
class Span:
    """The values [start, end) of a bucket."""

    start: int
    end: int

    @property
    def count(self) -> int:
        """Number of values."""
        return self.end - self.start

    def of(self, x: Tensor) -> Tensor:
        """Return these values of a flat tensor, as a view."""
        return x[self.start : self.end]


def spans(start: int, end: int, length: int) -> list[Span]:
    """Split [start, end) into spans of `length`; the last may be shorter."""
    return [Span(lo, min(lo + length, end)) for lo in range(start, end, length)]


def chunks(piece: Span, n: int) -> list[Span]:
    """Split a piece by owners, into n spans; the last ones may be short or empty."""
    each = -(-piece.count // n)
    each = -(-each // ALIGN) * ALIGN
    cuts = [min(piece.start + i * each, piece.end) for i in range(n + 1)]
    return [Span(lo, hi) for lo, hi in itertools.pairwise(cuts)]


def piece_length(n: int) -> int:
    """Return the number of values of a piece; it grows with n so that owners' messages stay large."""
    return PIECE * max(1, n // 4)


def owned_spans(d: int, n: int, rank: int) -> list[Span]:
    """Return a rank's chunk of each piece of a bucket of d values."""
    return [chunks(piece, n)[rank] for piece in spans(0, d, piece_length(n))]


def reduce_bucket(x_d: Tensor, out_d: Tensor, code: DenseCode, call: Call) -> None:
    """Write the mean of all ranks' x to out, which may be x."""
    run_pipelined(
        spans(0, x_d.numel(), piece_length(call.group.size)),
        *sending(
            call,
            lambda piece: encode(piece, x_d, code, call),
            lambda piece, encoded: scatter(piece, encoded, code, call),
        ),
        lambda piece, scattered: reduce_own(piece, scattered, code, call),
        lambda piece, gathered: collect(piece, gathered, out_d, code, call),
    )


def run_pipelined(pieces: Sequence[Span], *steps: Step) -> None:
    """Run all steps on each piece, a step one piece behind the step before it, whose result it takes."""
    results: dict[int, Any] = {}
    for i in range(len(pieces) + len(steps) - 1):
        for lag, step in enumerate(steps):
            if 0 <= i - lag < len(pieces):
                results[i - lag] = step(pieces[i - lag], results.pop(i - lag, None))


def sending(call: Call, encode: Callable[[Span], Any], send: Callable[[Span, Any], Pending]) -> list[Step]:
    """Return the steps of quantizing and sending: one, or two if codes are copied to the host in between."""
    if call.staging.immediate:
        return [lambda piece, _: send(piece, encode(piece))]
    return [lambda piece, _: encode(piece), send]


def encode(piece: Span, x_d: Tensor, code: DenseCode, call: Call) -> list[Copy]:
    """Quantize a piece's chunks and start to copy their codes to the host."""
    with call.counters.part("quantize"):
        owned = chunks(piece, call.group.size)
        return [call.to_host(code.encode(chunk.of(x_d), chunk.start)) for chunk in owned]


def scatter(piece: Span, encoded: list[Copy], code: DenseCode, call: Call) -> Pending:
    """Send each chunk's codes to its owner."""
    with call.counters.part("quantize"):
        outgoing = [copy.wait() for copy in encoded]
    own_count = chunks(piece, call.group.size)[call.group.rank].count
    return call.group.exchange(outgoing, [code.encoded_bytes(own_count)] * call.group.size)


def reduce_own(piece: Span, scattered: Pending, code: DenseCode, call: Call) -> Pending:
    """Reduce this rank's chunk and send it to all."""
    owned = chunks(piece, call.group.size)
    own = owned[call.group.rank]
    with call.counters.part("wait"):
        parts = scattered.wait()
    with call.counters.part("reduce"):
        reduced = code.reduce(parts, own.count, own.start)
    with call.counters.part("wait"):
        scattered.finish()
    return call.group.gather(reduced, [code.reduced_bytes(chunk.count) for chunk in owned])


def collect(piece: Span, gathered: Pending, out_d: Tensor, code: DenseCode, call: Call) -> None:
    """Decode all chunks of a piece."""
    with call.counters.part("wait"):
        parts = gathered.wait()
    with call.counters.part("decode"):
        arriving = [call.to_device(reduced) for reduced in parts]
        for chunk, copy in zip(chunks(piece, call.group.size), arriving, strict=True):
            if chunk.count:  # an empty tensor stays on the host
                code.decode(copy.wait(), chunk.of(out_d), chunk.start)
    with call.counters.part("wait"):
        gathered.finish()


def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes of `count` codes of `bits` bits."""
    return (count * bits + 7) // 8


def levels_of(bits: int) -> int:
    """Return s, the levels on each side of zero of signed codes of b bits: 2^(b−1) − 1."""
    return (1 << (bits - 1)) - 1
