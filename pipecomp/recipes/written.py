"""The files that a recipe writes in each step: JSON lines, and curves for TensorBoard.

A write error does not stop the run: it is reported once, and the run continues without the file.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from pipecomp.errors import ConfigError, writable, write_error
from pipecomp.report.recorder import lines_until
from pipecomp.utils.serialization import json_line


class WrittenOutput(ABC):
    """An output that stops writing after the first error.

    Args:
        option: The command-line option.
        path: The option's value.
    """

    def __init__(self, option: str, path: str) -> None:
        self._option, self._path = option, path
        self._error: str | None = None
        self._failed = False
        self.missed = 0  # writes since the first error, that one included

    def take_error(self) -> str | None:
        """Return the write error, once; None if there is none."""
        error, self._error = self._error, None
        return error

    def describe_missed(self) -> str | None:
        """Describe what is missing at the end of the run; None if nothing is."""
        if not self.missed:
            return None
        return f"{self._option}: {self._path} lacks its last entries: {self.missed} or more could not be written"

    @abstractmethod
    def close(self) -> None:
        """Flush and close; later writes are ignored."""

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Convert an OSError to the recorded error, and close."""
        try:
            yield
        except OSError as error:
            message = f"{self._option}: {self._path} cannot be written: {write_error(error, self._path)}"
            self._error = self._error or message
            if not self._failed:
                self._failed, self.missed = True, 1
            self.close()


class Lines(WrittenOutput):
    """A file of JSON lines.

    Args:
        path: Overwritten.
        after: The step that the run resumes from: an earlier run's lines up to there are kept.

    Attributes:
        kept: Those lines, with counters only in the last that has any.

    Raises:
        ConfigError: If it cannot be written.
    """

    def __init__(self, path: str, after: int) -> None:
        super().__init__("--metrics", path)
        self._file: TextIO | None = None
        with writable(self._option, path, "a file"):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self.kept, end = lines_until(Path(path), after)
            self._file = open(path, "a" if self.kept else "w", encoding="utf-8")  # noqa: SIM115 (closed in close)
            if self.kept:
                self._file.truncate(end)

    def write(self, record: Mapping[str, Any]) -> None:
        """Add a line."""
        self.missed += self._failed
        if self._file is not None:
            with self._writing():
                self._file.write(json_line(record))
                self._file.flush()  # for people who follow the run, and against crashes

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # it retries the failed write
                file.close()


class Curves(WrittenOutput):
    """A folder for TensorBoard.

    Args:
        folder: Made if it does not exist.
        after: The step that the run resumes from: an earlier run's curves up to there are kept.

    Raises:
        ConfigError: If it cannot be written, or TensorBoard is not installed.
    """

    def __init__(self, folder: str, after: int) -> None:
        super().__init__("--tensorboard", folder)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            allowed = "only with the package tensorboard (pip install tensorboard)"
            raise ConfigError("--tensorboard", folder, allowed) from error
        self._board: Any = None
        with writable(self._option, folder):
            self._board = SummaryWriter(folder, purge_step=after + 1 if after else None)

    def add(self, step: int, group: str, values: Mapping[str, float]) -> None:
        """Add points to the curves of a group."""
        self.missed += self._failed
        if self._board is not None:
            with self._writing():
                for name, value in values.items():
                    self._board.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        """Flush the curves and close."""
        board, self._board = self._board, None
        if board is not None:
            with self._writing():  # a thread writes, so errors of the last points appear only now
                board.close()
