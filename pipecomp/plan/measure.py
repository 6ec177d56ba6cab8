"""Seconds, measured on the machine that trains: a stage's model, a link's ends, the optimizer, averaging.

B samples, S tokens, H hidden size.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipecomp.buffers import MemoryStore
from pipecomp.config import Config
from pipecomp.distributed.collectives import gathered
from pipecomp.distributed.launch_env import read_launch
from pipecomp.distributed.rendezvous import computes_on_cpu, join_processes
from pipecomp.doctor.measure import LinkMeasurement, follow, lead
from pipecomp.doctor.storage import measure_speed, nearest
from pipecomp.errors import LinkError, require, writable
from pipecomp.kernels import ops
from pipecomp.kernels.staging import Staging, staging_for
from pipecomp.plan.prediction import MachineSpeeds
from pipecomp.plan.profile import PartCost, Profile, assemble, check_tokens, cut_apart, example, without_weights
from pipecomp.plan.search import aqsgd_sections, keeping_error
from pipecomp.plan.simulation import Channel, LinkNetwork, between_replicas
from pipecomp.schedule import SavedTensorBytes
from pipecomp.stages.link.boundary import Layout
from pipecomp.stages.link.endpoint import Position
from pipecomp.stages.link.gloo import GlooTransport, neighbour_groups
from pipecomp.stages.link.loopback import loopback_pair
from pipecomp.stages.link.receiver import LinkReceiver
from pipecomp.stages.link.sender import LinkSender
from pipecomp.stages.link.tls import TlsTransport
from pipecomp.stages.link.transport import PacerTo, Transport
from pipecomp.stages.partition.architectures import architecture_of, default_loss
from pipecomp.stages.partition.loading import Source, build_stage, resolve
from pipecomp.stages.partition.splitting import Stage
from pipecomp.tls.mesh import Mesh
from pipecomp.tls.process_group import BACKEND, current_mesh
from pipecomp.utils.serialization import serializable
from pipecomp.utils.units import format_count

# -- Rates and latencies of the links between stages, measured over the links' own transports."""


class TransportPeer:
    """The rank at the other end of a transport, as `doctor.measure` wants it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def send(self, tensor: Tensor) -> None:
        """See doctor.measure.Peer."""
        self._transport.send(tensor.contiguous().view(torch.uint8).numpy())

    def receive(self, tensor: Tensor) -> Tensor:
        """See doctor.measure.Peer."""
        data = self._transport.recv()
        if data.size != tensor.numel() * tensor.element_size():
            raise LinkError(f"rank {self._transport.peer} sent {data.size} bytes while the link was measured")
        return torch.from_numpy(np.ascontiguousarray(data)).view(tensor.dtype)


def measure_links(stage: int, to_previous: Transport | None, to_next: Transport | None) -> LinkMeasurement | None:
    """Measure this stage's links; all stages must call it together. Returns the link to the next stage.

    Every other link at a time, so that a stage measures one link at once: some two seconds for each half. LinkError
    and what the transports raise.
    """
    found = None
    for turn in (0, 1):
        if to_next is not None and stage % 2 == turn:
            found = lead(TransportPeer(to_next))
        elif to_previous is not None and stage % 2 != turn:
            follow(TransportPeer(to_previous))
    return found


def network_of(links: Sequence[Sequence[LinkMeasurement]]) -> LinkNetwork:
    """Make the network of what was measured, by link, of one replica or several: the slowest counts.

    One way takes half of the way there and back: without clocks that agree nobody can tell more.
    """

    def lines(way: str) -> tuple[Channel, ...]:
        return tuple(
            Channel(bits_per_s=min(getattr(m, way) for m in found), latency_s=max(m.round_trip_s for m in found) / 2)
            for found in links
        )

    return LinkNetwork(forward=lines("out_bit_s"), backward=lines("back_bit_s"))


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
    training, kept = stage.training, SavedTensorBytes(parameters)
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
    found: dict[int, PartCost] = {}
    calls: list[tuple[float, float]] = []
    several = max(_SEVERAL, samples)
    for index in chosen:
        stage = build_stage(config_only, plan, index, dtype=dtype)
        assert isinstance(stage, Stage), "a language model's"
        stage.to(device)
        one, more = (time_stage(stage, n, tokens) for n in (1, several))
        each_f = _of_each(one.forward_s, more.forward_s, several)
        each_b = _of_each(one.backward_s, more.backward_s, several)
        found[index] = PartCost(flops=0.0, kept_bytes=one.kept_bytes, forward_s=each_f, backward_s=each_b)
        calls.append((max(0.0, one.forward_s - each_f), max(0.0, one.backward_s - each_b)))
        hidden = stage.hidden_size
    call_s = (min(c[0] for c in calls), min(c[1] for c in calls))
    where = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else format_count(torch.get_num_threads(), "thread")
    )
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


# -- What `pipecomp plan --measure` measures: this machine; under a launcher, all machines and the links between them.

_TIMEOUT_S = 120.0


@serializable
@dataclass(frozen=True, kw_only=True)
class SurveyResult:
    """profile, speeds: of the slowest machine. network: of what connects the stages, or the replicas of a single stage.

    network is None where nothing connects anything: without a launcher, and for one process.
    slowdowns: how many times the profile's seconds each rank's machine takes, at most 1; empty without a launcher.
    """

    profile: Profile
    speeds: MachineSpeeds
    network: LinkNetwork | None = None
    slowdowns: tuple[float, ...] = ()


def own_device() -> torch.device:
    """Take the device that this rank trains on, and let this process use it: ranks of a machine measure together."""
    if computes_on_cpu():
        return torch.device("cpu")
    device = torch.device("cuda", read_launch(os.environ).local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def survey_machine(
    model: Any, tokens: int, dtype: torch.dtype, samples: int, store: Path, *, one_pass: bool = False
) -> SurveyResult:
    """Measure this machine alone.

    store: where the message store would be; nothing is left there. one_pass: see `aqsgd_sections`.
    Raises ConfigError for more tokens than the model takes, or a disk that cannot be written.
    """
    check_tokens(model, tokens)
    device = own_device()
    profile = time_model(model, tokens, dtype, device, samples=samples)
    size = (samples, tokens, profile.hidden, dtype, device)
    most = (8, 8) if one_pass else (keeping_error("forward_bits", 8), keeping_error("backward_bits", 8))
    encode_s, decode_s = time_link(Config.from_dict(aqsgd_sections(*most, one_pass=one_pass)), *size)
    cast_s = sum(time_link(Config(), *size)) / 2
    with (
        writable("store", store),
        tempfile.TemporaryDirectory(dir=nearest(store), prefix=".pipecomp-plan-") as folder,
    ):
        disk = measure_speed(Path(folder))
    values = samples * tokens * profile.hidden
    # Every cached activation is read once and written once: both together at this rate, each counted by its bytes.
    speeds = MachineSpeeds(
        encode_values_s=values / encode_s,
        decode_values_s=values / decode_s,
        cast_values_s=values / cast_s,
        disk_bytes_s=1 / (1 / disk.read + 1 / disk.write),
        average=time_average(device),
        update_s_per_parameter=time_update(device),
    )
    return SurveyResult(profile=profile, speeds=speeds)


def survey_ranks(
    model: Any,
    tokens: int,
    dtype: torch.dtype,
    samples: int,
    store: Path,
    *,
    stages: int | None,
    pacer_to: PacerTo,
    one_pass: bool = False,
) -> SurveyResult | None:
    """Measure all ranks of a launcher together, on each; the survey on rank 0, None on the others.

    Ranks that torch has joined already use what they have, and keep it; with keys they meet over TLS. With one stage
    the links between neighbouring replicas are measured, over which their gradients go.
    stages: K, by default one for each rank. pacer_to: slows links down. ConfigError if the ranks
    cannot make so many, or the model does not take so many tokens; before any rank waits for another. LinkError where
    they cannot reach each other.
    """
    check_tokens(model, tokens)
    rank, world = read_launch(os.environ).place
    K = stages or world
    require(world % K == 0, "stages", K, f"a divisor of the {world} processes of this run")
    length, R = (K, world // K) if K > 1 else (world, 1)  # replicas of one stage are neighbours as stages are
    joined = dist.is_initialized()
    join_processes()
    mesh = current_mesh() if dist.get_backend() == BACKEND else None
    try:
        link = _links(rank, R, length, pacer_to, mesh)
        seen = gathered((link, survey_machine(model, tokens, dtype, samples, store, one_pass=one_pass)))
        dist.barrier()
    finally:
        if not joined:
            dist.destroy_process_group()
        if mesh is not None and not joined:
            mesh.close()
    if rank != 0:
        return None
    links = [[seen[k * R + r][0] for r in range(R)] for k in range(length - 1)]
    measured = network_of(links) if links else None
    machines = [survey for _, survey in seen]
    profile = slowest_profile([m.profile for m in machines])
    whole_s = sum(profile.block_seconds())
    return SurveyResult(
        profile=profile,
        speeds=slowest_speeds([m.speeds for m in machines]),
        network=between_replicas(measured) if K == 1 and measured is not None else measured,
        slowdowns=tuple(sum(m.profile.block_seconds()) / whole_s for m in machines),
    )


def _links(rank: int, R: int, K: int, pacer_to: PacerTo, mesh: Mesh | None) -> LinkMeasurement | None:
    """Measure this rank's link to the next of K ranks, together with all others; R such rows side by side."""
    pipelines = [[k * R + r for k in range(K)] for r in range(R)]
    groups = neighbour_groups(pipelines, _TIMEOUT_S) if mesh is None else {}

    def transport(peer: int) -> Transport | None:
        if not 0 <= peer < K * R:
            return None
        if mesh is not None:
            return TlsTransport(mesh, peer, timeout_s=_TIMEOUT_S, pacer=pacer_to(peer))
        group, _ = groups[min(rank, peer), max(rank, peer)]
        return GlooTransport(group, timeout_s=_TIMEOUT_S, pacer=pacer_to(peer))

    transports = [transport(rank - R), transport(rank + R)]
    found = measure_links(rank // R, *transports)
    dist.barrier()
    for opened in filter(None, transports):
        opened.close()
    dist.barrier()
    for group, _ in groups.values():
        # torch names the groups of some ranks by how many each has: where these stay, a rank in the middle has more
        # than those at the ends, and waits in vain for them when all replicas make a group later.
        dist.destroy_process_group(group)
    return found


def slowest_profile(profiles: Sequence[Profile]) -> Profile:
    """Take part by part the slowest machine's seconds."""

    def slowest(costs: Sequence[PartCost]) -> PartCost:
        return max(costs, key=lambda cost: (cost.forward_s or 0.0) + (cost.backward_s or 0.0))

    first = profiles[0]
    return replace(
        first,
        first=slowest([p.first for p in profiles]),
        last=slowest([p.last for p in profiles]),
        blocks=tuple(slowest(costs) for costs in zip(*(p.blocks for p in profiles), strict=True)),
        call_s=max((p.call_s for p in profiles), key=sum),
        measured=first.measured if len(profiles) == 1 else f"{first.measured}, the slowest of {len(profiles)}",
    )


def slowest_speeds(speeds: Sequence[MachineSpeeds]) -> MachineSpeeds:
    """Take each speed of the machine that is slowest in it."""
    parts = speeds[0].average
    return MachineSpeeds(
        encode_values_s=min(s.encode_values_s for s in speeds),
        decode_values_s=min(s.decode_values_s for s in speeds),
        cast_values_s=min(s.cast_values_s for s in speeds),
        disk_bytes_s=min(s.disk_bytes_s for s in speeds),
        average={part: max(s.average.get(part, 0.0) for s in speeds) for part in parts},
        update_s_per_parameter=max(s.update_s_per_parameter for s in speeds),
    )
