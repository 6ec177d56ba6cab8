"""What one micro-batch changes in an endpoint's store, the same way at both ends of a link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from torch import Tensor

from pipecomp.buffers.base import CachedActivation, MessageStore


class Changes:
    """All changes of a micro-batch, made at its end, or none where one of its samples is refused.

    samples: the micro-batch's ids; where one comes again, its later visit builds on the earlier one.
    """

    def __init__(self, store: MessageStore, samples: Sequence[int]) -> None:
        self._store = store
        self._to_come = Counter(samples)
        self._held = dict(zip(self._to_come, store.get(list(self._to_come)), strict=True))
        self._new: dict[int, CachedActivation | None] = {}

    def held(self, sample: int) -> CachedActivation | None:
        """Give what this end holds of a sample now; the caller may change its m and `hold` it."""
        return self._held[sample]

    def may_keep(self, sample: int) -> bool:
        """Whether this end keeps what it is about to hold: not a new sample while the disk refuses writes."""
        return self._held[sample] is not None or self._store.keeps_new()

    def hold(self, sample: int, cached: CachedActivation | None) -> None:
        """Hold this of a sample, None for nothing."""
        self._new[sample] = cached
        self._to_come[sample] -= 1
        if self._to_come[sample]:
            self._held[sample] = cached and CachedActivation(cached.version, self._store.rounded(cached.m_nH))

    def make(self, put: Callable[[int, int, Tensor], None]) -> None:
        """Change the store; `put(sample, version, m)` keeps one sample."""
        for sample, cached in self._new.items():
            if cached is None:
                self._store.drop([sample])
            else:
                put(sample, *cached)
