"""How parameters are cut into buckets for an exchange."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

BUCKET = 2**22  # values


class Piece(NamedTuple):
    """Values [start, end) of the flat parameter number `owner`."""

    owner: int
    start: int
    end: int


Bucket = tuple[Piece, ...]


def pack(parameters: Iterable[tuple[int, int, Hashable]]) -> list[Bucket]:
    """Buckets of at most 2**22 values for parameters (number, values, kind), in their order; kinds are not mixed."""
    made: list[list[Piece]] = []
    filling: dict[Hashable, tuple[list[Piece], int]] = {}
    for owner, count, kind in parameters:
        start = 0
        while start < count:
            pieces, room = filling.get(kind, ([], 0))
            if not room:
                pieces, room = [], BUCKET
                made.append(pieces)
            end = min(count, start + room)
            pieces.append(Piece(owner, start, end))
            filling[kind] = (pieces, room - (end - start))
            start = end
    return [tuple(pieces) for pieces in made]


def zeros_for(bucket: Bucket, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """A bucket's values, [d]."""
    return torch.zeros(sum(piece.end - piece.start for piece in bucket), dtype=dtype, device=device)


def views(bucket: Bucket, values_d: Tensor) -> list[tuple[Piece, Tensor]]:
    """A bucket's values by piece."""
    return list(zip(bucket, values_d.split([piece.end - piece.start for piece in bucket]), strict=True))
