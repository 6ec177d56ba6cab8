"""Buckets of named tensors, and their averages.

Residuals belong to names, so the buckets may change from call to call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipecomp.allreduce.state import State

BUCKET = 2**22  # values


class BucketPiece(NamedTuple):
    """Values [start, end) of the flat tensor `owner`, a number or name."""

    owner: Any
    start: int
    end: int


Bucket = tuple[BucketPiece, ...]


def pack(tensors: Iterable[tuple[Any, int, Hashable]], *, whole: bool = False) -> list[Bucket]:
    """Assign tensors to buckets of about 2**22 values, in their order.

    Args:
        tensors: owner, number of values and kind of each; a bucket holds tensors of one kind.
        whole: do not split tensors; a bucket is full once it has at least 2**22 values. Otherwise it has at most that.
    """
    buckets: list[list[BucketPiece]] = []
    filling: dict[Hashable, tuple[list[BucketPiece], int]] = {}
    for owner, count, kind in tensors:
        start = 0
        while start < count or (whole and not start):
            pieces, room = filling.get(kind, ([], 0))
            if room <= 0:
                pieces, room = [], BUCKET
                buckets.append(pieces)
            end = count if whole else min(count, start + room)
            pieces.append(BucketPiece(owner, start, end))
            filling[kind] = (pieces, room - (end - start))
            start = end
            if whole:
                break
    return [tuple(pieces) for pieces in buckets]


def new_values(bucket: Bucket, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return zeros for a bucket's values, [d]."""
    return torch.zeros(sum(piece.end - piece.start for piece in bucket), dtype=dtype, device=device)


def views(bucket: Bucket, values_d: Tensor) -> list[tuple[BucketPiece, Tensor]]:
    """Split a bucket's values by piece."""
    return list(zip(bucket, values_d.split([piece.end - piece.start for piece in bucket]), strict=True))


def submit_named(state: State, tensors: Mapping[str, Tensor], *, label: str = "") -> Callable[[], None]:
    """Start to replace tensors, by name, in place by their means over a state's ranks.

    While one bucket is copied, the one before it is on the link.

    Args:
        state: averages.
        tensors: of float dtypes, by name; they must not change until the averages are done.
        label: identifies this subset of the state's tensors, if they are not always averaged together.

    Returns:
        A function that waits for the averages, and raises their errors.
    """
    rest = dict(tensors)
    waiting: list[tuple[torch.futures.Future[Tensor], list[Tensor]]] = []
    if state.options.method_options.by_matrix:  # needs the shapes of matrices
        for name in [name for name, x in rest.items() if x.dim() > 1]:
            x = rest.pop(name)
            waiting.append((state.submit(x, name), [x]))
    kinds = sorted(((name, x.numel(), str(x.dtype)) for name, x in rest.items()), key=lambda kind: kind[2])
    for i, bucket in enumerate(pack(kinds, whole=True)):
        parts = [rest[piece.owner] for piece in bucket]
        flat = torch.cat([x.reshape(-1) for x in parts])
        slices = tuple((piece.owner, piece.end) for piece in bucket)
        waiting.append((state.submit(flat, f"{label}bucket-{i}", slices=slices, out=flat), parts))

    def finish() -> None:
        for future, targets in waiting:
            mean = future.wait().view(-1)
            for target, part in zip(targets, mean.split([x.numel() for x in targets]), strict=True):
                target.copy_(part.view_as(target))

    return finish
