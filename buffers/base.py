"""The seams between links and message stores: no implementation here.

One store serves one endpoint of a link: it maps a sample id to the cached activation m that both endpoints hold, with
its version. One environment serves one rank: it makes the stores of all its links, and ends a training step for all of
them together.
Shapes: n tokens of the sample, H hidden size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class CachedActivation(NamedTuple):
    """What an endpoint holds for a sample. m_nH: float32 [n, H]; the caller owns it and may change it."""

    version: int
    m_nH: Tensor  # noqa: N815


class Held(NamedTuple):
    """One line of a store's inventory, compared by both endpoints of a link on resume."""

    sample: int
    version: int
    digest: int  # CRC-32 of the stored value


Put = tuple[int, int, Tensor]  # sample, version, m
GRADIENT = 1 << 63  # in the id of an entry; ids of samples are below


def entry_id(sample: int, *, gradient: bool) -> int:
    """Give the id under which a store keeps a sample's cached activation, or the last gradient that was sent of it.

    For a store both are samples; it forgets, loads and compares each on its own.
    """
    return sample | GRADIENT if gradient else sample


def entry_name(entry: int) -> str:
    """Name an entry for people: "7", or "7 (gradient)"."""
    return f"{entry & ~GRADIENT} (gradient)" if entry & GRADIENT else str(entry)


Settled = Callable[[], None]  # waits until it is known whether what is put may be stored; raises if not


class MessageStore(Protocol):
    """Keeps the cached activations of one endpoint, by sample id.

    What is put is visible to `get` at once and durable after `commit`. What a store forgets for `max_bytes` it chooses
    at `commit`, from ids, sizes and capacity alone: two endpoints whose steps put the same samples forget the same
    samples, in whatever order the puts of a step came. Any method may be called from any thread.

    Raises:
        StoreError: if the store is closed or a background write failed earlier; not from `rounded`, `keeps_new` and
            `stats`. What was wrong with values that were put is raised as it is: NonFiniteError, WireError.
    """

    def get(self, samples: Sequence[int]) -> list[CachedActivation | None]:
        """Read each sample's cached activation, None where it was never put or was forgotten.

        On the stages' device. Waits for a running prefetch. With fewer than 32 bits it is what was decoded from the
        stored value, also before that value was written.
        """

    def put_many(self, puts: Sequence[Put], settled: Settled | None = None) -> None:
        """Replace a micro-batch's cached activations: all of them, or none where one is refused.

        The store owns their m (float32 [n, H], on the stages' device) from here on, and nothing waits for the device.
        What `settled` raises, on the thread that writes, keeps all of it from being stored.
        """

    def rounded(self, m_nH: Tensor) -> Tensor:
        """Give what `get` would return after this was put: with fewer than 32 bits other values; a new tensor."""

    def keeps_new(self) -> bool:
        """Say whether samples that are not held may be put; False while a disk refuses writes and the run goes on."""

    def prefetch(self, samples: Sequence[int]) -> None:
        """Start loading a micro-batch in the background; a later `get` takes it from memory. Returns at once.

        Asking for the same micro-batch again before it was taken does no harm and no work.
        """

    def commit(self) -> None:
        """End a training step of this link; a rank with several links calls its environment's `commit` instead.

        Everything put or dropped since the last commit becomes durable together, in the background. Waits while two
        earlier steps are still unwritten.
        """

    def flush(self) -> None:
        """Wait until every commit so far is on disk, safe from a power cut too."""

    def inventory(self) -> list[Held]:
        """List every sample held, sorted by id."""

    def held(self, samples: Sequence[int]) -> list[Held | None]:
        """Give the inventory's line of each of these samples, None where it is not held."""

    def drop(self, samples: Iterable[int]) -> None:
        """Forget these samples; their next visit is a first one."""

    def stats(self) -> dict[str, float]:
        """Count `samples`, `stored_bytes`, `hits`, `misses`, `evictions`, `declined` and `wait_seconds`.

        evictions: held samples that were forgotten for `max_bytes`; declined: samples that never fitted.
        wait_seconds: how long `get` and `commit` kept their callers.
        """

    def close(self) -> None:
        """Flush and release; safe to call twice. What was put after the last commit is dropped: it is half a step."""


class StoreEnvironment(Protocol):
    """Holds all message stores of one rank."""

    @property
    def run(self) -> str | None:
        """The id of the run that the store belongs to; None if no run has used it, or it is in memory."""

    def bind(self, run: str) -> None:
        """Make the store this run's."""

    def save(self, folder: str | os.PathLike[str]) -> bool:
        """Copy everything committed into `folder`; call it between steps.

        False, and no copy, where not all of it is on disk.
        """

    def restore(self, folder: str | os.PathLike[str]) -> bool:
        """Hold what `save` wrote to `folder`, in the stores that are open; False if there is nothing."""

    def link(self, name: str, settings: Mapping[str, Any]) -> MessageStore:
        """Open the store of one endpoint. StoreError if `settings` (JSON values) differ from what is kept there."""

    def commit(self) -> None:
        """End a training step of the rank: the changes of all its links become durable in one transaction."""

    def flush(self) -> None:
        """Wait until every commit so far is on disk, safe from a power cut too."""

    def close(self) -> None:
        """Flush and release everything; safe to call twice."""

    def size_bytes(self) -> int:
        """Count what the stores of this rank take: bytes of the file, or of the stored values in memory."""
