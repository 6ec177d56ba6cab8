"""One background thread that runs jobs in order, and never loses an error.

The first job that raises stops the writer: later jobs are not run, and every later call raises StoreError with the
reason, because what the caller believes to be stored is not.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from pipecomp.errors import StoreError

STEPS_BEHIND = 2  # whole steps that may wait for the disk before `submit_step` makes the training wait

Job = Callable[[], None]


class Writer:
    """Runs jobs one after the other in a thread of its own; any thread may submit."""

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Job, bool]] = deque()
        self._steps = 0  # submitted by submit_step, not finished
        self._busy = False
        self._closed = False
        self._error: BaseException | None = None
        self._told = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job that prepares something."""
        self._put(job, False)

    def submit_step(self, job: Job) -> float:
        """Queue a job that writes a step; waits while STEPS_BEHIND others are unfinished. Returns seconds waited."""
        start = time.perf_counter()
        with self._changed:
            while self._steps >= STEPS_BEHIND and self._error is None:
                self._changed.wait()
        waited = time.perf_counter() - start
        self._put(job, True)
        return waited

    def drain(self) -> None:
        """Wait until every job submitted so far has run; StoreError if one failed."""
        with self._changed:
            while (self._jobs or self._busy) and self._error is None:
                self._changed.wait()
        self.check()

    @property
    def failed(self) -> bool:
        """Whether a job raised."""
        return self._error is not None

    def check(self) -> None:
        """Raise StoreError if a job failed."""
        if self._error is not None:
            self._told = True
            raise StoreError(f"an earlier write in the background failed: {self._error}") from self._error

    def close(self) -> None:
        """Run what is queued and stop; safe to call twice. StoreError if a job failed and nobody was told."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        if not self._told:
            self.check()

    def _put(self, job: Job, step: bool) -> None:
        self.check()
        with self._changed:
            if self._closed:
                raise StoreError("message store: used after close")
            self._jobs.append((job, step))
            self._steps += step
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._closed:
                    self._changed.wait()
                if not self._jobs:
                    return
                job, step = self._jobs.popleft()
                self._busy = True
            try:
                job()
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._jobs.clear()
            del job
            with self._changed:
                self._busy = False
                self._steps -= step
                self._changed.notify_all()
                if self._error is not None:
                    return
