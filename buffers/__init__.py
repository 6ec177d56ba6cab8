"""Message stores: where both ends of a link keep the last message of every sample."""

from __future__ import annotations

import os
from pathlib import Path

from pipecomp.buffers.base import Held, Message, MessageStore, StoreEnvironment
from pipecomp.buffers.lmdb_store import LmdbEnvironment, LmdbStore
from pipecomp.buffers.memory import MemoryEnvironment, MemoryStore
from pipecomp.errors import ConfigError

__all__ = [
    "Held",
    "LmdbEnvironment",
    "LmdbStore",
    "MemoryEnvironment",
    "MemoryStore",
    "Message",
    "MessageStore",
    "StoreEnvironment",
    "open_environment",
]


def open_environment(
    backend: str,
    path: str | os.PathLike[str],
    rank: int,
    *,
    bits: int = 32,
    group_size: int | None = None,
    max_bytes: int | None = None,
    prefetch: int = 0,
    on_write_error: str = "stop",
) -> StoreEnvironment:
    """All message stores of one rank, from the "store" section of the configuration.

    backend: "lmdb" keeps them in `path`/rank-`rank`, "memory" in this process (path and rank are not used). bits: z of
    2, 4, 8, 16, 32. group_size: the quantizer's, where z is 8 or less. max_bytes: budget of each link end. prefetch:
    micro-batches loaded ahead, 0 for none. on_write_error: "stop" or "continue" (lmdb only). Raises
    ConfigError for an option, StoreError for the folder.
    """
    if backend == "memory":
        return MemoryEnvironment(bits=bits, group_size=group_size, max_bytes=max_bytes, prefetch=prefetch)
    if backend == "lmdb":
        folder = Path(path) / f"rank-{rank}"
        return LmdbEnvironment(
            folder,
            bits=bits,
            group_size=group_size,
            max_bytes=max_bytes,
            prefetch=prefetch,
            on_write_error=on_write_error,
        )
    raise ConfigError("store.backend", backend, "'lmdb', 'memory'")
