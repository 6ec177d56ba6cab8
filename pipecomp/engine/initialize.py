"""`pipecomp.initialize`: from a Hugging Face model and a configuration to an engine that trains.

Everything that has to be made in the same order on every rank is made here: process groups, stages, links, stores.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.utils import logger as deepspeed_logger

from pipecomp.data import ShardedSampler, TrainLoader, check_labels, count_samples, dataset_facts, id_of_place
from pipecomp.distributed.consistency import AllRanks
from pipecomp.distributed.heartbeat import process_heartbeat
from pipecomp.distributed.placement import own_gpu, ranks_on_gpu
from pipecomp.distributed.rendezvous import collective_backend, join_processes
from pipecomp.engine.agreed import Agreed, agree
from pipecomp.engine.assemble import (
    check_given,
    gradient_exchange,
    local_exchanges,
    pipeline_module,
    quantized_adam,
    trainable,
)
from pipecomp.engine.connect import open_links, open_transports, tied_groups
from pipecomp.engine.engine import PipelineEngine
from pipecomp.engine.matching import match_tied, optimizer_facts
from pipecomp.engine.starting import device_that_is_there, patient_groups
from pipecomp.errors import ConfigError
from pipecomp.kernels import dispatch, ops
from pipecomp.kernels.staging_cuda import staging_for
from pipecomp.plan.auto_bits import BatchShape, fewest_bits, sample_length, settle, wants_measuring, warn_of_dropout
from pipecomp.stages.partition.splitting import Stage
from pipecomp.tls.process_group import current_mesh


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
    """Make the engine of this rank; every rank of the run calls this with the same arguments.

    Args:
        model: A Hugging Face model or a PeftModel with a LoRA adapter; a folder that `from_pretrained` reads, or a hub
            name, of which each rank reads only its own stage; what `pipecomp.stages.pretrained` returns; or a model of
            plain modules, made by `pipecomp.stages.modules`, with a `loss_fn`.
        num_stages: K. The number of processes is K × replicas.
        config: DeepSpeed's configuration with a "pipecomp" section, as a dict or a JSON file.
        training_data: Samples, with a length: all of them on every rank, as replicas share them out.
        collate_fn: From samples to a batch with labels and input_ids, or pixel_values for plain modules. Not needed
            for samples of equal length. What it or the data draw at random is the same on all stages.
        cuts: K + 1 block numbers where the model is cut, in place of `num_stages`.
        loss_fn: Called as `loss_fn(logits, labels)`; by default the model's own loss.
        optimizer: A callable that makes one from a stage's parameters, or with one stage a torch optimizer of the
            model's; by default the configuration's.
        lr_scheduler: A callable that makes one from the optimizer, or one of the optimizer that is given.
        parameter_groups: From the stage to its parameters in groups with options of their own, as torch's optimizers
            take them; by default one group of all.
        shuffle: Whether every epoch has a new order of samples, by the section's seed.
        tokens: Of a sample, where bits are measured for training; by default as many as the longest of the first of
            `training_data` has, and without data 512, or what the model takes.

    Returns:
        The engine. It trains with `train_batch`.

    Raises:
        ConfigError: A setting is not allowed, or could not take effect.
        SplitError: The model cannot be cut like that.
        LinkError: The ranks have different versions, arguments or configurations, or cannot reach each other.
        DataError: The data are not what training needs.
        StoreError: The message store is in use, damaged, or another run's; the error says what to do.
        KeysError: This machine's keys do not let it join.

    Example:
        >>> engine = pipecomp.initialize(model="path/to/gpt2", num_stages=2, config="ds_config.json",
        ...                              training_data=dataset, collate_fn=collator)
        >>> loss = engine.train_batch()
    """
    join_processes(config)
    attach_deepspeed()
    heartbeat = process_heartbeat()
    with heartbeat.starting():
        all_ranks = AllRanks(missed=heartbeat.missed)
        own = {"optimizer": optimizer, "lr_scheduler": lr_scheduler, "parameter_groups": parameter_groups}
        given = {name: value is not None for name, value in own.items()}
        agreed = agree(model, num_stages, cuts, config, all_ranks, own_loss=loss_fn is not None, given=given)
        heartbeat.timeout_s = agreed.settings.transport.timeout_s
        with _without_noise(), device_that_is_there(), patient_groups():
            module = pipeline_module(model, agreed.plan, agreed.ds_config, loss_fn, agreed.settings.seed)
            match_tied(module.forward_funcs[0], agreed.plan, module.mpu(), all_ranks)
            with all_ranks.collective_errors():
                check_given(module.forward_funcs[0], optimizer, lr_scheduler)
            engine = _engine(agreed, module, optimizer, lr_scheduler, parameter_groups or trainable)
        engine.local_rank = int(os.environ["LOCAL_RANK"])  # DeepSpeed names files by it, and took its device's number
        gpu = own_gpu(engine.local_rank) if engine.device.type == "cuda" else None
        engine.run_ahead.sharing = ranks_on_gpu(all_ranks, gpu) or engine.run_ahead.sharing
        facts = optimizer_facts(engine)
        with all_ranks.collective_errors():
            if training_data is not None:
                sampler = _sampler(engine, count_samples(training_data, "training_data"), agreed.settings.seed, shuffle)
                seed = ops.mix_seed(agreed.settings.seed, engine.grid.data_parallel_id)
                make_loader = partial(TrainLoader, training_data, sampler, collate_fn, seed=seed)
                if engine.num_stages > 1:
                    check_labels(lambda: next(iter(make_loader())), "training_data")
                engine.set_loader(make_loader())
                of_data = dataset_facts(training_data, "training_data")
                facts |= of_data
                if id_of_place(training_data) is int:
                    engine.data_facts = of_data
        all_ranks.assert_same_where_known(facts)  # middle stages need no data
        length = partial(sample_length, training_data) if tokens is None else lambda _: tokens
        _connect(engine, agreed, length, all_ranks, heartbeat)
    _at_exit(engine)
    return engine


def attach_deepspeed() -> None:
    """Let DeepSpeed use the processes that torch has joined."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled, for 25 s, and is not used
    deepspeed.init_distributed(dist_backend=collective_backend(), verbose=False)


def _engine(
    agreed: Agreed, module: Any, optimizer: Any, lr_scheduler: Any, groups: Callable[[Any], list[Any]]
) -> PipelineEngine:
    """The engine, without links. module: of `pipeline_module`."""
    settings, ds_config, grid = agreed.settings, agreed.ds_config, module.mpu()
    parameters = groups(module.forward_funcs[0])
    if settings.gradients.exchanges_in_optimizer:
        if optimizer is not None:
            raise ConfigError("optimizer", optimizer, "none given: 'quantized_adam' is the optimizer")
        optimizer = quantized_adam(settings, ds_config, module, parameters)
        del ds_config["optimizer"]
    engine = PipelineEngine(
        pipecomp_config=settings,
        plan=agreed.plan,
        tied_groups=tied_groups(agreed.plan, grid),
        exchange=gradient_exchange(settings, agreed.plan, grid),
        local=local_exchanges(settings, agreed.plan, grid),
        args=None,
        model=module,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        model_parameters=parameters,
        mpu=grid,
        config=ds_config,
        config_class=DeepSpeedConfig(ds_config, grid),
        dist_init_required=False,
    )
    if agreed.recomputes:
        engine.stage.gradient_checkpointing_enable()
    dispatch.prefer(settings.kernels, engine.device.type)
    return engine


def _sampler(engine: PipelineEngine, samples: int, seed: int, shuffle: bool) -> ShardedSampler:
    replicas, replica = engine.grid.data_parallel_size, engine.grid.data_parallel_id
    return ShardedSampler(
        samples, engine.micro_batch_size, replicas=replicas, replica=replica, seed=seed, shuffle=shuffle
    )


def _connect(
    engine: PipelineEngine, agreed: Agreed, tokens: Callable[[Stage], int], all_ranks: AllRanks, heartbeat: Any
) -> None:
    """Open the engine's links, with bits that are measured where the configuration says "auto" or names a rate.

    tokens: counts those of a sample, asked where bits are measured.
    """
    settings = agreed.settings
    staging = staging_for(engine.device, settings.store.pinned_bytes)
    mesh = current_mesh()
    if mesh is not None:
        mesh.set_timeout(settings.transport.timeout_s)
    transports = open_transports(engine, settings.transport.timeout_s)
    if engine.local is not None:
        engine.local.give_way(transports.values())
    if wants_measuring(settings):
        assert isinstance(engine.stage, Stage), "plain modules were refused"
        batch = BatchShape(engine.micro_batch_size, tokens(engine.stage), engine.micro_batches)
        fewest = fewest_bits(engine.stage, settings)
        engine.pipecomp_config = settle(settings, engine.stage, batch, **transports, fewest=fewest, staging=staging)
    if engine.global_rank == 0:
        warn_of_dropout(engine.stage, engine.pipecomp_config)
    engine.open_links(*open_links(engine, settings, transports, all_ranks, staging), heartbeat)


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    """DeepSpeed prints tables of layers and memory, and warns of its own first look at the learning rate."""

    def wanted(record: logging.LogRecord) -> bool:
        return "Attempting to get learning rate" not in record.getMessage()

    deepspeed_logger.addFilter(wanted)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        deepspeed_logger.removeFilter(wanted)


def _at_exit(engine: PipelineEngine) -> None:
    """Close in order when the interpreter ends, so that no rank aborts in a half-closed process group."""
    reference, guard = weakref.ref(engine), engine.guard

    def finish() -> None:
        alive = reference()
        (alive or guard).close()  # of an engine that nobody has any more, links and stores are still open
        if dist.is_initialized():
            dist.destroy_process_group()

    atexit.register(finish)
