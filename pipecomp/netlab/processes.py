"""The processes of a run: started together, their output line by line, ended without leaving any behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from pipecomp.netlab.network import NetlabError
from pipecomp.utils.processes import exit_status

OnLine = Callable[[str, str, str], None]  # label, "stdout" or "stderr", line
_TERM_S, _KILL_S = 5.0, 10.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """One process. label: what its lines begin with. keep_fds: descriptors that it inherits."""

    label: str
    node: int
    command: Sequence[str]
    environment: Mapping[str, str]
    keep_fds: tuple[int, ...] = ()


class Processes:
    """`strays`: ids of all processes that the run has started, directly or not, and that still live."""

    def __init__(self, jobs: Sequence[Job], on_line: OnLine, strays: Callable[[], set[int]]) -> None:
        self._strays, self._on_line = strays, on_line
        self._lock = threading.Lock()
        self._children: list[subprocess.Popen] = []
        self._readers: list[threading.Thread] = []
        self._failure: Exception | None = None
        self.statuses: list[int | None] = [None] * len(jobs)
        try:
            for job in jobs:
                self._start(job)
        except BaseException:
            self.close()
            raise

    def _start(self, job: Job) -> None:
        try:
            child = subprocess.Popen(
                job.command,
                env=dict(job.environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=job.keep_fds,
                start_new_session=True,
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise NetlabError(f"{job.label}: cannot start {job.command[0]}: {error}") from error
        self._children.append(child)
        for name, stream in (("stdout", child.stdout), ("stderr", child.stderr)):
            reader = threading.Thread(target=self._read, args=(job.label, name, stream), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _read(self, label: str, name: str, stream: IO[str]) -> None:
        with stream:
            for line in stream:  # carriage returns end lines too: progress bars are shown as they move
                with self._lock:
                    try:
                        if self._failure is None:
                            self._on_line(label, name, line.rstrip("\n"))
                    except Exception as error:  # such as a closed standard output; the process must not block on it
                        self._failure = error

    def poll(self) -> list[int]:
        """List the jobs that have ended since the last call, in order; their exit statuses are in `statuses`.

        Raises what taking a line has raised.
        """
        if self._failure is not None:
            raise self._failure
        return self._ended()

    def _ended(self) -> list[int]:
        ended = []
        for index, child in enumerate(self._children):
            if self.statuses[index] is None and (code := child.poll()) is not None:
                self.statuses[index] = exit_status(code)
                ended.append(index)
        return ended

    def close(self) -> None:
        """Terminate what still runs, kill what does not go, and wait for the last lines. Safe to call twice."""
        for child in self._children:
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGTERM)  # its own group: it began a session
        deadline = time.monotonic() + _TERM_S
        while any(child.poll() is None for child in self._children) and time.monotonic() < deadline:
            time.sleep(0.02)
        for child in self._children:
            if child.poll() is None:
                child.kill()
                child.wait(_KILL_S)
        kill(self._strays)
        self._ended()
        for reader in self._readers:
            reader.join(_KILL_S)


def kill(strays: Callable[[], Iterable[int]]) -> None:
    """Kill processes until none is left. NetlabError if they do not go."""
    deadline = time.monotonic() + _KILL_S
    while left := set(strays()):
        if time.monotonic() > deadline:
            raise NetlabError(f"processes {sorted(left)} cannot be ended")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def end(process: subprocess.Popen) -> None:
    """Kill one that a lab keeps for its network."""
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
