"""The part of accelerate's Accelerator that scripts read from a trainer."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist


class PipelineAccelerator:
    """A trainer's ranks in the terms of accelerate.Accelerator.

    Args:
        trainer: The `PipelineTrainer`.

    Attributes:
        is_main_process, is_local_main_process: True on rank 0, and on the first rank of each machine.
        process_index, local_process_index, num_processes: This rank, its number on its machine, and their number.
        gradient_accumulation_steps: Of `args`.
        sync_gradients: True: callbacks run between optimizer steps.
    """

    sync_gradients = True

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.process_index, self.num_processes = trainer.rank, trainer.world
        self.local_process_index = int(os.environ["LOCAL_RANK"])
        self.is_main_process, self.is_local_main_process = trainer.rank == 0, self.local_process_index == 0

    @property
    def device(self) -> torch.device:
        """The device of this rank's stage; before the engine is made, that of TrainingArguments."""
        engine = self._trainer._holder.engine
        device: torch.device = self._trainer.args.device if engine is None else engine.device
        return device

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of an optimizer step."""
        return int(self._trainer.args.gradient_accumulation_steps)

    @property
    def is_last_process(self) -> bool:
        """True on the last rank."""
        return self.process_index == self.num_processes - 1

    def prepare(self, *objects: Any, **_: Any) -> Any:
        """Return loaders, models and optimizers as they are: the trainer distributes them."""
        return objects[0] if len(objects) == 1 else objects

    def unwrap_model(self, model: Any, **_: Any) -> Any:
        """Return the model: a stage is not wrapped."""
        return model

    def wait_for_everyone(self) -> None:
        """Wait until every rank has called this."""
        dist.barrier(self._trainer.group)

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0."""
        if self.is_main_process:
            print(*values, **options)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"accelerator.{name} does not exist in a pipeline, whose engine loads data, computes and saves: use the "
            "methods of PipelineTrainer"
        )
