"""`pipecomp.initialize`: build the training engine of a rank from a Hugging Face model and a configuration.

Note: [Composition root] The engine imports neither the planner nor the network lab. This module stands above all three.
It passes the lab's pacer to the transports, and replaces the bits "auto" by measured ones before the links are opened.
"""

from __future__ import annotations

import atexit
import gc
import math
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from pipecomp.allreduce.group import shared_process_groups
from pipecomp.allreduce.state import State
from pipecomp.data import (
    PackedSampler,
    PackingCollator,
    Sampler,
    ShardedSampler,
    TrainLoader,
    check_labels,
    count_samples,
    dataset_facts,
    sample_id_function,
)
from pipecomp.distributed.collectives import open_groups
from pipecomp.distributed.consistency import AllRanks
from pipecomp.distributed.heartbeat import Heartbeat, RankPlace, process_heartbeat, uncaught_error
from pipecomp.distributed.preemption import begin_exit
from pipecomp.distributed.rendezvous import join_processes
from pipecomp.elastic.second_home import SecondHome
from pipecomp.engine.build import RunArguments, build_engine, open_links, open_transports
from pipecomp.engine.deepspeed_patches import attach_deepspeed, deepspeed_groups
from pipecomp.engine.engine import PipelineEngine
from pipecomp.engine.failure import FailureGuard
from pipecomp.engine.replica_sync import optimizer_facts, pipelines
from pipecomp.engine.validation import RunSetup, validate
from pipecomp.kernels import ops
from pipecomp.kernels.staging import staging_for
from pipecomp.netlab.software import VARIABLE, ThrottleSettings, throttle_to
from pipecomp.plan.auto_bits import (
    BatchShape,
    choose_auto_bits,
    needs_measuring,
    sample_length,
    settle_scales,
    warn_of_dropout,
)
from pipecomp.plan.simulation import TCP_SHARE, Channel, LinkNetwork
from pipecomp.stages.partition.stage import Stage
from pipecomp.tls.process_group import current_mesh
from pipecomp.utils.activity import limits, waiting_for_data


def initialize(
    model: Any,
    num_stages: int | None = None,
    config: str | os.PathLike | dict[str, Any] | None = None,
    training_data: Any = None,
    collate_fn: Callable[[list], Any] | None = None,
    *,
    cuts: Sequence[int] | None = None,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    parameter_groups: Callable[[Any], list[dict[str, Any]]] | None = None,
    shuffle: bool = True,
    tokens: int | None = None,
) -> PipelineEngine:
    """Build the engine of this rank. Every rank of the run calls this with the same arguments.

    Args:
        model: A Hugging Face model, or a PeftModel with a LoRA adapter; a folder or a hub name for `from_pretrained`,
            of which each rank reads only its own stage; the result of `pipecomp.stages.pretrained`; or a model of plain
            modules from `pipecomp.stages.modules`, with a `loss_fn`.
        num_stages: K. The number of processes is K × replicas.
        config: DeepSpeed's configuration with a "pipecomp" section, as a dict or a JSON file.
        training_data: A dataset with a length. Every rank gets all samples; replicas shard them.
        collate_fn: Makes a batch with labels and input_ids (pixel_values for plain modules) from a list of samples.
            Optional for samples of equal length. Its random draws are the same on all stages.
        cuts: K + 1 block numbers at which to cut the model, instead of `num_stages`.
        loss_fn: Called as `loss_fn(logits, labels)`. Default: the model's own loss.
        optimizer: A callable that makes an optimizer from the parameters of a stage, or with one stage a torch
            optimizer of the model. Default: the configuration's.
        lr_scheduler: A callable that makes a scheduler from the optimizer, or a scheduler of the given optimizer.
        parameter_groups: A callable that makes torch parameter groups from the stage. Default: one group.
        shuffle: Shuffle the samples in every epoch, by the section's seed.
        tokens: Tokens of a sample, used to measure bits "auto". Default: the longest of the first samples of
            `training_data`; without data 512, or the model's limit if it is lower.

    Returns:
        The engine; train with `engine.train_batch()`.

    Raises:
        ConfigError: A setting is invalid or would have no effect.
        SplitError: The model cannot be cut as requested.
        LinkError: The ranks have different versions, arguments or configurations, or cannot connect.
        DataError: The training data are unusable.
        StoreError: The message store is in use, damaged, or belongs to another run.
        KeysError: The keys of this machine do not allow it to join.

    Example:
        >>> engine = pipecomp.initialize(model="path/to/gpt2", num_stages=2, config="ds_config.json",
        ...                              training_data=dataset, collate_fn=collator)
        >>> loss = engine.train_batch()
    """
    join_processes(config)
    attach_deepspeed()
    _close_dropped_engines()
    groups_before = open_groups()
    heartbeat = process_heartbeat()
    with heartbeat.starting():
        all_ranks = AllRanks(missed=heartbeat.missed)
        arguments = RunArguments(model, loss_fn, optimizer, lr_scheduler, parameter_groups)
        setup = validate(
            model, num_stages, cuts, config, all_ranks, own_loss=loss_fn is not None, given=arguments.given()
        )
        heartbeat.timeout_s = setup.settings.transport.timeout_s
        limits.set(setup.settings.transport.data_timeout_s)
        engine = build_engine(setup, arguments, all_ranks)
        heartbeat.places = [RankPlace(*place) for place in all_ranks.all_gather_object(RankPlace.here(engine.stage_id))]
        facts = optimizer_facts(engine)
        with all_ranks.collective_errors():
            if training_data is not None:
                with waiting_for_data(training_data):
                    facts |= _set_training_data(engine, training_data, collate_fn, setup.settings.seed, shuffle)
        all_ranks.assert_same_where_known(facts)  # middle stages may have no data
        count_tokens = partial(sample_length, training_data) if tokens is None else lambda stage: tokens
        _connect(engine, setup, count_tokens, all_ranks, heartbeat)
    engine.guard.groups = open_groups() - groups_before - deepspeed_groups() - shared_process_groups()
    if not _open_engines:
        atexit.unregister(_close_at_exit)
        atexit.register(_close_at_exit)  # after `join_processes` has registered its own: it runs before
    states = [state for _, state in engine.gradients.states()]
    _open_engines.append(_OpenEngine(weakref.ref(engine), engine.guard, states, engine.second_home))
    return engine


def _set_training_data(
    engine: PipelineEngine, data: Any, collate: Callable[[list], Any] | None, seed: int, shuffle: bool
) -> dict[str, Any]:
    """Give the engine its loader. Returns facts that must be the same on all ranks that have data."""
    replicas, replica = engine.grid.data_parallel_size, engine.grid.data_parallel_id
    samples = count_samples(data, "training_data")
    order = ShardedSampler(
        samples,
        engine.micro_batch_size,
        replicas=replicas,
        replica=replica,
        seed=seed,
        shuffle=shuffle,
        accumulation=engine.micro_batches,
    )
    sampler: Sampler = order
    if isinstance(collate, PackingCollator):
        lengths = [len(data[i]["input_ids"]) for i in range(samples)]
        sampler = PackedSampler(order, lengths, engine.micro_batches, spanning=True)
    make_loader = partial(TrainLoader, data, sampler, collate, seed=ops.mix_seed(seed, replica))
    if engine.num_stages > 1:
        check_labels(lambda: next(iter(make_loader())), "training_data")
    engine.set_loader(make_loader())
    facts = dataset_facts(data, "training_data")
    if sample_id_function(data) is int:
        engine.data_facts = facts
    return facts


def _connect(
    engine: PipelineEngine,
    setup: RunSetup,
    count_tokens: Callable[[Stage], int],
    all_ranks: AllRanks,
    heartbeat: Heartbeat,
) -> None:
    """Open the engine's links. Bits that are "auto" or limited by a rate are measured over the transports first."""
    settings = setup.settings
    staging = staging_for(engine.device, settings.store.pinned_bytes)
    mesh = current_mesh()
    if mesh is not None:
        mesh.set_timeout(settings.transport.timeout_s)
    transport = settings.transport
    transports = open_transports(engine, transport.timeout_s, all_ranks, throttle_to, transport.streams)
    if engine.local is not None:
        engine.local.give_way(transports.values())

    def packet_tokens() -> int:
        stage = engine.stage
        rows = [stage.crossing(k).rows or 0 for k in (engine.stage_id - 1, engine.stage_id) if 0 <= k < stages - 1]
        return engine.micro_batch_size * (count_tokens(stage) if isinstance(stage, Stage) else max(rows, default=0))

    stages = engine.num_stages
    settled = engine.pipecomp_config = settle_scales(settings, engine.stage, engine.stage_id, packet_tokens)
    if needs_measuring(settings):
        assert isinstance(engine.stage, Stage), "validation refuses plain modules"
        batch = BatchShape(engine.micro_batch_size, count_tokens(engine.stage), engine.micro_batches)
        engine.pipecomp_config, measured = choose_auto_bits(settled, engine.stage, batch, **transports, staging=staging)
        if measured is not None:
            engine.reporting.network = {**asdict(measured), "measured": True}
    if engine.global_rank == 0:
        warn_of_dropout(engine.stage, engine.pipecomp_config)
    engine.open_links(*open_links(engine, settings, transports, all_ranks, staging), heartbeat)
    lab = os.environ.get(VARIABLE)
    if lab is not None:
        engine.reporting.network = asdict(_lab_network(ThrottleSettings.read(lab), pipelines(engine.grid)[0]))


def _lab_network(lab: ThrottleSettings, ranks: Sequence[int]) -> LinkNetwork:
    """The links between the stages of one replica as the network lab throttles them. ranks: global, by stage."""

    def line(source: int, destination: int) -> Channel:
        source, destination = source // lab.procs_per_node, destination // lab.procs_per_node
        if source == destination:
            return Channel()
        rate = min(math.inf if rate is None else rate for rate in (lab.up[source], lab.down[destination]))
        return Channel(bits_per_s=rate * TCP_SHARE, latency_s=lab.delay_s)

    return LinkNetwork(
        forward=tuple(line(a, b) for a, b in pairwise(ranks)),
        backward=tuple(line(b, a) for a, b in pairwise(ranks)),
        shared=lab.procs_per_node == 1,
    )


@dataclass(frozen=True)
class _OpenEngine:
    """An engine that may have to be closed. Its links and stores stay open if it is garbage collected."""

    reference: weakref.ref[PipelineEngine]
    guard: FailureGuard
    states: list[State]
    second_home: SecondHome | None

    def close(self) -> None:
        engine = self.reference()
        if engine is not None:
            engine.close()
            return
        if self.second_home is not None:
            self.second_home.close(failed=self.guard.failed)
        self.guard.close()
        for state in self.states:
            state.close(failed=self.guard.failed)
        self.guard.destroy_groups()


_open_engines: list[_OpenEngine] = []


def _close_dropped_engines() -> None:
    """Close the engines that nothing refers to any more: their stores and threads would stay."""
    if any(engine.reference() is not None for engine in _open_engines):
        gc.collect()
    for engine in [engine for engine in _open_engines if engine.reference() is None]:
        engine.close()
        _open_engines.remove(engine)


def _close_at_exit() -> None:
    """Close in order when the interpreter exits, so that no rank aborts in a half-closed process group."""
    error = uncaught_error()
    if error is None:
        begin_exit()
    for engine in reversed(_open_engines):
        if error is not None:
            engine.guard.report(error)
        engine.close()
    if dist.is_initialized():
        dist.destroy_process_group()
