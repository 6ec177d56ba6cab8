"""CASQ's sketches, in plain torch: each value as its cluster's number, each cluster's values as means of hash buckets.

d: values of a flat bucket; K: clusters. There is a slot for each cluster's center, then one for each cluster's buckets;
a value is in its cluster's bucket that a hash of its place chooses, or in the center's slot where there is none.
Source: docs/algorithms.md, 2.5.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pipecomp.kernels import bitpack, dithering, division, rng

Assign = Callable[[Tensor, Tensor], Tensor]
Pack = Callable[[Tensor, int], Tensor]
Unpack = Callable[[Tensor, int, int], Tensor]


class Sketch(NamedTuple):
    """What all ranks make sketches with: each cluster's number of buckets, int64 [K] on the CPU; bits of K; a seed."""

    counts: Tensor
    bits: int
    seed: int


_kept = functools.lru_cache(maxsize=2)(rng.uniform)  # of all places: what takes longest here, on a CPU


def _hash(seed: int, count: int, device: torch.device) -> Tensor:
    """Uniform [0, 1) for each place; a GPU's are made anew, as other streams would use them before they are there."""
    return _kept(seed, 0, count) if device.type == "cpu" else rng.uniform(seed, 0, count, device)


def first_slots(counts: Tensor) -> Tensor:
    """The first slot of each cluster's values: int64 [K], from its number of buckets, int64 [K]."""
    number = torch.arange(counts.numel(), device=counts.device)
    return torch.where(counts > 0, counts.numel() + counts.cumsum(0) - counts, number)


def slots(cluster_d: Tensor, how: Sketch) -> Tensor:
    """Where each value's mean is: int64 [d]."""
    index, counts = cluster_d.to(torch.int32), how.counts.to(cluster_d.device)
    size = counts.to(torch.float32).index_select(0, index)
    # Below 2**24 buckets the product is below the size, whatever it is rounded to.
    inside = (size * _hash(how.seed, index.numel(), index.device)).to(torch.int32)
    last = (counts - 1).clamp(min=0).int().index_select(0, index)
    return torch.minimum(inside, last).add_(first_slots(counts).int().index_select(0, index)).long()


def sketch_encode(
    x_d: Tensor,
    e_d: Tensor,
    centers: Tensor,
    bounds: Tensor,
    how: Sketch,
    assign: Assign = dithering.kmeans_assign,
    pack: Pack = bitpack.pack_bits,
) -> tuple[Tensor, Tensor]:
    """Clusters' numbers, packed, and the mean of each slot, float32 [K + Σ counts]; e becomes x less its means.

    A slot without values has 0, and nothing asks for it; the centers have their own.
    """
    cluster_d = assign(x_d, bounds)
    where, total = slots(cluster_d, how), int(how.counts.sum()) + how.counts.numel()
    sums = torch.bincount(where, weights=x_d.double(), minlength=total)
    means = (sums / torch.bincount(where, minlength=total).clamp(min=1)).to(torch.float32)
    means[: centers.numel()] = centers
    torch.sub(x_d, means[where], out=e_d)
    return pack(cluster_d, how.bits), means


def sketch_decode(
    codes: Tensor,
    means: Tensor,
    how: Sketch,
    out_d: Tensor,
    add: bool,
    divisor: int,
    unpack: Unpack = bitpack.unpack_bits,
) -> Tensor:
    """out = (out + each value's mean) / divisor, without `add` from 0."""
    if not add:
        out_d.zero_()
    out_d += means[slots(unpack(codes, how.bits, out_d.numel()), how)]
    return out_d.div_(division.divisor(divisor, out_d))
