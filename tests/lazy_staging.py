"""A GPU's double: copies happen when they are waited for and not before, and every buffer holds poison until then.

Whoever reads without waiting, or changes what is still to be copied, gets wrong bytes every time, not once a year.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import Tensor

from pipecomp.buffers import store
from pipecomp.stages.link import endpoint

POISON = 0xAB


def poisoned(x: Tensor) -> Tensor:
    """Memory like x's with other values in it: for floats, NaN or absurd ones."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out.view(-1).view(torch.uint8).fill_(0xFF if x.is_floating_point() else POISON)
    return out


class LazyCopy:
    """Copies when it is waited for."""

    def __init__(self, x: Tensor, target: Tensor) -> None:
        self._x: Tensor | None = x
        self.target, self._lock = target, threading.Lock()

    def wait(self) -> Tensor:
        """See Copy."""
        with self._lock:
            if self._x is not None:
                self.target.copy_(self._x)
                self._x = None
        return self.target


class LazyStaging:
    """The "device" is host memory of its own."""

    device = torch.device("cpu")
    immediate = False

    def buffer(self, size: int) -> np.ndarray:
        """See Staging."""
        return np.full(size, POISON, dtype=np.uint8)

    def place(self, target: Tensor) -> Tensor:
        """See Staging."""
        return torch.full_like(target, POISON)

    def to_host(self, x: Tensor, target: Tensor | None = None) -> LazyCopy:
        """See Staging."""
        return LazyCopy(x, poisoned(x) if target is None else target)

    def to_device(self, x: Tensor) -> LazyCopy:
        """See Staging."""
        return LazyCopy(x, poisoned(x))


def use_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, endpoints and stores that are given no staging take the double."""
    for module in (endpoint, store):
        monkeypatch.setattr(module, "HostStaging", LazyStaging)


def on_both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make a fixture of it, with params "host" and "double", to run all tests of a module over both."""
    if request.param == "double":
        use_double(monkeypatch)
    return request.param
