"""One sample of a store's index, on its way from a tensor to packed bytes to a place on disk."""

from __future__ import annotations

import threading

from torch import Tensor

from pipecomp.buffers.base import Settled
from pipecomp.buffers.value import ValueFormat, read_header
from pipecomp.kernels.staging import Copy


class Entry:
    """sample, version, size: of the stored value, size in bytes. crc: its CRC-32, None until it is packed.

    An entry is never changed to another version: `put` replaces it, so identity tells whether a reader is still right.
    """

    __slots__ = ("_checked", "_guard", "_m", "_settled", "crc", "sample", "size", "value", "version")

    def __init__(
        self,
        sample: int,
        version: int,
        size: int,
        *,
        m: Copy | None = None,
        settled: Settled | None = None,
        checked: bool = True,
        crc: int | None = None,
    ) -> None:
        self.sample, self.version, self.size, self.crc = sample, version, size, crc
        self.value: bytearray | None = None
        self._m, self._settled, self._checked, self._guard = m, settled, checked, threading.Lock()

    def pack(self, fmt: ValueFormat, where: str) -> bytearray | None:
        """Give the stored value's bytes, not to be changed; None if they were released because they are on disk.

        Whoever asks first waits for the activation to be on the host, and packs it.
        """
        if self._m is None:
            return self.value
        with self._guard:
            if self._m is None:
                return self.value
            if self._settled is not None:
                self._settled()
            m_nH = self._m.wait()
            if not self._checked:
                fmt.check(self.sample, self.version, m_nH, where)
            self.value = fmt.pack(self.sample, self.version, m_nH, where)
            self.crc = read_header(self.value, where).crc
            self._m = self._settled = None
            return self.value

    def as_put(self) -> Tensor | None:
        """Give m as it was put, not to be changed; None once it is packed, or while it may prove unfit to be stored."""
        m = self._m
        return m.wait() if m is not None and self._checked and self._settled is None else None

    def release(self) -> None:
        """Forget the copy in memory: the value is on disk."""
        self.value = None
