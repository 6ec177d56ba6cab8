"""Quantizing with an error memory, in plain torch: scales of x + e, codes that move e, the mean of several codes.

d: values of a flat bucket, cut into groups of `group_size` (the last may be short). Every step is one float32
operation, rounded, except inside the mean magnitude. Source: arXiv:1905.05957 (DoubleSqueeze), Algorithm 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pipecomp.kernels import bitpack, layout, reference
from pipecomp.kernels.layout import Options


def feedback_scales(x_d: Tensor, e_d: Tensor, group_size: int, mean: bool) -> Tensor:
    """max|x + e| of each group, or (`mean`) twice its mean magnitude: float32 [groups].

    Inf for a group with NaN, Inf or a sum above 2**100; 0 where the scale is below 2**-100. Magnitudes are summed
    relative to the largest, as integers in units of 2**-30, so that the order does not matter.
    """
    sum_d = x_d.to(torch.float32) + e_d
    scales = []
    for run in layout.segments(sum_d.numel(), 8, group_size):
        y_Gn = sum_d[run.value_start : run.value_start + run.groups * run.group].reshape(run.groups, run.group).abs()
        scale_G = most_G = y_Gn.amax(-1)
        usable_G = (most_G >= layout.SCALE_MIN) & (most_G <= layout.SCALE_MAX)
        if mean:
            t_Gn = y_Gn * torch.reciprocal(torch.where(usable_G, most_G, 1.0)).unsqueeze(-1)
            total_G = (t_Gn * reference.RMS_FIXED_POINT).round().to(torch.int64).sum(-1)
            share_G = total_G.to(torch.float64) / (run.group * reference.RMS_FIXED_POINT)
            scale_G = (2.0 * most_G.to(torch.float64) * share_G).to(torch.float32)
        scale_G = torch.where(usable_G & (scale_G >= layout.SCALE_MIN), scale_G, 0.0)
        scales.append(torch.where(most_G <= layout.SCALE_MAX, scale_G, math.inf))
    return torch.cat(scales)


def feedback_quantize_(x_d: Tensor, e_d: Tensor, scale_G: Tensor, bits: int, group_size: int) -> Tensor:
    """Codes of x + e with nearest rounding, uint8; e becomes (x + e) - deq, in place."""
    sum_d, d = x_d.to(torch.float32) + e_d, e_d.numel()
    codes = []
    for run in layout.segments(d, bits, group_size):
        y_RGn = reference.run_of(sum_d.unsqueeze(0), run)
        s_RG = scale_G[run.group_start : run.group_start + run.groups].unsqueeze(0)
        c_RGn = reference.group_codes(y_RGn, s_RG, Options(bits, group_size), None)
        codes.append(bitpack.pack_bits(c_RGn, bits).flatten())
    packed = torch.cat(codes)
    torch.sub(sum_d, reference.dequantize(packed, scale_G, bits, (d,), group_size, "nearest", None, False), out=e_d)
    return packed


def dequantize_mean(codes: list[Tensor], scales: list[Tensor], bits: int, group_size: int, out_d: Tensor) -> Tensor:
    """The mean of several workers' values into out (float32 [d]): added one after the other, then divided."""
    for i, (packed, scale_G) in enumerate(zip(codes, scales, strict=True)):
        reference.dequantize(packed, scale_G, bits, (out_d.numel(),), group_size, "nearest", out_d, i > 0)
    return out_d.div_(len(codes))
