"""Refuses arguments, methods and attributes of transformers.Trainer that a pipeline cannot follow.

Whatever would have no effect is a ConfigError that names it. `PipelineTrainer` is not a Trainer: it has those of its
methods and attributes that a pipeline can follow.
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
from pipecomp.errors import require

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
AT_FIRST = ("bf16", "fp16", "max_grad_norm", "per_device_train_batch_size")
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
    require_choice("optim", str(getattr(args.optim, "value", args.optim)), OPTIMIZERS)
    require_choice("train_sampling_strategy", args.train_sampling_strategy, SAMPLING)
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
    for end in ("", "_kwargs"):
        old, wanted = getattr(args, f"gradient_checkpointing{end}", None), checkpointing(args, end)
        allowed = f"{wanted!r}, as activation_checkpointing{end}, its new name: change that one, or both"
        require(not old or old == wanted, f"gradient_checkpointing{end}", old, allowed)
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


def checkpointing(args: Any, end: str = "") -> Any:
    """Return `args.activation_checkpointing`, by the old name where it has that alone. end: "" or "_kwargs"."""
    return getattr(args, f"activation_checkpointing{end}", getattr(args, f"gradient_checkpointing{end}", None))


def values(args: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return what `args` say of these arguments now."""
    return {name: copy.deepcopy(getattr(args, name, None)) for name in names}


def check_unchanged(args: Any, taken: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument that is no longer what was `taken` of it."""
    for name, value in taken.items():
        now = getattr(args, name, None)
        require(now == value, name, now, f"{value!r}, with which this trainer was made: make a new one for another")


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


# -- overridden methods and attributes


# Methods of transformers.Trainer that are called here, which a subclass may override.
_CALLED = {
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
_ARGUMENT = "an argument of PipelineTrainer: set later it would change nothing"
# Attributes that Trainer reads when it trains or evaluates, and what to do here.
_ATTRIBUTES = {
    "compute_loss_func": _ARGUMENT,
    "label_names": "nothing: a stage's loss has one tensor of labels",
    "label_smoother": "label_smoothing_factor of TrainingArguments, or compute_loss_func of PipelineTrainer",
    "loss_is_scaled_for_ga": "nothing: micro-batches are weighed by their labels",
    "lr_scheduler": "optimizers=(None, a callable that makes it of the optimizer), an argument of PipelineTrainer",
    "model": "a new PipelineTrainer for another model",
    "model_accepts_loss_kwargs": "nothing: micro-batches are weighed by their labels",
    "model_init": _ARGUMENT,
    "model_wrapped": "a new PipelineTrainer for another model",
    "neftune_noise_alpha": "nothing: a pipeline adds no noise to embeddings",
    "optimizer": "optimizers=(a callable that makes it of parameter groups, None), an argument of PipelineTrainer",
    "optimizer_cls_and_kwargs": _ARGUMENT,
}


def _is_followed(name: str) -> bool:
    return name.startswith("__") or not hasattr(Trainer, name) or name in _CALLED


def check_subclass(subclass: type, base: type) -> None:
    """Raise ConfigError for a method of Trainer, in `subclass` or a mixin of it, that `base` would never call."""
    for kind in [kind for kind in subclass.__mro__ if kind not in base.__mro__]:
        for name, own in kind.__dict__.items():
            given = callable(own) or isinstance(own, (staticmethod, classmethod))
            require(
                not given or _is_followed(name),
                f"{kind.__name__}.{name}",
                "a method",
                "none: this trainer does not call it",
            )


def check_attribute(trainer: Any, name: str, value: Any) -> None:
    """Raise ConfigError for an attribute that a script sets on a trainer, and that only Trainer would follow."""
    kind = type(trainer).__name__
    require(name not in _ATTRIBUTES, f"{kind}.{name}", value, _ATTRIBUTES.get(name, ""))
    require(_is_followed(name), f"{kind}.{name}", value, "nothing: this trainer does not call it")
