"""Which run a process trains for, and whether the message stores that it found are that run's.

A run has an id. It gets one when training begins with empty stores (random, or `store.run`), its stores and its
checkpoints keep it, and a process goes on with the run by loading one of its checkpoints or by giving the same
`store.run`. What any other run has cached is refused before a step uses it: it is of another model's weights.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from pathlib import Path
from typing import Any

from pipecomp.buffers import StoreEnvironment
from pipecomp.distributed.consistency import AllRanks
from pipecomp.errors import StoreError
from pipecomp.stages.partition.planning import SplitPlan

UNKNOWN = "without a name"  # of what was cached before runs had names


class Run:
    """The run of this process. id: its id. Made by `find_run`, alike on all ranks."""

    def __init__(self, run_id: str, environment: StoreEnvironment, path: str, *, named: bool, known: bool) -> None:
        """named: `store.run` says the id. known: the stores are empty, or of the run that this process said it is."""
        self.id = run_id
        self._environment, self._path = environment, path
        self._named, self._known, self._bound = named, known, False

    def loaded(self, run_id: str | None) -> None:
        """Note that a checkpoint of this run was loaded. StoreError if the stores, or `store.run`, are of another."""
        self._bound = False  # the stores may be replaced by the checkpoint's
        if run_id == self.id:
            self._known = True
        elif self._known and not self._named:  # empty stores: they become those of the checkpoint's run
            self.id = run_id or self.id
        else:
            whose = f"run {run_id}" if run_id is not None else "a run without cached activations"
            mine = "store.run says" if self._named else f"the message store in {self._path} is of"
            raise StoreError(f"the checkpoint is of {whose}, but {mine} run {self.id}: {self._ways_out()}")

    def begin_step(self) -> None:
        """Before a training step: the stores are this run's from here on. StoreError if they are another's."""
        if not self._known:
            raise StoreError(
                f"the message store in {self._path} belongs to run {self.id}, and this is a new one. To go on with "
                "that run, load one of its checkpoints first (engine.load_checkpoint) or give its id as store.run. "
                f"Otherwise: {self._ways_out()}"
            )
        if not self._bound:
            self._environment.bind(self.id)
            self._bound = True

    def _ways_out(self) -> str:
        return (
            f"give another store.path, or remove what is cached with `pipecomp store prune {Path(self._path)} "
            "--everything` (on every machine)"
        )


def find_run(
    environment: StoreEnvironment, holds_messages: bool, path: str, name: str | None, all_ranks: AllRanks
) -> Run:
    """Decide with all other ranks which run this process's is; every rank of a run must call this.

    holds_messages: whether this rank's stores hold any. path, name: `store.path` and `store.run`. Raises StoreError on
    every rank if the stores of two ranks are of different runs, or not of the one that `name` says.
    """
    mine = (environment.run or UNKNOWN) if holds_messages else None
    told = all_ranks.all_gather_object([mine, secrets.token_hex(8)])
    stored = {rank: run for rank, (run, _) in enumerate(told) if run is not None}
    wanted = name or next(iter(stored.values()), None)
    foreign = [rank for rank, run in stored.items() if run != wanted]
    if foreign:
        rank = foreign[0]
        all_ranks.leave()
        other = "store.run says" if name is not None else f"rank {next(iter(stored))}'s of"
        raise StoreError(
            f"rank {rank}: the message store in {path} belongs to run {stored[rank]}, {other} {wanted}. Give another "
            f"store.path, or remove what is cached with `pipecomp store prune {path} --everything` (on every machine)"
        )
    return Run(wanted or told[0][1], environment, path, named=name is not None, known=name is not None or not stored)


def model_digest(plan: SplitPlan, config: Any) -> str:
    """Hash, in short, what makes activations those of a model, but for its weights.

    config: the Hugging Face configuration of the whole model, None for plain modules.
    """
    values = model_values(config)
    if "problem_type" in values:  # of the loss alone, and training may set it
        values["problem_type"] = None
    text = json.dumps([plan.architecture, plan.blocks, values], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def model_values(config: Any) -> dict[str, Any]:
    """Pick what a Hugging Face configuration says of a model's activations; nothing for None."""
    values = {} if config is None else config.to_dict()
    return {key: value for key, value in values.items() if key not in _NAMES and not key.startswith("_")}


_NAMES = frozenset(
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
