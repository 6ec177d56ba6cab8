"""Going on with a checkpoint that another cut, or another number of replicas, has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipecomp.checkpoint.deepspeed_names import (
    BASE_OPTIMIZER_STATE,
    GROUP_PADDINGS,
    PARAM_ALIGNMENT_PADDINGS,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)
from pipecomp.checkpoint.reshard_read import MASTER, Description, Names, SavedPipeline, grouped_names
from pipecomp.distributed.collectives import gathered
from pipecomp.distributed.consistency import AllRanks
from pipecomp.errors import ConfigError, require
from pipecomp.stages.partition.modules import ModuleStage
from pipecomp.stages.partition.splitting import Stage

DEEPSPEEDS = (
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
_BY_GROUP = ("base_lrs", "lr_lambdas", "min_lrs", "max_lrs", "_init_lrs")  # of a schedule's state


def parameter_groups(engine: Any) -> list[list[Any]]:
    """List the parameters that the optimizer trains, by its groups and in its order."""
    if engine.zero_optimization() or engine.bfloat16_enabled():
        return _attribute(engine.optimizer, "bit16_groups", "bf16_groups")
    return [group["params"] for group in engine.optimizer.param_groups]


def describe(engine: Any) -> Description:
    """Describe this run; all ranks must call this."""
    names = gathered(grouped_names(engine.stage, parameter_groups(engine)))
    first_replica = [engine.grid._topo.get_rank(pipe=stage, data=0) for stage in range(engine.num_stages)]
    return Description(
        cuts=list(engine.plan.cuts),
        model_class=engine.plan.model_class,
        tie=engine.plan.tie,
        replicas=engine.grid.data_parallel_size,
        micro_batch=engine.micro_batch_size,
        precision="bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32",
        zero=engine.zero_optimization_stage(),
        parameters=[names[rank] for rank in first_replica],
    )


def saved_otherwise(engine: Any, folder: Path, key: str, *, with_optimizer: bool) -> SavedPipeline | None:
    """Open the checkpoint if it has to be resharded; None if DeepSpeed can load it. Every rank must call this.

    key: of this project's own state among the client's. with_optimizer: whether optimizer states are loaded; weights
    alone may be of another precision or ZeRO stage. Raises ConfigError or SplitError for a checkpoint of another model,
    precision or ZeRO stage, or without some of its files; LinkError where only another rank has an error.
    """
    own = describe(engine)
    found: SavedPipeline | None = None
    all_ranks = AllRanks()
    with all_ranks.collective_errors():
        description = read_description(folder, key)
        if description is not None and not description.fits(own):
            description.check(own, with_optimizer=with_optimizer)
            found = SavedPipeline(folder, description)
            found.require_files(with_optimizer=with_optimizer)
        elif description is not None:
            if with_optimizer:
                description.check_optimizer(own)
            if engine.stage.adapter is not None:
                # DeepSpeed would be content with a file that lacks what is trained.
                SavedPipeline(folder, description).weights(engine.stage, of=[engine.stage_id])
        if found is None:
            own_file = Path(engine._get_ckpt_name(str(folder.parent), folder.name))
            allowed = f"a folder with {own_file.name} on the machine of rank {engine.global_rank}, which has written it"
            require(own_file.is_file(), "load_dir", str(folder), f"{allowed} or shares a disk with the one that has")
    for rank, recut in enumerate(all_ranks.all_gather_object(found is not None)):
        if recut is not (found is not None):
            raise ConfigError("load_dir", str(folder), f"the same checkpoint on all ranks (rank {rank} differs)")
    return found


def read_description(folder: Path, key: str) -> Description | None:
    """Read what any stage's file in the folder says; None if it says nothing."""
    found = (read_state(folder) or {}).get(key, {}).get("pipeline")
    return None if found is None else Description(**found)


def read_state(folder: Path) -> dict[str, Any] | None:
    """Open what any stage's file in the folder holds, tensors mapped and not read; None if there is no such file."""
    path = min(folder.glob("mp_rank_*_model_states.pt"), default=None)
    return None if path is None else torch.load(path, map_location="cpu", mmap=True, weights_only=False)


def load(
    engine: Any,
    saved: SavedPipeline,
    *,
    load_optimizer_states: bool,
    load_lr_scheduler_states: bool,
    load_module_only: bool,
) -> tuple[str, dict[str, Any]]:
    """Do what DeepSpeed's `load_checkpoint` does, and return that, for files of another partition."""
    stage, optimizer = engine.stage, engine.optimizer
    stage.load_state_dict(saved.weights(stage), strict=False)  # `weights` says what is missing
    with_optimizer = load_optimizer_states and not load_module_only
    names = grouped_names(stage, parameter_groups(engine))
    if not with_optimizer:
        if hasattr(optimizer, "refresh_fp32_params"):
            optimizer.refresh_fp32_params()
    elif engine.zero_optimization():
        from_masters, replica = engine.zero_load_from_fp32_weights(), engine.grid.data_parallel_id
        load_zero(optimizer, saved, stage, names, replica, from_masters=from_masters)
    else:
        load_optimizer(optimizer, saved, names)
    state = saved.state
    if not load_module_only:
        if load_lr_scheduler_states and engine.lr_scheduler is not None:
            load_schedule(engine.lr_scheduler, optimizer.param_groups, state["lr_scheduler"])
        for name in ("global_steps", "global_samples", "skipped_steps"):
            setattr(engine, name, state[name])
    return str(saved.folder), {key: value for key, value in state.items() if key not in DEEPSPEEDS}


def load_schedule(scheduler: Any, groups: list[dict[str, Any]], saved: dict[str, Any]) -> None:
    """Go on with the schedule of another stage, which may have more or fewer groups of parameters, of other rates.

    groups: the optimizer's, as loaded, whose rates count. saved: the state; what it has for each group is not taken.
    """
    rates: dict[str, Any] = {"_last_lr": [group["lr"] for group in groups]}
    if all("initial_lr" in group for group in groups):
        rates["base_lrs"] = [group["initial_lr"] for group in groups]
    scheduler.load_state_dict(_of_groups(scheduler.state_dict(), saved, rates))


def _of_groups(own: dict[str, Any], saved: dict[str, Any], rates: dict[str, Any]) -> dict[str, Any]:
    """The saved state of a schedule, or of one of those that it is made of, with what belongs to other groups."""
    state = saved | {key: own[key] for key in _BY_GROUP if key in own}
    state |= {key: value for key, value in rates.items() if key in saved}
    if "_schedulers" in saved:
        pairs = zip(own["_schedulers"], saved["_schedulers"], strict=True)
        state["_schedulers"] = [_of_groups(part, before, rates) for part, before in pairs]
    return state


def load_optimizer(optimizer: Any, saved: SavedPipeline, groups: list[Names]) -> None:
    """Give a torch optimizer the states of its parameters. groups: their names, see `grouped_names`.

    A `QuantizedAdam` goes on with what is frozen, without error-feedback residuals; of Adam's states nothing is.
    """
    own = optimizer.state_dict()
    numbered: dict[int, str] = {}
    for group, names in zip(own["param_groups"], groups, strict=True):
        group |= saved.options(names.values()) or {}
        numbered |= dict(zip(group["params"], names.values(), strict=True))
    found = saved.optimizer_state(numbered.values())
    state = {number: found[name] for number, name in numbered.items() if found.get(name)}
    loaded = {**own, "state": state}
    if loaded.pop("exchange", None) and (exchange := saved.state["optimizer"].get("exchange")):
        loaded["exchange"] = {**exchange, "memories": None, "frozen": _frozen(state)}
    optimizer.load_state_dict(loaded)


def _frozen(state: dict[int, dict[str, Any]]) -> list[list[int]]:
    """Numbers of the parameters whose variance is frozen, those together that were frozen after equally many steps."""
    at = {number: values["frozen_at"] for number, values in sorted(state.items()) if values["frozen_at"]}
    return [[number for number, step in at.items() if step == each] for each in sorted(set(at.values()))]


def load_zero(
    optimizer: Any,
    saved: SavedPipeline,
    stage: Stage | ModuleStage,
    groups: list[Names],
    replica: int,
    *,
    from_masters: bool,
) -> None:
    """Give DeepSpeed's ZeRO 1 optimizer of one rank its share of the states. groups: the names of all parameters.

    from_masters: DeepSpeed's `load_from_fp32_weights`; otherwise masters are made of the weights, loaded before.
    """
    masters = _attribute(optimizer, "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
    base = optimizer.optimizer.state_dict()
    partitions: list[Tensor] = []
    for number, names in enumerate(groups):
        base["param_groups"][number] |= saved.options(names.values()) or {}
        partition = torch.zeros_like(masters[number], device="cpu")
        flat: dict[str, Any] = {}
        found = saved.optimizer_state(names.values())
        for own, name in names.items():
            mapping = stage.get_parameter(own)._hp_mapping  # type: ignore[attr-defined]  # DeepSpeed's
            if mapping is None:
                continue  # all of it belongs to other replicas
            here, there = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
            for key, value in found[name].items():
                if not torch.is_tensor(value) or value.dim() == 0:
                    flat[key] = value
                    continue
                target = partition if key == MASTER else flat.setdefault(key, torch.zeros_like(partition))
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
    shares = [*[None] * replica, content]
    optimizer.load_state_dict(shares, load_optimizer_states=True, load_from_fp32_weights=from_masters)


def _attribute(optimizer: Any, *names: str) -> Any:
    """Get the attribute that has one of these names: DeepSpeed's optimizers call the same things differently."""
    return getattr(optimizer, next(name for name in names if hasattr(optimizer, name)))
