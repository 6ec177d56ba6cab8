"""How long a training is, its learning rates, and the metric that they and the choice of the best model may follow."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import get_scheduler

from pipecomp.errors import require


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long a training is. per_epoch: micro-batches of one replica. updates: optimizer steps in an epoch."""

    per_epoch: int
    accumulation: int
    updates: int
    epochs: int
    max_steps: int

    @classmethod
    def of(cls, args: Any, per_epoch: int) -> Length:
        """Count it as Trainer does."""
        accumulation, max_steps = args.gradient_accumulation_steps, args.max_steps
        updates = -(-per_epoch // accumulation)
        if max_steps > 0:
            epochs = -(-max_steps // updates)
        else:
            epochs = math.ceil(args.num_train_epochs)
            max_steps = math.ceil(args.num_train_epochs * updates)
        return cls(per_epoch=per_epoch, accumulation=accumulation, updates=updates, epochs=epochs, max_steps=max_steps)

    def micro_batches(self, update: int) -> int:
        """Count the micro-batches of optimizer step `update` of an epoch: the last one takes what is left."""
        return min(self.accumulation, self.per_epoch - update * self.accumulation)

    def differs(self, step: int, epoch: float) -> bool:
        """Say whether a training in which `step` ended at `epoch` had more or fewer steps in an epoch."""
        return abs(epoch - step / self.updates) > 1 / self.updates


def make_scheduler(args: Any, optimizer: Any, make: Callable[[Any], Any] | None, max_steps: int) -> Any:
    """Make the schedule of an optimizer: the user's, or the one that `args` names. make: of the optimizer."""
    if make is not None:
        return make(optimizer)
    return get_scheduler(
        args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.get_warmup_steps(max_steps),
        num_training_steps=max_steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )


def follows_metric(scheduler: Any) -> bool:
    """Whether the schedule steps after evaluations, by a metric."""
    return isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) or type(scheduler).__name__ == "GreedyLR"


def learning_rate(scheduler: Any, optimizer: Any) -> float:
    """Tell the rate of the step that was just made; ask before the schedule steps."""
    if follows_metric(scheduler):
        return float(optimizer.param_groups[0]["lr"])
    return float(scheduler.get_last_lr()[0])


def metric(args: Any, metrics: dict[str, float]) -> float:
    """Look up the value of `args.metric_for_best_model`. Raises ConfigError if an evaluation does not have it."""
    name = str(args.metric_for_best_model)
    key = name if name.startswith("eval_") else f"eval_{name}"
    require(key in metrics, "metric_for_best_model", name, f"one of {', '.join(sorted(metrics))}")
    return metrics[key]


def note_best(args: Any, state: Any, metrics: dict[str, float]) -> bool:
    """Whether this is the best evaluation so far, which `state` then says."""
    if args.metric_for_best_model is None:
        return False
    value = metric(args, metrics)
    worst, better = (-math.inf, np.greater) if args.greater_is_better else (math.inf, np.less)
    if not better(value, worst if state.best_metric is None else state.best_metric):
        return False
    state.best_metric = value
    if args.save_strategy != "no":
        state.best_global_step = state.global_step
    return True
