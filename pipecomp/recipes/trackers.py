"""Curves for experiment trackers (`--report-to`) through Hugging Face's integrations, logged by one rank."""

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
    """The trackers of a run, a context manager: tensorboard, trackio, mlflow, wandb, or others of transformers.

    Environment variables configure them, as with `transformers.Trainer`.

    Args:
        names: As in `transformers.TrainingArguments.report_to`; empty on all ranks but one.
        folder: Folder for trackers that write files.
        run_name: The run's name.

    Raises:
        ConfigError: If transformers does not have a tracker, or its package is not installed.
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
        """Start the run. facts: the run's settings, for trackers that record settings."""
        for callback in self._callbacks:
            callback.on_train_begin(self._args, self._state, self._control, model=SimpleNamespace(config=_Facts(facts)))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log values of a step. Names that begin with "eval_" go to the evaluation curves."""
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
    """Restore the environment and torch's number of threads afterwards."""
    # Note: TrainingArguments makes accelerate set up CPU training. It sets environment variables of launchers and, if
    # OMP_NUM_THREADS is not set, as many threads for this rank as the machine has cores.
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
    """The part of a model's configuration that integrations read."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._facts = {f"pipecomp_{key}": value for key, value in facts.items()}

    def to_dict(self) -> dict[str, Any]:
        return dict(self._facts)

    def to_json_string(self) -> str:
        return json.dumps(self._facts, indent=2)
