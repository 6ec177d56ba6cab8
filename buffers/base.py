"""Protocols of message stores, and the types that links and stores exchange.

A store serves one end of a link: it maps a sample id to the cached activation m that both ends hold, with its version.
An environment serves one rank: it opens the stores of all its links and commits a training step for all of them.
Shapes: n tokens of the sample, H hidden size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from pipecomp.errors import StoreError


class DamagedStoreError(StoreError):
    """Stored bytes differ from those written: a checksum, a length or a page of the file is wrong."""


class CachedActivation(NamedTuple):
    """A sample's cached activation. m_nH: float32 [n, H]; the caller owns it and may change it."""

    version: int
    m_nH: Tensor  # noqa: N815


class CachedVersion(NamedTuple):
    """One row of a store's inventory, which both ends of a link compare."""

    sample: int
    version: int
    digest: int  # CRC-32 of the stored value


Put = tuple[int, int, Tensor]  # sample, version, m
PutCheck = Callable[[], None]  # waits until the device reports that the values may be stored; raises if they may not
GRADIENT = 1 << 63  # bit of an entry's id; sample ids are below


def entry_id(sample: int, *, gradient: bool) -> int:
    """Return the id under which a store keeps a sample's cached activation, or the last gradient sent for it.

    A store treats both as samples: it evicts, loads and compares each on its own.
    """
    return sample | GRADIENT if gradient else sample


def entry_name(entry: int) -> str:
    """Name an entry in messages: "7", or "7 (gradient)"."""
    return f"{entry & ~GRADIENT} (gradient)" if entry & GRADIENT else str(entry)


class MessageStore(Protocol):
    """Cached activations of one end of a link, by sample id.

    Puts are visible to `get` at once and durable after `commit`. With a budget (`max_bytes`) the store evicts at
    `commit`, by ids, sizes and capacity alone: two ends whose steps put the same samples evict the same samples, in
    whatever order the puts of a step came. A value that fails its checksum is dropped with a warning, and `get` returns
    None for it. Any method may be called from any thread.

    Raises:
        StoreError: the store is closed or a background write failed earlier; not from `rounded`, `accepts_new` and
            `stats`. Errors of the values that were put keep their type: NonFiniteError, WireError.
    """

    def get(self, samples: Sequence[int]) -> list[CachedActivation | None]:
        """Read each sample's cached activation, None where it was never put, was evicted or is damaged.

        The tensors are on the stages' device. Waits for a running prefetch. With fewer than 32 bits the values are
        those decoded from the stored form, also before it is written.
        """

    def put_many(self, puts: Sequence[Put], check: PutCheck | None = None) -> None:
        """Replace a micro-batch's cached activations: all of them, or none if one is refused.

        The store takes over their m (float32 [n, H], on the stages' device) without waiting for the device. If `check`
        raises, on the thread that writes, none of them is stored.
        """

    def rounded(self, m_nH: Tensor) -> Tensor:
        """Return m rounded to the store's bits, equal to a later `get`, as a new tensor."""

    def accepts_new(self) -> bool:
        """Return whether samples that are not held may be put; False while the disk refuses writes in a running run."""

    def prefetch(self, samples: Sequence[int]) -> None:
        """Start loading a micro-batch in the background; a later `get` takes it from memory. Returns at once.

        A repeated request for the same micro-batch has no effect.
        """

    def commit(self) -> None:
        """End a training step of this link; a rank with several links calls its environment's `commit` instead.

        All puts and drops since the last commit become durable together, in the background. Waits while two earlier
        steps are unwritten.
        """

    def flush(self) -> None:
        """Wait until every commit so far is on disk, safe from a power cut."""

    def inventory(self) -> list[CachedVersion]:
        """List every sample held, sorted by id."""

    def versions(self, samples: Sequence[int]) -> list[CachedVersion | None]:
        """Return the inventory's row of each of these samples, None where it is not held."""

    def drop(self, samples: Iterable[int]) -> None:
        """Forget these samples; their next visit is a first visit."""

    def stats(self) -> dict[str, float]:
        """Return the counters `samples`, `stored_bytes`, `hits`, `misses`, `evictions`, `declined`, `wait_seconds`.

        evictions: held samples that were removed for `max_bytes`; declined: new samples that did not fit.
        wait_seconds: time that callers spent in `get` and `commit`.
        """

    def close(self) -> None:
        """Flush and release; safe to call twice. Puts after the last commit are discarded, as half a step."""


class StoreEnvironment(Protocol):
    """All message stores of one rank.

    Attributes:
        temporary: `close` removes the files, because nothing will continue from them.
    """

    temporary: bool

    @property
    def run(self) -> str | None:
        """Id of the run that the store belongs to; None if no run has used it, or it is in memory."""

    @property
    def disposable(self) -> bool:
        """True if neither a checkpoint of its run nor a name lets another process continue with the store."""

    def bind(self, run: str, *, disposable: bool) -> None:
        """Assign the store to a run."""

    def save(self, folder: str | os.PathLike[str]) -> bool:
        """Copy everything committed into `folder`; called between steps.

        Returns:
            False, and no copy is made, if not all of it is on disk.
        """

    def restore(self, folder: str | os.PathLike[str]) -> bool:
        """Replace the contents of the open stores by the copy in `folder`; False if none is usable."""

    def link(self, name: str, settings: Mapping[str, Any]) -> MessageStore:
        """Open the store of one end. StoreError if it was stored with other `settings` (JSON values)."""

    def commit(self) -> None:
        """End a training step of the rank: the changes of all its links become durable in one transaction."""

    def flush(self) -> None:
        """Wait until every commit so far is on disk, safe from a power cut."""

    def close(self) -> None:
        """Flush and release everything; safe to call twice."""

    def size_bytes(self) -> int:
        """Return the bytes of the rank's file, or of the stored values in memory."""
