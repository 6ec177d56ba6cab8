"""Checks of TrainingArguments: every field works in a pipeline, is refused by name, or is ignored for a known reason.

A setting without effect raises a ConfigError that names it and the way that exists here.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import TorchDynamoPlugin
from transformers import Seq2SeqTrainingArguments, TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from pipecomp.config.checks import require_choice
from pipecomp.errors import ConfigError, require
from pipecomp.trainer.optimizers import check_optim

_log = logging.getLogger(__name__)
SAMPLING = ("random", "sequential", "group_by_length")
HUB_STRATEGIES = ("end", "every_save")  # the latter is the default and means "end" here

# Every field of TrainingArguments is in one of four tables. Those of this one have Trainer's meaning.
_SUPPORTED = """
    output_dir per_device_train_batch_size num_train_epochs max_steps gradient_accumulation_steps seed data_seed
    learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps optim optim_args optim_target_modules weight_decay
    adam_beta1 adam_beta2 adam_epsilon max_grad_norm label_smoothing_factor average_tokens_across_devices
    bf16 fp16 tf32 activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing
    gradient_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode use_liger_kernel
    liger_kernel_config neftune_noise_alpha torch_empty_cache_steps full_determinism use_cpu deepspeed
    logging_strategy logging_steps logging_first_step logging_nan_inf_filter include_num_input_tokens_seen
    log_level log_level_replica log_on_each_node disable_tqdm report_to run_name project
    trackio_space_id trackio_bucket_id trackio_static_space_id
    eval_strategy eval_steps eval_delay eval_on_start eval_do_concat_batches eval_accumulation_steps
    per_device_eval_batch_size prediction_loss_only include_for_metrics
    save_strategy save_steps save_total_limit save_only_model load_best_model_at_end metric_for_best_model
    greater_is_better ignore_data_skip restore_callback_states_from_checkpoint
    push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_revision
    dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
    dataloader_prefetch_factor dataloader_multiprocessing_context remove_unused_columns train_sampling_strategy
    length_column_name ddp_backend ddp_timeout
"""
SUPPORTED = frozenset(_SUPPORTED.split())
# Fields with other values than these are refused; `check` has the conditions of supported fields.
_UNSUPPORTED = {
    "accelerator_config": "not set: the trainer loads its own data",
    "auto_find_batch_size": "False: one stage alone may run out of memory",
    "batch_eval_metrics": "False: rank 0 receives logits after the last batch",
    "bf16_full_eval": "False: evaluation uses the precision of training",
    "dataloader_in_order": "True: the first and the last stage load the same batches",
    "debug": "''",
    "enable_jit_checkpoint": "False: PipelineTrainer's save_on_signal saves on all ranks",
    "eval_use_gather_object": "False: logits of any structure are gathered",
    "fp16_full_eval": "False: evaluation uses the precision of training",
    "fsdp": "not set: a pipeline's stages are not sharded; zero_optimization.stage 1 shards optimizer states",
    "label_names": "['labels']: a stage's loss takes one tensor of labels",
    "parallelism_config": "not set: num_stages and the number of processes determine the layout",
    "save_on_each_node": "False: rank 0 writes the model, every rank its own state",
    "skip_memory_metrics": "True: trainer.engine.comm_stats() reports memory",
    "use_cache": "False: stages keep no cache",
}
# Fields of Seq2SeqTrainingArguments.
_UNSUPPORTED_SEQ2SEQ = {
    "generation_config": "not set: call trainer.generate",
    "generation_max_length": "not set: call trainer.generate",
    "generation_num_beams": "not set: call trainer.generate",
    "predict_with_generate": "False: call trainer.generate",
    "sortish_sampler": "False: train_sampling_strategy 'group_by_length'",
}
# Fields that are logged as ignored if they are set.
_NO_DDP = "a pipeline does not use DistributedDataParallel"
IGNORED = {
    "ddp_broadcast_buffers": _NO_DDP,
    "ddp_bucket_cap_mb": _NO_DDP,
    "ddp_find_unused_parameters": _NO_DDP,
    "ddp_static_graph": _NO_DDP,
    "hub_always_push": "the model is pushed at the end of training, and by save_model and push_to_hub",
}
# Fields that Trainer does not read either.
FOR_SCRIPTS = frozenset({"do_train", "do_eval", "do_predict", "fsdp_config", "local_rank", "resume_from_checkpoint"})

# Environment variables of `accelerate launch` that must be off, and the reason.
_LAUNCHER_VARIABLES = {
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
    "liger_kernel_config",
    "neftune_noise_alpha",
    "optim",
    "optim_args",
    "optim_target_modules",
    "torch_compile",
    "torch_compile_backend",
    "torch_compile_mode",
    "use_liger_kernel",
    "weight_decay",
)


# Arguments that a training keeps when it resumes: the optimizer's state has them, or the order of samples follows.
KEPT_ON_RESUMING = (
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "bf16",
    "data_seed",
    "fp16",
    "learning_rate",
    "optim",
    "seed",
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
    _check_fields(args)
    check_optim(args)
    require_choice("train_sampling_strategy", args.train_sampling_strategy, SAMPLING)
    strategy = str(getattr(args.hub_strategy, "value", args.hub_strategy))
    allowed = f"{' or '.join(HUB_STRATEGIES)}: no machine has the optimizer states of all stages"
    require(not args.push_to_hub or strategy in HUB_STRATEGIES, "hub_strategy", strategy, allowed)
    config = args.liger_kernel_config
    require(args.use_liger_kernel or not config, "liger_kernel_config", config, "not set without use_liger_kernel")
    for key in ("fused_linear_cross_entropy", "cross_entropy"):
        allowed = "False: a pipeline computes the loss from the last stage's logits"
        require(not (config or {}).get(key), f"liger_kernel_config.{key}", True, allowed)
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


def _check_fields(args: Any) -> None:
    """Check that no field is set that a pipeline does not support, or that this version does not know."""
    unsupported, kind = _UNSUPPORTED, TrainingArguments
    if isinstance(args, Seq2SeqTrainingArguments):
        unsupported, kind = unsupported | _UNSUPPORTED_SEQ2SEQ, Seq2SeqTrainingArguments
    for field in dataclasses.fields(kind):
        name, value = field.name, getattr(args, field.name, None)
        if name in SUPPORTED or name in IGNORED or name in FOR_SCRIPTS or value == field.default:
            continue
        if name == "accelerator_config":
            _check_accelerator(value, unsupported[name])
            continue
        same_precision = name in ("bf16_full_eval", "fp16_full_eval") and getattr(args, name[:4])
        own_labels = name == "label_names" and value == ["labels"]
        if same_precision or own_labels or (not value and field.default is not True):
            continue
        allowed = unsupported.get(name, f"{field.default!r}: this version of pipecomp does not know it")
        raise ConfigError(name, value, allowed)


def _check_accelerator(config: Any, allowed: str) -> None:
    for field in dataclasses.fields(AcceleratorConfig):
        value = getattr(config, field.name, field.default)  # accelerate removes some after use
        require(value == field.default, f"accelerator_config.{field.name}", value, allowed)


def report_ignored(args: Any) -> None:
    """Log the fields that are set and have no effect."""
    for name, reason in IGNORED.items():
        if getattr(args, name, None) not in (None, False):
            _log.warning("%s is ignored: %s", name, reason)


def compilation(args: Any) -> dict[str, Any] | None:
    """Return torch.compile's backend and mode, from `args` or else from `accelerate launch`; None without compiling."""
    if args.torch_compile:
        return {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
    plugin = TorchDynamoPlugin()  # of the launcher's environment variables
    if plugin.backend.value in ("NO", None):
        return None
    return {"backend": plugin.backend.value.lower(), "mode": plugin.mode}


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


def check_kept(args: Any, saved: Mapping[str, Any]) -> None:
    """Raise ConfigError if an argument differs from that of the checkpoint. saved: from `kept`, or of fewer names."""
    for name, value in kept(args).items():
        allowed = f"{saved.get(name)!r}, the value of the checkpoint. A new training may start from its model"
        require(name not in saved or saved[name] == value, name, value, allowed)


def kept(args: Any) -> dict[str, Any]:
    """Return the arguments of `KEPT_ON_RESUMING` as JSON values."""
    return {name: getattr(value, "value", value) for name, value in values(args, KEPT_ON_RESUMING).items()}
