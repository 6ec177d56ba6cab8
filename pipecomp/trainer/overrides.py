"""Which methods of transformers.Trainer a subclass of `PipelineTrainer` may override: those that are called here."""

from __future__ import annotations

from transformers import Trainer

from pipecomp.errors import require

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


def check_overrides(subclass: type, base: type) -> None:
    """Raise ConfigError for a method of Trainer, in `subclass` or a mixin of it, that `base` would never call."""
    for kind in [kind for kind in subclass.__mro__ if kind not in base.__mro__]:
        for name, own in kind.__dict__.items():
            given = callable(own) or isinstance(own, (staticmethod, classmethod))
            require(
                not given or name.startswith("__") or not hasattr(Trainer, name) or name in _CALLED,
                f"{kind.__name__}.{name}",
                "a method",
                "none: this trainer does not call it",
            )
