"""Buckets of gradients to measure on: parameters of given shapes, with values like those of training.

d: values in a bucket, T: samples of which a gradient is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Shapes = tuple[tuple[int, ...], ...]
SAMPLES = 64  # T


def shapes_of(size: int | Sequence[Sequence[int]]) -> Shapes:
    """Give a bucket's parameters: of a number of values one matrix, as square as can be; shapes as they are."""
    if not isinstance(size, int):
        return tuple(map(tuple, size))
    rows = next((r for r in range(math.isqrt(max(size, 0)), 0, -1) if size % r == 0), 1)
    return ((rows, size // rows),)


def values_in(shapes: Shapes) -> int:
    """Count d."""
    return sum(map(math.prod, shapes))


class Bucket:
    """Gradients of parameters in one flat buffer, as DDP gives them to hooks."""

    def __init__(self, shapes: Shapes) -> None:
        self._flat = torch.zeros(values_in(shapes))
        parts = self._flat.split([math.prod(shape) for shape in shapes])
        self._gradients = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def index(self) -> int:
        """Give its number in the backward pass."""
        return 0

    def buffer(self) -> Tensor:
        """Give all values, flat."""
        return self._flat

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace all values."""
        self._flat.copy_(buffer)

    def gradients(self) -> list[Tensor]:
        """Give views of the buffer, in the parameters' shapes."""
        return self._gradients

    def parameters(self) -> list[Tensor]:
        """Give the same as `gradients`: there are no others."""
        return self._gradients

    def is_last(self) -> bool:
        """Say that a step has this bucket only."""
        return True


def gradient(shapes: Shapes, rank: int, turn: int) -> Tensor:
    """Make a rank's gradients in one round, float32 [d], of linear layers over T samples.

    A layer's is the sum over samples of the outer products of output gradients and inputs. Both have features of
    unequal size, and a mean that ranks and rounds share. A vector's values are normal.
    """
    fixed = torch.Generator().manual_seed(0)
    own = torch.Generator().manual_seed(1 + rank + 1000 * turn)
    parts = []
    for shape in shapes:
        if len(shape) == 1:
            parts.append(torch.randn(shape, generator=own) / SAMPLES)
            continue
        sides = []
        for width in (shape[0], math.prod(shape[1:])):
            scale, mean = torch.randn(width, generator=fixed).exp(), torch.randn(width, generator=fixed)
            sides.append(scale * (0.5 * mean + torch.randn(SAMPLES, width, generator=own)))
        parts.append((sides[0].T @ sides[1]).reshape(-1) / SAMPLES)
    return torch.cat(parts)
