"""Message stores: where both ends of a link keep every sample's cached activation m."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pipecomp.buffers.base import CachedActivation, Held, MessageStore, StoreEnvironment
from pipecomp.buffers.lmdb_store import LmdbEnvironment, LmdbStore
from pipecomp.buffers.memory import MemoryEnvironment, MemoryStore
from pipecomp.errors import ConfigError
from pipecomp.kernels.staging import Staging

__all__ = [
    "CachedActivation",
    "Held",
    "LmdbEnvironment",
    "LmdbStore",
    "MemoryEnvironment",
    "MemoryStore",
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
    staging: Staging | None = None,
) -> StoreEnvironment:
    """Open all message stores of one rank, as the configuration's "store" section asks.

    Args:
        backend: "lmdb" keeps them in `path`/rank-`rank`, "memory" in this process.
        path: folder of the stores of all ranks; not used in memory.
        rank: this process's; not used in memory.
        bits: z, bits of a stored value: 2, 4, 8, 16 or 32.
        group_size: elements that share a scale, where z is 8 or less; None for a token's whole row.
        max_bytes: budget of each link's endpoint; None for no limit.
        prefetch: micro-batches loaded ahead; 0 for none.
        on_write_error: "stop", or "continue" without the disk while it refuses writes (lmdb only).
        staging: between the device that stages compute on and the host; None where that is the host.

    Returns:
        The rank's stores; close them at the end.

    Raises:
        ConfigError: an option.
        StoreError: the folder is in use, cannot be written, or lost data in a power cut.

    Example::

        with closing(open_environment("lmdb", "messages", rank=0, bits=8)) as environment:
            store = environment.link("link-0", {"forward_bits": 4})
            store.put_many([(sample, version, m_nH)])
            environment.commit()
            (cached,) = store.get([sample])
    """
    options: dict[str, Any] = dict(
        bits=bits, group_size=group_size, max_bytes=max_bytes, prefetch=prefetch, staging=staging
    )
    if backend == "memory":
        return MemoryEnvironment(**options)
    if backend == "lmdb":
        return LmdbEnvironment(Path(path) / f"rank-{rank}", on_write_error=on_write_error, **options)
    raise ConfigError("store.backend", backend, "'lmdb', 'memory'")
