"""What every message store does alike: the index, the step, the budget, prefetching and counting.

A backend adds where values are kept: `_prepare` and `_added` (before and after an entry enters the index),
`_load_value` and `_reading` (values that are no longer in memory), and what `commit`, `flush` and `close` mean for it.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from pipecomp.buffers.base import GRADIENT, CachedActivation, Held, Put, Settled, entry_name
from pipecomp.buffers.value import ValueFormat, decoded, read_header, verify_value
from pipecomp.errors import ConfigError, NonFiniteError, StoreError, WireError
from pipecomp.kernels.rng import GOLDEN, finalize64
from pipecomp.kernels.staging import Copy, HostStaging, Staging


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


class Entry:
    """sample, version, size: of the stored value, size in bytes. crc: its CRC-32, None until it is packed.

    An entry is never changed to another version: `put` replaces it, so identity tells whether a reader is still right.
    """

    __slots__ = ("_checked", "_guard", "_m", "_settled", "crc", "sample", "size", "value", "version")

    def __init__(
        self,
        sample: int,
        version: int,
        size: int,
        *,
        m: Copy | None = None,
        settled: Settled | None = None,
        checked: bool = True,
        crc: int | None = None,
    ) -> None:
        self.sample, self.version, self.size, self.crc = sample, version, size, crc
        self.value: bytearray | None = None
        self._m, self._settled, self._checked, self._guard = m, settled, checked, threading.Lock()

    def pack(self, fmt: ValueFormat, where: str) -> bytearray | None:
        """Give the stored value's bytes, not to be changed; None if they were released because they are on disk.

        Whoever asks first waits for the activation to be on the host, and packs it.
        """
        if self._m is None:
            return self.value
        with self._guard:
            if self._m is None:
                return self.value
            if self._settled is not None:
                self._settled()
            m_nH = self._m.wait()
            if not self._checked:
                fmt.check(self.sample, self.version, m_nH, where)
            self.value = fmt.pack(self.sample, self.version, m_nH, where)
            self.crc = read_header(self.value, where).crc
            self._m = self._settled = None
            return self.value

    def as_put(self) -> Tensor | None:
        """Give m as it was put, not to be changed; None once it is packed, or while it may prove unfit to be stored."""
        m = self._m
        return m.wait() if m is not None and self._checked and self._settled is None else None

    def release(self) -> None:
        """Forget the copy in memory: the value is on disk."""
        self.value = None


MAX_WAITING = 256  # requests; more than any pipeline has in flight, so older ones were given up


class Loaded(NamedTuple):
    """A cached activation on its way to the stages' device."""

    version: int
    m: Copy


_State = Enum("_State", ["WAITING", "LOADING", "LOADED"])


class _Batch:
    """The samples of a request that nobody has taken, put or forgotten since; None until they are loaded."""

    def __init__(self, samples: Iterable[int]) -> None:
        self.state = _State.WAITING
        self.samples: dict[int, Loaded | None] = dict.fromkeys(samples)


class Prefetcher:
    """Loads requested samples; `ahead` is the number of micro-batches, 0 to load nothing ahead.

    load: gives what it could load of these samples; of one that the store does not hold, None.
    """

    def __init__(self, load: Callable[[list[int]], dict[int, Loaded | None]], ahead: int, name: str) -> None:
        if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
            raise ConfigError("store.prefetch", ahead, "a whole number from 0")
        self._load, self._ahead, self._name = load, ahead, name
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # a batch is loaded; whoever waits to take from it
        self._wanted = threading.Condition(self._lock)  # there is something to load; the thread, woken for no less
        self._batches: deque[_Batch] = deque(maxlen=MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._closed = False

    def request(self, samples: Iterable[int]) -> None:
        """Start loading these samples, but for those that an earlier request still holds; returns at once."""
        if not self._ahead:
            return
        with self._lock:
            batch = _Batch(s for s in samples if not any(s in earlier.samples for earlier in self._batches))
            if self._closed or not batch.samples:
                return
            self._batches.append(batch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._wanted.notify()

    def take(self, samples: Iterable[int]) -> dict[int, Loaded | None]:
        """Hand out what was loaded ahead of these samples, once; wait if it is being loaded right now.

        Requests before one that holds a sample are given up: their turn has passed. What has not begun, or could not be
        loaded, is left to the caller, who then gets the error itself.
        """
        taken: dict[int, Loaded | None] = {}
        with self._lock:
            for sample in samples if self._batches else ():
                at = next((i for i, batch in enumerate(self._batches) if sample in batch.samples), None)
                if at is None:
                    continue
                for _ in range(at):
                    self._batches.popleft()
                batch = self._batches[0]
                while batch.state is _State.LOADING and sample in batch.samples and not self._closed:
                    self._changed.wait()
                if batch.state is _State.LOADED and sample in batch.samples:
                    taken[sample] = batch.samples[sample]
                batch.samples.pop(sample, None)
            if self._batches:
                self._go_on()
        return taken

    def invalidate(self, samples: Iterable[int]) -> None:
        """Forget what was loaded ahead of samples that were put or forgotten."""
        with self._lock:
            if not self._batches:
                return
            for batch, sample in itertools.product(self._batches, samples):
                batch.samples.pop(sample, None)
            self._changed.notify_all()
            self._go_on()

    def idle(self) -> bool:
        """Say whether nothing is being loaded nor could be now."""
        with self._lock:
            return self._next() is None and all(batch.state is not _State.LOADING for batch in self._batches)

    def close(self) -> None:
        """Stop loading and forget everything; safe to call twice."""
        with self._lock:
            self._closed = True
            self._batches.clear()
            self._changed.notify_all()
            self._wanted.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _go_on(self) -> None:
        """Forget requests of which nothing is left, and load others in their place."""
        if not all(batch.samples for batch in self._batches):
            self._batches = deque((batch for batch in self._batches if batch.samples), MAX_WAITING)
        if self._next() is not None:
            self._wanted.notify()

    def _next(self) -> _Batch | None:
        ahead = itertools.islice(self._batches, self._ahead)
        return next((batch for batch in ahead if batch.state is _State.WAITING), None)

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._closed and self._next() is None:
                    self._wanted.wait()
                batch = self._next()
                if self._closed or batch is None:
                    return
                batch.state, samples = _State.LOADING, list(batch.samples)
            loaded: dict[int, Loaded | None] = {}
            with contextlib.suppress(Exception):
                loaded = self._load(samples)
            with self._lock:
                batch.samples = {s: loaded[s] for s in batch.samples if s in loaded}
                batch.state = _State.LOADED
                self._changed.notify_all()
                self._go_on()
            del batch, loaded


STEPS_BEHIND = 2  # whole steps that may wait for the disk before `submit_step` makes the training wait

Job = Callable[[], object]


def _nothing() -> None:
    """Do nothing: a Job."""


class Writer:
    """Runs jobs one after the other in a thread of its own; any thread may submit."""

    def __init__(self, name: str) -> None:
        # Each with what is called once it was its turn, whether it ran or not; None: the end.
        self._jobs: queue.SimpleQueue[tuple[Job, Job] | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(STEPS_BEHIND)  # for steps
        self._closed = False
        self._error: BaseException | None = None
        self._told = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job, then: Job = _nothing) -> None:
        """Queue a job that prepares something; then: called after it, or in its place after an error."""
        if self._closed:
            raise StoreError("message store: used after close")
        self._jobs.put((job, then))
        self.check()

    def submit_step(self, job: Job) -> float:
        """Queue a job that writes a step; wait while STEPS_BEHIND others are unfinished. Returns seconds waited."""
        start = time.perf_counter()
        self._room.acquire()
        waited = time.perf_counter() - start
        self.submit(job, self._room.release)
        return waited

    def drain(self) -> None:
        """Wait until every job submitted so far has run; raises, as `check`, if one failed."""
        reached = threading.Event()
        self._jobs.put((_nothing, reached.set))
        while self._thread.is_alive() and not reached.wait(1.0):  # one that has ended reaches nothing
            pass
        self.check()

    @property
    def failed(self) -> bool:
        """Whether a job raised."""
        return self._error is not None

    def check(self) -> None:
        """Raise StoreError if a job failed, NonFiniteError or WireError if it raised that."""
        if self._error is not None:
            self._told = True
            if isinstance(self._error, (NonFiniteError, WireError)):  # of what was to be stored, not of the store
                raise self._error
            raise StoreError(f"an earlier write in the background failed: {self._error}") from self._error

    def close(self) -> None:
        """Run what is queued and stop; safe to call twice. Raises, as `check`, if a job failed and nobody was told."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join()
        if not self._told:
            self.check()

    def _run(self) -> None:
        while (queued := self._jobs.get()) is not None:
            self._do(*queued)
            del queued  # what the job holds is not needed any more

    def _do(self, job: Job, then: Job) -> None:
        try:
            if self._error is None:
                job()
        except BaseException as error:
            self._error = error
        then()


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
