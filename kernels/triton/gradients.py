"""Triton kernels of flat buckets and their host side: dithering, k-means, error feedback, sketches.

The kernels produce the bytes of `reference.gradients`. With OCT, a program handles that many rows of eight values of a
flat bucket. Launch with enable_fp_fusion=False.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pipecomp.kernels.reference import gradients as reference
from pipecomp.kernels.reference.gradients import LinearCodes, Sketch
from pipecomp.kernels.reference.layout import QuantizerOptions
from pipecomp.kernels.triton.rows import (
    BLOCK,
    OCT,
    GroupShape,
    dequantize,
    key_table,
    launch,
    launch_dequantize,
    load_codes,
    loadable,
    octets,
    operation,
    pack_bits,
    quantize_kernel,
    random_bits,
    store_codes,
    to_float,
    uniform,
    unpack_bits,
    warps,
)


@triton.jit
def relative(g, divisor):
    """Compute min(|g| / divisor, 1)."""
    return tl.minimum(tl.div_rn(tl.abs(g), divisor), 1.0)


@triton.jit
def linear_encode_kernel(
    g,
    index,
    levels,
    codes,
    keys,
    start,
    d,
    divisor,
    offset,
    size_bytes,
    BITS: tl.constexpr,
    INDEXED: tl.constexpr,
    OCT: tl.constexpr,
):
    """Encode one chunk by linear dithering."""
    octet, lane, at = octets(tl.program_id(0).to(tl.int64), OCT)
    ok = at < d
    v = to_float(tl.load(g + at, mask=ok, other=0))
    s = tl.load(levels + tl.load(index + at, mask=ok, other=0).to(tl.int32)) if INDEXED else tl.load(levels)
    y = relative(v, divisor) * s
    floor = y.to(tl.int32)
    up = uniform(random_bits(start + tl.where(ok, at, 0), keys)) < y - floor.to(tl.float32)
    level = tl.minimum(floor + up.to(tl.int32), offset)
    c = tl.where(v < 0.0, offset - level, offset + level)
    store_codes(codes, octet, lane, c, ok, size_bytes, BITS)


@triton.jit
def add_codes_kernel(total, codes, d, size_bytes, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Add codes to total."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < d
    c = load_codes(codes, at, ok, size_bytes, BITS)
    tl.store(total + at, tl.load(total + at, mask=ok, other=0) + c, mask=ok)


@triton.jit
def linear_decode_kernel(
    out,
    codes,
    index,
    factors,
    d,
    offset,
    size_bytes,
    BITS: tl.constexpr,
    INDEXED: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Set out to (code - offset) * factor, or with ADD add it."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < d
    factor = tl.load(factors + tl.load(index + at, mask=ok, other=0).to(tl.int32)) if INDEXED else tl.load(factors)
    values = (load_codes(codes, at, ok, size_bytes, BITS) - offset).to(tl.float32) * factor
    tl.store(out + at, tl.load(out + at, mask=ok, other=0) + values if ADD else values, mask=ok)


@triton.jit
def scale_index_kernel(out, g, levels, d, divisor, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Find the index of the largest level count s with |g| / norm * s <= levels[0]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < d
    y = relative(to_float(tl.load(g + at, mask=ok, other=0)), divisor)
    least = tl.load(levels)
    best = tl.zeros([BLOCK], tl.int32)
    for j in range(1, COUNT):
        best = tl.where(y * tl.load(levels + j) <= least, j, best)
    tl.store(out + at, best.to(tl.uint8), mask=ok)


@triton.jit
def exponential_encode_kernel(
    g, codes, keys, start, d, divisor, smallest, depth, size_bytes, BITS: tl.constexpr, OCT: tl.constexpr
):
    """Encode one chunk by exponential dithering. smallest: 2**(top - 1 - depth)."""
    octet, lane, at = octets(tl.program_id(0).to(tl.int64), OCT)
    ok = at < d
    top: tl.constexpr = (1 << (BITS - 1)) - 1
    v = to_float(tl.load(g + at, mask=ok, other=0))
    y = relative(v, divisor)
    h = random_bits(start + tl.where(ok, at, 0), keys)
    pattern = y.to(tl.int32, bitcast=True)
    below = 128 + depth - (pattern >> 23)
    up = ((h >> 9).to(tl.int32) < (pattern & 0x7FFFFF)).to(tl.int32)
    last = (uniform(h) < y * smallest).to(tl.int32) * top
    e = tl.where(below > top, last, below - up)
    sign = ((v < 0.0) & (e > 0)).to(tl.int32)
    store_codes(codes, octet, lane, (sign << (BITS - 1)) | e, ok, size_bytes, BITS)


@triton.jit
def exponential_decode_kernel(
    out, codes, d, factor, depth, size_bytes, BITS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    """Set out to sign * 2**(1 + depth - e) * factor, zero for e = 0; or with ADD add it."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < d
    c = load_codes(codes, at, ok, size_bytes, BITS)
    e = c & ((1 << (BITS - 1)) - 1)
    power = (((128 + depth - e) << 23) | ((c >> (BITS - 1)) << 31)).to(tl.float32, bitcast=True)
    values = tl.where(e == 0, 0.0, power * factor)
    tl.store(out + at, tl.load(out + at, mask=ok, other=0) + values if ADD else values, mask=ok)


@triton.jit
def exponential_reduce_kernel(a, b, keys, extension_keys, d, size_bytes, BITS: tl.constexpr, OCT: tl.constexpr):
    """Add one chunk of codes, a <- a + b, by Algorithm 2 of Global-QSGD."""
    octet, lane, at = octets(tl.program_id(0).to(tl.int64), OCT)
    ok = at < d
    mask: tl.constexpr = (1 << (BITS - 1)) - 1
    ca = load_codes(a, at, ok, size_bytes, BITS)
    cb = load_codes(b, at, ok, size_bytes, BITS)
    ea = ca & mask
    eb = cb & mask
    k = tl.abs(ea - eb)
    at = tl.where(ok, at, 0)
    differ = ((ca ^ cb) >> (BITS - 1)).to(tl.int32)
    power = tl.maximum(k - differ, 0)
    byte = (random_bits(at // 4, keys) >> (at % 4 * 8).to(tl.uint32)).to(tl.int32) & 255
    more = (random_bits(at, extension_keys) >> 8).to(tl.int32)
    near = (byte >> tl.maximum(8 - power, 0)) == 0
    far = (byte == 0) & (power <= 32) & ((more >> tl.minimum(tl.maximum(32 - power, 0), 24)) == 0)
    moves = tl.where(power <= 8, near, far).to(tl.int32)
    larger = tl.where(ea <= eb, ca, cb)
    c = tl.where(differ == 0, larger - moves, tl.where(k == 0, 0, larger + moves))
    c = tl.where(ea == 0, tl.where(eb == 0, 0, cb), tl.where(eb == 0, ca, c))
    store_codes(a, octet, lane, c, ok, size_bytes, BITS)


@triton.jit
def kmeans_kernel(out, x, bounds, d, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Count the boundaries at or below each value."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = to_float(tl.load(x + at, mask=at < d, other=0))
    below = tl.zeros([BLOCK], tl.int32)
    for j in range(COUNT):
        below += 1 - (tl.load(bounds + j) > v).to(tl.int32)
    tl.store(out + at, below.to(tl.uint8), mask=at < d)


def flat_grid(d: int, chunk: int) -> tuple[int]:
    """Make a grid with one program for each chunk of a flat bucket, at least one."""
    return (max(1, -(-d // chunk)),)


def norm_divisor(norm: float) -> float:
    """Return the norm, or 1 if it is 0, as a float."""
    # Note: a whole number would be an integer to the kernels, by which Triton does not divide.
    return float(norm) if norm > 0 else 1.0


def float_table(values: Any, device: torch.device) -> Tensor:
    """Copy a small float32 table to the device."""
    return torch.tensor(values, dtype=torch.float32).to(device, non_blocking=True)


@operation
def linear_encode(g_d: Tensor, norm: float, form: LinearCodes, seed: int, start: int) -> Tensor:
    g_d, (levels, index_d, bits) = loadable(g_d), form
    d, size = g_d.numel(), (g_d.numel() * bits + 7) // 8
    codes = torch.empty(size, dtype=torch.uint8, device=g_d.device)
    keys, first = key_table(seed, start, d, g_d.device)
    tensors = (g_d, codes if index_d is None else index_d, float_table(levels, g_d.device), codes, keys)
    numbers = (first, d, norm_divisor(norm), min(levels), size)
    constants = {"BITS": bits, "INDEXED": index_d is not None, "OCT": OCT}
    launch(linear_encode_kernel, flat_grid(d, 8 * OCT), *tensors, *numbers, **constants)
    return codes


@operation
def linear_reduce(parts: list[Tensor], d: int, bits: int, sum_bits: int) -> Tensor:
    total = torch.zeros(d, dtype=torch.int32, device=parts[0].device)
    for codes in parts:
        launch(add_codes_kernel, flat_grid(d, BLOCK), total, codes.contiguous(), d, codes.numel(), bits, BLOCK)
    return pack_bits(total, sum_bits)


@operation
def linear_decode(codes: Tensor, norm: float, form: LinearCodes, workers: int, out_d: Tensor, add: bool) -> Tensor:
    codes, d, (levels, index_d, bits) = codes.contiguous(), out_d.numel(), form
    factors = float_table(reference.linear_factors(norm, levels, workers), out_d.device)
    tensors = (out_d, codes, codes if index_d is None else index_d, factors)
    constants = {"BITS": bits, "INDEXED": index_d is not None, "ADD": add, "BLOCK": BLOCK}
    offset = workers * min(levels)
    launch(linear_decode_kernel, flat_grid(d, BLOCK), *tensors, d, offset, codes.numel(), **constants)
    return out_d


@operation
def scale_index(g_d: Tensor, norm: float, levels: tuple[int, ...]) -> Tensor:
    g_d = loadable(g_d)
    d = g_d.numel()
    out = torch.empty(d, dtype=torch.uint8, device=g_d.device)
    table = float_table(levels, g_d.device)
    launch(scale_index_kernel, flat_grid(d, BLOCK), out, g_d, table, d, norm_divisor(norm), len(levels), BLOCK)
    return out


@operation
def exponential_encode(g_d: Tensor, norm: float, bits: int, depth: int, seed: int, start: int) -> Tensor:
    g_d = loadable(g_d)
    d, size = g_d.numel(), (g_d.numel() * bits + 7) // 8
    codes = torch.empty(size, dtype=torch.uint8, device=g_d.device)
    keys, first = key_table(seed, start, d, g_d.device)
    smallest = 2.0 ** (reference.max_exponent(bits) - 1 - depth)
    numbers = (first, d, norm_divisor(norm), smallest, depth, size)
    launch(exponential_encode_kernel, flat_grid(d, 8 * OCT), g_d, codes, keys, *numbers, BITS=bits, OCT=OCT)
    return codes


@operation
def exponential_decode(
    codes: Tensor, norm: float, bits: int, depth: int, divisor: int, out_d: Tensor, add: bool
) -> Tensor:
    codes, d = codes.contiguous(), out_d.numel()
    factor = reference.exponential_factor(norm, divisor)
    numbers = (d, factor, depth, codes.numel(), bits)
    launch(exponential_decode_kernel, flat_grid(d, BLOCK), out_d, codes, *numbers, ADD=add, BLOCK=BLOCK)
    return out_d


@operation
def exponential_reduce_(a: Tensor, b: Tensor, d: int, bits: int, seed: int) -> Tensor:
    target, b = a.contiguous(), b.contiguous()
    keys, _ = key_table(seed, 0, d, a.device)
    more, _ = key_table(reference.extension(seed), 0, d, a.device)
    launch(exponential_reduce_kernel, flat_grid(d, 8 * OCT), target, b, keys, more, d, b.numel(), bits, OCT)
    return a if target is a else a.copy_(target)


@operation
def kmeans_assign(x_d: Tensor, bounds: Tensor) -> Tensor:
    x_d = loadable(x_d)
    d = x_d.numel()
    out = torch.empty(d, dtype=torch.uint8, device=x_d.device)
    launch(kmeans_kernel, flat_grid(d, BLOCK), out, x_d, bounds, d, bounds.numel(), BLOCK)
    return out


@operation
def sketch_encode(x_d: Tensor, e_d: Tensor, centers: Tensor, bounds: Tensor, sketch: Sketch) -> tuple[Tensor, Tensor]:
    # torch's own operations sum by slot; kernels do the rest.
    return reference.sketch_encode(x_d, e_d, centers, bounds, sketch, kmeans_assign, pack_bits)


@operation
def sketch_decode(codes: Tensor, means: Tensor, sketch: Sketch, out_d: Tensor, add: bool, divisor: int) -> Tensor:
    return reference.sketch_decode(codes, means, sketch, out_d, add, divisor, unpack_bits)


@operation
def feedback_quantize_(x_d: Tensor, e_d: Tensor, bits: int, group_size: int, mean: bool) -> tuple[Tensor, Tensor]:
    # torch's own operations compute the scales; the quantizer's kernels run on the sum.
    return reference.feedback_quantize_(x_d, e_d, bits, group_size, mean, quantize_with_scales)


def quantize_with_scales(sum_d: Tensor, scale_G: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Compute codes for given scales, and the decoded values."""
    s = GroupShape(tuple(sum_d.shape), bits, group_size)
    codes = torch.empty(s.row_bytes, dtype=torch.uint8, device=sum_d.device)
    keys, _ = key_table(0, 0, s.H, sum_d.device)
    values = (sum_d, sum_d, codes, scale_G.contiguous(), codes, keys, s.H, s.H)
    constants = {"BITS": bits, "DELTA": False, "MEASURE": False, "STOCHASTIC": False, "OCT": OCT}
    launch(quantize_kernel, s.grid(8 * OCT), *values, *s.sizes, **constants, num_warps=warps(8 * OCT))
    decoded_d = torch.empty_like(sum_d)
    launch_dequantize(codes, scale_G, QuantizerOptions(bits, group_size), decoded_d, False)
    return codes, decoded_d


@operation
def feedback_reduce_(
    codes: list[Tensor], scales: list[Tensor], bits: int, e_d: Tensor, group_size: int, mean: bool
) -> tuple[Tensor, Tensor]:
    return reference.feedback_reduce_(codes, scales, bits, e_d, group_size, mean, quantize_with_scales, dequantize)
