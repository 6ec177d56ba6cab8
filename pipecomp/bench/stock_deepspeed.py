"""Stock DeepSpeed on the stages of a split model: what pipecomp is measured against, and must equal uncompressed."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from pipecomp.cluster.rendezvous import join_processes
from pipecomp.stages import default_loss, split


class _First(nn.Module):
    """Tokens to hidden states, as a layer of DeepSpeed's PipelineModule: tensors in, tensors out."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.stage({"input_ids": input_ids})["hidden_states"]


class _Later(_First):
    """Hidden states to hidden states, or to logits."""

    def forward(self, hidden: torch.Tensor) -> Any:
        out = self.stage({"hidden_states": hidden, "attention_mask": None})
        return out["hidden_states"] if isinstance(out, dict) else out


def stock_engine(model: Any, num_stages: int, config: dict[str, Any]) -> Any:
    """Start DeepSpeed's own PipelineEngine on `model` (a language model without padding), split as pipecomp splits it.

    Packets are uncompressed, nothing overlaps. Batches are (input_ids, labels), parameters named `*.stage.<name>`.
    """
    join_processes()
    import deepspeed
    from deepspeed.pipe import PipelineModule
    from deepspeed.utils import logger

    from pipecomp.engine.initialize import attach_deepspeed  # before deepspeed: the room says which accelerator

    attach_deepspeed()
    logger.setLevel(logging.WARNING)
    parts = split(model, num_stages=num_stages)
    layers = [_First(parts[0]), *[_Later(part) for part in parts[1:]]]
    loss_fn = default_loss(parts[0].config)
    module = PipelineModule(layers, num_stages=num_stages, loss_fn=loss_fn, partition_method="uniform")
    return deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)[0]
