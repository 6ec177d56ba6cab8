"""Arithmetic with the same result on every device: random numbers, divisors, sums in a fixed order.

Random numbers are a function of (seed, element index), the same on every backend, rank and thread count. A 64-bit seed
gives two 32-bit keys per block of 2**32 elements (SplitMix64's finalizer); inside a block a 32-bit two-multiplication
hash, with one key before it and one in its middle, turns the index into 32 random bits. It takes only 32-bit
multiplications per element because AVX2 has no 64-bit one.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF
GOLDEN = 0x9E3779B97F4A7C15
# Multipliers of a two-round 32-bit hash of low bias (Wellons, "hash-prospector", lowbias32).
MULTIPLIER_1 = 0x7FEB352D
MULTIPLIER_2 = 0x846CA68B


def finalize64(z: int) -> int:
    """SplitMix64's finalizer, a bijection on 64-bit integers."""
    z &= MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def mix_seed(*values: int) -> int:
    """Derive a seed in [0, 2**63) from several integers, such as (seed, step, link, micro-batch). Order matters."""
    return _mix(values, len(values)) >> 1


@lru_cache(maxsize=1024)  # consecutive seeds differ in their last number
def _mix(values: tuple[int, ...], count: int) -> int:
    """Mix the first of `count` values."""
    if not values:
        return finalize64(GOLDEN * (count + 1))
    return finalize64((_mix(values[:-1], count) + GOLDEN) ^ finalize64(values[-1] + GOLDEN))


def keys(seed: int, block: int) -> tuple[int, int]:
    """Derive the two 32-bit keys of elements block * 2**32 ... (block + 1) * 2**32 - 1."""
    z = finalize64((seed & MASK64) + GOLDEN * (block + 1))
    return z & MASK32, z >> 32


def random_bits(seed: int, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Draw 32 random bits for each element index start ... start + count - 1: int64 [count] in [0, 2**32)."""
    parts = []
    end = start + count
    while start < end:
        block, low = start >> 32, start & MASK32
        n = min(end - start, MASK32 + 1 - low)
        key_0, key_1 = keys(seed, block)
        h = torch.arange(low, low + n, dtype=torch.int64, device=device)
        h = (h + key_0) & MASK32
        h ^= h >> 16
        h = (h * MULTIPLIER_1) & MASK32
        h ^= h >> 15
        h ^= key_1
        h = (h * MULTIPLIER_2) & MASK32
        h ^= h >> 16
        parts.append(h)
        start += n
    if not parts:
        return torch.empty(0, dtype=torch.int64, device=device)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def uniform(seed: int, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Draw from [0, 1) with 24 bits, exact in float32: the high bits of `random_bits`. float32 [count]."""
    return (random_bits(seed, start, count, device) >> 8).to(torch.float32) * 2.0**-24


def divisor(number: float, x: Tensor) -> Tensor:
    """Make a tensor of a number for x to be divided by.

    Args:
        number: Exact in x's dtype.
        x: The dividend; nothing is copied between its device and the host.

    Returns:
        A tensor of no dimensions, of x's dtype and device.
    """
    # Note: a GPU does not divide by a Python number, or by a tensor of one on the CPU. It multiplies by the reciprocal,
    # which rounds twice, and the last bit differs from the CPU's.
    return torch.full((), number, dtype=x.dtype, device=x.device)


def halved_sum(y: Tensor) -> Tensor:
    """Sum over the last dimension by halves: the second half is added to the first, an odd last value to value 0."""
    n = y.shape[-1]
    if not n:
        return y.new_zeros(y.shape[:-1])
    while n > 1:
        half = n // 2
        z = y[..., :half] + y[..., half : 2 * half]
        if n % 2:
            z[..., 0] += y[..., n - 1]
        y, n = z, half
    return y[..., 0]
