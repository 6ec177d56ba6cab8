"""What a checkpoint of the trainer holds beside the model, and how training takes it up again.

    checkpoint-N/   the model as a from_pretrained folder, tokenizer, training_args.bin, trainer_state.json,
        pipeline.json            how the model was partitioned; with other stages or replicas it is resharded. Also what
                                 was due after the step when training was asked to stop
        deepspeed/               DeepSpeed's own checkpoint: optimizer states, float32 masters, error-feedback residuals
        rank_state_R.pth         random generators and schedule of rank R
        messages/rank-R/         AQ-SGD's cached activations of rank R, a copy of the store
        trainer_state.json       is written last: a folder without it is not complete

Ranks on machines without a common disk have their own files in a folder of the same name there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
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
from pipecomp.checkpoint.reshard import load_schedule
from pipecomp.checkpoint.writing import (
    CollectiveWrite,
    describe_error,
    private_files,
    random_state,
    set_random_state,
    write_state,
)
from pipecomp.config import Config, read_json_object
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


class Found(NamedTuple):
    """A checkpoint to go on from.

    same: it is of a pipeline with the same cuts and replicas. due: what of `EVALUATION` and `EPOCH_END` was still to be
    done after its step when training was asked to stop.
    """

    folder: str
    state: TrainerState
    same: bool
    due: tuple[str, ...] = ()


def layout(plan: SplitPlan, replicas: int) -> dict[str, Any]:
    """Describe what a checkpoint must share with a run whose activations and random generators go on as they were."""
    return {"cuts": list(plan.cuts), "replicas": replicas}


def find(
    resume: str | os.PathLike | bool | None, output_dir: str, pipeline: dict[str, Any], group: Any
) -> Found | None:
    """Find the checkpoint that `train(resume_from_checkpoint=resume)` means, as rank 0 sees it.

    Args:
        resume: A folder, True for the last one that is whole, None or False to start anew.
        output_dir: The trainer's.
        pipeline: The `layout` of this run. One of another layout is warned of.
        group: A gloo group of all ranks, each of which must call this.

    Returns:
        The checkpoint, None to start anew.

    Raises:
        ConfigError: On every rank, if there is no checkpoint, or one of another kind.
    """
    if resume is None or resume is False:
        return None
    place = _last_whole(output_dir, group) if resume is True else str(resume)
    answer: Any = None
    if dist.get_rank() == 0:
        try:
            folder = _last(output_dir) if place is None else Path(place)
            theirs, state = _read(folder, resume)
            due = theirs.pop(_DUE, [])
            answer = folder.name, state, theirs == pipeline, due
            if theirs != pipeline:
                _log.warning(
                    f"{folder} is of {theirs}, this run of {pipeline}: weights, optimizer states and schedule go on, "
                    "cached activations, error-feedback residuals and random generators do not"
                )
        except ConfigError as error:
            answer = {"key": error.key, "got": error.got, "allowed": error.allowed}
    answer = broadcast(answer, group=group)
    if isinstance(answer, dict):
        raise ConfigError(**answer)
    # Each rank goes by the folder that it knows itself: rank 0 says no more than which checkpoint in there.
    own = Path(output_dir) / _named(answer[0]) if resume is True else Path(str(resume))
    found = Found(str(own), TrainerState(**answer[1]), answer[2], tuple(answer[3]))
    best = Path(found.state.best_model_checkpoint or "").name
    found.state.best_model_checkpoint = str(own.parent / best) if _is_name(best) else None
    return found


def _last_whole(output_dir: str, group: Any) -> str | None:
    """Name the last checkpoint that is whole on every machine, None if rank 0 has none that is complete.

    A machine that lost its power may lack what it had not yet put on its disk. ConfigError where none is whole.
    """
    there = [path.name for path in _complete(output_dir)] if dist.get_rank() == 0 else None
    damaged: list[str] = []
    for name in reversed(broadcast(there, group=group)):
        folder = Path(output_dir) / _named(name)
        told = gathered(while_others_wait(partial(_look, folder / DEEPSPEED), group), group)
        problems = [f"on rank {rank}'s machine {said}" for rank, (_, said) in enumerate(told) if said]
        if not problems or not any(finished for finished, _ in told):  # older versions wrote no manifest
            return str(folder)
        damaged.append(f"{name}: {problems[0]}")
        if dist.get_rank() == 0:
            _log.warning(f"{folder} is passed over: {problems[0]}")
    require(not damaged, _KEY, True, f"True only where a checkpoint is whole: {'; '.join(damaged)}")
    return None


def _look(folder: Path) -> tuple[bool, str | None]:
    """Whether it is finished, and what is wrong with it, as the first rank of a machine sees it."""
    first = os.environ["LOCAL_RANK"] == "0"
    return (manifest.finished(folder), manifest.problem(folder)) if first else (False, None)


def _last(output_dir: str) -> Path:
    complete = _complete(output_dir)
    require(complete, _KEY, True, f"True only where {output_dir} has a complete checkpoint")
    return complete[-1]


def _complete(output_dir: str) -> list[Path]:
    """List the complete checkpoints by their step."""
    return [path for _, path in numbered(output_dir) if (path / STATE_FILE).is_file()]


def numbered(output_dir: str) -> list[tuple[int, Path]]:
    """List all checkpoints' folders with their steps, by these; Trainer's own too."""
    there = Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    return sorted((int(number), path) for path in there if (number := path.name.rpartition("-")[2]).isdecimal())


def _read(folder: Path, resume: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read what pipeline a checkpoint is of, and its state. ConfigError if it is not one to go on from."""
    require((folder / STATE_FILE).is_file(), _KEY, str(resume), f"a checkpoint folder: {folder} has no {STATE_FILE}")
    require(
        (folder / DEEPSPEED).is_dir() and (folder / PIPELINE_FILE).is_file(),
        _KEY,
        str(resume),
        "a checkpoint of this trainer that was not written with save_only_model",
    )
    return read_json_object(_KEY, folder / PIPELINE_FILE), read_json_object(_KEY, folder / STATE_FILE)


# -- what is written


def folder_of(output_dir: str, step: int) -> str:
    """Name the folder of the checkpoint of a step."""
    return str(Path(output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}")


def complete(folder: str, state: TrainerState, plan: SplitPlan, replicas: int, due: Sequence[str] = ()) -> None:
    """Write what makes a checkpoint complete; rank 0 does, once all others have written their files.

    due: see `Found`.
    """
    pipeline = layout(plan, replicas) | ({_DUE: list(due)} if due else {})
    atomic_write_text(Path(folder) / PIPELINE_FILE, json.dumps(pipeline) + "\n")
    with atomic_write(Path(folder) / STATE_FILE) as part:  # half of it would pass for a complete checkpoint
        state.save_to_json(str(part))
    _make_youngest(Path(folder))


def _make_youngest(folder: Path) -> None:
    """Let no other checkpoint have a later time, as where the clock was set back: `rotate` deletes by it."""
    found = [folder, *folder.parent.glob(f"{PREFIX_CHECKPOINT_DIR}-*")]
    latest = max(path.stat().st_mtime for path in found)
    if folder.stat().st_mtime < latest:
        with contextlib.suppress(OSError):  # some disks let only their owner do that
            os.utime(folder, (latest + 1, latest + 1))


def save_engine(engine: TrainingEngine, folder: str, scheduler: Any, attempts: CollectiveWrite) -> None:
    """Write what training needs to go on, but for the cached activations; every rank must call this."""
    engine.save_checkpoint(folder, tag=DEEPSPEED)
    state = {"random": random_state(), "scheduler": scheduler.state_dict()}
    attempts.attempt(lambda: _write_rank(state, _rank_file(folder, dist.get_rank())))


def _write_rank(state: Any, file: Path) -> None:
    with atomic_write(file) as part:  # on the disk before the checkpoint is complete
        write_state(state, part)


def load_engine(engine: TrainingEngine, found: Found, scheduler: Any) -> None:
    """Load weights, optimizer, schedule and, for the same pipeline, random generators; every rank must call this."""
    folder = found.folder
    if found.same:
        with all_ranks().collective_errors():
            restore_store(engine, folder)
    path, _ = engine.load_checkpoint(folder, tag=DEEPSPEED)
    file = _rank_file(folder, dist.get_rank() if found.same else 0)
    require(
        path is not None and file.is_file(),
        _KEY,
        folder,
        f"a folder that has {DEEPSPEED} and {file.name} on this rank's machine",
    )
    try:
        state = torch.load(file, weights_only=True)
    except Exception as error:  # what torch and pickle raise of a file that was cut off names none
        raise ConfigError(_KEY, str(file), f"a file that is whole ({describe_error(file, error)})") from error
    if found.same:
        scheduler.load_state_dict(state["scheduler"])
        set_random_state(state["random"])
    else:
        load_schedule(scheduler, engine.basic_optimizer.param_groups, state["scheduler"])


def load_weights(engine: TrainingEngine, folder: str) -> None:
    """Load the model of a checkpoint, without its optimizer; every rank must call this."""
    path, _ = engine.load_checkpoint(folder, tag=DEEPSPEED, load_module_only=True)
    require(path is not None, "load_best_model_at_end", True, f"True where {folder} has {DEEPSPEED} on every machine")


def _rank_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank_state_{rank}.pth"


# -- old ones


def rotate(output_dir: str, limit: int | None, best: str | None, group: Any) -> None:
    """Delete the oldest checkpoints beyond `limit`, on every machine; every rank must call this."""
    if limit is None:
        return
    dist.barrier(group=group)  # nobody is writing any more
    gone: list[str] = []
    if dist.get_rank() == 0:
        before = _folders(output_dir)
        rotate_checkpoints(output_dir, limit, best_model_checkpoint=best, use_mtime=True)
        gone = sorted(before - _folders(output_dir))
    _remove(output_dir, broadcast(gone, group=group))


def remove(folder: str) -> None:
    """Delete what there is of a checkpoint, on every machine; every rank must call this."""
    _remove(str(Path(folder).parent), [Path(folder).name])


def keep_only(output_dir: str, best: str, group: Any) -> None:
    """Delete all checkpoints but this one, on every machine; every rank must call this."""
    dist.barrier(group=group)
    there = broadcast(sorted(_folders(output_dir)), group=group)
    _remove(output_dir, there, keep=Path(best).name)


def _folders(output_dir: str) -> set[str]:
    return {path.name for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.is_dir()}


def _remove(output_dir: str, names: Any, *, keep: str | None = None) -> None:
    """One rank of each machine deletes there; on a common disk it does no harm that several do.

    names: as rank 0 says them. Only checkpoints that this machine has in `output_dir` itself are deleted; WireError for
    what cannot be one, such as a path that leads out of it.
    """
    if not isinstance(names, list) or not all(_is_name(name) for name in names):
        allowed = f"allowed: names of {PREFIX_CHECKPOINT_DIR}-* there"
        raise WireError(f"rank 0 wants {repr(names)[:200]} deleted in {output_dir}, {allowed}")
    if os.environ["LOCAL_RANK"] == "0":
        for name in sorted(_folders(output_dir) & set(names) - {keep}):
            shutil.rmtree(Path(output_dir) / name, ignore_errors=True)


def _named(name: Any) -> str:
    """A checkpoint's name that rank 0 has said: what is read there is unpickled. WireError for a path, or another."""
    if not _is_name(name):
        raise WireError(f"rank 0 names a checkpoint {repr(name)[:200]}, allowed: {PREFIX_CHECKPOINT_DIR}-*")
    return str(name)


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and Path(name).name == name and name.startswith(f"{PREFIX_CHECKPOINT_DIR}-")


# -- message stores


MESSAGES = "messages"  # a checkpoint's folder for them

_log = transformers_logging.get_logger(__name__)


def prepare_store(settings: Config, engine: TrainingEngine | None, checkpoint: str | None) -> None:
    """Let a training begin without cached activations; those of a checkpoint come by `restore`.

    Args:
        settings: The "pipecomp" section.
        engine: None, or the one that is open, which must be closed if `needs_closed_engine` says so.
        checkpoint: Whose they will be; None for none.
    """
    if settings.activations.method != "aqsgd":
        return
    if engine is not None:
        drop_cached(engine)
    if settings.store.backend == "memory":
        if checkpoint is not None:
            _log.warning("cached activations in memory are not saved: training goes on without them")
    elif engine is None:
        forget(settings.store.path, dist.get_rank())  # what is held is newer than a checkpoint, or of another run


def needs_closed_engine(settings: Config, checkpoint: str | None) -> bool:
    """Say whether a training begins with another store than an engine would have open."""
    return settings.activations.method == "aqsgd" and settings.store.backend != "memory" and checkpoint is not None


def drop_cached(engine: TrainingEngine) -> None:
    """Drop all cached activations that an engine holds."""
    engine.links.forget()
    if engine.links.environment is not None:
        engine.links.environment.commit()


def save_store(engine: TrainingEngine, folder: str, *, copied: bool) -> None:
    """Copy this rank's message store into a checkpoint, if it is to be and there is one on disk.

    Otherwise the checkpoint is left without: an earlier training's of the same step may have been in the folder.
    """
    environment = engine.links.environment
    if copied and isinstance(environment, LmdbEnvironment):
        environment.flush()  # nothing is being written from here until the next step
        copy_file(environment.path / DATA_FILE, _saved(folder))
    else:
        _saved(folder).unlink(missing_ok=True)


def restore_store(engine: TrainingEngine, folder: str) -> None:
    """Let this rank's store, which is empty, hold what a checkpoint cached; then the engine loads the checkpoint.

    Where there is no copy, or one that is damaged or was made with other settings, it stays empty.
    """
    environment = engine.links.environment
    if isinstance(environment, LmdbEnvironment) and not environment.restore(_saved(folder).parent):
        rank = dist.get_rank()
        _log.warning(f"{folder} has no cached activations that rank {rank} can use: training goes on without them")


def _saved(folder: str) -> Path:
    return Path(folder) / MESSAGES / f"rank-{dist.get_rank()}" / DATA_FILE


# -- writing during a training


def write_checkpoint(trainer: Any, *, messages: bool, count: Callable[[], Any], due: Sequence[str] = ()) -> bool:
    """Write checkpoint-N of the step that was made last; every rank must call this.

    Where the disk refuses it, nothing of it is left. It is tried once more if `save_total_limit` lets older ones go
    before it, which the last good one and the best one do not.

    Args:
        trainer: Whose.
        messages: Whether to copy the message store.
        count: Brings the state's number of tokens up to date, and what is recorded.
        due: What is still to be done after that step, see `Found`.

    Returns:
        False if it could not be written, which is said on every rank.
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
                say_here(f"{error}. There will be no {Path(folder).name}")
                return False
            say_here(f"{error}. It is tried again without the oldest ones, which save_total_limit lets go")
            rotate(args.output_dir, limit - 1, best, trainer.group)
        else:
            rotate(args.output_dir, args.save_total_limit, state.best_model_checkpoint, trainer.group)
            return True
    raise AssertionError("the last attempt returns")


def _write_files(trainer: Any, folder: str, messages: bool, count: Callable[[], Any], due: Sequence[str]) -> None:
    """Write all files, the state's last. OutputError on every rank if one cannot."""
    args, state = trainer.args, trainer.state
    attempts = CollectiveWrite(folder)
    if trainer.rank == 0:  # incomplete until everything is there
        attempts.attempt(lambda: (Path(folder) / STATE_FILE).unlink(missing_ok=True))
    trainer.save_model(folder)
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
