"""LinkStore: index, budget, prefetching and background writing, common to all backends.

A backend adds where values live: `_load_value` and `_reader` read values that are no longer in memory, `_before_put`
and `_after_put` run around the change of the index, and `commit`, `flush` and `close` complete the protocol.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
import warnings
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from pipecomp.buffers.base import (
    GRADIENT,
    CachedActivation,
    CachedVersion,
    DamagedStoreError,
    Put,
    PutCheck,
    entry_name,
)
from pipecomp.buffers.value import ValueFormat, decode_value, read_header, verify_value
from pipecomp.errors import ConfigError, NonFiniteError, StoreError, WireError
from pipecomp.kernels.reference.reproducible import GOLDEN, finalize64
from pipecomp.kernels.staging import Copy, HostStaging, Staging

MAX_REQUESTS = 256  # more than any pipeline has micro-batches in flight: older prefetch requests are stale
MAX_UNWRITTEN_STEPS = 2  # steps that may wait for the disk before `submit_step` blocks the training
Read = Callable[[int], "bytearray | None"]  # a sample's stored value, in a buffer of its own


def sample_hash(sample: int) -> int:
    """Mix a sample id to 64 bits, one-to-one and the same everywhere (SplitMix64), so that hashes never tie."""
    return finalize64(sample + GOLDEN)


class Budget:
    """Selects the samples of one end of a link that fit into `max_bytes`; None keeps all of them.

    Note: [Eviction by hash]
        Kept are the samples with the smallest hashes of their ids, as many as fit: a fixed pseudo-random share of the
        dataset. With shuffled epochs the hit rate equals that share, whereas LRU would hit almost nothing: a sample
        comes back after about as many others as there are. The choice depends on the kept set alone, so two ends that
        hold the same samples after a resume stay in agreement.

        At the end of a step its samples are considered in the order of their hashes. A sample fits if it and the kept
        samples with smaller hashes stay within the budget, else it is declined. One that fits evicts kept samples with
        the largest hashes until all is within the budget. With constant sizes the set converges to the greedy choice:
        walk over all samples by hash, take each that fits.
    """

    def __init__(self, max_bytes: int | None) -> None:
        if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1):
            raise ConfigError("store.max_bytes", max_bytes, "None or a number of bytes above 0")
        self.max_bytes = max_bytes
        self.total = 0
        self._sizes: dict[int, int] = {}
        self._by_hash: list[tuple[int, int]] = []  # (hash, sample); empty without a budget

    def settle(self, changed: Mapping[int, int | None]) -> tuple[list[int], list[int]]:
        """End a step in which these samples were put (their new size) or dropped (None).

        Returns:
            The evicted samples, which were kept before, and the declined ones, which are new and do not fit.
        """
        if self.max_bytes is None:
            return [], []
        before = {sample for sample in changed if sample in self._sizes}
        candidates = []
        for sample, size in changed.items():
            if size is None or size != self._sizes.get(sample):
                self._remove(sample)
                if size is not None:
                    candidates.append((sample_hash(sample), sample, size))
        evicted: list[int] = []
        declined: list[int] = []
        for key, sample, size in sorted(candidates):
            removed = self._make_room(key, size)
            if removed is None:
                (evicted if sample in before else declined).append(sample)
                continue
            evicted += removed
            insort(self._by_hash, (key, sample))
            self._sizes[sample] = size
            self.total += size
        return evicted, declined

    def _make_room(self, key: int, size: int) -> list[int] | None:
        """Evict samples with hashes above `key` until `size` bytes fit; None, and no change, if they cannot."""
        assert self.max_bytes is not None
        excess = self.total + size - self.max_bytes
        removed = []
        for other_key, other in reversed(self._by_hash):
            if excess <= 0 or other_key < key:
                break
            removed.append(other)
            excess -= self._sizes[other]
        if excess > 0:
            return None
        for other in removed:
            self._remove(other)
        return removed

    def _remove(self, sample: int) -> None:
        size = self._sizes.pop(sample, None)
        if size is not None:
            self.total -= size
            del self._by_hash[bisect_left(self._by_hash, (sample_hash(sample), sample))]


@dataclass(eq=False, slots=True)
class StoreEntry:
    """One version of a sample in the index: first a tensor, then packed bytes, then only a place on disk.

    An entry never changes its version: a put replaces it, so a reader compares identity to find out whether its result
    is current.

    Attributes:
        sample, version: the id, and the version of m.
        size: bytes of the stored value.
        copy: m on its way to the host, None once it is packed.
        check: raises if m may not be stored.
        validated: whether the values of m have been checked.
        crc: CRC-32 of the stored value, None until it is packed.
        value: the stored value, None before it is packed and once it is on disk only.
        guard: held while it is packed.
    """

    sample: int
    version: int
    size: int
    copy: Copy | None = None
    check: PutCheck | None = None
    validated: bool = True
    crc: int | None = None
    value: bytearray | None = None
    guard: threading.Lock = field(default_factory=threading.Lock)

    def pack(self, fmt: ValueFormat, where: str) -> bytearray | None:
        """Return the stored value's bytes (read-only); None once they are on disk only.

        The first caller waits for the activation to be on the host, and packs it.
        """
        if self.copy is None:
            return self.value
        with self.guard:
            if self.copy is None:
                return self.value
            if self.check is not None:
                self.check()
            m_nH = self.copy.wait()
            if not self.validated:
                fmt.check(self.sample, self.version, m_nH, where)
            self.value = fmt.pack(self.sample, self.version, m_nH, where)
            self.crc = read_header(self.value, where).crc
            self.copy = self.check = None
            return self.value

    def unpacked(self) -> Tensor | None:
        """Return m as it was put, not to be changed; None once it is packed, or if it may still be refused."""
        copy = self.copy
        return copy.wait() if copy is not None and self.validated and self.check is None else None

    def release(self) -> None:
        """Free the packed bytes: the value is on disk."""
        self.value = None


class Prefetched(NamedTuple):
    """A cached activation on its way to the stages' device."""

    version: int
    copy: Copy


_State = Enum("_State", ["WAITING", "LOADING", "LOADED"])


class _PrefetchRequest:
    """The samples of a request that were not taken, put or dropped since; None until they are loaded."""

    def __init__(self, samples: Iterable[int]) -> None:
        self.state = _State.WAITING
        self.samples: dict[int, Prefetched | None] = dict.fromkeys(samples)


class Prefetcher:
    """Loads cached activations ahead of their use, in a background thread.

    A request is one micro-batch, and requests are expected to be used in the order they were made. At most `ahead` of
    them are loaded or being loaded at a time; the others wait as lists of ids, so memory is bounded by `ahead`
    micro-batches.

    Args:
        load: loads samples; leaves out those that fail, and returns None for those that the store does not hold.
        ahead: micro-batches; 0 disables prefetching.
        name: name of the thread.
    """

    def __init__(self, load: Callable[[list[int]], dict[int, Prefetched | None]], ahead: int, name: str) -> None:
        if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
            raise ConfigError("store.prefetch", ahead, "a whole number from 0")
        self._load, self._ahead, self._name = load, ahead, name
        self._lock = threading.RLock()
        self._loaded = threading.Condition(self._lock)  # wakes callers of `take`
        self._wanted = threading.Condition(self._lock)  # wakes the thread, only if there is something to load
        self._requests: deque[_PrefetchRequest] = deque(maxlen=MAX_REQUESTS)
        self._thread: threading.Thread | None = None
        self._closed = False

    def request(self, samples: Iterable[int]) -> None:
        """Start loading these samples, except those of an earlier pending request; returns at once."""
        if not self._ahead:
            return
        with self._lock:
            new = _PrefetchRequest(s for s in samples if not any(s in earlier.samples for earlier in self._requests))
            if self._closed or not new.samples:
                return
            self._requests.append(new)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._wanted.notify()

    def take(self, samples: Iterable[int]) -> dict[int, Prefetched | None]:
        """Hand out the loaded ones of these samples, once; wait for those being loaded.

        Requests before one that holds a sample are discarded: their turn has passed. Samples whose loading has not
        begun, or failed, are left out: the caller loads them, and gets the error itself.
        """
        taken: dict[int, Prefetched | None] = {}
        with self._lock:
            for sample in samples if self._requests else ():
                at = next((i for i, request in enumerate(self._requests) if sample in request.samples), None)
                if at is None:
                    continue
                for _ in range(at):
                    self._requests.popleft()
                request = self._requests[0]
                while request.state is _State.LOADING and sample in request.samples and not self._closed:
                    self._loaded.wait()
                if request.state is _State.LOADED and sample in request.samples:
                    taken[sample] = request.samples[sample]
                request.samples.pop(sample, None)
            if self._requests:
                self._advance()
        return taken

    def invalidate(self, samples: Iterable[int]) -> None:
        """Discard the loaded values of samples that were put or dropped."""
        with self._lock:
            if not self._requests:
                return
            for request, sample in itertools.product(self._requests, samples):
                request.samples.pop(sample, None)
            self._loaded.notify_all()
            self._advance()

    def idle(self) -> bool:
        """Return whether nothing is being loaded, nor could be now."""
        with self._lock:
            return self._next() is None and all(request.state is not _State.LOADING for request in self._requests)

    def close(self) -> None:
        """Stop loading and discard everything; safe to call twice."""
        with self._lock:
            self._closed = True
            self._requests.clear()
            self._loaded.notify_all()
            self._wanted.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _advance(self) -> None:
        """Remove empty requests, and load others in their place."""
        if not all(request.samples for request in self._requests):
            self._requests = deque((request for request in self._requests if request.samples), MAX_REQUESTS)
        if self._next() is not None:
            self._wanted.notify()

    def _next(self) -> _PrefetchRequest | None:
        ahead = itertools.islice(self._requests, self._ahead)
        return next((request for request in ahead if request.state is _State.WAITING), None)

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._closed and self._next() is None:
                    self._wanted.wait()
                request = self._next()
                if self._closed or request is None:
                    return
                request.state, samples = _State.LOADING, list(request.samples)
            loaded: dict[int, Prefetched | None] = {}
            with contextlib.suppress(Exception):
                loaded = self._load(samples)
            with self._lock:
                request.samples = {s: loaded[s] for s in request.samples if s in loaded}
                request.state = _State.LOADED
                self._loaded.notify_all()
                self._advance()
            del request, loaded


class BackgroundWriter:
    """Runs jobs one after the other in a thread of its own; any thread may submit.

    The first job that raises stops the writer: later jobs are not run, and every later call raises StoreError with the
    reason (NonFiniteError and WireError unchanged), because values that the caller believes to be stored are not.
    """

    def __init__(self, name: str) -> None:
        # Each job with a callback that runs after it, or in its place after an error; None ends the thread.
        self._jobs: queue.SimpleQueue[tuple[Callable[[], object], Callable[[], object]] | None] = queue.SimpleQueue()
        self._free_steps = threading.Semaphore(MAX_UNWRITTEN_STEPS)
        self._closed = False
        self._error: BaseException | None = None
        self._error_raised = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], object], then: Callable[[], object] = lambda: None) -> None:
        """Queue a job; `then` is called after it, or in its place after an error."""
        if self._closed:
            raise StoreError("message store: used after close")
        self._jobs.put((job, then))
        self.check()

    def submit_step(self, job: Callable[[], object]) -> float:
        """Queue a job that writes a step; wait while MAX_UNWRITTEN_STEPS others are unfinished.

        Returns:
            Seconds waited.
        """
        start = time.perf_counter()
        self._free_steps.acquire()
        waited = time.perf_counter() - start
        self.submit(job, self._free_steps.release)
        return waited

    def drain(self) -> None:
        """Wait until every job submitted so far has run; raises like `check` if one failed."""
        reached = threading.Event()
        self._jobs.put((lambda: None, reached.set))
        while self._thread.is_alive() and not reached.wait(1.0):  # a thread that has ended sets nothing
            pass
        self.check()

    @property
    def failed(self) -> bool:
        """True once a job has raised."""
        return self._error is not None

    def check(self) -> None:
        """Raise StoreError if a job failed; NonFiniteError and WireError as they are."""
        if self._error is not None:
            self._error_raised = True
            if isinstance(self._error, (NonFiniteError, WireError)):  # of the values, not of the store
                raise self._error
            raise StoreError(f"an earlier write in the background failed: {self._error}") from self._error

    def close(self) -> None:
        """Run the queued jobs and stop; safe to call twice. Raises like `check` an error that was never raised."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join()
        if not self._error_raised:
            self.check()

    def _run(self) -> None:
        while (queued := self._jobs.get()) is not None:
            job, then = queued
            try:
                if self._error is None:
                    job()
            except BaseException as error:
                self._error = error
            then()
            del queued, job, then  # free what the job holds


class LinkStore(ABC):
    """A MessageStore without its backend; `buffers.base` documents the public methods."""

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
        # Packing early frees memory if the packed form is smaller, and waits for the device on another thread.
        self._packs_early = fmt.bits < 32 or not self._staging.immediate
        self._lock = threading.RLock()
        self._entries: dict[int, StoreEntry] = {}
        self._changed: dict[int, None] = {}  # samples put or dropped since the last commit, in that order
        self._stored_bytes = 0
        self._budget = Budget(max_bytes)
        # Activations and gradients are each requested in an order of their own.
        self._prefetcher = Prefetcher(self._load_all, prefetch, f"prefetch {link}")
        self._gradient_prefetcher = Prefetcher(self._load_all, prefetch, f"prefetch gradients {link}")
        self._counts = {"hits": 0, "misses": 0, "evictions": 0, "declined": 0}
        self._wait_seconds = 0.0
        self._warned = False  # about damaged values
        self._closed = False

    def get(self, samples: Sequence[int]) -> list[CachedActivation | None]:
        self._check()
        start = time.perf_counter()
        ahead = {**self._prefetcher.take(samples), **self._gradient_prefetcher.take(samples)}
        if len(ahead) < len(samples):
            ahead.update(self._load_all([sample for sample in samples if sample not in ahead]))
        # A repeated sample is loaded again, because its caller may change it; a failed one again for its error.
        found = [ahead.pop(sample) if sample in ahead else self._load(sample) for sample in samples]
        hits = sum(loaded is not None for loaded in found)
        with self._lock:
            self._counts["hits"] += hits
            self._counts["misses"] += len(found) - hits
            self._wait_seconds += time.perf_counter() - start
        return [loaded and CachedActivation(loaded.version, loaded.copy.wait()) for loaded in found]

    def put(self, sample: int, version: int, m_nH: Tensor) -> None:
        """Replace one sample's cached activation."""
        self.put_many([(sample, version, m_nH)])

    def put_many(self, puts: Sequence[Put], check: PutCheck | None = None) -> None:
        self._check()
        entries, validated = [], self._staging.immediate
        for sample, version, m_nH in puts:
            self._format.check(sample, version, m_nH, self.where(sample), values=validated)
            size, copy = self._format.size(*m_nH.shape), self._staging.to_host(m_nH.detach())
            entries.append(StoreEntry(sample, version, size, copy=copy, check=check, validated=validated))
        self._before_put(entries)
        with self._lock:
            for entry in entries:
                self._replace(entry.sample, entry)
        self._invalidate([entry.sample for entry in entries])
        self._after_put(entries)

    def rounded(self, m_nH: Tensor) -> Tensor:
        where = f"store of {self.link}"
        m_nH = self._staging.to_host(m_nH).wait()
        value = self._format.pack(0, 1, m_nH, where)
        return self._staging.to_device(decode_value(value, read_header(value, where)).m_nH).wait()

    def accepts_new(self) -> bool:
        return True

    def prefetch(self, samples: Sequence[int]) -> None:
        self._check()
        self._prefetcher.request(s for s in samples if not s & GRADIENT)
        self._gradient_prefetcher.request(s for s in samples if s & GRADIENT)

    def prefetched(self) -> bool:
        """Return whether all requests that fit into `prefetch` are loaded."""
        return self._prefetcher.idle() and self._gradient_prefetcher.idle()

    def drop(self, samples: Iterable[int]) -> None:
        self._check()
        dropped = list(samples)
        if not dropped:
            return
        with self._lock:
            for sample in dropped:
                if sample in self._entries:
                    self._replace(sample, None)
        self._invalidate(dropped)

    def inventory(self) -> list[CachedVersion]:
        self._check()
        with self._lock:
            samples = sorted(self._entries)
        return [row for row in self.versions(samples) if row is not None]

    def versions(self, samples: Sequence[int]) -> list[CachedVersion | None]:
        self._check()
        with self._lock:
            entries = [self._entries.get(sample) for sample in samples]
        self._pack_all(entry for entry in entries if entry is not None and entry.crc is None)
        return [None if e is None or e.crc is None else CachedVersion(e.sample, e.version, e.crc) for e in entries]

    def stats(self) -> dict[str, float]:
        with self._lock:
            size = {"samples": len(self._entries), "stored_bytes": self._stored_bytes}
            return {**size, **self._counts, "wait_seconds": self._wait_seconds}

    def where(self, sample: int) -> str:
        """Name a sample of this store in an error."""
        return f"store of {self.link}, sample {entry_name(sample)}"

    # Hooks of the backends.

    def _before_put(self, entries: Sequence[StoreEntry]) -> None:  # noqa: B027
        """Run before new entries enter the index."""

    def _after_put(self, entries: Sequence[StoreEntry]) -> None:  # noqa: B027
        """Run after new entries have entered the index."""

    def _reader(self) -> AbstractContextManager[Read]:
        """Open a snapshot to read several values from."""
        return nullcontext(self._load_value)

    @abstractmethod
    def _load_value(self, sample: int) -> bytearray | None:
        """Read a value that is no longer in memory into a buffer of its own; None if it is gone."""

    # For the backends.

    def _check(self) -> None:
        """Raise StoreError if the store cannot be used."""
        if self._closed:
            raise StoreError(f"store of {self.link}: used after close")

    def _end_step(self) -> dict[int, StoreEntry | None]:
        """Apply the budget; returns the step's changes by sample, None for a deletion."""
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

    def _reset(self, entries: Iterable[StoreEntry]) -> None:
        """Replace the index by the stored entries, and discard uncommitted changes.

        The first commit deletes those that do not fit the budget.
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

    def _add_wait(self, seconds: float) -> None:
        with self._lock:
            self._wait_seconds += seconds

    def _stop(self) -> None:
        """Close everything but the backend."""
        self._closed = True
        self._prefetcher.close()
        self._gradient_prefetcher.close()

    def _pack_all(self, entries: Iterable[StoreEntry]) -> None:
        for entry in entries:
            self._pack(entry)

    def _pack(self, entry: StoreEntry) -> bytearray | None:
        return entry.pack(self._format, self.where(entry.sample))

    def _invalidate(self, samples: Collection[int]) -> None:
        self._prefetcher.invalidate(samples)
        self._gradient_prefetcher.invalidate(samples)

    def _replace(self, sample: int, entry: StoreEntry | None) -> None:
        old = self._entries.get(sample)
        self._stored_bytes += (entry.size if entry is not None else 0) - (old.size if old is not None else 0)
        if entry is None:
            self._entries.pop(sample, None)
        else:  # atomic: readers take no lock, and a sample that is put again is held at all times
            self._entries[sample] = entry
        self._changed[sample] = None

    def _load_all(self, samples: Iterable[int]) -> dict[int, Prefetched | None]:
        """Load these samples from one snapshot; those that cannot be read, or were written after it, are left out."""
        loaded: dict[int, Prefetched | None] = {}
        with self._reader() as read:
            for sample in samples:
                try:
                    loaded[sample] = self._load(sample, read)
                except StoreError:
                    continue
        return loaded

    def _load(self, sample: int, read: Read | None = None) -> Prefetched | None:
        while (entry := self._entries.get(sample)) is not None:
            try:
                cached = self._decode(entry, read or self._load_value)
            except DamagedStoreError as error:
                # The snapshot may be older than the entry: only a read of its own shows damage.
                if self._entries.get(sample) is not entry:
                    continue
                if read is not None:
                    raise
                self._drop_damaged(entry, error)
                continue
            return Prefetched(cached.version, self._staging.to_device(cached.m_nH))
        return None

    def _decode(self, entry: StoreEntry, read: Read) -> CachedActivation:
        m_nH = None if self._packs_early else entry.unpacked()
        if m_nH is not None:
            return CachedActivation(entry.version, m_nH.clone(memory_format=torch.contiguous_format))
        where = self.where(entry.sample)
        value = self._pack(entry)
        if value is not None:
            return decode_value(value, read_header(value, where))
        stored = read(entry.sample)
        if stored is None:
            raise DamagedStoreError(f"{where}: version {entry.version} is missing in the file")
        header = verify_value(stored, where)
        if header.crc != entry.crc:
            raise DamagedStoreError(
                f"{where}: the file holds sample {header.sample}, version {header.version}, CRC-32 {header.crc:#010x}; "
                f"expected version {entry.version}, {entry.crc:#010x}"
            )
        return decode_value(stored, header, alias=True)

    def _drop_damaged(self, entry: StoreEntry, error: DamagedStoreError) -> None:
        """Drop an entry whose stored value is damaged, unless a put has replaced it; the first one gives a warning."""
        with self._lock:
            if self._entries.get(entry.sample) is not entry:
                return
            self._replace(entry.sample, None)
            first, self._warned = not self._warned, True
        if first:
            warnings.warn(
                f"{error}. Damaged values are dropped, and their samples are sent as first visits again", stacklevel=2
            )
