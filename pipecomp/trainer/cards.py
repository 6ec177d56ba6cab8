"""A model card as Trainer writes it, with what it says about devices and batches right for a pipeline."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers.modelcard import TrainingSummary


class _Arguments:
    """TrainingArguments as a card asks for them: as many devices as there are replicas, which share the batch."""

    def __init__(self, args: Any, replicas: int) -> None:
        self._args, self.world_size = args, replicas

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name)


def write_card(
    args: Any,
    config: Any,
    state: Any,
    data: tuple[Any, Any],
    *,
    model_class: str,
    stages: int,
    replicas: int,
    **fields: Any,
) -> None:
    """Write README.md into `args.output_dir`.

    Args:
        args: TrainingArguments.
        config: The model's.
        state: The trainer's.
        data: For training and for evaluation.
        model_class: Its name.
        stages: Of the pipeline.
        replicas: Of the pipeline.
        fields: Those of Trainer.create_model_card.
    """
    model = type(model_class, (), {"config": config})()  # its class tells the task
    trainer = SimpleNamespace(
        args=_Arguments(args, replicas), model=model, state=state, train_dataset=data[0], eval_dataset=data[1]
    )
    summary = TrainingSummary.from_trainer(trainer, **fields)
    summary.hyperparameters |= {"num_devices": stages * replicas, "pipeline_stages": stages}
    (Path(args.output_dir) / "README.md").write_text(summary.to_model_card(), encoding="utf-8")
