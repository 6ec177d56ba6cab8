"""What methods with error memory begin with: the values together with what was left out of them before."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pipecomp.allreduce.call import Call
from pipecomp.allreduce.memory import ErrorMemory


def with_memory(
    x_d: Tensor, out_d: Tensor, memory: ErrorMemory, call: Call, largest: float
) -> tuple[Tensor, Tensor] | None:
    """(e, x + e), float32 [d]: the bucket's memory, to be changed in place, and a buffer that is used again.

    None if a sum of any rank is not finite or above `largest`: then out is NaN on all ranks, and no memory may change.
    """
    d = x_d.numel()
    with call.counters.part("quantize"):
        e_d = memory.worker(call.key, call.parts, d, x_d.device)
        sum_d = memory.plus(x_d, e_d)
        low, high = torch.aminmax(sum_d) if d else (torch.zeros(()), torch.zeros(()))
    with call.counters.part("wait"):
        limits = call.group.gather_numbers([float(low), float(high)])
    if all(abs(value) <= largest for row in limits for value in row):
        return e_d, sum_d
    out_d.fill_(math.nan)
    return None
