"""One collective for all dense methods: chunks go to their owners packed, are reduced there, and come back packed.

Every rank owns one chunk of each piece of the bucket. It receives that chunk's codes from everyone, reduces them in one
place, so that all ranks decode the same bits, and sends the result to everyone: 2 (n − 1)/n of the codes' bytes per
rank, for any n. While one piece is quantized or reduced, the ones before and after it are on the link. Values of a GPU
are quantized and decoded there and reduced on the host; while a piece's codes are copied out, the next is quantized.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pipecomp.allreduce.call import Call
from pipecomp.allreduce.group import Pending
from pipecomp.kernels.staging import Copy

PIECE = 1 << 20  # values
ALIGN = 64  # values: chunks start on whole bytes at any width


class Code(Protocol):
    """How the values of one bucket become bytes; `start` is the index in the bucket of the first one."""

    def encoded_bytes(self, count: int) -> int:
        """Bytes of `count` values of one rank."""

    def encode(self, x: Tensor, start: int) -> Tensor:
        """This rank's values, uint8 on their device."""

    def reduced_bytes(self, count: int) -> int:
        """Bytes of `count` reduced values."""

    def reduce(self, parts: list[Tensor], count: int, start: int) -> Tensor:
        """All ranks' codes of the same values to one, uint8, on the host."""

    def decode(self, reduced: Tensor, out: Tensor, start: int) -> None:
        """Write the mean to out, on the device that both are on."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of values: [start, end) of the bucket."""

    start: int
    end: int

    @property
    def count(self) -> int:
        """How many values."""
        return self.end - self.start

    def of(self, x: Tensor) -> Tensor:
        """These values of a flat tensor."""
        return x[self.start : self.end]


def spans(start: int, end: int, length: int) -> list[Span]:
    """[start, end) in runs of `length`; the last may be shorter."""
    return [Span(lo, min(lo + length, end)) for lo in range(start, end, length)]


def chunks(piece: Span, n: int) -> list[Span]:
    """A piece's values by their owners: n spans, of which the last ones may be short or empty."""
    each = -(-piece.count // n)
    each = -(-each // ALIGN) * ALIGN
    cuts = [min(piece.start + i * each, piece.end) for i in range(n + 1)]
    return [Span(lo, hi) for lo, hi in itertools.pairwise(cuts)]


def piece_length(n: int) -> int:
    """Values in a piece: enough for each owner's messages to be large."""
    return PIECE * max(1, n // 4)


def owned_spans(d: int, n: int, rank: int) -> list[Span]:
    """What a rank owns of a bucket of d values: its chunk of each piece."""
    return [chunks(piece, n)[rank] for piece in spans(0, d, piece_length(n))]


def reduce_bucket(x_d: Tensor, out_d: Tensor, code: Code, call: Call) -> None:
    """out ← the mean of all ranks' x, through `code`; out may be x."""
    pieces = spans(0, x_d.numel(), piece_length(call.group.size))
    lag = copying_turns(call)
    encoded: dict[int, list[Copy]] = {}
    scattered: dict[int, Pending] = {}
    gathered: dict[int, Pending] = {}
    for i in range(len(pieces) + 2 + lag):
        if i < len(pieces):
            encoded[i] = encode(pieces[i], x_d, code, call)
        if i - lag in encoded:
            scattered[i - lag] = scatter(pieces[i - lag], encoded.pop(i - lag), code, call)
        if i - lag - 1 in scattered:
            gathered[i - lag - 1] = reduce_own(pieces[i - lag - 1], scattered.pop(i - lag - 1), code, call)
        if i - lag - 2 in gathered:
            collect(pieces[i - lag - 2], gathered.pop(i - lag - 2), out_d, code, call)


def copying_turns(call: Call) -> int:
    """How many pieces later than it is quantized a piece is sent: one, where its codes are copied to the host first."""
    return 0 if call.staging.immediate else 1


def encode(piece: Span, x_d: Tensor, code: Code, call: Call) -> list[Copy]:
    """Quantize a piece's chunks, and start copying their codes to the host."""
    with call.counters.part("quantize"):
        owned = chunks(piece, call.group.size)
        return [call.to_host(code.encode(chunk.of(x_d), chunk.start)) for chunk in owned]


def scatter(piece: Span, encoded: list[Copy], code: Code, call: Call) -> Pending:
    """Send each chunk's codes to its owner."""
    with call.counters.part("quantize"):
        outgoing = [copy.wait() for copy in encoded]
    mine = chunks(piece, call.group.size)[call.group.rank].count
    return call.group.exchange(outgoing, [code.encoded_bytes(mine)] * call.group.size)


def reduce_own(piece: Span, scattered: Pending, code: Code, call: Call) -> Pending:
    """Reduce the chunk that this rank owns, and send it to all."""
    owned = chunks(piece, call.group.size)
    mine = owned[call.group.rank]
    with call.counters.part("wait"):
        parts = scattered.wait()
    with call.counters.part("reduce"):
        reduced = code.reduce(parts, mine.count, mine.start)
    with call.counters.part("wait"):
        scattered.finish()
    return call.group.gather(reduced, [code.reduced_bytes(chunk.count) for chunk in owned])


def collect(piece: Span, gathered: Pending, out_d: Tensor, code: Code, call: Call) -> None:
    """Decode all chunks of a piece."""
    with call.counters.part("wait"):
        parts = gathered.wait()
    with call.counters.part("decode"):
        arriving = [call.to_device(reduced) for reduced in parts]
        for chunk, copy in zip(chunks(piece, call.group.size), arriving, strict=True):
            if chunk.count:  # the bytes of an empty one, of which there are none, stay on the host
                code.decode(copy.wait(), chunk.of(out_d), chunk.start)
    with call.counters.part("wait"):
        gathered.finish()


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of `count` codes of `bits` bits."""
    return (count * bits + 7) // 8
