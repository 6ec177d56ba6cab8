"""Which value each layer gets: the fewest bytes under a limit on the sum of the layers' errors.

A multiple-choice knapsack, solved by dynamic programming over errors in whole steps. Errors are rounded up to steps, so
a plan never has more than the limit. All of it is whole numbers and float64 operations in a fixed order: ranks with the
same input find the same plan.
Source: arXiv:2210.17357 (L-GreCo), section 3. L: layers, V: values that each may have.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

STEPS = 10_000  # that the limit is divided into
STEPS_PER_LAYER = 50  # at least, since each layer's error is rounded up


def choose(errors: Sequence[Sequence[float]], costs: Sequence[Sequence[float]], own: int, factor: float) -> list[int]:
    """Pick a value for every layer.

    Args:
        errors: squared error of each layer with each value, finite, [L][V].
        costs: bytes likewise.
        own: index of the value that all layers have without a plan.
        factor: of the error with `own` everywhere; a plan's error may be that much.

    Returns:
        An index for each layer. Where no plan fits into the limit, each layer's value of least error.
    """
    error_LV, cost_LV = (torch.tensor(rows, dtype=torch.float64) for rows in (errors, costs))
    limit = factor * _total(errors, [own] * len(errors))
    if not limit:
        return [own] * len(errors)
    found = _fewest_bytes(error_LV / limit, cost_LV)
    if factor >= 1 and (found is None or _total(costs, found) >= _total(costs, [own] * len(errors))):
        return [own] * len(errors)  # it fits as it is, and only rounding can make another one seem better
    return [int(i) for i in error_LV.argmin(dim=1)] if found is None else found


def _total(rows: Sequence[Sequence[float]], plan: Sequence[int]) -> float:
    return sum(row[i] for row, i in zip(rows, plan, strict=True))


def _fewest_bytes(share_LV: Tensor, cost_LV: Tensor) -> list[int] | None:
    """share: of the limit that a layer with a value takes. None if no plan fits."""
    layers, values = share_LV.shape
    steps = max(STEPS, STEPS_PER_LAYER * layers)
    need_LV = (share_LV * steps).ceil().clamp(max=steps + 1).long().tolist()
    least = torch.zeros(steps + 1, dtype=torch.float64)  # bytes of the layers so far, by the steps they may take
    taken = torch.zeros(layers, steps + 1, dtype=torch.uint8)
    for layer in range(layers):
        options = torch.full((values, steps + 1), torch.inf, dtype=torch.float64)
        for value, need in enumerate(need_LV[layer]):
            if need <= steps:
                options[value, need:] = least[: steps + 1 - need] + cost_LV[layer, value]
        least, index = options.min(dim=0)
        taken[layer] = index.to(torch.uint8)
    if not bool(least[steps].isfinite()):
        return None
    plan, left = [0] * layers, steps
    for layer in reversed(range(layers)):
        plan[layer] = int(taken[layer, left])
        left -= need_LV[layer][plan[layer]]
    return plan
