"""A pool of host buffers. Fresh pages cost more time than writing most packets, so buffers are reused."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable

import numpy as np

MIN_BUFFER_BYTES = 1 << 12
IDLE_BYTES = 64 << 20


class BufferPool:
    """uint8 buffers of powers of two. A buffer returns once no array or tensor refers to the result of `take`.

    allocate: makes a new buffer, such as pinned memory. idle_bytes: limit for unused buffers in the pool; further ones
    go back to the system, after a call of `on_release`. max_bytes: limit for all buffers together, used or not.
    """

    def __init__(
        self,
        allocate: Callable[[int], np.ndarray] | None = None,
        idle_bytes: int = IDLE_BYTES,
        on_release: Callable[[np.ndarray], None] = lambda _: None,
        max_bytes: float = math.inf,
    ) -> None:
        self._allocate = allocate or (lambda size: np.empty(size, dtype=np.uint8))
        self._on_release = on_release
        self._lock = threading.RLock()  # a buffer may return while its thread takes another
        self._idle: dict[int, list[np.ndarray]] = {}  # by size
        self._in_use: dict[int, tuple[weakref.ref, np.ndarray]] = {}  # by the buffer's identity
        self._idle_bytes, self._max_idle_bytes = 0, idle_bytes
        self._total_bytes, self._max_bytes = 0, max_bytes

    def take(self, size: int) -> np.ndarray:
        """Take a buffer, uint8 [size], with arbitrary content.

        Raises:
            MemoryError: No idle buffer has this size, and those in use leave no room for a new one.
        """
        capacity = max(MIN_BUFFER_BYTES, 1 << (max(size, 1) - 1).bit_length())
        with self._lock:
            idle = self._idle.get(capacity)
            buffer = idle.pop() if idle else None
            self._idle_bytes -= capacity if buffer is not None else 0
        if buffer is None:
            buffer = self._new(capacity)
        # Note: numpy collapses the base of a slice to the array that owns the memory. Here that is `taken`, an array of
        # another object's memory: slices keep `taken` alive, and its finalizer returns the buffer.
        taken = np.frombuffer(memoryview(buffer)[:size], dtype=np.uint8)
        self._in_use[id(buffer)] = weakref.ref(taken, lambda _: self._return(buffer)), buffer
        return taken

    def stop_growing(self, refused_bytes: int) -> None:
        """Allocate no more from here on. `allocate` calls it before MemoryError, with the bytes it could not get."""
        with self._lock:
            self._max_bytes = self._total_bytes - refused_bytes

    def _new(self, capacity: int) -> np.ndarray:
        """Allocate a buffer. Idle ones of other sizes are released for it, the largest first."""
        released = []
        with self._lock:
            used = self._total_bytes - self._idle_bytes
            if used + capacity > self._max_bytes:
                raise MemoryError(f"{capacity} bytes beside {used} in use, allowed: {self._max_bytes}")
            while self._total_bytes + capacity > self._max_bytes:
                released.append(self._idle[max(size for size in list(self._idle) if self._idle[size])].pop())
                self._idle_bytes -= released[-1].size
                self._total_bytes -= released[-1].size
            self._total_bytes += capacity
        while released:
            self._on_release(released.pop())
        try:
            return self._allocate(capacity)
        except BaseException:
            with self._lock:
                self._total_bytes -= capacity
            raise

    def _return(self, buffer: np.ndarray) -> None:
        del self._in_use[id(buffer)]
        with self._lock:
            if self._idle_bytes + buffer.size <= self._max_idle_bytes:
                self._idle.setdefault(buffer.size, []).append(buffer)
                self._idle_bytes += buffer.size
                return
            self._total_bytes -= buffer.size
        self._on_release(buffer)
