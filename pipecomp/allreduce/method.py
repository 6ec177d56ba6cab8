"""Interfaces of gradient methods: averages of buckets, and plans of the bytes that they exchange.

A method's options are in `pipecomp.config.gradients`; the methods are in `pipecomp.allreduce.methods`:

    class Rounded(GradientMethod):
        options: RoundedOptions

        def average(self, residuals): return RoundedAverage(self.options.bits)
        def plan(self, d, n, shapes=None): return ExchangePlan((), (scattered(d, n, packed(self.options.bits)),))

Plans count bytes without any values; `predict` simulates them.
d: values of a bucket (float32 in plans), n: ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from pipecomp.allreduce.call import Call, Counters, Name
from pipecomp.allreduce.error_feedback import Residuals
from pipecomp.allreduce.reduce_scatter import chunks, packed_bytes, piece_length, spans
from pipecomp.config.gradients import Adaptive
from pipecomp.stats import ring_bytes

Shapes = Sequence[Sequence[int]]
Bytes = Callable[[int], int]  # number of values -> bytes
FLOAT = 4  # bytes


class Average(Protocol):
    """Averages a flat bucket over the group's ranks."""

    def mean(self, x_d: Tensor, out_d: Tensor, call: Call) -> None:
        """Write the mean of all ranks' x (any float dtype) to out (float32, may be x): the same bits on every rank."""


class LayerAverage(Average, Protocol):
    """An average that supports adaptive compression (`adaptive.py`).

    Attributes:
        exponents: (q, p) of the norm that layers are divided by before `mean`, with `call.norm` 1; None if scales are
            derived from the values.
        largest: largest magnitude that can be sent.
    """

    exponents: tuple[float, float] | None
    largest: float

    def squared_error(self, x_d: Tensor, call: Call) -> float:
        """Return ‖x − sent‖² of a layer of this rank (float32), divided as for `mean`."""


class HookAverage(Protocol):
    """Averages DDP's buckets by a communication hook of torch."""

    def run(self, bucket: Any, key: str, counters: Counters, layers: Sequence[Name]) -> torch.futures.Future[Tensor]:
        """Average a bucket. layers: numbers of its parameters, or the key of a tensor by itself."""


@runtime_checkable
class Stateful(Protocol):
    """An average with memory beside `Residuals`. saved_as: its key in a state's dict."""

    saved_as: str

    def state_dict(self) -> dict[Any, Any]:
        """Return plain containers and tensors."""

    def load_state_dict(self, state: dict[Any, Any], device: torch.device) -> None:
        """Restore the return value of `state_dict`. device: that of the gradients."""


class GradientMethod:
    """A gradient method. Subclasses implement `plan`, and `average` or `hook`. options: validated."""

    options: Any

    def __init__(self, options: Any) -> None:
        self.options = options

    def with_options(self, **changes: Any) -> Self:
        """Return the method with some options changed."""
        return type(self)(self.options.replace(**changes))

    def average(self, residuals: Residuals) -> Average:
        """Return the method's average, which uses a state's residuals."""
        raise AssertionError(f"{type(self).__name__} implements neither `average` nor `hook`")

    @property
    def by_hook(self) -> bool:
        """True if the method implements `hook`."""
        return type(self).hook is not GradientMethod.hook

    def hook(self, group: Any, adaptive: Adaptive | None = None) -> HookAverage | None:
        """Return a hook that averages DDP's buckets over torch's `group` in place of `average`; None by default."""
        return None

    def plan(self, d: int, n: int, shapes: Shapes | None = None) -> ExchangePlan:
        """Return the exchanges for a bucket. shapes: its parameters' shapes, for methods `by_matrix`."""
        raise AssertionError(f"{type(self).__name__} implements no `plan`")


# -- plans


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages that ranks exchange at once.

    Attributes:
        sends: bytes that each rank sends; fractions if they are sent every few calls only.
        link: bytes through the busiest rank's link in one direction.
        hops: messages in sequence.
    """

    sends: tuple[float, ...]
    link: float
    hops: int = 1


@dataclass(frozen=True, slots=True)
class PiecePlan:
    """Exchanges of a piece: codes, reduced codes (if chunks have owners), and lengths (if codes vary in size)."""

    sent: Exchange
    returned: Exchange | None = None
    lengths: Exchange | None = None


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """Exchanges of a bucket: norms before any piece, then one or two passes over the pieces.

    exact: True if a state sends exactly these bytes.
    """

    before: tuple[Exchange, ...]
    passes: tuple[tuple[PiecePlan, ...], ...]
    exact: bool = True

    def exchanges(self) -> list[Exchange]:
        """Return all exchanges in order."""
        result = list(self.before)
        for piece in (p for pieces in self.passes for p in pieces):
            result += [e for e in (piece.lengths, piece.sent, piece.returned) if e is not None]
        return result


def packed(bits: int) -> Bytes:
    """Return a function for the bytes of packed codes of `bits` bits."""
    return lambda count: packed_bytes(count, bits)


def to_all(size: float, n: int) -> Exchange:
    """Every rank sends `size` bytes to each of the others."""
    return Exchange((size * (n - 1),) * n, size * (n - 1))


def ring(size: int, n: int) -> Exchange:
    """A ring all-reduce of `size` bytes, as in torch's hooks."""
    sent = ring_bytes(size, n)
    return Exchange((sent,) * n, sent, hops=2 * (n - 1))


def scattered(d: int, n: int, encoded: Bytes, reduced: Bytes | None = None) -> tuple[PiecePlan, ...]:
    """Chunks to their owners and back, as in `reduce_scatter.reduce_bucket`."""
    pieces = []
    for span in spans(0, d, piece_length(n)):
        counts = [chunk.count for chunk in chunks(span, n)]
        sizes = [encoded(count) for count in counts]
        back = [(reduced or encoded)(count) for count in counts]
        # An owner receives its chunk from n - 1 ranks, and sends the reduced one to as many.
        out, returned = tuple(sum(sizes) - own for own in sizes), tuple((n - 1) * own for own in back)
        pieces.append(
            PiecePlan(
                Exchange(out, max(*out, (n - 1) * max(sizes))),
                Exchange(returned, max(*returned, sum(back) - min(back))),
            )
        )
    return tuple(pieces)
