"""The quantizer Q_b in plain torch: the definition that every other backend matches bit for bit.

R: rows, H: values in a row, G: groups in a run of equal groups, n: values in a group. Every arithmetic step on values
is one float32 operation, rounded; nothing is contracted to a fused multiply-add.
Source: arXiv:2206.01299 (AQ-SGD), sections 3 and 4.1; stochastic rounding as Theorem 3.1 assumes.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from pipecomp.errors import NonFiniteError
from pipecomp.kernels import bitpack, layout, rng
from pipecomp.kernels.division import divisor
from pipecomp.kernels.layout import Options

RMS_FIXED_POINT = 2.0**30


@cache
def code_values(bits: int, rounding: str) -> tuple[float, ...]:
    """w_c for every code c, each exactly a float32 value: what a code decodes to in a group of scale 1."""
    count = 1 << bits
    if rounding == "nearest":
        w = torch.tensor([(c + 0.5) / (count / 2) - 1.0 for c in range(count)], dtype=torch.float64)
    else:
        w = torch.tensor([-1.0 + 2.0 * c / (count - 1) for c in range(count)], dtype=torch.float64)
    return tuple(w.to(torch.float32).tolist())


def non_finite(name: str, row: int) -> NonFiniteError:
    """Make the error for a row that holds NaN, Inf or a value above 2**100."""
    return NonFiniteError(f"{name}: NaN, Inf or a value above 2**100 in row {row}")


def round_up_to_bfloat16(scale: Tensor) -> Tensor:
    """Round each (non-negative, finite) float32 value up to the next bfloat16 value, still float32."""
    return ((scale.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)


def finish_scales(most: Tensor, squares: Tensor, count: Tensor | int, options: Options) -> Tensor:
    """Scales from the largest magnitude of each group (float32) and, for rms, `squares` (int64) of `count` values.

    squares: sum of (x / most)**2 in units of 2**-30. It is an integer so that it does not depend on the order of
    summation, and every backend finds the same scale. NaN, Inf and values above 2**100 stay visible; small ones turn 0.
    """
    scale = most
    if options.scale == "rms":
        usable = (most >= layout.SCALE_MIN) & (most <= layout.SCALE_MAX)
        total = squares.to(torch.float64)
        whole = count.to(total.dtype) if isinstance(count, Tensor) else divisor(count, total)
        root = (total / (whole * RMS_FIXED_POINT)).sqrt()
        loaded = (most.to(torch.float64) * layout.RMS_LOADING[options.bits] * root).to(torch.float32)
        scale = torch.where(usable, torch.minimum(most, loaded), most)
    return torch.where(scale < layout.SCALE_MIN, 0.0, scale)


def group_scales(x_RGn: Tensor, options: Options) -> Tensor:
    """Scale of each group, float32 [R, G]."""
    most_RG = x_RGn.abs().amax(-1)
    squares_RG = torch.zeros_like(most_RG, dtype=torch.int64)
    if options.scale == "rms":
        usable = (most_RG >= layout.SCALE_MIN) & (most_RG <= layout.SCALE_MAX)
        t_RGn = x_RGn * torch.reciprocal(torch.where(usable, most_RG, 1.0)).unsqueeze(-1)
        squares_RG = (t_RGn * t_RGn * RMS_FIXED_POINT).round().to(torch.int64).sum(-1)
    return finish_scales(most_RG, squares_RG, x_RGn.shape[-1], options)


def group_codes(x_RGn: Tensor, scale_RG: Tensor, options: Options, r_RGn: Tensor | None) -> Tensor:
    """Code of each value, uint8 [R, G, n]. r_RGn: uniform [0, 1) float32 for stochastic rounding, else None."""
    top = (1 << options.bits) - 1
    zero_RG1 = (scale_RG == 0).unsqueeze(-1)
    inv_RG1 = torch.reciprocal(torch.where(scale_RG == 0, 1.0, scale_RG)).unsqueeze(-1)
    u_RGn = x_RGn * inv_RG1 + 1.0
    steps = u_RGn * float(1 << options.bits - 1) if r_RGn is None else u_RGn * (top / 2) + r_RGn
    return steps.floor().clamp(0, top).masked_fill(zero_RG1, 0).to(torch.uint8)


def run_of(x_RH: Tensor, run: layout.Segment) -> Tensor:
    """Cut the values of a run of groups out of their rows: [R, G, n]."""
    return x_RH[:, run.value_start : run.value_start + run.groups * run.group].reshape(-1, run.groups, run.group)


def quantize_rows(x_RH: Tensor, options: Options, name: str) -> tuple[Tensor, Tensor]:
    """Quantize float32 rows: codes uint8 [R, row_bytes] and scales float32 [R, groups]."""
    rows, H = x_RH.shape
    random_RH = None
    if options.rounding == "stochastic":
        random_RH = rng.uniform(options.seed, 0, rows * H, x_RH.device).reshape(rows, H)
    runs = layout.segments(H, options.bits, options.group_size)
    grouped = [run_of(x_RH, run) for run in runs]
    scales = [group_scales(x_RGn, options) for x_RGn in grouped]
    scale_RG = torch.cat(scales, 1)
    bad_R = ~(scale_RG <= layout.SCALE_MAX).all(-1)
    if bool(bad_R.any()):
        raise non_finite(name, int(bad_R.nonzero()[0]))
    codes = []
    for run, x_RGn, s_RG in zip(runs, grouped, scales, strict=True):
        r_RGn = None if random_RH is None else run_of(random_RH, run)
        packed = bitpack.pack_bits(group_codes(x_RGn, s_RG, options, r_RGn), options.bits)
        codes.append(packed.reshape(rows, run.groups * run.group_bytes))
    return torch.cat(codes, 1), scale_RG


def dequantize_rows(
    codes_Rk: Tensor, scale_RG: Tensor, H: int, bits: int, group_size: int | None, rounding: str
) -> Tensor:
    """Decode rows: scale * w_c, float32 [R, H]."""
    rows = codes_Rk.shape[0]
    table = torch.tensor(code_values(bits, rounding), dtype=torch.float32, device=codes_Rk.device)
    parts = []
    for run in layout.segments(H, bits, group_size):
        packed = codes_Rk[:, run.byte_start : run.byte_start + run.groups * run.group_bytes]
        c_RGn = bitpack.unpack_bits(packed.reshape(rows, run.groups, run.group_bytes), bits, run.group)
        s_RG1 = scale_RG[:, run.group_start : run.group_start + run.groups].unsqueeze(-1)
        # + 0.0 because code 0 times scale 0 is -0.0, and a group of scale 0 decodes to 0.0.
        parts.append((table[c_RGn] * s_RG1 + 0.0).reshape(rows, run.groups * run.group))
    return torch.cat(parts, 1)


def quantize(x: Tensor, options: Options, name: str = "x") -> tuple[Tensor, Tensor]:
    """Q_b(x) of a checked input: codes uint8 [..., row_bytes], scale float32 (see `layout.scale_shape`)."""
    shape = tuple(x.shape)
    codes, scale = quantize_rows(x.reshape(-1, shape[-1]).to(torch.float32), options, name)
    return codes.reshape(*shape[:-1], codes.shape[1]), scale.reshape(layout.scale_shape(shape, options.group_size))


def dequantize(
    codes: Tensor,
    scale: Tensor,
    bits: int,
    shape: tuple[int, ...],
    group_size: int | None,
    rounding: str,
    out: Tensor | None,
    add: bool,
) -> Tensor:
    """Decode checked codes to float32 of `shape`: a new tensor, or into `out`, or (`add`) added to what `out` holds."""
    rows = math.prod(shape[:-1])
    codes_Rk = codes.reshape(rows, codes.shape[-1])
    scale_RG = scale.reshape(rows, layout.groups(shape[-1], group_size))
    deq = dequantize_rows(codes_Rk, scale_RG, shape[-1], bits, group_size, rounding).reshape(shape)
    if out is None:
        return deq
    return out.add_(deq) if add else out.copy_(deq)


def delta_quantize_(a: Tensor, m: Tensor, options: Options, name: str = "a - m") -> tuple[Tensor, Tensor]:
    """Q_b(a - m) of checked inputs; then m += deq, in place. Nothing is changed if it raises NonFiniteError."""
    codes, scale = quantize(a.to(torch.float32) - m, options, name)
    dequantize(codes, scale, options.bits, tuple(m.shape), options.group_size, options.rounding, m, True)
    return codes, scale
