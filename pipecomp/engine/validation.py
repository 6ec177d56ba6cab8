"""Validate the configuration before an engine is built: DeepSpeed's keys, the section "pipecomp", the split."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pipecomp.config import Config, read_json_object
from pipecomp.config.activations import FEWEST, bits_text
from pipecomp.config.checks import require_objects
from pipecomp.distributed.consistency import AllRanks, settings_of
from pipecomp.distributed.placement import machine
from pipecomp.distributed.rendezvous import KEYS, check_network, check_processes
from pipecomp.errors import ConfigError, SplitError, require
from pipecomp.gradient_config import Gradients
from pipecomp.rank_layout import RankLayout
from pipecomp.stages import plan
from pipecomp.stages.partition.loading import check_trainable, resolve
from pipecomp.stages.partition.modules import Modules
from pipecomp.stages.partition.planning import SplitPlan
from pipecomp.tls.process_group import BACKEND

SECTION = "pipecomp"
_INTERVAL = "activation_checkpoint_interval"
_PARTS = ("activations", "store", "gradients", "transport")
_NUMBERS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")


class RunSetup(NamedTuple):
    """A validated run, the same on all ranks.

    ds_config: DeepSpeed's configuration. settings: its section "pipecomp". recompute: checkpoint each block.
    ranks: their order.
    """

    ds_config: dict[str, Any]
    settings: Config
    plan: SplitPlan
    recompute: bool
    ranks: RankLayout


def validate(
    model: Any,
    num_stages: int | None,
    cuts: Sequence[int] | None,
    config: Any,
    all_ranks: AllRanks,
    *,
    own_loss: bool,
    given: Mapping[str, bool],
) -> RunSetup:
    """Read and check the arguments of `initialize`, and compare all ranks.

    Args:
        model: See `initialize`.
        num_stages: See `initialize`.
        cuts: See `initialize`.
        config: See `initialize`.
        all_ranks: Compares the ranks.
        own_loss: Whether this rank has a `loss_fn`; only the last stage needs one.
        given: Whether each other optional argument was given.

    Raises:
        ConfigError: A setting is invalid or would have no effect.
        SplitError: The model cannot be cut as requested.
        LinkError: The ranks differ, or another rank's configuration is invalid.
    """
    with all_ranks.collective_errors():
        if config is None:
            raise ConfigError("config", config, "a dict or the path of a JSON file")
        ds_config = copy.deepcopy(config) if isinstance(config, dict) else read_json_object("config", config)
        check_section(ds_config)
        settings = Config.from_dict(ds_config.get(SECTION, {}))
        _check_transport(settings)
        source = model if isinstance(model, Modules) else resolve(model)
        split_plan = plan(source, num_stages=num_stages, cuts=cuts, tie=settings.tie)
        if isinstance(source, Modules):
            _check_modules(settings, own_loss)
        elif given["optimizer"] or "optimizer" in ds_config:
            check_trainable(source)
        if (given["optimizer"] or "optimizer" in ds_config) and not any(split_plan.trained):
            raise SplitError(f"{split_plan.model_class} has no parameter to train, all are frozen (requires_grad)")
        _check_stages(settings, split_plan)
        check_auto(ds_config)
        check_precision(ds_config)
        check_timers(ds_config, split_plan.num_stages)
        check_gradients(settings.gradients, ds_config, split_plan, dist.get_world_size() // split_plan.num_stages)
        _set_defaults(ds_config)
        recompute = take_activation_checkpointing(ds_config)
    facts = {
        **settings_of(ds_config, SECTION, settings.shared()),
        "model": split_plan.model_class,
        "cuts of the model": split_plan.cuts,
        "parameters of its stages": split_plan.parameters,
        "trained parameters of its stages": split_plan.trained,
        **{f"whether {name} is given": is_given for name, is_given in given.items()},
    }
    if isinstance(model, torch.nn.Module):
        facts["dtype of the model"] = str(next(model.parameters()).dtype)
    all_ranks.assert_same_on_all_ranks(facts)
    ranks = RankLayout(split_plan.num_stages, dist.get_world_size() // split_plan.num_stages, settings.layout)
    machines = all_ranks.all_gather_object(machine())
    with all_ranks.collective_errors():
        ranks.check("layout", machines)
    return RunSetup(ds_config, settings, split_plan, recompute, ranks)


def check_section(ds_config: dict[str, Any]) -> None:
    """Refuse a misspelt section "pipecomp" and its parts at the top level: DeepSpeed ignores unknown keys."""
    require_objects(ds_config)
    for key, value in ds_config.items():
        similar = key != SECTION and difflib.get_close_matches(key.lower(), [SECTION], cutoff=0.7)
        require(not similar, key, value, f"the section's name {SECTION!r}")
        require(key not in _PARTS, key, value, "", f"Move {key!r} into the section {SECTION!r}.")


def _check_transport(settings: Config) -> None:
    """Require that the configured backend is the one the processes joined with, and is fit for their network."""
    transport, joined = settings.transport, dist.get_backend()
    if dist.get_world_size() == 1:
        return
    if joined == BACKEND:
        hint = f"The processes have joined with {KEYS}."
        require(transport.backend != "gloo", "transport.backend", "gloo", "'tls' or 'auto'", hint)
    elif transport.backend == "tls":
        hint = f"The processes have joined over {joined}. Set {KEYS} to the keys, or start with this configuration."
        raise ConfigError("transport.backend", "tls", "'auto'", hint)
    else:
        check_network(transport.trusted_network)


def _check_modules(settings: Config, own_loss: bool) -> None:
    a = settings.activations
    for key in FEWEST:
        allowed, hint = "numbers, or errors without mbit_per_s, for plain modules", "Only language models are measured."
        require(not a.measured(key), f"activations.{key}", bits_text(getattr(a, key)), allowed, hint)
    require(own_loss, "loss_fn", None, "a function of the last block's result and the labels")


def _check_stages(settings: Config, split_plan: SplitPlan) -> None:
    stages, a = split_plan.num_stages, settings.activations
    a.check_links(stages - 1)
    check_processes("num_stages", stages)
    if stages == 1:
        for key, got, allowed in (
            ("activations.method", a.method, "none"),
            ("activations.eval", a.eval, "full"),
            ("in_flight", settings.in_flight, "auto"),
        ):
            require(got == allowed, key, got, f"{allowed!r} with one stage", "One stage has no links.")
    if split_plan.lowest_trained and settings.store.on_write_error == "continue":
        hint = "The gradient packet tells the stage before which activations were not cached; this link has none."
        raise ConfigError("store.on_write_error", "continue", "'stop' where the first stage trains nothing", hint)


def check_auto(ds_config: dict[str, Any]) -> None:
    """Refuse "auto" where neither DeepSpeed nor the engine resolves it, but a recipe or Hugging Face's Trainer does."""
    values = {key: ds_config.get(key) for key in _NUMBERS}
    for name in ("fp16", "bf16"):
        values[f"{name}.enabled"] = ds_config.get(name, {}).get("enabled")
    for name in ("optimizer", "scheduler"):
        params = ds_config.get(name, {}).get("params", {})
        values |= {f"{name}.params.{key}": value for key, value in params.items()}
    for key, value in values.items():
        hint = "Only recipes, pipecomp train and PipelineTrainer resolve 'auto' here."
        require(value != "auto", key, value, "a value", hint)


def check_precision(ds_config: dict[str, Any]) -> None:
    """Refuse loss scaling that is wrong over stages.

    DeepSpeed's fp16 optimizers without ZeRO miss overflows and count weights of several stages more than once; with
    torch_autocast it scales the loss of the last stage alone.
    """
    zero = ds_config.get("zero_optimization", {}).get("stage", 0)
    fp16 = ds_config.get("fp16", {}).get("enabled")
    hint = "Loss scaling is correct over stages only there."
    require(not fp16 or zero == 1, "zero_optimization.stage", zero, "1 with fp16", hint)
    autocast = ds_config.get("torch_autocast", {})
    half = autocast.get("dtype") in ("fp16", "float16", "torch.float16", "half")
    hint = "With float16 each rank would have its own loss scale. For float16 use the section fp16 with ZeRO 1."
    require(not autocast.get("enabled") or not half, "torch_autocast.dtype", autocast.get("dtype"), "bfloat16", hint)


def check_timers(ds_config: dict[str, Any], stages: int) -> None:
    """Refuse step timers with several stages: DeepSpeed starts its timer of the backward pass twice and fails."""
    timers = {
        "wall_clock_breakdown": ds_config.get("wall_clock_breakdown"),
        "flops_profiler.enabled": (ds_config.get("flops_profiler") or {}).get("enabled"),
    }
    hint = "DeepSpeed's timers fail there. engine.comm_stats() reports where time goes."
    for key, value in timers.items():
        require(stages == 1 or not value, key, value, "false with several stages", hint)


def check_gradients(options: Gradients, ds_config: dict[str, Any], plan: SplitPlan, replicas: int) -> None:
    """Refuse gradient compression that has no effect, or DeepSpeed settings that would bypass it."""
    zero = ds_config.get("zero_optimization", {})
    half = [name for name in ("bf16", "fp16") if ds_config.get(name, {}).get("enabled")]
    if options.local is not None:
        key, steps = "gradients.local_steps", options.local_steps
        require(replicas > 1, key, steps, "null with one replica", "There is nothing to average.")
        stage, hint = zero.get("stage", 0), "Replicas that differ cannot share optimizer states."
        require(stage == 0, "zero_optimization.stage", stage, f"0 with {key}", hint)
        for name in half:
            raise ConfigError(f"{name}.enabled", True, f"false with {key}", hint)
    if options.method == "none":
        return
    key = "gradients.method"
    if replicas == 1 and (options.exchanges_in_optimizer or not plan.trained_ties):
        raise ConfigError(key, options.method, "'none' with one replica", "No gradients are exchanged.")
    if zero.get("stage", 0) >= 1:
        for name, required in (("overlap_comm", False), ("contiguous_gradients", True)):
            got = zero.get(name, required)
            require(got is required, f"zero_optimization.{name}", got, f"{required} with compressed gradients")
    dtype = ds_config.get("communication_data_type")
    require(dtype is None, "communication_data_type", dtype, f"no value with gradients.method {options.method!r}")
    if options.exchanges_in_optimizer:
        allowed, hint = "float32 training without ZeRO", "ZeRO and half precision shard the optimizer by ranks."
        require(not half and not zero.get("stage", 0), key, options.method, allowed, hint)
        kind = ds_config.get("optimizer", {}).get("type", "")
        allowed = f"Adam or AdamW with gradients.method {options.method!r}"
        require(kind.lower() in ("adam", "adamw"), "optimizer.type", kind, allowed)


def _set_defaults(ds_config: dict[str, Any]) -> None:
    """Default Adam to torch's.

    DeepSpeed's own Adams are compiled at first use, on a GPU by nvcc, which torch does not include. They also store
    their step counts in another place, so that a checkpoint would load on one kind of device only.
    """
    optimizer = ds_config.get("optimizer", {})
    if optimizer.get("type", "").lower() in ("adam", "adamw"):
        optimizer.setdefault("params", {}).setdefault("torch_adam", True)


def take_activation_checkpointing(ds_config: dict[str, Any]) -> bool:
    """Disable activation checkpointing in DeepSpeed's configuration; returns whether to checkpoint each block.

    DeepSpeed would checkpoint whole layers of its PipelineModule, that is whole stages. Hugging Face's blocks are
    checkpointed instead, by `"pipeline": {"activation_checkpoint_interval": 1}`.

    Raises:
        ConfigError: A setting that cannot take effect: another interval, reentrant checkpointing, or the section
            "activation_checkpointing", which configures DeepSpeed's own function.
    """
    for key, value in ds_config.get("activation_checkpointing", {}).items():
        hint = f"Use pipeline.{_INTERVAL}: 1."
        require(not value, f"activation_checkpointing.{key}", value, "no value", hint)
    section = ds_config.get("pipeline", {})
    if not isinstance(section, dict):  # DeepSpeed's "auto"
        return False
    interval = section.get(_INTERVAL, 0)
    valid = interval in (0, 1) and not isinstance(interval, bool)
    require(valid, f"pipeline.{_INTERVAL}", interval, "0, or 1 to checkpoint each block")
    reentrant = bool(interval and section.get("use_reentrant"))
    hint = "Reentrant checkpointing needs inputs with gradients, which frozen layers lack."
    require(not reentrant, "pipeline.use_reentrant", True, f"false with {_INTERVAL} 1", hint)
    if interval:
        section[_INTERVAL] = 0
    return bool(interval)
