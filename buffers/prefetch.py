"""Loading cached activations ahead of their use, in a background thread.

A request is one micro-batch. Requests are expected to be used in the order they were made; at most `ahead` of them
are loaded or being loaded at a time, the others wait as lists of ids, so memory stays bounded by `ahead` micro-batches.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from typing import NamedTuple

from pipecomp.errors import ConfigError
from pipecomp.kernels.staging import Copy

MAX_WAITING = 256  # requests; more than any pipeline has in flight, so older ones were given up


class Loaded(NamedTuple):
    """A cached activation on its way to the stages' device."""

    version: int
    m: Copy


_State = Enum("_State", ["WAITING", "LOADING", "LOADED"])


class _Batch:
    """The samples of a request that nobody has taken, put or forgotten since; None until they are loaded."""

    def __init__(self, samples: Iterable[int]) -> None:
        self.state = _State.WAITING
        self.samples: dict[int, Loaded | None] = dict.fromkeys(samples)


class Prefetcher:
    """Loads requested samples; `ahead` is the number of micro-batches, 0 to load nothing ahead.

    load: gives what it could load of these samples; of one that the store does not hold, None.
    """

    def __init__(self, load: Callable[[list[int]], dict[int, Loaded | None]], ahead: int, name: str) -> None:
        if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
            raise ConfigError("store.prefetch", ahead, "a whole number from 0")
        self._load, self._ahead, self._name = load, ahead, name
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # a batch is loaded; whoever waits to take from it
        self._wanted = threading.Condition(self._lock)  # there is something to load; the thread, woken for no less
        self._batches: deque[_Batch] = deque(maxlen=MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._closed = False

    def request(self, samples: Iterable[int]) -> None:
        """Start loading these samples, but for those that an earlier request still holds; returns at once."""
        if not self._ahead:
            return
        with self._lock:
            batch = _Batch(s for s in samples if not any(s in earlier.samples for earlier in self._batches))
            if self._closed or not batch.samples:
                return
            self._batches.append(batch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._wanted.notify()

    def take(self, samples: Iterable[int]) -> dict[int, Loaded | None]:
        """Hand out what was loaded ahead of these samples, once; wait if it is being loaded right now.

        Requests before one that holds a sample are given up: their turn has passed. What has not begun, or could not be
        loaded, is left to the caller, who then gets the error itself.
        """
        taken: dict[int, Loaded | None] = {}
        with self._lock:
            for sample in samples if self._batches else ():
                at = next((i for i, batch in enumerate(self._batches) if sample in batch.samples), None)
                if at is None:
                    continue
                for _ in range(at):
                    self._batches.popleft()
                batch = self._batches[0]
                while batch.state is _State.LOADING and sample in batch.samples and not self._closed:
                    self._changed.wait()
                if batch.state is _State.LOADED and sample in batch.samples:
                    taken[sample] = batch.samples[sample]
                batch.samples.pop(sample, None)
            if self._batches:
                self._go_on()
        return taken

    def invalidate(self, samples: Iterable[int]) -> None:
        """Forget what was loaded ahead of samples that were put or forgotten."""
        with self._lock:
            if not self._batches:
                return
            for batch, sample in itertools.product(self._batches, samples):
                batch.samples.pop(sample, None)
            self._changed.notify_all()
            self._go_on()

    def idle(self) -> bool:
        """Say whether nothing is being loaded nor could be now."""
        with self._lock:
            return self._next() is None and all(batch.state is not _State.LOADING for batch in self._batches)

    def close(self) -> None:
        """Stop loading and forget everything; safe to call twice."""
        with self._lock:
            self._closed = True
            self._batches.clear()
            self._changed.notify_all()
            self._wanted.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _go_on(self) -> None:
        """Forget requests of which nothing is left, and load others in their place."""
        if not all(batch.samples for batch in self._batches):
            self._batches = deque((batch for batch in self._batches if batch.samples), MAX_WAITING)
        if self._next() is not None:
            self._wanted.notify()

    def _next(self) -> _Batch | None:
        ahead = itertools.islice(self._batches, self._ahead)
        return next((batch for batch in ahead if batch.state is _State.WAITING), None)

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._closed and self._next() is None:
                    self._wanted.wait()
                batch = self._next()
                if self._closed or batch is None:
                    return
                batch.state, samples = _State.LOADING, list(batch.samples)
            loaded: dict[int, Loaded | None] = {}
            with contextlib.suppress(Exception):
                loaded = self._load(samples)
            with self._lock:
                batch.samples = {s: loaded[s] for s in batch.samples if s in loaded}
                batch.state = _State.LOADED
                self._changed.notify_all()
                self._go_on()
            del batch, loaded
