"""Methods and attributes of transformers.Trainer that scripts override, set, call or read.

`PipelineTrainer` does not inherit from Trainer. It has those that a pipeline supports; for the others an error names
what to use instead.
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from pipecomp.errors import ConfigError, require

# Methods of Trainer that PipelineTrainer calls, so that a subclass may override them.
_OVERRIDABLE = """
    add_callback compute_loss create_model_card create_optimizer create_optimizer_and_scheduler create_scheduler end
    evaluate get_decay_parameter_names get_eval_dataloader get_learning_rates get_num_trainable_parameters
    get_optimizer_cls_and_kwargs get_optimizer_group get_test_dataloader get_train_dataloader init_hf_repo
    is_local_process_zero is_world_process_zero log log_metrics metrics_format num_examples pop_callback predict
    push_to_hub remove_callback save_metrics save_model save_state train _get_train_sampler
"""
OVERRIDABLE = frozenset(_OVERRIDABLE.split())
_PRECISION = "bf16 or fp16 of TrainingArguments"
_CALLBACK = "a TrainerCallback"
_CHECKPOINT = "resume_from_checkpoint of train, save_model, or TrainerCallback.on_save"
_DATA = "get_train_dataloader, get_eval_dataloader, or data_collator"
_STEP = "compute_loss, or TrainerCallback.on_pre_optimizer_step: the micro-batches of a step overlap in time"
_SEARCH = "a loop over settings, each with a new PipelineTrainer and its train()"
# What to use instead of Trainer's other methods.
_INSTEAD = {
    "autocast_smart_context_manager": _PRECISION,
    "call_model_init": "model_init",
    "compute_loss_context_manager": _PRECISION,
    "create_accelerator_and_postprocess": "pipecomp=, num_stages= and cuts=, which determine the processes' work",
    "evaluation_loop": "evaluate, compute_metrics, or preprocess_logits_for_metrics",
    "floating_point_ops": "state.total_flos",
    "get_batch_samples": _DATA,
    "get_total_train_batch_size": "per_device_train_batch_size, gradient_accumulation_steps and trainer.replicas",
    "hyperparameter_search": _SEARCH,
    "prediction_step": "compute_loss, preprocess_logits_for_metrics, or compute_metrics",
    "set_initial_training_values": "num_train_epochs or max_steps",
    "store_flos": "state.total_flos",
    "training_step": _STEP,
    "_clip_grad_norm": "max_grad_norm, or TrainerCallback.on_pre_optimizer_step",
    "_evaluate": "evaluate",
    "_get_dataloader": _DATA,
    "_get_eval_sampler": _DATA,
    "_get_output_dir": "output_dir",
    "_hp_search_setup": _SEARCH,
    "_inner_training_loop": _CALLBACK,
    "_load_best_model": "load_best_model_at_end",
    "_load_from_checkpoint": _CHECKPOINT,
    "_load_optimizer_and_scheduler": _CHECKPOINT,
    "_load_rng_state": _CHECKPOINT,
    "_maybe_log_save_evaluate": f"log, evaluate, save_model, or {_CALLBACK}",
    "_prepare_input": "data_collator",
    "_prepare_inputs": "data_collator",
    "_push_from_checkpoint": "push_to_hub",
    "_remove_unused_columns": "remove_unused_columns=False",
    "_report_to_hp_search": _SEARCH,
    "_run_epoch": _CALLBACK,
    "_save": "save_model",
    "_save_checkpoint": _CHECKPOINT,
    "_save_optimizer_and_scheduler": _CHECKPOINT,
    "_save_rng_state": _CHECKPOINT,
    "_set_signature_columns_if_needed": "remove_unused_columns=False",
    "_wrap_model": "a model that is wrapped before it is passed as model=",
}
_UNUSED = "nothing: this trainer does not call it"
_ARGUMENT = "an argument of PipelineTrainer: setting the attribute has no effect"
# Attributes that only Trainer reads during training or evaluation, and what to set instead.
_SETTABLE_ELSEWHERE = {
    "compute_loss": "compute_loss of a subclass, or compute_loss_func=",
    "compute_loss_func": _ARGUMENT,
    "label_names": "nothing: a stage's loss takes one tensor of labels",
    "label_smoother": "label_smoothing_factor of TrainingArguments, or compute_loss_func of PipelineTrainer",
    "lr_scheduler": "optimizers=(None, a function of the optimizer), or create_scheduler of a subclass",
    "model": "a new PipelineTrainer for another model",
    "model_accepts_loss_kwargs": "loss_is_scaled_for_ga, or compute_loss_func of PipelineTrainer",
    "model_init": _ARGUMENT,
    "model_wrapped": "a new PipelineTrainer for another model",
    "neftune_noise_alpha": "neftune_noise_alpha of TrainingArguments",
    "optimizer": "optimizers=(a function of parameter groups, None), or create_optimizer of a subclass",
    "optimizer_cls_and_kwargs": _ARGUMENT,
}
# Attributes that Trainer sets in its constructor and that a pipeline has no equal of.
_UNREADABLE = {
    "deepspeed": "trainer.engine",
    "compute_loss_func": _ARGUMENT,
    "current_flos": "state.total_flos",
    "label_smoother": "args.label_smoothing_factor",
    "objective": _SEARCH,
    "hp_space": _SEARCH,
}


def check_subclass(subclass: type, base: type) -> None:
    """Raise ConfigError if `subclass` or one of its mixins overrides a method of Trainer that `base` never calls."""
    for kind in [kind for kind in subclass.__mro__ if kind not in base.__mro__]:
        for name, member in kind.__dict__.items():
            is_method = callable(member) or isinstance(member, (staticmethod, classmethod))
            if is_method and not _is_supported(name):
                raise ConfigError(f"{kind.__name__}.{name}", "a method", _INSTEAD.get(name, _UNUSED))


def check_attribute(trainer: Any, name: str, value: Any) -> None:
    """Raise ConfigError if a script sets an attribute that only Trainer reads."""
    kind = type(trainer).__name__
    if name in _SETTABLE_ELSEWHERE:
        raise ConfigError(f"{kind}.{name}", value, _SETTABLE_ELSEWHERE[name])
    require(_is_supported(name), f"{kind}.{name}", value, _INSTEAD.get(name, _UNUSED))


def missing_attribute(trainer: Any, name: str) -> AttributeError:
    """Return the error for an attribute that a trainer does not have; it names what to use instead."""
    kind = type(trainer).__name__
    way = _INSTEAD.get(name) or _UNREADABLE.get(name)
    if way is not None:
        return AttributeError(f"{kind}.{name} does not exist in a pipeline; use {way}")
    if hasattr(Trainer, name):
        return AttributeError(f"{kind}.{name} does not exist in a pipeline: only transformers.Trainer calls it")
    return AttributeError(f"{kind} has no attribute {name!r}")


def _is_supported(name: str) -> bool:
    return name.startswith("__") or name == "loss_is_scaled_for_ga" or not hasattr(Trainer, name) or name in OVERRIDABLE
