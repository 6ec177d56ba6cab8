"""Copies between the compute device and host memory, where bytes are sent and stored.

On a GPU a copy runs beside the computation, and only the consumer of its bytes waits: a sending thread for a payload, a
store's writer for a cached activation, the GPU itself for received data. On the host there is nothing to copy.

A copy holds the source as it was when the copy was requested, provided that nobody writes to the source before `wait`
returns; work on the same device that is launched later may write to it.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pipecomp.errors import require
from pipecomp.kernels.pool import BufferPool

PINNED_BYTES = 256 << 20


class Copy(Protocol):
    """A copy in progress."""

    def wait(self) -> Tensor:
        """Return the copied tensor once it may be read; safe to call twice.

        For a copy to the host, this thread waits. For one to the device, work launched there from here on waits.
        """


class Staging(Protocol):
    """Copies between one device and the host. Every method may be called from any thread, and none of them waits."""

    @property
    def device(self) -> torch.device:
        """The device that computes."""

    @property
    def immediate(self) -> bool:
        """True if copies are complete at once because source and target are the same memory."""

    def buffer(self, size: int) -> np.ndarray:
        """Take uint8 [size] of host memory from a pool; it returns there once nobody refers to it any more."""

    def place(self, target: Tensor) -> Tensor:
        """Return memory on the device for the content of `target`, uint8 on the host; `to_host` copies it there."""

    def to_host(self, x: Tensor, target: Tensor | None = None) -> Copy:
        """Start copying x from the device to the host, into `target` if given."""

    def to_device(self, x: Tensor) -> Copy:
        """Start copying x from the host to the device. The caller must not change x afterwards."""


class FinishedCopy:
    """A copy that is complete, or was never needed."""

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def wait(self) -> Tensor:
        """Return the tensor."""
        return self._x


class HostStaging:
    """Staging of stages that compute in host memory."""

    device = torch.device("cpu")
    immediate = True

    def __init__(self) -> None:
        self._pool = BufferPool()

    def buffer(self, size: int) -> np.ndarray:
        """Take uint8 [size] from the pool."""
        return self._pool.take(size)

    def place(self, target: Tensor) -> Tensor:
        """Return the target itself."""
        return target

    def to_host(self, x: Tensor, target: Tensor | None = None) -> Copy:
        """Return x itself; `target`, if given, holds it already."""
        return FinishedCopy(x)

    def to_device(self, x: Tensor) -> Copy:
        """Return x itself."""
        return FinishedCopy(x)


class _CopyToHost:
    """A copy that a host thread waits for.

    staged: a copy on the device that the waiting thread itself copies to x; None if the GPU writes x directly.
    """

    def __init__(self, x: Tensor, done: torch.cuda.Event, stream: torch.cuda.Stream, staged: Tensor | None) -> None:
        self._x, self._done, self._stream, self._staged = x, done, stream, staged
        self._lock = threading.Lock()

    def wait(self) -> Tensor:
        """Wait on this thread."""
        with torch.cuda.device(self._stream.device):
            self._done.synchronize()
            with self._lock:
                if self._staged is not None:
                    with torch.cuda.stream(self._stream):
                        self._x.copy_(self._staged)
                    self._staged = None
        return self._x


class _CopyToDevice:
    """A copy that later work on the GPU waits for."""

    def __init__(self, x: Tensor, done: torch.cuda.Event, device: torch.device) -> None:
        self._x, self._done, self._device = x, done, device

    def wait(self) -> Tensor:
        """Let the current stream wait."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._done)
            self._x.record_stream(stream)
        return self._x


class CudaStaging:
    """Staging of a GPU: a stream for each direction, pinned host memory, events. The current stream goes on computing.

    pinned_bytes: limit for host memory that the GPU copies from and to. Where it is used up, or the system refuses
    more, pageable memory takes its place, and copies take longer; those to the host run on the threads that wait.
    """

    # Note: every call of torch.cuda here runs with `device` as the current one. Otherwise a thread's first call makes a
    # context on GPU 0, hundreds of megabytes there for every process that computes on another GPU.

    immediate = False

    def __init__(self, device: torch.device, pinned_bytes: int = PINNED_BYTES) -> None:
        self._streams = {to_host: torch.cuda.Stream(device) for to_host in (True, False)}
        # Copies to pageable memory have a stream of their own: in the others they would wait for later work.
        self._pageable_stream = torch.cuda.Stream(device)
        self.device = self._streams[True].device  # with its index: other threads have another current device
        self._pinned_bytes = pinned_bytes
        self._pinned = BufferPool(self._pin, pinned_bytes, self._unpin, pinned_bytes)
        self._pageable = BufferPool()
        self._unpinned = False  # whether torch caches pinned memory that this released
        self._in_progress: dict[bool, deque[tuple[torch.cuda.Event, Tensor]]] = {True: deque(), False: deque()}
        self._lock = threading.Lock()

    def _pin(self, size: int) -> np.ndarray:
        with torch.cuda.device(self.device):
            if self._unpinned and hasattr(torch.accelerator, "empty_host_cache"):
                self._unpinned = False
                torch.accelerator.empty_host_cache()  # torch reuses a cached block for its own size only
            try:
                return pinned(size)
            except RuntimeError as error:  # systems have limits of their own, WSL for example
                reason = str(error).splitlines()[0]
                warnings.warn(
                    f"the system refuses {size} bytes of the {self._pinned_bytes} of store.pinned_bytes ({reason}): "
                    "pageable memory is used instead, and copies take longer",
                    stacklevel=2,
                )
                self._pinned.stop_growing(size)  # otherwise every packet would ask again
                raise MemoryError(reason) from error

    def _unpin(self, _: np.ndarray) -> None:
        self._unpinned = True

    def buffer(self, size: int) -> np.ndarray:
        """Take uint8 [size] of pinned memory, or of pageable memory if none is left."""
        try:
            return self._take_pinned(size)
        except MemoryError:
            return self._pageable.take(size)

    def _take_pinned(self, size: int) -> np.ndarray:
        """Take pinned memory. MemoryError if it is used up, and copies in progress hold too much of it."""
        with suppress(MemoryError):
            return self._pinned.take(size)
        for to_host in (True, False):
            self._release_finished(to_host)
        return self._pinned.take(size)

    def place(self, target: Tensor) -> Tensor:
        """Return new memory on the GPU."""
        return torch.empty_like(target, device=self.device)

    def to_host(self, x: Tensor, target: Tensor | None = None) -> _CopyToHost:
        """Start copying x to the host."""
        if target is None:
            target = _host_like(x, self.buffer)
        stream = self._streams[True]
        with torch.cuda.device(self.device):
            computed = torch.cuda.Event()
            computed.record(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                stream.wait_event(computed)
                x.record_stream(stream)
                if target.is_pinned():
                    target.copy_(x, non_blocking=True)
                    return _CopyToHost(target, self._finish(True, target), self._pageable_stream, None)
                # A copy to pageable memory would block this thread until all earlier work is done.
                staged = x.clone()
                return _CopyToHost(target, self._finish(True, staged), self._pageable_stream, staged)

    def to_device(self, x: Tensor) -> _CopyToDevice:
        """Start copying x to the GPU."""
        if not x.is_pinned():
            with suppress(MemoryError):  # another pageable buffer would be no better
                x = _host_like(x, self._take_pinned).copy_(x)
        with torch.cuda.device(self.device), torch.cuda.stream(self._streams[False]):
            y = x.to(self.device, non_blocking=True)
            return _CopyToDevice(y, self._finish(False, x), self.device)

    def _finish(self, to_host: bool, used: Tensor) -> torch.cuda.Event:
        """Record the event of the copy just launched. `used` stays alive until it has happened."""
        # blocking: threads that wait for a copy to the host sleep instead of keeping a core busy.
        done = torch.cuda.Event(blocking=to_host)
        done.record(self._streams[to_host])
        with self._lock:
            self._in_progress[to_host].append((done, used))
        self._release_finished(to_host)
        return done

    def _release_finished(self, to_host: bool) -> None:
        """Drop the tensors of finished copies."""
        in_progress, finished = self._in_progress[to_host], []
        with torch.cuda.device(self.device), self._lock:
            while in_progress and in_progress[0][0].query():
                finished.append(in_progress.popleft())
        finished.clear()  # buffers return to the pool here, without the lock


def pinned(size: int) -> np.ndarray:
    """Allocate uint8 [size] of pinned memory, which the GPU copies from and to without the CPU."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()


def _host_like(x: Tensor, take: Callable[[int], np.ndarray]) -> Tensor:
    """Take host memory of x's dtype and shape."""
    return torch.from_numpy(take(x.numel() * x.element_size())).view(x.dtype).view(x.shape)


def staging_for(device: torch.device, pinned_bytes: int | None = None) -> Staging:
    """Make the staging of stages that compute on `device`."""
    if device.type == "cuda":
        return CudaStaging(device, PINNED_BYTES if pinned_bytes is None else pinned_bytes)
    require(pinned_bytes is None, "store.pinned_bytes", pinned_bytes, "null where stages compute on the CPU")
    return HostStaging()
