"""What all ranks agree on before an engine is made: DeepSpeed's configuration, its section, the split of the model."""

from __future__ import annotations

import copy
import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pipecomp.config import Config, read_json_object
from pipecomp.config.activations import FEWEST, bits_text
from pipecomp.config.checks import require_objects
from pipecomp.distributed.consistency import AllRanks, settings_of
from pipecomp.distributed.rendezvous import KEYS, check_network, check_processes
from pipecomp.engine.gradient_exchange import check_gradients
from pipecomp.errors import ConfigError, SplitError, require
from pipecomp.stages import plan
from pipecomp.stages.partition.modules import Modules
from pipecomp.stages.partition.planning import SplitPlan
from pipecomp.tls.process_group import BACKEND

SECTION = "pipecomp"
_INTERVAL = "activation_checkpoint_interval"
_PARTS = ("activations", "store", "gradients", "transport")
_NUMBERS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")


class Agreed(NamedTuple):
    """ds_config: DeepSpeed's configuration. settings: its section. recomputes: whether blocks are checkpointed."""

    ds_config: dict[str, Any]
    settings: Config
    plan: SplitPlan
    recomputes: bool


def agree(
    model: Any,
    num_stages: int | None,
    cuts: Sequence[int] | None,
    config: Any,
    all_ranks: AllRanks,
    *,
    own_loss: bool,
    given: Mapping[str, bool],
) -> Agreed:
    """Read and check what `initialize` was given; the same on all ranks, or LinkError on all of them.

    own_loss: whether a loss function was given, which only the last stage needs. given: which other arguments were.
    """
    with all_ranks.collective_errors():
        ds_config = _read_config(config)
        check_section(ds_config)
        settings = Config.from_dict(ds_config.get(SECTION, {}))
        _check_transport(settings)
        split_plan = plan(model, num_stages=num_stages, cuts=cuts, tie=settings.tie)
        if isinstance(model, Modules):
            _check_modules(settings, own_loss)
        _check_stages(settings, split_plan)
        check_auto(ds_config)
        check_precision(ds_config)
        check_timers(ds_config, split_plan.num_stages)
        check_gradients(settings.gradients, ds_config, split_plan, dist.get_world_size() // split_plan.num_stages)
        _complete(ds_config)
        recomputes = take_checkpointing(ds_config)
    settings_here = settings_of(ds_config, SECTION, settings.shared())
    arguments = {f"whether {name} is given": is_given for name, is_given in given.items()}
    all_ranks.assert_same_on_all_ranks({**settings_here, **_facts(split_plan, model), **arguments})
    return Agreed(ds_config, settings, split_plan, recomputes)


def _check_transport(settings: Config) -> None:
    """What the processes have joined over is what the configuration asks for, and fit for their network."""
    transport, joined = settings.transport, dist.get_backend()
    if dist.get_world_size() == 1:
        return
    if joined == BACKEND:
        if transport.backend == "gloo":
            raise ConfigError("transport.backend", "gloo", f"'tls' or 'auto': the processes have joined with {KEYS}")
    elif transport.backend == "tls":
        allowed = (
            f"'auto', as the processes have joined over {joined}; name the keys in {KEYS}, or start with the config"
        )
        raise ConfigError("transport.backend", "tls", allowed)
    else:
        check_network(transport.trusted_network)


def _check_modules(settings: Config, own_loss: bool) -> None:
    a = settings.activations
    for key in FEWEST:
        allowed = "numbers, or errors without mbit_per_s, for plain modules: only language models are measured"
        require(not a.measured(key), f"activations.{key}", bits_text(getattr(a, key)), allowed)
    require(own_loss, "loss_fn", None, "a function of what the last block returns and the labels")


def _check_stages(settings: Config, split_plan: SplitPlan) -> None:
    stages = split_plan.num_stages
    settings.activations.check_links(stages - 1)
    check_processes("num_stages", stages)
    require(
        stages != 1 or settings.activations.method == "none",
        "activations.method",
        settings.activations.method,
        "'none' with one stage: it has no links",
    )
    for key, got, usual in (
        ("activations.eval", settings.activations.eval, "full"),
        ("in_flight", settings.in_flight, "auto"),
    ):
        require(stages != 1 or got == usual, key, got, f"{usual!r} with one stage: it has no links")
    for stage, trained in enumerate(split_plan.trained):
        if not trained:
            raise SplitError(f"stage {stage} has nothing to train, all of it is frozen: choose other cuts")


def _facts(split_plan: SplitPlan, model: Any) -> dict[str, Any]:
    """Tell what of the model must be the same on all ranks."""
    facts: dict[str, Any] = {
        "model": split_plan.model_class,
        "cuts of the model": split_plan.cuts,
        "parameters of its stages": split_plan.parameters,
        "trained parameters of its stages": split_plan.trained,
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


def check_section(ds_config: dict[str, Any]) -> None:
    """Refuse the section under a similar name, and its parts outside: DeepSpeed takes any key, and nothing happens.

    Refuse sections of DeepSpeed's that are none, too.
    """
    require_objects(ds_config)
    for key, value in ds_config.items():
        meant = key != SECTION and difflib.get_close_matches(key.lower(), [SECTION], cutoff=0.7)
        require(not meant, key, value, f"the section's name {SECTION!r}")
        require(key not in _PARTS, key, value, f"nothing here: {key!r} belongs into the section {SECTION!r}")


def check_auto(ds_config: dict[str, Any]) -> None:
    """Refuse an "auto" of a recipe's configuration, or of one for Hugging Face's trainer, where DeepSpeed has none."""
    values = {key: ds_config.get(key) for key in _NUMBERS}
    for name in ("fp16", "bf16"):
        values[f"{name}.enabled"] = ds_config.get(name, {}).get("enabled")
    for name in ("optimizer", "scheduler"):
        params = ds_config.get(name, {}).get("params", {})
        values |= {f"{name}.params.{key}": value for key, value in params.items()}
    known = "a value: only recipes, pipecomp train and PipelineTrainer know what 'auto' stands for"
    for key, value in values.items():
        require(value != "auto", key, value, known)


def check_precision(ds_config: dict[str, Any]) -> None:
    """Refuse loss scales that are wrong over stages.

    DeepSpeed's fp16 optimizers without ZeRO miss overflows and count weights of several stages more than once; with
    torch_autocast it scales the loss of the last stage alone.
    """
    zero = ds_config.get("zero_optimization", {}).get("stage", 0)
    require(
        not ds_config.get("fp16", {}).get("enabled") or zero == 1,
        "zero_optimization.stage",
        zero,
        "1 with fp16, whose loss scaling is right only there",
    )
    autocast = ds_config.get("torch_autocast", {})
    require(
        not autocast.get("enabled") or autocast.get("dtype") not in ("fp16", "float16", "torch.float16", "half"),
        "torch_autocast.dtype",
        autocast.get("dtype"),
        "bfloat16: each rank would have a loss scale of its own, or the section fp16 with ZeRO 1",
    )


def check_timers(ds_config: dict[str, Any], stages: int) -> None:
    """Refuse what times steps: with several stages DeepSpeed starts a timer of the backward pass twice, and fails."""
    timed = {"wall_clock_breakdown": ds_config.get("wall_clock_breakdown")}
    timed["flops_profiler.enabled"] = (ds_config.get("flops_profiler") or {}).get("enabled")
    for key, value in timed.items():
        allowed = "false with several stages, where DeepSpeed cannot; engine.comm_stats() tells where time goes"
        require(stages == 1 or not value, key, value, allowed)


def _complete(ds_config: dict[str, Any]) -> None:
    """Add settings that DeepSpeed needs and nobody would write down, the same on a GPU and without."""
    optimizer = ds_config.get("optimizer", {})
    if optimizer.get("type", "").lower() in ("adam", "adamw"):
        # DeepSpeed's own ones are compiled at first use, that for GPUs by nvcc, which torch does not bring; and where
        # they keep their steps, torch's does not look: a checkpoint would be for one kind of device. torch's is there.
        optimizer.setdefault("params", {}).setdefault("torch_adam", True)


def take_checkpointing(ds_config: dict[str, Any]) -> bool:
    """Take activation checkpointing out of DeepSpeed's hands, and say whether blocks are to be recomputed.

    DeepSpeed would checkpoint whole layers of its PipelineModule, and a stage is one of these. So its configuration is
    changed to do nothing, and Hugging Face's blocks are checkpointed, each on its own.

    The setting is `"pipeline": {"activation_checkpoint_interval": 1}`. Raises ConfigError for what cannot take effect:
    other intervals, reentrant checkpointing, and the section "activation_checkpointing", which is about DeepSpeed's own
    function for it.
    """
    for key, value in ds_config.get("activation_checkpointing", {}).items():
        require(not value, f"activation_checkpointing.{key}", value, f"nothing; use pipeline.{_INTERVAL}: 1")
    section = ds_config.get("pipeline", {})
    if not isinstance(section, dict):  # DeepSpeed's "auto"
        return False
    interval = section.get(_INTERVAL, 0)
    require(
        interval in (0, 1) and not isinstance(interval, bool),
        f"pipeline.{_INTERVAL}",
        interval,
        "0, or 1: each block of the model on its own",
    )
    require(
        not interval or not section.get("use_reentrant"),
        "pipeline.use_reentrant",
        True,
        f"false with {_INTERVAL} 1: frozen inputs need no gradient",
    )
    if interval:
        section[_INTERVAL] = 0
    return bool(interval)
