"""Build an engine and its links: the stage as DeepSpeed's PipelineModule, gradient exchanges, transports, stores.

Every rank calls these functions in the same order, because they create process groups.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.constants import GRADIENT_CLIPPING, GRADIENT_CLIPPING_DEFAULT
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch.distributed.constants import default_pg_timeout
from torch.optim.lr_scheduler import LRScheduler

from pipecomp.allreduce.group import Group
from pipecomp.buffers import MessageStore, StoreEnvironment, open_environment
from pipecomp.buffers.admin import forget
from pipecomp.checkpoint.run_id import RunIdentity, find_run, model_digest
from pipecomp.config import Config
from pipecomp.distributed.consistency import AllRanks
from pipecomp.distributed.placement import own_gpu, ranks_on_gpu
from pipecomp.engine.deepspeed_patches import existing_device, long_group_timeouts, quiet
from pipecomp.engine.engine import PipelineEngine
from pipecomp.engine.reduction import GradientExchange, ReplicaAdam, ReplicaExchanges, TiedRanks
from pipecomp.engine.replica_sync import has_modes, match_tied, pipelines
from pipecomp.engine.validation import RunSetup
from pipecomp.errors import ConfigError, SplitError, StoreError, require
from pipecomp.gradient_config import Gradients
from pipecomp.kernels import dispatch
from pipecomp.kernels.staging import Staging
from pipecomp.rank_layout import RankLayout
from pipecomp.stages import Source, build_stage, default_loss
from pipecomp.stages.link.clusters import BLOCK
from pipecomp.stages.link.endpoint import LinkReceiver, LinkSender
from pipecomp.stages.link.layout import Boundary
from pipecomp.stages.link.links import Links
from pipecomp.stages.link.neighbors import open_neighbors
from pipecomp.stages.link.packet import PacketLimits
from pipecomp.stages.link.transport import PacerTo, Transport, unpaced
from pipecomp.stages.partition.modules import ModuleStage
from pipecomp.stages.partition.planning import SplitPlan
from pipecomp.stages.partition.precision import HALF
from pipecomp.stages.partition.quantization import state_names
from pipecomp.stages.partition.stage import Stage
from pipecomp.utils.activity import local_activity

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunArguments:
    """The arguments of `pipecomp.initialize` from which the engine is built."""

    model: Any
    loss_fn: Callable | None
    optimizer: Any
    lr_scheduler: Any
    parameter_groups: Callable[[Any], list[Any]] | None

    def given(self) -> dict[str, bool]:
        """Optional arguments that are set; must be the same on all ranks."""
        names = ("optimizer", "lr_scheduler", "parameter_groups")
        return {name: getattr(self, name) is not None for name in names}


def build_engine(setup: RunSetup, arguments: RunArguments, all_ranks: AllRanks) -> PipelineEngine:
    """Build this rank's stage and its engine, without links."""
    settings, ds_config, plan = setup.settings, setup.ds_config, setup.plan
    with quiet(), existing_device(), long_group_timeouts():
        module = pipeline_module(arguments.model, plan, ds_config, arguments.loss_fn, settings.seed, setup.ranks)
        stage, grid = module.forward_funcs[0], module.mpu()
        match_tied(stage, plan, grid, all_ranks)
        half = half_dtype(ds_config)
        if half is not None:
            stage.use_half(half, ds_config.get("data_types", {}).get("keep_in_fp32_modules", "auto"))
        check_dtypes(stage, half, all_ranks)
        optimizer = arguments.optimizer
        with all_ranks.collective_errors():
            check_arguments(stage, optimizer, arguments.lr_scheduler)
            parameters = (arguments.parameter_groups or _trainable)(stage)
            if callable(optimizer) and _flattens_parameters(ds_config):
                check_elementwise(optimizer)
        if not plan.trained[stage.index] and (optimizer is not None or "optimizer" in ds_config):
            parameters = [module.hold_place()]
        parameters = _by_precision(parameters, stage.float32_parameters)
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.param_groups[:] = _by_precision(optimizer.param_groups, stage.float32_parameters)
        if settings.gradients.exchanges_in_optimizer:
            require(optimizer is None, "optimizer", optimizer, "none given: 'quantized_adam' is the optimizer")
            optimizer = quantized_adam(settings, ds_config, module, parameters)
            del ds_config["optimizer"]
        tied_groups = _tied_groups(plan, grid)
        engine = PipelineEngine(
            pipecomp_config=settings,
            plan=plan,
            tied_groups=tied_groups,
            exchanges=_exchanges(settings, plan, grid),
            args=None,
            model=module,
            optimizer=optimizer,
            lr_scheduler=arguments.lr_scheduler,
            model_parameters=parameters,
            mpu=grid,
            config=ds_config,
            config_class=DeepSpeedConfig(ds_config, grid),
            dist_init_required=False,
        )
        if setup.recompute:
            engine.stage.gradient_checkpointing_enable()
        dispatch.prefer(settings.kernels, engine.device.type)
    engine.local_rank = int(os.environ["LOCAL_RANK"])  # DeepSpeed has its device's number, and names files by it
    gpu = own_gpu(engine.local_rank) if engine.device.type == "cuda" else None
    engine.in_flight_control.sharing = ranks_on_gpu(all_ranks, gpu) or engine.in_flight_control.sharing
    return engine


# -- the stage


class _StageSpec(LayerSpec):
    """Builds a stage only on the rank that owns it."""

    def __init__(self, build: Callable[[], Stage | ModuleStage]) -> None:
        super().__init__(Stage)
        self._build = build

    def build(self, log: bool = False) -> Stage | ModuleStage:
        return self._build()


class _PipelineModule(PipelineModule):
    """DeepSpeed globs for layer files; here the folder's name is not a pattern.

    placeholder: one value that no forward uses; None on a stage that trains something.

    Note: [Placeholder] A stage of frozen blocks has nothing to update. DeepSpeed's optimizers need a parameter
    nevertheless, and their steps have collectives of all stages: overflow, global norm. With the placeholder all stages
    take the same path, and every stage has the optimizer's learning rate and loss scale. It belongs to no stage, so
    that no file of the model has it, and gets no gradient of its own.
    """

    placeholder: torch.nn.Parameter | None

    def hold_place(self) -> torch.nn.Parameter:
        """Add the placeholder; a matrix, as some optimizers take nothing else."""
        self.placeholder = torch.nn.Parameter(torch.zeros(1, 1))
        return self.placeholder

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        found: list[str] = super().ckpt_layer_path_list(glob.escape(ckpt_dir), local_layer_idx)
        return found

    def _get_frozen_parameter_names(self, layer: Stage | ModuleStage) -> list[str]:
        """Name what a checkpoint of adapters leaves out, the scales of quantized weights included."""
        return [*super()._get_frozen_parameter_names(layer), *state_names(layer)]


def pipeline_module(
    model: Any,
    split_plan: SplitPlan,
    ds_config: dict[str, Any],
    loss_fn: Callable | None,
    seed: int,
    ranks: RankLayout | None = None,
) -> _PipelineModule:
    """Make a PipelineModule with one layer per stage; only this rank's layer is built.

    ranks: order of the ranks; None for that of "stages-across".
    """
    half = any(ds_config.get(key, {}).get("enabled") for key in ("bf16", "fp16"))
    in_memory = isinstance(model, torch.nn.Module) or (isinstance(model, Source) and model.model is not None)
    dtype = None if in_memory or half else torch.float32
    loss: list[Callable] = []

    def build(index: int) -> Stage | ModuleStage:
        with local_activity("reads the model"):
            stage = build_stage(model, split_plan, index, dtype=dtype, seed=seed)
        loss.append(loss_fn or default_loss(stage.config))
        return stage

    specs = [_StageSpec(partial(build, index)) for index in range(split_plan.num_stages)]
    ranks = ranks or RankLayout(split_plan.num_stages, dist.get_world_size() // split_plan.num_stages)
    axes, lengths = zip(*ranks.axes, strict=True)
    topology = ProcessTopology(axes=list(axes), dims=list(lengths))
    module = _PipelineModule(specs, topology=topology, partition_method="uniform")
    module.register_parameter("placeholder", None)
    module.loss_fn = loss[0]
    module.has_own_loss = loss_fn is not None
    return module


def _trainable(stage: Stage | ModuleStage) -> list[Any]:
    return [p for p in stage.parameters() if p.requires_grad]


def half_dtype(ds_config: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype that DeepSpeed casts weights to; None in float32."""
    names = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return next((dtype for key, dtype in names.items() if ds_config.get(key, {}).get("enabled")), None)


def _by_precision(parameters: list[Any], kept: Sequence[torch.nn.Parameter]) -> list[Any]:
    """Give parameters that stay in float32 groups of their own: DeepSpeed makes one vector of each group."""
    ids = {id(p) for p in kept}
    if not ids or not parameters:
        return parameters
    groups = parameters if isinstance(parameters[0], dict) else [{"params": parameters}]
    groups = [{**group, "params": list(group["params"])} for group in groups]
    split = [
        {**group, "params": [p for p in group["params"] if (id(p) in ids) == float32]}
        for float32 in (False, True)
        for group in groups
    ]
    return [group for group in split if group["params"]]


def check_dtypes(stage: Stage | ModuleStage, half: torch.dtype | None, all_ranks: AllRanks) -> None:
    """Raise SplitError if stages compute in different dtypes; warn of weights that are updated in half precision.

    half: the dtype that DeepSpeed casts weights to, of which it keeps copies in float32.
    """
    pure = half is None and any(p.dtype in HALF for p in _trainable(stage))
    facts = all_ranks.all_gather_object((stage.index, str(stage.dtype).removeprefix("torch."), pure))
    (index, dtype, _), other = facts[0], next((fact for fact in facts if fact[1] != facts[0][1]), None)
    if other is not None:
        raise SplitError(
            f"stage {index} computes in {dtype}, stage {other[0]} in {other[1]}: a link carries one dtype. Load the "
            "whole model in one dtype, or enable bf16 or fp16, which cast it"
        )
    if dist.get_rank() == 0 and any(pure for *_, pure in facts):
        _log.warning(
            "the model's weights are in half precision, and neither bf16 nor fp16 is enabled: they are updated as they "
            "are, as transformers' Trainer does, and small updates are lost. Load the model with dtype=torch.float32, "
            "or enable bf16, which keeps float32 copies"
        )


def check_arguments(stage: Stage | ModuleStage, optimizer: Any, lr_scheduler: Any) -> None:
    """Raise ConfigError for an optimizer of the unsplit model's parameters, or a schedule of another optimizer.

    The first would not train this stage's copy of a tied weight and could not be saved; the second has no effect.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        own = {id(p) for p in stage.parameters()}
        whole = all(id(p) in own for group in optimizer.param_groups for p in group["params"])
        allowed = "a callable that makes an optimizer from a stage's parameters"
        hint = "Some parameters of this optimizer are not the stage's."
        require(whole, "optimizer", type(optimizer).__name__, allowed, hint)
    if isinstance(lr_scheduler, LRScheduler):
        allowed, hint = "a callable that makes a scheduler from an optimizer", "This one schedules another optimizer."
        require(lr_scheduler.optimizer is optimizer, "lr_scheduler", type(lr_scheduler).__name__, allowed, hint)


def _flattens_parameters(ds_config: dict[str, Any]) -> bool:
    """Return whether DeepSpeed's optimizer gives the user's one vector instead of the parameters."""
    half = any(ds_config.get(key, {}).get("enabled") for key in ("bf16", "fp16"))
    return half or ds_config.get("zero_optimization", {}).get("stage", 0) > 0


def check_elementwise(make: Callable[[list[Any]], Any]) -> None:
    """Raise ConfigError for an optimizer whose update of a weight depends on its parameter's shape or other weights.

    Adafactor, Muon and LAMB would take other steps from the same gradients, where DeepSpeed flattens parameters. The
    optimizer is tried on two small matrices and on both as one vector; one that cannot take a step there passes.
    """
    generator = torch.Generator().manual_seed(0)
    shapes, scales = ((6, 4), (4, 6)), (1.0, 10.0)
    weights, *gradients = (
        [scale * torch.randn(shape, generator=generator) for shape, scale in zip(shapes, scales, strict=True)]
        for _ in range(3)
    )
    probes: list[Any] = []
    has_state: list[bool] = []

    def trained(flat: bool) -> torch.Tensor:
        def arranged(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return [torch.cat([t.flatten() for t in tensors])] if flat else tensors

        parameters = [torch.nn.Parameter(w.clone()) for w in arranged(weights)]
        optimizer = make(parameters)
        probes.append(optimizer)
        has_state.append(bool(optimizer.state))
        if has_modes(optimizer):
            optimizer.train()
        for each in gradients:
            for parameter, gradient in zip(parameters, arranged(each), strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in parameters])

    try:
        separate = trained(flat=False)
    except Exception:  # it needs the model's own parameters, or a closure
        return
    allowed = "one with the same weights in training and evaluation"
    hint = "With bf16, fp16 or ZeRO weights are copies of the optimizer's: train in float32 without ZeRO."
    name = type(probes[0]).__name__
    require(not has_modes(probes[0]), "optimizer", name, allowed, hint)
    allowed = "one that makes its states in the first step"
    hint = "DeepSpeed replaces the parameters before that, with bf16, fp16 or ZeRO: train in float32 without ZeRO."
    require(not has_state[0], "optimizer", name, allowed, hint)
    same = False
    with contextlib.suppress(Exception):  # Muon takes no vector
        same = torch.allclose(separate, trained(flat=True), rtol=1e-4)
    allowed = "one that treats every weight alike, such as AdamW, with bf16, fp16 or ZeRO"
    hint = "DeepSpeed flattens the parameters there, and this one goes by their shapes: train in float32 without ZeRO."
    require(same, "optimizer", name, allowed, hint)


# -- what replicas and tied weights exchange


def _tied_groups(split_plan: SplitPlan, grid: Any) -> dict[str, dist.ProcessGroup]:
    """Create a process group for each tied weight; returns those of this rank, by the weight's name."""
    mine = {}
    for tied in split_plan.trained_ties:
        for ranks in pipelines(grid):
            members = [ranks[stage] for stage in tied.stages]
            group = dist.new_group(members)
            if dist.get_rank() in members:
                mine[tied.name] = group
    return mine


def _exchange_timeout_s(settings: Config, steps: int = 1) -> float:
    """Return an average's timeout for a rank: at least torch's default. The heartbeat detects a lost rank much earlier.

    A rank may be late, because of a full disk or its dataset. Within an interval of local steps nothing holds a faster
    replica back, so that it may wait as long as a slow one takes for all `steps`.
    """
    return max(steps * settings.transport.timeout_s, default_pg_timeout.total_seconds())


def _exchanges(settings: Config, split_plan: SplitPlan, grid: Any) -> ReplicaExchanges:
    """Make the exchange of compressed gradients in synchronous steps, and those of local steps."""
    options, local = settings.gradients, settings.gradients.local
    replicas, stage = pipelines(grid), grid.get_stage_id()
    own, here = [ranks[stage] for ranks in replicas], replicas[grid.data_parallel_id]
    ties = [group for group in split_plan.trained_ties if stage in group.stages]

    def tied(pipelines: list[list[int]]) -> dict[str, TiedRanks]:
        """The holders of this stage's tied weights on all their stages, in some replicas."""
        return {
            g.name: TiedRanks(tuple(ranks[s] for ranks in pipelines for s in g.stages), len(g.stages)) for g in ties
        }

    def exchange(
        ranks: list[int], tied: dict[str, TiedRanks], options: Gradients = options, prefix: str = "", steps: int = 1
    ) -> GradientExchange:
        timeout_s = _exchange_timeout_s(settings, steps)
        return GradientExchange(
            options, ranks, tied, stage=stage, seed=settings.seed, timeout_s=timeout_s, prefix=prefix
        )

    synchronous = inner = rows = None
    if options.method != "none" and (local is None or local.ever_synchronous):
        # quantized_adam's replicas exchange momentum; the stages of one replica still sum gradients of tied weights.
        synchronous = exchange(own, tied([here] if options.exchanges_in_optimizer else replicas))
    if local is None or local.local_steps == 1:
        return ReplicaExchanges(synchronous)
    if ties and options.method != "none":
        inner = exchange([here[stage]], tied([here]), prefix="local ")
    alone = {g.name: TiedRanks(tuple(own), 1) for g in ties}  # in outer steps each stage averages its own copy
    outer = exchange(own, alone, prefix="outer ", steps=local.local_steps)
    if local.shares_rows:
        rows = exchange(own, alone, Gradients(method="none"), prefix="rows ", steps=local.local_steps)
    return ReplicaExchanges(synchronous, inner, outer, rows)


def quantized_adam(
    settings: Config, ds_config: dict[str, Any], module: PipelineModule, parameters: list[Any]
) -> ReplicaAdam:
    """Make the optimizer of the configuration's "optimizer" section; replicas exchange its momentum.

    parameters: those of the stage, or groups of them.
    """
    known, section = ("lr", "betas", "eps", "weight_decay"), ds_config["optimizer"]
    params = dict(section.get("params", {}))
    params.pop("torch_adam", None)
    adam_w = params.pop("adam_w_mode", True) or section["type"].lower() == "adamw"  # as DeepSpeed does
    for key in params:
        if key not in known:
            raise ConfigError(f"optimizer.params.{key}", params[key], f"{', '.join(known)} with 'quantized_adam'")
    g, grid = settings.gradients, module.mpu()
    assert g.freeze_step is not None
    assert isinstance(g.bits, int)
    assert g.group_size is not None
    ranks = [ranks[grid.get_stage_id()] for ranks in pipelines(grid)]
    return ReplicaAdam(
        parameters,
        **params,
        adam_w=adam_w,
        max_norm=float(ds_config.get(GRADIENT_CLIPPING, GRADIENT_CLIPPING_DEFAULT)) or None,
        freeze_step=g.freeze_step,
        bits=g.bits,
        group_size=g.group_size,
        group=Group(ranks, timeout_s=_exchange_timeout_s(settings)),
        seed=settings.seed,
        tied=[p for p in module.forward_funcs[0].tied_parameters().values() if p.requires_grad],
    )


# -- links


def open_transports(
    engine: PipelineEngine,
    timeout_s: float,
    all_ranks: AllRanks,
    pacer_to: PacerTo = unpaced,
    streams: int | str = 1,
) -> dict[str, Transport]:
    """Connect to the stages before and after this one; every rank must call this.

    Args:
        engine: Gives the place of this rank in the pipeline.
        timeout_s: How long a transport waits for a packet.
        all_ranks: Ends all ranks if one fails.
        pacer_to: Gives the pacer of the link to a rank, which simulates a slow network.
        streams: TCP connections of each link; "auto" measures.

    Returns:
        Transports by "to_previous" and "to_next"; at the ends of the pipeline one of them is missing.
    """
    return open_neighbors(
        pipelines(engine.grid), timeout_s=timeout_s, streams=streams, all_ranks=all_ranks, pacer_to=pacer_to
    ).transports


def open_links(
    engine: PipelineEngine, configured: Config, transports: dict[str, Transport], all_ranks: AllRanks, staging: Staging
) -> tuple[Links, RunIdentity | None]:
    """Open this rank's ends of its links and their message stores; every rank must call this.

    Args:
        engine: Its settings have measured bits in place of "auto".
        configured: The settings as given. Stores are tied to these, because measured bits differ from start to start.
        transports: From `open_transports`. They are closed if this fails.
        all_ranks: Compares the ranks.
        staging: Copies between device and host.

    Returns:
        The links, and the run that the cached activations belong to; None if no activations are cached.

    Raises:
        StoreError: The stores belong to another run or configuration.
        LinkError: The two ends of a link differ.
    """
    grid, stage, settings = engine.grid, engine.stage, engine.pipecomp_config
    indices = {"to_previous": engine.stage_id - 1, "to_next": engine.stage_id}
    crossings = {name: stage.crossing(indices[name]) for name in transports}
    dtype = stage.dtype
    described = {
        indices[name]: {
            **configured.link_settings(indices[name]),
            **crossing.settings,
            "hidden_size": crossing.width,
            "model": f"{engine.plan.model_class} {model_digest(engine.plan, stage.config)}",
            "dtype": str(dtype).removeprefix("torch."),
            "replica": f"{grid.data_parallel_id} of {grid.data_parallel_size}",
        }
        for name, crossing in crossings.items()
    }
    run = None
    engine.gradients.use_staging(staging)
    with contextlib.ExitStack() as opened:  # closes transports and stores on failure, so that no lock stays
        for transport in transports.values():
            opened.callback(transport.close)
        environment, stores = None, dict[int, MessageStore | None].fromkeys(described)
        if settings.activations.method == "aqsgd":
            with all_ranks.collective_errors(), local_activity(f"opens its message store {settings.store.path}"):
                if settings.store.overwrite:
                    forget(settings.store.path, engine.state_number)
                environment = _environment(settings, engine.state_number, staging)
                opened.callback(environment.close)
                try:
                    stores = {index: environment.link(f"link-{index}", values) for index, values in described.items()}
                except StoreError:  # of other settings
                    if not environment.disposable:
                        raise
                    environment.close()
                    forget(settings.store.path, engine.state_number)
                    _log.warning(
                        "the message store in %s is emptied: a run of other settings left it", settings.store.path
                    )
                    environment = _environment(settings, engine.state_number, staging)
                    opened.callback(environment.close)
                    stores = {index: environment.link(f"link-{index}", values) for index, values in described.items()}
            holds = any(store is not None and store.stats()["samples"] > 0 for store in stores.values())
            run = find_run(environment, holds, settings.store.path, settings.store.run, all_ranks)
        ends: dict[str, Any] = {}
        for name, crossing in crossings.items():
            ends[name] = (LinkSender if name == "to_next" else LinkReceiver)(
                indices[name],
                settings,
                transports[name],
                stores[indices[name]],
                replica=grid.data_parallel_id,
                staging=staging,
                pass_nonfinite=engine.fp16_enabled(),
                canvas=crossing.canvas,
                carries_gradients=indices[name] >= engine.plan.lowest_trained,
            )
        both = {index: {**values, "settings": settings.digest()} for index, values in described.items()}
        keeps_gradients = settings.activations.backward_method == "delta"
        links = Links(environment=environment, described=both, gradients=keeps_gradients, **ends)
        if run is not None:
            run.forget = links.forget
        links.reconcile_stores()
        for name, end in ends.items():
            bounds = bounds_of(engine, crossings[name])
            if bounds is not None:
                end.set_limits(bounds, dtype)
        opened.pop_all()
    return links, run


def bounds_of(engine: PipelineEngine, crossing: Boundary) -> PacketLimits | None:
    """The largest packet that a link accepts; None for a model without `max_position_embeddings`."""
    rows, documents = crossing.rows, 0
    if rows is None:
        documents = engine.micro_batch_size * engine.micro_batches  # packing divides a step's samples among them
        positions = getattr(engine.stage.config, "max_position_embeddings", None)
        if not isinstance(positions, int) or positions <= 0:
            return None
        rows = 2 * positions  # models with relative positions accept longer samples
    settings = engine.pipecomp_config
    store = settings.store
    changed = engine.micro_batch_size * engine.micro_batches * (store.drift_check or 0)
    if settings.activations.backward_method == "delta":
        changed *= 2  # the gradient of a sample is an entry of its own
    if store.clusters is not None:
        changed = -(-store.clusters // BLOCK)
    return PacketLimits(engine.micro_batch_size, rows, crossing.width, changed, documents=documents)


def _environment(settings: Config, number: int, staging: Staging) -> StoreEnvironment:
    store = settings.store
    return open_environment(
        store.backend,
        store.path,
        number,
        bits=store.bits,
        group_size=settings.activations.group_size,
        max_bytes=store.max_bytes,
        prefetch=store.prefetch if store.clusters is None else 0,  # cluster centers are in memory
        on_write_error=store.on_write_error,
        staging=staging,
    )
