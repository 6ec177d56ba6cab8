"""The operations of CASQ's sketches: arguments are checked here, then a backend runs them.

d: number of values of a flat bucket; K: clusters, 2**bits. All ranks use the same centers, counts and seed. All
backends give the same bytes, but for the means on a GPU, where values are added in whatever order. Errors as in `ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipecomp.errors import ConfigError, ShapeError
from pipecomp.kernels import dispatch, layout
from pipecomp.kernels.gradient_ops import check_bytes, check_centers
from pipecomp.kernels.sketch import Sketch


@torch.no_grad()
def sketch_encode_(
    x: Tensor, e: Tensor, centers: Tensor, how: Sketch, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Sketch values: the number of each one's cluster, and the means of hash buckets inside clusters; e ← x - decoded.

    x, e: contiguous float32 [d], finite. centers: as for `kmeans_assign`, 2**bits of them. how: the same on
    all ranks. Returns the clusters' numbers, packed (uint8 [ceil(d * bits / 8)]), and the
    means (float32 [K + Σ counts]): centers first, then buckets.
    Source: docs/algorithms.md, 2.5.
    """
    d = x.numel()
    layout.check_float32(x, (d,), "x", contiguous=True)
    layout.check_float32(e, (d,), "e", contiguous=True)
    bounds = check_centers(centers)
    _check(how, d)
    if centers.numel() != how.counts.numel():
        raise ShapeError(f"centers: {centers.numel()}, allowed: {how.counts.numel()} at {how.bits} bits")
    device = x.device
    chosen = dispatch.pick(backend, x, e)
    return chosen.sketch_encode(x, e, centers.to(device), bounds.to(device), how)


@torch.no_grad()
def sketch_decode(
    codes: Tensor,
    means: Tensor,
    how: Sketch,
    out: Tensor,
    *,
    add: bool = False,
    divisor: int = 1,
    backend: str = "auto",
) -> Tensor:
    """Decode what `sketch_encode_` returned: out = (out + values) / divisor, without `add` values / divisor.

    out: contiguous float32 [d]; returned. Errors for codes that do not belong to d values, and means that do not to
    `how.counts`; a cluster's number is always below 2**bits.
    """
    layout.check_float32(out, (out.numel(),), "out", contiguous=True)
    _check(how, out.numel())
    check_bytes(codes, out.numel(), how.bits)
    layout.check_float32(means, (how.counts.numel() + int(how.counts.sum()),), "means")
    return dispatch.pick(backend, out, codes, means).sketch_decode(codes, means, how, out, add, divisor)


def _check(how: Sketch, d: int) -> None:
    counts, bits = how.counts, how.bits
    layout.check_bits(bits)
    if counts.dtype != torch.int64 or tuple(counts.shape) != (1 << bits,) or counts.device.type != "cpu":
        raise ShapeError(f"counts: {counts.dtype} {tuple(counts.shape)}, allowed: torch.int64 [{1 << bits}] on the CPU")
    if bool((counts < 0).any()) or int(counts.sum()) >= 1 << 31 or d >= 1 << 32:
        raise ConfigError("counts", counts.tolist(), "at least 0, together below 2**31, of fewer than 2**32 values")
