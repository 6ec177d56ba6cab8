"""Cached activations in this process's memory: fast, gone when the process ends."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from pipecomp.buffers.store import Entry, LinkStore, Writer
from pipecomp.buffers.value import ValueFormat
from pipecomp.errors import StoreError


class MemoryStore(LinkStore):
    """Keeps packed values in memory: z bits a value, as on disk, with the same digests.

    On the host, with fewer than 32 bits, `put` itself packs, so that memory does not hold a queue of float32 tensors.
    Options as for `open_environment`.
    """

    def __init__(self, link: str = "link", *, bits: int = 32, group_size: int | None = None, **options: Any) -> None:
        super().__init__(link, ValueFormat(bits, group_size), **options)
        # From a device values arrive later, and another thread waits for them.
        self._writer = None if self._staging.immediate else Writer(f"message store {link}")

    def prefetch(self, samples: Sequence[int]) -> None:
        """Start copying a micro-batch to the device; on the host there is nothing to wait for."""
        if self._staging.immediate:
            self._check()
        else:
            super().prefetch(samples)

    def commit(self) -> None:
        """End a training step: forget what exceeds the budget."""
        self._check()
        self._end_step()

    def flush(self) -> None:
        """Wait until everything is packed."""
        self._check()
        if self._writer is not None:
            self._writer.drain()

    def close(self) -> None:
        """Forget everything; safe to call twice."""
        self._stop()
        self._start_with([])
        if self._writer is not None:
            self._writer.close()

    def _check(self) -> None:
        super()._check()
        if self._writer is not None:
            self._writer.check()

    def _prepare(self, entries: Sequence[Entry]) -> None:
        if self._writer is None and self._packs_early:
            self._pack_all(entries)

    def _added(self, entries: Sequence[Entry]) -> None:
        if self._writer is not None:
            self._writer.submit(lambda: self._pack_all(entries))

    def _load_value(self, sample: int) -> bytearray | None:
        return None


class MemoryEnvironment:
    """Holds the memory stores of one rank; options as for `open_environment`."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        MemoryStore(**options).close()  # a wrong option is an error here, not at the first link
        self._stores: dict[str, MemoryStore] = {}
        self._closed = False

    @property
    def run(self) -> str | None:
        """None: what is in memory belongs to this process."""
        return None

    def bind(self, run: str) -> None:
        """Do nothing: what is in memory belongs to this process."""

    def save(self, folder: str | os.PathLike[str]) -> bool:
        """Save nothing, which False says."""
        return False

    def restore(self, folder: str | os.PathLike[str]) -> bool:
        """Restore nothing, which False says."""
        return False

    def link(self, name: str, settings: Mapping[str, Any]) -> MemoryStore:
        """Open the store of one endpoint. `settings` cannot differ from anything: nothing survives the process."""
        self._check()
        if name in self._stores and not self._stores[name]._closed:
            raise StoreError(f"store of {name}: is open already")
        self._stores[name] = MemoryStore(name, **self._options)
        return self._stores[name]

    def commit(self) -> None:
        """End a training step for all links."""
        for store in self._open():
            store.commit()

    def flush(self) -> None:
        """Wait until everything is packed."""
        for store in self._open():
            store.flush()

    def close(self) -> None:
        """Forget everything; safe to call twice."""
        self._closed = True
        for store in self._stores.values():
            store.close()

    def size_bytes(self) -> int:
        """Count the bytes of all stored values."""
        return sum(int(store.stats()["stored_bytes"]) for store in self._stores.values())

    def _check(self) -> None:
        if self._closed:
            raise StoreError("message stores in memory: used after close")

    def _open(self) -> list[MemoryStore]:
        self._check()
        return [store for store in self._stores.values() if not store._closed]
