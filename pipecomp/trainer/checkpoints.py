"""What a checkpoint of the trainer holds beside the model, and how training takes it up again.

    checkpoint-N/   the model as a from_pretrained folder, tokenizer, training_args.bin, trainer_state.json,
        pipeline.json            how the model was cut; with other stages or replicas it is cut anew
        deepspeed/               DeepSpeed's own checkpoint: optimizer states, float32 masters, error-feedback residuals
        rank_state_R.pth         random generators and schedule of rank R
        messages/rank-R/         AQ-SGD's messages of rank R, a copy of the store
        trainer_state.json       is written last: a folder without it is not whole

Ranks on machines without a common disk have their own files in a folder of the same name there.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from transformers.utils import logging as transformers_logging

from pipecomp.buffers import LmdbEnvironment
from pipecomp.buffers.admin import prune
from pipecomp.buffers.lmdb_folder import DATA_FILE
from pipecomp.buffers.snapshot import copy_file
from pipecomp.checkpoint.rng_state import random_state, set_random_state
from pipecomp.errors import ConfigError

STATE_FILE = "trainer_state.json"
PIPELINE_FILE = "pipeline.json"
DEEPSPEED = "deepspeed"  # the tag of DeepSpeed's checkpoint, a folder
MESSAGES = "messages"
_KEY = "resume_from_checkpoint"

_log = transformers_logging.get_logger(__name__)


class Found(NamedTuple):
    """A checkpoint to go on from. same: it is of a pipeline with the same cuts and replicas."""

    folder: str
    state: TrainerState
    same: bool


def shared(value: Any, group: Any) -> Any:
    """Rank 0's value, on every rank of the gloo group."""
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group, device=torch.device("cpu"))
    return box[0]


def find(
    resume: str | os.PathLike | bool | None, output_dir: str, pipeline: dict[str, Any], group: Any
) -> Found | None:
    """The checkpoint that `train(resume_from_checkpoint=resume)` means, as rank 0 sees it; None to start anew.

    pipeline: the cuts and replicas of this run. Raises ConfigError on every rank if there is none, or another kind.
    Warns if it is of other cuts or replicas.
    """
    if resume is None or resume is False:
        return None
    answer: Any = None
    if dist.get_rank() == 0:
        try:
            folder = _last(output_dir) if resume is True else Path(resume)
            theirs = _read(folder, resume)
            answer = str(folder), (folder / STATE_FILE).read_text(encoding="utf-8"), theirs == pipeline
            if theirs != pipeline:
                _log.warning(
                    f"{folder} is of {theirs}, this run is of {pipeline}: messages are sent whole once, error-feedback "
                    "residuals start empty, random generators start anew"
                )
        except ConfigError as error:
            answer = {"key": error.key, "got": error.got, "allowed": error.allowed}
    answer = shared(answer, group)
    if isinstance(answer, dict):
        raise ConfigError(**answer)
    return Found(answer[0], TrainerState(**json.loads(answer[1])), answer[2])


def _last(output_dir: str) -> Path:
    whole = [path for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if (path / STATE_FILE).is_file()]
    numbered = [(int(number), path) for path in whole if (number := path.name.rpartition("-")[2]).isdecimal()]
    if not numbered:
        raise ConfigError(_KEY, True, f"True only where {output_dir} has a whole checkpoint")
    return max(numbered)[1]


def _read(folder: Path, resume: object) -> dict[str, Any]:
    """What pipeline a checkpoint is of. ConfigError if it is not one to go on from."""
    if not (folder / STATE_FILE).is_file():
        raise ConfigError(_KEY, str(resume), f"a checkpoint folder: {folder} has no {STATE_FILE}")
    if not (folder / DEEPSPEED).is_dir() or not (folder / PIPELINE_FILE).is_file():
        raise ConfigError(_KEY, str(resume), "a checkpoint of this trainer that was not written with save_only_model")
    return json.loads((folder / PIPELINE_FILE).read_text(encoding="utf-8"))


# -- the engine's and the rank's own state


def save_engine(engine: Any, folder: str, scheduler: Any) -> None:
    """Write what training needs to go on, but for the messages; every rank must call this."""
    engine.save_checkpoint(folder, tag=DEEPSPEED)
    state = {"random": random_state(), "scheduler": scheduler.state_dict()}
    torch.save(state, _rank_file(folder, dist.get_rank()))


def load_engine(engine: Any, found: Found, scheduler: Any) -> None:
    """Weights, optimizer, schedule and, for the same pipeline, random generators; every rank must call this."""
    folder = found.folder
    path, _ = engine.load_checkpoint(folder, tag=DEEPSPEED)
    file = _rank_file(folder, dist.get_rank() if found.same else 0)
    if path is None or not file.is_file():
        raise ConfigError(_KEY, folder, f"a folder that has {DEEPSPEED} and {file.name} on this rank's machine")
    state = torch.load(file, weights_only=True)
    scheduler.load_state_dict(state["scheduler"])
    if found.same:
        set_random_state(state["random"])


def load_weights(engine: Any, folder: str) -> None:
    """The model of a checkpoint, without its optimizer; every rank must call this."""
    path, _ = engine.load_checkpoint(folder, tag=DEEPSPEED, load_module_only=True)
    if path is None:
        raise ConfigError("load_best_model_at_end", True, f"True where {folder} has {DEEPSPEED} on every machine")


def _rank_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank_state_{rank}.pth"


# -- messages


def save_messages(engine: Any, folder: str) -> None:
    """Copy this rank's message store; nothing where it is in memory or there is none."""
    environment = engine.links.environment
    if not isinstance(environment, LmdbEnvironment):
        return
    environment.flush()  # nothing is being written from here until the next step
    copy_file(environment.path / DATA_FILE, _saved(folder))


def restore_messages(folder: str, store: str | os.PathLike) -> bool:
    """Put a checkpoint's messages in the place of this rank's, which no engine has open. False if it has none."""
    saved = _saved(folder)
    if not saved.is_file():
        return False
    forget_messages(store)
    copy_file(saved, _held(store))
    return True


def forget_messages(store: str | os.PathLike) -> None:
    """Remove this rank's messages, which no engine has open."""
    held = _held(store)
    if held.is_file():
        prune(held.parent, everything=True)


def _saved(folder: str) -> Path:
    return Path(folder) / MESSAGES / f"rank-{dist.get_rank()}" / DATA_FILE


def _held(store: str | os.PathLike) -> Path:
    return Path(store) / f"rank-{dist.get_rank()}" / DATA_FILE


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
    _remove(output_dir, shared(gone, group))


def keep_only(output_dir: str, best: str, group: Any) -> None:
    """Delete all checkpoints but this one, on every machine; every rank must call this."""
    dist.barrier(group=group)
    _remove(output_dir, sorted(shared(_folders(output_dir), group) - {Path(best).name}))


def _folders(output_dir: str) -> set[str]:
    return {path.name for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.is_dir()}


def _remove(output_dir: str, names: list[str]) -> None:
    """One rank of each machine deletes there; on a common disk it does no harm that several do."""
    if os.environ["LOCAL_RANK"] == "0":
        for name in names:
            shutil.rmtree(Path(output_dir) / name, ignore_errors=True)
