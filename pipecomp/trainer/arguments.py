"""Checks for arguments, methods and attributes of transformers.Trainer that a pipeline does not support.

A setting without effect raises a ConfigError that names it. `PipelineTrainer` does not inherit from Trainer; it
implements the methods and attributes that a pipeline supports.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer_pt_utils import AcceleratorConfig

from pipecomp.config.checks import require_choice
from pipecomp.errors import ConfigError, require

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
SAMPLING = ("random", "sequential", "group_by_length")

# Arguments that must be false or empty, and the allowed value with its reason.
_UNSUPPORTED = {
    "auto_find_batch_size": "False: one stage alone may run out of memory",
    "batch_eval_metrics": "False: rank 0 receives logits after the last batch",
    "bf16_full_eval": "False: evaluation uses the precision of training",
    "ddp_broadcast_buffers": "not set: a pipeline does not use DistributedDataParallel",
    "ddp_bucket_cap_mb": "not set: a pipeline does not use DistributedDataParallel",
    "ddp_find_unused_parameters": "not set: a pipeline does not use DistributedDataParallel",
    "ddp_static_graph": "not set: a pipeline does not use DistributedDataParallel",
    "debug": "''",
    "enable_jit_checkpoint": "False: PipelineTrainer's save_on_signal saves on all ranks",
    "eval_use_gather_object": "False: logits of any structure are gathered",
    "fp16_full_eval": "False: evaluation uses the precision of training",
    "fsdp": "not set: a pipeline's stages are not sharded; zero_optimization.stage 1 shards optimizer states",
    "liger_kernel_config": "not set",
    "neftune_noise_alpha": "not set",
    "optim_args": "not set: the supported optimizers take none",
    "optim_target_modules": "not set: the supported optimizers take none",
    "parallelism_config": "not set: num_stages and the number of processes determine the layout",
    "push_to_hub": "False: push the folder that save_model writes",
    "save_on_each_node": "False: rank 0 writes the model, every rank its own state",
    "torch_compile": "False: a stage is not compiled",
    "use_cache": "False: stages keep no cache",
    "use_liger_kernel": "False",
}
# Environment variables of `accelerate launch` that must be off, and the reason.
_LAUNCHER_VARIABLES = {
    "ACCELERATE_DYNAMO_BACKEND": "not set: a stage is not compiled",
    "ACCELERATE_USE_FSDP": "not set: a pipeline's stages are not sharded",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "not set: num_stages and the number of processes determine the layout",
}
# Note: arguments read once, by the trainer or by its engine. transformers.Trainer reads most of them at every train(),
# so `check_unchanged` refuses a later change, which would have no effect.
READ_BY_TRAINER = ("bf16", "fp16", "max_grad_norm", "per_device_train_batch_size")
READ_BY_ENGINE = (
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


# TRL's configurations, and the trainers that use all of their fields.
_TRL_TRAINERS = {"SFTConfig": "PipelineSFTTrainer", "DPOConfig": "PipelineDPOTrainer"}


def check_class(args: Any, allowed: str) -> None:
    """Raise ConfigError for a configuration of TRL with fields that only another trainer uses.

    allowed: the name of the trainer's own class of arguments.
    """
    for kind in type(args).__mro__:
        name = kind.__name__
        if kind.__module__.startswith("trl.") and not name.startswith("_") and name != allowed:
            other = _TRL_TRAINERS.get(name)
            remedy = f"Use pipecomp.{other}, which does what the {name} says" if other else "No trainer here uses it"
            raise ConfigError("args", f"a {name}", allowed, remedy)


def check(args: Any) -> None:
    """Check that a pipeline supports the arguments.

    Args:
        args: TrainingArguments.

    Raises:
        ConfigError: If an argument is not supported; the error names it.
    """
    for name, allowed in _UNSUPPORTED.items():
        value = getattr(args, name, None)
        require(not value, name, value, allowed)
    require_choice("optim", str(getattr(args.optim, "value", args.optim)), OPTIMIZERS)
    require_choice("train_sampling_strategy", args.train_sampling_strategy, SAMPLING)
    require(
        args.label_names in (None, ["labels"]),
        "label_names",
        args.label_names,
        "['labels']: a stage's loss takes one tensor of labels",
    )
    require(
        args.skip_memory_metrics,
        "skip_memory_metrics",
        False,
        "True: trainer.engine.comm_stats() reports memory",
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
    for end in ("", "_kwargs"):
        old, wanted = getattr(args, f"gradient_checkpointing{end}", None), checkpointing(args, end)
        allowed = f"{wanted!r}, the value of activation_checkpointing{end}, which replaces it: set that one or both"
        require(not old or old == wanted, f"gradient_checkpointing{end}", old, allowed)
    accelerate = args.accelerator_config
    for field in dataclasses.fields(AcceleratorConfig):
        value = getattr(accelerate, field.name, field.default)  # accelerate removes some after use
        require(
            value == field.default, f"accelerator_config.{field.name}", value, "not set: the trainer loads its own data"
        )
    _check_launcher_environment(args)
    require(
        not args.save_only_model or not args.load_best_model_at_end,
        "save_only_model",
        True,
        "False with load_best_model_at_end, which needs complete checkpoints",
    )
    wants_metric = args.load_best_model_at_end or str(getattr(args.save_strategy, "value", "")) == "best"
    require(
        not wants_metric or args.metric_for_best_model is not None,
        "metric_for_best_model",
        None,
        "a metric with save_strategy 'best'",
    )
    require(not args.fp16 or torch.cuda.is_available(), "fp16", True, "False on a CPU; use bf16 there")


def _check_launcher_environment(args: Any) -> None:
    """Check the launcher's environment variables, which transformers.Trainer would follow."""
    for name, allowed in _LAUNCHER_VARIABLES.items():
        value = os.environ.get(name, "")
        require(value.lower() in ("", "0", "f", "false", "n", "no", "off"), name, value, allowed)
    require(
        args.deepspeed is not None or getattr(args, "deepspeed_plugin", None) is None,
        "ACCELERATE_USE_DEEPSPEED",
        "true",
        "not set: pass DeepSpeed's configuration as pipecomp=",
    )
    precision = getattr(args, "mixed_precision", "no")
    require(
        precision == "no" or args.bf16 or args.fp16,
        "ACCELERATE_MIXED_PRECISION",
        precision,
        "not set, or the precision of TrainingArguments, where bf16 and fp16 are off",
    )


def checkpointing(args: Any, end: str = "") -> Any:
    """Return `args.activation_checkpointing`, or `gradient_checkpointing` of older versions. end: "" or "_kwargs"."""
    return getattr(args, f"activation_checkpointing{end}", getattr(args, f"gradient_checkpointing{end}", None))


def values(args: Any, names: Sequence[str]) -> dict[str, Any]:
    """Copy the current values of these arguments."""
    return {name: copy.deepcopy(getattr(args, name, None)) for name in names}


def check_unchanged(args: Any, used: Mapping[str, Any]) -> None:
    """Raise ConfigError if an argument differs from its `used` value."""
    for name, value in used.items():
        now = getattr(args, name, None)
        require(now == value, name, now, f"{value!r}, the value this trainer was made with: make a new trainer")


# -- the optimizer


def optimizer_factory(args: Any) -> Callable[[list], torch.optim.Optimizer]:
    """Return a function that makes the optimizer of `args.optim` from parameter groups."""
    kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
    return lambda groups: kind(groups, **options)


def parameter_groups(args: Any) -> Callable[[nn.Module], list[dict[str, Any]]]:
    """Return a function that makes Trainer's parameter groups: weight decay for all but biases and norms."""

    def groups(stage: nn.Module) -> list[dict[str, Any]]:
        decaying = set(Trainer.get_decay_parameter_names(None, stage))  # type: ignore[arg-type]  # uses no self
        named = [(name, p) for name, p in stage.named_parameters() if p.requires_grad]
        candidates = (
            {"params": [p for name, p in named if name in decaying], "weight_decay": args.weight_decay},
            {"params": [p for name, p in named if name not in decaying], "weight_decay": 0.0},
        )
        return [group for group in candidates if group["params"]]

    return groups


# -- overridden methods and attributes


# Methods of transformers.Trainer that PipelineTrainer calls, so that a subclass may override them.
_OVERRIDABLE = {
    "add_callback",
    "create_model_card",
    "end",
    "evaluate",
    "is_local_process_zero",
    "is_world_process_zero",
    "log",
    "log_metrics",
    "metrics_format",
    "num_examples",
    "pop_callback",
    "predict",
    "remove_callback",
    "save_metrics",
    "save_model",
    "save_state",
    "train",
}
_ARGUMENT = "an argument of PipelineTrainer: setting the attribute has no effect"
# Attributes that transformers.Trainer reads during training or evaluation, and the remedy.
_ATTRIBUTES = {
    "compute_loss_func": _ARGUMENT,
    "label_names": "nothing: a stage's loss takes one tensor of labels",
    "label_smoother": "label_smoothing_factor of TrainingArguments, or compute_loss_func of PipelineTrainer",
    "loss_is_scaled_for_ga": "nothing: micro-batches are weighted by their number of labels",
    "lr_scheduler": "optimizers=(None, a function of the optimizer), an argument of PipelineTrainer",
    "model": "a new PipelineTrainer for another model",
    "model_accepts_loss_kwargs": "nothing: micro-batches are weighted by their number of labels",
    "model_init": _ARGUMENT,
    "model_wrapped": "a new PipelineTrainer for another model",
    "neftune_noise_alpha": "nothing: a pipeline adds no noise to embeddings",
    "optimizer": "optimizers=(a function of parameter groups, None), an argument of PipelineTrainer",
    "optimizer_cls_and_kwargs": _ARGUMENT,
}


def _is_supported(name: str) -> bool:
    return name.startswith("__") or not hasattr(Trainer, name) or name in _OVERRIDABLE


def check_subclass(subclass: type, base: type) -> None:
    """Raise ConfigError if `subclass` or one of its mixins overrides a method of Trainer that `base` never calls."""
    for kind in [kind for kind in subclass.__mro__ if kind not in base.__mro__]:
        for name, member in kind.__dict__.items():
            is_method = callable(member) or isinstance(member, (staticmethod, classmethod))
            allowed = "none: this trainer does not call it"
            require(not is_method or _is_supported(name), f"{kind.__name__}.{name}", "a method", allowed)


def check_attribute(trainer: Any, name: str, value: Any) -> None:
    """Raise ConfigError if a script sets an attribute that only transformers.Trainer reads."""
    kind = type(trainer).__name__
    require(name not in _ATTRIBUTES, f"{kind}.{name}", value, _ATTRIBUTES.get(name, ""))
    require(_is_supported(name), f"{kind}.{name}", value, "nothing: this trainer does not call it")
