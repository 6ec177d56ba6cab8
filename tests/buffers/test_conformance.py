"""One suite that every message store passes, and a comparison with a plain dict over random call sequences."""

import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipecomp.buffers import LmdbEnvironment, MemoryEnvironment, MemoryStore, open_environment
from pipecomp.buffers.store import sample_hash
from pipecomp.buffers.value import ValueFormat, unpack
from pipecomp.errors import ConfigError, NonFiniteError, ShapeError, StoreError
from tests.lazy_staging import on_both

staging = pytest.fixture(params=["host", "double"])(on_both)

H = 12
SETTINGS = {"method": "aqsgd", "forward_bits": 4}


@pytest.fixture
def tmp_path(memory_folder):
    return memory_folder


@pytest.fixture(params=["memory", "lmdb"])
def backend(request):
    return request.param


@pytest.fixture
def make(backend, tmp_path, staging):
    """Makes environments of one backend, a new folder each, and closes them."""
    made = []

    def environment(**options):
        made.append(open_environment(backend, tmp_path / str(len(made)), 0, **options))
        return made[-1]

    yield environment
    for one in made:
        one.close()


def message(sample: int, version: int, n: int = 3) -> torch.Tensor:
    return torch.randn(n, H, generator=torch.Generator().manual_seed(1000 * sample + version))


def stored(m_nH: torch.Tensor, bits: int, group_size: int | None = None) -> torch.Tensor:
    """deq(Q_z(m)); test_value.py compares this with a reference of its own."""
    return unpack(ValueFormat(bits, group_size).pack(0, 0, m_nH, "here"), "here").m_nH


def same(got, version, m_nH) -> bool:
    return got is not None and got.version == version and torch.equal(got.m_nH, m_nH)


@pytest.mark.parametrize("bits", [2, 4, 8, 16, 32])
def test_get_is_the_rounded_message_before_and_after_writing(make, bits):
    environment = make(bits=bits, group_size=5)
    store = environment.link("link-0", SETTINGS)
    for version in (1, 2):
        for sample in range(4):
            store.put(sample, version, message(sample, version, n=sample))
            assert same(store.get([sample])[0], version, stored(message(sample, version, n=sample), bits, 5))
        environment.commit()
        environment.flush()
        for sample, got in enumerate(store.get([0, 1, 2, 3])):
            assert same(got, version, stored(message(sample, version, n=sample), bits, 5))


def test_what_was_never_put_is_none_and_counted(make):
    store = make().link("link-0", SETTINGS)
    store.put(3, 1, message(3, 1))
    assert [m is None for m in store.get([3, 4, 3])] == [False, True, False]
    assert store.get([]) == []
    counts = store.stats()
    assert (counts["samples"], counts["hits"], counts["misses"], counts["evictions"]) == (1, 2, 1, 0)
    assert counts["stored_bytes"] == ValueFormat(32).size(3, H)
    assert counts["wait_seconds"] >= 0


def test_the_caller_owns_what_get_returns(make):
    environment = make(prefetch=1)
    store = environment.link("link-0", SETTINGS)
    store.put(0, 1, message(0, 1))
    for _ in range(3):
        for got in store.get([0, 0]):
            assert torch.equal(got.m_nH, message(0, 1))
            got.m_nH.add_(1)
        environment.commit()
        environment.flush()
        store.prefetch([0])


def test_links_of_a_rank_are_apart(make):
    environment = make()
    first, second = environment.link("link-0", SETTINGS), environment.link("link-1", SETTINGS)
    first.put(0, 1, message(0, 1))
    second.put(0, 2, message(0, 2))
    environment.commit()
    environment.flush()
    assert same(first.get([0])[0], 1, message(0, 1))
    assert same(second.get([0])[0], 2, message(0, 2))
    first.drop([0])
    assert second.get([0])[0] is not None
    with pytest.raises(StoreError, match="open already"):
        environment.link("link-0", SETTINGS)


def test_a_closed_link_holds_nothing_up(make):
    environment = make()
    first, second = environment.link("link-0", SETTINGS), environment.link("link-1", SETTINGS)
    first.put(7, 1, message(7, 1))
    first.close()
    second.put(7, 2, message(7, 2))
    environment.commit()
    environment.flush()
    assert same(second.get([7])[0], 2, message(7, 2))


def test_what_a_closed_link_held_in_memory_is_not_counted():
    environment = MemoryEnvironment()
    store = environment.link("link-0", SETTINGS)
    store.put(7, 1, message(7, 1))
    assert environment.size_bytes() > 0
    store.close()
    assert environment.size_bytes() == 0


def test_put_replaces_what_was_prefetched(make):
    environment = make(prefetch=2)
    store = environment.link("link-0", SETTINGS)
    for sample in range(4):
        store.put(sample, 1, message(sample, 1))
    environment.commit()
    environment.flush()
    store.prefetch([0, 1])
    store.prefetch([2, 3])
    while not store.prefetched():
        time.sleep(0.001)
    store.put(2, 2, message(2, 2))
    store.drop([3])
    got = store.get([0, 1, 2, 3])
    assert same(got[0], 1, message(0, 1))
    assert same(got[1], 1, message(1, 1))
    assert same(got[2], 2, message(2, 2))
    assert got[3] is None


def test_what_is_forgotten_is_forgotten_ahead_too(make):
    """Otherwise one end of a link would build on what the other has forgotten."""
    size = ValueFormat(32).size(3, H)
    environment = make(prefetch=1, max_bytes=size)
    store = environment.link("link-0", SETTINGS)
    stays, goes = sorted((1, 2), key=sample_hash)
    store.put(goes, 1, message(goes, 1))
    environment.commit()
    environment.flush()
    store.prefetch([goes])
    while not store.prefetched():
        time.sleep(0.001)
    store.put(stays, 1, message(stays, 1))
    environment.commit()
    assert [got is None for got in store.get([stays, goes])] == [False, True]


def test_inventory_names_versions_and_digests(make):
    store = make(bits=8).link("link-0", SETTINGS)
    for sample in (5, 2, 9):
        store.put(sample, sample + 1, message(sample, 1))
    lines = store.inventory()
    assert [(line.sample, line.version) for line in lines] == [(2, 3), (5, 6), (9, 10)]
    for line in lines:
        value = ValueFormat(8).pack(line.sample, line.version, message(line.sample, 1), "here")
        assert line.digest == int.from_bytes(value[36:40], "little")
    store.drop([5, 77])
    assert [line.sample for line in store.inventory()] == [2, 9]
    assert store.get([5]) == [None]


@pytest.mark.parametrize("staging", ["host"], indirect=True)  # the double's come to light later: test_staging.py
def test_bad_puts_change_nothing(make):
    store = make(bits=8).link("link-0", SETTINGS)
    store.put(0, 1, message(0, 1))
    with pytest.raises(NonFiniteError, match="link-0, sample 0"):
        store.put(0, 2, torch.full((1, H), float("nan")))
    with pytest.raises(ShapeError, match="sample 0"):
        store.put(0, 2, torch.zeros(H))
    with pytest.raises(ConfigError):
        store.put(-1, 2, message(0, 2))
    assert same(store.get([0])[0], 1, stored(message(0, 1), 8))
    assert len(store.inventory()) == 1


def test_closed_stores_say_so(make):
    environment = make(prefetch=1)
    store = environment.link("link-0", SETTINGS)
    store.put(0, 1, message(0, 1))
    store.commit()
    store.close()
    store.close()
    for call in (
        lambda: store.get([0]),
        lambda: store.put(0, 1, message(0, 1)),
        lambda: store.prefetch([0]),
        lambda: store.drop([0]),
        store.commit,
        store.flush,
        store.inventory,
    ):
        with pytest.raises(StoreError, match="after close"):
            call()
    environment.close()
    environment.close()
    with pytest.raises(StoreError, match="after close"):
        environment.link("link-1", SETTINGS)


def test_wrong_options_are_refused(backend, tmp_path):
    for options, key in (
        ({"bits": 3}, "store.bits"),
        ({"max_bytes": 0}, "store.max_bytes"),
        ({"prefetch": -1}, "store.prefetch"),
        ({"group_size": 0}, "group_size"),
    ):
        with pytest.raises(ConfigError, match=key):
            open_environment(backend, tmp_path / "refused", 0, **options)
    assert not (tmp_path / "refused").exists()
    with pytest.raises(ConfigError, match=r"store\.backend"):
        open_environment("redis", tmp_path, 0)


def test_both_ends_of_a_link_forget_alike(tmp_path):
    """One end on disk, one in memory; puts of a step in another order; the same samples stay."""
    size = ValueFormat(4).size(3, H)
    options = {"bits": 4, "max_bytes": 10 * size + 5}
    environments = [open_environment(backend, tmp_path, 0, **options) for backend in ("memory", "lmdb")]
    ends = [environment.link("link-0", SETTINGS) for environment in environments]
    order = torch.Generator().manual_seed(0)
    for epoch in range(3):
        samples = torch.randperm(40, generator=order).tolist()
        for start in range(0, 40, 8):
            for end in ends:
                step = samples[start : start + 8]
                for sample in step if end is ends[0] else reversed(step):
                    end.put(sample, epoch, message(sample, epoch))
                assert all(m is not None for m in end.get(step)), "visible until the step ends"
                end.commit()
    held = [[line.sample for line in end.inventory()] for end in ends]
    assert held[0] == held[1]
    assert len(held[0]) == 10
    for end in ends:
        counts = end.stats()
        assert counts["stored_bytes"] == 10 * size
        assert counts["evictions"] > 0
        assert counts["declined"] > 0
    for environment in environments:
        environment.close()


def test_any_thread_may_call(make):
    """One thread prefetches, one gets and puts, as transport and training do; every get sees the latest put."""
    environment = make(prefetch=3, bits=8)
    store = environment.link("link-0", SETTINGS)
    expected = {(s, v): stored(message(s, v), 8) for s in range(8) for v in range(12)}
    done = threading.Event()

    def ahead():
        turn = 0
        while not done.is_set():
            store.prefetch([turn % 8, (turn + 1) % 8])
            turn += 1
            done.wait(0.0005)

    thread = threading.Thread(target=ahead)
    thread.start()
    try:
        for version in range(12):
            for sample in range(8):
                got = store.get([sample])[0]
                assert (got is None) == (version == 0)
                if version:
                    assert same(got, version - 1, expected[sample, version - 1])
                store.put(sample, version, message(sample, version))
            environment.commit()
    finally:
        done.set()
        thread.join()


def test_what_is_put_again_is_held_all_the_time(make):
    """Readers take no lock: what they find at any moment of a put is what was there before, or what is put."""
    store = make().link("link-0", SETTINGS)
    store.put(5, 1, message(5, 1))
    found = []

    class Watched(dict):
        def pop(self, *args):
            there = super().pop(*args)
            found.extend(store.get([5]))
            return there

        def __setitem__(self, key, value):
            super().__setitem__(key, value)
            found.extend(store.get([5]))

    store._entries = Watched(store._entries)
    store.put(5, 2, message(5, 2))
    assert found
    assert all(same(got, got.version, message(5, got.version)) for got in found)
    store.drop([5])
    assert store.stats()["stored_bytes"] == 0


class Compared(RuleBasedStateMachine):
    """A store against a dict; a subclass says which: `make_environment`. The rule of budgets is written here again."""

    samples = st.integers(0, 9)
    lists = st.lists(samples, max_size=6)

    @initialize(
        bits=st.sampled_from([2, 8, 16, 32]),
        prefetch=st.integers(0, 3),
        max_bytes=st.none() | st.integers(100, 1500),
        group_size=st.none() | st.integers(1, 15),
    )
    def start(self, bits, prefetch, max_bytes, group_size):
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
        self.options = {"bits": bits, "prefetch": prefetch, "max_bytes": max_bytes, "group_size": group_size}
        self.format = ValueFormat(bits, group_size)
        self.now: dict = {}
        self.durable: dict = {}
        self.evicted: list = []
        self.changed: set = set()
        self.hits = self.misses = 0
        self.version = 0
        self.open()

    def open(self):
        self.environment = self.make_environment()
        self.store = self.environment.link("link-0", SETTINGS)

    @rule(sample=samples, n=st.integers(0, 4))
    def put(self, sample, n):
        self.version += 1
        m_nH = message(sample, self.version, n)
        self.now[sample] = (self.version, stored(m_nH, self.options["bits"], self.options["group_size"]))
        self.changed.add(sample)
        self.store.put(sample, self.version, m_nH)

    @rule(samples=lists)
    def get(self, samples):
        for sample, got in zip(samples, self.store.get(samples), strict=True):
            want = self.now.get(sample)
            self.hits += want is not None
            self.misses += want is None
            assert got is None if want is None else same(got, *want)

    @rule(samples=lists)
    def prefetch(self, samples):
        self.store.prefetch(samples)

    @rule(samples=lists)
    def drop(self, samples):
        self.store.drop(samples)
        for sample in samples:
            if self.now.pop(sample, None) is not None:
                self.changed.add(sample)

    @rule(whole=st.booleans())
    def commit(self, whole):
        (self.environment if whole else self.store).commit()
        self.forget()
        self.durable = dict(self.now)

    def forget(self):
        budget = self.options["max_bytes"]
        sizes = {s: self.format.size(*m.shape) for s, (_, m) in self.now.items()}
        if budget is None:
            self.changed = set()
            return

        def mixed(sample):  # SplitMix64's finalizer
            mask = 2**64 - 1
            z = (sample + 0x9E3779B97F4A7C15) & mask
            z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
            return z ^ (z >> 31)

        # Samples whose size did not change stay where they were; the others arrive, in the order of their hashes.
        before = {s: self.format.size(*m.shape) for s, (_, m) in self.durable.items()}
        arriving = [s for s in sizes if s in self.changed and before.get(s) != sizes[s]]
        kept = [s for s in sizes if s not in arriving]
        for sample in sorted(arriving, key=mixed):
            below = [s for s in kept if mixed(s) < mixed(sample)]
            if sum(sizes[s] for s in below) + sizes[sample] <= budget:
                kept.append(sample)
                while sum(sizes[s] for s in kept) > budget:
                    kept.remove(max(kept, key=mixed))
        self.now = {s: self.now[s] for s in self.now if s in kept}
        self.changed = set()

    @rule()
    def flush(self):
        self.store.flush()

    @invariant()
    def inventory(self):
        if not hasattr(self, "store"):
            return
        held = {line.sample: line.version for line in self.store.inventory()}
        assert held == {sample: version for sample, (version, _) in self.now.items()}
        counts = self.store.stats()
        assert counts["samples"] == len(self.now)
        assert counts["stored_bytes"] == sum(self.format.size(*m.shape) for _, m in self.now.values())
        assert (counts["hits"], counts["misses"]) == (self.hits, self.misses)

    def teardown(self):
        if hasattr(self, "environment"):
            self.environment.close()
            shutil.rmtree(self.folder)


class MemoryCompared(Compared):
    def make_environment(self):
        return MemoryEnvironment(**self.options)


class LmdbCompared(Compared):
    def make_environment(self):
        return LmdbEnvironment(self.folder / "rank-0", map_bytes=1 << 16, **self.options)

    @rule(whole=st.booleans())
    @precondition(lambda self: hasattr(self, "store"))
    def reopen(self, whole):
        """Values put after the last commit are gone, all else is there."""
        if whole:
            self.environment.close()
            self.open()
        else:
            self.store.close()
            self.store = self.environment.link("link-0", SETTINGS)
        self.now = dict(self.durable)
        self.changed = set()
        self.hits = self.misses = 0


bounds = settings(max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TestMemoryCompared = MemoryCompared.TestCase
TestMemoryCompared.settings = bounds
TestLmdbCompared = LmdbCompared.TestCase
TestLmdbCompared.settings = bounds


def test_nothing_is_loaded_ahead_of_what_is_in_memory_already():
    store = MemoryStore(prefetch=2)
    store.put(1, 1, message(1, 1))
    store.prefetch([1])
    assert store.prefetched()
    assert store._prefetcher._thread is None
    assert same(store.get([1])[0], 1, message(1, 1))
    store.close()


def test_a_memory_store_needs_no_environment():
    store = MemoryStore(bits=8)
    store.put(1, 1, message(1, 1))
    store.commit()
    assert same(store.get([1])[0], 1, stored(message(1, 1), 8))
    store.close()
