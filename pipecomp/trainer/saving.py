"""A checkpoint in the middle of a training, which a disk that refuses it does not end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipecomp.checkpoint.writing import CollectiveWrite, private_files
from pipecomp.distributed.collectives import broadcast
from pipecomp.distributed.preemption import say_here
from pipecomp.errors import OutputError
from pipecomp.trainer import callbacks, checkpoints, message_stores


def save(trainer: Any, *, messages: bool, count: Callable[[], Any], due: Sequence[str] = ()) -> bool:
    """Write checkpoint-N of the step that was made last; every rank must call this.

    Where the disk refuses it, nothing of it is left. It is tried once more if `save_total_limit` lets older ones go
    before it, which the last good one and the best one do not.

    Args:
        trainer: Whose.
        messages: Whether to copy the message store.
        count: Brings the state's number of tokens up to date, and what is recorded.
        due: What is still to be done after that step, see `checkpoints.Found`.

    Returns:
        False if it could not be written, which is said on every rank.
    """
    args, state = trainer.args, trainer.state
    folder = checkpoints.folder_of(args.output_dir, state.global_step)
    best = state.best_model_checkpoint
    limit = args.save_total_limit or 0
    for last in (limit < 2, True):
        try:
            with private_files():
                _write(trainer, folder, messages, count, due)
        except OutputError as error:
            checkpoints.remove(folder)
            state.best_model_checkpoint = best
            if last:
                say_here(f"{error}. There will be no {Path(folder).name}")
                return False
            say_here(f"{error}. It is tried again without the oldest ones, which save_total_limit lets go")
            checkpoints.rotate(args.output_dir, limit - 1, best, trainer.group)
        else:
            checkpoints.rotate(args.output_dir, args.save_total_limit, state.best_model_checkpoint, trainer.group)
            return True
    raise AssertionError("the last attempt returns")


def _write(trainer: Any, folder: str, messages: bool, count: Callable[[], Any], due: Sequence[str]) -> None:
    """Write all files, the state's last. OutputError on every rank if one cannot."""
    args, state = trainer.args, trainer.state
    attempts = CollectiveWrite(folder)
    if trainer.rank == 0:  # incomplete until everything is there
        attempts.attempt(lambda: (Path(folder) / checkpoints.STATE_FILE).unlink(missing_ok=True))
    trainer.save_model(folder)
    if not args.save_only_model:
        checkpoints.save_engine(trainer.engine, folder, trainer.lr_scheduler, attempts)
        attempts.attempt(lambda: message_stores.save(trainer.engine, folder, copied=messages))
    count()
    if state.best_global_step:
        best = checkpoints.folder_of(args.output_dir, state.best_global_step)
        if broadcast(Path(best).is_dir(), group=trainer.group):
            state.best_model_checkpoint = best
    attempts.raise_problems()  # every rank has written its files
    if trainer.rank == 0:
        callbacks.save(trainer)
        attempts.attempt(lambda: checkpoints.complete(folder, state, trainer.plan, trainer.replicas, due))
    attempts.raise_problems()
