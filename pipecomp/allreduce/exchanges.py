"""What each method's ranks exchange for one bucket, in bytes and in order, without any values.

d: values in the bucket (float32), n: ranks. `predict` plays these plans through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipecomp.allreduce.dithering import levels_of
from pipecomp.allreduce.reduce_scatter import PIECE, chunks, packed_bytes, piece_length, spans
from pipecomp.errors import ConfigError
from pipecomp.gradient_config import Gradients
from pipecomp.kernels import ops

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
    """A piece's way: quantized and sent; with dense methods reduced and returned; decoded. lengths: told before."""

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


def plan_of(options: Gradients, d: int, n: int, shapes: Shapes | None = None) -> Plan:
    """What `options` exchange for d values over n ranks. shapes: of the parameters, which "powersgd" looks at."""
    name, bits = options.method, options.bits
    if shapes is not None and (name != "powersgd" or sum(map(math.prod, shapes)) != d):
        raise ConfigError("shapes", list(shapes), f"with 'powersgd' only, {d} values in all")
    norm, limits = to_all(8, n), to_all(16, n)  # one or two float64 numbers
    if name == "none":
        return Plan((), (_dense(d, n, _plain),))
    if name == "fp16":
        return Plan((), ((Piece(ring(2 * d, n)),),))
    if name == "powersgd":
        return Plan((), ((Piece(_power_sgd(shapes or [(d,)], options.rank or 1, n)),),))
    if name == "casq":
        return _casq(options, d, n)
    if name in ("double_squeeze", "quantized_adam"):
        return Plan((limits,), (_dense(d, n, _nearest(options)),))
    if name in ("qsgd", "nuqsgd", "terngrad"):
        width = 2 if name == "terngrad" else _one(options)
        pieces = spans(0, d, PIECE)
        return Plan((norm,), (tuple(Piece(to_all(packed_bytes(p.count, width), n)) for p in pieces),))
    if name == "global_qsgd" and options.sparse:
        return Plan((norm,), (_sparse(d, n, _one(options), linear=options.levels == "linear"),), exact=False)
    if name == "global_qsgd" and options.levels == "exponential":
        return Plan((norm,), (_dense(d, n, _packed(_one(options))),))
    before: tuple[Exchange, ...] = (norm,)
    if name.startswith("grandk"):
        before = (limits, norm)
        d = kept(options, d)
    passes = []
    if isinstance(bits, tuple):
        passes.append(_dense(d, n, _packed((len(bits) - 1).bit_length())))
        bits = bits[0]
    assert isinstance(bits, int)
    passes.append(_dense(d, n, _packed(bits), _packed(ops.linear_bits(levels_of(bits), n))))
    return Plan(before, tuple(passes))


# -- bytes of values

Bytes = Callable[[int], int]


def _plain(count: int) -> int:
    return FLOAT * count


def _packed(bits: int) -> Bytes:
    return lambda count: packed_bytes(count, bits)


def _nearest(options: Gradients) -> Bytes:
    """Codes and a bfloat16 scale for each group."""
    bits, group_size = _one(options), options.group_size

    def size(count: int) -> int:
        return ops.row_bytes(count, bits, group_size) + 2 * ops.groups(count, group_size) if count else 0

    return size


def _one(options: Gradients) -> int:
    assert isinstance(options.bits, int)
    return options.bits


def kept(options: Gradients, d: int) -> int:
    """How many of d coordinates the GRandK methods send."""
    k = options.k
    assert k is not None
    return min(d, max(1, round(k * d)) if isinstance(k, float) else k)


# -- exchanges


def to_all(size: float, n: int) -> Exchange:
    """Every rank sends `size` bytes to each of the others."""
    return Exchange((size * (n - 1),) * n, size * (n - 1))


def ring(size: int, n: int) -> Exchange:
    """A ring all-reduce of `size` bytes, as torch's hooks use it."""
    sent = ring_bytes(size, n)
    return Exchange((sent,) * n, sent, hops=2 * (n - 1))


def ring_bytes(size: int, n: int) -> int:
    """What a ring all-reduce of `size` bytes puts on a rank's links."""
    return 2 * size * (n - 1) // n


def _dense(d: int, n: int, encoded: Bytes, reduced: Bytes | None = None) -> tuple[Piece, ...]:
    """Chunks to their owners and back, as `dense.reduce_bucket`."""
    pieces = []
    for span in spans(0, d, piece_length(n)):
        counts = [chunk.count for chunk in chunks(span, n)]
        there = [encoded(count) for count in counts]
        back = [(reduced or encoded)(count) for count in counts]
        # An owner receives what n - 1 ranks have of its chunk, and sends its sums to as many.
        apart, together = tuple(sum(there) - own for own in there), tuple((n - 1) * own for own in back)
        scattered = Exchange(apart, max(*apart, (n - 1) * max(there)))
        gathered = Exchange(together, max(*together, sum(back) - min(back)))
        pieces.append(Piece(scattered, gathered))
    return tuple(pieces)


def _sparse(d: int, n: int, bits: int, *, linear: bool) -> tuple[Piece, ...]:
    """Non-zero codes and their positions, spread evenly: at most s·√(n·d) of them on all ranks together.

    A value x of a bucket with the norm ‖x‖₂ over all workers is sent with a probability of at most s·|x| / ‖x‖₂, 1/s
    the smallest level; the sum is largest where all values are equal.
    """
    s = levels_of(bits) if linear else 1 << (ops.exponential_levels(bits) - 1)
    share = min(1.0, s / math.sqrt(n * d))
    pieces = []
    for span in spans(0, d, PIECE):
        count = round(share * span.count)
        size = 4
        if count:
            size += ops.position_bytes(span.count, count)[1] + packed_bytes(count, 1 if linear and bits == 2 else bits)
        pieces.append(Piece(to_all(size, n), lengths=to_all(8, n)))
    return tuple(pieces)


def _casq(options: Gradients, d: int, n: int) -> Plan:
    """Cluster numbers and means to everyone; at times rank 0's centers and bucket counts. No more than these bytes."""
    assert options.buckets is not None
    assert options.interval is not None
    clusters = 1 << _one(options)
    centers = 12 * clusters * (n - 1) / options.interval
    broadcast = Exchange((centers, *[0.0] * (n - 1)), centers)
    means = clusters + max(1, round(options.buckets * d))
    whole = Piece(to_all(FLOAT * means + packed_bytes(d, _one(options)), n))
    return Plan((to_all(16, n), broadcast), ((whole,),), exact=False)


def _power_sgd(shapes: Shapes, rank: int, n: int) -> Exchange:
    """All-reduces of what is too small or flat to compress, of the matrices P, and of the matrices Q."""
    whole = factors = 0
    for shape in shapes:
        rows, columns = (1, shape[0]) if len(shape) == 1 else (shape[0], math.prod(shape[1:]))
        r = min(rows, columns, rank)
        if len(shape) == 1 or rows * columns <= (rows + columns) * r:
            whole += rows * columns
        else:
            factors += (rows + columns) * r
    sent = ring_bytes(FLOAT * (whole + factors), n)
    reductions = (whole > 0) + 2 * (factors > 0)
    return Exchange((sent,) * n, sent, hops=2 * (n - 1) * reductions)
