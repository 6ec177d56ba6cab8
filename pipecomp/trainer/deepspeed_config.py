"""The engine's configuration, from `transformers.TrainingArguments` and the user's DeepSpeed configuration."""

from __future__ import annotations

import copy
import math
import os
from pathlib import Path
from typing import Any

from pipecomp.config import Activations, Config, read_json_object
from pipecomp.config.checks import require_objects
from pipecomp.elastic import RECORDS
from pipecomp.errors import ConfigError, require

SECTION = "pipecomp"


def engine_config(
    args: Any,
    pipecomp: str | os.PathLike | dict[str, Any] | None,
    *,
    complete: bool = False,
    sequences: int = 1,
    save_messages: bool = True,
) -> dict[str, Any]:
    """Return the configuration for `pipecomp.initialize`.

    Args:
        args: TrainingArguments. `args.deepspeed` may be the DeepSpeed configuration.
        pipecomp: The "pipecomp" section, or a DeepSpeed configuration (a dict with that key, or a JSON file). `args`
            supplies values that are missing or "auto".
        complete: `pipecomp` is a DeepSpeed configuration with all values, optimizer included; return it unchanged.
        sequences: sequences of the model for each sample that `args` counts.
        save_messages: the default of store.in_checkpoints.

    Raises:
        ConfigError: If a value contradicts `args`, or a pipeline does not support it.
    """
    config = _read_config(args, pipecomp)
    if complete:
        return config
    own = {
        "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", args.per_device_train_batch_size),
        "gradient_accumulation_steps": ("gradient_accumulation_steps", args.gradient_accumulation_steps),
        "gradient_clipping": ("max_grad_norm", float(args.max_grad_norm or 0)),
    }
    for key, (name, value) in own.items():
        _require_equal(key, config.get(key, "auto"), value, name)
        config[key] = value
    config["train_micro_batch_size_per_gpu"] *= sequences
    if config["gradient_clipping"] <= 0:  # no clipping, but the norm is still logged
        config["gradient_clipping"] = math.inf
    require(
        config.pop("train_batch_size", "auto") == "auto",
        "train_batch_size",
        "a number",
        "'auto': the arguments and the number of processes determine it",
    )
    for name in ("bf16", "fp16"):
        part = config.setdefault(name, {})
        _require_equal(f"{name}.enabled", part.get("enabled", "auto"), bool(getattr(args, name)), name)
        part["enabled"] = bool(getattr(args, name))
        if not part["enabled"]:
            config.pop(name)
    _check_optimizer(args, config)
    stage = config.get("zero_optimization", {}).get("stage", 1 if args.bf16 or args.fp16 else 0)
    require(stage in (0, 1), "zero_optimization.stage", stage, "0 or 1 in a pipeline")
    if args.fp16:
        config.setdefault("zero_optimization", {}).setdefault("stage", stage)
    if args.bf16:
        if stage == 0 and str(getattr(args.save_strategy, "value", "")) != "no" and not args.save_only_model:
            allowed = "1 with bf16, or save_strategy 'no': DeepSpeed cannot load bf16 checkpoints of stage 0"
            raise ConfigError("zero_optimization.stage", stage, allowed)
        config.setdefault("zero_optimization", {}).setdefault("stage", stage)
        if stage == 1:
            config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
    config.setdefault("zero_allow_untested_optimizer", True)  # the engine tests that it treats every weight alike
    config.setdefault("steps_per_print", 10**9)  # the callbacks log progress
    section = config[SECTION]
    section.setdefault("seed", args.seed)
    _set_default_scales(section, no_dropout=getattr(args, "disable_dropout", False))
    settings = Config.from_dict(section)
    if settings.activations.method == "aqsgd" and settings.store.backend == "lmdb":
        store = section.setdefault("store", {})
        store.setdefault("path", str(Path(args.output_dir) / "messages"))
        store.setdefault("in_checkpoints", save_messages)
    if settings.elastic.active:
        section["elastic"] = {"path": str(Path(args.output_dir) / RECORDS), **section["elastic"]}
    if settings.gradients.exchanges_in_optimizer:
        if args.weight_decay:
            allowed = f"0 with gradients.method {settings.gradients.method!r}, which has one parameter group"
            raise ConfigError("weight_decay", args.weight_decay, allowed)
        config["optimizer"] = {"type": "AdamW", "params": _adam_params(args)}
    return config


def _set_default_scales(section: dict[str, Any], *, no_dropout: bool) -> None:
    """Set "auto" as the scale of quantized activations that have none. no_dropout: the trainer disables dropout."""
    activations = section.get("activations")
    if isinstance(activations, dict) and activations.get("method") in Activations.QUANTIZED:
        activations.setdefault("scale", "auto")
        if activations["scale"] == "auto" and no_dropout:
            activations.setdefault("gain", "unbiased")


def rendezvous_config(args: Any, pipecomp: str | os.PathLike | dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the user's configuration, for the keys and the transport that rendezvous needs.

    None if it cannot be read: the error is raised after rendezvous, on all ranks.
    """
    try:
        return _read_config(args, pipecomp)
    except ConfigError:
        return None


def _read_config(args: Any, pipecomp: str | os.PathLike | dict[str, Any] | None) -> dict[str, Any]:
    """Read the user's DeepSpeed configuration with its "pipecomp" section."""
    complete = isinstance(pipecomp, (str, os.PathLike)) or (isinstance(pipecomp, dict) and SECTION in pipecomp)
    require(
        not complete or args.deepspeed is None,
        "deepspeed",
        args.deepspeed,
        "not set if pipecomp= is a DeepSpeed configuration",
    )
    source = pipecomp if complete else args.deepspeed
    if source is None or isinstance(source, dict):
        config = copy.deepcopy(source or {})
    else:
        config = read_json_object("pipecomp", source)
    if not complete and pipecomp is not None:
        require(isinstance(pipecomp, dict), "pipecomp", pipecomp, "a dict or the path of a JSON file")
        require(
            config.get(SECTION, pipecomp) == pipecomp,
            "pipecomp",
            pipecomp,
            "the same section as in the deepspeed argument, or only one of them",
        )
        config[SECTION] = copy.deepcopy(pipecomp)
    require(
        isinstance(config.setdefault(SECTION, {}), dict), SECTION, config[SECTION], "an object with keys and values"
    )
    require_objects(config)
    return config


def _require_equal(key: str, got: object, wanted: object, name: str) -> None:
    require(got in ("auto", wanted), key, got, f"'auto' or {wanted!r}, the value of TrainingArguments.{name}")


def _adam_params(args: Any) -> dict[str, Any]:
    return {
        "lr": args.learning_rate,
        "betas": [args.adam_beta1, args.adam_beta2],
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
    }


def _check_optimizer(args: Any, config: dict[str, Any]) -> None:
    """Check that the optimizer section equals the arguments or is "auto": the trainer makes optimizer and schedule."""
    optimizer = config.pop("optimizer", {})
    require(
        optimizer.get("type", "AdamW").lower() in ("adam", "adamw"),
        "optimizer.type",
        optimizer.get("type"),
        "AdamW; TrainingArguments.optim selects the implementation",
    )
    known = _adam_params(args)
    names = {"lr": "learning_rate", "betas": "adam_beta1 and adam_beta2", "eps": "adam_epsilon"}
    for key, value in optimizer.get("params", {}).items():
        require(
            key in (*known, "torch_adam"),
            f"optimizer.params.{key}",
            value,
            f"{', '.join(known)} as in TrainingArguments",
        )
        if key in known:
            _require_equal(f"optimizer.params.{key}", value, known[key], names.get(key, key))
    require(
        "scheduler" not in config,
        "scheduler",
        config.get("scheduler"),
        "not set: use TrainingArguments.lr_scheduler_type",
    )
