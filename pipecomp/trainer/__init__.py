"""transformers.Trainer's way of training over a pipeline with compressed links: `PipelineTrainer`."""

from __future__ import annotations

from pipecomp.trainer.trainer import PipelineTrainer

__all__ = ["PipelineTrainer"]
