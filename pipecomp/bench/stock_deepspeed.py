"""Stock DeepSpeed on the stages of a split model: what pipecomp is measured against, and must equal uncompressed."""

from __future__ import annotations

import functools
import logging
import time
from typing import Any

import torch
from torch import Tensor, nn

from pipecomp.distributed.rendezvous import join_processes
from pipecomp.netlab.software import throttle_to
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
    Over gloo packets of a GPU go through pinned host memory; in a software lab they are held back as pipecomp's are.
    """
    join_processes()
    import deepspeed
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe import p2p
    from deepspeed.utils import logger

    from pipecomp.engine.deepspeed_patches import attach_deepspeed  # before deepspeed: the room says which accelerator

    attach_deepspeed()
    logger.setLevel(logging.WARNING)
    parts = split(model, num_stages=num_stages)
    layers = [_First(parts[0]), *[_Later(part) for part in parts[1:]]]
    loss_fn = default_loss(parts[0].config)
    _carry(p2p)
    module = PipelineModule(layers, num_stages=num_stages, loss_fn=loss_fn, partition_method="uniform")
    return deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)[0]


def _carry(p2p: Any) -> None:
    """Let DeepSpeed's stages send over gloo, which takes host memory only, from a GPU, and over a software lab's links.

    p2p: its module; called again, what was set before stays.
    """
    if torch.distributed.get_backend() != "gloo" or hasattr(p2p.send, "__wrapped__"):
        return
    stock_send, stock_recv = p2p.send, p2p.recv
    pacers = functools.cache(throttle_to)

    @functools.wraps(stock_send)
    def send(tensor: Tensor, dest_stage: int, async_op: bool = False) -> Any:
        host = _host_memory(tensor).copy_(tensor) if tensor.is_cuda else tensor
        pacer = pacers(p2p._grid.stage_to_global(stage_id=dest_stage))
        if pacer is not None:
            pacer.hold(host.numel() * host.element_size(), time.monotonic())
        return stock_send(host, dest_stage, async_op)

    @functools.wraps(stock_recv)
    def recv(tensor: Tensor, src_stage: int, async_op: bool = False) -> Any:
        if not tensor.is_cuda:
            return stock_recv(tensor, src_stage, async_op)
        host = _host_memory(tensor)
        stock_recv(host, src_stage, async_op)
        return tensor.copy_(host)

    p2p.send, p2p.recv = send, recv


def _host_memory(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
