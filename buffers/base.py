"""The seam between links and message stores: no implementation here.

One store serves one link end: it maps a sample id to the message `m` that both ends hold, with its version.
Shapes: n tokens of the sample, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class Message(NamedTuple):
    """What one link end holds for one sample."""

    version: int
    m_nH: Tensor  # float32 [n, H]; the caller owns it and may change it


class Held(NamedTuple):
    """One line of a store's inventory, compared by both ends of a link on resume."""

    sample: int
    version: int
    digest: int  # CRC-32 of the stored value


class MessageStore(Protocol):
    """Messages of one link end, by sample id.

    `put` is visible to `get` at once and durable after `commit`. Both ends of a link make the same calls in the same
    order, so whatever a store forgets (`max_bytes`) it must choose from ids, sizes and capacity alone: then both
    ends forget the same samples.
    """

    def get(self, samples: Sequence[int]) -> list[Message | None]:
        """The message of each sample, or None where it was never put or was evicted. Waits for a running prefetch."""
        ...

    def put(self, sample: int, version: int, m_nH: Tensor) -> None:
        """Replace the message of a sample. The store owns `m_nH` (float32 [n, H]) from here on."""
        ...

    def prefetch(self, samples: Sequence[int]) -> None:
        """Start loading these samples in the background; a later `get` takes them from memory. Returns at once."""
        ...

    def commit(self) -> None:
        """End a training step: everything put since the last commit becomes durable together, in the background."""
        ...

    def flush(self) -> None:
        """Wait until every commit so far is durable."""
        ...

    def inventory(self) -> list[Held]:
        """Every sample held, sorted by id."""
        ...

    def drop(self, samples: Iterable[int]) -> None:
        """Forget these samples; the next visit sends them whole."""
        ...

    def stats(self) -> dict[str, float]:
        """`samples`, `stored_bytes`, `hits`, `misses`, `evictions`, `wait_seconds`."""
        ...

    def close(self) -> None:
        """Flush and release; safe to call twice."""
        ...
