"""`PipelineTrainer`: the interface of transformers.Trainer over a pipeline with compressed links."""

from __future__ import annotations

from pipecomp.trainer.trainer import PipelineTrainer

__all__ = ["PipelineTrainer"]
