"""Error-feedback residuals: what compression left out, added to the next gradients.

Note: [Error feedback over DDP's buckets]
    A residual belongs to its parameter, not to a bucket: DDP rebuilds its buckets after the first step, in the order in
    which gradients became ready, and again after a restart. `slices` lists the parameters of a bucket by number or
    name; a tensor without slices is a parameter of its own, named by its key. The worker's residuals of a bucket are
    one flat tensor, so that kernels update them in one pass; each parameter's piece is a view of it. When a bucket with
    other slices comes, its tensor is assembled from the pieces, and buckets that shared a parameter with it are
    dropped. An owner's residuals are of the mean over n ranks, for the chunks that this rank owns. When a bucket is
    rebuilt, the chunks have other owners. The old owner then adds n times its residual to its own worker's residual:
    the mean over ranks restores it, nothing is lost, and no other rank has to be asked.
    DDP drops the mean of a parameter that no rank has used in a step (`find_unused_parameters`), which would be the
    residual alone. Such a parameter keeps its residuals until it has a gradient again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pipecomp.allreduce.call import Call, Name, Slices, unused_parameters
from pipecomp.allreduce.reduce_scatter import Span, owned_spans
from pipecomp.errors import ConfigError, ShapeError

_SINGLE = -1  # parameter number of a tensor by itself, in files


class Residuals:
    """Residuals of one rank, as worker and as owner. rank, ranks: this rank and the size of the averaging group."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self._ranks = (ranks, rank)
        self._pieces: dict[Name, Tensor] = {}  # by parameter, views of a bucket's tensor
        self._buckets: dict[str, tuple[Slices | None, Tensor]] = {}  # those whose pieces are all in place
        self._owned: dict[tuple[str, Slices | None], Tensor] = {}
        self._scratch: dict[torch.device, Tensor] = {}

    def worker(self, key: str, slices: Slices | None, d: int, device: torch.device) -> Tensor:
        """Return a bucket's residual, float32 [d], to be updated in place; zeros at first."""
        bucket = self._buckets.get(key)
        if bucket is not None and bucket[0] == slices and bucket[1].numel() == d:
            return _record_use(bucket[1])
        parts = _parts(key, slices, d)
        e_d = torch.zeros(d, device=device, dtype=torch.float32)
        if slices is not None and key in self._pieces:  # an old file: residuals of buckets
            e_d.copy_(_record_use(self._pieces.pop(key)))
        for (name, count), target in zip(parts, _split(e_d, parts), strict=True):
            piece = self._pieces.get(name)
            if piece is not None and piece.numel() != count:
                raise ShapeError(
                    f"gradient {name!r}: {count} values now, {piece.numel()} before; give every tensor a key of its own"
                )
            if piece is not None:
                target.copy_(_record_use(piece))
        self._buckets.pop(key, None)
        self._place_in(key, slices, e_d)
        return e_d

    def _place_in(self, key: str, slices: Slices | None, e_d: Tensor) -> None:
        """Make e the residual of a bucket, and drop other buckets with one of its parameters."""
        parts = _parts(key, slices, e_d.numel())
        for other, (other_slices, other_d) in list(self._buckets.items()):
            if _overlap(parts, _parts(other, other_slices, other_d.numel())):
                del self._buckets[other]
        self._pieces |= zip(dict(parts), _split(e_d, parts), strict=True)
        self._buckets[key] = (slices, e_d)

    def owner(self, key: str, slices: Slices | None, d: int) -> Tensor:
        """Return the owner's residual of this rank's chunks of a bucket, concatenated, to be updated in place.

        It is float32 on the CPU, zeros at first. Call `worker` before: this may update the worker's residual.
        """
        if (key, slices) not in self._owned:
            if slices is not None and (key, None) in self._owned:  # as in `worker`
                self._owned[key, slices] = self._owned.pop((key, None))
                return self._owned[key, slices]
            for place, left in list(self._owned.items()):
                if _overlap(_parts(key, slices, d), _parts(*place, 0)):
                    del self._owned[place]
                    self._return_to_worker(*place, left)
            count = sum(span.count for span in owned_spans(d, *self._ranks))
            self._owned[key, slices] = torch.zeros(count, dtype=torch.float32)
        return self._owned[key, slices]

    def _return_to_worker(self, key: str, slices: Slices | None, left: Tensor) -> None:
        """Add n times an owner's residual to this rank's worker residuals."""
        d = self._pieces[key].numel() if slices is None else sum(count for _, count in slices)
        mean_d = torch.zeros(d, dtype=torch.float32)
        spans = owned_spans(d, *self._ranks)
        for span, part in zip(spans, left.split([span.count for span in spans]), strict=True):
            span.of(mean_d).copy_(part)
        parts = _parts(key, slices, d)
        for (name, _), part in zip(parts, _split(mean_d, parts), strict=True):
            piece = _record_use(self._pieces[name])
            piece.add_(part.to(piece.device), alpha=self._ranks[0])

    @contextmanager
    def added_to(
        self, x_d: Tensor, out_d: Tensor, call: Call, largest: float
    ) -> Iterator[tuple[Tensor, Tensor] | None]:
        """Add a bucket's residual e to its values.

        Yields:
            (e, x + e), float32 [d]: the residual, to be updated in place, and a buffer that the next call overwrites.
            None if a sum of any rank is not finite or above `largest`: then out is NaN on all ranks, and residuals are
            unchanged.
        """
        with call.counters.part("quantize"):
            e_d = self.worker(call.key, call.slices, x_d.numel(), x_d.device)
            sum_d = self._sum(x_d, e_d)
        unused = unused_parameters(sum_d, x_d, call, largest)
        if unused is None:
            out_d.fill_(math.nan)
            yield None
            return
        spans = spans_of(unused, call)
        for span in spans:
            span.of(sum_d).zero_()
        with kept_for_later([span.of(e_d) for span in spans], [span.of(out_d) for span in spans]):
            yield e_d, sum_d

    def _sum(self, x_d: Tensor, e_d: Tensor) -> Tensor:
        """Return x + e in a reused buffer: page faults of a new one cost more than the addition."""
        scratch = self._scratch.get(x_d.device)
        if scratch is None or scratch.numel() < x_d.numel():
            scratch = self._scratch[x_d.device] = torch.empty(x_d.numel(), device=x_d.device, dtype=torch.float32)
        return torch.add(e_d, x_d, out=scratch[: x_d.numel()])

    def _unplaced(self) -> dict[Name, Tensor]:
        """Return the residuals of parameters whose bucket was dropped."""
        placed = {n for key, (slices, e_d) in self._buckets.items() for n, _ in _parts(key, slices, e_d.numel())}
        return {name: piece for name, piece in self._pieces.items() if name not in placed}

    def norm(self) -> float:
        """Return ‖e‖₂ over all of the worker's residuals."""
        return float(sum(float(piece.double().square().sum()) for piece in self._pieces.values()) ** 0.5)

    def state_dict(self) -> dict[str, Any]:
        """Return residuals by bucket, on the CPU. A parameter whose bucket was dropped has a bucket of its own."""
        buckets = {key: (_slices_to_file(slices, e_d.numel()), e_d) for key, (slices, e_d) in self._buckets.items()}
        for name, piece in self._unplaced().items():
            buckets[f"parameter {name}"] = (((name, piece.numel()),), piece)
        return {
            "worker": {key: (slices, e_d.cpu().clone()) for key, (slices, e_d) in buckets.items()},
            "owner": {(key, _slices_to_file(slices, e.numel())): e.clone() for (key, slices), e in self._owned.items()},
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore a copy of the return value of `state_dict`."""
        try:
            worker, owner = state["worker"], state["owner"]
        except (KeyError, TypeError) as error:
            raise ConfigError("state", sorted(state) if isinstance(state, dict) else state, "worker, owner") from error
        self._pieces, self._buckets = {}, {}
        for key, (slices, e_d) in worker.items():
            self._place_in(key, _slices_of_file(slices), e_d.to(device, copy=True))
        self._owned = {(key, _slices_of_file(slices)): e.clone() for (key, slices), e in owner.items()}


def spans_of(parameters: Sequence[int], call: Call) -> list[Span]:
    """Return the spans of some parameters in their bucket. parameters: indices in `call.slices`."""
    ends = list(itertools.accumulate((count for _, count in call.slices or ()), initial=0))
    return [Span(ends[i], ends[i + 1]) for i in parameters]


@contextmanager
def kept_for_later(residuals: Sequence[Tensor], means: Sequence[Tensor]) -> Iterator[None]:
    """Exclude parameters whose means are dropped: their residuals are 0 in the body and unchanged after it.

    Args:
        residuals: Views of these parameters' residuals.
        means: Views of these parameters' means; 0 after the body.
    """
    before = [e.clone() for e in residuals]
    for e in residuals:
        e.zero_()
    yield
    for e, value in zip(residuals, before, strict=True):
        e.copy_(value)
    for mean in means:
        mean.zero_()


def _record_use(x_d: Tensor) -> Tensor:
    """Record that the current stream uses x, and return x.

    Residuals of a file are allocated on another stream than averages run on. Without the record their memory, once
    freed, would be reused by that stream before this one is done.
    """
    if x_d.is_cuda:
        x_d.record_stream(torch.cuda.current_stream(x_d.device))
    return x_d


def _parts(key: str, slices: Slices | None, d: int) -> Slices:
    """Return the parameters of a bucket of d values."""
    return ((key, d),) if slices is None else slices


def _split(x_d: Tensor, parts: Slices) -> tuple[Tensor, ...]:
    """Split a bucket's values by parameter."""
    return x_d.split([count for _, count in parts])


def _overlap(a: Slices, b: Slices) -> bool:
    """Return whether two buckets share a parameter."""
    return not dict(a).keys().isdisjoint(dict(b))


def _slices_to_file(slices: Slices | None, count: int) -> Slices:
    """Convert slices for a file."""
    return ((_SINGLE, count),) if slices is None else slices


def _slices_of_file(slices: Iterable[Sequence[Any]]) -> Slices | None:
    """Convert slices of a file; None for a tensor by itself."""
    parsed = tuple((name, count) for name, count in slices)
    return None if parsed and parsed[0][0] == _SINGLE else parsed
