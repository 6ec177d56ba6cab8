"""A message on its way, for who waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pipecomp.errors import LinkTimeoutError


class Transfer:
    """Ends once: in order, or with an error. began, ended: of perf_counter, 0.0 before."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.error: Exception | None = None
        self.began = self.ended = 0.0
        self._done = threading.Event()
        self._callback: Callable[[Transfer], None] | None = None
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._done.is_set()

    def finish(self, error: Exception | None = None) -> None:
        """End it; a second time changes nothing."""
        with self._lock:
            if self._done.is_set():
                return
            self.error, self.ended = error, time.perf_counter()
            self._done.set()
            callback = self._callback
        if callback is not None:
            callback(self)

    def then(self, callback: Callable[[Transfer], None]) -> None:
        """Call it when this ends, or now if it has; on the thread that ends it."""
        with self._lock:
            if not self._done.is_set():
                self._callback = callback
                return
        callback(self)

    def wait(self, timeout_s: float | None = None) -> None:
        """Until it ends. Raises its error, or LinkTimeoutError after `timeout_s`."""
        if not self._done.wait(timeout_s):
            raise LinkTimeoutError(f"a message of {len(self.view)} bytes was not through after {timeout_s:g} s")
        if self.error is not None:
            raise self.error
