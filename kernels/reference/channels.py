"""Scales of channels (docs/algorithms.md, 1.2): a scale for each value of a row, common to rows that are sent together.

A channel's scale is the root mean square of its values, relative to those of other channels. Rows are divided by the
channels' scales and quantized; decoded rows are multiplied by them. Scales travel as a block of bytes: a code k for
each channel, whose scale is 2**((k + 1) / 16); the largest scale has k = 255.

Sums are float64 in a fixed order, so that every backend finds the same codes.

R: rows, H: values in a row, one for each channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipecomp.kernels.reference.reproducible import divisor, halved_sum

if TYPE_CHECKING:
    from pipecomp.kernels.reference.batches import DecodeItem, EncodeItem

SENT, CACHED = KINDS = "channels", "cached_channels"  # of the values that are sent, or of the m that both ends hold
SAMPLED_ROWS = 512  # most rows that scales are computed from; of more rows, every k-th, k odd
PARTS = 8  # of these rows: each is added row by row, then the parts by halves
FLOORS = {SENT: 2.0**-16, CACHED: 2.0**-12}  # least mean square of a channel, over the mean of all channels
_ROOTS = (  # 2**(-i / 16), rounded to float64
    *("0x1.0000000000000p+0", "0x1.ea4afa2a490dap-1", "0x1.d5818dcfba487p-1", "0x1.c199bdd85529cp-1"),
    *("0x1.ae89f995ad3adp-1", "0x1.9c49182a3f090p-1", "0x1.8ace5422aa0dbp-1", "0x1.7a11473eb0187p-1"),
    *("0x1.6a09e667f3bcdp-1", "0x1.5ab07dd485429p-1", "0x1.4bfdad5362a27p-1", "0x1.3dea64c123422p-1"),
    *("0x1.306fe0a31b715p-1", "0x1.2387a6e756238p-1", "0x1.172b83c7d517bp-1", "0x1.0b5586cf9890fp-1"),
)


def block_bytes(H: int) -> int:
    """Count the bytes of a block."""
    return H


def sampled_stride(rows: int) -> int:
    """Return k if the scales of so many rows come from every k-th."""
    return 1 if rows <= SAMPLED_ROWS else -(-rows // SAMPLED_ROWS) | 1


def channel_groups(items: Sequence[EncodeItem | DecodeItem]) -> dict[bool, list[int]]:
    """List the samples that share scales of channels: changes (True) first, then values themselves (False)."""
    changes, others = list[int](), list[int]()
    for i, item in enumerate(items):
        if item.options is not None and item.options.scale in KINDS and item[0].numel():
            (changes if item.delta else others).append(i)
    return {delta: members for delta, members in ((True, changes), (False, others)) if members}


def is_sent(scale: str, delta: bool) -> bool:
    """Return True if a block of scales is sent: of values themselves no end has an m to compute them from."""
    return scale == SENT or (scale == CACHED and not delta)


def sum_squares(rows_H: Sequence[Tensor]) -> Tensor:
    """Sum the squares of each channel over every k-th row of all tensors: float64 [H].

    rows_H: float32 [n, H] each, with R rows in all, R at least 1.
    """
    v_RH = torch.cat(list(rows_H)) if len(rows_H) > 1 else rows_H[0]
    v_RH = v_RH[:: sampled_stride(len(v_RH))].double()
    part = -(-len(v_RH) // PARTS)
    v_RH = torch.nn.functional.pad(v_RH * v_RH, (0, 0, 0, PARTS * part - len(v_RH)))
    parts_PRH = v_RH.view(PARTS, part, -1)
    sums_PH = parts_PRH[:, 0].clone()
    for i in range(1, part):
        sums_PH += parts_PRH[:, i]
    return halved_sum(sums_PH.T)


def encode_block(sums_H: Tensor, scale: str) -> Tensor:
    """Make the block of channels with these sums of squares, float64 [H]: uint8 [H]. Each operation is rounded.

    All scales are equal if a sum is not finite, so that every backend measures the same errors of other rows.
    """
    least = halved_sum(sums_H) / divisor(len(sums_H), sums_H) * FLOORS[scale]
    sums_H = torch.maximum(sums_H, least)
    most = sums_H.amax()
    ratio_H = torch.where((most > 0) & most.isfinite(), sums_H / most, 1.0)
    return torch.bucketize(ratio_H, _tables(sums_H.device)[0], right=True).to(torch.uint8)


def decode_block(block: Tensor) -> Tensor:
    """Compute the scales of a block, uint8 [H]: float32 [H], above 1, at most 2**16."""
    return _tables(block.device)[1][block.to(torch.int64)]


def root(sixteenths: int) -> float:
    """Return 2**(-sixteenths / 16), rounded to float64."""
    return float.fromhex(_ROOTS[sixteenths % 16]) * 2.0 ** -(sixteenths // 16)


@cache
def tables() -> tuple[Tensor, Tensor]:
    """Return the least squares of codes 1 to 255, over the largest, float64 [255]; the codes' scales, float32 [256].

    A square belongs to the code with the nearest logarithm.
    """
    least = torch.tensor([root(2 * (255 - k) + 1) for k in range(1, 256)], dtype=torch.float64)
    return least, torch.tensor([root(255 - k) * 2.0**16 for k in range(256)], dtype=torch.float32)


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    least, scales = tables()
    return least.to(device), scales.to(device)
