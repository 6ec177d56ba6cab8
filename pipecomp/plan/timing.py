"""Seconds, measured on the machine that trains: a stage's model, a link's ends, the optimizer, averaging.

B samples, S tokens, H hidden size.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pipecomp.buffers import MemoryStore
from pipecomp.config import Config
from pipecomp.kernels import ops
from pipecomp.kernels.staging import Staging
from pipecomp.kernels.staging_cuda import staging_for
from pipecomp.plan.profile import Cost, Profile, assemble, cut_apart, example, without_weights
from pipecomp.schedule.in_flight import KeptBytes
from pipecomp.stages.link.boundary import Layout
from pipecomp.stages.link.endpoint import Position
from pipecomp.stages.link.loopback import loopback_pair
from pipecomp.stages.link.receiver import LinkReceiver
from pipecomp.stages.link.sender import LinkSender
from pipecomp.stages.partition.architectures import architecture_of, default_loss
from pipecomp.stages.partition.loading import Source, build_stage, resolve
from pipecomp.stages.partition.splitting import Stage
from pipecomp.utils.tables import counted

_LEAST_RUNS, _MOST_RUNS = 2, 20
_SEVERAL = 4  # samples, to tell what a call costs from what a sample costs


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """Of one micro-batch: forward_s, backward_s; kept_bytes: what the forward keeps for the backward."""

    forward_s: float
    backward_s: float
    kept_bytes: float


def time_stage(stage: Stage, samples: int, tokens: int, *, seconds: float = 0.5) -> StageTime:
    """Time forward and backward of a stage in training, for about `seconds`; gradients and the generator stay alone.

    Where logits are for every token the model's loss counts too. Medians, the first run left out.
    """
    parameters = [p for p in stage.parameters() if p.requires_grad]
    weight = next(stage.parameters())  # not an adapter's, which peft keeps in float32: links carry the weights' dtype
    device, dtype = weight.device, weight.dtype
    per_token = architecture_of(stage.config).heads[stage.plan.model_class].per_token
    labels_BS = torch.zeros((samples, tokens), dtype=torch.int64, device=device)
    forward: list[float] = []
    backward: list[float] = []
    training, kept = stage.training, KeptBytes(parameters)
    stage.train()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        end = time.perf_counter() + seconds
        while len(forward) <= _LEAST_RUNS or (len(forward) < _MOST_RUNS and time.perf_counter() < end):
            inputs = example(stage, samples, tokens, dtype, device)
            began = _now(device)
            with contextlib.nullcontext() if forward else kept.counting():
                out = stage(inputs)
            result = out["hidden_states"] if isinstance(out, dict) else out
            if stage.is_last and per_token:
                result = default_loss(stage.config)(result, labels_BS)
            middle = _now(device)
            wanted = [*parameters, *(x for x in inputs.values() if x is not None and x.requires_grad)]
            # Not backward(): that would leave gradients, and wake the hooks of an optimizer that watches for them.
            torch.autograd.grad([result], wanted, [torch.ones_like(result)], allow_unused=True)
            ended = _now(device)
            forward.append(middle - began)
            backward.append(ended - middle)
    stage.train(training)
    return StageTime(
        forward_s=statistics.median(forward[1:]),
        backward_s=statistics.median(backward[1:]),
        kept_bytes=float(kept.bytes),
    )


def time_link(
    config: Config,
    samples: int,
    tokens: int,
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    seconds: float = 0.3,
    staging: Staging | None = None,
) -> tuple[float, float]:
    """Time encoding a packet and decoding one, both kinds' mean, of a micro-batch that was seen before.

    By the ends of a link themselves, activations cached in memory: quantizing, checksum and copies count, a disk does
    not. staging: that copies, by default one of its own.
    """
    keeps = config.activations.method == "aqsgd"
    a, b = loopback_pair(timeout_s=60.0)
    staging, group_size = staging or staging_for(device), config.activations.group_size
    stores = [MemoryStore("plan", group_size=group_size, staging=staging) if keeps else None for _ in (a, b)]
    up = LinkSender(0, config, a, stores[0], staging=staging)
    down = LinkReceiver(0, config, b, stores[1], staging=staging)
    where = Layout(tuple(range(samples)), (0,) * samples, (tokens,) * samples, tokens)
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn((samples, tokens, hidden), generator=draw).to(device, dtype) for _ in range(2)]
    encode: list[float] = []
    decode: list[float] = []
    with contextlib.ExitStack() as opened:
        for store in filter(None, stores):
            opened.callback(store.close)
        end, step = time.perf_counter() + seconds, 0
        while step <= _LEAST_RUNS or (step < _MOST_RUNS and time.perf_counter() < end):
            at, x_BSH = Position(step, 1), xs[step % 2]
            spent = [
                _spent(device, lambda: up.send_activation(x_BSH, where, at)),  # noqa: B023 (called at once)
                _spent(device, lambda: down.recv_activation(at)),  # noqa: B023
                _spent(device, lambda: down.send_gradient(x_BSH, where, at)),  # noqa: B023
                _spent(device, lambda: up.recv_gradient(where, at)),  # noqa: B023
            ]
            encode.append((spent[0] + spent[2]) / 2)
            decode.append((spent[1] + spent[3]) / 2)
            step += 1
    return statistics.median(encode[1:]), statistics.median(decode[1:])


def time_model(model: Any, tokens: int, dtype: torch.dtype, device: torch.device, *, samples: int = 1) -> Profile:
    """Measure a model's profile here: its first, a middle and its last block with random weights, one at a time.

    samples: of a micro-batch, to time a call's own cost beside that of one sample.
    """
    source = resolve(model)
    config_only = Source(config=source.config, model_class=source.model_class)
    plan, chosen = cut_apart(without_weights(model, dtype))
    found: dict[int, Cost] = {}
    calls: list[tuple[float, float]] = []
    several = max(_SEVERAL, samples)
    for index in chosen:
        stage = build_stage(config_only, plan, index, dtype=dtype)
        assert isinstance(stage, Stage), "a language model's"
        stage.to(device)
        one, more = (time_stage(stage, n, tokens) for n in (1, several))
        each_f = _of_each(one.forward_s, more.forward_s, several)
        each_b = _of_each(one.backward_s, more.backward_s, several)
        found[index] = Cost(flops=0.0, kept_bytes=one.kept_bytes, forward_s=each_f, backward_s=each_b)
        calls.append((max(0.0, one.forward_s - each_f), max(0.0, one.backward_s - each_b)))
        hidden = stage.hidden_size
    call_s = (min(c[0] for c in calls), min(c[1] for c in calls))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else counted(torch.get_num_threads(), "thread")
    return assemble(found, plan, hidden=hidden, tokens=tokens, call_s=call_s, measured=f"measured, {where}")


def time_update(device: torch.device, *, values: int = 1 << 20) -> float:
    """Time AdamW, in seconds for each float32 parameter."""
    weight = torch.nn.Parameter(torch.zeros(values, device=device))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], lr=1e-4)
    return _median(device, optimizer.step) / values


def time_average(device: torch.device, *, values: int = 1 << 20) -> dict[str, float]:
    """Time quantizing, reducing and decoding a gradient value at 8 bits, as "global_qsgd" does."""
    g = torch.linspace(-1, 1, values, device=device)
    codes = ops.exponential_encode(g, 1.0, bits=8, workers=64)
    other = ops.exponential_encode(g, 1.0, bits=8, workers=64, seed=1)
    return {
        "quantize": _median(device, lambda: ops.exponential_encode(g, 1.0, bits=8, workers=64)) / values,
        "reduce": _median(device, lambda: ops.exponential_reduce_(codes, other, values, bits=8)) / values,
        "decode": _median(device, lambda: ops.exponential_decode(other, values, 1.0, bits=8, workers=64)) / values,
    }


def _median(device: torch.device, call: Callable[[], object]) -> float:
    call()
    return statistics.median(_spent(device, call) for _ in range(5))


def _spent(device: torch.device, call: Callable[[], object]) -> float:
    began = _now(device)
    call()
    return _now(device) - began


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _of_each(one_s: float, several_s: float, several: int) -> float:
    """Seconds of a block, from calls with one and with several; a share of the call where noise is larger."""
    return (several_s - one_s) / (several - 1) if several_s > one_s else several_s / several
