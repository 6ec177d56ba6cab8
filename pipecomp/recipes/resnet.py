"""ResNets for small images (arXiv:1512.03385), as an nn.Sequential of a stem, basic blocks and a head.

Shapes: B images, C channels, h rows and w columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pipecomp.errors import require

SIZES = {"resnet34": ((64, 128, 256, 512), (3, 4, 6, 3), 1), "tiny": ((16, 32, 64), (1, 1, 1), 2)}
"""Channels and blocks of each group, and the stem's stride."""
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(8, channels),
}


class BasicBlock(nn.Module):
    """Two 3 × 3 convolutions with a shortcut: [B, inside, h, w] to [B, out, h / stride, w / stride]."""

    def __init__(self, inside: int, out: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inside, out, 3, stride, 1, bias=False), norm(out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), norm(out)
        self.short: nn.Module = nn.Identity()
        if (inside, stride) != (out, 1):
            self.short = nn.Sequential(nn.Conv2d(inside, out, 1, stride, bias=False), norm(out))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block."""
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.short(x))


def resnet(size: str, classes: int, *, norm: str = "batch") -> nn.Sequential:
    """Make a ResNet with random weights: the stem, then one child for each block, then the head.

    Args:
        size: "resnet34" for 32 × 32 images, with a 3 × 3 stem of stride 1; or "tiny": three blocks of 16, 32 and 64
            channels after a stem of stride 2.
        classes: Number of classes.
        norm: "batch", or "group": group norm with 8 groups, independent of other samples.

    Raises:
        ConfigError: If size or norm is unknown.
    """
    require(size in SIZES, "--model", size, ", ".join(SIZES))
    require(norm in NORMS, "--norm", norm, ", ".join(NORMS))
    widths, counts, stride = SIZES[size]
    make = NORMS[norm]
    stem = nn.Sequential(nn.Conv2d(3, widths[0], 3, stride, 1, bias=False), make(widths[0]), nn.ReLU())
    parts: list[nn.Module] = [stem]
    inside = widths[0]
    for group, (width, count) in enumerate(zip(widths, counts, strict=True)):
        for block in range(count):
            parts.append(BasicBlock(inside, width, 2 if group and not block else 1, make))
            inside = width
    parts.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes)))
    return nn.Sequential(*parts)


def client_cuts(model: nn.Sequential) -> list[int]:
    """Return the `cuts` of split learning: after the first block, and before the last (arXiv:2206.01299, H.6)."""
    return [0, 2, len(model) - 2, len(model)]
