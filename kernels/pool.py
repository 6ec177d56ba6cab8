"""Buffers that are used again: fresh pages cost more than what most packets need to be written."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable

import numpy as np

LEAST_BYTES = 1 << 12
KEPT_BYTES = 64 << 20  # of buffers that nobody uses


class Pool:
    """uint8 buffers of powers of two; one comes back once no array or tensor refers to what `take` returned.

    make: makes a new one, for pinned memory. kept_bytes: most that lie here unused; more is given back to the system,
    and `let_go` is told before. most_bytes: of all buffers together, used or not.
    """

    def __init__(
        self,
        make: Callable[[int], np.ndarray] | None = None,
        kept_bytes: int = KEPT_BYTES,
        let_go: Callable[[np.ndarray], None] = lambda _: None,
        most_bytes: float = math.inf,
    ) -> None:
        self._make = make or (lambda size: np.empty(size, dtype=np.uint8))
        self._let_go = let_go
        self._lock = threading.RLock()  # a buffer may come back while its thread takes another
        self._free: dict[int, list[np.ndarray]] = {}
        self._lent: dict[int, tuple[weakref.ref, np.ndarray]] = {}  # by the buffer's identity
        self._kept, self._kept_bytes = 0, kept_bytes
        self._made, self._most_bytes = 0, most_bytes

    def take(self, size: int) -> np.ndarray:
        """Give uint8 [size], with anything in it.

        Raises:
            MemoryError: if there is none of this size, and what is in use leaves no room for a new one.
        """
        room = max(LEAST_BYTES, 1 << (max(size, 1) - 1).bit_length())
        with self._lock:
            free = self._free.get(room)
            root = free.pop() if free else None
            self._kept -= room if root is not None else 0
        if root is None:
            root = self._new(room)
        # An array of another object's memory is what its slices refer to: they keep it, and with it the buffer.
        taken = np.frombuffer(memoryview(root)[:size], dtype=np.uint8)
        self._lent[id(root)] = weakref.ref(taken, lambda _: self._put(root)), root
        return taken

    def stop_growing(self, refused: int) -> None:
        """Make no more than there is: to be called by `make` before its MemoryError. refused: bytes it was to make."""
        with self._lock:
            self._most_bytes = self._made - refused

    def _new(self, room: int) -> np.ndarray:
        """Make one. Unused ones of other sizes make way for it, the largest first."""
        gone = []
        with self._lock:
            if self._made - self._kept + room > self._most_bytes:
                raise MemoryError(f"{room} bytes beside {self._made - self._kept} in use, allowed: {self._most_bytes}")
            while self._made + room > self._most_bytes:
                gone.append(self._free[max(size for size in list(self._free) if self._free[size])].pop())
                self._kept -= gone[-1].size
                self._made -= gone[-1].size
            self._made += room
        while gone:
            self._let_go(gone.pop())
        try:
            return self._make(room)
        except BaseException:
            with self._lock:
                self._made -= room
            raise

    def _put(self, root: np.ndarray) -> None:
        del self._lent[id(root)]
        with self._lock:
            if self._kept + root.size <= self._kept_bytes:
                self._free.setdefault(root.size, []).append(root)
                self._kept += root.size
                return
            self._made -= root.size
        self._let_go(root)
