"""Message stores: the cached activation m of every sample, at both ends of a link."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pipecomp.buffers.base import CachedActivation, CachedVersion, MessageStore, StoreEnvironment
from pipecomp.buffers.lmdb_store import LmdbEnvironment, LmdbStore
from pipecomp.buffers.memory import MemoryEnvironment, MemoryStore
from pipecomp.errors import ConfigError
from pipecomp.kernels.staging import Staging

__all__ = [
    "CachedActivation",
    "CachedVersion",
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
    """Open all message stores of one rank with the settings of the configuration's "store" section.

    Damaged values are dropped, and a damaged file is set aside, each with a warning.

    Args:
        backend: "lmdb" stores in `path`/rank-`rank`, "memory" in this process.
        path: folder of the stores of all ranks; not used in memory.
        rank: the number of the rank's state, of its stage and replica; not used in memory.
        bits: z, bits of a stored value: 2, 4, 8, 16 or 32.
        group_size: elements that share a scale if z is 8 or less; None for a token's whole row.
        max_bytes: budget of each end of a link; None for no limit.
        prefetch: micro-batches loaded ahead; 0 for none.
        on_write_error: "stop", or "continue" without the disk while it refuses writes (lmdb only).
        staging: copies between the stages' device and the host; None if they compute on the host.

    Returns:
        The rank's stores; close them at the end.

    Raises:
        ConfigError: an option is invalid.
        StoreError: the folder is in use, cannot be written, or has another program's file.

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
