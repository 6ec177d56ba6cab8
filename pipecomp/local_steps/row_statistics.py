"""Statistics of the rows of weights that replicas exchange beside the weights, in float32.

`row_sums` and `row_rates` give the length of each row's outer step from the replicas' own movements and their mean.
`SecondMoments` shares the row means of Adam's second moments.

Note: [Shared second moments]
    A token that only one replica has seen has a row near zero in the second moments of all others. They would take a
    full-size step when they first see it. With common row means, each replica keeps its own moments within a row, and
    one number per row is exchanged.
    Sums are computed in integers, whose result does not depend on the order, because replicas' machines differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

AHEAD = 1.4  # factor of a replica's own movement: the mean divides what one replica alone has learned by R (measured)
_LEAST = 1e-30  # smallest row mean to divide by
_LENGTHS = 256  # projections of a weight
_UNIT = 2.0**30
_AT_ONCE = 1 << 22  # values


def row_sums(moved: Tensor, seed: int) -> Tensor:
    """Summarize the movement of each row (first index) of a weight.

    Args:
        moved: movement of the weight on one replica.
        seed: seed of the directions, the same on all replicas.

    Returns:
        float32: the squared length of each row, then the projections of all rows on random directions, at least 256.
        The projections are linear: squared and summed, their mean over replicas gives the length of the mean movement
        within a tenth, even if that has been quantized.
    """
    x = _rows(moved)
    draw, directions = torch.Generator().manual_seed(seed), _directions(*x.shape)
    along = x.new_zeros(len(x), directions)
    for part in x.split(
        max(1, _AT_ONCE // directions), dim=1
    ):  # limits memory: a single row of a million values has 256 directions
        signs = torch.randint(0, 2, (part.shape[1], directions), generator=draw).mul_(2).sub_(1)
        along += part @ signs.to(part)
    return torch.cat([x.square().sum(1), along.view(-1)])


def row_rates(mean: Tensor, sums: Tensor, replicas: int) -> Tensor:
    """Return the factor of each row of the replicas' mean movement, from 1.4 to 1.4·√R; 1 for a single replica.

    Args:
        mean: movement of a weight, the same on all replicas; quantized or not.
        sums: mean of the replicas' `row_sums`.
        replicas: R.

    Returns:
        float64 [rows], the same bits on all replicas.
    """
    rows = _rows(mean)
    squares, along = sums.double().split([len(rows), len(sums) - len(rows)])
    if replicas == 1:
        return torch.ones_like(squares)
    lengths = _exact_sums(rows.square())
    totals = _exact_sums(lengths[None]) * _directions(*rows.shape)
    share = torch.where(totals > 0, _exact_sums(along.square()[None]) / totals, 1.0).clamp(
        max=1.0
    )  # the share that is not noise
    noise_free = lengths * share  # 0 if nothing has moved, even if the mean holds an error-feedback residual
    rates = (squares / noise_free).sqrt().clamp(1.0, math.sqrt(replicas))
    return torch.where(noise_free > 0, rates, 1.0) * AHEAD


def _directions(rows: int, values: int) -> int:
    return 1 if values == 1 else -(-_LENGTHS // max(1, rows))


def _rows(x: Tensor) -> Tensor:
    return x.detach().float().reshape(x.shape[0] if x.dim() else 1, -1)


def _exact_sums(x: Tensor) -> Tensor:
    """Sum each row of non-negative values, to the same bits in any order; float64."""
    parts = []
    for part in x.split(max(1, _AT_ONCE // max(1, x.shape[1]))):
        top = part.amax(1, keepdim=True)
        units = torch.where(top > 0, part / top, 0.0).mul_(_UNIT).round_().long().sum(1)
        parts.append(units.double() * (top[:, 0].double() / _UNIT))
    return torch.cat(parts) if parts else x.new_zeros(0, dtype=torch.float64)


class SecondMoments:
    """The second moments of a replica's weights.

    Args:
        weights: by name.
        states: returns the inner optimizer's states by weight, as `torch.optim.Optimizer.state`.
    """

    def __init__(self, weights: Mapping[str, Tensor], states: Callable[[], Mapping[Tensor, Any]]) -> None:
        self._weights, self._states = weights, states

    def rows(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return row means of the second moments of some weights; nothing for an optimizer without them.

        Returns:
            By name, new float32 [rows]. They are zeros for untrained weights, even if all are untrained: other replicas
            may have trained, and all must exchange the same tensors.
        """
        states = self._states()
        nonempty = [state for state in states.values() if state]
        if nonempty and not any("exp_avg_sq" in state for state in nonempty):
            return {}
        means = {}
        for name in names:
            weight = self._weights[name]
            v = states[weight].get("exp_avg_sq") if weight in states else None
            rows = weight.shape[0] if weight.dim() else 1
            zeros = torch.zeros(rows, device=weight.device, dtype=torch.float32)
            means[name] = zeros if v is None else v.detach().float().reshape(rows, -1).mean(1)
        return means

    @torch.no_grad()
    def scale_to(self, own: Mapping[str, Tensor], means: Mapping[str, Tensor]) -> None:
        """Scale each row to the replicas' mean; a zero row is set to the mean.

        Note:
            The increase of a row since `rows` was called is added to the mean. Scaling by the ratio of the mean to the
            old value instead would blow up a row that was tiny then and is large now.

        Args:
            own: return value of `rows`.
            means: the same, averaged over replicas.
        """
        states = self._states()
        for name, mean in means.items():
            v = states[self._weights[name]].get("exp_avg_sq") if self._weights[name] in states else None
            if v is None:
                continue
            now = v.detach().float().reshape(len(mean), -1).mean(1)
            target = mean + (now - own[name]).clamp_min(0.0)
            scalable = (own[name] > _LEAST) & (now > _LEAST)
            factor = torch.where(scalable, target / now.clamp_min(_LEAST), 1.0)
            more = torch.where(scalable, 0.0, mean)
            shape = (-1, *(1,) * (v.dim() - 1)) if v.dim() else ()
            v.mul_(factor.view(shape)).add_(more.view(shape))
