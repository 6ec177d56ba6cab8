"""torch.cuda's double on the host: which device is current in a thread, streams, events, pinned memory.

What real ones do with the current device although they know a better one fails here unless that is the one that is
meant: in a thread that has not said so it is GPU 0, on which they would make a context.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipecomp.kernels import staging as staging_module

DEVICE = torch.device("cpu")  # what stands for the GPU


class FakeCuda:
    """The double. come: whether the GPU has done all. emptied: how often torch gave unused pinned memory back.

    did: in order, what streams ("computing", the current one, and "copying") wait for and keep memory for, and which
    of them the host has waited for.
    """

    def __init__(self) -> None:
        self.come, self.emptied = True, 0
        self.did: list[tuple[str, ...]] = []
        self._pinned: list[np.ndarray] = []
        self._current = threading.local()

    def check(self) -> None:
        """Fail unless this thread has said which device it means."""
        assert getattr(self._current, "device", None) == DEVICE, "a context on GPU 0"

    @contextmanager
    def guard(self, device: torch.device) -> Iterator[None]:
        """torch.cuda.device."""
        before, self._current.device = getattr(self._current, "device", None), device
        yield
        self._current.device = before

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """torch.cuda.stream, which sets the device that was current before once more when it ends."""
        self.check()
        yield

    def pin(self, size: int) -> np.ndarray:
        """staging.pinned."""
        self.check()
        self._pinned.append(np.zeros(size, dtype=np.uint8))
        return self._pinned[-1]

    def is_pinned(self, x: Tensor) -> bool:
        """Tensor.is_pinned."""
        starts = ((one.ctypes.data, one.size) for one in self._pinned)
        return any(start <= x.data_ptr() < start + size for start, size in starts)

    def empty_host_cache(self) -> None:
        """torch.accelerator.empty_host_cache."""
        self.check()
        self.emptied += 1


class Event:
    """torch.cuda.Event."""

    def __init__(self, cuda: FakeCuda, blocking: bool) -> None:
        self._cuda, self._blocking, self.of = cuda, blocking, "none"

    def record(self, stream: Any) -> None:
        """At the end of what the stream has got."""
        self._cuda.check()
        self.of = stream.name

    def query(self) -> bool:
        """Return True if it has come."""
        self._cuda.check()
        return self._cuda.come

    def synchronize(self) -> None:
        """Wait for it."""
        self._cuda.check()
        assert self._blocking, "a thread that waits keeps a core busy"
        self._cuda.did.append(("synchronize", self.of))


class Stream:
    """torch.cuda.Stream."""

    def __init__(self, cuda: FakeCuda, device: torch.device, name: str) -> None:
        self._cuda, self.device, self.name = cuda, device, name

    def wait_event(self, event: Event) -> None:
        """Go on after it."""
        self._cuda.check()
        self._cuda.did.append(("wait", self.name, event.of))


def use_fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """From here on, torch.cuda and pinned memory are the double; tensors of the host stand for those of the GPU."""
    cuda = FakeCuda()
    monkeypatch.setattr(torch.cuda, "device", cuda.guard)
    monkeypatch.setattr(torch.cuda, "stream", cuda.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(cuda, device, "computing"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(cuda, device, "copying"))
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking=False: Event(cuda, blocking))
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", cuda.empty_host_cache, raising=False)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: cuda.did.append(("keep", stream.name)))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: cuda.is_pinned(x))
    monkeypatch.setattr(staging_module, "pinned", cuda.pin)
    return cuda
