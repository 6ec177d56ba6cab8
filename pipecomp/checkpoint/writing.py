"""Writing what all ranks save so that an error of one is known to all, and what others cannot read.

DeepSpeed saves with collectives between its writes: a rank that raised in the middle would leave the others waiting
there. So what fails is noted, every rank comes through, and then all of them learn what was wrong.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pipecomp.distributed.collectives import gathered
from pipecomp.errors import CheckpointError, OutputError, PipecompError, SplitError

_PRIVATE = 0o077  # taken away from what is made


@contextlib.contextmanager
def private() -> Iterator[None]:
    """Make files 0600 and folders 0700 meanwhile, also those that libraries make."""
    before = os.umask(_PRIVATE)
    try:
        yield
    finally:
        os.umask(before)


def in_words(path: object, error: BaseException) -> str:
    """Name a file and what the system says of it."""
    while isinstance(error.__context__, OSError):  # torch, closing a file that the disk refused, raises once more
        error = error.__context__
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or path}: {error.strerror}"
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text if str(path) in text else f"{path}: {text}"


class Attempts:
    """What one rank has tried to write into `folder`, a checkpoint's, and the first thing that went wrong."""

    def __init__(self, folder: object) -> None:
        self._folder = folder
        self.problem: str | None = None

    def attempt(self, act: Callable[[], Any], path: object = None) -> Any:
        """Do it, and note what the disk refuses; nothing once something has gone wrong. path: for the note."""
        if self.problem is None:
            try:
                return act()
            except SplitError:
                raise
            except (OSError, RuntimeError, PipecompError) as error:  # safetensors' and torch's are RuntimeErrors
                self.problem = in_words(path or self._folder, error)
            except Exception as error:
                if not _of_rust(error):
                    raise
                self.problem = in_words(path or self._folder, error)
        return None

    def agree(self, group: Any = None) -> None:
        """Raise CheckpointError on every rank if one of them has a problem; all ranks must call this.

        group: of all ranks, in which they wait for each other.
        """
        for rank, problem in enumerate(gathered(self.problem, group)):
            if problem is not None:
                raise self.error(rank, problem)

    def error(self, rank: int, problem: str) -> OutputError:
        """What `agree` raises."""
        return CheckpointError(
            f"the checkpoint {self._folder} cannot be written: rank {rank}: {problem}. Nothing of it is left; "
            "the last good one before it is as it was"
        )


class ModelAttempts(Attempts):
    """The same for a folder that `from_pretrained` reads: `agree` raises OutputError."""

    def error(self, rank: int, problem: str) -> OutputError:
        """What `agree` raises."""
        return OutputError(f"the model cannot be written to {self._folder}: rank {rank}: {problem}")


class NotingWriter:
    """Stands in for DeepSpeed's checkpoint engine: it writes the same files, and notes what fails."""

    def __init__(self, engine: Any, attempts: Attempts) -> None:
        self._engine, self._attempts = engine, attempts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file as torch.save does. A full disk is an OSError then, and not a C++ stack."""
        self._attempts.attempt(lambda: write_state(state_dict, path), path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder."""
        self._attempts.attempt(lambda: os.makedirs(path, exist_ok=exist_ok), path)


def write_state(state: Any, path: str | os.PathLike) -> None:
    """Write as torch.save does, whose own way to open files would raise with a C++ stack.

    It is on the disk before anything vouches for it: older checkpoints go then.
    """
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _of_rust(error: Exception) -> bool:
    """Whether safetensors or tokenizers raised it, whose errors of the disk are no OSErrors."""
    if type(error).__module__.partition(".")[0] == "safetensors":
        return True
    return type(error) is Exception and "(os error " in str(error)
