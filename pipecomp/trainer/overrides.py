"""What scripts change of transformers.Trainer, in a subclass or on a trainer, and what of that is refused.

`PipelineTrainer` is not a Trainer: it has those of its methods and attributes that a pipeline can follow. A method that
a subclass overrides, or an attribute that a script sets, would be ignored where Trainer follows it; so it is an error.
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from pipecomp.errors import require

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
