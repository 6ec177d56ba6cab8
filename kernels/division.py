"""Divisors that give the same quotients on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def divisor(number: float, x: Tensor) -> Tensor:
    """Make a tensor of a number, for x to be divided by.

    By a Python number, or a tensor of one on the CPU, a GPU does not divide: it multiplies with the reciprocal, which
    rounds twice, and its last bit is not the CPU's.

    Args:
        number: exact in x's dtype.
        x: what will be divided; nothing is copied between its device and the host.

    Returns:
        A tensor of no dimensions, of x's dtype and device.
    """
    return torch.full((), number, dtype=x.dtype, device=x.device)
