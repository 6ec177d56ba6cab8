"""Staging between a GPU and the host: a stream for each direction, pinned memory of a stated size, events."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from pipecomp.errors import require
from pipecomp.kernels.pool import Pool
from pipecomp.kernels.staging import HostStaging, Staging

PINNED_BYTES = 256 << 20


class _ToHost:
    """A copy whose bytes a thread of the host waits for.

    late: what the waiting thread itself copies to x, on the device; None where the GPU does all.
    """

    def __init__(self, x: Tensor, done: torch.cuda.Event, stream: torch.cuda.Stream, late: Tensor | None) -> None:
        self._x, self._done, self._stream, self._late = x, done, stream, late
        self._lock = threading.Lock()

    def wait(self) -> Tensor:
        """See Copy."""
        with torch.cuda.device(self._stream.device):
            self._done.synchronize()
            with self._lock:
                if self._late is not None:
                    with torch.cuda.stream(self._stream):
                        self._x.copy_(self._late)
                    self._late = None
        return self._x


class _ToDevice:
    """A copy that what is computed on the GPU waits for."""

    def __init__(self, x: Tensor, done: torch.cuda.Event, device: torch.device) -> None:
        self._x, self._done, self._device = x, done, device

    def wait(self) -> Tensor:
        """See Copy."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._done)
            self._x.record_stream(stream)
        return self._x


class CudaStaging:
    """Copies beside computing, which goes on on the current stream of whoever calls.

    pinned_bytes: of host memory that the GPU copies from and to; where that is used up, or the system gives less,
    pageable memory takes its place, and copies take longer: those to the host on the threads that wait for them.

    Whatever touches the GPU does so with its device current: otherwise a thread's first call makes a context on GPU 0,
    hundreds of megabytes there for every process that computes on another one.
    """

    immediate = False

    def __init__(self, device: torch.device, pinned_bytes: int = PINNED_BYTES) -> None:
        self._streams = {out: torch.cuda.Stream(device) for out in (True, False)}
        self._late = torch.cuda.Stream(device)  # of those copies: behind the others they would wait for later work
        self.device = self._streams[True].device  # with a number: other threads have another current device
        self._most_bytes = pinned_bytes
        self._pinned = Pool(self._pin, pinned_bytes, self._unpin, pinned_bytes)
        self._pageable = Pool()
        self._unpinned = False  # whether torch keeps pinned memory that this gave back
        self._under_way: dict[bool, deque[tuple[torch.cuda.Event, Tensor]]] = {True: deque(), False: deque()}
        self._lock = threading.Lock()

    def _pin(self, size: int) -> np.ndarray:
        with torch.cuda.device(self.device):
            if self._unpinned and hasattr(torch.accelerator, "empty_host_cache"):
                self._unpinned = False
                torch.accelerator.empty_host_cache()  # it would be used for the size that it had, and for no other
            try:
                return pinned(size)
            except RuntimeError as error:  # systems have limits of their own, as WSL has
                reason = str(error).splitlines()[0]
                warnings.warn(
                    f"of store.pinned_bytes {self._most_bytes} the system refuses {size} bytes ({reason}): pageable "
                    "memory takes their place, and copies take longer",
                    stacklevel=2,
                )
                self._pinned.stop_growing(size)  # or every packet would ask again
                raise MemoryError(reason) from error

    def _unpin(self, _: np.ndarray) -> None:
        self._unpinned = True

    def buffer(self, size: int) -> np.ndarray:
        """See Staging."""
        try:
            return self._take_pinned(size)
        except MemoryError:
            return self._pageable.take(size)

    def _take_pinned(self, size: int) -> np.ndarray:
        """Take pinned memory. MemoryError where it is used up, and the GPU is not done with enough of it."""
        with suppress(MemoryError):
            return self._pinned.take(size)
        for out in (True, False):
            self._give_back(out)
        return self._pinned.take(size)

    def place(self, target: Tensor) -> Tensor:
        """See Staging: memory of the GPU."""
        return torch.empty_like(target, device=self.device)

    def to_host(self, x: Tensor, target: Tensor | None = None) -> _ToHost:
        """See Staging."""
        if target is None:
            target = _like(x, self.buffer)
        stream = self._streams[True]
        with torch.cuda.device(self.device):
            computed = torch.cuda.Event()
            computed.record(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                stream.wait_event(computed)
                x.record_stream(stream)
                if target.is_pinned():
                    target.copy_(x, non_blocking=True)
                    return _ToHost(target, self._done(True, target), self._late, None)
                late = x.clone()  # to pageable memory this thread would have to wait for the copy, and all before it
                return _ToHost(target, self._done(True, late), self._late, late)

    def to_device(self, x: Tensor) -> _ToDevice:
        """See Staging."""
        if not x.is_pinned():
            with suppress(MemoryError):  # another pageable buffer would be no better
                x = _like(x, self._take_pinned).copy_(x)
        with torch.cuda.device(self.device), torch.cuda.stream(self._streams[False]):
            y = x.to(self.device, non_blocking=True)
            return _ToDevice(y, self._done(False, x), self.device)

    def _done(self, out: bool, used: Tensor) -> torch.cuda.Event:
        """The event after the last copy. What that uses is used for nothing else before it has come."""
        # Threads that wait for one of these sleep: else each would keep a core of the host busy.
        done = torch.cuda.Event(blocking=out)
        done.record(self._streams[out])
        with self._lock:
            self._under_way[out].append((done, used))
        self._give_back(out)
        return done

    def _give_back(self, out: bool) -> None:
        """Let go of what copies have used that are done."""
        under_way, come = self._under_way[out], []
        with torch.cuda.device(self.device), self._lock:
            while under_way and under_way[0][0].query():
                come.append(under_way.popleft())
        come.clear()  # and only now, without the lock, buffers go back


def pinned(size: int) -> np.ndarray:
    """Make memory that the GPU copies from and to by itself: uint8 [size]."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()


def _like(x: Tensor, take: Callable[[int], np.ndarray]) -> Tensor:
    """Host memory for x's values."""
    return torch.from_numpy(take(x.numel() * x.element_size())).view(x.dtype).view(x.shape)


def staging_for(device: torch.device, pinned_bytes: int | None = None) -> Staging:
    """Make the staging of stages that compute on `device`."""
    if device.type == "cuda":
        return CudaStaging(device, PINNED_BYTES if pinned_bytes is None else pinned_bytes)
    require(pinned_bytes is None, "store.pinned_bytes", pinned_bytes, "null where stages compute on the CPU")
    return HostStaging()
