"""The parts that an engine is assembled from: the stage as DeepSpeed's PipelineModule, what exchanges gradients."""

from __future__ import annotations

import glob
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.constants import GRADIENT_CLIPPING, GRADIENT_CLIPPING_DEFAULT
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule
from torch.distributed.constants import default_pg_timeout
from torch.optim.lr_scheduler import LRScheduler

from pipecomp.allreduce.group import Group
from pipecomp.config import Config
from pipecomp.engine.gradient_exchange import GradientExchange, ReplicaAdam, TiedRanks
from pipecomp.engine.local_steps import LocalExchanges
from pipecomp.engine.matching import pipelines
from pipecomp.errors import ConfigError, require
from pipecomp.gradient_config import Gradients
from pipecomp.stages import Source, build_stage, default_loss
from pipecomp.stages.partition.modules import ModuleStage
from pipecomp.stages.partition.planning import SplitPlan
from pipecomp.stages.partition.splitting import Stage


class _StageSpec(LayerSpec):
    """Builds a stage only on the rank that owns it."""

    def __init__(self, build: Callable[[], Stage | ModuleStage]) -> None:
        super().__init__(Stage)
        self._build = build

    def build(self, log: bool = False) -> Stage | ModuleStage:
        return self._build()


class _Module(PipelineModule):
    """DeepSpeed's, for which the name of a checkpoint's folder is no pattern of file names."""

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        found: list[str] = super().ckpt_layer_path_list(glob.escape(ckpt_dir), local_layer_idx)
        return found


def pipeline_module(
    model: Any, split_plan: SplitPlan, ds_config: dict[str, Any], loss_fn: Callable | None, seed: int
) -> PipelineModule:
    """One layer for each stage, of which only this rank's own is built."""
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
    module = _Module(specs, num_stages=split_plan.num_stages, partition_method="uniform")
    module.loss_fn = loss[0]
    module.has_own_loss = loss_fn is not None
    return module


def trainable(stage: Stage | ModuleStage) -> list[Any]:
    """The stage's parameters in one group."""
    return [p for p in stage.parameters() if p.requires_grad]


def check_given(stage: Stage | ModuleStage, optimizer: Any, lr_scheduler: Any) -> None:
    """ConfigError for an optimizer made of the unsplit model's parameters, and for a schedule of another optimizer.

    The first would not train this stage's copy of a tied weight, and could not be saved; the second would do nothing.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        own = {id(p) for p in stage.parameters()}
        whole = all(id(p) in own for group in optimizer.param_groups for p in group["params"])
        allowed = "a callable that makes one of a stage's parameters: this one has some that the stage does not have"
        require(whole, "optimizer", type(optimizer).__name__, allowed)
    if isinstance(lr_scheduler, LRScheduler):
        allowed = "a callable that makes one of an optimizer: this one's is not the one that trains"
        require(lr_scheduler.optimizer is optimizer, "lr_scheduler", type(lr_scheduler).__name__, allowed)


def gradient_exchange(settings: Config, split_plan: SplitPlan, grid: Any) -> GradientExchange | None:
    """What averages this rank's gradients, if they are compressed."""
    local = settings.gradients.local
    if settings.gradients.method == "none" or (local is not None and not local.ever_synchronous):
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
        stage=stage,
        seed=settings.seed,
        timeout_s=_patience_s(settings),
    )


def _patience_s(settings: Config, steps: int = 1) -> float:
    """How long an average waits for a rank, at the least as long as torch's: one that is gone the heartbeat misses.

    Others may be late: a full disk or a dataset keeps them, and nothing holds a faster replica back within an interval
    of local steps, so that it waits for what all of these take less.
    """
    return max(steps * settings.transport.timeout_s, default_pg_timeout.total_seconds())


def local_exchanges(settings: Config, split_plan: SplitPlan, grid: Any) -> LocalExchanges | None:
    """What averages replicas that take local steps, if they do."""
    options, local = settings.gradients, settings.gradients.local
    if local is None:
        return None
    if local.local_steps == 1:
        return LocalExchanges()
    replicas, stage = pipelines(grid), grid.get_stage_id()
    own = [ranks[stage] for ranks in replicas]
    tied = [group for group in split_plan.trained_ties if stage in group.stages]

    def exchange(
        prefix: str,
        ranks: list[int],
        held: dict[str, TiedRanks],
        options: Gradients = options,
        *,
        steps: int = local.local_steps,
    ) -> GradientExchange:
        seed, timeout_s = settings.seed, _patience_s(settings, steps)
        return GradientExchange(options, ranks, held, stage=stage, seed=seed, timeout_s=timeout_s, prefix=prefix)

    inner = None
    if tied and options.method != "none":
        here = replicas[grid.data_parallel_id]
        held = {g.name: TiedRanks(tuple(here[s] for s in g.stages), len(g.stages)) for g in tied}
        inner = exchange("local ", [here[stage]], held, steps=1)
    all_tied = {g.name: TiedRanks(tuple(own), 1) for g in tied}
    outer, rows = exchange("outer ", own, all_tied), None
    if local.shares_rows:
        rows = exchange("rows ", own, all_tied, Gradients(method="none"))
    return LocalExchanges(inner, outer, rows)


def quantized_adam(
    settings: Config, ds_config: dict[str, Any], module: PipelineModule, parameters: list[Any]
) -> ReplicaAdam:
    """The optimizer of the configuration's "optimizer" section, with its momentum exchanged among replicas.

    parameters: of the stage, or groups of them.
    """
    known, section = ("lr", "betas", "eps", "weight_decay"), ds_config["optimizer"]
    params = dict(section.get("params", {}))
    params.pop("torch_adam", None)
    adam_w = params.pop("adam_w_mode", True) or section["type"].lower() == "adamw"  # as DeepSpeed has it
    for key in params:
        if key not in known:
            raise ConfigError(f"optimizer.params.{key}", params[key], f"{', '.join(known)} with 'quantized_adam'")
    g, grid = settings.gradients, module.mpu()
    assert g.freeze_step is not None
    assert isinstance(g.bits, int)
    assert g.group_size is not None
    return ReplicaAdam(
        parameters,
        **params,
        adam_w=adam_w,
        max_norm=float(ds_config.get(GRADIENT_CLIPPING, GRADIENT_CLIPPING_DEFAULT)) or None,
        freeze_step=g.freeze_step,
        bits=g.bits,
        group_size=g.group_size,
        group=Group([ranks[grid.get_stage_id()] for ranks in pipelines(grid)], timeout_s=_patience_s(settings)),
        seed=settings.seed,
        tied=[p for p in module.forward_funcs[0].tied_parameters().values() if p.requires_grad],
    )
