"""Collective writing of checkpoints: errors of one rank reach all, files are private, random states are saved.

Note: [Errors while saving] DeepSpeed saves with collectives between its writes, so a rank that raised in the middle
would leave the others waiting there. A failed write is recorded instead, every rank finishes the sequence, and then all
of them raise.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from pipecomp.distributed.collectives import gathered
from pipecomp.errors import CheckpointError, OutputError, PipecompError, SplitError, write_error, write_limits
from pipecomp.utils.activity import local_activity


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """In the body, create files with mode 0600 and folders with 0700, also those that libraries create."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def describe_error(path: object, error: BaseException) -> str:
    """The path and the system's message in one line."""
    while isinstance(error.__context__, OSError):  # torch raises another error when it closes a file after a full disk
        error = error.__context__
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or path}: {write_error(error, error.filename or str(path))}"
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if code := re.search(r"\(os error (\d+)\)", text):  # of Rust
        text += write_limits(int(code[1]), str(path))
    return text if str(path) in text else f"{path}: {text}"


class CollectiveWrite:
    """Writes of one rank into a checkpoint's folder.

    Attributes:
        problem: The first write that failed, with the reason; None if none has.
    """

    def __init__(self, folder: object) -> None:
        self._folder = folder
        self.problem: str | None = None

    def attempt(self, write: Callable[[], Any], path: object = None) -> Any:
        """Call `write` and record its error; do nothing after an error. path: of the file, for the message."""
        if self.problem is None:
            try:
                with local_activity(f"writes {path or self._folder}"):
                    return write()
            except SplitError:
                raise
            except Exception as error:
                # torch and safetensors raise RuntimeErrors, other Rust libraries plain Exceptions.
                if not isinstance(error, (OSError, RuntimeError, PipecompError)) and not _from_rust(error):
                    raise
                self.problem = describe_error(path or self._folder, error)
        return None

    def raise_problems(self, group: Any = None) -> None:
        """Raise an error on every rank if one of them has a problem; all ranks of `group` must call this."""
        for rank, problem in enumerate(gathered(self.problem, group)):
            if problem is not None:
                raise self.error(rank, problem)

    def error(self, rank: int, problem: str) -> OutputError:
        """The error that `raise_problems` raises."""
        return CheckpointError(
            f"the checkpoint {self._folder} cannot be written: rank {rank}: {problem}. No part of it remains; the "
            "previous checkpoint is unchanged"
        )


class CollectiveModelWrite(CollectiveWrite):
    """The same for a Hugging Face folder; raises OutputError."""

    def error(self, rank: int, problem: str) -> OutputError:  # noqa: D102
        return OutputError(f"the model cannot be written to {self._folder}: rank {rank}: {problem}")


class RecordingCheckpointEngine:
    """DeepSpeed's checkpoint engine, which writes the same files through a CollectiveWrite."""

    def __init__(self, engine: object, write: CollectiveWrite) -> None:
        self._engine, self._write = engine, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file as torch.save does."""
        self._write.attempt(lambda: write_state(state_dict, path), path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Create a folder."""
        self._write.attempt(lambda: os.makedirs(path, exist_ok=exist_ok), path)


class CollectingCheckpointEngine:
    """A checkpoint engine of DeepSpeed's kind that keeps the contents of files in `files`, by name."""

    def __init__(self, files: dict[str, Any]) -> None:
        self._files = files

    def save(self, state_dict: Any, path: str) -> None:
        """Keep a file's content."""
        self._files[os.path.basename(path)] = state_dict

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Create no folder."""

    def preserves_storage_sharing(self) -> bool:
        """Return False: DeepSpeed clones no tensors."""
        return False


def write_state(state: Any, path: str | os.PathLike) -> None:
    """Write as torch.save does, but with an OSError instead of a C++ stack for a full disk, and synced.

    The manifest that vouches for the file, after which older checkpoints are deleted, is written later.
    """
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _from_rust(error: Exception) -> bool:
    """Return True for errors of safetensors or tokenizers, whose disk errors are not OSErrors."""
    if type(error).__module__.partition(".")[0] == "safetensors":
        return True
    return type(error) is Exception and "(os error " in str(error)


def random_state() -> dict[str, Any]:
    """States of the random generators of Python, NumPy, torch and the GPU, for `torch.load(weights_only=True)`."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(kind), torch.tensor(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the result of `random_state`."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
