"""Curves for experiment trackers (`--report-to`), through Hugging Face's own integrations; one rank tells them all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from pipecomp.errors import ConfigError


class Trackers:
    """The trackers of a run: tensorboard, trackio, mlflow, wandb, or another one that transformers knows.

    They take their own settings from their own environment variables, as with `transformers.Trainer`. It is a context
    manager.

    Args:
        names: As in `transformers.TrainingArguments.report_to`; empty on all ranks but one.
        folder: Where those go that write files.
        run_name: What the run is called there.

    Raises:
        ConfigError: For a name that transformers does not know, or whose package is not installed.
    """

    def __init__(self, names: list[str], folder: Path, run_name: str) -> None:
        self._callbacks: list[Any] = []
        if not names:
            return
        from transformers import TrainerControl, TrainerState, TrainingArguments
        from transformers.integrations import get_reporting_integration_callbacks

        try:
            self._callbacks = [make() for make in get_reporting_integration_callbacks(names)]
        except (ValueError, RuntimeError, ImportError) as error:
            raise ConfigError("--report-to", " ".join(names), f"trackers that are installed ({error})") from error
        with _unchanged_process():
            self._args = TrainingArguments(output_dir=str(folder), run_name=run_name, report_to="none", use_cpu=True)
        self._state, self._control = TrainerState(is_world_process_zero=True), TrainerControl()

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Begin the run. facts: what is run, which trackers with a place for settings keep."""
        for callback in self._callbacks:
            callback.on_train_begin(self._args, self._state, self._control, model=SimpleNamespace(config=_Facts(facts)))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Give them values at a step; names that begin with "eval_" go to the curves of evaluations."""
        for callback in self._callbacks:
            self._state.global_step = step
            callback.on_log(self._args, self._state, self._control, model=None, logs=dict(values))

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *error: object) -> None:
        for callback in self._callbacks:
            callback.on_train_end(self._args, self._state, self._control, model=None)
        self._callbacks = []


@contextlib.contextmanager
def _unchanged_process() -> Iterator[None]:
    """Leave the environment and torch's threads as they are.

    TrainingArguments let accelerate set up training on the CPU. It notes what it takes for the launcher's words, and
    where OMP_NUM_THREADS is not set gives this rank threads for all of a machine's cores.
    """
    before, threads = dict(os.environ), torch.get_num_threads()
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name not in before]:
            del os.environ[name]
        os.environ.update(before)
        torch.set_num_threads(threads)


class _Facts:
    """A model's configuration, which is all of it that integrations look at."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._facts = {f"pipecomp_{key}": value for key, value in facts.items()}

    def to_dict(self) -> dict[str, Any]:
        return dict(self._facts)

    def to_json_string(self) -> str:
        return json.dumps(self._facts, indent=2)
