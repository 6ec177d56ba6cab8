"""Which samples a store forgets when it has a budget: a choice from ids, sizes and capacity alone.

Kept are the samples with the smallest hashes of their ids, as many as fit: a fixed pseudo-random share of the
dataset. With shuffled epochs its hit rate equals that share, where forgetting the least recently used would hit
almost nothing: a sample comes back after about as many others as there are. The choice has no memory but the set
that is kept, so two ends of a link that hold the same samples after a resume also go on alike.

Two rules, applied at the end of a step to its samples in the order of their hashes:
- a sample fits if it and the kept samples with smaller hashes do not exceed the budget; else it is declined;
- one that fits pushes out the kept samples with the largest hashes until all is within the budget.
When sizes stay the same, the set settles at the greedy choice: walk over all samples by hash, take each that fits.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping

from pipecomp.errors import ConfigError
from pipecomp.kernels.rng import GOLDEN, finalize64


def sample_hash(sample: int) -> int:
    """Mix a sample id to 64 bits, always alike and one-to-one (SplitMix64), so hashes never tie."""
    return finalize64(sample + GOLDEN)


class Budget:
    """The samples of one link end and their sizes in bytes. `max_bytes` None keeps everything."""

    def __init__(self, max_bytes: int | None) -> None:
        if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1):
            raise ConfigError("store.max_bytes", max_bytes, "None or a number of bytes above 0")
        self.max_bytes = max_bytes
        self.total = 0
        self._sizes: dict[int, int] = {}
        self._by_hash: list[tuple[int, int]] = []  # (hash, sample); stays empty without a budget

    def settle(self, changed: Mapping[int, int | None]) -> tuple[list[int], list[int]]:
        """End a step in which these samples were put (their new size) or dropped (None).

        Returns:
            The samples to forget: those that were kept before, and those that are new and do not fit.
        """
        if self.max_bytes is None:
            return [], []
        before = {sample for sample in changed if sample in self._sizes}
        arriving = []
        for sample, size in changed.items():
            if size is None or size != self._sizes.get(sample):
                self._remove(sample)
                if size is not None:
                    arriving.append((sample_hash(sample), sample, size))
        evicted: list[int] = []
        declined: list[int] = []
        for key, sample, size in sorted(arriving):
            pushed = self._make_room(key, size)
            if pushed is None:
                (evicted if sample in before else declined).append(sample)
                continue
            evicted += pushed
            insort(self._by_hash, (key, sample))
            self._sizes[sample] = size
            self.total += size
        return evicted, declined

    def _make_room(self, key: int, size: int) -> list[int] | None:
        """Push out samples with hashes above `key` until `size` bytes fit; None, and no change, if they cannot."""
        assert self.max_bytes is not None
        excess = self.total + size - self.max_bytes
        pushed = []
        for other_key, other in reversed(self._by_hash):
            if excess <= 0 or other_key < key:
                break
            pushed.append(other)
            excess -= self._sizes[other]
        if excess > 0:
            return None
        for other in pushed:
            self._remove(other)
        return pushed

    def _remove(self, sample: int) -> None:
        size = self._sizes.pop(sample, None)
        if size is not None:
            self.total -= size
            del self._by_hash[bisect_left(self._by_hash, (sample_hash(sample), sample))]
