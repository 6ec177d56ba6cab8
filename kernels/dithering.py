"""Data-parallel codes in plain torch: linear and exponential dithering, Algorithm 2's reduce, k-means assignment.

d: number of values of a flat gradient bucket, s: levels, n: workers. Every function is a pure function of its
arguments: random numbers come from (seed, element index), so all ranks and backends agree bit for bit.

Linear code of b bits: l + s for the signed level l in [-s, s], s <= 2**(b-1) - 1, packed as in `bitpack`.
Exponential code of b = 8 or 4 bits: sign in the top bit, exponent e below it; e = 0 is zero (with sign 0), else
the value is sign * 2**-e in units of norm * 2**(1 + depth). Four-bit codes are two to a byte, the first one low.
Source: arXiv:2305.18627 (Global-QSGD), section 3, appendix B and Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipecomp.kernels import bitpack, rng


def relative(g_d: Tensor, norm: float) -> Tensor:
    """min(|g| / norm, 1) as float32 [d], one rounded division; a norm of 0 gives zeros for a zero gradient."""
    divisor = torch.tensor(norm if norm > 0 else 1.0, dtype=torch.float32, device=g_d.device)
    return (g_d.to(torch.float32).abs() / divisor).clamp(max=1.0)


def per_value(table: Sequence[float], index_d: Tensor | None, device: torch.device) -> Tensor:
    """Look up a level's number for each value as float32: [d] by `index_d` (uint8), or one for all."""
    numbers = torch.tensor(table, dtype=torch.float32, device=device)
    return numbers[0] if index_d is None else numbers[index_d.to(torch.int64)]


def linear_encode(
    g_d: Tensor, norm: float, levels: tuple[int, ...], index_d: Tensor | None, bits: int, seed: int, start: int
) -> Tensor:
    """l = floor(y * s), up with probability y * s - l, y = |g| / norm: uint8 [ceil(d * bits / 8)].

    levels: one s, or several, of which `index_d` (uint8 [d]) picks one a value; codes are offset by the smallest.
    """
    offset = min(levels)
    v_d = relative(g_d, norm) * per_value(levels, index_d, g_d.device)
    floor_d = v_d.floor()
    r_d = rng.uniform(seed, start, g_d.numel(), g_d.device)
    level_d = (floor_d + (r_d < v_d - floor_d)).clamp(max=offset).to(torch.int32)
    return bitpack.pack_bits(torch.where(g_d < 0, offset - level_d, offset + level_d), bits)


def linear_reduce(parts: list[Tensor], d: int, bits: int, sum_bits: int) -> Tensor:
    """Add n workers' packed codes, exactly: uint8 [ceil(d * sum_bits / 8)] holding the sum of l, plus n * s."""
    total_d = bitpack.unpack_bits(parts[0], bits, d)
    for codes in parts[1:]:
        total_d += bitpack.unpack_bits(codes, bits, d)
    return bitpack.pack_bits(total_d, sum_bits)


def linear_factors(norm: float, levels: tuple[int, ...], workers: int) -> list[float]:
    """norm / (s * workers) of each s, rounded to float32."""
    return torch.tensor([norm / (s * workers) for s in levels], dtype=torch.float64).to(torch.float32).tolist()


def linear_decode(
    codes: Tensor,
    norm: float,
    levels: tuple[int, ...],
    index_d: Tensor | None,
    bits: int,
    workers: int,
    out_d: Tensor,
    add: bool,
) -> Tensor:
    """norm / (s * workers) * sum of l of `workers` workers, into out (float32 [d]) or (`add`) added to what it holds.

    One conversion, one multiply and one addition a value, each rounded.
    """
    sum_d = bitpack.unpack_bits(codes, bits, out_d.numel()) - workers * min(levels)
    values_d = sum_d.to(torch.float32) * per_value(linear_factors(norm, levels, workers), index_d, codes.device)
    return out_d.add_(values_d) if add else out_d.copy_(values_d)


def scale_index(g_d: Tensor, norm: float, levels: tuple[int, ...]) -> Tensor:
    """Index of the largest level count s with |g| / norm * s <= min(levels), uint8 [d]; levels ascend."""
    y_d = relative(g_d, norm)
    index_d = torch.zeros(g_d.numel(), dtype=torch.uint8, device=g_d.device)
    for j, s in enumerate(levels[1:], 1):
        index_d[y_d * float(s) <= float(levels[0])] = j
    return index_d


def max_exponent(bits: int) -> int:
    """Largest exponent of an exponential code: 127 for 8 bits, 7 for 4."""
    return (1 << (bits - 1)) - 1


def pack_exponential(sign_d: Tensor, e_d: Tensor, bits: int) -> Tensor:
    """Codes of (sign bit, exponent); e = 0 gets sign 0."""
    code = torch.where(e_d > 0, (sign_d.to(torch.int32) << (bits - 1)) | e_d.to(torch.int32), 0)
    return code.to(torch.uint8) if bits == 8 else bitpack.pack_bits(code, bits)


def unpack_exponential(codes: Tensor, d: int, bits: int) -> tuple[Tensor, Tensor]:
    """(sign bit, exponent) of packed codes, int32 [d] each."""
    code = codes.to(torch.int32) if bits == 8 else bitpack.unpack_bits(codes, bits, d)
    return code >> (bits - 1), code & max_exponent(bits)


def exponential_encode(g_d: Tensor, norm: float, bits: int, depth: int, seed: int, start: int) -> Tensor:
    """Round |g| / (2 * 2**depth * norm) to a neighbouring power of two or zero, unbiased: uint8 codes."""
    y_d = relative(g_d, norm)
    top = max_exponent(bits)
    pattern_d = y_d.view(torch.int32)
    h_d = rng.random_bits(seed, start, g_d.numel(), g_d.device)
    below_d = 128 + depth - (pattern_d >> 23)  # exponent of the power of two at or below y
    up_d = (h_d >> 9) < (pattern_d & 0x7FFFFF)
    smallest_d = (h_d >> 8).to(torch.float32) * 2.0**-24 < y_d * 2.0 ** (top - 1 - depth)
    e_d = torch.where(below_d > top, smallest_d.to(torch.int32) * top, below_d - up_d.to(torch.int32))
    return pack_exponential(g_d < 0, e_d, bits)


def exponential_factor(norm: float, divisor: int) -> float:
    """norm / divisor, rounded to float32: what +1 at exponent 1 + depth decodes to."""
    return float(torch.tensor(norm / divisor, dtype=torch.float64).to(torch.float32))


def exponential_decode(
    codes: Tensor, norm: float, bits: int, depth: int, divisor: int, out_d: Tensor, add: bool
) -> Tensor:
    """sign * 2**-e * norm * 2**(1 + depth) / divisor into out (float32 [d]), or (`add`) added to what it holds.

    Rounded once for the factor, once for a value and once for the addition.
    """
    sign_d, e_d = unpack_exponential(codes, out_d.numel(), bits)
    # sign * 2**(1 + depth - e) from its bits: a normal number for every e >= 1
    power_d = ((128 + depth - e_d) << 23 | sign_d << 31).view(torch.float32)
    values_d = torch.where(e_d == 0, 0.0, power_d * exponential_factor(norm, divisor))
    return out_d.add_(values_d) if add else out_d.copy_(values_d)


def chance(k_d: Tensor, seed: int, extension_seed: int) -> Tensor:
    """Draw True with probability 2**-k, bool [d], for int32 k_d >= 0 (k above 32: never).

    One byte of randomness decides k <= 8: byte i mod 4 of the hash of i div 4, so that one hash serves four values.
    The rare zero byte with k > 8 takes 24 more bits from a second stream.
    """
    d, device = k_d.numel(), k_d.device
    shift = torch.arange(0, 32, 8, device=device)
    byte_d = ((rng.random_bits(seed, 0, (d + 3) // 4, device).unsqueeze(-1) >> shift) & 0xFF).flatten()[:d]
    more_d = rng.random_bits(extension_seed, 0, d, device) >> 8
    near_d = (byte_d >> (8 - k_d.clamp(max=8))) == 0
    far_d = (byte_d == 0) & (k_d <= 32) & ((more_d >> (32 - k_d.clamp(8, 32))) == 0)
    return torch.where(k_d <= 8, near_d, far_d)


def extension(seed: int) -> int:
    """Seed of the second stream of `chance`."""
    return rng.mix_seed(seed, 1)


def exponential_reduce_(a: Tensor, b: Tensor, d: int, bits: int, seed: int) -> Tensor:
    """Add packed codes, a <- a + b, unbiased, in place (uint8). Algorithm 2.

    Same sign: the larger magnitude moves up one exponent with probability 2**-|e1 - e2|. Opposite signs: it moves down
    one with probability 2**-(|e1 - e2| - 1); equal magnitudes cancel to zero. Zero is neutral.
    """
    (sign_a, e_a), (sign_b, e_b) = unpack_exponential(a, d, bits), unpack_exponential(b, d, bits)
    a_zero, b_zero = e_a == 0, e_b == 0
    same = sign_a == sign_b
    k = (e_a - e_b).abs()
    moves = chance(torch.where(same, k, (k - 1).clamp(min=0)), seed, extension(seed)).to(torch.int32)
    larger = torch.minimum(e_a, e_b)
    e = torch.where(same, larger - moves, torch.where(k == 0, 0, larger + moves))
    sign = torch.where(e_a <= e_b, sign_a, sign_b)
    e = torch.where(a_zero, e_b, torch.where(b_zero, e_a, e))
    sign = torch.where(a_zero, sign_b, torch.where(b_zero, sign_a, sign))
    return a.copy_(pack_exponential(sign, e, bits).reshape(a.shape))


def boundaries(centers_K: Tensor) -> Tensor:
    """Find what separates neighbouring centers, float32 [K - 1]: midpoints, and 0 where the sign changes."""
    low, high = centers_K[:-1], centers_K[1:]
    return torch.where((low < 0) & (high >= 0), 0.0, low * 0.5 + high * 0.5)


def kmeans_assign(x_d: Tensor, bounds: Tensor) -> Tensor:
    """Index of each value's center: how many boundaries are at or below it, uint8 [d]."""
    return torch.bucketize(x_d.to(torch.float32), bounds, right=True).to(torch.uint8)
