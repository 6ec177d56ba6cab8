"""How far each row of a weight goes in an outer step, from how far the replicas' own have moved and where to.

What all replicas have to come to is summed in integers, so that it does not depend on the order: their machines differ.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

AHEAD = 1.4  # times as far as one replica has moved: what it alone has learned is divided by R (measured)
_LENGTHS = 256  # by which a weight's is told
_UNIT = 2.0**30
_AT_ONCE = 1 << 22  # values


def sums_of_rows(moved: Tensor, seed: int) -> Tensor:
    """Sum up how far each row of a weight has moved; a row is what has the same first index.

    Args:
        moved: Of one replica.
        seed: Of the direction, the same on all replicas.

    Returns:
        float32: the squared length of each row, then the lengths of all rows along a random direction, and along
        others until there are 256. Squared and summed up, these say how long a mean of replicas is, within a tenth,
        unlike the mean itself where that has been quantized.
    """
    x = _rows(moved)
    draw, directions = torch.Generator().manual_seed(seed), _directions(*x.shape)
    along = x.new_zeros(len(x), directions)
    for part in x.split(max(1, _AT_ONCE // directions), dim=1):  # a single row of a million values has 256 directions
        signs = torch.randint(0, 2, (part.shape[1], directions), generator=draw).mul_(2).sub_(1)
        along += part @ signs.to(part)
    return torch.cat([x.square().sum(1), along.view(-1)])


def rates_of_rows(mean: Tensor, sums: Tensor, replicas: int) -> Tensor:
    """Tell by what each row of the replicas' mean is multiplied, from 1.4 to 1.4·√R; 1 for a single replica.

    Args:
        mean: Of how far a weight has moved, the same on all replicas; quantized or not.
        sums: The mean of what `sums_of_rows` returned.
        replicas: R.

    Returns:
        float64 [rows], the same bits on all replicas.
    """
    rows = _rows(mean)
    squares, along = sums.double().split([len(rows), len(sums) - len(rows)])
    if replicas == 1:
        return torch.ones_like(squares)
    lengths = _sums(rows.square())
    found = _sums(lengths[None]) * _directions(*rows.shape)
    share = torch.where(found > 0, _sums(along.square()[None]) / found, 1.0).clamp(max=1.0)  # of it is no noise
    there = lengths * share  # 0 where nothing has moved, though a residual may have come with the mean
    rates = (squares / there).sqrt().clamp(1.0, math.sqrt(replicas))
    return torch.where(there > 0, rates, 1.0) * AHEAD


def _directions(rows: int, values: int) -> int:
    return 1 if values == 1 else -(-_LENGTHS // max(1, rows))


def _rows(x: Tensor) -> Tensor:
    return x.detach().float().reshape(x.shape[0] if x.dim() else 1, -1)


def _sums(x: Tensor) -> Tensor:
    """Sum up each row of values of at least 0, in any order to the same bits; float64."""
    found = []
    for part in x.split(max(1, _AT_ONCE // max(1, x.shape[1]))):
        top = part.amax(1, keepdim=True)
        whole = torch.where(top > 0, part / top, 0.0).mul_(_UNIT).round_().long().sum(1)
        found.append(whole.double() * (top[:, 0].double() / _UNIT))
    return torch.cat(found) if found else x.new_zeros(0, dtype=torch.float64)
