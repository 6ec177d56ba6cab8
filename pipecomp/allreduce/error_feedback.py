"""Error-feedback residuals: what compression left out, kept for the next time.

A residual belongs to its parameter, whatever bucket carries that: DDP cuts its buckets anew after the first step, and
after a restart. `slices` says which parameters, by number or name, make up a bucket; a tensor without slices is a
parameter of its own, named by its key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipecomp.allreduce.call import Name, Slices
from pipecomp.allreduce.reduce_scatter import owned_spans
from pipecomp.errors import ConfigError, ShapeError

_LONE = -1  # stands for the slices of a lone tensor in a file


class Residuals:
    """Of one rank: a flat float32 tensor for each bucket's worker, and one for the chunks that it owns of each.

    rank, ranks: of the group that averages.
    """

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self._ranks = (ranks, rank)
        self._pieces: dict[Name, Tensor] = {}  # of each parameter, views of its bucket's memory
        self._buckets: dict[str, tuple[Slices | None, Tensor]] = {}  # those of which all pieces are where they were
        self._owned: dict[tuple[str, Slices | None], Tensor] = {}
        self._scratch: dict[torch.device, Tensor] = {}

    def worker(self, key: str, slices: Slices | None, d: int, device: torch.device) -> Tensor:
        """What this rank has not sent yet of the bucket, float32 [d]; zeros at first. Change it in place."""
        found = self._buckets.get(key)
        if found is not None and found[0] == slices and found[1].numel() == d:
            return _used_here(found[1])
        parts = _parts(key, slices, d)
        e_d = torch.zeros(d, device=device, dtype=torch.float32)
        if slices is not None and key in self._pieces:  # of a file from before residuals belonged to parameters
            e_d.copy_(_used_here(self._pieces.pop(key)))
        for (name, count), target in zip(parts, _split(e_d, parts), strict=True):
            piece = self._pieces.get(name)
            if piece is not None and piece.numel() != count:
                raise ShapeError(
                    f"gradient {name!r}: {count} values now, {piece.numel()} before; give every tensor a key of its own"
                )
            if piece is not None:
                target.copy_(_used_here(piece))
        self._buckets.pop(key, None)
        self._place_in(key, slices, e_d)
        return e_d

    def _place_in(self, key: str, slices: Slices | None, e_d: Tensor) -> None:
        """A bucket's residuals are in e from here on; other buckets that had one of its parameters are no more."""
        parts = _parts(key, slices, e_d.numel())
        for other, (theirs, other_d) in list(self._buckets.items()):
            if _share(parts, _parts(other, theirs, other_d.numel())):
                del self._buckets[other]
        self._pieces |= zip(dict(parts), _split(e_d, parts), strict=True)
        self._buckets[key] = (slices, e_d)

    def owner(self, key: str, slices: Slices | None, d: int) -> Tensor:
        """What this rank has not sent yet of the chunks that it owns of a bucket, one after the other.

        It is float32 on the CPU, zeros at first. Change it in place. Call it after `worker`, whose residual it may
        change.
        Where chunks have other owners from here on, this rank makes up as a worker for what it has left of the mean
        over n ranks, with n times that: nothing is lost, and no other rank has to be asked.
        """
        if (key, slices) not in self._owned:
            if slices is not None and (key, None) in self._owned:  # as in `worker`
                self._owned[key, slices] = self._owned.pop((key, None))
                return self._owned[key, slices]
            for place, left in list(self._owned.items()):
                if _share(_parts(key, slices, d), _parts(*place, 0)):
                    del self._owned[place]
                    self._make_up(*place, left)
            count = sum(span.count for span in owned_spans(d, *self._ranks))
            self._owned[key, slices] = torch.zeros(count, dtype=torch.float32)
        return self._owned[key, slices]

    def _make_up(self, key: str, slices: Slices | None, left: Tensor) -> None:
        d = self._pieces[key].numel() if slices is None else sum(count for _, count in slices)
        mean_d = torch.zeros(d, dtype=torch.float32)
        spans = owned_spans(d, *self._ranks)
        for span, part in zip(spans, left.split([span.count for span in spans]), strict=True):
            span.of(mean_d).copy_(part)
        parts = _parts(key, slices, d)
        for (name, _), part in zip(parts, _split(mean_d, parts), strict=True):
            piece = _used_here(self._pieces[name])
            piece.add_(part.to(piece.device), alpha=self._ranks[0])

    def plus(self, x_d: Tensor, e_d: Tensor) -> Tensor:
        """x + e, float32 [d], in a buffer that the next call uses again: fresh pages cost more than the addition."""
        scratch = self._scratch.get(x_d.device)
        if scratch is None or scratch.numel() < x_d.numel():
            scratch = self._scratch[x_d.device] = torch.empty(x_d.numel(), device=x_d.device, dtype=torch.float32)
        return torch.add(e_d, x_d, out=scratch[: x_d.numel()])

    def _unplaced(self) -> dict[Name, Tensor]:
        """Residuals of parameters whose bucket is no more."""
        placed = {n for key, (slices, e_d) in self._buckets.items() for n, _ in _parts(key, slices, e_d.numel())}
        return {name: piece for name, piece in self._pieces.items() if name not in placed}

    def norm(self) -> float:
        """‖e‖₂ over all of the worker's residuals."""
        return float(sum(float(piece.double().square().sum()) for piece in self._pieces.values()) ** 0.5)

    def state_dict(self) -> dict[str, Any]:
        """Plain containers and tensors, for `torch.save`; a parameter whose bucket is no more has one of its own."""
        buckets = {key: (_said(slices, e_d.numel()), e_d) for key, (slices, e_d) in self._buckets.items()}
        for name, piece in self._unplaced().items():
            buckets[f"parameter {name}"] = (((name, piece.numel()),), piece)
        return {
            "worker": {key: (slices, e_d.cpu().clone()) for key, (slices, e_d) in buckets.items()},
            "owner": {(key, _said(slices, e.numel())): e.clone() for (key, slices), e in self._owned.items()},
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Go on with what `state_dict` returned; nothing of it is shared, as residuals change in place."""
        try:
            worker, owner = state["worker"], state["owner"]
        except (KeyError, TypeError) as error:
            raise ConfigError("state", sorted(state) if isinstance(state, dict) else state, "worker, owner") from error
        self._pieces, self._buckets = {}, {}
        for key, (slices, e_d) in worker.items():
            self._place_in(key, _named(slices), e_d.to(device, copy=True))
        self._owned = {(key, _named(slices)): e.clone() for (key, slices), e in owner.items()}


def _used_here(x_d: Tensor) -> Tensor:
    """Let nobody have x's memory before the current stream is done with x; returns x.

    Residuals of a file are loaded on another stream than averages run on, and memory that is let go goes back to the
    stream that it is from, which would use it at once.
    """
    if x_d.is_cuda:
        x_d.record_stream(torch.cuda.current_stream(x_d.device))
    return x_d


def _parts(key: str, slices: Slices | None, d: int) -> Slices:
    """The parameters of a bucket of d values."""
    return ((key, d),) if slices is None else slices


def _split(x_d: Tensor, parts: Slices) -> tuple[Tensor, ...]:
    """A bucket's values by parameter."""
    return x_d.split([count for _, count in parts])


def _share(a: Slices, b: Slices) -> bool:
    """Whether two buckets have a parameter in common."""
    return not dict(a).keys().isdisjoint(dict(b))


def _said(slices: Slices | None, count: int) -> Slices:
    """What a file says of a bucket's slices."""
    return ((_LONE, count),) if slices is None else slices


def _named(slices: Iterable[Sequence[Any]]) -> Slices | None:
    """A file's slices; None for a lone tensor."""
    found = tuple((name, count) for name, count in slices)
    return None if found and found[0][0] == _LONE else found
