"""Loading a checkpoint of other cuts, another number of stages, or another number of replicas.

DeepSpeed numbers optimizer states and shards ZeRO's by ranks, so its files fit one pipeline only. Every checkpoint
therefore describes its pipeline: the parameter behind each number, under a name that is the same in every cut. Any rank
then picks its own parameters out of the files of all stages. Files are mapped, so a rank reads its own share only.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, cast

import torch
from torch import Tensor

from pipecomp.data import DataPosition, EpochPart
from pipecomp.distributed.collectives import gathered
from pipecomp.distributed.consistency import AllRanks
from pipecomp.errors import ConfigError, SplitError, require
from pipecomp.interfaces import TrainingEngine
from pipecomp.stages.partition.modules import ModuleStage
from pipecomp.stages.partition.planning import aliases
from pipecomp.stages.partition.stage import Stage
from pipecomp.utils.units import format_count

# DeepSpeed's keys of a ZeRO optimizer's state. Reading a checkpoint does not load DeepSpeed; a test compares them.
BASE_OPTIMIZER_STATE = "base_optimizer_state"
GROUP_PADDINGS = "group_paddings"
OPTIMIZER_STATE_DICT = "optimizer_state_dict"
PARAM_ALIGNMENT_PADDINGS = "param_alignment_paddings"
PARAM_SLICE_MAPPINGS = "param_slice_mappings"
SINGLE_PARTITION_OF_FP32_GROUPS = "single_partition_of_fp32_groups"

# Keys of a stage's file that DeepSpeed writes; all others are the caller's.
_DEEPSPEED_KEYS = (
    "module",
    "optimizer",
    "lr_scheduler",
    "skipped_steps",
    "global_steps",
    "dp_world_size",
    "mp_world_size",
    "data_sampler",
    "random_ltd",
)
RESERVED_KEYS = frozenset({*_DEEPSPEED_KEYS, "global_samples"})
_SCHEDULE_GROUP_KEYS = ("base_lrs", "lr_lambdas", "min_lrs", "max_lrs", "_init_lrs")  # one value per parameter group
_MASTER = "float32 master"  # among the states that ZeRO keeps of a parameter


class LoadOptions(TypedDict):
    """DeepSpeed's keyword arguments of `load_checkpoint`."""

    load_module_strict: bool
    load_optimizer_states: bool
    load_lr_scheduler_states: bool
    load_module_only: bool
    custom_load_fn: Any


Names = dict[str, str]  # a stage's own name of a parameter -> its name in every cut


@dataclass(frozen=True, kw_only=True)
class PipelineDescription:
    """The pipeline that wrote a checkpoint. Plain values, in the file of every stage.

    cuts, model_class, tie: values of the plan. replicas: their number. micro_batch: samples. precision: "fp32", "bf16"
    or "fp16". zero: ZeRO's stage. parameters: for each stage and each parameter group of its optimizer the names, in
    the optimizer's order.
    """

    cuts: list[int]
    model_class: str
    tie: bool
    replicas: int
    micro_batch: int
    precision: str
    zero: int
    parameters: list[list[Names]]

    def fits(self, own: PipelineDescription) -> bool:
        """Return True if DeepSpeed can load the files into the pipeline `own`: ZeRO shards by replicas too."""
        return self.cuts == own.cuts and (self.replicas == own.replicas or not self.zero)

    def check(self, own: PipelineDescription, *, with_optimizer: bool) -> None:
        """Raise ConfigError or SplitError for another model, and with the optimizer as `check_optimizer` does."""
        if (self.model_class, self.cuts[-1]) != (own.model_class, own.cuts[-1]):
            raise SplitError(
                f"the checkpoint is of {self.model_class} with {self.cuts[-1]} blocks, the model is {own.model_class} "
                f"with {own.cuts[-1]}"
            )
        allowed = f"{self.tie!r}, as in the checkpoint, for a pipeline with other cuts"
        require(self.tie == own.tie, "pipecomp.tie", own.tie, allowed)
        if with_optimizer:
            self.check_optimizer(own)

    def check_optimizer(self, own: PipelineDescription) -> None:
        """Raise ConfigError for optimizer states of another precision or ZeRO stage."""
        for key, saved, got in (
            ("precision", self.precision, own.precision),
            ("zero_optimization.stage", self.zero, own.zero),
        ):
            require(saved == got, key, got, f"{saved!r}, as in the checkpoint, to continue with its optimizer states")
        saved_names, own_names = self._trained(), own._trained()
        differing = sorted(saved_names ^ own_names)
        if differing:
            allowed = f"{differing[0] in saved_names}, as in the checkpoint, to continue with its optimizer states"
            hint = f"{format_count(len(differing), 'parameter')} differ. load_module_only=True loads the weights alone."
            raise ConfigError(f"{differing[0]}.requires_grad", differing[0] in own_names, allowed, hint)

    def _trained(self) -> set[str]:
        return {name for groups in self.parameters for group in groups for name in group.values()}


def names_in_every_cut(stage: Stage | ModuleStage) -> Names:
    """Map all names of a stage's parameters: to the original's for a tied weight, else to the first of its names."""
    tied = {group.parameters[group.stages.index(stage.index)]: group.name for group in stage.tied_groups}
    mapped: Names = {}
    for names in aliases(stage):
        mapped |= dict.fromkeys(names, next((tied[name] for name in names if name in tied), names[0]))
    return mapped


def _grouped_names(engine: TrainingEngine) -> list[Names]:
    """Names of the parameters of this stage by the optimizer's groups, in its order."""
    optimizer = cast(Any, engine.optimizer)  # DeepSpeed's optimizers have no common type
    if engine.zero_optimization() or engine.bfloat16_enabled():
        groups = _attribute(optimizer, "bit16_groups", "bf16_groups")
    else:
        groups = [group["params"] for group in optimizer.param_groups]
    everywhere = names_in_every_cut(engine.stage)
    own = {id(p): name for name, p in engine.stage.named_parameters()}
    # A stage that trains nothing has a group without names: its placeholder is no parameter of the model.
    return [{own[id(p)]: everywhere[own[id(p)]] for p in group if id(p) in own} for group in groups]


def describe(engine: TrainingEngine) -> PipelineDescription:
    """Describe this run's pipeline; every rank must call this."""
    names = gathered(_grouped_names(engine))
    first_replica = [engine.grid._topo.get_rank(pipe=stage, data=0) for stage in range(engine.num_stages)]
    return PipelineDescription(
        cuts=list(engine.plan.cuts),
        model_class=engine.plan.model_class,
        tie=engine.plan.tie,
        replicas=engine.grid.data_parallel_size,
        micro_batch=engine.micro_batch_size,
        precision="bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32",
        zero=engine.zero_optimization_stage(),
        parameters=[names[rank] for rank in first_replica],
    )


def read_state(folder: Path) -> dict[str, Any] | None:
    """Open the file of any stage, with its tensors mapped; None if there is none."""
    path = min(folder.glob("mp_rank_*_model_states.pt"), default=None)
    return None if path is None else torch.load(path, map_location="cpu", mmap=True, weights_only=False)


def saved_pipeline(folder: Path, key: str) -> PipelineDescription | None:
    """Read the pipeline that wrote a checkpoint; None if there is none. key: of this project's own state."""
    values = (read_state(folder) or {}).get(key, {}).get("pipeline")
    return None if values is None else PipelineDescription(**values)


def saved_position(own: Mapping[str, Any] | None, accumulation: int) -> DataPosition | None:
    """Return a checkpoint's position in the training data; None if it has none.

    Args:
        own: this package's state in the checkpoint.
        accumulation: micro-batches of a replica in a step, for checkpoints that do not record them.
    """
    if own is None:
        return None
    if own.get("position") is not None:
        return DataPosition.of(own["position"])
    pipeline, per_epoch = own["pipeline"], own.get("per_epoch")
    if per_epoch is None:
        return None
    epoch, place = divmod(own["batches_taken"], per_epoch)
    return DataPosition(epoch, (EpochPart(pipeline["replicas"], pipeline["micro_batch"], accumulation, place),))


# -- reading the files of another pipeline


class SavedPipeline:
    """The files of one checkpoint folder, by stage.

    Raises ConfigError for a missing file: the files of all stages must be on this machine.
    """

    def __init__(self, folder: Path, description: PipelineDescription) -> None:
        self.folder, self.description = folder, description
        self._stages = range(len(description.cuts) - 1)
        self._files: dict[str, Any] = {}

    def require_files(self, *, with_optimizer: bool) -> None:
        """Raise ConfigError if a stage's files are missing, or have a form that cannot be resharded."""
        for index in self._stages:
            self._weights_of(index)
            if not with_optimizer:
                continue
            elastic = not isinstance(self._base(index), dict)
            allowed = "false for a checkpoint that is loaded with other cuts"
            require(not elastic, "zero_optimization.elastic_checkpoint", True, allowed)
            for replica in range(self.description.replicas if self.description.zero else 0):
                self.zero_file(index, replica)

    @cached_property
    def state(self) -> dict[str, Any]:
        """The file of stage 0 without weights and optimizer states: steps, schedule, the caller's state."""
        return dict(self._stage(0))

    def weights(self, stage: Stage | ModuleStage, *, of: Iterable[int] | None = None) -> dict[str, Tensor]:
        """Find the entries of `stage`'s state_dict, as views of files; frozen parameters only if they were saved.

        of: stages whose files are searched; default all.

        Raises:
            SplitError: No stage has saved a tensor, or it has another shape.
        """
        files = [self._weights_of(index) for index in (self._stages if of is None else of)]
        weights = {}
        for name, own in stage.state_dict().items():
            value = next((file[name] for file in files if name in file), None)
            if value is not None:
                if value.shape != own.shape:
                    raise SplitError(f"{name}: {tuple(value.shape)} in {self.folder}, {tuple(own.shape)} in the model")
                weights[name] = value
        trained = {name for name, p in stage.named_parameters(remove_duplicate=False) if p.requires_grad}
        missing = sorted(trained - set(weights))
        if missing:
            raise SplitError(f"{missing[0]}: no stage of {self.folder} has it")
        return weights

    def options(self, names: Iterable[str]) -> dict[str, Any]:
        """The optimizer's options of a group with these parameters; {} if none was saved. ConfigError for several."""
        wanted = set(names)
        distinct: list[dict[str, Any]] = []
        for stage, groups in enumerate(self.description.parameters):
            for number, group in enumerate(groups):
                options = {k: v for k, v in self._base(stage)["param_groups"][number].items() if k != "params"}
                if wanted & set(group.values()) and options not in distinct:
                    distinct.append(options)
        if len(distinct) > 1:
            raise ConfigError("parameter_groups", len(distinct), "the same groups of parameters as in the checkpoint")
        return copy.deepcopy(distinct[0]) if distinct else {}

    def optimizer_state(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Copies of the optimizer's states by parameter name; tensors are flat with ZeRO, else in shape."""
        wanted = set(names)
        states: dict[str, dict[str, Any]] = {}
        for index in self._stages:
            for group, saved in enumerate(self.description.parameters[index]):
                chosen = {own: name for own, name in saved.items() if name in wanted and name not in states}
                if not chosen:
                    continue
                if self.description.zero:
                    states |= self._join_shards(index, group, chosen)
                    continue
                base = self._base(index)
                for number, own in zip(base["param_groups"][group]["params"], saved, strict=True):
                    if own in chosen:
                        states[chosen[own]] = _copy(base["state"].get(number, {}))
        return states

    def zero_file(self, stage: int, replica: int) -> dict[str, Any]:
        """Open the state of ZeRO's optimizer on one rank."""
        prefix = "bf16_" if self.description.precision == "bf16" else ""
        return self._open(f"{prefix}zero_pp_rank_{replica}_mp_rank_{stage:02d}_optim_states.pt")[OPTIMIZER_STATE_DICT]

    def _weights_of(self, index: int) -> dict[str, Tensor]:
        return self._open(f"layer_{index:02d}-model_states.pt")

    def _stage(self, index: int) -> dict[str, Any]:
        return self._open(f"mp_rank_{index:02d}_model_states.pt")

    def _base(self, stage: int) -> dict[str, Any]:
        """The state of torch's optimizer; with ZeRO the first replica's."""
        if self.description.zero:
            return self.zero_file(stage, 0)[BASE_OPTIMIZER_STATE]
        return self._stage(stage)["optimizer"]

    def _join_shards(self, stage: int, group: int, chosen: Names) -> dict[str, dict[str, Any]]:
        """Join the states of some parameters from the shards of ZeRO's ranks."""
        shards: dict[str, dict[str, list[Tensor]]] = {name: {} for name in chosen.values()}
        unsharded: dict[str, Any] = {}
        for replica in range(self.description.replicas):
            file = self.zero_file(stage, replica)
            master = file[SINGLE_PARTITION_OF_FP32_GROUPS][group]
            base = file[BASE_OPTIMIZER_STATE]
            state = base["state"].get(base["param_groups"][group]["params"][0], {})
            for key, value in state.items():
                whole = not isinstance(value, dict) and (not torch.is_tensor(value) or value.dim() == 0)
                allowed = "a checkpoint of the same stages and replicas with ZeRO and this optimizer"
                hint = f"Its states ({key}) are of blocks of values, which belong to several parameters."
                fits = whole or (torch.is_tensor(value) and value.numel() == master.numel())
                require(fits, "load_dir", str(self.folder), allowed, hint)
            flat = {k: v for k, v in state.items() if torch.is_tensor(v) and v.dim() == 1}
            unsharded |= {k: v for k, v in state.items() if k not in flat}
            for full_name, place in file[PARAM_SLICE_MAPPINGS][group].items():
                own = full_name.split(".", 1)[1]  # without DeepSpeed's prefix, the number of the layer
                if own in chosen:
                    for key, values in {_MASTER: master, **flat}.items():
                        shard = values.reshape(-1)[place.start : place.start + place.numel]
                        shards[chosen[own]].setdefault(key, []).append(shard)
        return {
            name: {**_copy(unsharded), **{key: torch.cat(parts) for key, parts in of.items()}}
            for name, of in shards.items()
        }

    def _open(self, name: str) -> Any:
        if name not in self._files:
            path = self.folder / name
            allowed = "a folder with the files of all stages on this machine"
            require(path.is_file(), "load_dir", str(self.folder), allowed, f"{name} is missing.")
            # With pickle, as DeepSpeed reads its own files: they hold more than tensors.
            self._files[name] = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
        return self._files[name]


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if torch.is_tensor(value) else copy.deepcopy(value) for key, value in state.items()}


# -- loading them


def open_if_resharded(engine: TrainingEngine, folder: Path, key: str, *, with_optimizer: bool) -> SavedPipeline | None:
    """Open the checkpoint if it must be resharded; None if DeepSpeed can load it. Every rank must call this.

    Args:
        engine: Engine of this run.
        folder: The checkpoint.
        key: Key of this project's own state in the caller's.
        with_optimizer: Whether optimizer states are loaded. Weights alone may be of another precision or ZeRO stage.

    Raises:
        ConfigError: The checkpoint is of another precision or ZeRO stage, or files are missing.
        SplitError: It is of another model.
        LinkError: Another rank has raised one of these.
    """
    own = describe(engine)
    saved: SavedPipeline | None = None
    all_ranks = AllRanks()
    with all_ranks.collective_errors():
        description = saved_pipeline(folder, key)
        if description is not None and not description.fits(own):
            description.check(own, with_optimizer=with_optimizer)
            saved = SavedPipeline(folder, description)
            saved.require_files(with_optimizer=with_optimizer)
        elif description is not None:
            if with_optimizer:
                description.check_optimizer(own)
            if engine.stage.adapter is not None:
                # DeepSpeed would accept a file without trained parameters.
                SavedPipeline(folder, description).weights(engine.stage, of=[engine.stage_id])
        if saved is None:
            own_file = Path(engine._get_ckpt_name(str(folder.parent), folder.name))
            allowed = f"a folder with {own_file.name} on the machine of rank {engine.global_rank}"
            hint = "That rank has written the file, unless the machines share a disk."
            require(own_file.is_file(), "load_dir", str(folder), allowed, hint)
    for rank, resharded in enumerate(all_ranks.all_gather_object(saved is not None)):
        if resharded is not (saved is not None):
            raise ConfigError("load_dir", str(folder), f"the same checkpoint on all ranks (rank {rank} differs)")
    return saved


def load(engine: TrainingEngine, saved: SavedPipeline, options: LoadOptions) -> tuple[str, dict[str, Any]]:
    """Load files of another pipeline, with the arguments and results of DeepSpeed's `load_checkpoint`."""
    stage = engine.stage
    optimizer = cast(Any, engine.optimizer)
    stage.load_state_dict(saved.weights(stage), strict=False)  # `weights` raises for missing tensors
    if not options["load_optimizer_states"] or options["load_module_only"]:
        if hasattr(optimizer, "refresh_fp32_params"):
            optimizer.refresh_fp32_params()
    elif engine.zero_optimization():
        _load_zero(engine, saved)
    else:
        _load_optimizer(optimizer, saved, _grouped_names(engine))
    state = saved.state
    if not options["load_module_only"]:
        if options["load_lr_scheduler_states"] and engine.lr_scheduler is not None:
            load_schedule(engine.lr_scheduler, optimizer.param_groups, state["lr_scheduler"])
        engine.global_steps = state["global_steps"]
        engine.global_samples = state["global_samples"]
        engine.skipped_steps = state["skipped_steps"]
    return str(saved.folder), {key: value for key, value in state.items() if key not in _DEEPSPEED_KEYS}


def load_schedule(scheduler: Any, groups: list[dict[str, Any]], saved: dict[str, Any]) -> None:
    """Load a learning-rate schedule of another stage, which may have other parameter groups.

    Args:
        scheduler: A torch scheduler.
        groups: The optimizer's groups, loaded before; their rates are kept.
        saved: State of the saved schedule, without its values per group.
    """
    rates: dict[str, Any] = {"_last_lr": [group["lr"] for group in groups]}
    if all("initial_lr" in group for group in groups):
        rates["base_lrs"] = [group["initial_lr"] for group in groups]
    scheduler.load_state_dict(_with_own_groups(scheduler.state_dict(), saved, rates))


def _with_own_groups(own: dict[str, Any], saved: dict[str, Any], rates: dict[str, Any]) -> dict[str, Any]:
    """The saved state of a schedule, and of the schedules it contains, with this optimizer's values per group."""
    state = saved | {key: own[key] for key in _SCHEDULE_GROUP_KEYS if key in own}
    state |= {key: value for key, value in rates.items() if key in saved}
    if "_schedulers" in saved:
        pairs = zip(own["_schedulers"], saved["_schedulers"], strict=True)
        state["_schedulers"] = [_with_own_groups(part, before, rates) for part, before in pairs]
    return state


def _load_optimizer(optimizer: Any, saved: SavedPipeline, groups: list[Names]) -> None:
    """Load the states of a torch optimizer.

    A `QuantizedAdam` keeps the frozen variances, without residuals; from states of Adam nothing is frozen.
    """
    own = optimizer.state_dict()
    numbered: dict[int, str] = {}
    for group, names in zip(own["param_groups"], groups, strict=True):
        if not names:  # of a stage that trains nothing
            continue
        group |= saved.options(names.values())
        numbered |= dict(zip(group["params"], names.values(), strict=True))
    states = saved.optimizer_state(numbered.values())
    state = {number: states[name] for number, name in numbered.items() if states.get(name)}
    loaded = {**own, "state": state}
    if loaded.pop("exchange", None) and (exchange := saved.state["optimizer"].get("exchange")):
        at = {number: values["frozen_at"] for number, values in sorted(state.items()) if values["frozen_at"]}
        frozen = [[number for number, step in at.items() if step == each] for each in sorted(set(at.values()))]
        loaded["exchange"] = {**exchange, "memories": None, "frozen": frozen}  # those frozen after the same step
    optimizer.load_state_dict(loaded)


def _load_zero(engine: TrainingEngine, saved: SavedPipeline) -> None:
    """Load this rank's shard of the states into DeepSpeed's ZeRO 1 optimizer."""
    optimizer = cast(Any, engine.optimizer)
    masters = _attribute(optimizer, "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
    base = optimizer.optimizer.state_dict()
    partitions: list[Tensor] = []
    for number, names in enumerate(_grouped_names(engine)):
        base["param_groups"][number] |= saved.options(names.values())
        partition = torch.zeros_like(masters[number], device="cpu")
        flat: dict[str, Any] = {}
        states = saved.optimizer_state(names.values())
        for own, name in names.items():
            mapping = engine.stage.get_parameter(own)._hp_mapping  # type: ignore[attr-defined]  # DeepSpeed's
            if mapping is None:
                continue  # other replicas have all of it
            here, there = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
            for key, value in states[name].items():
                if not torch.is_tensor(value) or value.dim() == 0:
                    flat[key] = value
                    continue
                target = partition if key == _MASTER else flat.setdefault(key, torch.zeros_like(partition))
                target[there.start : there.start + there.numel] = value[here.start : here.start + here.numel]
        partitions.append(partition)
        base["state"][base["param_groups"][number]["params"][0]] = flat
    content = {
        **saved.zero_file(0, 0),
        BASE_OPTIMIZER_STATE: base,
        SINGLE_PARTITION_OF_FP32_GROUPS: partitions,
        GROUP_PADDINGS: _attribute(optimizer, "groups_padding", "group_paddings"),
    }
    if hasattr(optimizer, "round_robin_bit16_padding"):
        content[PARAM_ALIGNMENT_PADDINGS] = optimizer.round_robin_bit16_padding
    shards = [*[None] * engine.grid.data_parallel_id, content]
    # Without load_from_fp32_weights, DeepSpeed makes the masters from the weights, which are loaded.
    from_masters = engine.zero_load_from_fp32_weights()
    optimizer.load_state_dict(shards, load_optimizer_states=True, load_from_fp32_weights=from_masters)


def _attribute(optimizer: Any, *names: str) -> Any:
    """The attribute with one of these names: DeepSpeed's optimizers name the same things differently."""
    return getattr(optimizer, next(name for name in names if hasattr(optimizer, name)))
