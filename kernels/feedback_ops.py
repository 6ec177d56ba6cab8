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
    _check(x, e, bits, group_size, scale)
    return dispatch.pick(backend, x, e).feedback_quantize_(x, e, bits, group_size, scale == "mean")


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
    _check(e, e, bits, group_size, scale)
    if not codes or len(codes) != len(scales):
        raise ConfigError("codes", f"{len(codes)} codes, {len(scales)} scales", "at least one, and as many scales")
    for packed, scale_G in zip(codes, scales, strict=True):
        layout.check_codes(packed, scale_G, bits, tuple(e.shape), group_size)
    return dispatch.pick(backend, e, *codes, *scales).feedback_reduce_(
        list(codes), list(scales), bits, e, group_size, scale == "mean"
    )


def _check(x: Tensor, e: Tensor, bits: int, group_size: int, scale: str) -> None:
    """Raise unless x is a float tensor [d], d at least 1, e contiguous float32 like it, and the options are allowed."""
    layout.check_bits(bits)
    if scale not in SCALES:
        raise ConfigError("scale", scale, " or ".join(SCALES))
    layout.check_group_size(group_size)
    if group_size is None:
        raise ConfigError("group_size", group_size, "an integer of at least 1")
    layout.check_input(x, "x")
    if x.dim() != 1:
        raise ShapeError(f"x: shape {tuple(x.shape)}, allowed: [d]")
    layout.check_float32(e, tuple(x.shape), "e", contiguous=True)
