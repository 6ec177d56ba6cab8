"""Measurements of the machines that train: a model's blocks, both ends of a link, the optimizer, averaging, links.

`pipecomp plan --measure` and bits set to "auto" use them. B samples, S tokens, H hidden size; K stages, R replicas.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipecomp.buffers import MemoryStore
from pipecomp.config import Config
from pipecomp.distributed.collectives import gathered
from pipecomp.distributed.consistency import AllRanks
from pipecomp.distributed.launch_env import read_launch
from pipecomp.distributed.placement import computer, machine, own_cores, usable_cores
from pipecomp.distributed.rendezvous import all_ranks, computes_on_cpu, join_processes
from pipecomp.doctor.measure import LinkMeasurement, follow, lead
from pipecomp.doctor.storage import existing_parent, measure_disk
from pipecomp.errors import LinkError, require, writable
from pipecomp.kernels import ops
from pipecomp.kernels.staging import Staging, staging_for
from pipecomp.plan.lines import MachineLines
from pipecomp.plan.prediction import Estimate, MachineSpeeds
from pipecomp.plan.profile import (
    PartCost,
    Profile,
    build_random_stage,
    check_tokens,
    count_stages,
    example,
    forward_with_loss,
    profile_from_stages,
)
from pipecomp.plan.search import aqsgd_sections, constant_error_bits
from pipecomp.plan.simulation import Channel, LinkNetwork, SharedCores, between_replicas
from pipecomp.rank_layout import RankLayout
from pipecomp.stages.link.endpoint import LinkReceiver, LinkSender, Position
from pipecomp.stages.link.layout import Layout
from pipecomp.stages.link.neighbors import ending_links, open_neighbors
from pipecomp.stages.link.transport import PacerTo, Transport, loopback_pair
from pipecomp.stages.partition.stage import Stage
from pipecomp.tls.process_group import BACKEND, current_mesh
from pipecomp.utils.serialization import serializable
from pipecomp.utils.units import format_count

_MIN_RUNS, _MAX_RUNS = 3, 20
_DISK_REPEATS = 3
_REPEATS = 5  # measurements that the runs are divided into, for their spread
_SEVERAL = 4  # samples of the second timing, which separates the cost of a call from that of a sample
_TIMEOUT_S = 120.0


# -- links


class TransportPeer:
    """The rank at the other end of a transport, as a `doctor.measure.Peer`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def send(self, tensor: Tensor) -> None:  # noqa: D102 (inherited)
        self._transport.send(tensor.contiguous().view(torch.uint8).numpy())

    def receive(self, tensor: Tensor) -> Tensor:  # noqa: D102 (inherited)
        data = self._transport.recv()
        if data.size != tensor.numel() * tensor.element_size():
            raise LinkError(f"rank {self._transport.peer} sent {data.size} bytes while the link was measured")
        return torch.from_numpy(np.ascontiguousarray(data)).view(tensor.dtype)


def measure_links(stage: int, to_previous: Transport | None, to_next: Transport | None) -> LinkMeasurement | None:
    """Measure this stage's links; all stages must call it together.

    Every other link is measured first, then the rest, so that a stage measures one link at a time; each half takes
    about four seconds.

    Returns:
        The measurement of the link to the next stage; None on the last stage.

    Raises:
        LinkError: The other end sends something else; also whatever the transports raise.
    """
    measurement = None
    for turn in (0, 1):
        if to_next is not None and stage % 2 == turn:
            measurement = lead(TransportPeer(to_next))
        elif to_previous is not None and stage % 2 != turn:
            follow(TransportPeer(to_previous))
    return measurement


def network_of(links: Sequence[Sequence[LinkMeasurement]]) -> LinkNetwork:
    """Make the network from measurements by link and replica, of which the slowest counts.

    One-way latency is half of the round trip: without synchronized clocks it cannot be measured.
    """

    def channels(rate: str) -> tuple[Channel, ...]:
        return tuple(
            Channel(bits_per_s=min(getattr(m, rate) for m in link), latency_s=max(m.round_trip_s for m in link) / 2)
            for link in links
        )

    spread = widest([m.spread for link in links for m in link])
    return LinkNetwork(forward=channels("out_bit_s"), backward=channels("back_bit_s"), spread=spread)


def widest(spreads: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the lowest and the highest factor of several spreads."""
    return min((low for low, _ in spreads), default=1.0), max((high for _, high in spreads), default=1.0)


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
    """Time the encoding and decoding of a micro-batch's packet on a later visit of its samples.

    The ends of a link run with activations cached in memory: quantizing, checksums and copies count, the disk does not.

    Args:
        config: Method and bits.
        samples: B.
        tokens: S.
        hidden: H.
        dtype: Dtype of activations.
        device: Where activations are.
        seconds: Approximate duration of the measurement.
        staging: Copies between device and host; by default one of its own.

    Returns:
        Median seconds of encoding and of decoding, each the mean of an activation and a gradient packet.
    """
    config = config.replace(activations=config.activations.with_scales(samples * tokens, gpu=device.type == "cuda"))
    caches = config.activations.method == "aqsgd"
    a, b = loopback_pair(timeout_s=60.0)
    staging, group_size = staging or staging_for(device), config.activations.group_size
    stores = [MemoryStore("plan", group_size=group_size, staging=staging) if caches else None for _ in (a, b)]
    sender = LinkSender(0, config, a, stores[0], staging=staging)
    receiver = LinkReceiver(0, config, b, stores[1], staging=staging)
    layout = Layout(tuple(range(samples)), (0,) * samples, (tokens,) * samples, tokens)
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn((samples, tokens, hidden), generator=generator).to(device, dtype) for _ in range(2)]
    encode: list[float] = []
    decode: list[float] = []
    with contextlib.ExitStack() as opened:
        for store in filter(None, stores):
            opened.callback(store.close)
        end, step = time.perf_counter() + seconds, 0
        while step <= _MIN_RUNS or (step < _MAX_RUNS and time.perf_counter() < end):
            at, x_BSH = Position(step, 1), xs[step % 2]
            spent = [
                _time(device, partial(sender.send_activation, x_BSH, layout, at)),
                _time(device, partial(receiver.recv_activation, at)),
                _time(device, partial(receiver.send_gradient, x_BSH, layout, at)),
                _time(device, partial(sender.recv_gradient, layout, at)),
            ]
            encode.append((spent[0] + spent[2]) / 2)
            decode.append((spent[1] + spent[3]) / 2)
            step += 1
    return statistics.median(encode[1:]), statistics.median(decode[1:])


# -- the model


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """Seconds of one micro-batch on a stage, and their spread: the factors of the lowest and highest measurement."""

    forward_s: float
    backward_s: float
    spread: tuple[float, float] = (1.0, 1.0)


def time_stage(
    stage: Stage, samples: int, tokens: int, *, seconds: float = 0.5, sends_gradients: bool = True
) -> StageTime:
    """Time forward and backward of a stage in training mode for about `seconds`.

    sends_gradients: False for the lowest stage that trains anything, and for those below it.

    The model's loss is included where there are logits for every token. Times are medians without the first run. The
    other runs are divided into a few measurements, one after another, whose medians give the spread.
    Gradients, the random generator and the stage's mode are left as they were.
    """
    parameters = [p for p in stage.parameters() if p.requires_grad]
    device, dtype = next(stage.parameters()).device, stage.dtype
    forward: list[float] = []
    backward: list[float] = []
    training = stage.training
    stage.train()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        end = time.perf_counter() + seconds
        while len(forward) <= _MIN_RUNS or (len(forward) < _MAX_RUNS and time.perf_counter() < end):
            inputs = example(stage, samples, tokens, dtype, device, needs_gradient=sends_gradients)
            began = _now(device)
            result = forward_with_loss(stage, inputs)
            middle = _now(device)
            sources = [*parameters, *(x for x in inputs.values() if x is not None and x.requires_grad)]
            # Note: not backward(), which would leave gradients and trigger the hooks of an optimizer.
            if sources:
                torch.autograd.grad([result], sources, [torch.ones_like(result)], allow_unused=True)
            forward.append(middle - began)
            backward.append(_now(device) - middle)
    stage.train(training)
    whole = [f + b for f, b in zip(forward[1:], backward[1:], strict=True)]
    return StageTime(
        forward_s=statistics.median(forward[1:]), backward_s=statistics.median(backward[1:]), spread=spread_of(whole)
    )


def spread_of(runs: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and highest of the medians of consecutive runs, as factors of the median of all; around 1.

    runs: seconds, in the order in which they were measured.
    """
    count = min(_REPEATS, len(runs))
    bounds = [len(runs) * i // count for i in range(count + 1)]
    medians = [statistics.median(runs[lo:hi]) for lo, hi in pairwise(bounds)]
    middle = statistics.median(runs)
    return min(1.0, min(medians) / middle), max(1.0, max(medians) / middle)


def time_model(model: Any, tokens: int, dtype: torch.dtype, device: torch.device, *, samples: int = 1) -> Profile:
    """Measure a model's profile: its first, a middle and its last block with random weights, one at a time.

    Seconds are measured; operations and memory are counted.

    samples: per micro-batch; timing several samples separates the cost of a call from that of a sample.
    """
    plan, costs, hidden = count_stages(model, tokens, dtype)
    calls: list[tuple[float, float]] = []
    timed: list[tuple[float, StageTime]] = []  # with the number of blocks that a stage stands for
    several = max(_SEVERAL, samples)

    def per_sample(one_s: float, several_s: float) -> float:
        return (several_s - one_s) / (several - 1) if several_s > one_s else several_s / several  # below the noise

    for index in costs:
        stage = build_random_stage(model, plan, index, dtype)
        stage.to(device)
        one, more = (time_stage(stage, n, tokens) for n in (1, several))
        forward_s, backward_s = per_sample(one.forward_s, more.forward_s), per_sample(one.backward_s, more.backward_s)
        costs[index] = replace(costs[index], forward_s=forward_s, backward_s=backward_s)
        calls.append((max(0.0, one.forward_s - forward_s), max(0.0, one.backward_s - backward_s)))
        timed.append((max(1, plan.blocks - 2) if index not in (0, plan.blocks - 1) else 1, more))
    call_s = (min(c[0] for c in calls), min(c[1] for c in calls))
    where = format_count(torch.get_num_threads(), "thread")
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    weights = [count * (stage.forward_s + stage.backward_s) for count, stage in timed]
    low, high = (
        sum(weight * stage.spread[end] for weight, (_, stage) in zip(weights, timed, strict=True)) / sum(weights)
        for end in (0, 1)
    )
    measured = {"measured": f"measured, {where}", "spread": (low, high)}
    return profile_from_stages(costs, plan, hidden=hidden, tokens=tokens, call_s=call_s, **measured)


# -- gradients and the optimizer


def time_update(device: torch.device, *, values: int = 1 << 24) -> float:
    """Return the seconds of AdamW per float32 parameter. values: so many that caches do not hold them."""
    weight = torch.nn.Parameter(torch.zeros(values, device=device))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], lr=1e-4)
    return _median_time(device, optimizer.step) / values


def time_accumulation(device: torch.device, *, values: int = 1 << 24) -> float:
    """Return the seconds of adding a float32 gradient to another, per value. values: as for `time_update`."""
    total, gradient = torch.zeros(values, device=device), torch.ones(values, device=device)
    return _median_time(device, lambda: total.add_(gradient)) / values


def time_average(device: torch.device, *, values: int = 1 << 20) -> dict[str, float]:
    """Return the seconds per gradient value of quantizing, reducing and decoding at 8 bits, as in "global_qsgd"."""
    g = torch.linspace(-1, 1, values, device=device)
    codes = ops.exponential_encode(g, 1.0, bits=8, workers=64)
    other = ops.exponential_encode(g, 1.0, bits=8, workers=64, seed=1)
    return {
        "quantize": _median_time(device, lambda: ops.exponential_encode(g, 1.0, bits=8, workers=64)) / values,
        "reduce": _median_time(device, lambda: ops.exponential_reduce_(codes, other, values, bits=8)) / values,
        "decode": _median_time(device, lambda: ops.exponential_decode(other, values, 1.0, bits=8, workers=64)) / values,
    }


def _median_time(device: torch.device, call: Callable[[], object]) -> float:
    call()
    return statistics.median(_time(device, call) for _ in range(5))


def _time(device: torch.device, call: Callable[[], object]) -> float:
    began = _now(device)
    call()
    return _now(device) - began


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# -- a machine, and all ranks of a launcher


@serializable
@dataclass(frozen=True, kw_only=True)
class SurveyResult:
    """Result of a survey.

    Attributes:
        profile: The model on the slowest machine.
        speeds: Other speeds of the slowest machine.
        network: Links between the stages, or between the replicas of a single stage; None without a launcher and for
            one process.
        slowdowns: Each rank's seconds as a multiple of the profile's, at most 1; empty without a launcher.
        lines: Between machines and within them, where the order of ranks decides what these carry; else None.
        shared_cores: Ranks that compute on the same cores, if these do not suffice for all at once.
        machines: The machine of each rank, from 0; empty without a launcher.
    """

    profile: Profile
    speeds: MachineSpeeds
    network: LinkNetwork | None = None
    slowdowns: tuple[float, ...] = ()
    lines: MachineLines | None = None
    shared_cores: tuple[SharedCores, ...] = ()
    machines: tuple[int, ...] = ()


def own_device() -> torch.device:
    """Return the device that this rank trains on, and select it: several ranks of a machine may measure at once."""
    if computes_on_cpu():
        return torch.device("cpu")
    device = torch.device("cuda", read_launch(os.environ).local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def survey_machine(
    model: Any, tokens: int, dtype: torch.dtype, samples: int, store: Path, *, one_pass: bool = False
) -> SurveyResult:
    """Measure this machine alone.

    Args:
        model: As for `pipecomp.stages.plan`; only its config is read.
        tokens: S.
        dtype: Training precision.
        samples: B.
        store: Folder for the message store; nothing is left there.
        one_pass: As for `aqsgd_sections`.

    Raises:
        ConfigError: More tokens than the model has positions, or a folder that cannot be written.
    """
    check_tokens(model, tokens)
    device = own_device()
    profile = time_model(model, tokens, dtype, device, samples=samples)
    size = (samples, tokens, profile.hidden, dtype, device)
    most = (8, 8) if one_pass else (constant_error_bits("forward_bits", 8), constant_error_bits("backward_bits", 8))
    encode_s, decode_s = time_link(Config.from_dict(aqsgd_sections(*most, one_pass=one_pass)), *size)
    cast_s = sum(time_link(Config(), *size)) / 2
    with (
        writable("store", store),
        tempfile.TemporaryDirectory(dir=existing_parent(store), prefix=".pipecomp-plan-") as folder,
    ):
        disks = [measure_disk(Path(folder), _DISK_REPEATS) for _ in range(_DISK_REPEATS)]
    rates = [1 / (1 / disk.read + 1 / disk.write) for disk in disks]
    disk_bytes_s = statistics.median(rates)
    values = samples * tokens * profile.hidden
    speeds = MachineSpeeds(
        encode_values_s=values / encode_s,
        decode_values_s=values / decode_s,
        cast_values_s=values / cast_s,
        disk_bytes_s=disk_bytes_s,
        disk_spread=(min(rates) / disk_bytes_s, max(rates) / disk_bytes_s),
        average=time_average(device),
        update_s_per_parameter=time_update(device),
        accumulate_s_per_parameter=time_accumulation(device),
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
    """Measure all ranks of a launcher together.

    Ranks that share too few cores take turns, so that each is measured as if it computed alone. An existing process
    group is used and kept; with keys the ranks connect over TLS. With one stage the links between neighbouring replicas
    are measured, which carry their gradients. With several stages, replicas and machines that run several ranks, the
    lines between machines and within them are measured instead of links.

    Args:
        model: As for `survey_machine`.
        tokens: S.
        dtype: Training precision.
        samples: B.
        store: As for `survey_machine`.
        stages: K, by default one per rank.
        pacer_to: Throttles the links.
        one_pass: As for `aqsgd_sections`.

    Returns:
        The survey on rank 0, None on the others.

    Raises:
        ConfigError: K does not divide the ranks, or more tokens than the model has positions; before ranks connect.
        LinkError: The ranks cannot reach each other.
    """
    check_tokens(model, tokens)
    rank, world = read_launch(os.environ).place
    K = stages or world
    require(world % K == 0, "stages", K, f"a divisor of the {world} processes of this run")
    length, R = (K, world // K) if K > 1 else (world, 1)  # replicas of a single stage form a row as stages do
    joined = dist.is_initialized()
    join_processes()
    mesh = current_mesh() if dist.get_backend() == BACKEND else None
    ranks = all_ranks()
    try:
        names = [machine(), [pacer_to(other) is not None for other in range(world)]]
        machines = find_machines(gathered(names))
        lines = None
        if K > 1 and R > 1 and 1 < len(set(machines)) < world:
            lines = _measure_lines(ranks, machines, pacer_to)
            link = None
        else:
            link = _measure_rows(ranks, RankLayout(length, R).pipelines(), pacer_to)
        shared = find_shared_cores(gathered(own_compute()))
        survey = None
        for members in turns(world, shared):
            with ranks.collective_errors("measure"):
                if rank in members:
                    survey = survey_machine(model, tokens, dtype, samples, store, one_pass=one_pass)
        measurements = gathered((link, survey))
        dist.barrier()
    finally:
        if not joined:
            dist.destroy_process_group()
            if mesh is not None:
                mesh.close()
    if rank != 0:
        return None
    rows = RankLayout(length, R).averages()[:-1]
    network = network_of([[measurements[other][0] for other in row] for row in rows]) if rows and not lines else None
    surveys = [survey for _, survey in measurements]
    profile = slowest_profile([m.profile for m in surveys])
    return SurveyResult(
        profile=profile,
        speeds=slowest_speeds([m.speeds for m in surveys]),
        network=between_replicas(network) if K == 1 and network is not None else network,
        slowdowns=slowdowns_of([m.profile for m in surveys]),
        lines=lines,
        shared_cores=shared,
        machines=tuple(machines),
    )


def own_compute() -> list[Any]:
    """Return this rank's computer, its cores, and how many ranks they let compute at once; 0 ranks: on a GPU."""
    at_once = usable_cores() / torch.get_num_threads() if computes_on_cpu() else 0.0
    return [computer(), own_cores(), at_once]


def find_shared_cores(ranks: Sequence[Sequence[Any]]) -> tuple[SharedCores, ...]:
    """Find the ranks that share too few cores. ranks: what `own_compute` returns, by rank."""
    found: list[SharedCores] = []
    for name in dict.fromkeys(name for name, _, _ in ranks):
        left = [rank for rank, (other, _, at_once) in enumerate(ranks) if other == name and at_once]
        while left:
            _, cores, at_once = ranks[left[0]]
            members = [rank for rank in left if not set(cores).isdisjoint(ranks[rank][1])]
            left = [rank for rank in left if rank not in members]
            if len(members) > max(1.0, at_once):
                found.append(SharedCores(members=tuple(members), at_once=max(1.0, at_once)))
    return tuple(found)


def turns(world: int, shared: Sequence[SharedCores]) -> list[list[int]]:
    """Share out the ranks among turns, in each of which the cores suffice."""
    number = {rank: place // int(one.at_once) for one in shared for place, rank in enumerate(one.members)}
    count = max(number.values(), default=0) + 1
    return [[rank for rank in range(world) if number.get(rank, 0) == turn] for turn in range(count)]


def slowdowns_of(profiles: Sequence[Profile]) -> tuple[float, ...]:
    """Return each machine's seconds as a multiple of the slowest one's; 1 where their spreads overlap."""
    estimates = [Estimate.of(sum(profile.block_seconds()), profile.spread) for profile in profiles]
    slowest = max(estimates, key=lambda estimate: estimate.seconds)
    return tuple(1.0 if slowest.reaches(one) else one.seconds / slowest.seconds for one in estimates)


def find_machines(ranks: Sequence[Sequence[Any]]) -> list[int]:
    """Number the machines of the ranks, from 0 in the order of the ranks.

    ranks: by rank the machine's name, and whether the line to each rank is slowed down, as between machines.
    """
    found: list[int] = []
    for rank, (name, slowed) in enumerate(ranks):
        together = (other for other in range(rank) if ranks[other][0] == name and not slowed[other])
        first = next(together, None)
        found.append(max(found, default=-1) + 1 if first is None else found[first])
    return found


def _measure_lines(all_ranks: AllRanks, machines: Sequence[int], pacer_to: PacerTo) -> MachineLines:
    """Measure the lines between neighbouring machines, and those within them; returns the same on every rank.

    One rank of each machine uses the line between machines at a time, so that it has the whole line.
    """
    members = [[r for r, other in enumerate(machines) if other == number] for number in sorted(set(machines))]
    firsts = [ranks[0] for ranks in members]
    outer = gathered(_measure_rows(all_ranks, [firsts], pacer_to))
    inner = gathered(_measure_rows(all_ranks, [ranks[:2] for ranks in members if len(ranks) > 1], pacer_to))
    between = network_of([[outer[r]] for r in firsts[:-1]])
    within = network_of([[link for link in inner if link is not None]])
    slowest = min(within.forward[0], within.backward[0], key=lambda channel: channel.bits_per_s)
    return MachineLines(
        machines=tuple(machines),
        inner=slowest,
        out=between.forward,
        back=between.backward,
        spread=between.spread,
    )


def _measure_rows(all_ranks: AllRanks, rows: Sequence[Sequence[int]], pacer_to: PacerTo) -> LinkMeasurement | None:
    """Measure this rank's link to the next rank of its row, together with all others; every rank must call this.

    rows: rows of ranks, each with a rank once at most. Ranks in no row only wait.
    """
    neighbors = open_neighbors(rows, timeout_s=_TIMEOUT_S, streams="auto", all_ranks=all_ranks, pacer_to=pacer_to)
    rank, transports = dist.get_rank(), neighbors.transports
    place = list(next((row for row in rows if rank in row), [rank])).index(rank)
    try:
        with ending_links(transports, all_ranks, "measure"):
            measurement = measure_links(place, transports.get("to_previous"), transports.get("to_next"))
    finally:
        for opened in transports.values():
            opened.close()
    dist.barrier()
    for group in neighbors.groups:
        # Note: torch names some groups by how many each rank has. If these stayed, a middle rank would have more than
        # those at the ends, and would wait forever for them when all replicas make a group later.
        dist.destroy_process_group(group)
    return measurement


def slowest_profile(profiles: Sequence[Profile]) -> Profile:
    """Return the profile with the slowest machine's seconds for every part."""

    def slowest(costs: Sequence[PartCost]) -> PartCost:
        return max(costs, key=lambda cost: (cost.forward_s or 0.0) + (cost.backward_s or 0.0))

    first = profiles[0]
    return replace(
        first,
        first=slowest([p.first for p in profiles]),
        last=slowest([p.last for p in profiles]),
        blocks=tuple(slowest(costs) for costs in zip(*(p.blocks for p in profiles), strict=True)),
        call_s=max((p.call_s for p in profiles), key=sum),
        spread=widest([p.spread for p in profiles]),
        measured=first.measured if len(profiles) == 1 else f"{first.measured}, the slowest of {len(profiles)}",
    )


def slowest_speeds(speeds: Sequence[MachineSpeeds]) -> MachineSpeeds:
    """Return every speed of the machine that is slowest in it."""
    rates = ("encode_values_s", "decode_values_s", "cast_values_s", "disk_bytes_s")
    return MachineSpeeds(
        **{rate: min(getattr(s, rate) for s in speeds) for rate in rates},
        disk_spread=widest([s.disk_spread for s in speeds]),
        average={part: max(s.average.get(part, 0.0) for s in speeds) for part in speeds[0].average},
        update_s_per_parameter=max(s.update_s_per_parameter for s in speeds),
        accumulate_s_per_parameter=max(s.accumulate_s_per_parameter for s in speeds),
    )
