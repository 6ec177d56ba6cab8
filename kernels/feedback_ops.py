"""The operations of error-feedback methods: arguments are checked here, then a backend runs them.

d: number of values of a flat bucket, cut into groups of `group_size`, the last of which may be short; every group has
a scale (float32) and codes of its own, as in `ops.quantize` with nearest rounding. All backends give the same bytes.
Errors as in `ops`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipecomp.errors import ConfigError, NonFiniteError, ShapeError
from pipecomp.kernels import dispatch, layout
from pipecomp.kernels.gradient_ops import check_target

__all__ = ["dequantize_mean", "feedback_quantize_", "feedback_scales"]

SCALES = ("max", "mean")


@torch.no_grad()
def feedback_scales(x: Tensor, e: Tensor, *, group_size: int, scale: str = "max", backend: str = "auto") -> Tensor:
    """Scales with which `feedback_quantize_` takes x + e: float32 [groups(d, group_size)].

    x: float32, float16 or bfloat16 [d]; e: float32 [d], contiguous; neither is modified. scale: "max" (the largest
    magnitude) or "mean" (twice the mean magnitude: one-bit codes then decode to plus or minus the mean).
    A group with NaN, Inf or a sum above 2**100 has the scale inf; one whose scale is below 2**-100 counts as zeros.
    """
    if scale not in SCALES:
        raise ConfigError("scale", scale, " or ".join(SCALES))
    check_memory(x, e, group_size)
    found: Tensor = dispatch.pick(backend, x, e).feedback_scales(x, e, group_size, scale == "mean")
    return found


@torch.no_grad()
def feedback_quantize_(
    x: Tensor, e: Tensor, scale: Tensor, bits: int, *, group_size: int, backend: str = "auto"
) -> Tensor:
    """Q_b(x + e) with the scales of `feedback_scales`; e becomes (x + e) - deq, in place.

    Returns codes uint8 [row_bytes(d, bits, group_size)], for `ops.dequantize`. NonFiniteError, and e as it was, unless
    all scales are finite.
    Source: arXiv:1905.05957 (DoubleSqueeze), Algorithm 1.
    """
    layout.check_bits(bits)
    check_memory(x, e, group_size)
    want = (layout.groups(e.numel(), group_size),)
    if scale.dtype != torch.float32 or tuple(scale.shape) != want:
        raise ShapeError(f"scale: {scale.dtype} {tuple(scale.shape)}, allowed: torch.float32 {want}")
    if not bool(scale.isfinite().all()):
        raise NonFiniteError("x + e: NaN, Inf or a value above 2**100")
    codes: Tensor = dispatch.pick(backend, x, e, scale).feedback_quantize_(x, e, scale, bits, group_size)
    return codes


@torch.no_grad()
def dequantize_mean(
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    bits: int,
    d: int,
    *,
    group_size: int,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """The mean of several workers' values: decoded, added one by one, divided; float32 [d], new or in `out`."""
    layout.check_bits(bits)
    check_group_size(group_size)
    if not codes or len(codes) != len(scales):
        raise ConfigError("codes", f"{len(codes)} codes, {len(scales)} scales", "at least one, and as many scales")
    for packed, scale in zip(codes, scales, strict=True):
        layout.check_codes(packed, scale, bits, (d,), group_size)
    target, _ = check_target(out, None, codes[0], d)
    chosen = dispatch.pick(backend, target, *codes, *scales)
    mean: Tensor = chosen.dequantize_mean(list(codes), list(scales), bits, group_size, target)
    return mean


def check_group_size(group_size: int) -> None:
    """Raise ConfigError unless group_size is a positive int."""
    layout.check_group_size(group_size)
    if group_size is None:
        raise ConfigError("group_size", group_size, "an integer of at least 1")


def check_memory(x: Tensor, e: Tensor, group_size: int) -> None:
    """Raise unless x is a float tensor [d], d at least 1, and e contiguous float32 of the same shape."""
    check_group_size(group_size)
    layout.check_input(x, "x")
    if x.dim() != 1:
        raise ShapeError(f"x: shape {tuple(x.shape)}, allowed: [d]")
    if e.dtype != torch.float32 or e.shape != x.shape or not e.is_contiguous():
        raise ShapeError(f"e: {e.dtype} {tuple(e.shape)}, allowed: contiguous torch.float32 {tuple(x.shape)}")
