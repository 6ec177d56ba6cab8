"""A randomized Walsh–Hadamard rotation of rows, so that a few large values do not set the scale for all others.

A row of H values is cut into tiles of 1024, 256, 64, 16, 4 and 1 values, the largest first (powers of 4: their square
roots are powers of two, so scaling rounds nothing). Each tile's values get signs from a fixed seed and go through the
transform; rotating back undoes it up to rounding. Every operation is one float32 addition, so both ends of a link and
all devices get the same bits.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from pipecomp.codecs.codecs import Quantized
from pipecomp.kernels.reference.reproducible import random_bits

_SEED = 0x5EED
_LARGEST = 1024


def tiles(hidden: int) -> list[int]:
    """Lengths of the tiles of a row."""
    out, length = [], _LARGEST
    while hidden:
        out += [length] * (hidden // length)
        hidden %= length
        length //= 4
    return out


@functools.lru_cache(maxsize=16)
def _signs(hidden: int, device: torch.device) -> Tensor:
    return 1.0 - 2.0 * (random_bits(_SEED, 0, hidden, device) & 1).to(torch.float32)


def _transform(x_TH: Tensor) -> Tensor:
    """Apply the orthonormal Walsh–Hadamard transform to each tile; it is its own inverse."""
    start, out = 0, torch.empty_like(x_TH)
    T, lengths = x_TH.shape[0], tiles(x_TH.shape[1])
    for length in sorted(set(lengths), reverse=True):
        count = lengths.count(length)
        width = length * count
        part = x_TH[:, start : start + width].reshape(T, count, length)
        step = 1
        while step < length:
            pairs = part.reshape(T, count, length // (2 * step), 2, step)
            a, b = pairs[..., 0, :], pairs[..., 1, :]
            part = torch.stack([a + b, a - b], dim=-2)
            step *= 2
        out[:, start : start + width] = part.reshape(T, width) * length**-0.5
        start += width
    return out


def rotate(x_TH: Tensor) -> Tensor:
    """Rows of any float dtype to rotated rows, float32 [T, H]."""
    return _transform(x_TH.to(torch.float32) * _signs(x_TH.shape[1], x_TH.device))


def rotate_back(y_TH: Tensor) -> Tensor:
    """Undo `rotate`, up to rounding: float32 [T, H]."""
    return _transform(y_TH) * _signs(y_TH.shape[1], y_TH.device)


class Rotated(Quantized):
    """Q_b of the rotated rows, rotated back when decoded. For values themselves, not for changes of them."""

    def before(self, x_TH: Tensor) -> Tensor:
        """See Quantized."""
        return rotate(x_TH.detach())

    def after(self, y_TH: Tensor) -> Tensor:
        """See Quantized."""
        return rotate_back(y_TH)
