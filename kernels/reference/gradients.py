"""Gradient compression of flat buckets in plain torch: dithering, k-means, error feedback, sketches.

d: number of values of a flat gradient bucket, s: levels, n: workers, G: groups, K: clusters. Every function is a pure
function of its arguments: random numbers come from (seed, element index), so all ranks and backends agree bit for bit.

Linear code of b bits: l + s for the signed level l in [-s, s], s <= 2**(b-1) - 1, packed as in `rows.pack_bits`.
Exponential code of b = 8 or 4 bits: sign in the top bit, exponent e below it; e = 0 is zero (with sign 0), else
the value is sign * 2**-e in units of norm * 2**(1 + depth). Four-bit codes are two to a byte, the first one low.
Source: arXiv:2305.18627 (Global-QSGD), section 3, appendix B and Algorithm 2.

Error feedback quantizes x + e with a residual e, in groups of `group_size` (the last may be short). Every step is one
float32 operation, rounded, except inside the mean magnitude.
Source: arXiv:1905.05957 (DoubleSqueeze), Algorithm 1.

A sketch (CASQ) holds the cluster number of each value, and the means of hash buckets inside clusters. There is a slot
for each cluster's center, then one for each cluster's buckets; a value is in the bucket of its cluster that a hash of
its position chooses, or in the center's slot where the cluster has no buckets.
Source: docs/algorithms.md, 2.5.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipecomp.kernels.reference import layout, reproducible, rows
from pipecomp.kernels.reference.layout import QuantizerOptions

Quantize = Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor]]
Dequantize = Callable[..., Tensor]
Assign = Callable[[Tensor, Tensor], Tensor]
Pack = Callable[[Tensor, int], Tensor]
Unpack = Callable[[Tensor, int, int], Tensor]


def relative(g_d: Tensor, norm: float) -> Tensor:
    """Compute min(|g| / norm, 1), float32 [d], with one rounded division. Divides by 1 where the norm is 0."""
    divisor = torch.tensor(norm if norm > 0 else 1.0, dtype=torch.float32, device=g_d.device)
    return (g_d.to(torch.float32).abs() / divisor).clamp(max=1.0)


def per_value(table: Sequence[float], index_d: Tensor | None, device: torch.device) -> Tensor:
    """Look up a level's number for each value as float32: [d] by `index_d` (uint8), or one for all."""
    numbers = torch.tensor(table, dtype=torch.float32, device=device)
    return numbers[0] if index_d is None else numbers[index_d.to(torch.int64)]


class LinearCodes(NamedTuple):
    """Form of linear codes: s of each scale, ascending, the index of each value's scale (uint8 [d]), width in bits."""

    levels: tuple[int, ...]
    index_d: Tensor | None
    bits: int


def linear_encode(g_d: Tensor, norm: float, form: LinearCodes, seed: int, start: int) -> Tensor:
    """Encode l = floor(y * s), plus 1 with probability y * s - l, y = |g| / norm: uint8 [ceil(d * bits / 8)].

    Codes are offset by the smallest s.
    """
    levels, index_d, bits = form
    offset = min(levels)
    v_d = relative(g_d, norm) * per_value(levels, index_d, g_d.device)
    floor_d = v_d.floor()
    r_d = reproducible.uniform(seed, start, g_d.numel(), g_d.device)
    level_d = (floor_d + (r_d < v_d - floor_d)).clamp(max=offset).to(torch.int32)
    return rows.pack_bits(torch.where(g_d < 0, offset - level_d, offset + level_d), bits)


def linear_reduce(parts: list[Tensor], d: int, bits: int, sum_bits: int) -> Tensor:
    """Add n workers' packed codes, exactly: uint8 [ceil(d * sum_bits / 8)] holding the sum of l, plus n * s."""
    total_d = rows.unpack_bits(parts[0], bits, d)
    for codes in parts[1:]:
        total_d += rows.unpack_bits(codes, bits, d)
    return rows.pack_bits(total_d, sum_bits)


def linear_factors(norm: float, levels: tuple[int, ...], workers: int) -> list[float]:
    """Compute norm / (s * workers) for each s, rounded to float32."""
    return torch.tensor([norm / (s * workers) for s in levels], dtype=torch.float64).to(torch.float32).tolist()


def linear_decode(codes: Tensor, norm: float, form: LinearCodes, workers: int, out_d: Tensor, add: bool) -> Tensor:
    """Decode norm / (s * workers) * (sum of the workers' l) into out (float32 [d]), or with `add` add it to out.

    One conversion, one multiply and one addition a value, each rounded.
    """
    levels, index_d, bits = form
    sum_d = rows.unpack_bits(codes, bits, out_d.numel()) - workers * min(levels)
    values_d = sum_d.to(torch.float32) * per_value(linear_factors(norm, levels, workers), index_d, codes.device)
    return out_d.add_(values_d) if add else out_d.copy_(values_d)


def scale_index(g_d: Tensor, norm: float, levels: tuple[int, ...]) -> Tensor:
    """Find the index of the largest level count s with |g| / norm * s <= min(levels), uint8 [d]; levels ascend."""
    y_d = relative(g_d, norm)
    index_d = torch.zeros(g_d.numel(), dtype=torch.uint8, device=g_d.device)
    for j, s in enumerate(levels[1:], 1):
        index_d[y_d * float(s) <= float(levels[0])] = j
    return index_d


def max_exponent(bits: int) -> int:
    """Largest exponent of an exponential code: 127 for 8 bits, 7 for 4."""
    return (1 << (bits - 1)) - 1


def pack_exponential(sign_d: Tensor, e_d: Tensor, bits: int) -> Tensor:
    """Pack (sign bit, exponent) to codes; e = 0 gets sign 0."""
    code = torch.where(e_d > 0, (sign_d.to(torch.int32) << (bits - 1)) | e_d.to(torch.int32), 0)
    return code.to(torch.uint8) if bits == 8 else rows.pack_bits(code, bits)


def unpack_exponential(codes: Tensor, d: int, bits: int) -> tuple[Tensor, Tensor]:
    """Unpack codes to (sign bit, exponent), int32 [d] each."""
    code = codes.to(torch.int32) if bits == 8 else rows.unpack_bits(codes, bits, d)
    return code >> (bits - 1), code & max_exponent(bits)


def exponential_encode(g_d: Tensor, norm: float, bits: int, depth: int, seed: int, start: int) -> Tensor:
    """Round |g| / (2 * 2**depth * norm) to a neighbouring power of two or zero, unbiased: uint8 codes."""
    y_d = relative(g_d, norm)
    top = max_exponent(bits)
    pattern_d = y_d.view(torch.int32)
    h_d = reproducible.random_bits(seed, start, g_d.numel(), g_d.device)
    below_d = 128 + depth - (pattern_d >> 23)  # exponent of the power of two at or below y
    up_d = (h_d >> 9) < (pattern_d & 0x7FFFFF)
    smallest_d = (h_d >> 8).to(torch.float32) * 2.0**-24 < y_d * 2.0 ** (top - 1 - depth)
    e_d = torch.where(below_d > top, smallest_d.to(torch.int32) * top, below_d - up_d.to(torch.int32))
    return pack_exponential(g_d < 0, e_d, bits)


def exponential_factor(norm: float, divisor: int) -> float:
    """Compute norm / divisor, rounded to float32: the value of exponent 1 + depth."""
    return float(torch.tensor(norm / divisor, dtype=torch.float64).to(torch.float32))


def exponential_decode(
    codes: Tensor, norm: float, bits: int, depth: int, divisor: int, out_d: Tensor, add: bool
) -> Tensor:
    """Decode sign * 2**-e * norm * 2**(1 + depth) / divisor into out (float32 [d]), or with `add` add it to out.

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
    byte_d = ((reproducible.random_bits(seed, 0, (d + 3) // 4, device).unsqueeze(-1) >> shift) & 0xFF).flatten()[:d]
    more_d = reproducible.random_bits(extension_seed, 0, d, device) >> 8
    near_d = (byte_d >> (8 - k_d.clamp(max=8))) == 0
    far_d = (byte_d == 0) & (k_d <= 32) & ((more_d >> (32 - k_d.clamp(8, 32))) == 0)
    return torch.where(k_d <= 8, near_d, far_d)


def extension(seed: int) -> int:
    """Seed of the second stream of `chance`."""
    return reproducible.mix_seed(seed, 1)


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
    """Compute the boundaries between neighbouring centers, float32 [K - 1]: midpoints, and 0 where the sign changes."""
    low, high = centers_K[:-1], centers_K[1:]
    return torch.where((low < 0) & (high >= 0), 0.0, low * 0.5 + high * 0.5)


def kmeans_assign(x_d: Tensor, bounds: Tensor) -> Tensor:
    """Find the index of each value's center: the number of boundaries at or below it, uint8 [d]."""
    return torch.bucketize(x_d.to(torch.float32), bounds, right=True).to(torch.uint8)


def _quantize_with_scales(y_d: Tensor, scale_G: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Compute codes for given scales, and the decoded values."""
    codes, options = [], QuantizerOptions(bits, group_size)
    for run in layout.segments(y_d.numel(), bits, group_size):
        y_RGn = rows.segment_values(y_d.unsqueeze(0), run)
        s_RG = scale_G[run.group_start : run.group_start + run.groups].unsqueeze(0)
        codes_RGn = rows.group_codes(y_RGn, s_RG, options, None)
        codes.append(rows.pack_bits(codes_RGn, bits).flatten())
    packed = torch.cat(codes)
    return packed, rows.dequantize(packed, scale_G, options, tuple(y_d.shape), None, False)


def feedback_quantize_(
    x_d: Tensor, e_d: Tensor, bits: int, group_size: int, mean: bool, quantize: Quantize = _quantize_with_scales
) -> tuple[Tensor, Tensor]:
    """Quantize x + e with nearest rounding to codes (uint8) and scales (float32 [groups]); e becomes (x + e) - deq.

    A group with NaN, Inf or a sum above 2**100 keeps its e; its codes are 0, its scale is NaN. quantize: the backend's
    function with the signature of `_quantize_with_scales`.
    """
    sum_d = x_d.to(torch.float32) + e_d
    scale_G = sum_scales(sum_d, group_size, mean)
    usable_G = scale_G.isfinite()
    usable_d = usable_G.repeat_interleave(group_size)[: e_d.numel()]
    y_d, s_G = torch.where(usable_d, sum_d, 0.0), torch.where(usable_G, scale_G, 0.0)
    codes, decoded_d = quantize(y_d, s_G, bits, group_size)
    e_d.copy_(torch.where(usable_d, y_d - decoded_d, e_d))
    return codes, torch.where(usable_G, scale_G, math.nan)


def sum_scales(sum_d: Tensor, group_size: int, mean: bool) -> Tensor:
    """Compute max|y| of each group, or with `mean` twice its mean magnitude: float32 [groups], rounded up to bfloat16.

    Inf for a group with NaN, Inf or a value above 2**100; 0 where the scale is below 2**-100. Magnitudes are summed
    relative to the largest, as integers in units of 2**-30, so that the order does not matter.
    """
    scales = []
    for run in layout.segments(sum_d.numel(), 8, group_size):
        y_Gn = sum_d[run.value_start : run.value_start + run.groups * run.group].reshape(run.groups, run.group).abs()
        scale_G = most_G = y_Gn.amax(-1)
        usable_G = (most_G >= layout.SCALE_MIN) & (most_G <= layout.SCALE_MAX)
        if mean:
            t_Gn = y_Gn * torch.reciprocal(torch.where(usable_G, most_G, 1.0)).unsqueeze(-1)
            total_G = (t_Gn * rows.RMS_FIXED_POINT).round().to(torch.int64).sum(-1)
            total_G = total_G.to(torch.float64)
            share_G = total_G / reproducible.divisor(run.group * rows.RMS_FIXED_POINT, total_G)
            scale_G = (2.0 * most_G.to(torch.float64) * share_G).to(torch.float32)
        scale_G = torch.where(usable_G & (scale_G >= layout.SCALE_MIN), scale_G, 0.0)
        scales.append(torch.where(most_G <= layout.SCALE_MAX, rows.round_up_to_bfloat16(scale_G), math.inf))
    return torch.cat(scales)


def feedback_reduce_(
    codes: list[Tensor],
    scales: list[Tensor],
    bits: int,
    e_d: Tensor,
    group_size: int,
    mean: bool,
    quantize: Quantize = _quantize_with_scales,
    dequantize: Dequantize = rows.dequantize,
) -> tuple[Tensor, Tensor]:
    """Quantize the mean of several workers' values as `feedback_quantize_`: added one after the other, then divided."""
    y_d = torch.empty_like(e_d)
    for i, (packed, scale_G) in enumerate(zip(codes, scales, strict=True)):
        dequantize(packed, scale_G, QuantizerOptions(bits, group_size), tuple(y_d.shape), y_d, i > 0)
    return feedback_quantize_(y_d.div_(reproducible.divisor(len(codes), y_d)), e_d, bits, group_size, mean, quantize)


class Sketch(NamedTuple):
    """Parameters of a sketch, equal on all ranks. counts: buckets per cluster, int64 [K] on the CPU. K is 2**bits."""

    counts: Tensor
    bits: int
    seed: int


# Hashing all positions takes most of a CPU's time.
_cached_uniform = functools.lru_cache(maxsize=2)(reproducible.uniform)


def _hash(seed: int, count: int, device: torch.device) -> Tensor:
    """Draw uniform [0, 1) for each position."""
    # Note: not cached on a GPU, where other streams would use the cached tensor before it is computed.
    return _cached_uniform(seed, 0, count) if device.type == "cpu" else reproducible.uniform(seed, 0, count, device)


def first_slots(counts: Tensor) -> Tensor:
    """Compute the first slot of each cluster, int64 [K], from its number of buckets, int64 [K]."""
    number = torch.arange(counts.numel(), device=counts.device)
    return torch.where(counts > 0, counts.numel() + counts.cumsum(0) - counts, number)


def slots(cluster_d: Tensor, sketch: Sketch) -> Tensor:
    """Compute the slot of each value's mean: int64 [d]."""
    index, counts = cluster_d.to(torch.int32), sketch.counts.to(cluster_d.device)
    size = counts.to(torch.float32).index_select(0, index)
    # Below 2**24 buckets the product is below the size, whatever it is rounded to.
    inside = (size * _hash(sketch.seed, index.numel(), index.device)).to(torch.int32)
    last = (counts - 1).clamp(min=0).int().index_select(0, index)
    return torch.minimum(inside, last).add_(first_slots(counts).int().index_select(0, index)).long()


def sketch_encode(
    x_d: Tensor,
    e_d: Tensor,
    centers: Tensor,
    bounds: Tensor,
    sketch: Sketch,
    assign: Assign = kmeans_assign,
    pack: Pack = rows.pack_bits,
) -> tuple[Tensor, Tensor]:
    """Compute packed cluster numbers and the mean of each slot, float32 [K + Σ counts]; e becomes x minus its means.

    Slots of centers hold the centers; a slot without values holds 0 and is never read.
    """
    cluster_d = assign(x_d, bounds)
    slot_d, total = slots(cluster_d, sketch), int(sketch.counts.sum()) + sketch.counts.numel()
    sums = torch.bincount(slot_d, weights=x_d.double(), minlength=total)
    means = (sums / torch.bincount(slot_d, minlength=total).clamp(min=1)).to(torch.float32)
    means[: centers.numel()] = centers
    torch.sub(x_d, means[slot_d], out=e_d)
    return pack(cluster_d, sketch.bits), means


def sketch_decode(
    codes: Tensor,
    means: Tensor,
    sketch: Sketch,
    out_d: Tensor,
    add: bool,
    divisor: int,
    unpack: Unpack = rows.unpack_bits,
) -> Tensor:
    """Set out to (out + each value's mean) / divisor; without `add` to mean / divisor."""
    if not add:
        out_d.zero_()
    out_d += means[slots(unpack(codes, sketch.bits, out_d.numel()), sketch)]
    return out_d.div_(reproducible.divisor(divisor, out_d))
