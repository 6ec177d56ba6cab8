"""What a recipe writes in each step: JSON lines, and curves for TensorBoard.

A run is worth more than these: once one of them cannot be written any more, that is said, and the run goes on.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from pipecomp.errors import ConfigError, writable
from pipecomp.report.recorder import lines_until
from pipecomp.utils.serialization import json_line


class Written(ABC):
    """Something that is written until a write is refused.

    Args:
        option: Of the command line.
        path: What it was given.
    """

    def __init__(self, option: str, path: str) -> None:
        self._option, self._path = option, path
        self._refused: str | None = None

    def take_refused(self) -> str | None:
        """Say once what could not be written, None if everything was."""
        refused, self._refused = self._refused, None
        return refused

    @abstractmethod
    def close(self) -> None:
        """Write what is left, and nothing from now on."""

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Inside, an OSError ends writing."""
        try:
            yield
        except OSError as error:
            what = f"{self._option}: {self._path} cannot be written: {error.strerror or error}"
            self._refused = self._refused or what
            self.close()


class Lines(Written):
    """A file of JSON lines.

    Args:
        path: Overwritten.
        after: The step that an earlier run has reached: its lines up to there stay.

    Attributes:
        kept: Those lines, without counters but for the last that has any.

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
        if self._file is not None:
            with self._writing():
                self._file.write(json_line(record))
                self._file.flush()  # so that a run can be watched, and what was reached outlives a crash

    def close(self) -> None:
        """See Written."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # it writes again what was refused
                file.close()


class Curves(Written):
    """A folder for TensorBoard.

    Args:
        folder: Made if it is not there.
        after: The step that an earlier run has reached: its curves up to there stay.

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
        if self._board is not None:
            with self._writing():
                for name, value in values.items():
                    self._board.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        """See Written."""
        board, self._board = self._board, None
        if board is not None:
            with self._writing():  # a thread writes: only now it is known of the last points whether that could
                board.close()
