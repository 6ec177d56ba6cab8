"""The largest magnitudes of each group and a short form of their positions, in plain torch.

R: rows, H: values in a row, n: values in a group, K: values kept in a row (all groups together). Groups are cut as in
`layout`. A group of n values keeps k = max(1, floor(fraction * n + 1/2)).
Source: arXiv:2206.01299 (AQ-SGD), appendix H.6 ("bw8[0.2]").
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pipecomp.errors import ConfigError, ShapeError
from pipecomp.kernels import bitpack, layout, reference


def kept(n: int, fraction: float) -> int:
    """Count how many of a group's n values are kept; ConfigError unless 0 < fraction <= 1."""
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
        raise ConfigError("fraction", fraction, "a number above 0, at most 1")
    return max(1, math.floor(fraction * n + 0.5))


def top_k_kept(H: int, fraction: float, group_size: int | None = None) -> int:
    """Count the values of a row of H that `top_k_select` keeps, over all its groups: K."""
    layout.check_group_size(group_size)
    return sum(s.groups * kept(s.group, fraction) for s in layout.segments(H, 1, group_size))


def top_k_group_size(H: int, fraction: float, group_size: int | None = None) -> int | None:
    """Give the `group_size` for quantizing kept values, so that what was one group stays one group."""
    layout.check_group_size(group_size)
    return None if group_size is None else kept(min(group_size, H), fraction)


def select(x: Tensor, fraction: float, group_size: int | None) -> tuple[Tensor, Tensor]:
    """Values float32 [..., K] and their positions in the row, int32 [..., K] ascending, of a checked input.

    Magnitudes are compared as bit patterns, so NaN counts as larger than Inf; of equal ones those with the lowest
    index are kept.
    """
    H = x.shape[-1]
    x_RH = x.reshape(-1, H).to(torch.float32).contiguous()
    order_RH = x_RH.view(torch.int32) & 0x7FFFFFFF
    parts = []
    for run in layout.segments(H, 1, group_size):
        order = reference.run_of(order_RH, run)
        first = order.sort(dim=-1, descending=True, stable=True).indices[..., : kept(run.group, fraction)]
        start = torch.arange(run.groups, device=x.device) * run.group + run.value_start
        parts.append((first.sort(dim=-1).values + start.unsqueeze(-1)).flatten(1))
    index_RK = torch.cat(parts, 1)
    shape = (*x.shape[:-1], index_RK.shape[1])
    return x_RH.gather(1, index_RK).reshape(shape), index_RK.to(torch.int32).reshape(shape)


@torch.no_grad()
def top_k_scatter(values: Tensor, index: Tensor, H: int) -> Tensor:
    """Make rows of H zeros with `values` (float32 [..., K]) at positions `index` (int32 [..., K]): float32 [..., H]."""
    if values.shape != index.shape or values.dim() == 0:
        raise ShapeError(f"index: {tuple(index.shape)}, allowed: {tuple(values.shape)} as values")
    K = values.shape[-1]
    dense_RH = torch.zeros((values.numel() // max(K, 1), H), dtype=torch.float32, device=values.device)
    dense_RH.scatter_(1, index.reshape(-1, K).to(torch.int64), values.reshape(-1, K))
    return dense_RH.reshape(*values.shape[:-1], H)


def index_bits(H: int) -> int:
    """Bits of a packed position in a row of H values."""
    return max(1, (H - 1).bit_length())


def position_bytes(H: int, K: int) -> tuple[str, int]:
    """Choose the shorter form of K positions in a row of H values: ("bitmap" or "indices", its bytes a row)."""
    bitmap = (H + 7) // 8
    indices = (K * index_bits(H) + 7) // 8
    return ("bitmap", bitmap) if bitmap <= indices else ("indices", indices)


def pack_positions(index: Tensor, H: int, pack: Callable[[Tensor, int], Tensor] = bitpack.pack_bits) -> Tensor:
    """Positions (int32 [..., K], ascending in a row) in their shorter form: uint8 [..., position_bytes(H, K)[1]]."""
    form, _ = position_bytes(H, index.shape[-1])
    if form == "indices":
        return pack(index, index_bits(H))
    index_RK = index.reshape(-1, index.shape[-1]).to(torch.int64)
    flags_RH = torch.zeros((index_RK.shape[0], H), dtype=torch.uint8, device=index.device)
    flags_RH.scatter_(1, index_RK, 1)
    packed_RB = pack(flags_RH, 1)
    return packed_RB.reshape(*index.shape[:-1], packed_RB.shape[-1])


def unpack_positions(
    packed: Tensor, H: int, K: int, unpack: Callable[[Tensor, int, int], Tensor] = bitpack.unpack_bits
) -> Tensor:
    """Undo `pack_positions`: int32 [..., K]. ShapeError if the bytes are not K positions below H a row."""
    form, size_bytes = position_bytes(H, K)
    if packed.dtype != torch.uint8 or packed.dim() == 0 or packed.shape[-1] != size_bytes:
        raise ShapeError(f"positions: {packed.dtype} {tuple(packed.shape)}, allowed: torch.uint8 [..., {size_bytes}]")
    if form == "indices":
        index = unpack(packed, index_bits(H), K)
        if index.numel() and int(index.max()) >= H:
            raise ShapeError(f"positions: index {int(index.max())}, allowed: below {H}")
        return index
    flags_RH = unpack(packed, 1, H).reshape(-1, H)
    if not bool((flags_RH.sum(-1) == K).all()):
        raise ShapeError(f"positions: a bitmap that does not hold {K} positions in each row")
    return flags_RH.nonzero()[:, 1].to(torch.int32).reshape(*packed.shape[:-1], K)
