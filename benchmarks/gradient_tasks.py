"""The two tasks of `gradients.py`: a model, its batches, its loss, its optimizer and what is measured at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from pipecomp.errors import DataError

BATCH = {"resnet": 64, "gpt2": 16}  # of all workers together
EPOCHS = {"resnet": 5, "gpt2": 3}
RATE = {"resnet": 0.2, "gpt2": 5e-4}


class Block(nn.Module):
    """Two convolutions beside a short cut; batch-independent normalization, so that workers' batches do not matter."""

    def __init__(self, inside: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(8, out) for _ in range(2))
        self.short = nn.Identity() if inside == out else nn.Conv2d(inside, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Images to images."""
        y = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(y)) + self.short(x))


def resnet() -> nn.Module:
    """ResNet-8: 78,000 weights."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False),
        nn.GroupNorm(8, 16),
        nn.ReLU(),
        Block(16, 16, 1),
        Block(16, 32, 2),
        Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


class ResNetTask:
    """ResNet-8 from random weights on 4,000 CIFAR-10 images, tested on 1,000; SGD with momentum, one cycle."""

    def __init__(self, data: Path, cache: Path, seed: int) -> None:
        path = data / "cifar10" / "cifar10_4k_1k.npz"
        try:
            arrays = np.load(path)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}; --data names the folder that has cifar10/") from error
        names = sorted(arrays.files)
        tensors = {name: torch.from_numpy(arrays[name]) for name in names}
        images = {len(v): v for v in tensors.values() if v.ndim == 4}
        labels = {len(v): v.long().flatten() for v in tensors.values() if v.ndim == 1}
        self._x, self._y = _images(images[4000]), labels[4000]
        self._test_x, self._test_y = _images(images[1000]), labels[1000]
        self.model = resnet()
        self.steps_per_epoch = len(self._x) // BATCH["resnet"]
        steps = EPOCHS["resnet"] * self.steps_per_epoch
        self.optimizer = torch.optim.SGD(self.model.parameters(), RATE["resnet"], momentum=0.9, weight_decay=5e-4)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, RATE["resnet"], total_steps=steps + 1)

    def batches(self, seed: int) -> Iterator[Tensor]:
        """Indices of images."""
        yield from _orders(len(self._x), "resnet", seed)

    def loss(self, batch: Tensor) -> Tensor:
        """Cross-entropy."""
        return nn.functional.cross_entropy(self.model(self._x[batch]), self._y[batch])

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """On the test images."""
        logits = torch.cat([self.model(part) for part in self._test_x.split(200)])
        right = (logits.argmax(dim=1) == self._test_y).float().mean()
        return {"eval_loss": float(nn.functional.cross_entropy(logits, self._test_y)), "accuracy": float(right)}


class Gpt2Task:
    """The convergence benchmark's pre-trained GPT-2, fine-tuned on 512 sequences of WikiText-2; AdamW."""

    def __init__(self, data: Path, cache: Path, seed: int) -> None:
        from benchmarks.wikitext import pretrained_model, wikitext_task

        task = wikitext_task(data / "wikitext-2", cache)
        self.model, _ = pretrained_model(task, cache, seed)
        self._x, self._held_out = task.training, task.held_out
        self.steps_per_epoch = len(self._x) // BATCH["gpt2"]
        steps = EPOCHS["gpt2"] * self.steps_per_epoch
        self.optimizer = torch.optim.AdamW(self.model.parameters(), RATE["gpt2"], weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, RATE["gpt2"], total_steps=steps + 1, pct_start=0.1, cycle_momentum=False
        )

    def batches(self, seed: int) -> Iterator[Tensor]:
        """Indices of sequences."""
        yield from _orders(len(self._x), "gpt2", seed)

    def loss(self, batch: Tensor) -> Tensor:
        """Return the mean loss of the next token."""
        loss: Tensor = self.model(input_ids=self._x[batch], labels=self._x[batch]).loss
        return loss

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """On held-out sequences."""
        parts = [self.model(input_ids=part, labels=part).loss for part in self._held_out.split(16)]
        return {"eval_loss": float(sum(parts) / len(parts))}


def _images(pixels: Tensor) -> Tensor:
    """float32 [N, 3, 32, 32] about zero."""
    x = pixels.float() / 255 - 0.5
    return (x if x.shape[1] == 3 else x.permute(0, 3, 1, 2)).contiguous() * 4


def _orders(count: int, task: str, seed: int) -> Iterator[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS[task]):
        order = torch.randperm(count, generator=draw)
        for start in range(0, count - BATCH[task] + 1, BATCH[task]):
            yield order[start : start + BATCH[task]]


TASKS = {"resnet": ResNetTask, "gpt2": Gpt2Task}
