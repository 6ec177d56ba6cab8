"""Training of a model in one process, for recipes and benchmarks that need a pre-trained model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def pretrain(
    model: Any,
    rows: list[list[int]],
    *,
    epochs: int,
    batch: int,
    lr: float,
    seed: int,
    on_step: Callable[[int, int, float], None] | None = None,
) -> float:
    """Train a model in this process. Returns the mean loss of the last tenth of the steps."""
    data = torch.tensor(rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    steps = epochs * (len(data) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=steps, pct_start=0.1)
    draw = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    model.train()
    for _ in range(epochs):
        order = torch.randperm(len(data), generator=draw)
        for start in range(0, len(data) - batch + 1, batch):
            chosen = data[order[start : start + batch]]
            loss = model(input_ids=chosen, labels=chosen).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
            if on_step is not None:
                on_step(len(losses), steps, losses[-1])
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / len(tail)
