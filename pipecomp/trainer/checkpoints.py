"""Checkpoints of `PipelineTrainer` and of recipes: their files, resuming and rotation.

    checkpoint-N/   the model as a from_pretrained folder, tokenizer, training_args.bin (not those of recipes), and
        pipeline.json            cuts and replicas; a run with others reshards the checkpoint. Also the settings of the
                                 run, and the work that was pending after the step when a signal stopped training
        deepspeed/               the engine's checkpoint: weights, optimizer states, error-feedback residuals, and with
                                 store.in_checkpoints the cached activations
        rank_state_N.pth         random generators and schedule of the rank with state N (`pipecomp.rank_layout`)
        trainer_state.json       written last: a folder without it is incomplete

Without a shared disk, each machine keeps the files of its ranks in a folder of the same name.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from transformers.utils import logging as transformers_logging

from pipecomp.buffers.admin import forget
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
from pipecomp.elastic.second_home import RankState
from pipecomp.errors import ConfigError, OutputError, WireError, require
from pipecomp.interfaces import TrainingEngine
from pipecomp.stages.partition.planning import SplitPlan
from pipecomp.trainer import callbacks
from pipecomp.utils.files import atomic_write, atomic_write_text

STATE_FILE = "trainer_state.json"
PIPELINE_FILE = "pipeline.json"
DEEPSPEED = "deepspeed"  # the tag of DeepSpeed's checkpoint, a folder
EVALUATION, EPOCH_END = "evaluation", "epoch end"
_DUE, _RUN = "due", "run"
_KEY = "resume_from_checkpoint"

_log = transformers_logging.get_logger(__name__)


class ResumePoint(NamedTuple):
    """The checkpoint that a training resumes from.

    same: its pipeline has the same cuts and replicas. due: the work that was pending after its step when a signal
    stopped training, `EVALUATION` or `EPOCH_END` or both. position: in the training data, None if not recorded. run:
    the settings of its run.
    """

    folder: str
    state: TrainerState
    same: bool
    due: tuple[str, ...] = ()
    position: DataPosition | None = None
    run: Mapping[str, Any] = MappingProxyType({})


def layout(plan: SplitPlan, replicas: int) -> dict[str, Any]:
    """Describe the pipeline. Cached activations and random generators carry over only between equal layouts."""
    return {"cuts": list(plan.cuts), "replicas": replicas}


def last_good(key: str, output_dir: str, group: Any) -> tuple[str | None, dict[int, str]]:
    """Find the last checkpoint that is good on all machines. Every rank must call this.

    The first rank of each machine reads the machine's checkpoints, newest first, until one is good everywhere.

    Args:
        key: The setting that names the folder, for errors.
        output_dir: The folder of the checkpoints.
        group: A gloo group of all ranks.

    Returns:
        The checkpoint's folder, or None; and the reasons why later ones were skipped, by step.

    Raises:
        ConfigError: On every rank, if none is good on all machines, and some machines have good ones. Checkpoints that
            a killed run has not finished on the other machines are no error.
    """
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    own = dict(list_checkpoints(output_dir)) if first else {}
    skipped: dict[int, str] = {}
    lost: list[str] = []
    steps = {_checked_step(step) for steps in gathered(sorted(own), group) for step in steps}
    for step in sorted(steps, reverse=True):
        problem = partial(_problem, own.get(step)) if first else lambda: ""
        by_rank = gathered(while_others_wait(problem, group), group)
        bad = {rank: str(problem) for rank, problem in enumerate(by_rank) if problem}
        if not bad:
            return folder_of(output_dir, step), skipped
        rank, text = next(iter(bad.items()))
        skipped[step] = f"on rank {rank}'s machine {text}" if None in by_rank else text
        if None in by_rank and set(bad.values()) != {manifest.NOT_FINISHED}:
            lost.append(f"step {step}: {skipped[step]}")
    allowed = f"a folder with the run's checkpoints on every machine: {'; '.join(lost)}"
    require(not lost, key, str(output_dir), allowed, "To start over, choose another folder")
    return None, skipped


def _problem(folder: Path | None) -> str | None:
    """Return why training cannot resume from a checkpoint of this machine; None if it can."""
    if folder is None:
        return "it is missing"
    if not (folder / DEEPSPEED).is_dir():
        return f"it has no {DEEPSPEED}: another program or save_only_model wrote it"
    if dist.get_rank() == 0 and not (folder / STATE_FILE).is_file():
        return manifest.NOT_FINISHED
    return manifest.problem(folder / DEEPSPEED)


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
    folder: str | None = str(resume)
    if resume is True:
        folder, skipped = last_good(_KEY, output_dir, group)
        listed = "; ".join(f"{PREFIX_CHECKPOINT_DIR}-{step}: {problem}" for step, problem in skipped.items())
        allowed = f"True only if {output_dir} has a complete checkpoint of PipelineTrainer"
        require(folder is not None, _KEY, True, allowed, listed or None)
        if listed and dist.get_rank() == 0:
            _log.warning(f"skipping {listed}")
    assert folder is not None
    return read(folder, pipeline, group)


def read(folder: str, pipeline: dict[str, Any] | None, group: Any) -> ResumePoint:
    """Read the checkpoint in a folder on rank 0. Every rank must call this. Raises ConfigError as `find` does.

    pipeline: as for `find`; None to compare none.
    """
    answer: Any = None
    if dist.get_rank() == 0:
        try:
            theirs, state = _read(Path(folder))
            due, run = theirs.pop(_DUE, []), theirs.pop(_RUN, {})
            answer = state, theirs == pipeline, due, _position(Path(folder) / DEEPSPEED), run
            if pipeline is not None and theirs != pipeline:
                _log.warning(
                    f"{folder} has the layout {theirs}, this run {pipeline}: weights, optimizer states and schedule "
                    "are restored; cached activations, error-feedback residuals and random generators are not"
                )
        except ConfigError as error:
            answer = {"key": error.key, "got": error.got, "allowed": error.allowed}
    answer = broadcast(answer, group=group)
    if isinstance(answer, dict):
        raise ConfigError(**answer)
    # Note: each rank uses its own folder, so that no path that arrives over the network is ever unpickled.
    state, same, due, position, run = answer
    position = None if position is None else DataPosition.of(position)
    resume_point = ResumePoint(folder, TrainerState(**state), same, tuple(due), position, run)
    best = Path(resume_point.state.best_model_checkpoint or "").name
    own = Path(folder).parent / best
    resume_point.state.best_model_checkpoint = str(own) if _is_checkpoint_name(best) else None
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


def list_checkpoints(output_dir: str) -> list[tuple[int, Path]]:
    """List (step, folder) of all checkpoints, transformers.Trainer's included, in the order of their steps."""
    folders = Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    return sorted((int(number), path) for path in folders if (number := path.name.rpartition("-")[2]).isdecimal())


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a checkpoint's pipeline layout and trainer state. ConfigError if training cannot resume from it."""
    allowed = f"a checkpoint folder: {folder} has no {STATE_FILE}"
    require((folder / STATE_FILE).is_file(), _KEY, str(folder), allowed)
    allowed = "a checkpoint of PipelineTrainer, written without save_only_model"
    require((folder / DEEPSPEED).is_dir() and (folder / PIPELINE_FILE).is_file(), _KEY, str(folder), allowed)
    return read_json_object(_KEY, folder / PIPELINE_FILE), read_json_object(_KEY, folder / STATE_FILE)


# -- files


def has_model(folder: str | os.PathLike) -> bool:
    """Return whether a folder has a saved model or adapter."""
    return any(True for pattern in ("*.safetensors", "pytorch_model*.bin") for _ in Path(folder).glob(pattern))


def check_unused(output_dir: str, group: Any) -> None:
    """Check that a new training overwrites nothing that another program has saved. Every rank must call this.

    Raises:
        ConfigError: On every rank, if the folder of rank 0 has checkpoints or a model.
    """
    found = None
    if dist.get_rank() == 0:
        names = [path.name for step, path in list_checkpoints(output_dir) if (path / STATE_FILE).is_file()]
        found = ", ".join(["a trained model"] * has_model(output_dir) + names) or None
    found = broadcast(found, group=group)
    hint = f"It has {found}: resume_from_checkpoint=True continues, overwrite=True of the trainer starts over"
    require(found is None, "output_dir", str(output_dir), "a folder without the results of another training", hint)


def folder_of(output_dir: str, step: int) -> str:
    """Return the folder of a step's checkpoint."""
    return str(Path(output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}")


def complete(
    folder: str,
    state: TrainerState,
    plan: SplitPlan,
    replicas: int,
    due: Sequence[str] = (),
    run: Mapping[str, Any] | None = None,
) -> None:
    """Write the files that complete a checkpoint. Rank 0 calls it after all ranks have written theirs.

    due, run: see `ResumePoint`.
    """
    atomic_write_text(Path(folder) / PIPELINE_FILE, _pipeline_text(plan, replicas, due, run))
    with atomic_write(Path(folder) / STATE_FILE) as part:  # its presence marks the checkpoint as complete
        state.save_to_json(str(part))
    _set_latest_mtime(Path(folder))


def _pipeline_text(plan: SplitPlan, replicas: int, due: Sequence[str], run: Mapping[str, Any] | None) -> str:
    pipeline = layout(plan, replicas) | ({_DUE: list(due)} if due else {}) | ({_RUN: dict(run)} if run else {})
    return json.dumps(pipeline) + "\n"


def state_of_rank(trainer: Any) -> RankState:
    """Collect a trainer's files of this rank in a checkpoint of the last step, for the second home.

    The model's folder and work that is pending after the step are left out.
    """
    state: TrainerState = trainer.state
    files: dict[str, Any] = {_rank_file("", trainer.engine.state_number).name: _rank_state(trainer.lr_scheduler)}
    if trainer.rank == 0:
        files[PIPELINE_FILE] = _pipeline_text(trainer.plan, trainer.replicas, (), trainer._run_settings())
        files[STATE_FILE] = json.dumps(asdict(state), indent=2, sort_keys=True) + "\n"
    return RankState(files=files, folder=Path(folder_of("", state.global_step)).name, engine=DEEPSPEED)


def _rank_state(scheduler: Any) -> dict[str, Any]:
    return {"random": random_state(), "scheduler": None if scheduler is None else scheduler.state_dict()}


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
    state = _rank_state(scheduler)

    def write() -> None:
        with atomic_write(_rank_file(folder, engine.state_number)) as part:  # on disk before the checkpoint is complete
            write_state(state, part)

    attempts.attempt(write)


def load_engine(engine: TrainingEngine, resume_point: ResumePoint, scheduler: Any) -> None:
    """Load weights, optimizer, schedule and, with equal layouts, random generators. Every rank must call this.

    scheduler: None if the engine has it.
    """
    folder = resume_point.folder
    path, _ = engine.load_checkpoint(folder, tag=DEEPSPEED)
    file = _rank_file(folder, engine.state_number if resume_point.same else 0)
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
        set_random_state(state["random"])
    if scheduler is None:
        return
    if resume_point.same:
        scheduler.load_state_dict(state["scheduler"])
    else:
        load_schedule(scheduler, engine.basic_optimizer.param_groups, state["scheduler"])


def load_weights(engine: TrainingEngine, folder: str) -> None:
    """Load a checkpoint's model without its optimizer. Every rank must call this."""
    path, _ = engine.load_checkpoint(folder, tag=DEEPSPEED, load_module_only=True)
    require(path is not None, "load_best_model_at_end", True, f"True if {folder} has {DEEPSPEED} on every machine")


def _rank_file(folder: str, number: int) -> Path:
    return Path(folder) / f"rank_state_{number}.pth"


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


def remove_after(output_dir: str, step: int, group: Any) -> None:
    """Delete the checkpoints of later steps on every machine. Every rank must call this."""
    if os.environ["LOCAL_RANK"] == "0":
        _remove(output_dir, [path.name for number, path in list_checkpoints(output_dir) if number > step])
    dist.barrier(group=group)  # the next one may have the same name


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


def _checked_step(step: Any) -> int:
    """Check a step received from another rank: files of its checkpoint are unpickled. WireError if it is none."""
    if type(step) is not int:
        raise WireError(f"a rank names the checkpoint of step {repr(step)[:200]}, allowed: a whole number")
    return step


def _is_checkpoint_name(name: Any) -> bool:
    return isinstance(name, str) and Path(name).name == name and name.startswith(f"{PREFIX_CHECKPOINT_DIR}-")


# -- message stores


def prepare_store(settings: Config, engine: TrainingEngine | None, number: int, *, resumes: bool) -> None:
    """Clear the cached activations before a training; a checkpoint has a copy of those that belong to it.

    Args:
        settings: The "pipecomp" section.
        engine: The open engine or None.
        number: Number of this rank's state.
        resumes: The training resumes from a checkpoint.
    """
    if settings.activations.method != "aqsgd":
        return
    if engine is not None:
        drop_cached_activations(engine)
    if settings.store.backend == "memory":
        if resumes:
            _log.warning("checkpoints do not save cached activations in memory: training continues without them")
    elif engine is None:
        forget(settings.store.path, number)  # its entries are newer than the checkpoint, or of another run


def drop_cached_activations(engine: TrainingEngine) -> None:
    """Drop all cached activations of an engine."""
    engine.links.forget()
    if engine.links.environment is not None:
        engine.links.environment.commit()


# -- writing during a training


def write_checkpoint(trainer: Any, *, count: Callable[[], Any], due: Sequence[str] = ()) -> bool:
    """Write checkpoint-N of the last step. Every rank must call this.

    A checkpoint that cannot be written is removed. A second attempt first deletes older checkpoints as far as
    `save_total_limit` allows; it keeps the last good one and the best one.

    Args:
        trainer: The `PipelineTrainer`.
        count: Updates the state's number of tokens and the recorded counters.
        due: The work that is pending after the step, see `ResumePoint`.

    Returns:
        False if it could not be written; every rank logs the reason.
    """
    args, state, output_dir = trainer.args, trainer.state, trainer._checkpoint_folder()
    folder = folder_of(output_dir, state.global_step)
    best = state.best_model_checkpoint
    limit = args.save_total_limit or 0
    for last in (limit < 2, True):
        try:
            with private_files():
                _write_files(trainer, folder, count, due)
        except OutputError as error:
            remove(folder)
            state.best_model_checkpoint = best
            if last:
                say_here(f"{error}. Training continues without {Path(folder).name}")
                return False
            say_here(f"{error}. Trying again after deleting the oldest checkpoints, as save_total_limit allows")
            rotate(output_dir, limit - 1, best, trainer.group)
        else:
            rotate(output_dir, args.save_total_limit, state.best_model_checkpoint, trainer.group)
            return True
    raise AssertionError("the last attempt returns")


def _write_files(trainer: Any, folder: str, count: Callable[[], Any], due: Sequence[str]) -> None:
    """Write all files, the trainer's state last. OutputError on every rank if one cannot write."""
    args, state = trainer.args, trainer.state
    attempts = CollectiveWrite(folder)
    if trainer.rank == 0:  # incomplete until all files are written
        attempts.attempt(lambda: (Path(folder) / STATE_FILE).unlink(missing_ok=True))
    trainer._write_model(folder)
    if not args.save_only_model:
        save_engine(trainer.engine, folder, trainer.lr_scheduler, attempts)
    count()
    if state.best_global_step:
        best = folder_of(str(Path(folder).parent), state.best_global_step)
        if broadcast(Path(best).is_dir(), group=trainer.group):
            state.best_model_checkpoint = best
    attempts.raise_problems()  # every rank has written its files
    if trainer.rank == 0:
        callbacks.save(trainer)
        attempts.attempt(lambda: complete(folder, state, trainer.plan, trainer.replicas, due, trainer._run_settings()))
    attempts.raise_problems()
