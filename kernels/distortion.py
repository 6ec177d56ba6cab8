"""How far a quantized tensor is from what was quantized, for every number of bits one asks about; in plain torch.

Sums are made by halves, so that the order of the additions is the same in every backend, and so are the results.
R: rows, H: values in a row, G: groups in a run of equal groups, n: values in a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipecomp.kernels import layout, reference
from pipecomp.kernels.layout import Options
from pipecomp.kernels.ragged import Visit

FIRST_LOOK = 4  # bits with which measuring begins; from there the error halves with every bit


def halved_sum(y: Tensor) -> Tensor:
    """Sum over the last dimension: the second half is added to the first, an odd last value to the first of all."""
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


def distortion(visits: Sequence[Visit], bits: Sequence[int]) -> Tensor:
    """Squared norms of every row of x, then, for each number of bits, of what quantizing the row leaves out.

    Where a sample has `delta` its change x - m is quantized. Stochastic rounding counts with its expectation. Returns
    float64 [1 + len(bits), R] with the rows of all samples; NaN where a row cannot be quantized.
    """
    return torch.cat([_of_visit(v, bits) for v in visits], 1)


def fit(visits: Sequence[Visit], error: float, low: int, high: int, payload: Tensor | None) -> int:
    """Find the fewest bits that keep an error without measuring one number after the other, if that can be.

    payload: None, or uint8 [bytes], room for all samples at `high` bits. It then begins with what `encode_batch` makes
    of them with the bits found, and every m has changed. Returns 0 where nothing is found: what `distortion` says then
    has to decide, and no m has changed.
    """
    return 0


def encode_fewest(
    visits: Sequence[Visit], error: float, low: int, high: int, payload: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Encode with the fewest bits, which the device knows and the host does not, if that can be.

    payload: as of `fit`. Returns the bits, int64 [1] on the samples' device, and the flag of `encode_batch`; None where
    it cannot be, or need not be, because the host is the device: then nothing is changed.
    """
    return None


def _of_visit(visit: Visit, bits: Sequence[int]) -> Tensor:
    assert visit.options is not None
    x_RH = visit.x.float()
    v_RH = x_RH - visit.m if visit.delta and visit.m is not None else x_RH
    power_R = halved_sum(x_RH * x_RH).double()
    return torch.stack([power_R, *_left_out(v_RH, visit.options, bits)])


def _left_out(v_RH: Tensor, options: Options, bits: Sequence[int]) -> list[Tensor]:
    """For each number of bits the squared norm of what quantizing each row leaves out, float64 [R]."""
    parts: list[list[Tensor]] = [[] for _ in bits]
    for run in layout.segments(v_RH.shape[1], layout.MAX_PACK_BITS, options.group_size):
        v_RGn = reference.run_of(v_RH, run)
        for i, b in enumerate(bits):
            o = options._replace(bits=b)
            if i == 0 or o.scale == "rms":  # a max scale is the same for all bits
                scale_RG = reference.group_scales(v_RGn, o)
                zero_RG = scale_RG == 0
                inverse_RG1 = torch.reciprocal(torch.where(zero_RG, 1.0, scale_RG)).unsqueeze(-1)
                u_RGn = (v_RGn * inverse_RG1).add_(1.0)
            step_RG = scale_RG.double() * step(o)
            squares_RG = halved_sum(_squared_steps(u_RGn, o)).double() * (step_RG * step_RG)
            squares_RG = torch.where(zero_RG, 0.0, squares_RG)
            parts[i].append(torch.where(scale_RG <= layout.SCALE_MAX, squares_RG, torch.nan))
    return [halved_sum(torch.cat(each, 1)) for each in parts]


def step(options: Options) -> float:
    """Distance of neighboring values that a group of scale 1 decodes to."""
    return 2.0 / ((1 << options.bits) - (options.rounding == "stochastic"))


def _squared_steps(u_RGn: Tensor, options: Options) -> Tensor:
    """Squared error of each value, in steps, float32. u: the value over its scale, plus 1."""
    top = float((1 << options.bits) - 1)
    if options.rounding == "stochastic":
        steps = u_RGn * (top / 2)
        above = steps - steps.trunc()
        return above * (1.0 - above)
    steps = u_RGn * float(1 << options.bits - 1)
    off = steps.floor().clamp_(0.0, top).sub_(steps).add_(0.5)
    return off.mul_(off)
