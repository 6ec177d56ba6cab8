"""Staging between a GPU and the host: a stream for each direction, pinned memory of a stated size, events."""

from __future__ import annotations

import threading
from collections import deque

import numpy as np
import torch
from torch import Tensor

from pipecomp.errors import require
from pipecomp.kernels.pool import KEPT_BYTES, Pool
from pipecomp.kernels.staging import HostStaging, Staging

PINNED_BYTES = 256 << 20


class _ToHost:
    """A copy whose bytes a thread of the host waits for."""

    def __init__(self, x: Tensor, done: torch.cuda.Event) -> None:
        self._x, self._done = x, done

    def wait(self) -> Tensor:
        """See Copy."""
        self._done.synchronize()
        return self._x


class _ToDevice:
    """A copy that what is computed on the GPU waits for."""

    def __init__(self, x: Tensor, done: torch.cuda.Event) -> None:
        self._x, self._done = x, done

    def wait(self) -> Tensor:
        """See Copy."""
        stream = torch.cuda.current_stream(self._x.device)
        stream.wait_event(self._done)
        self._x.record_stream(stream)
        return self._x


class CudaStaging:
    """Copies beside computing, which goes on on the current stream of whoever calls.

    pinned_bytes: of host memory that the GPU copies from and to; where that is used up, pageable memory takes its
    place, and copies take longer.
    """

    immediate = False

    def __init__(self, device: torch.device, pinned_bytes: int = PINNED_BYTES) -> None:
        self.device = device
        self._streams = {out: torch.cuda.Stream(device) for out in (True, False)}
        self._left = pinned_bytes
        self._pinned: set[int] = set()  # addresses of buffers
        self._pool = Pool(self._make, pinned_bytes + KEPT_BYTES, self._let_go)
        self._under_way: dict[bool, deque[tuple[torch.cuda.Event, Tensor]]] = {True: deque(), False: deque()}
        self._lock = threading.RLock()  # a buffer may be let go while its thread makes another

    def _make(self, size: int) -> np.ndarray:
        with self._lock:
            pin = self._left >= size
            self._left -= size if pin else 0
        made = torch.empty(size, dtype=torch.uint8, pin_memory=pin).numpy()
        if pin:
            with self._lock:
                self._pinned.add(made.ctypes.data)
        return made

    def _let_go(self, buffer: np.ndarray) -> None:
        with self._lock:
            if buffer.ctypes.data in self._pinned:
                self._pinned.remove(buffer.ctypes.data)
                self._left += buffer.size

    def buffer(self, size: int) -> np.ndarray:
        """See Staging."""
        return self._pool.take(size)

    def place(self, target: Tensor) -> Tensor:
        """See Staging: memory of the GPU."""
        return torch.empty_like(target, device=self.device)

    def to_host(self, x: Tensor, target: Tensor | None = None) -> _ToHost:
        """See Staging."""
        if target is None:
            target = self._like(x)
        computed = torch.cuda.Event()
        computed.record(torch.cuda.current_stream(self.device))
        stream = self._streams[True]
        with torch.cuda.stream(stream):
            stream.wait_event(computed)
            target.copy_(x, non_blocking=True)
            x.record_stream(stream)
            return _ToHost(target, self._done(True, target))

    def to_device(self, x: Tensor) -> _ToDevice:
        """See Staging."""
        if not x.is_pinned():
            x = self._like(x).copy_(x)
        with torch.cuda.stream(self._streams[False]):
            y = x.to(self.device, non_blocking=True)
            return _ToDevice(y, self._done(False, x))

    def _like(self, x: Tensor) -> Tensor:
        size = x.numel() * x.element_size()
        return torch.from_numpy(self.buffer(size)).view(x.dtype).view(x.shape)

    def _done(self, out: bool, host: Tensor) -> torch.cuda.Event:
        """The event after the last copy. Its host memory is used for nothing else before that has come."""
        done = torch.cuda.Event()
        done.record(self._streams[out])
        under_way = self._under_way[out]
        with self._lock:
            under_way.append((done, host))
            while under_way[0][0].query():
                under_way.popleft()
                if not under_way:
                    break
        return done


def staging_for(device: torch.device, pinned_bytes: int | None = None) -> Staging:
    """Make the staging of stages that compute on `device`."""
    if device.type == "cuda":
        return CudaStaging(device, PINNED_BYTES if pinned_bytes is None else pinned_bytes)
    require(pinned_bytes is None, "store.pinned_bytes", pinned_bytes, "null where stages compute on the CPU")
    return HostStaging()
