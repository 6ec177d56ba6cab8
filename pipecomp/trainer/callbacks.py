"""A trainer's callbacks: defaults, events, and their state in a checkpoint."""

from __future__ import annotations

from typing import Any

from transformers import TrainerControl, TrainerState
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer import DEFAULT_CALLBACKS, DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import CallbackHandler, ExportableState, PrinterCallback

from pipecomp.errors import require


def default_handler(args: Any, model: Any, processing_class: Any) -> CallbackHandler:
    """Make a handler with Trainer's default callbacks and those of `args.report_to`."""
    reporting = get_reporting_integration_callbacks(args.report_to)
    return CallbackHandler([*DEFAULT_CALLBACKS, *reporting], model, processing_class, None, None)


def progress_callback(args: Any) -> type:
    """Choose the callback that shows progress. Trainer adds it after the user's callbacks."""
    return PrinterCallback if args.disable_tqdm else DEFAULT_PROGRESS_CALLBACK


def check(callback: Any) -> None:
    """Raise ConfigError for a callback that does not work in a pipeline."""
    from pipecomp.trainer.ddp_callback import CompressionCallback

    require(
        not isinstance(callback, CompressionCallback),
        "callbacks",
        "CompressionCallback",
        "a 'gradients' section in pipecomp=",
    )


def fire(trainer: Any, event: str, *more: Any) -> None:
    """Call all callbacks' method for an event and keep the control that they return."""
    handle = getattr(trainer.callback_handler, event)
    trainer.control = handle(trainer.args, trainer.state, trainer.control, *more)


# -- state


def new_state(trainer: Any) -> TrainerState:
    """Make the state that a training begins with."""
    return TrainerState(
        is_local_process_zero=trainer.is_local_process_zero(),
        is_world_process_zero=trainer.is_world_process_zero(),
        stateful_callbacks=_stateful_callbacks(trainer),
    )


def save(trainer: Any) -> None:
    """Copy the state of stateful callbacks into `trainer.state`."""
    saved: dict[str, Any] = {}
    for callback in _stateful_callbacks(trainer):
        saved.setdefault(type(callback).__name__, []).append(callback.state())
    trainer.state.stateful_callbacks = {k: v[0] if len(v) == 1 else v for k, v in saved.items()}


def restore(trainer: Any) -> None:
    """Restore stateful callbacks from `trainer.state`."""
    callbacks = trainer.callback_handler.callbacks
    for name, saved in trainer.state.stateful_callbacks.items():
        states = list(saved) if isinstance(saved, list) else [saved]
        for callback in [cb for cb in _stateful_callbacks(trainer) if type(cb).__name__ == name]:
            if not states:
                break
            restored = type(callback).from_state(states.pop(0))
            if isinstance(callback, TrainerControl):
                trainer.control = restored
            else:
                callbacks[callbacks.index(callback)] = restored


def _stateful_callbacks(trainer: Any) -> list[Any]:
    everything = [*trainer.callback_handler.callbacks, trainer.control]
    return [callback for callback in everything if isinstance(callback, ExportableState)]
