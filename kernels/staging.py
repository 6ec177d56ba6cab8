"""The seam between where stages compute and host memory, from which bytes travel and are stored.

On a GPU a copy takes its time beside computing, and whoever needs its bytes waits for just that: a sending thread for a
payload, a store's writer for a cached activation, the GPU itself for what was received. On the host there is nothing to
copy. Every implementation keeps what is copied as it was when the copy was asked for, if nobody writes to it before
`wait` returned, or, on the same device, by what is computed later.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pipecomp.kernels.pool import Pool


class Copy(Protocol):
    """A copy under way."""

    def wait(self) -> Tensor:
        """Give the copied tensor once it may be read; safe to call twice.

        Of a copy to the host, this thread waits. Of one to the device, what is computed there from here on waits.
        """


class Staging(Protocol):
    """Copies between one device and the host. Every method may be called from any thread, and none of them waits."""

    @property
    def device(self) -> torch.device:
        """Where stages compute."""

    @property
    def immediate(self) -> bool:
        """Whether copies are done when they are asked for, because there are none."""

    def buffer(self, size: int) -> np.ndarray:
        """Take uint8 [size] of host memory from a pool; it goes back once nobody refers to it any more."""

    def place(self, target: Tensor) -> Tensor:
        """Where to write, on the device, what `target`, uint8 of the host, shall hold: copy it there by `to_host`."""

    def to_host(self, x: Tensor, target: Tensor | None = None) -> Copy:
        """Start copying x of the device to the host, into `target` if one is given."""

    def to_device(self, x: Tensor) -> Copy:
        """Start copying x of the host to the device. The caller changes x no more."""


class Done:
    """A copy that there was no need for."""

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def wait(self) -> Tensor:
        """See Copy."""
        return self._x


class HostStaging:
    """Stages compute in host memory."""

    device = torch.device("cpu")
    immediate = True

    def __init__(self) -> None:
        self._pool = Pool()

    def buffer(self, size: int) -> np.ndarray:
        """See Staging."""
        return self._pool.take(size)

    def place(self, target: Tensor) -> Tensor:
        """See Staging: the target itself."""
        return target

    def to_host(self, x: Tensor, target: Tensor | None = None) -> Copy:
        """See Staging."""
        return Done(x)

    def to_device(self, x: Tensor) -> Copy:
        """See Staging."""
        return Done(x)
