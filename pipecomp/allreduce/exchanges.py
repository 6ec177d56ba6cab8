"""What ranks exchange for one bucket, in bytes and in order, without any values: what methods' plans are made of.

d: values in the bucket (float32), n: ranks. `predict` plays these plans through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipecomp.allreduce.reduce_scatter import chunks, packed_bytes, piece_length, spans
from pipecomp.stats import ring_bytes

Shapes = Sequence[Sequence[int]]
FLOAT = 4  # bytes


@dataclass(frozen=True, slots=True)
class Exchange:
    """Bytes that each rank sends, and the most that passes one rank's link in one direction.

    hops: messages that follow each other. Bytes are fractions where something is sent every so many calls only.
    """

    sends: tuple[float, ...]
    link: float
    hops: int = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece's way: quantized and sent; where it has owners reduced and returned; decoded. lengths: told before."""

    sent: Exchange
    returned: Exchange | None = None
    lengths: Exchange | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """First what all wait for (norms), then one pass of pieces, or two. exact: a state sends just these bytes."""

    before: tuple[Exchange, ...]
    passes: tuple[tuple[Piece, ...], ...]
    exact: bool = True

    def exchanges(self) -> list[Exchange]:
        """All of them."""
        found = list(self.before)
        for piece in (p for pieces in self.passes for p in pieces):
            found += [e for e in (piece.lengths, piece.sent, piece.returned) if e is not None]
        return found


# -- bytes of values

Bytes = Callable[[int], int]


def packed(bits: int) -> Bytes:
    """Of codes of so many bits."""
    return lambda count: packed_bytes(count, bits)


# -- exchanges


def to_all(size: float, n: int) -> Exchange:
    """Every rank sends `size` bytes to each of the others."""
    return Exchange((size * (n - 1),) * n, size * (n - 1))


def ring(size: int, n: int) -> Exchange:
    """A ring all-reduce of `size` bytes, as torch's hooks use it."""
    sent = ring_bytes(size, n)
    return Exchange((sent,) * n, sent, hops=2 * (n - 1))


def scattered(d: int, n: int, encoded: Bytes, reduced: Bytes | None = None) -> tuple[Piece, ...]:
    """Chunks to their owners and back, as `reduce_scatter.reduce_bucket`."""
    pieces = []
    for span in spans(0, d, piece_length(n)):
        counts = [chunk.count for chunk in chunks(span, n)]
        there = [encoded(count) for count in counts]
        back = [(reduced or encoded)(count) for count in counts]
        # An owner receives what n - 1 ranks have of its chunk, and sends its sums to as many.
        apart, together = tuple(sum(there) - own for own in there), tuple((n - 1) * own for own in back)
        sent = Exchange(apart, max(*apart, (n - 1) * max(there)))
        returned = Exchange(together, max(*together, sum(back) - min(back)))
        pieces.append(Piece(sent, returned))
    return tuple(pieces)
