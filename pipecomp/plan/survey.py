"""What `pipecomp plan --measure` measures: this machine; under a launcher, all machines and the links between them.

Rank r is stage r // R of replica r mod R, as in training. K stages, R replicas.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipecomp.config import Config
from pipecomp.distributed.collectives import gathered
from pipecomp.distributed.launch_env import read_launch
from pipecomp.distributed.rendezvous import join_processes
from pipecomp.distributed.start import computes_on_cpu
from pipecomp.doctor.measure import Measured
from pipecomp.doctor.storage import measure_speed, nearest
from pipecomp.errors import require, writable
from pipecomp.plan.network import Network, between_replicas
from pipecomp.plan.options import aqsgd
from pipecomp.plan.prediction import Speeds
from pipecomp.plan.probe import measure_links, network_of
from pipecomp.plan.profile import Cost, Profile, check_tokens
from pipecomp.plan.search import keeping_error
from pipecomp.plan.timing import time_average, time_link, time_model, time_update
from pipecomp.stages.link.gloo import GlooTransport, neighbour_groups
from pipecomp.stages.link.tls import TlsTransport
from pipecomp.stages.link.transport import PacerTo, Transport
from pipecomp.tls.mesh import Mesh
from pipecomp.tls.process_group import BACKEND, current_mesh
from pipecomp.utils.serialization import exchanged

_TIMEOUT_S = 120.0


@exchanged
@dataclass(frozen=True, kw_only=True)
class Survey:
    """profile, speeds: of the slowest machine. network: of what connects the stages, or the replicas of a single stage.

    network is None where nothing connects anything: without a launcher, and for one process.
    slowdowns: how many times the profile's seconds each rank's machine takes, at most 1; empty without a launcher.
    """

    profile: Profile
    speeds: Speeds
    network: Network | None = None
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
) -> Survey:
    """Measure this machine alone.

    store: where the message store would be; nothing is left there. one_pass: see `aqsgd`.
    Raises ConfigError for more tokens than the model takes, or a disk that cannot be written.
    """
    check_tokens(model, tokens)
    device = own_device()
    profile = time_model(model, tokens, dtype, device, samples=samples)
    size = (samples, tokens, profile.hidden, dtype, device)
    most = (8, 8) if one_pass else (keeping_error("forward_bits", 8), keeping_error("backward_bits", 8))
    encode_s, decode_s = time_link(Config.from_dict(aqsgd(*most, one_pass=one_pass)), *size)
    cast_s = sum(time_link(Config(), *size)) / 2
    with (
        writable("store", store),
        tempfile.TemporaryDirectory(dir=nearest(store), prefix=".pipecomp-plan-") as folder,
    ):
        disk = measure_speed(Path(folder))
    values = samples * tokens * profile.hidden
    # Every cached activation is read once and written once: both together at this rate, each counted by its bytes.
    speeds = Speeds(
        encode_values_s=values / encode_s,
        decode_values_s=values / decode_s,
        cast_values_s=values / cast_s,
        disk_bytes_s=1 / (1 / disk.read + 1 / disk.write),
        average=time_average(device),
        update_s_per_parameter=time_update(device),
    )
    return Survey(profile=profile, speeds=speeds)


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
) -> Survey | None:
    """Measure all ranks of a launcher together, on each; the survey on rank 0, None on the others.

    Ranks that torch has joined already use what they have, and keep it; with keys they meet over TLS. With one stage
    the links between neighbouring replicas are measured, over which their gradients go.
    stages: K, by default one for each rank. pacer_to: slows links down. one_pass: see `aqsgd`. ConfigError if the ranks
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
    return Survey(
        profile=profile,
        speeds=slowest_speeds([m.speeds for m in machines]),
        network=between_replicas(measured) if K == 1 and measured is not None else measured,
        slowdowns=tuple(sum(m.profile.block_seconds()) / whole_s for m in machines),
    )


def _links(rank: int, R: int, K: int, pacer_to: PacerTo, mesh: Mesh | None) -> Measured | None:
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

    def slowest(costs: Sequence[Cost]) -> Cost:
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


def slowest_speeds(speeds: Sequence[Speeds]) -> Speeds:
    """Take each speed of the machine that is slowest in it."""
    parts = speeds[0].average
    return Speeds(
        encode_values_s=min(s.encode_values_s for s in speeds),
        decode_values_s=min(s.decode_values_s for s in speeds),
        cast_values_s=min(s.cast_values_s for s in speeds),
        disk_bytes_s=min(s.disk_bytes_s for s in speeds),
        average={part: max(s.average.get(part, 0.0) for s in speeds) for part in parts},
        update_s_per_parameter=max(s.update_s_per_parameter for s in speeds),
    )
