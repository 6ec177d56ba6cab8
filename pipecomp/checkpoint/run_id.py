"""The id of a run, and whether the message stores on disk belong to it.

A run gets an id when training begins with empty stores: a random one, or `store.run`. Its stores and checkpoints keep
it. A process continues the run by loading one of its checkpoints, or by giving the same `store.run`. Activations cached
by another run come from a model with other weights: before a step uses them they are refused, or dropped if nothing can
continue that run, because it was killed before its first checkpoint or its checkpoints have copies. An engine that
closes in order removes such stores.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipecomp.buffers import StoreEnvironment
from pipecomp.distributed.consistency import AllRanks
from pipecomp.errors import StoreError
from pipecomp.stages.partition.planning import SplitPlan

_log = logging.getLogger(__name__)

_UNNAMED = "without a name"  # the id of stores written before runs had ids


class RunIdentity:
    """The run of this process, the same on all ranks; made by `find_run`.

    Args:
        run_id: Its id.
        environment: The message stores.
        path: `store.path`.
        named: Whether `store.run` gives the id.
        known: Whether the stores are empty, or known to belong to this run.
        fresh: The id of a new run, if the stores of all ranks are disposable; None if one is not.

    Attributes:
        forget: Drops all cached activations of this rank.
    """

    forget: Callable[[], None]

    def __init__(
        self,
        run_id: str,
        environment: StoreEnvironment,
        path: str,
        *,
        named: bool,
        known: bool,
        fresh: str | None = None,
    ) -> None:
        self.id = run_id
        self._environment, self._path, self._fresh = environment, path, fresh
        self._named, self._known, self._bound = named, known, False
        self.set_checkpoint(copied=known)

    def set_checkpoint(self, *, copied: bool) -> None:
        """Keep the stores after the end if the run continues from a checkpoint without a copy of them, or by name."""
        self._environment.temporary = copied and not self._named
        if self._bound:
            self._environment.bind(self.id, disposable=self._environment.temporary)

    def load(self, run_id: str | None) -> None:
        """Continue the run of a loaded checkpoint. Raises StoreError if the stores or `store.run` are of another."""
        self._bound = False  # the checkpoint may replace the stores
        if run_id == self.id:
            self._known = True
        elif (self._known or self._fresh is not None) and not self._named:
            self._drop_leftover()
            self.id = run_id or self.id  # empty stores become those of the checkpoint's run
        else:
            saved = f"run {run_id}" if run_id is not None else "a run without cached activations"
            own = "store.run is" if self._named else f"the message store in {self._path} belongs to"
            raise StoreError(f"the checkpoint is of {saved}, but {own} run {self.id}: {_remedy(self._path)}")

    def begin_step(self) -> None:
        """Before a training step: bind the stores to this run. Raises StoreError if they belong to another."""
        if not self._known and self._fresh is not None:
            self._drop_leftover()
        if not self._known:
            raise StoreError(
                f"the message store in {self._path} belongs to run {self.id}, and this is a new run. To continue that "
                "run, load one of its checkpoints first (engine.load_checkpoint) or set store.run to its id. "
                f"Otherwise {_remedy(self._path)}"
            )
        if not self._bound:
            self._environment.bind(self.id, disposable=self._environment.temporary)
            self._bound = True

    def _drop_leftover(self) -> None:
        """Empty stores that a run left which nothing can continue; this becomes a new run."""
        if self._known or self._fresh is None:
            return
        _log.warning("the message store in %s is emptied: run %s, which ended early, left it", self._path, self.id)
        self.forget()
        self.id, self._known = self._fresh, True
        self.set_checkpoint(copied=True)


def _remedy(path: str) -> str:
    return (
        "set another store.path, or remove the cached activations with store.overwrite or "
        f"`pipecomp store prune {Path(path)} --everything` (on every machine)"
    )


def find_run(
    environment: StoreEnvironment, holds_messages: bool, path: str, name: str | None, all_ranks: AllRanks
) -> RunIdentity:
    """Agree with all other ranks on the run; every rank must call this.

    Args:
        environment: This rank's message stores.
        holds_messages: Whether they hold any.
        path: `store.path`.
        name: `store.run`.
        all_ranks: The ranks.

    Raises:
        StoreError: On every rank, if the stores of two ranks are of different runs, or not of the run `name`.
    """
    own = (environment.run or _UNNAMED) if holds_messages else None
    answers = all_ranks.all_gather_object([own, secrets.token_hex(8), own is None or environment.disposable])
    stored = {rank: run for rank, (run, *_) in enumerate(answers) if run is not None}
    fresh = answers[0][1] if all(disposable for *_, disposable in answers) else None
    run_id = name or next(iter(stored.values()), None)
    foreign = [rank for rank, run in stored.items() if run != run_id and (fresh is None or name is not None)]
    if foreign:
        rank = foreign[0]
        all_ranks.leave()
        other = "store.run is" if name is not None else f"that of rank {next(iter(stored))} to"
        raise StoreError(
            f"rank {rank}: the message store in {path} belongs to run {stored[rank]}, {other} {run_id}: {_remedy(path)}"
        )
    known = name is not None or not stored
    return RunIdentity(run_id or answers[0][1], environment, path, named=name is not None, known=known, fresh=fresh)


def model_digest(plan: SplitPlan, config: Any) -> str:
    """A short hash of what determines a model's activations, except for its weights.

    config: Hugging Face's configuration of the whole model, None for plain modules.
    """
    values = model_values(config)
    if "problem_type" in values:  # affects the loss alone, and training may set it
        values["problem_type"] = None
    text = json.dumps([plan.architecture, plan.blocks, values], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def model_values(config: Any) -> dict[str, Any]:
    """The values of a Hugging Face configuration that affect a model's activations; {} for None."""
    values = {} if config is None else config.to_dict()
    return {key: value for key, value in values.items() if key not in _OTHER_VALUES and not key.startswith("_")}


_OTHER_VALUES = frozenset(
    {
        "transformers_version",
        "architectures",
        "dtype",
        "torch_dtype",
        "id2label",
        "label2id",
        "name_or_path",
        "task_specific_params",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
    }
)
