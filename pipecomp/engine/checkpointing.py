"""The part of the engine that saves and loads: what DeepSpeed does not know of is written beside its files.

TAG/   DeepSpeed's checkpoint
    pipecomp-rank-R.pt                     rank R's random generators, and what its message stores held
    pipecomp-messages-rank-R/data.mdb      the stores themselves, with store.in_checkpoints
    pipecomp-gradients-…-rank-R            error-feedback residuals of compressed gradients
    pipecomp-seal-R.json                   written last, see `sealing`
latest   DeepSpeed's file, which names the last TAG that is whole
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pipecomp.checkpoint import manifest, reshard_load
from pipecomp.checkpoint.rng_state import random_state, set_random_state
from pipecomp.checkpoint.run_id import Run, saved_run
from pipecomp.cluster.agreement import AllRanks
from pipecomp.data import TrainLoader
from pipecomp.engine.gradient_exchange import load_residuals, save_residuals
from pipecomp.engine.reporting import ReportingEngine
from pipecomp.errors import ConfigError, StoreError
from pipecomp.files import write_whole
from pipecomp.stages.link.handshake import summarize

_STATE_KEY = "pipecomp"

_log = logging.getLogger(__name__)


class Resumed(NamedTuple):
    """How a run goes on. exact: every rank holds the messages of the checkpoint's step, so that losses will be the
    same, bit for bit. dropped: samples that this rank's links forgot, because their ends differed."""

    exact: bool
    dropped: int


class CheckpointingEngine(ReportingEngine):
    """Checkpoints of everything that a run needs to go on. Its subclass trains.

    run: which run this is; None without message stores. resumed: set by `load_checkpoint`.
    """

    def __init__(self, **more: Any) -> None:
        self.run: Run | None = None
        self.resumed: Resumed | None = None
        self._loader: TrainLoader | None = None
        self._batches_taken = 0  # micro-batches of the training data that this replica has trained on
        self._evaluations = 0
        super().__init__(**more)

    def save_checkpoint(
        self, save_dir: str, tag: Any = None, client_state: dict | None = None, save_latest: bool = True, **kwargs: Any
    ) -> Any:
        """As DeepSpeed's; saved too are the place in the training data, the random generators, error-feedback
        residuals, what the message stores hold, and with `store.in_checkpoints` a copy of them. With a LoRA adapter the
        frozen weights are left out, unless `exclude_frozen_parameters=False`.

        A run that is killed meanwhile leaves the checkpoint before as `latest`. Raises ConfigError for bf16 without
        ZeRO: DeepSpeed 0.19 cannot load what it would save.
        """
        if self.using_bf16_optimizer and not self.zero_optimization():
            raise ConfigError(
                "zero_optimization.stage",
                0,
                "1, with data_types.grad_accum_dtype 'fp32', for checkpoints of bf16 training: DeepSpeed cannot load "
                "what it saves without",
            )
        kwargs.setdefault("exclude_frozen_parameters", self.stage.adapter is not None)
        own: dict[str, Any] = {"batches_taken": self._batches_taken, "evaluations": self._evaluations}
        if self.run is not None:
            own["run"] = self.run.id
        state = {**(client_state or {}), _STATE_KEY: own}
        tag = str(tag or f"global_step{self.global_steps}")
        folder = Path(save_dir) / tag
        with self.propagate_failure():
            own["pipeline"] = reshard_load.describe(self).as_dict()
            manifest.remove(folder)
            done = super().save_checkpoint(save_dir, tag=tag, client_state=state, save_latest=False, **kwargs)
            save_residuals(self.exchange_states(), folder, self.global_rank)
            self._save_rank(folder)
            dist.barrier()  # everything is written
            if os.environ.get("LOCAL_RANK", "0") == "0":
                manifest.write(folder, self.global_rank)
            dist.barrier()
            if save_latest and self.global_rank == 0:
                write_whole(Path(save_dir) / "latest", tag)
            dist.barrier()  # after that, older ones may be deleted
        return done

    def load_checkpoint(
        self,
        load_dir: str,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[Any, Any]:
        """As DeepSpeed's; training goes on where it was in the training data.

        Messages go on as the checkpoint's if the stores still hold these or the checkpoint has a copy, else as what
        both ends of each link have in common; `resumed` says which. Raises StoreError on every rank if the stores'
        messages are of another run than the checkpoint.

        The checkpoint may be of other cuts, another K and another number of replicas. Then every rank takes its
        parameters and their optimizer states out of the files of all stages, which must be on its machine; every
        message is sent whole once, error-feedback residuals of compressed gradients start empty, and random generators
        stay as they are. Raises SplitError for the checkpoint of another model, ConfigError for one of another
        precision or ZeRO stage.
        """
        with self.propagate_failure():
            folder = _folder(load_dir, tag)
            saved = None if folder is None else reshard_load.saved_otherwise(self, folder, _STATE_KEY)
            if saved is None:
                strict = load_module_strict and self.stage.adapter is None  # frozen weights are not in the files
                path, state = super().load_checkpoint(
                    load_dir,
                    tag,
                    strict,
                    load_optimizer_states,
                    load_lr_scheduler_states,
                    load_module_only,
                    custom_load_fn,
                )
            elif custom_load_fn is not None:
                raise ConfigError("custom_load_fn", custom_load_fn, "None: the stages of a pipeline load themselves")
            else:
                path, state = reshard_load.load(
                    self,
                    saved,
                    load_optimizer_states=load_optimizer_states,
                    load_lr_scheduler_states=load_lr_scheduler_states,
                    load_module_only=load_module_only,
                )
            if path is None or folder is None:
                return path, state
            own = (state or {}).pop(_STATE_KEY, None)
            same = own is None or self._same_pipeline(own["pipeline"])
            if same:
                load_residuals(self.exchange_states(), folder, self.global_rank, self.device)
            elif self.global_rank == 0 and any(True for _ in self.exchange_states()):
                _log.warning("%s is of another pipeline: the error-feedback residuals of gradients start empty", folder)
            if own is not None and not load_module_only:
                self._go_on(own, folder, same)
        return path, state

    def _same_pipeline(self, pipeline: dict[str, Any]) -> bool:
        return (pipeline["cuts"], pipeline["replicas"]) == (list(self.plan.cuts), self.grid.data_parallel_size)

    def _go_on(self, own: dict[str, Any], folder: Path, same: bool) -> None:
        pipeline, replicas = own["pipeline"], self.grid.data_parallel_size
        samples = own["batches_taken"] * pipeline["micro_batch"] * pipeline["replicas"]
        self._batches_taken, self._evaluations = samples // (self.micro_batch_size * replicas), own["evaluations"]
        if self._loader is not None:
            self._loader.taken = self._batches_taken
            self.set_dataloader(self._loader)
        file = _rank_file(folder, self.global_rank)
        saved = torch.load(file, weights_only=True) if same and file.is_file() else None
        if saved is not None:
            set_random_state(saved["random"])
        if self.run is None:
            return
        all_ranks = AllRanks(lost=lambda: None if self.watch is None else self.watch.lost)
        exact = False
        with all_ranks.collective_errors():
            self.run.loaded(saved_run(own))
            if saved is not None:
                exact = self._take_messages(folder, saved["messages"])
        dropped = self.links.agree()
        self.resumed = Resumed(all(all_ranks.all_gather_object(exact and not dropped)), dropped)

    def _save_rank(self, folder: Path) -> None:
        copy, environment = _messages(folder, self.global_rank), self.links.environment
        saves = environment if self.pipecomp_config.store.in_checkpoints else None
        if (saves is None or not saves.save(copy)) and copy.exists():  # of an earlier checkpoint of this name
            shutil.rmtree(copy)
        state = {"random": random_state(), "messages": self._messages_held()}
        torch.save(state, _rank_file(folder, self.global_rank))

    def _take_messages(self, folder: Path, held: dict[str, Any]) -> bool:
        """Hold what this rank held at the checkpoint, if that is possible. False if it is not."""
        if self._messages_held() == held:
            return True
        environment = self.links.environment
        assert environment is not None
        copy = _messages(folder, self.global_rank)
        if not environment.restore(copy):
            return False
        if self._messages_held() != held:
            raise StoreError(f"{copy}: not what the checkpoint says that it holds; without it, training can go on")
        return True

    def _messages_held(self) -> dict[str, Any]:
        """For each link the store's version: number of samples, their highest version, digest of all."""
        return {str(end.index): list(summarize(end.store)) for end in self.links if end.store is not None}


def _folder(load_dir: str, tag: Any) -> Path | None:
    """The folder of a checkpoint, by its tag or the last one's; None if there is none."""
    if tag is None:
        latest = Path(load_dir) / "latest"
        if not latest.is_file():
            return None
        tag = latest.read_text().strip()
    folder = Path(load_dir) / str(tag)
    return folder if folder.is_dir() else None


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"pipecomp-rank-{rank}.pt"


def _messages(folder: Path, rank: int) -> Path:
    return folder / f"pipecomp-messages-rank-{rank}"
