"""A rank's store of cached activations in a training: emptied, copied into checkpoints, and taken from them."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from pipecomp.buffers import LmdbEnvironment
from pipecomp.buffers.admin import forget
from pipecomp.buffers.lmdb_folder import DATA_FILE, copy_file
from pipecomp.config import Config
from pipecomp.interfaces import TrainingEngine

MESSAGES = "messages"  # a checkpoint's folder for them

_log = transformers_logging.get_logger(__name__)


def prepare(settings: Config, engine: TrainingEngine | None, checkpoint: str | None) -> None:
    """Let a training begin without cached activations; those of a checkpoint come by `restore`.

    Args:
        settings: The "pipecomp" section.
        engine: None, or the one that is open, which must be closed if `needs_closed_engine` says so.
        checkpoint: Whose they will be; None for none.
    """
    if settings.activations.method != "aqsgd":
        return
    if engine is not None:
        drop(engine)
    if settings.store.backend == "memory":
        if checkpoint is not None:
            _log.warning("cached activations in memory are not saved: training goes on without them")
    elif engine is None:
        forget(settings.store.path, dist.get_rank())  # what is held is newer than a checkpoint, or of another run


def needs_closed_engine(settings: Config, checkpoint: str | None) -> bool:
    """Say whether a training begins with another store than an engine would have open."""
    return settings.activations.method == "aqsgd" and settings.store.backend != "memory" and checkpoint is not None


def drop(engine: TrainingEngine) -> None:
    """Drop all cached activations that an engine holds."""
    engine.links.forget()
    if engine.links.environment is not None:
        engine.links.environment.commit()


def save(engine: TrainingEngine, folder: str, *, copied: bool) -> None:
    """Copy this rank's message store into a checkpoint, if it is to be and there is one on disk.

    Otherwise the checkpoint is left without: an earlier training's of the same step may have been in the folder.
    """
    environment = engine.links.environment
    if copied and isinstance(environment, LmdbEnvironment):
        environment.flush()  # nothing is being written from here until the next step
        copy_file(environment.path / DATA_FILE, _saved(folder))
    else:
        _saved(folder).unlink(missing_ok=True)


def restore(engine: TrainingEngine, folder: str) -> None:
    """Let this rank's store, which is empty, hold what a checkpoint cached; then the engine loads the checkpoint.

    Where there is no copy, or one that is damaged or was made with other settings, it stays empty.
    """
    environment = engine.links.environment
    if isinstance(environment, LmdbEnvironment) and not environment.restore(_saved(folder).parent):
        rank = dist.get_rank()
        _log.warning(f"{folder} has no cached activations that rank {rank} can use: training goes on without them")


def _saved(folder: str) -> Path:
    return Path(folder) / MESSAGES / f"rank-{dist.get_rank()}" / DATA_FILE
