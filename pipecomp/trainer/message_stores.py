"""A rank's store of cached activations in a training: emptied, copied into checkpoints, and taken from them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from pipecomp.buffers import LmdbEnvironment
from pipecomp.buffers.admin import forget
from pipecomp.buffers.lmdb_folder import DATA_FILE
from pipecomp.buffers.snapshot import copy_file
from pipecomp.config import Config

MESSAGES = "messages"  # a checkpoint's folder for them

_log = transformers_logging.get_logger(__name__)


def prepare(settings: Config, engine: Any, checkpoint: str | None) -> None:
    """Let a training begin with the cached activations of a checkpoint, or with none.

    Args:
        settings: The "pipecomp" section.
        engine: None, or the one that is open, which must be closed if `needs_closed_engine` says so.
        checkpoint: Whose to take; None for none.
    """
    if settings.activations.method != "aqsgd":
        return
    if engine is not None:
        drop(engine)
    if settings.store.backend == "memory":
        if checkpoint is not None:
            _log.warning("cached activations in memory are not saved: training goes on without them")
        return
    store, rank = settings.store.path, dist.get_rank()
    if checkpoint is None:
        if engine is None:
            forget(store, rank)
    elif not restore(checkpoint, store):
        forget(store, rank)  # what is held is newer than the checkpoint, or of another run
        _log.warning(f"{checkpoint} has no cached activations of rank {rank}: training goes on without them")


def needs_closed_engine(settings: Config, checkpoint: str | None) -> bool:
    """Say whether `prepare` replaces files that an engine would have open."""
    return settings.activations.method == "aqsgd" and settings.store.backend != "memory" and checkpoint is not None


def drop(engine: Any) -> None:
    """Drop all cached activations that an engine holds."""
    for end in engine.links:
        end.store.drop([held.sample for held in end.store.inventory()])
        end.reload()
    engine.links.environment.commit()


def save(engine: Any, folder: str, *, copied: bool) -> None:
    """Copy this rank's message store into a checkpoint, if it is to be and there is one on disk.

    Otherwise the checkpoint is left without: an earlier training's of the same step may have been in the folder.
    """
    environment = engine.links.environment
    if copied and isinstance(environment, LmdbEnvironment):
        environment.flush()  # nothing is being written from here until the next step
        copy_file(environment.path / DATA_FILE, _saved(folder))
    else:
        _saved(folder).unlink(missing_ok=True)


def restore(folder: str, store: str | os.PathLike) -> bool:
    """Put what a checkpoint cached in the place of this rank's store, which no engine has open. False without one."""
    saved = _saved(folder)
    if not saved.is_file():
        return False
    forget(store, dist.get_rank())
    copy_file(saved, _held(store))
    return True


def _saved(folder: str) -> Path:
    return Path(folder) / MESSAGES / f"rank-{dist.get_rank()}" / DATA_FILE


def _held(store: str | os.PathLike) -> Path:
    return Path(store) / f"rank-{dist.get_rank()}" / DATA_FILE
