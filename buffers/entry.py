"""One sample of a store's index, on its way from a tensor to packed bytes to a place on disk."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from pipecomp.buffers.value import HEADER_BYTES, ValueFormat, read_header


class _Unpacked:
    """An activation that was put but not packed. Packing happens once, by whoever needs the bytes first."""

    __slots__ = ("guard", "m_nH", "ready")

    def __init__(self, m_nH: Tensor) -> None:
        self.m_nH = m_nH
        self.guard = threading.Lock()
        self.ready: torch.cuda.Event | None = None
        if m_nH.is_cuda:
            # Another thread packs, maybe on another stream: it must not read before the caller's work is done.
            self.ready = torch.cuda.Event()
            self.ready.record(torch.cuda.current_stream(m_nH.device))


class Entry:
    """sample, version, size: of the stored value, size in bytes. crc: its CRC-32, None until it is packed.

    An entry is never changed to another version: `put` replaces it, so identity tells whether a reader is still right.
    """

    __slots__ = ("_unpacked", "crc", "sample", "size", "value", "version")

    def __init__(
        self, sample: int, version: int, size: int, *, m_nH: Tensor | None = None, crc: int | None = None
    ) -> None:
        self.sample, self.version, self.size, self.crc = sample, version, size, crc
        self.value: bytearray | None = None
        self._unpacked = _Unpacked(m_nH) if m_nH is not None else None

    def pack(self, fmt: ValueFormat, where: str) -> bytearray | None:
        """Give the stored value's bytes, not to be changed; None if they were released because they are on disk."""
        unpacked = self._unpacked
        if unpacked is None:
            return self.value
        with unpacked.guard, torch.cuda.device_of(unpacked.m_nH):
            if self._unpacked is None:
                return self.value
            if unpacked.ready is not None:
                torch.cuda.current_stream().wait_event(unpacked.ready)
            value = fmt.pack(self.sample, self.version, unpacked.m_nH, where)
            self.crc = read_header(memoryview(value)[:HEADER_BYTES], where).crc
            self.value = value
            self._unpacked = None
            return value

    def release(self) -> None:
        """Forget the copy in memory: the value is on disk."""
        self.value = None
