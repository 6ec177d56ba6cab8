"""A trainer's callbacks: defaults, events, and their state in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer import DEFAULT_CALLBACKS, DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import CallbackHandler, ExportableState, PrinterCallback

from pipecomp.distributed.preemption import say_here
from pipecomp.errors import StalledError, require
from pipecomp.utils.activity import Activity, limits, local_activity

_SHOWN = 300  # characters of a tracker's error
_TRACKER_S = 60.0  # for a call of a tracker


class _WatchedHandler(CallbackHandler):
    """Calls the callbacks as transformers' does, each within the limit of local activities."""

    def call_event(self, event: str, args: Any, state: Any, control: Any, **more: Any) -> Any:
        """Call a method of every callback; returns the control."""
        for name in ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader"):
            more[name] = getattr(self, name)
        for callback in self.callbacks:
            with local_activity(f"is in the callback {type(callback).__name__}.{event}"):
                result = getattr(callback, event)(args, state, control, **more)
            control = control if result is None else result
        return control


def default_handler(args: Any, model: Any, processing_class: Any) -> CallbackHandler:
    """Make a handler with Trainer's default callbacks and the trackers of `args.report_to`, which may fail."""
    trackers = [make() for make in get_reporting_integration_callbacks(args.report_to)]
    for tracker in trackers:
        _continue_without(tracker)
    return _WatchedHandler([*DEFAULT_CALLBACKS, *trackers], model, processing_class, None, None)


_EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]


def _continue_without(tracker: TrainerCallback) -> None:
    """Let training continue when a tracker fails. It is not called again in this training, as each call may wait long.

    Note: its methods are replaced, so that `remove_callback` still finds it by its class.
    """
    name = type(tracker).__name__.removesuffix("Callback")
    failed_after: list[int] = []  # the step

    def call(event: str, method: Callable[..., Any], args: Any, state: Any, control: Any, **more: Any) -> Any:
        if event == "on_train_begin":
            failed_after.clear()
        if failed_after:
            if event == "on_train_end":
                say_here(f"{name} has nothing of steps {failed_after[0] + 1} to {state.global_step}: it failed before")
            return None
        try:
            with Activity(f"is in the tracker {name}.{event}", _TRACKER_S, end_s=limits.other_s):
                return method(args, state, control, **more)
        except Exception as error:
            failed_after.append(state.global_step)
            why = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:_SHOWN]
            say_here(f"report_to: {name} failed after step {state.global_step} ({why}); training continues without it")
            return None

    for event in _EVENTS:
        if hasattr(tracker, event):
            setattr(tracker, event, partial(call, event, getattr(tracker, event)))


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
    try:
        trainer.control = handle(trainer.args, trainer.state, trainer.control, *more)
    except StalledError:
        with trainer.engine.propagate_failure():  # the others wait for this rank
            raise


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
