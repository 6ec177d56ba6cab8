"""Quantizing with an error-feedback residual, in plain torch: codes of x + e that move e, of one worker or of a mean.

d: values of a flat bucket, cut into groups of `group_size` (the last may be short). Every step is one float32
operation, rounded, except inside the mean magnitude. Source: arXiv:1905.05957 (DoubleSqueeze), Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pipecomp.kernels import bitpack, layout, reference
from pipecomp.kernels.division import divisor
from pipecomp.kernels.layout import Options

Quantize = Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor]]
Dequantize = Callable[..., Tensor]


def _quantize(y_d: Tensor, scale_G: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Codes of values with known scales, and what they decode to."""
    codes = []
    for run in layout.segments(y_d.numel(), bits, group_size):
        y_RGn = reference.run_of(y_d.unsqueeze(0), run)
        s_RG = scale_G[run.group_start : run.group_start + run.groups].unsqueeze(0)
        codes_RGn = reference.group_codes(y_RGn, s_RG, Options(bits, group_size), None)
        codes.append(bitpack.pack_bits(codes_RGn, bits).flatten())
    packed = torch.cat(codes)
    return packed, reference.dequantize(packed, scale_G, bits, tuple(y_d.shape), group_size, "nearest", None, False)


def feedback_quantize_(
    x_d: Tensor, e_d: Tensor, bits: int, group_size: int, mean: bool, quantize: Quantize = _quantize
) -> tuple[Tensor, Tensor]:
    """Codes (uint8) and scales (float32 [groups]) of x + e with nearest rounding; e becomes (x + e) - deq, in place.

    A group with NaN, Inf or a sum above 2**100 keeps its e; its codes are 0, its scale is NaN. quantize: gives codes
    of y_d with the scales s_G, and what they decode to.
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
    """max|y| of each group, or (`mean`) twice its mean magnitude: float32 [groups], bfloat16 numbers, rounded up.

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
            total_G = (t_Gn * reference.RMS_FIXED_POINT).round().to(torch.int64).sum(-1)
            total_G = total_G.to(torch.float64)
            share_G = total_G / divisor(run.group * reference.RMS_FIXED_POINT, total_G)
            scale_G = (2.0 * most_G.to(torch.float64) * share_G).to(torch.float32)
        scale_G = torch.where(usable_G & (scale_G >= layout.SCALE_MIN), scale_G, 0.0)
        scales.append(torch.where(most_G <= layout.SCALE_MAX, reference.round_up_to_bfloat16(scale_G), math.inf))
    return torch.cat(scales)


def feedback_reduce_(
    codes: list[Tensor],
    scales: list[Tensor],
    bits: int,
    e_d: Tensor,
    group_size: int,
    mean: bool,
    quantize: Quantize = _quantize,
    dequantize: Dequantize = reference.dequantize,
) -> tuple[Tensor, Tensor]:
    """`feedback_quantize_` of the mean of several workers' values: added one after the other, then divided."""
    y_d = torch.empty_like(e_d)
    for i, (packed, scale_G) in enumerate(zip(codes, scales, strict=True)):
        dequantize(packed, scale_G, bits, tuple(y_d.shape), group_size, "nearest", y_d, i > 0)
    return feedback_quantize_(y_d.div_(divisor(len(codes), y_d)), e_d, bits, group_size, mean, quantize)
