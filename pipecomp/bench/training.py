"""Trainings for benchmarks: a GPT-2 with pipecomp's engine, or with stock DeepSpeed's.

r is the slowness of a link: the time that a micro-batch's float32 packets take in both directions, over the time that
one stage computes on it.

# Note: BF16 on a CPU without BF16 instructions. torch then multiplies BF16 matrices element by element, about ten times
# slower than float32. BF16 hardware multiplies exactly, adds in float32 and rounds once at the end, which a float32
# product rounded to BF16 equals.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipecomp.distributed.rendezvous import join_processes
from pipecomp.interfaces import TrainingEngine
from pipecomp.netlab.software import throttle_to
from pipecomp.stages import default_loss, split

STOCK, STOCK_BF16 = "DeepSpeed FP32", "DeepSpeed BF16"
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Model:
    """The GPT-2 that is trained: blocks, width, tokens a sample; samples of one step.

    The vocabulary is small, so that the last stage, which has the output layer, computes about as long as the others.
    """

    blocks: int = 4
    width: int = 512
    heads: int = 8
    tokens: int = 256
    vocabulary: int = 512
    samples: int = 16


@dataclass(frozen=True, kw_only=True)
class Line:
    """One configuration. engine: "deepspeed" (stock) or "pipecomp". section: pipecomp's. dtype: "fp32" or "bf16".

    against: the line that it is compared with.
    """

    name: str
    engine: str = "pipecomp"
    dtype: str = "fp32"
    micro_batches: int = 8
    replicas: int = 1
    section: dict[str, Any] = field(default_factory=dict)
    against: str = STOCK

    @property
    def period(self) -> int:
        """Steps between averages of replicas, which are timed together."""
        return int(self.section.get("gradients", {}).get("local_steps") or 1)

    def counts(self, step: int, engine: TrainingEngine, most_uncounted: int = 8) -> bool:
        """Return True if a step is timed. Stock DeepSpeed's steps are all alike; AQ-SGD's first one sends first visits.

        most_uncounted: steps before a timed one, at most, while pipecomp still tries how many micro-batches to have in
        flight.
        """
        if self.engine == "deepspeed":
            return step >= 1
        return step >= 2 and (step >= most_uncounted or not engine.in_flight.observing)


def aqsgd(forward: int, backward: int, backend: str = "lmdb") -> dict[str, Any]:
    """Make the settings of AQ-SGD with these bits for activations and gradients."""
    activations = {"method": "aqsgd", "forward_bits": forward, "backward_bits": backward}
    return {"activations": activations, "store": {"backend": backend}}


def message_bytes(model: Model, micro_batches: int = 8) -> int:
    """Count the float32 bytes of one micro-batch's activations and gradients together."""
    return 2 * 4 * model.samples // micro_batches * model.tokens * model.width


def rate_for(model: Model, r: float, compute_s: float) -> int:
    """Return the bit/s at which a micro-batch's float32 packets take r times a stage's compute time."""
    return int(8 * message_bytes(model) / (r * compute_s))


def start_engine(line: Line, model: Model, stages: int, folder: str) -> Any:
    """Make the engine of a line on one of its ranks. folder: for its message store."""
    whole = untied_gpt2(model)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.vocabulary, (model.samples * line.replicas, model.tokens), generator=draw)
    return (_stock if line.engine == "deepspeed" else _ours)(line, whole, tokens, stages, folder)


def untied_gpt2(model: Model) -> Any:
    """Make the GPT-2 with random weights; stock DeepSpeed cannot tie weights across stages as pipecomp does."""
    from pipecomp.demo.task import gpt2, untie

    whole = gpt2(model.vocabulary, model.tokens, layers=model.blocks, width=model.width, heads=model.heads, seed=0)
    untie(whole)
    return whole


def _config(line: Line, tokens: Any) -> dict[str, Any]:
    from pipecomp.plan.report import precision_sections

    return {
        "train_micro_batch_size_per_gpu": len(tokens) // line.replicas // line.micro_batches,
        "gradient_accumulation_steps": line.micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "steps_per_print": 10**9,
        **precision_sections(line.dtype),
    }


def _ours(line: Line, whole: Any, tokens: Any, stages: int, folder: str) -> Any:
    import pipecomp

    section = {"tie": False, **line.section}
    if section.get("store", {}).get("backend") == "lmdb":
        section["store"] = {**section["store"], "path": folder}
    config = {**_config(line, tokens), "pipecomp": section}
    data = [{"input_ids": row, "labels": row} for row in tokens]
    return pipecomp.initialize(whole, num_stages=stages, config=config, training_data=data)


def _stock(line: Line, whole: Any, tokens: Any, stages: int, folder: str) -> Any:
    config = _config(line, tokens)
    engine = stock_engine(whole, stages, config)
    size = config["train_micro_batch_size_per_gpu"]
    replica = engine.grid.data_parallel_id
    own = tokens.chunk(line.replicas)[replica].split(size)
    iterator = itertools.cycle((part, part) for part in own)
    train_batch = engine.train_batch
    engine.train_batch = lambda: train_batch(iterator)
    return engine


# -- stock DeepSpeed


class _Layer(nn.Module):
    """A stage as a layer of DeepSpeed's PipelineModule: tensors in, tensors out."""

    def __init__(self, stage: nn.Module, *, first: bool) -> None:
        super().__init__()
        self.stage, self._first = stage, first

    def forward(self, x: torch.Tensor) -> Any:
        """Turn tokens (first stage) or hidden states into hidden states, or logits (last stage)."""
        out = self.stage({"input_ids": x} if self._first else {"hidden_states": x, "attention_mask": None})
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
    layers = [_Layer(part, first=part is parts[0]) for part in parts]
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


# -- BF16 on the CPU


class _Float32Products(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if op in _PRODUCTS and args[0].dtype == torch.bfloat16 and args[0].device.type == "cpu":
            return op(*[x.float() for x in args], **(kwargs or {})).bfloat16()
        return op(*args, **(kwargs or {}))


def products_in_float32(enabled: bool) -> contextlib.AbstractContextManager:
    """Compute a CPU's BF16 matrix products through float32 inside a `with` block, if `enabled`."""
    return _Float32Products() if enabled else contextlib.nullcontext()


def cpu_multiplies_bf16() -> bool:
    """Return whether this processor has BF16 instructions (x86: AVX-512 BF16 or AMX)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def through_float32(line: Line, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Make a context in which BF16 products are float32's, rounded, for lines in BF16 on a CPU that has none.

    device: where the line computes. On a GPU nothing is done: even looking at each operation would take time there.
    """
    return products_in_float32(line.dtype == "bf16" and device.type == "cpu" and not cpu_multiplies_bf16())
