"""The same K random coordinates on every worker (GRandK): what is not chosen is zero, or kept for later.

Coordinates come from a generator of their own, keyed by seed and call, so that torch's global one stays as it was.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pipecomp.allreduce.call import Call, Method
from pipecomp.allreduce.error_feedback import Residuals
from pipecomp.allreduce.finite_check import within
from pipecomp.allreduce.norms import LARGEST
from pipecomp.gradient_config import Gradients

_COORDINATES = 2  # what a random draw is for


def random_coordinates(d: int, count: int, seed: int) -> Tensor:
    """`count` different coordinates of d, all sets alike likely, ascending: int64 [count]."""
    if count >= d:
        return torch.arange(d)
    generator = torch.Generator().manual_seed(seed)
    if count > d // 4:
        return torch.randperm(d, generator=generator)[:count].sort().values
    chosen = torch.empty(0, dtype=torch.int64)
    while chosen.numel() < count:
        more = torch.randint(d, (count - chosen.numel() + 16,), generator=generator)
        chosen = torch.cat([chosen, more]).unique()
    surplus = torch.randperm(chosen.numel(), generator=generator)[:count]
    return chosen[surplus].sort().values


class RandomK:
    """`dense` on K shared random coordinates. rescale multiplies by d/K, which makes an unbiased method unbiased."""

    def __init__(self, dense: Method, options: Gradients, memory: Residuals) -> None:
        assert options.k is not None
        self._dense, self._k, self._memory = dense, options.k, memory
        self._rescale, self._feedback = bool(options.rescale), bool(options.error_feedback)

    def kept(self, d: int) -> int:
        """K for a bucket of d values."""
        return min(d, max(1, round(self._k * d)) if isinstance(self._k, float) else self._k)

    def mean(self, x_d: Tensor, out_d: Tensor, call: Call) -> None:
        """See Method."""
        d = x_d.numel()
        count = self.kept(d)
        with call.counters.part("quantize"):
            index = random_coordinates(d, count, call.draw(_COORDINATES)).to(x_d.device)
            chosen = x_d[index]
            memory_d = None
            if self._feedback:
                memory_d = self._memory.worker(call.key, call.slices, d, x_d.device)
                chosen = chosen.to(torch.float32) + memory_d[index]
        mean = torch.empty(count, device=x_d.device)
        if not within(x_d, call, LARGEST):  # also where nothing was chosen: loss scaling has to see it
            out_d.fill_(math.nan)
            return
        self._dense.mean(chosen, mean, call)
        with call.counters.part("decode"):
            if memory_d is not None:
                memory_d.add_(x_d)
                memory_d[index] = 0
            out_d.zero_()
            out_d[index] = mean * (d / count) if self._rescale else mean
