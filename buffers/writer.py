"""One background thread that runs jobs in order, and never loses an error.

The first job that raises stops the writer: later jobs are not run, and every later call raises StoreError with the
reason (NonFiniteError and WireError as they are), because what the caller believes to be stored is not.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from pipecomp.errors import NonFiniteError, StoreError, WireError

STEPS_BEHIND = 2  # whole steps that may wait for the disk before `submit_step` makes the training wait

Job = Callable[[], object]


def _nothing() -> None:
    """Do nothing: a Job."""


class Writer:
    """Runs jobs one after the other in a thread of its own; any thread may submit."""

    def __init__(self, name: str) -> None:
        # Each with what is called once it was its turn, whether it ran or not; None: the end.
        self._jobs: queue.SimpleQueue[tuple[Job, Job] | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(STEPS_BEHIND)  # for steps
        self._closed = False
        self._error: BaseException | None = None
        self._told = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job, then: Job = _nothing) -> None:
        """Queue a job that prepares something; then: called after it, or in its place after an error."""
        if self._closed:
            raise StoreError("message store: used after close")
        self._jobs.put((job, then))
        self.check()

    def submit_step(self, job: Job) -> float:
        """Queue a job that writes a step; wait while STEPS_BEHIND others are unfinished. Returns seconds waited."""
        start = time.perf_counter()
        self._room.acquire()
        waited = time.perf_counter() - start
        self.submit(job, self._room.release)
        return waited

    def drain(self) -> None:
        """Wait until every job submitted so far has run; raises, as `check`, if one failed."""
        reached = threading.Event()
        self._jobs.put((_nothing, reached.set))
        while self._thread.is_alive() and not reached.wait(1.0):  # one that has ended reaches nothing
            pass
        self.check()

    @property
    def failed(self) -> bool:
        """Whether a job raised."""
        return self._error is not None

    def check(self) -> None:
        """Raise StoreError if a job failed, NonFiniteError or WireError if it raised that."""
        if self._error is not None:
            self._told = True
            if isinstance(self._error, (NonFiniteError, WireError)):  # of what was to be stored, not of the store
                raise self._error
            raise StoreError(f"an earlier write in the background failed: {self._error}") from self._error

    def close(self) -> None:
        """Run what is queued and stop; safe to call twice. Raises, as `check`, if a job failed and nobody was told."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join()
        if not self._told:
            self.check()

    def _run(self) -> None:
        while (queued := self._jobs.get()) is not None:
            self._do(*queued)
            del queued  # what the job holds is not needed any more

    def _do(self, job: Job, then: Job) -> None:
        try:
            if self._error is None:
                job()
        except BaseException as error:
            self._error = error
        then()
