"""`pipecomp.initialize`: from a Hugging Face model and a configuration to an engine that trains.

Everything that has to be made in the same order on every rank is made here: process groups, stages, links, stores.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import io
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from pipecomp.config import Config, read_json_object
from pipecomp.errors import ConfigError, SplitError

from pipecomp.cluster.rendezvous import join_processes  # isort: skip (before deepspeed, which asks it for its accelerator)

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule
from deepspeed.utils import logger as deepspeed_logger

from pipecomp.cluster.agreement import AllRanks, settings_of
from pipecomp.cluster.heartbeat import process_heartbeat
from pipecomp.data import ShardedSampler, TrainLoader
from pipecomp.engine.activation_checkpointing import take_setting
from pipecomp.engine.connect import match_tied, open_links, open_transports, pipelines, tied_groups
from pipecomp.engine.engine import PipelineEngine
from pipecomp.engine.gradient_exchange import GradientExchange, ReplicaAdam, TiedRanks, check_gradients
from pipecomp.kernels import dispatch
from pipecomp.plan.auto import Batch, sample_length, settle, wants_auto
from pipecomp.stages import Source, build_stage, default_loss, plan
from pipecomp.stages.partition.modules import Modules, ModuleStage
from pipecomp.stages.partition.planning import SplitPlan
from pipecomp.stages.partition.splitting import Stage

SECTION = "pipecomp"


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
) -> PipelineEngine:
    """Make the engine of this rank; every rank of the run calls this with the same arguments.

    model: a Hugging Face model or a PeftModel with a LoRA adapter, a folder that `from_pretrained` reads, a hub name,
    or what `pipecomp.stages.pretrained` returns; of a folder each rank reads only its own stage; or a model of plain
    modules, made by `pipecomp.stages.modules`, with a loss_fn. num_stages: K; the world size is K × replicas. cuts:
    K + 1 block numbers where the model is cut, instead of num_stages. config: DeepSpeed's configuration with a
    "pipecomp" section, as a dict or a JSON file. training_data: samples with a length; collate_fn: samples to a batch
    with labels and input_ids, or pixel_values for plain modules. loss_fn(logits, labels): the model's own loss by
    default. optimizer: a torch optimizer or a callable that makes one from parameters; by default the configuration's.
    parameter_groups(stage): the stage's parameters in groups with options of their own, as torch's optimizers take
    them; one group of all by default. shuffle: a new order every epoch, by the section's seed.

    Raises ConfigError for settings, SplitError for the model, LinkError where ranks are configured differently,
    DataError for the data.
    """
    join_processes()
    watch = process_heartbeat()
    with watch.starting():
        all_ranks = AllRanks(lost=lambda: watch.lost)
        ds_config, settings, split_plan, recomputes = _agreed(
            model, num_stages, cuts, config, all_ranks, own_loss=loss_fn is not None
        )
        watch.timeout_s = settings.transport.timeout_s
        with _without_noise():
            module = _pipeline_module(model, split_plan, ds_config, loss_fn, settings.seed)
            match_tied(module.forward_funcs[0], split_plan, module.mpu(), all_ranks)
            if settings.gradients.exchanges_in_optimizer:
                if optimizer is not None:
                    raise ConfigError("optimizer", optimizer, "none given: 'quantized_adam' is the optimizer")
                optimizer = _quantized_adam(settings, ds_config.pop("optimizer"), module)
            engine = PipelineEngine(
                pipecomp_config=settings,
                plan=split_plan,
                tied_groups=tied_groups(split_plan, module.mpu()),
                exchange=_exchange(settings, split_plan, module.mpu()),
                args=None,
                model=module,
                optimizer=optimizer,
                lr_scheduler=lr_scheduler,
                model_parameters=(parameter_groups or _trainable)(module.forward_funcs[0]),
                mpu=module.mpu(),
                config=ds_config,
                config_class=DeepSpeedConfig(ds_config, module.mpu()),
                dist_init_required=False,
            )
        if recomputes:
            engine.stage.gradient_checkpointing_enable()
        dispatch.prefer(settings.kernels, engine.device.type)
        transports = open_transports(engine, settings.transport.timeout_s)
        if wants_auto(settings):
            assert isinstance(engine.stage, Stage), "plain modules were refused"
            tokens = sample_length(training_data, engine.stage)
            batch = Batch(engine.micro_batch_size, tokens, engine.micro_batches)
            engine.pipecomp_config = settle(settings, engine.stage, batch, **transports)
        engine.open_links(*open_links(engine, settings, transports, all_ranks), watch)
    _at_exit(engine)
    if training_data is not None:
        sampler = ShardedSampler(
            len(training_data),
            engine.micro_batch_size,
            replicas=engine.grid.data_parallel_size,
            replica=engine.grid.data_parallel_id,
            seed=settings.seed,
            shuffle=shuffle,
        )
        engine.set_loader(TrainLoader(training_data, sampler, collate_fn))
    return engine


def _agreed(
    model: Any, num_stages: int | None, cuts: Sequence[int] | None, config: Any, all_ranks: AllRanks, *, own_loss: bool
) -> tuple[dict[str, Any], Config, SplitPlan, bool]:
    """DeepSpeed's configuration, its section, the split, and whether activations are recomputed: alike on all ranks."""
    with all_ranks.collective_errors():
        ds_config = _read_config(config)
        settings = Config.from_dict(ds_config.get(SECTION, {}))
        split_plan = plan(model, num_stages=num_stages, cuts=cuts, tie=settings.tie)
        if isinstance(model, Modules) and wants_auto(settings):
            raise ConfigError(
                "activations", "bits 'auto'", "numbers for plain modules: only language models are measured"
            )
        if isinstance(model, Modules) and not own_loss:
            raise ConfigError("loss_fn", None, "a function of what the last block returns and the labels")
        stages, world = split_plan.num_stages, dist.get_world_size()
        settings.activations.check_links(stages - 1)
        if world % stages:
            raise ConfigError("num_stages", stages, f"a divisor of the {world} processes of this run")
        if stages == 1 and settings.activations.method != "none":
            method = settings.activations.method
            raise ConfigError("activations.method", method, "'none' with one stage: it has no links")
        for stage, trained in enumerate(split_plan.trained):
            if not trained:
                raise SplitError(f"stage {stage} has nothing to train, all of it is frozen: cut the model otherwise")
        _check_precision(ds_config)
        check_gradients(settings.gradients, ds_config, split_plan, world // stages)
        _complete(ds_config)
        recomputes = take_setting(ds_config)
    all_ranks.assert_same_on_all_ranks(
        {**settings_of(ds_config, SECTION, settings.shared()), **_facts(split_plan, model)}
    )
    return ds_config, settings, split_plan, recomputes


def _facts(split_plan: SplitPlan, model: Any) -> dict[str, Any]:
    """What of the model must be the same on all ranks."""
    facts: dict[str, Any] = {
        "model": split_plan.model_class,
        "cuts of the model": split_plan.cuts,
        "parameters of its stages": split_plan.parameters,
    }
    if isinstance(model, torch.nn.Module):
        facts["dtype of the model"] = str(next(model.parameters()).dtype)
    return facts


def _read_config(config: str | os.PathLike | dict[str, Any] | None) -> dict[str, Any]:
    if config is None:
        raise ConfigError("config", config, "a dict or the path of a JSON file")
    if isinstance(config, dict):
        return copy.deepcopy(config)
    return read_json_object("config", config)


def _check_precision(ds_config: dict[str, Any]) -> None:
    """DeepSpeed's fp16 optimizers without ZeRO miss overflows and count weights of several stages more than once."""
    zero = ds_config.get("zero_optimization", {}).get("stage", 0)
    if ds_config.get("fp16", {}).get("enabled") and zero != 1:
        raise ConfigError("zero_optimization.stage", zero, "1 with fp16, whose loss scaling is right only there")


def _complete(ds_config: dict[str, Any]) -> None:
    """Settings that DeepSpeed needs on this machine and nobody would write down."""
    optimizer = ds_config.get("optimizer", {})
    if get_accelerator().device_name() == "cpu" and optimizer.get("type", "").lower() in ("adam", "adamw"):
        # DeepSpeed's own CPU Adam compiles at first use; torch's is there.
        optimizer.setdefault("params", {}).setdefault("torch_adam", True)


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


class _StageSpec(LayerSpec):
    """Builds a stage only on the rank that owns it."""

    def __init__(self, build: Callable[[], Stage | ModuleStage]) -> None:
        super().__init__(Stage)
        self._build = build

    def build(self, log: bool = False) -> Stage | ModuleStage:
        return self._build()


def _pipeline_module(
    model: Any, split_plan: SplitPlan, ds_config: dict[str, Any], loss_fn: Callable | None, seed: int
) -> PipelineModule:
    half = any(ds_config.get(key, {}).get("enabled") for key in ("bf16", "fp16"))
    in_memory = isinstance(model, torch.nn.Module) or (isinstance(model, Source) and model.model is not None)
    dtype = None if in_memory or half else torch.float32
    loss: list[Callable] = []

    def builder(index: int) -> Callable[[], Stage | ModuleStage]:
        def build() -> Stage | ModuleStage:
            stage = build_stage(model, split_plan, index, dtype=dtype, seed=seed)
            loss.append(loss_fn or default_loss(stage.config))
            return stage

        return build

    specs = [_StageSpec(builder(index)) for index in range(split_plan.num_stages)]
    module = PipelineModule(specs, num_stages=split_plan.num_stages, partition_method="uniform")
    module.loss_fn = loss[0]
    return module


def _trainable(stage: Stage | ModuleStage) -> list[Any]:
    return [p for p in stage.parameters() if p.requires_grad]


def _exchange(settings: Config, split_plan: SplitPlan, grid: Any) -> GradientExchange | None:
    """What averages this rank's gradients, if they are compressed."""
    if settings.gradients.method == "none":
        return None
    replicas = pipelines(grid)
    stage = grid.get_stage_id()
    in_optimizer = settings.gradients.exchanges_in_optimizer
    # Momentum is what replicas exchange then; stages still sum their gradients of tied weights.
    holders = [replicas[grid.data_parallel_id]] if in_optimizer else replicas
    tied = {
        group.name: TiedRanks(tuple(ranks[s] for ranks in holders for s in group.stages), len(group.stages))
        for group in split_plan.trained_ties
        if stage in group.stages
    }
    return GradientExchange(
        settings.gradients,
        [ranks[stage] for ranks in replicas],
        tied,
        seed=settings.seed,
        timeout_s=settings.transport.timeout_s,
    )


def _quantized_adam(settings: Config, section: dict[str, Any], module: PipelineModule) -> ReplicaAdam:
    """The optimizer of the configuration's "optimizer" section, with its momentum exchanged among replicas."""
    known = ("lr", "betas", "eps", "weight_decay")
    params = dict(section.get("params", {}))
    params.pop("torch_adam", None)
    adam_w = params.pop("adam_w_mode", section["type"].lower() == "adamw")
    for key in params:
        if key not in known:
            raise ConfigError(f"optimizer.params.{key}", params[key], f"{', '.join(known)} with 'quantized_adam'")
    g, grid = settings.gradients, module.mpu()
    assert g.freeze_step is not None
    assert isinstance(g.bits, int)
    assert g.group_size is not None
    return ReplicaAdam(
        [p for p in module.parameters() if p.requires_grad],
        **params,
        adam_w=adam_w,
        freeze_step=g.freeze_step,
        bits=g.bits,
        group_size=g.group_size,
        group=[ranks[grid.get_stage_id()] for ranks in pipelines(grid)],
        seed=settings.seed,
        tied=[p for p in module.forward_funcs[0].tied_parameters().values() if p.requires_grad],
    )


def _at_exit(engine: PipelineEngine) -> None:
    """Close in order when the interpreter ends, so that no rank aborts in a half-closed process group."""
    reference = weakref.ref(engine)

    def finish() -> None:
        alive = reference()
        if alive is not None:
            alive.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    atexit.register(finish)
