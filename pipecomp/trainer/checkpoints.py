"""The trainer's checkpoints: their files, resuming, rotation and the copies of message stores.

    checkpoint-N/   the model as a from_pretrained folder, tokenizer, training_args.bin, and
        pipeline.json            cuts and replicas; a run with others reshards the checkpoint. Also the work that was
                                 pending after the step when a signal stopped training
        deepspeed/               DeepSpeed's own checkpoint: optimizer states, float32 masters, error-feedback residuals
        rank_state_R.pth         random generators and schedule of rank R
        messages/rank-R/         AQ-SGD's cached activations of rank R, a copy of the store
        trainer_state.json       written last: a folder without it is incomplete

Without a shared disk, each machine keeps the files of its ranks in a folder of the same name.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from transformers.utils import logging as transformers_logging

from pipecomp.buffers import LmdbEnvironment
from pipecomp.buffers.admin import forget
from pipecomp.buffers.lmdb_folder import DATA_FILE, copy_file
from pipecomp.checkpoint import manifest
from pipecomp.checkpoint.reshard import load_schedule, read_state, saved_position
from pipecomp.checkpoint.writing import (
    CollectiveWrite,
    describe_error,
    private_files,
    random_state,
    set_random_state,
    write_state,
)
from pipecomp.config import Config, read_json_object
from pipecomp.data import DataPosition
from pipecomp.distributed.collectives import broadcast, gathered, while_others_wait
from pipecomp.distributed.preemption import say_here
from pipecomp.distributed.rendezvous import all_ranks
from pipecomp.errors import ConfigError, OutputError, WireError, require
from pipecomp.interfaces import TrainingEngine
from pipecomp.stages.partition.planning import SplitPlan
from pipecomp.trainer import callbacks
from pipecomp.utils.files import atomic_write, atomic_write_text

STATE_FILE = "trainer_state.json"
PIPELINE_FILE = "pipeline.json"
DEEPSPEED = "deepspeed"  # the tag of DeepSpeed's checkpoint, a folder
EVALUATION, EPOCH_END = "evaluation", "epoch end"
_DUE = "due"
_KEY = "resume_from_checkpoint"

_log = transformers_logging.get_logger(__name__)


class ResumePoint(NamedTuple):
    """The checkpoint that a training resumes from.

    same: its pipeline has the same cuts and replicas. due: the work that was pending after its step when a signal
    stopped training, `EVALUATION` or `EPOCH_END` or both. position: in the training data, None if not recorded.
    """

    folder: str
    state: TrainerState
    same: bool
    due: tuple[str, ...] = ()
    position: DataPosition | None = None


def layout(plan: SplitPlan, replicas: int) -> dict[str, Any]:
    """Describe the pipeline. Cached activations and random generators carry over only between equal layouts."""
    return {"cuts": list(plan.cuts), "replicas": replicas}


def find(
    resume: str | os.PathLike | bool | None, output_dir: str, pipeline: dict[str, Any], group: Any
) -> ResumePoint | None:
    """Find the checkpoint for `train(resume_from_checkpoint=resume)`. Rank 0 decides.

    Args:
        resume: A folder; True for the last undamaged checkpoint; None or False for a new training.
        output_dir: The trainer's output folder.
        pipeline: The `layout` of this run. A checkpoint with another layout logs a warning.
        group: A gloo group of all ranks. Every rank must call this.

    Returns:
        The checkpoint, or None for a new training.

    Raises:
        ConfigError: On every rank, if there is no checkpoint or it is not one of this trainer.
    """
    if resume is None or resume is False:
        return None
    place = _last_undamaged(output_dir, group) if resume is True else str(resume)
    answer: Any = None
    if dist.get_rank() == 0:
        try:
            folder = _last(output_dir) if place is None else Path(place)
            theirs, state = _read(folder, resume)
            due = theirs.pop(_DUE, [])
            answer = folder.name, state, theirs == pipeline, due, _position(folder / DEEPSPEED)
            if theirs != pipeline:
                _log.warning(
                    f"{folder} has the layout {theirs}, this run {pipeline}: weights, optimizer states and schedule "
                    "are restored; cached activations, error-feedback residuals and random generators are not"
                )
        except ConfigError as error:
            answer = {"key": error.key, "got": error.got, "allowed": error.allowed}
    answer = broadcast(answer, group=group)
    if isinstance(answer, dict):
        raise ConfigError(**answer)
    # Note: each rank uses its own output_dir and takes only the checkpoint's name from rank 0, so that no path that
    # arrives over the network is ever unpickled.
    own = Path(output_dir) / _checked_name(answer[0]) if resume is True else Path(str(resume))
    position = None if answer[4] is None else DataPosition.of(answer[4])
    resume_point = ResumePoint(str(own), TrainerState(**answer[1]), answer[2], tuple(answer[3]), position)
    best = Path(resume_point.state.best_model_checkpoint or "").name
    resume_point.state.best_model_checkpoint = str(own.parent / best) if _is_checkpoint_name(best) else None
    return resume_point


def _position(folder: Path) -> dict[str, Any] | None:
    """Read the position in the training data from DeepSpeed's part of a checkpoint; None if it has none."""
    try:
        state = read_state(folder) or {}
    except Exception:  # loading names the damaged file
        return None
    config = state.get("ds_config")
    accumulation = config.get("gradient_accumulation_steps", 1) if isinstance(config, dict) else 1
    position = saved_position(state.get("pipecomp"), accumulation)
    return None if position is None else asdict(position)


def _last_undamaged(output_dir: str, group: Any) -> str | None:
    """Return the last checkpoint that no machine finds damaged; None if rank 0 has no complete one.

    After a power failure a machine may lack files that were not yet on disk. ConfigError if all are damaged.
    """
    names = [path.name for path in _complete_checkpoints(output_dir)] if dist.get_rank() == 0 else None
    damaged: list[str] = []
    for name in reversed(broadcast(names, group=group)):
        folder = Path(output_dir) / _checked_name(name)
        by_rank = gathered(while_others_wait(partial(_inspect, folder / DEEPSPEED), group), group)
        problems = [f"on rank {rank}'s machine {problem}" for rank, (_, problem) in enumerate(by_rank) if problem]
        if not problems or not any(finished for finished, _ in by_rank):  # older versions wrote no manifest
            return str(folder)
        damaged.append(f"{name}: {problems[0]}")
        if dist.get_rank() == 0:
            _log.warning(f"skipping {folder}: {problems[0]}")
    require(not damaged, _KEY, True, f"True only with an undamaged checkpoint: {'; '.join(damaged)}")
    return None


def _inspect(folder: Path) -> tuple[bool, str | None]:
    """Return, on the first rank of a machine, whether the checkpoint is finished, and its problem."""
    first = os.environ["LOCAL_RANK"] == "0"
    return (manifest.finished(folder), manifest.problem(folder)) if first else (False, None)


def _last(output_dir: str) -> Path:
    complete = _complete_checkpoints(output_dir)
    require(complete, _KEY, True, f"True only if {output_dir} has a complete checkpoint")
    return complete[-1]


def _complete_checkpoints(output_dir: str) -> list[Path]:
    """List the complete checkpoints in the order of their steps."""
    return [path for _, path in list_checkpoints(output_dir) if (path / STATE_FILE).is_file()]


def list_checkpoints(output_dir: str) -> list[tuple[int, Path]]:
    """List (step, folder) of all checkpoints, transformers.Trainer's included, in the order of their steps."""
    folders = Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    return sorted((int(number), path) for path in folders if (number := path.name.rpartition("-")[2]).isdecimal())


def _read(folder: Path, resume: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a checkpoint's pipeline layout and trainer state. ConfigError if training cannot resume from it."""
    require((folder / STATE_FILE).is_file(), _KEY, str(resume), f"a checkpoint folder: {folder} has no {STATE_FILE}")
    require(
        (folder / DEEPSPEED).is_dir() and (folder / PIPELINE_FILE).is_file(),
        _KEY,
        str(resume),
        "a checkpoint of PipelineTrainer, written without save_only_model",
    )
    return read_json_object(_KEY, folder / PIPELINE_FILE), read_json_object(_KEY, folder / STATE_FILE)


# -- files


def folder_of(output_dir: str, step: int) -> str:
    """Return the folder of a step's checkpoint."""
    return str(Path(output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}")


def complete(folder: str, state: TrainerState, plan: SplitPlan, replicas: int, due: Sequence[str] = ()) -> None:
    """Write the files that complete a checkpoint. Rank 0 calls it after all ranks have written theirs.

    due: see `ResumePoint`.
    """
    pipeline = layout(plan, replicas) | ({_DUE: list(due)} if due else {})
    atomic_write_text(Path(folder) / PIPELINE_FILE, json.dumps(pipeline) + "\n")
    with atomic_write(Path(folder) / STATE_FILE) as part:  # its presence marks the checkpoint as complete
        state.save_to_json(str(part))
    _set_latest_mtime(Path(folder))


def _set_latest_mtime(folder: Path) -> None:
    """Give the folder the latest modification time, even after the clock was set back: `rotate` sorts by it."""
    folders = [folder, *folder.parent.glob(f"{PREFIX_CHECKPOINT_DIR}-*")]
    latest = max(path.stat().st_mtime for path in folders)
    if folder.stat().st_mtime < latest:
        with contextlib.suppress(OSError):  # some file systems allow this to the owner alone
            os.utime(folder, (latest + 1, latest + 1))


def save_engine(engine: TrainingEngine, folder: str, scheduler: Any, attempts: CollectiveWrite) -> None:
    """Write engine, random generators and schedule. Every rank must call this."""
    engine.save_checkpoint(folder, tag=DEEPSPEED)
    state = {"random": random_state(), "scheduler": scheduler.state_dict()}

    def write() -> None:
        with atomic_write(_rank_file(folder, dist.get_rank())) as part:  # on disk before the checkpoint is complete
            write_state(state, part)

    attempts.attempt(write)


def load_engine(engine: TrainingEngine, resume_point: ResumePoint, scheduler: Any) -> None:
    """Load weights, optimizer, schedule and, with equal layouts, random generators. Every rank must call this."""
    folder = resume_point.folder
    if resume_point.same:
        with all_ranks().collective_errors():
            restore_store(engine, folder)
    path, _ = engine.load_checkpoint(folder, tag=DEEPSPEED)
    file = _rank_file(folder, dist.get_rank() if resume_point.same else 0)
    require(
        path is not None and file.is_file(),
        _KEY,
        folder,
        f"a folder that has {DEEPSPEED} and {file.name} on this rank's machine",
    )
    try:
        state = torch.load(file, weights_only=True)
    except Exception as error:  # torch and pickle raise various errors for a truncated file, without its name
        raise ConfigError(_KEY, str(file), f"an undamaged file ({describe_error(file, error)})") from error
    if resume_point.same:
        scheduler.load_state_dict(state["scheduler"])
        set_random_state(state["random"])
    else:
        load_schedule(scheduler, engine.basic_optimizer.param_groups, state["scheduler"])


def load_weights(engine: TrainingEngine, folder: str) -> None:
    """Load a checkpoint's model without its optimizer. Every rank must call this."""
    path, _ = engine.load_checkpoint(folder, tag=DEEPSPEED, load_module_only=True)
    require(path is not None, "load_best_model_at_end", True, f"True if {folder} has {DEEPSPEED} on every machine")


def _rank_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank_state_{rank}.pth"


# -- rotation


def rotate(output_dir: str, limit: int | None, best: str | None, group: Any) -> None:
    """Delete the oldest checkpoints beyond `limit` on every machine. Every rank must call this."""
    if limit is None:
        return
    dist.barrier(group=group)  # all ranks have finished writing
    deleted: list[str] = []
    if dist.get_rank() == 0:
        before = _checkpoint_names(output_dir)
        rotate_checkpoints(output_dir, limit, best_model_checkpoint=best, use_mtime=True)
        deleted = sorted(before - _checkpoint_names(output_dir))
    _remove(output_dir, broadcast(deleted, group=group))


def remove(folder: str) -> None:
    """Delete a checkpoint, complete or not, on every machine. Every rank must call this."""
    _remove(str(Path(folder).parent), [Path(folder).name])


def keep_only(output_dir: str, best: str, group: Any) -> None:
    """Delete all checkpoints but this one on every machine. Every rank must call this."""
    dist.barrier(group=group)
    _remove(output_dir, broadcast(sorted(_checkpoint_names(output_dir)), group=group), keep=Path(best).name)


def _checkpoint_names(output_dir: str) -> set[str]:
    return {path.name for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.is_dir()}


def _remove(output_dir: str, names: Any, *, keep: str | None = None) -> None:
    """Delete checkpoints on the first rank of each machine; on a shared disk several ranks may do so safely.

    names: received from rank 0. Only checkpoints directly in `output_dir` are deleted. WireError for any other name,
    such as a path that leads elsewhere.
    """
    if not isinstance(names, list) or not all(_is_checkpoint_name(name) for name in names):
        allowed = f"allowed: names of the form {PREFIX_CHECKPOINT_DIR}-*"
        raise WireError(f"rank 0 asks to delete {repr(names)[:200]} in {output_dir}, {allowed}")
    if os.environ["LOCAL_RANK"] == "0":
        for name in sorted(_checkpoint_names(output_dir) & set(names) - {keep}):
            shutil.rmtree(Path(output_dir) / name, ignore_errors=True)


def _checked_name(name: Any) -> str:
    """Check a checkpoint's name received from rank 0, because its files are unpickled. WireError for any other name."""
    if not _is_checkpoint_name(name):
        raise WireError(f"rank 0 names the checkpoint {repr(name)[:200]}, allowed: {PREFIX_CHECKPOINT_DIR}-*")
    return str(name)


def _is_checkpoint_name(name: Any) -> bool:
    return isinstance(name, str) and Path(name).name == name and name.startswith(f"{PREFIX_CHECKPOINT_DIR}-")


# -- message stores


MESSAGES = "messages"  # folder of a checkpoint


def prepare_store(settings: Config, engine: TrainingEngine | None, checkpoint: str | None) -> None:
    """Clear the cached activations before a training. `restore_store` then loads those of a checkpoint.

    Args:
        settings: The "pipecomp" section.
        engine: The open engine or None. It must be closed where `needs_closed_engine` is true.
        checkpoint: The checkpoint to restore activations from, or None.
    """
    if settings.activations.method != "aqsgd":
        return
    if engine is not None:
        drop_cached_activations(engine)
    if settings.store.backend == "memory":
        if checkpoint is not None:
            _log.warning("checkpoints do not save cached activations in memory: training continues without them")
    elif engine is None:
        forget(settings.store.path, dist.get_rank())  # its entries are newer than the checkpoint, or of another run


def needs_closed_engine(settings: Config, checkpoint: str | None) -> bool:
    """Return whether the engine must be closed because a checkpoint's store replaces its own."""
    return settings.activations.method == "aqsgd" and settings.store.backend != "memory" and checkpoint is not None


def drop_cached_activations(engine: TrainingEngine) -> None:
    """Drop all cached activations of an engine."""
    engine.links.forget()
    if engine.links.environment is not None:
        engine.links.environment.commit()


def save_store(engine: TrainingEngine, folder: str, *, copied: bool) -> None:
    """Copy this rank's message store into a checkpoint if `copied` and it is on disk.

    Otherwise delete a copy in the folder: an earlier training may have left one for the same step.
    """
    environment = engine.links.environment
    if copied and isinstance(environment, LmdbEnvironment):
        environment.flush()  # no writes follow before the next step
        copy_file(environment.path / DATA_FILE, _store_copy(folder))
    else:
        _store_copy(folder).unlink(missing_ok=True)


def restore_store(engine: TrainingEngine, folder: str) -> None:
    """Load a checkpoint's cached activations into this rank's empty store, before the engine loads the checkpoint.

    The store stays empty if the copy is missing, damaged, or made with other settings.
    """
    environment = engine.links.environment
    if isinstance(environment, LmdbEnvironment) and not environment.restore(_store_copy(folder).parent):
        rank = dist.get_rank()
        _log.warning(f"{folder} has no cached activations for rank {rank}: training continues without them")


def _store_copy(folder: str) -> Path:
    return Path(folder) / MESSAGES / f"rank-{dist.get_rank()}" / DATA_FILE


# -- writing during a training


def write_checkpoint(trainer: Any, *, messages: bool, count: Callable[[], Any], due: Sequence[str] = ()) -> bool:
    """Write checkpoint-N of the last step. Every rank must call this.

    A checkpoint that cannot be written is removed. A second attempt first deletes older checkpoints as far as
    `save_total_limit` allows; it keeps the last good one and the best one.

    Args:
        trainer: The `PipelineTrainer`.
        messages: Whether to copy the message store.
        count: Updates the state's number of tokens and the recorded counters.
        due: The work that is pending after the step, see `ResumePoint`.

    Returns:
        False if it could not be written; every rank logs the reason.
    """
    args, state = trainer.args, trainer.state
    folder = folder_of(args.output_dir, state.global_step)
    best = state.best_model_checkpoint
    limit = args.save_total_limit or 0
    for last in (limit < 2, True):
        try:
            with private_files():
                _write_files(trainer, folder, messages, count, due)
        except OutputError as error:
            remove(folder)
            state.best_model_checkpoint = best
            if last:
                say_here(f"{error}. Training continues without {Path(folder).name}")
                return False
            say_here(f"{error}. Trying again after deleting the oldest checkpoints, as save_total_limit allows")
            rotate(args.output_dir, limit - 1, best, trainer.group)
        else:
            rotate(args.output_dir, args.save_total_limit, state.best_model_checkpoint, trainer.group)
            return True
    raise AssertionError("the last attempt returns")


def _write_files(trainer: Any, folder: str, messages: bool, count: Callable[[], Any], due: Sequence[str]) -> None:
    """Write all files, the trainer's state last. OutputError on every rank if one cannot write."""
    args, state = trainer.args, trainer.state
    attempts = CollectiveWrite(folder)
    if trainer.rank == 0:  # incomplete until all files are written
        attempts.attempt(lambda: (Path(folder) / STATE_FILE).unlink(missing_ok=True))
    trainer.save_model(folder, _internal_call=True)
    if not args.save_only_model:
        save_engine(trainer.engine, folder, trainer.lr_scheduler, attempts)
        attempts.attempt(lambda: save_store(trainer.engine, folder, copied=messages))
    count()
    if state.best_global_step:
        best = folder_of(args.output_dir, state.best_global_step)
        if broadcast(Path(best).is_dir(), group=trainer.group):
            state.best_model_checkpoint = best
    attempts.raise_problems()  # every rank has written its files
    if trainer.rank == 0:
        callbacks.save(trainer)
        attempts.attempt(lambda: complete(folder, state, trainer.plan, trainer.replicas, due))
    attempts.raise_problems()
