"""Loading cached activations ahead of their use, in one background thread per link end.

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


_State = Enum("_State", ["WAITING", "LOADING", "LOADED", "WORTHLESS"])


class _Slot:
    """A sample on its way; worthless where loading failed, or the sample was put or forgotten meanwhile."""

    def __init__(self) -> None:
        self.state = _State.WAITING
        self.cached: Loaded | None = None


class Prefetcher:
    """Loads requested samples with `load`; `ahead` is the number of micro-batches, 0 to load nothing ahead."""

    def __init__(self, load: Callable[[int], Loaded | None], ahead: int, name: str) -> None:
        if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
            raise ConfigError("store.prefetch", ahead, "a whole number from 0")
        self._load, self._ahead, self._name = load, ahead, name
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # a sample is loaded; whoever waits to take it
        self._wanted = threading.Condition(lock)  # there is something to load; the thread, which is woken for no less
        self._batches: deque[dict[int, _Slot]] = deque(maxlen=MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._closed = False

    def request(self, samples: Iterable[int]) -> None:
        """Start loading these samples, but for those that an earlier request still holds; returns at once."""
        if not self._ahead:
            return
        with self._changed:
            batch = {s: _Slot() for s in samples if not any(s in earlier for earlier in self._batches)}
            if self._closed or not batch:
                return
            self._batches.append(batch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._wanted.notify()

    def take(self, sample: int) -> tuple[bool, Loaded | None]:
        """Hand out a sample that was loaded ahead, once; wait if it is being loaded right now.

        Requests before the one that holds it are given up: their turn has passed.

        Returns:
            Whether it was loaded ahead, and what of it, None where the store does not hold it.
        """
        with self._changed:
            at = next((i for i, batch in enumerate(self._batches) if sample in batch), None)
            if at is None:
                return False, None
            for _ in range(at):
                self._batches.popleft()
            if at:
                self._wanted.notify()
            batch = self._batches[0]
            slot = batch[sample]
            self._changed.wait_for(lambda: slot.state is not _State.LOADING or self._closed)
            if batch.get(sample) is slot:
                del batch[sample]
            self._forget_empty()
            # What could not be loaded is loaded again by the caller, who then gets the error itself.
            return slot.state is _State.LOADED, slot.cached

    def invalidate(self, samples: Iterable[int]) -> None:
        """Forget what was loaded ahead of samples that were put or forgotten."""
        with self._changed:
            for batch, sample in itertools.product(self._batches, samples):
                slot = batch.pop(sample, None)
                if slot is not None:
                    slot.state, slot.cached = _State.WORTHLESS, None
                    self._changed.notify_all()
            self._forget_empty()

    def idle(self) -> bool:
        """Say whether nothing is being loaded nor could be now."""
        with self._changed:
            slots = (slot for batch in self._batches for slot in batch.values())
            return self._next() is None and all(slot.state is not _State.LOADING for slot in slots)

    def close(self) -> None:
        """Stop loading and forget everything; safe to call twice."""
        with self._changed:
            self._closed = True
            self._batches.clear()
            self._changed.notify_all()
            self._wanted.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _forget_empty(self) -> None:
        if not all(self._batches):
            self._batches = deque(filter(None, self._batches), MAX_WAITING)
            self._wanted.notify()

    def _next(self) -> tuple[int, _Slot] | None:
        for batch in itertools.islice(self._batches, self._ahead):
            for sample, slot in batch.items():
                if slot.state is _State.WAITING:
                    return sample, slot
        return None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._wanted.wait_for(lambda: self._closed or self._next() is not None)
                found = self._next()
                if self._closed or found is None:
                    return
                sample, slot = found
                slot.state = _State.LOADING
            cached, state = None, _State.WORTHLESS
            with contextlib.suppress(Exception):
                cached, state = self._load(sample), _State.LOADED
            with self._changed:
                if slot.state is _State.LOADING:
                    slot.cached, slot.state = cached, state
                self._changed.notify_all()
            del cached, slot, found
