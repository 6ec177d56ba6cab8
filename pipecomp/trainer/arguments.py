"""`transformers.TrainingArguments` as an engine's configuration, and what of Trainer a pipeline refuses.

An argument that could have no effect is a ConfigError that names it; none is ignored.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer_pt_utils import AcceleratorConfig

from pipecomp.config import Config, read_json_object
from pipecomp.errors import ConfigError, require

SECTION = "pipecomp"
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
SAMPLING = ("random", "sequential", "group_by_length")

# Refused if true, or not empty.
_REFUSED = {
    "auto_find_batch_size": "False: all stages would have to run out of memory together",
    "batch_eval_metrics": "False: logits come to the first process once all batches are done",
    "bf16_full_eval": "False: evaluation computes in the precision of training",
    "ddp_broadcast_buffers": "not set: there is no DistributedDataParallel here",
    "ddp_bucket_cap_mb": "not set: there is no DistributedDataParallel here",
    "ddp_find_unused_parameters": "not set: there is no DistributedDataParallel here",
    "ddp_static_graph": "not set: there is no DistributedDataParallel here",
    "debug": "''",
    "enable_jit_checkpoint": "False: save_on_signal of PipelineTrainer does that on all ranks",
    "eval_use_gather_object": "False: logits of any form are gathered already",
    "fp16_full_eval": "False: evaluation computes in the precision of training",
    "fsdp": "not set: a pipeline's stages are not sharded; zero_optimization.stage 1 shards optimizer states",
    "liger_kernel_config": "not set",
    "neftune_noise_alpha": "not set",
    "optim_args": "not set: the optimizers of optim take none",
    "optim_target_modules": "not set: the optimizers of optim take none",
    "parallelism_config": "not set: num_stages and the number of processes say how the work is spread",
    "push_to_hub": "False: push the folder that save_model writes",
    "save_on_each_node": "False: the model is written by the first process, every rank writes its own state beside it",
    "torch_compile": "False: a stage is not compiled",
    "use_cache": "False: stages keep no cache",
    "use_liger_kernel": "False",
}
# What `accelerate launch` sets for Trainer, and instead of what.
_LAUNCHED = {
    "ACCELERATE_DYNAMO_BACKEND": "not set: a stage is not compiled",
    "ACCELERATE_USE_FSDP": "not set: a pipeline's stages are not sharded",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "not set: num_stages and the number of processes say how the work is spread",
}
# Read once; Trainer reads most of them whenever it trains. When the trainer is made, and when its engine is made.
AT_FIRST = ("bf16", "fp16", "max_grad_norm")
BY_ENGINE = (
    "activation_checkpointing",
    "activation_checkpointing_kwargs",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
    "learning_rate",
    "optim",
    "weight_decay",
)


def check(args: Any) -> None:
    """Check arguments for what a pipeline cannot do.

    Args:
        args: TrainingArguments.

    Raises:
        ConfigError: Naming the argument.
    """
    for name, allowed in _REFUSED.items():
        value = getattr(args, name, None)
        require(not value, name, value, allowed)
    _require_in("optim", str(getattr(args.optim, "value", args.optim)), OPTIMIZERS)
    _require_in("train_sampling_strategy", args.train_sampling_strategy, SAMPLING)
    require(
        args.label_names in (None, ["labels"]),
        "label_names",
        args.label_names,
        "['labels']: a stage's loss has one tensor of labels",
    )
    require(
        args.skip_memory_metrics,
        "skip_memory_metrics",
        False,
        "True: comm_stats() of trainer.engine has what a rank uses",
    )
    require(
        args.dataloader_in_order,
        "dataloader_in_order",
        False,
        "True: the first and the last stage load the same batches",
    )
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):  # the new name and the old
        kwargs = getattr(args, name, None) or {}
        require(
            "every_n_layers" not in kwargs and "offload" not in kwargs,
            name,
            kwargs,
            "arguments of torch.utils.checkpoint.checkpoint",
        )
    accelerate = args.accelerator_config
    for field in dataclasses.fields(AcceleratorConfig):
        value = getattr(accelerate, field.name, field.default)  # some are taken out once they were used
        require(
            value == field.default, f"accelerator_config.{field.name}", value, "not set: accelerate loads no data here"
        )
    _check_launched(args)
    require(
        not args.save_only_model or not args.load_best_model_at_end,
        "save_only_model",
        True,
        "False with load_best_model_at_end, which reads complete checkpoints",
    )
    wants_metric = args.load_best_model_at_end or str(getattr(args.save_strategy, "value", "")) == "best"
    require(
        not wants_metric or args.metric_for_best_model is not None,
        "metric_for_best_model",
        None,
        "a metric with save_strategy 'best'",
    )
    require(not args.fp16 or torch.cuda.is_available(), "fp16", True, "False on a CPU; bf16 works there")


def _check_launched(args: Any) -> None:
    """What a launcher's environment says, and the arguments do not: Trainer would follow it."""
    for name, allowed in _LAUNCHED.items():
        value = os.environ.get(name, "")
        require(value.lower() in ("", "0", "f", "false", "n", "no", "off"), name, value, allowed)
    require(
        args.deepspeed is not None or getattr(args, "deepspeed_plugin", None) is None,
        "ACCELERATE_USE_DEEPSPEED",
        "true",
        "not set: give DeepSpeed's configuration as pipecomp=",
    )
    precision = getattr(args, "mixed_precision", "no")
    require(
        precision == "no" or args.bf16 or args.fp16,
        "ACCELERATE_MIXED_PRECISION",
        precision,
        "not set, or what TrainingArguments say, which have neither bf16 nor fp16",
    )


def values(args: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return what `args` say of these arguments now."""
    return {name: copy.deepcopy(getattr(args, name, None)) for name in names}


def check_unchanged(args: Any, taken: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument that is no longer what was `taken` of it."""
    for name, value in taken.items():
        now = getattr(args, name, None)
        require(now == value, name, now, f"{value!r}, with which this trainer was made: make a new one for another")


def _require_in(name: str, got: str, allowed: tuple[str, ...]) -> None:
    require(got in allowed, name, got, ", ".join(map(repr, allowed)))


# -- DeepSpeed's configuration


def engine_config(args: Any, pipecomp: str | os.PathLike | dict[str, Any] | None) -> dict[str, Any]:
    """Return the configuration for `pipecomp.initialize`.

    Args:
        args: TrainingArguments. `args.deepspeed` may be the DeepSpeed configuration.
        pipecomp: The "pipecomp" section, or a DeepSpeed configuration (a dict with that key, or a JSON file), in which
            "auto" and what is missing come from `args`.

    Raises:
        ConfigError: For a value that contradicts `args`, or that a pipeline cannot follow.
    """
    config = _given(args, pipecomp)
    own = {
        "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", args.per_device_train_batch_size),
        "gradient_accumulation_steps": ("gradient_accumulation_steps", args.gradient_accumulation_steps),
        # 0 means no clipping; the norm is logged all the same
        "gradient_clipping": ("max_grad_norm", float(args.max_grad_norm or 0) or math.inf),
    }
    for key, (name, value) in own.items():
        _agree(key, config.get(key, "auto"), value, name)
        config[key] = value
    require(
        config.pop("train_batch_size", "auto") == "auto",
        "train_batch_size",
        "a number",
        "'auto': it follows from the arguments and the processes",
    )
    for name in ("bf16", "fp16"):
        part = config.setdefault(name, {})
        _agree(f"{name}.enabled", part.get("enabled", "auto"), bool(getattr(args, name)), name)
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
            allowed = "1 with bf16, whose checkpoints DeepSpeed could not load; or save_strategy 'no'"
            raise ConfigError("zero_optimization.stage", stage, allowed)
        config.setdefault("zero_optimization", {}).setdefault("stage", stage)
        if stage == 1:
            config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
    config.setdefault("steps_per_print", 10**9)  # the callbacks report
    section = config[SECTION]
    section.setdefault("seed", args.seed)
    settings = Config.from_dict(section)
    if settings.activations.method == "aqsgd" and settings.store.backend == "lmdb":
        section.setdefault("store", {}).setdefault("path", str(Path(args.output_dir) / "messages"))
    if settings.gradients.exchanges_in_optimizer:
        if args.weight_decay:
            allowed = f"0 with gradients.method {settings.gradients.method!r}, which has one group of parameters"
            raise ConfigError("weight_decay", args.weight_decay, allowed)
        config["optimizer"] = {"type": "AdamW", "params": _adam_params(args)}
    return config


def joining_config(args: Any, pipecomp: str | os.PathLike | dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the user's configuration as far as joining the other processes needs it: keys, and which transport.

    None where it cannot be read: the others have to be told, which they are when all have joined.
    """
    try:
        return _given(args, pipecomp)
    except ConfigError:
        return None


def _given(args: Any, pipecomp: str | os.PathLike | dict[str, Any] | None) -> dict[str, Any]:
    """Read the user's DeepSpeed configuration, its "pipecomp" section in it."""
    complete = isinstance(pipecomp, (str, os.PathLike)) or (isinstance(pipecomp, dict) and SECTION in pipecomp)
    require(
        not complete or args.deepspeed is None,
        "deepspeed",
        args.deepspeed,
        "not set beside a DeepSpeed configuration as pipecomp=",
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
            "the section that the deepspeed argument has, or only one of them",
        )
        config[SECTION] = copy.deepcopy(pipecomp)
    require(
        isinstance(config.setdefault(SECTION, {}), dict), SECTION, config[SECTION], "an object with keys and values"
    )
    return config


def _agree(key: str, got: object, wanted: object, name: str) -> None:
    require(got in ("auto", wanted), key, got, f"'auto' or {wanted!r}, which is what TrainingArguments.{name} says")


def _adam_params(args: Any) -> dict[str, Any]:
    return {
        "lr": args.learning_rate,
        "betas": [args.adam_beta1, args.adam_beta2],
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
    }


def _check_optimizer(args: Any, config: dict[str, Any]) -> None:
    """Let pass sections that say what the arguments say, or "auto": the trainer makes optimizer and schedule."""
    optimizer = config.pop("optimizer", {})
    require(
        optimizer.get("type", "AdamW").lower() in ("adam", "adamw"),
        "optimizer.type",
        optimizer.get("type"),
        "AdamW; TrainingArguments.optim says which",
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
            _agree(f"optimizer.params.{key}", value, known[key], names.get(key, key))
    require(
        "scheduler" not in config,
        "scheduler",
        config.get("scheduler"),
        "not set: TrainingArguments.lr_scheduler_type says which",
    )


# -- the optimizer


def optimizer_maker(args: Any) -> Callable[[list], torch.optim.Optimizer]:
    """Return what makes the optimizer of `args.optim` from parameter groups."""
    kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
    return lambda groups: kind(groups, **options)


def parameter_groups(args: Any) -> Callable[[nn.Module], list[dict[str, Any]]]:
    """Return what makes Trainer's parameter groups: weight decay for all but biases and norms."""

    def groups(stage: nn.Module) -> list[dict[str, Any]]:
        decaying = set(Trainer.get_decay_parameter_names(None, stage))  # type: ignore[arg-type]  # uses no self
        named = [(name, p) for name, p in stage.named_parameters() if p.requires_grad]
        both = (
            {"params": [p for name, p in named if name in decaying], "weight_decay": args.weight_decay},
            {"params": [p for name, p in named if name not in decaying], "weight_decay": 0.0},
        )
        return [group for group in both if group["params"]]

    return groups
