"""What every message store does alike: the index, the step, the budget, prefetching and counting.

A backend adds where values are kept: `_prepare` and `_added` (before and after an entry enters the index),
`_load_value` and `_reading` (values that are no longer in memory), and what `commit`, `flush` and `close` mean for it.
"""

from __future__ import annotations

import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from pipecomp.buffers.base import GRADIENT, CachedActivation, Held, Put, Settled, entry_name
from pipecomp.buffers.budget import Budget
from pipecomp.buffers.entry import Entry
from pipecomp.buffers.prefetch import Loaded, Prefetcher
from pipecomp.buffers.value import ValueFormat, decoded, read_header, verify_value
from pipecomp.errors import StoreError
from pipecomp.kernels.staging import HostStaging, Staging

Read = Callable[[int], "bytearray | None"]  # a sample's stored value, a buffer of its own


class LinkStore(ABC):
    """A MessageStore but for its backend; see `buffers.base` for what the public methods promise."""

    def __init__(
        self,
        link: str,
        fmt: ValueFormat,
        *,
        max_bytes: int | None = None,
        prefetch: int = 0,
        staging: Staging | None = None,
    ) -> None:
        self.link = link
        self._staging = staging or HostStaging()
        self._format = fmt
        # Packing need not wait where what is packed is smaller, nor where a device is to be waited for.
        self._packs_early = fmt.bits < 32 or not self._staging.immediate
        self._lock = threading.RLock()
        self._entries: dict[int, Entry] = {}
        self._changed: dict[int, None] = {}  # samples put or dropped since the last commit, in that order
        self._stored_bytes = 0
        self._budget = Budget(max_bytes)
        # Activations and gradients are each asked for in an order of their own.
        self._prefetcher = Prefetcher(self._load_all, prefetch, f"prefetch {link}")
        self._gradient_prefetcher = Prefetcher(self._load_all, prefetch, f"prefetch gradients {link}")
        self._counts = {"hits": 0, "misses": 0, "evictions": 0, "declined": 0}
        self._wait_seconds = 0.0
        self._closed = False

    def get(self, samples: Sequence[int]) -> list[CachedActivation | None]:
        """Read each sample's cached activation, or None; see MessageStore."""
        self._check()
        start = time.perf_counter()
        ahead = {**self._prefetcher.take(samples), **self._gradient_prefetcher.take(samples)}
        if len(ahead) < len(samples):
            ahead.update(self._load_all([sample for sample in samples if sample not in ahead]))
        # What comes twice is loaded again, as its caller may change it; of what is damaged that gives the error.
        found = [ahead.pop(sample) if sample in ahead else self._load(sample) for sample in samples]
        held = sum(loaded is not None for loaded in found)
        with self._lock:
            self._counts["hits"] += held
            self._counts["misses"] += len(found) - held
            self._wait_seconds += time.perf_counter() - start
        return [loaded and CachedActivation(loaded.version, loaded.m.wait()) for loaded in found]

    def put(self, sample: int, version: int, m_nH: Tensor) -> None:
        """Replace one sample's cached activation; see `put_many`."""
        self.put_many([(sample, version, m_nH)])

    def put_many(self, puts: Sequence[Put], settled: Settled | None = None) -> None:
        """Replace a micro-batch's cached activations; see MessageStore."""
        self._check()
        entries, checked = [], self._staging.immediate
        for sample, version, m_nH in puts:
            self._format.check(sample, version, m_nH, self.where(sample), values=checked)
            size, copy = self._format.size(*m_nH.shape), self._staging.to_host(m_nH.detach())
            entries.append(Entry(sample, version, size, m=copy, settled=settled, checked=checked))
        self._prepare(entries)
        with self._lock:
            for entry in entries:
                self._replace(entry.sample, entry)
        self._invalidate([entry.sample for entry in entries])
        self._added(entries)

    def rounded(self, m_nH: Tensor) -> Tensor:
        """Give what `get` would return after this was put; see MessageStore."""
        where = f"store of {self.link}"
        m_nH = self._staging.to_host(m_nH).wait()
        value = self._format.pack(0, 1, m_nH, where)
        again_nH = decoded(value, read_header(value, where)).m_nH
        return self._staging.to_device(again_nH).wait()

    def keeps_new(self) -> bool:
        """Say whether samples that are not held may be put; see MessageStore."""
        return True

    def prefetch(self, samples: Sequence[int]) -> None:
        """Start loading a micro-batch in the background; see MessageStore."""
        self._check()
        self._prefetcher.request(s for s in samples if not s & GRADIENT)
        self._gradient_prefetcher.request(s for s in samples if s & GRADIENT)

    def prefetched(self) -> bool:
        """Say whether everything that was requested, as far as `prefetch` allows, has been loaded."""
        return self._prefetcher.idle() and self._gradient_prefetcher.idle()

    def drop(self, samples: Iterable[int]) -> None:
        """Forget these samples; see MessageStore."""
        self._check()
        dropped = list(samples)
        if not dropped:
            return
        with self._lock:
            for sample in dropped:
                if sample in self._entries:
                    self._replace(sample, None)
        self._invalidate(dropped)

    def inventory(self) -> list[Held]:
        """List every sample held, sorted by id."""
        self._check()
        with self._lock:
            samples = sorted(self._entries)
        return [line for line in self.held(samples) if line is not None]

    def held(self, samples: Sequence[int]) -> list[Held | None]:
        """Give the inventory's lines of these samples; see MessageStore."""
        self._check()
        with self._lock:
            entries = [self._entries.get(sample) for sample in samples]
        return [None if e is None else Held(e.sample, e.version, self._digest(e)) for e in entries]

    def stats(self) -> dict[str, float]:
        """Count what happened; see MessageStore."""
        with self._lock:
            held = {"samples": len(self._entries), "stored_bytes": self._stored_bytes}
            return {**held, **self._counts, "wait_seconds": self._wait_seconds}

    def where(self, sample: int) -> str:
        """Name a sample of this store in an error."""
        return f"store of {self.link}, sample {entry_name(sample)}"

    # What backends use and fill in.

    def _invalidate(self, samples: Collection[int]) -> None:
        """Forget what was loaded ahead of samples that were put or forgotten."""
        self._prefetcher.invalidate(samples)
        self._gradient_prefetcher.invalidate(samples)

    def _prepare(self, entries: Sequence[Entry]) -> None:  # noqa: B027
        """Do what has to come before new entries enter the index."""

    def _added(self, entries: Sequence[Entry]) -> None:  # noqa: B027
        """Do what comes after new entries have entered the index."""

    def _reading(self) -> AbstractContextManager[Read]:
        """Open what reads values that are no longer in memory, all as they were at one time."""
        return nullcontext(self._load_value)

    @abstractmethod
    def _load_value(self, sample: int) -> bytearray | None:
        """Read the bytes of such a value as they are now, as a buffer of their own; None if they are gone."""

    def _check(self) -> None:
        """Raise StoreError if the store cannot be used."""
        if self._closed:
            raise StoreError(f"store of {self.link}: used after close")

    def _end_step(self) -> dict[int, Entry | None]:
        """Settle the budget; returns what the step changed: sample to its entry, None where it is to be deleted."""
        with self._lock:
            sizes = {s: e.size if (e := self._entries.get(s)) else None for s in self._changed}
            evicted, declined = self._budget.settle(sizes)
            for sample in (*evicted, *declined):
                self._replace(sample, None)
            self._counts["evictions"] += len(evicted)
            self._counts["declined"] += len(declined)
            step = {sample: self._entries.get(sample) for sample in self._changed}
            self._changed = {}
        self._invalidate([*evicted, *declined])
        return step

    def _start_with(self, entries: Iterable[Entry]) -> None:
        """Forget everything, changes that were not committed too, and hold what is stored.

        What does not fit the budget is deleted by the first commit.
        """
        with self._lock:
            before = self._entries
            self._entries = {entry.sample: entry for entry in entries}
            self._changed = {}
            self._budget = Budget(self._budget.max_bytes)
            self._stored_bytes = sum(entry.size for entry in self._entries.values())
            sizes = {sample: entry.size for sample, entry in self._entries.items()}
            for sample in itertools.chain(*self._budget.settle(sizes)):
                self._replace(sample, None)
                self._counts["evictions"] += 1
            self._invalidate({*before, *sizes})

    def _waited(self, seconds: float) -> None:
        with self._lock:
            self._wait_seconds += seconds

    def _stop(self) -> None:
        """Close what is common to all backends."""
        self._closed = True
        self._prefetcher.close()
        self._gradient_prefetcher.close()

    def _replace(self, sample: int, entry: Entry | None) -> None:
        old = self._entries.get(sample)
        self._stored_bytes += (entry.size if entry is not None else 0) - (old.size if old is not None else 0)
        if entry is None:
            self._entries.pop(sample, None)
        else:  # in one move: readers take no lock, and what is put again is held all the time
            self._entries[sample] = entry
        self._changed[sample] = None

    def _pack_all(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._pack(entry)

    def _pack(self, entry: Entry) -> bytearray | None:
        return entry.pack(self._format, self.where(entry.sample))

    def _digest(self, entry: Entry) -> int:
        if entry.crc is None:
            self._pack(entry)
        assert entry.crc is not None
        return entry.crc

    def _load_all(self, samples: Iterable[int]) -> dict[int, Loaded | None]:
        """Load what of these samples can be: not what is damaged, or was written after this began to read."""
        loaded: dict[int, Loaded | None] = {}
        with self._reading() as read:
            for sample in samples:
                try:
                    loaded[sample] = self._load(sample, read)
                except StoreError:
                    continue
        return loaded

    def _load(self, sample: int, read: Read | None = None) -> Loaded | None:
        while (entry := self._entries.get(sample)) is not None:
            cached = self._decode(entry, read or self._load_value)
            if cached is not None:
                return Loaded(cached.version, self._staging.to_device(cached.m_nH))
        return None

    def _decode(self, entry: Entry, read: Read) -> CachedActivation | None:
        """Decode the entry's cached activation; None if another entry or nothing took its place meanwhile."""
        m_nH = None if self._packs_early else entry.as_put()
        if m_nH is not None:
            return CachedActivation(entry.version, m_nH.clone(memory_format=torch.contiguous_format))
        where = self.where(entry.sample)
        value = self._pack(entry)
        if value is not None:
            return decoded(value, read_header(value, where))
        try:
            stored = read(entry.sample)
            if stored is None:
                raise StoreError(f"{where}: version {entry.version} is gone from the file")
            header = verify_value(stored, where)
            if header.crc != entry.crc:
                raise StoreError(
                    f"{where}: holds sample {header.sample}, version {header.version}, CRC-32 {header.crc:#010x}; "
                    f"expected version {entry.version}, {entry.crc:#010x}"
                )
            return decoded(stored, header, alias=True)
        except StoreError as error:
            if self._entries.get(entry.sample) is not entry:
                return None  # rewritten or deleted while it was read
            raise StoreError(f"{error}; `pipecomp store verify` lists what is damaged, `prune` removes it") from error
