"""What one micro-batch changes in an endpoint's store, the same way at both ends of a link."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipecomp.buffers.base import CachedActivation, MessageStore, PutCheck, entry_id


class Changes:
    """All changes of a micro-batch, made at its end, or none where one of its samples is refused.

    samples: the micro-batch's ids; where one comes again, its later visit builds on the earlier one. gradients: whether
    the entries are those of gradients.
    """

    def __init__(self, store: MessageStore, samples: Sequence[int], *, gradients: bool = False) -> None:
        self._store, self._samples, self._gradients = store, samples, gradients
        ids = dict.fromkeys(samples)
        self._held = dict(zip(ids, store.get([self._entry(i) for i in ids]), strict=True))
        self._new: dict[int, CachedActivation | None] = {}

    def held(self, sample: int) -> CachedActivation | None:
        """Give what this end holds of a sample now; the caller may change its m and `hold` it."""
        new = self._new.get(sample)
        if new is not None:  # a later visit
            return CachedActivation(new.version, self._store.rounded(new.m_nH))
        return None if sample in self._new else self._held[sample]

    def may_keep(self, sample: int) -> bool:
        """Whether this end keeps what it is about to hold: not a new sample while the disk refuses writes."""
        now = self._new if sample in self._new else self._held
        return now[sample] is not None or self._store.accepts_new()

    def hold(self, sample: int, cached: CachedActivation | None) -> None:
        """Hold this of a sample, None for nothing."""
        self._new[sample] = cached

    def runs(self) -> Iterator[range]:
        """Cut the micro-batch where a sample comes again, so that one call can encode each run: mostly all of it."""
        start, seen = 0, set[int]()
        for i, sample in enumerate(self._samples):
            if sample in seen:
                yield range(start, i)
                start, seen = i, set()
            seen.add(sample)
        yield range(start, len(self._samples))

    def dropped(self) -> set[int]:
        """Samples that this end will hold nothing of."""
        return {sample for sample, cached in self._new.items() if cached is None}

    def make(self, verdict: PutCheck | None = None) -> list[int]:
        """Change the store; which entries were put. verdict: see `MessageStore.put_many`."""
        kept = [(self._entry(sample), *cached) for sample, cached in self._new.items() if cached is not None]
        self._store.drop(self._entry(sample) for sample in self.dropped())
        self._store.put_many(kept, verdict)
        return [entry for entry, _, _ in kept]

    def _entry(self, sample: int) -> int:
        return entry_id(sample, gradient=self._gradients)
