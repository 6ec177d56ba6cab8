"""Batch sizes, the number of steps, and the values of "auto" from DeepSpeed's configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pipecomp.config import Config, read_json_object
from pipecomp.config.checks import batch_sizes, require_objects
from pipecomp.errors import DataError, require

AUTO_WARMUP = 0.1  # share of all steps: the first of ten epochs, as in the paper's published code


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The number and size of a run's steps.

    Attributes:
        steps: Optimizer steps in all.
        per_epoch: Micro-batches of one epoch for each replica.
        micro_batch: Samples of a micro-batch.
        accumulation: Micro-batches of a step.
        replicas: Number of pipeline replicas.
        begin: The steps before this run, and the micro-batches before its first one, counted from the start of
            training; (0, 0) unless the checkpoint is of a run with other epochs.
    """

    steps: int
    per_epoch: int
    micro_batch: int
    accumulation: int
    replicas: int
    begin: tuple[int, int] = (0, 0)

    def epoch(self, step: int) -> int:
        """Count the epoch, from 1, in which step (from 1) starts."""
        before, number = self.begin
        return (number + (step - 1 - before) * self.accumulation) // self.per_epoch + 1

    def ends_epoch(self, step: int) -> bool:
        """Return whether this step is the last one of its epoch or of the run."""
        return step == self.steps or self.epoch(step + 1) != self.epoch(step)


def warmup_decay(steps: int, optimizer: Any) -> Any:
    """Make a schedule: a linear warm-up over a tenth of the steps, then a linear decay. No step has the rate 0."""
    from torch.optim.lr_scheduler import LambdaLR

    warmup = max(1, round(AUTO_WARMUP * steps))

    def factor(step: int) -> float:
        return (step + 1) / warmup if step < warmup else max(0, steps - step) / max(1, steps - warmup)

    return LambdaLR(optimizer, factor)


def read_config(path: str) -> dict[str, Any]:
    """Read DeepSpeed's configuration from a JSON file and check its "pipecomp" section. Raises ConfigError."""
    return check_config(read_json_object("--deepspeed_config", path))


def check_config(config: dict[str, Any]) -> dict[str, Any]:
    """Check the "pipecomp" section of DeepSpeed's configuration, and return the configuration. Raises ConfigError."""
    require_objects(config)
    Config.from_dict(config.get("pipecomp", {}))
    return config


def make_plan(config: dict[str, Any], *, samples: int, replicas: int, epochs: int, max_steps: int | None) -> Plan:
    """Plan epochs over the training data with the configuration's batch sizes.

    Args:
        config: DeepSpeed's configuration with train_micro_batch_size_per_gpu, and gradient_accumulation_steps or
            train_batch_size (without both a step is one micro-batch).
        samples: Number of training samples.
        replicas: Number of pipeline replicas.
        epochs: Number of epochs.
        max_steps: Upper limit of steps, or None.

    Raises:
        ConfigError: If batch sizes are wrong.
        DataError: If the samples do not fill one step.
    """
    micro, accumulation = batch_sizes(config, replicas)
    per_epoch = samples // replicas // micro
    steps = epochs * per_epoch // accumulation
    if steps == 0:
        raise DataError(
            f"{samples} training samples, {epochs} time(s), do not fill one batch of {micro * accumulation * replicas}"
        )
    steps = min(steps, max_steps) if max_steps is not None else steps
    return Plan(steps=steps, per_epoch=per_epoch, micro_batch=micro, accumulation=accumulation, replicas=replicas)


def complete(config: dict[str, Any], plan: Plan, seed: int | None) -> dict[str, Any]:
    """Return a copy of the configuration with the seed set and every "auto" of the scheduler replaced by a number.

    total_num_steps becomes the run's steps, warmup_num_steps a tenth of them, warmup_max_lr the optimizer's rate.

    Args:
        config: DeepSpeed's configuration.
        plan: The run's steps.
        seed: None keeps the configuration's.

    Raises:
        ConfigError: If another parameter is "auto".
    """
    config = json.loads(json.dumps(config))
    if seed is not None:
        config.setdefault("pipecomp", {})["seed"] = seed
    config.setdefault("steps_per_print", 10**9)  # the recipe has its own report
    params = config.get("scheduler", {}).get("params", {})
    auto = {
        "total_num_steps": plan.steps,
        "warmup_num_steps": max(1, round(plan.steps * AUTO_WARMUP)),
        "warmup_max_lr": config.get("optimizer", {}).get("params", {}).get("lr"),
    }
    for key, value in params.items():
        if value == "auto":
            require(
                auto.get(key) is not None,
                f"scheduler.params.{key}",
                "auto",
                f"a number; 'auto' only for {', '.join(auto)}",
            )
            params[key] = auto[key]
    return config
