"""Buckets of tensors that are averaged together.

Residuals belong to names, so the buckets may change from call to call.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
