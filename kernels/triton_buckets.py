"""Host side of the Triton kernels of flat buckets: data-parallel codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipecomp.kernels import dithering, sketch
from pipecomp.kernels import triton_gradient as gradient
from pipecomp.kernels.sketch import Sketch
from pipecomp.kernels.triton_rows import BLOCK, OCT, key_table, loadable, pack_bits, unpack_bits


def flat_grid(d: int, chunk: int) -> tuple[int]:
    """One program per chunk of a flat bucket, at least one."""
    return (max(1, -(-d // chunk)),)


def norm_divisor(norm: float) -> float:
    """Choose what values are divided by: the norm, or 1 where that is 0.

    A whole number would be an integer to the kernels, by which Triton does not divide.
    """
    return float(norm) if norm > 0 else 1.0


def float_table(values: Any, device: torch.device) -> Tensor:
    """Make a small float32 table on the device."""
    return torch.tensor(values, dtype=torch.float32).to(device, non_blocking=True)


def linear_encode(
    g_d: Tensor, norm: float, levels: tuple[int, ...], index_d: Tensor | None, bits: int, seed: int, start: int
) -> Tensor:
    """As `dithering.linear_encode`."""
    g_d = loadable(g_d)
    d, size = g_d.numel(), (g_d.numel() * bits + 7) // 8
    codes = torch.empty(size, dtype=torch.uint8, device=g_d.device)
    keys, first = key_table(seed, start, d, g_d.device)
    index = codes if index_d is None else index_d
    gradient.linear_encode_kernel[flat_grid(d, 8 * OCT)](
        g_d,
        index,
        float_table(levels, g_d.device),
        codes,
        keys,
        first,
        d,
        norm_divisor(norm),
        min(levels),
        size,
        BITS=bits,
        INDEXED=index_d is not None,
        OCT=OCT,
        enable_fp_fusion=False,
    )
    return codes


def linear_reduce(parts: list[Tensor], d: int, bits: int, sum_bits: int) -> Tensor:
    """As `dithering.linear_reduce`."""
    total = torch.zeros(d, dtype=torch.int32, device=parts[0].device)
    for codes in parts:
        gradient.add_codes_kernel[flat_grid(d, BLOCK)](
            total, codes.contiguous(), d, codes.numel(), bits, BLOCK, enable_fp_fusion=False
        )
    return pack_bits(total, sum_bits)


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
    """As `dithering.linear_decode`."""
    codes, d = codes.contiguous(), out_d.numel()
    factors = float_table(dithering.linear_factors(norm, levels, workers), out_d.device)
    index = codes if index_d is None else index_d
    gradient.linear_decode_kernel[flat_grid(d, BLOCK)](
        out_d,
        codes,
        index,
        factors,
        d,
        workers * min(levels),
        codes.numel(),
        bits,
        INDEXED=index_d is not None,
        ADD=add,
        BLOCK=BLOCK,
        enable_fp_fusion=False,
    )
    return out_d


def scale_index(g_d: Tensor, norm: float, levels: tuple[int, ...]) -> Tensor:
    """As `dithering.scale_index`."""
    g_d = loadable(g_d)
    d = g_d.numel()
    out = torch.empty(d, dtype=torch.uint8, device=g_d.device)
    table = float_table(levels, g_d.device)
    gradient.scale_index_kernel[flat_grid(d, BLOCK)](
        out, g_d, table, d, norm_divisor(norm), len(levels), BLOCK, enable_fp_fusion=False
    )
    return out


def exponential_encode(g_d: Tensor, norm: float, bits: int, depth: int, seed: int, start: int) -> Tensor:
    """As `dithering.exponential_encode`."""
    g_d = loadable(g_d)
    d, size = g_d.numel(), (g_d.numel() * bits + 7) // 8
    codes = torch.empty(size, dtype=torch.uint8, device=g_d.device)
    keys, first = key_table(seed, start, d, g_d.device)
    smallest = 2.0 ** (dithering.max_exponent(bits) - 1 - depth)
    gradient.exponential_encode_kernel[flat_grid(d, 8 * OCT)](
        g_d,
        codes,
        keys,
        first,
        d,
        norm_divisor(norm),
        smallest,
        depth,
        size,
        BITS=bits,
        OCT=OCT,
        enable_fp_fusion=False,
    )
    return codes


def exponential_decode(
    codes: Tensor, norm: float, bits: int, depth: int, divisor: int, out_d: Tensor, add: bool
) -> Tensor:
    """As `dithering.exponential_decode`."""
    codes, d = codes.contiguous(), out_d.numel()
    factor = dithering.exponential_factor(norm, divisor)
    gradient.exponential_decode_kernel[flat_grid(d, BLOCK)](
        out_d, codes, d, factor, depth, codes.numel(), bits, ADD=add, BLOCK=BLOCK, enable_fp_fusion=False
    )
    return out_d


def exponential_reduce_(a: Tensor, b: Tensor, d: int, bits: int, seed: int) -> Tensor:
    """As `dithering.exponential_reduce_`."""
    target, b = a.contiguous(), b.contiguous()
    keys, _ = key_table(seed, 0, d, a.device)
    more, _ = key_table(dithering.extension(seed), 0, d, a.device)
    gradient.exponential_reduce_kernel[flat_grid(d, 8 * OCT)](
        target, b, keys, more, d, b.numel(), bits, OCT, enable_fp_fusion=False
    )
    return a if target is a else a.copy_(target)


def kmeans_assign(x_d: Tensor, bounds: Tensor) -> Tensor:
    """As `dithering.kmeans_assign`."""
    x_d = loadable(x_d)
    d = x_d.numel()
    out = torch.empty(d, dtype=torch.uint8, device=x_d.device)
    gradient.kmeans_kernel[flat_grid(d, BLOCK)](out, x_d, bounds, d, bounds.numel(), BLOCK, enable_fp_fusion=False)
    return out


def sketch_encode(x_d: Tensor, e_d: Tensor, centers: Tensor, bounds: Tensor, how: Sketch) -> tuple[Tensor, Tensor]:
    """As `sketch.sketch_encode`: sums by slot with torch's own operations, the rest with kernels."""
    return sketch.sketch_encode(x_d, e_d, centers, bounds, how, kmeans_assign, pack_bits)


def sketch_decode(codes: Tensor, means: Tensor, how: Sketch, out_d: Tensor, add: bool, divisor: int) -> Tensor:
    """As `sketch.sketch_decode`, with torch's own operations."""
    return sketch.sketch_decode(codes, means, how, out_d, add, divisor, unpack_bits)
