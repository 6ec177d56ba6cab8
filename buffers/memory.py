"""Message stores in this process's memory: fast, lost when the process ends."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from pipecomp.buffers.store import BackgroundWriter, LinkStore, StoreEntry
from pipecomp.buffers.value import ValueFormat
from pipecomp.errors import StoreError


class MemoryStore(LinkStore):
    """A MessageStore of packed values in memory: z bits a value and the same digests as on disk.

    On the host, with fewer than 32 bits, `put` itself packs, so that memory does not hold a queue of float32 tensors.
    Options as for `open_environment`.
    """

    def __init__(self, link: str = "link", *, bits: int = 32, group_size: int | None = None, **options: Any) -> None:
        super().__init__(link, ValueFormat(bits, group_size), **options)
        # Copies from a device finish later, and another thread waits for them.
        self._writer = None if self._staging.immediate else BackgroundWriter(f"message store {link}")

    def prefetch(self, samples: Sequence[int]) -> None:
        if self._staging.immediate:  # nothing to copy
            self._check()
        else:
            super().prefetch(samples)

    def commit(self) -> None:
        self._check()
        self._end_step()

    def flush(self) -> None:
        self._check()
        if self._writer is not None:
            self._writer.drain()

    def close(self) -> None:
        self._stop()
        self._reset([])
        if self._writer is not None:
            self._writer.close()

    def _check(self) -> None:
        super()._check()
        if self._writer is not None:
            self._writer.check()

    def _before_put(self, entries: Sequence[StoreEntry]) -> None:
        if self._writer is None and self._packs_early:
            self._pack_all(entries)

    def _after_put(self, entries: Sequence[StoreEntry]) -> None:
        if self._writer is not None:
            self._writer.submit(lambda: self._pack_all(entries))

    def _load_value(self, sample: int) -> bytearray | None:
        return None


class MemoryEnvironment:
    """The memory stores of one rank; options as for `open_environment`. Nothing of them survives the process."""

    run = None
    temporary = False  # it always is
    disposable = True

    def __init__(self, **options: Any) -> None:
        self._options = options
        MemoryStore(**options).close()  # raises for an invalid option
        self._stores: dict[str, MemoryStore] = {}
        self._closed = False

    def bind(self, run: str, *, disposable: bool) -> None:
        pass

    def save(self, folder: str | os.PathLike[str]) -> bool:
        return False

    def restore(self, folder: str | os.PathLike[str]) -> bool:
        return False

    def link(self, name: str, settings: Mapping[str, Any]) -> MemoryStore:
        self._check()
        if name in self._stores and not self._stores[name]._closed:
            raise StoreError(f"store of {name}: is open already")
        self._stores[name] = MemoryStore(name, **self._options)
        return self._stores[name]

    def commit(self) -> None:
        for store in self._open_stores():
            store.commit()

    def flush(self) -> None:
        for store in self._open_stores():
            store.flush()

    def close(self) -> None:
        self._closed = True
        for store in self._stores.values():
            store.close()

    def size_bytes(self) -> int:
        return sum(int(store.stats()["stored_bytes"]) for store in self._stores.values())

    def _check(self) -> None:
        if self._closed:
            raise StoreError("message stores in memory: used after close")

    def _open_stores(self) -> list[MemoryStore]:
        self._check()
        return [store for store in self._stores.values() if not store._closed]
