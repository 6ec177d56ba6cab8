"""`PipelineTrainer`: the interface of transformers.Trainer over a pipeline with compressed links."""

from __future__ import annotations

import os

import torch.distributed as dist

from pipecomp.distributed.placement import prepare_network
from pipecomp.distributed.rendezvous import ADDRESS, KEYS
from pipecomp.trainer.trainer import PipelineTrainer

__all__ = ["PipelineTrainer"]

# Note: at the import, as TrainingArguments lets accelerate make the process group before PipelineTrainer is called.
_over_tls = any(os.environ.get(name) for name in (KEYS, ADDRESS))
if "RANK" in os.environ and not _over_tls and not dist.is_initialized():
    prepare_network()
