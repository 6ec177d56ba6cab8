"""What methods begin with that have no norm in common: are all values usable, and what was left out of them before."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pipecomp.allreduce.call import Call
from pipecomp.allreduce.error_feedback import Residuals


def within(x_d: Tensor, call: Call, largest: float) -> bool:
    """Whether all values of all ranks are finite and at most `largest` in magnitude: the same answer everywhere."""
    with call.counters.part("quantize"):
        low, high = torch.aminmax(x_d)
    with call.counters.part("wait"):
        limits = call.group.gather_numbers([float(low), float(high)])
    return all(abs(value) <= largest for row in limits for value in row)


def with_residual(
    x_d: Tensor, out_d: Tensor, residuals: Residuals, call: Call, largest: float
) -> tuple[Tensor, Tensor] | None:
    """(e, x + e), float32 [d]: the bucket's residual, to be changed in place, and a buffer that is used again.

    None if a sum of any rank is not finite or above `largest`: then out is NaN on all ranks, and no residual changes.
    """
    with call.counters.part("quantize"):
        e_d = residuals.worker(call.key, call.slices, x_d.numel(), x_d.device)
        sum_d = residuals.plus(x_d, e_d)
    if within(sum_d, call, largest):
        return e_d, sum_d
    out_d.fill_(math.nan)
    return None
