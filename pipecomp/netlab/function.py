"""Functions on the nodes of a lab: the work goes to each process over a socket pair, notes and results come back."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pipecomp.cluster.local_ranks import RankFailedError

_CHILD = Path(__file__).with_name("child.py")


class Functions:
    """One function on every rank of a run; `results` has what it returned, by rank."""

    def __init__(
        self, function: Callable[..., Any], args: Sequence[Any], world: int, on_note: Callable[[int, Any], None] | None
    ) -> None:
        self._work = pickle.dumps((function, tuple(args)))
        self._on_note = on_note
        self.results: dict[int, Any] = {}
        pairs = [Pipe() for _ in range(world)]
        self._ours: list[Connection] = [ours for ours, _ in pairs]
        self._theirs: list[Connection] = [theirs for _, theirs in pairs]

    def __enter__(self) -> Functions:
        return self

    def __exit__(self, *exc: object) -> None:
        for line in (*self._ours, *self._theirs):
            line.close()

    def words(self, rank: int) -> tuple[list[str], tuple[int, ...]]:
        """The command of a rank's process and the descriptor that it inherits."""
        descriptor = self._theirs[rank].fileno()
        return [sys.executable, str(_CHILD), str(descriptor)], (descriptor,)

    def started(self) -> None:
        """Hand the work to the processes; this process's copies of their ends must be closed for their end to show."""
        for line in self._theirs:
            line.close()
        for line in self._ours:
            try:
                line.send(sys.path)
                line.send_bytes(self._work)
            except BrokenPipeError:  # it died at once; `listen` says so
                continue

    def listen(self, statuses: Sequence[int | None]) -> None:
        """Take what has arrived. RankFailedError if a rank raised, or ended without a result.

        statuses: exit statuses, None for processes that run, looked up before this call.
        """
        for rank, line in enumerate(self._ours):
            while not line.closed and line.poll():
                try:
                    kind, value = line.recv()
                except (EOFError, ConnectionResetError):
                    line.close()
                    break
                if kind == "failed":
                    raise RankFailedError(f"rank {rank} failed:\n{value}")
                if kind == "done":
                    self.results[rank] = value
                elif self._on_note is not None:
                    self._on_note(rank, value)
        for rank, status in enumerate(statuses):
            if status is not None and (status or rank not in self.results):
                raise RankFailedError(f"rank {rank} ended with exit status {status}")
