"""Norms of gradients over workers: ‖x‖_{q,p} = (Σ_i ‖x_i‖_q^p)^(1/p), x_i the gradient of worker i."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pipecomp.allreduce.call import Call

_SAFE = (1e-12, 1e15)  # between these the squares of float32 values neither vanish nor overflow
LARGEST = float(torch.finfo(torch.float32).max)


def local_norm(x_d: Tensor, q: float) -> float:
    """‖x‖_q of one worker, q in [1, inf]; NaN or Inf if x holds any. Values from 1e-37 to 1e38 count."""
    if x_d.numel() == 0:
        return 0.0
    x_d = x_d.detach()
    if math.isinf(q):
        low, high = torch.aminmax(x_d)  # both are NaN if any value is
        return float(torch.maximum(high, -low))
    if q in (1.0, 2.0):
        norm = float(torch.linalg.vector_norm(x_d, q, dtype=torch.float32))
        if _SAFE[0] < norm < _SAFE[1]:
            return norm
    largest = local_norm(x_d, math.inf)
    if not math.isfinite(largest) or largest == 0:
        return largest
    relative = x_d.to(torch.float64) / largest
    return largest * float(torch.linalg.vector_norm(relative, q))


def squared(x_d: Tensor) -> float:
    """‖x‖₂² of float32 values, also where their squares would leave float32."""
    return float(torch.linalg.vector_norm(x_d, dtype=torch.float64)) ** 2


def combine(norms: list[float], p: float) -> float:
    """The p-norm of the workers' norms, NaN or Inf if any is."""
    if not all(map(math.isfinite, norms)):
        return math.nan
    largest = max(norms)
    if math.isinf(p) or largest == 0:
        return largest
    return float(largest * sum((n / largest) ** p for n in norms) ** (1 / p))


def shared_norm(x_d: Tensor, exponents: tuple[float, float], call: Call) -> float:
    """‖x‖_{q,p} over all workers, unless the call has it: the same number on every rank.

    Not finite if any worker's x holds such a value, or if float32 cannot hold the norm.
    """
    if call.norm is not None:
        return call.norm
    with call.counters.part("quantize"):
        local = local_norm(x_d, exponents[0])
    with call.counters.part("wait"):
        norm = combine([row[0] for row in call.group.gather_numbers([local])], exponents[1])
    return norm if norm <= LARGEST else math.nan


def finish_without_codes(norm: float, out_d: Tensor) -> bool:
    """Nothing to send: all zeros, or NaN everywhere where any rank has a value that is not finite."""
    if norm == 0:
        out_d.zero_()
    elif not math.isfinite(norm):
        out_d.fill_(math.nan)
    else:
        return False
    return True
