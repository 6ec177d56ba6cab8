"""Opening a rank's links: process groups, message stores, and what both ends agree on before the first step."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist

from pipecomp.buffers import MessageStore, StoreEnvironment, open_environment
from pipecomp.checkpoint.run_id import Run, find_run, model_digest
from pipecomp.config import Config
from pipecomp.distributed.consistency import AllRanks
from pipecomp.engine.engine import PipelineEngine
from pipecomp.engine.matching import pipelines
from pipecomp.kernels.staging import Staging
from pipecomp.netlab.software import throttle_to
from pipecomp.stages.link.boundary import Crossing
from pipecomp.stages.link.bounds import Bounds
from pipecomp.stages.link.codebook import BLOCK
from pipecomp.stages.link.gloo import GlooTransport, neighbour_groups
from pipecomp.stages.link.links import Links
from pipecomp.stages.link.receiver import LinkReceiver
from pipecomp.stages.link.sender import LinkSender
from pipecomp.stages.link.tls import TlsTransport
from pipecomp.stages.link.transport import Transport
from pipecomp.stages.partition.planning import SplitPlan
from pipecomp.tls.process_group import BACKEND, current_mesh


def tied_groups(split_plan: SplitPlan, grid: Any) -> dict[str, dist.ProcessGroup]:
    """Make a process group for each tied weight that this rank trains; all ranks do so in the same order."""
    mine = {}
    for tied in split_plan.trained_ties:
        for ranks in pipelines(grid):
            members = [ranks[stage] for stage in tied.stages]
            group = dist.new_group(members)
            if dist.get_rank() in members:
                mine[tied.name] = group
    return mine


def open_transports(engine: PipelineEngine, timeout_s: float) -> dict[str, Transport]:
    """To the stages before and after this one, where there are any; every rank must call this."""
    grid, stage = engine.grid, engine.stage_id
    all_pipelines = pipelines(grid)
    mesh = current_mesh() if dist.get_backend() == BACKEND else None
    groups = neighbour_groups(all_pipelines, timeout_s) if mesh is None else {}
    ranks = all_pipelines[grid.data_parallel_id]
    links = {"to_previous": stage - 1, "to_next": stage}
    made: dict[str, Transport] = {}
    for name, index in links.items():
        if 0 <= index < grid.pipe_parallel_size - 1:
            peer = ranks[index + (name == "to_next")]
            pacer = throttle_to(peer)
            if mesh is not None:
                made[name] = TlsTransport(mesh, peer, timeout_s=timeout_s, pacer=pacer)
            else:
                group, sockets = groups[ranks[index], ranks[index + 1]]
                made[name] = GlooTransport(group, timeout_s=timeout_s, pacer=pacer, sockets=sockets)
    return made


def open_links(
    engine: PipelineEngine, given: Config, transports: dict[str, Transport], all_ranks: AllRanks, staging: Staging
) -> tuple[Links, Run | None]:
    """Open this rank's ends of its links, which cache the same activations as their peers; every rank must call this.

    Returns the links, and the run whose cached activations these are, None where none are kept. given: with "auto"
    where bits are measured at every start, as cached activations do not depend on them. staging: of all that this rank
    copies. Raises StoreError for stores that are of another run or configuration, LinkError where ranks differ.
    """
    grid, stage, settings = engine.grid, engine.stage, engine.pipecomp_config
    indices = {"to_previous": engine.stage_id - 1, "to_next": engine.stage_id}
    crossings = {name: stage.crossing(indices[name]) for name in transports}
    weight = next(stage.parameters(), torch.empty(0))
    dtype = str(weight.dtype).removeprefix("torch.")
    described = {
        indices[name]: {
            **given.link_settings(indices[name]),
            **crossing.settings,
            "hidden_size": crossing.width,
            "model": f"{engine.plan.model_class} {model_digest(engine.plan, stage.config)}",
            "dtype": dtype,
            "replica": f"{grid.data_parallel_id} of {grid.data_parallel_size}",
        }
        for name, crossing in crossings.items()
    }
    run = None
    engine.gradients.use_staging(staging)
    with contextlib.ExitStack() as opened:  # what is open when something is refused is closed, and no lock is left
        for transport in transports.values():
            opened.callback(transport.close)
        environment, stores = None, dict[int, MessageStore | None].fromkeys(described)
        if settings.activations.method == "aqsgd":
            with all_ranks.collective_errors():
                environment = _environment(settings, engine.global_rank, staging)
                opened.callback(environment.close)
                stores = {index: environment.link(f"link-{index}", values) for index, values in described.items()}
            holds = any(held is not None and held.stats()["samples"] > 0 for held in stores.values())
            run = find_run(environment, holds, settings.store.path, settings.store.run, all_ranks)
        ends: dict[str, Any] = {}
        for name, crossing in crossings.items():
            index = indices[name]
            ends[name] = (LinkSender if name == "to_next" else LinkReceiver)(
                index,
                settings,
                transports[name],
                stores[index],
                replica=grid.data_parallel_id,
                staging=staging,
                pass_nonfinite=engine.fp16_enabled(),
                canvas=crossing.canvas,
            )
        both = {index: {**values, "settings": settings.digest()} for index, values in described.items()}
        keeps_gradients = settings.activations.backward_method == "delta"
        links = Links(environment=environment, described=both, gradients=keeps_gradients, **ends)
        links.agree()
        for name, end in ends.items():
            bounds = bounds_of(engine, crossings[name])
            if bounds is not None:
                end.limit(bounds, weight.dtype)
        opened.pop_all()
    return links, run


def bounds_of(engine: PipelineEngine, crossing: Crossing) -> Bounds | None:
    """What a packet of a link may hold; None for a model that names no most positions: its samples may have any."""
    rows = crossing.rows
    if rows is None:
        positions = getattr(engine.stage.config, "max_position_embeddings", None)
        if not isinstance(positions, int) or positions <= 0:
            return None
        rows = 2 * positions  # where positions are relative, a model may be given more than it was made for
    settings = engine.pipecomp_config
    store = settings.store
    changed = engine.micro_batch_size * engine.micro_batches * (store.drift_check or 0)
    if settings.activations.backward_method == "delta":
        changed *= 2  # a sample's gradient is an entry of its own
    if store.clusters is not None:
        changed = -(-store.clusters // BLOCK)
    return Bounds(engine.micro_batch_size, rows, crossing.width, changed)


def _environment(settings: Config, rank: int, staging: Staging) -> StoreEnvironment:
    store = settings.store
    return open_environment(
        store.backend,
        store.path,
        rank,
        bits=store.bits,
        group_size=settings.activations.group_size,
        max_bytes=store.max_bytes,
        prefetch=store.prefetch if store.clusters is None else 0,  # cluster centers are in memory
        on_write_error=store.on_write_error,
        staging=staging,
    )
