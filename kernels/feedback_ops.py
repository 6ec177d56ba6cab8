"""The operations of error-feedback methods: arguments are checked here, then a backend runs them.

d: number of values of a flat bucket, cut into groups of `group_size`, the last of which may be short; every group has
a scale (float32) and codes of its own, as in `ops.quantize` with nearest rounding. All backends give the same bytes.
Errors as in `ops`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipecomp.errors import ConfigError, ShapeError
from pipecomp.kernels import dispatch, layout

__all__ = ["feedback_quantize_", "feedback_reduce_"]

SCALES = ("max", "mean")


@torch.no_grad()
def feedback_quantize_(
    x: Tensor, e: Tensor, bits: int, *, group_size: int, scale: str = "max", backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Q_b(x + e): codes and scales for `ops.dequantize`; e becomes (x + e) - deq, in place.

    x: float32, float16 or bfloat16 [d]; e: float32 [d], contiguous. scale: "max" (the largest magnitude) or "mean"
    (twice the mean magnitude: one-bit codes then decode to plus or minus the mean), rounded up to a bfloat16 number.
    Returns codes uint8 [row_bytes(d, bits, group_size)] and scales float32 [groups(d, group_size)]. A group with NaN,
    Inf or a sum above 2**100 keeps its memory and has the scale NaN; one whose scale is below 2**-100 counts as zeros.
    Source: arXiv:1905.05957 (DoubleSqueeze), Algorithm 1.
    """
    layout.check_bits(bits)
    check_kind(scale)
    check_memory(x, e, group_size)
    chosen = dispatch.pick(backend, x, e)
    return chosen.feedback_quantize_(x, e, bits, group_size, scale == "mean")


@torch.no_grad()
def feedback_reduce_(
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    bits: int,
    e: Tensor,
    *,
    group_size: int,
    scale: str = "max",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Q_b(y + e) of the mean y of several workers' codes, decoded, added one by one, divided; e becomes (y + e) - deq.

    codes, scales: of `feedback_quantize_`, from each worker; e: float32 [d], contiguous. Returns what that returns.
    Source: arXiv:1905.05957 (DoubleSqueeze), Algorithm 1, the server's part.
    """
    layout.check_bits(bits)
    check_kind(scale)
    check_memory(e, e, group_size)
    if not codes or len(codes) != len(scales):
        raise ConfigError("codes", f"{len(codes)} codes, {len(scales)} scales", "at least one, and as many scales")
    for packed, scale_G in zip(codes, scales, strict=True):
        layout.check_codes(packed, scale_G, bits, tuple(e.shape), group_size)
    chosen = dispatch.pick(backend, e, *codes, *scales)
    return chosen.feedback_reduce_(list(codes), list(scales), bits, e, group_size, scale == "mean")


def check_kind(scale: str) -> None:
    """Raise ConfigError unless it is one of SCALES."""
    if scale not in SCALES:
        raise ConfigError("scale", scale, " or ".join(SCALES))


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
