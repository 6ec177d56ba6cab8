"""The parts of a store by themselves: what is forgotten, what is loaded ahead, what writes in the background."""

import random
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecomp.buffers.base import CachedActivation
from pipecomp.buffers.store import MAX_UNWRITTEN_STEPS, BackgroundWriter, Budget, Prefetcher, sample_hash
from pipecomp.errors import ConfigError, StoreError

WAIT_S = 600.0  # guards against a hang: nothing here takes a second on a quiet machine


def greedy(sizes: dict[int, int], budget: int) -> set[int]:
    """Walk over all samples by hash, take each that fits."""
    kept, total = set(), 0
    for sample in sorted(sizes, key=sample_hash):
        if total + sizes[sample] <= budget:
            kept.add(sample)
            total += sizes[sample]
    return kept


class Kept(set):
    """Samples of a store with this budget."""

    def __init__(self, max_bytes):
        self.budget = Budget(max_bytes)

    def step(self, changed):
        evicted, declined = self.budget.settle(changed)
        assert not set(evicted) & set(declined)
        self.update(s for s, size in changed.items() if size is not None)
        self.difference_update(s for s, size in changed.items() if size is None)
        self.difference_update(evicted, declined)


class TestBudget:
    def test_the_hash_is_fixed(self):
        # Both ends of a link compute it, maybe in different versions. First output of SplitMix64 with seed 0 is known.
        assert sample_hash(0) == 0xE220A8397B1DCDAF
        assert len({sample_hash(i) for i in range(10_000)}) == 10_000
        top = sum(sample_hash(i) < 2**62 for i in range(10_000))
        assert 2300 < top < 2700, "about a quarter"

    @given(
        st.dictionaries(st.integers(0, 30), st.integers(1, 40), min_size=1, max_size=14),
        st.integers(1, 250),
        st.randoms(use_true_random=False),
    )
    @settings(max_examples=100, deadline=None)
    def test_any_order_settles_at_the_greedy_choice(self, sizes, max_bytes, rng):
        kept = Kept(max_bytes)
        for _ in range(len(sizes) + 1):
            order = rng.sample(sorted(sizes), len(sizes))
            while order:
                step = {order.pop(): None for _ in range(min(len(order), rng.randint(1, 5)))}
                kept.step({s: sizes[s] for s in step})
                assert sum(sizes[s] for s in kept) == kept.budget.total <= max_bytes
        assert kept == greedy(sizes, max_bytes)

    @given(st.lists(st.lists(st.tuples(st.integers(0, 12), st.none() | st.integers(1, 30)), max_size=6), max_size=12))
    @settings(max_examples=150, deadline=None)
    def test_the_order_inside_a_step_does_not_matter(self, steps):
        one, other = Kept(40), Kept(40)
        for step in steps:
            changed = dict(step)
            one.step(changed)
            other.step(dict(reversed(list(changed.items()))))
            assert one == other
            assert one.budget.total == other.budget.total <= 40

    def test_equal_sizes_settle_in_one_epoch_and_the_hit_rate_is_the_kept_share(self):
        kept, rng = Kept(25 * 8), random.Random(3)
        for epoch in range(3):
            hits = 0
            order = rng.sample(range(100), 100)
            for sample in order:
                hits += sample in kept
                kept.step({sample: 8})
            assert len(kept) == 25
            assert hits == (0 if epoch == 0 else 25)

    def test_dropping_makes_room_and_none_keeps_all(self):
        low, high = sorted((1, 2), key=sample_hash)
        kept = Kept(10)
        kept.step({low: 6})
        kept.step({high: 6})
        assert kept == {low}
        kept.step({low: None})
        kept.step({high: 6})
        assert kept == {high}
        kept.step({low: 6})
        assert kept == {low}, "the smaller hash pushes out the larger"
        unlimited = Kept(None)
        unlimited.step({i: 10**12 for i in range(5)})
        assert len(unlimited) == 5

    def test_a_stored_set_that_is_too_large_is_trimmed(self):
        sizes = {i: 10 for i in range(20)}
        evicted, declined = Budget(75).settle(sizes)
        assert {*evicted, *declined} == set(sizes) - greedy(sizes, 75)
        assert Budget(None).settle(sizes) == ([], [])

    @pytest.mark.parametrize("wrong", [0, -5, 1.5, "1", True])
    def test_a_budget_is_a_number_of_bytes(self, wrong):
        with pytest.raises(ConfigError, match=r"store\.max_bytes"):
            Budget(wrong)


class Source:
    """Loads messages, but only once the test lets it."""

    def __init__(self):
        self.gate = threading.Semaphore(0)
        self.started = threading.Semaphore(0)
        self.loads: list[int] = []

    def __call__(self, samples):
        self.loads += samples
        self.started.release()
        for _ in samples:
            assert self.gate.acquire(timeout=WAIT_S)
        if 999 in samples:
            raise StoreError("gone")
        loaded = {s: CachedActivation(len(self.loads), torch.full((1, 1), float(s))) for s in samples if s != 666}
        return loaded | {s: None for s in samples if s < 0}

    def wait_started(self, count=1):
        for _ in range(count):
            assert self.started.acquire(timeout=WAIT_S)

    def let(self, count):
        self.gate.release(count)


@pytest.fixture
def source():
    return Source()


@pytest.fixture
def ahead(source):
    made = []

    def prefetcher(batches):
        made.append(Prefetcher(source, batches, "test"))
        return made[-1]

    yield prefetcher
    source.let(1000)
    for one in made:
        one.close()


def settle(prefetcher, count):
    """Wait until `count` samples are loaded."""
    with prefetcher._loaded:
        ok = prefetcher._loaded.wait_for(
            lambda: sum(len(b.samples) for b in prefetcher._requests if b.state.name == "LOADED") == count, WAIT_S
        )
    assert ok


class TestPrefetch:
    def test_a_loaded_sample_is_handed_out_once(self, source, ahead):
        prefetcher = ahead(1)
        source.let(2)
        prefetcher.request([5, -1])
        settle(prefetcher, 2)
        assert prefetcher.take([5])[5].m_nH.item() == 5
        assert prefetcher.take([-1, 5]) == {-1: None}
        assert prefetcher.take([5]) == {}
        assert source.loads == [5, -1]

    def test_take_waits_for_what_is_being_loaded(self, source, ahead):
        prefetcher = ahead(1)
        prefetcher.request([5])
        source.wait_started()
        got = []
        taker = threading.Thread(target=lambda: got.append(prefetcher.take([5])))
        taker.start()
        taker.join(0.05)
        assert taker.is_alive()
        source.let(1)
        taker.join(WAIT_S)
        assert list(got[0]) == [5]
        assert source.loads == [5]

    def test_what_has_not_begun_is_left_to_the_caller(self, source, ahead):
        prefetcher = ahead(2)
        prefetcher.request([1, 2])
        source.wait_started()
        prefetcher.request([3, 4])
        source.let(1)
        prefetcher.invalidate([1, 2])
        assert prefetcher.take([4]) == {}
        source.let(2)
        settle(prefetcher, 1)
        assert source.loads == [1, 2, 3]

    def test_no_more_than_so_many_batches_are_in_memory(self, source, ahead):
        prefetcher = ahead(2)
        source.let(100)
        for start in range(0, 10, 2):
            prefetcher.request([start, start + 1])
        settle(prefetcher, 4)
        assert source.loads == [0, 1, 2, 3]
        assert prefetcher.idle()
        prefetcher.take([0])
        settle(prefetcher, 3)
        prefetcher.take([1])  # the first batch is used up
        settle(prefetcher, 4)
        assert source.loads == [0, 1, 2, 3, 4, 5]

    def test_asking_again_loads_nothing_again(self, source, ahead):
        prefetcher = ahead(2)
        source.let(100)
        for first in range(4):  # as a pipeline asks: at each micro-batch for the next two
            prefetcher.request([first, 10 + first])
            prefetcher.request([first + 1, 11 + first])
            settle(prefetcher, 4)
            assert list(prefetcher.take([first, 10 + first])) == [first, 10 + first]
        assert sorted(source.loads) == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]

    def test_batches_that_nobody_came_for_are_given_up(self, source, ahead):
        prefetcher = ahead(2)
        source.let(100)
        for sample in range(4):
            prefetcher.request([sample])
        settle(prefetcher, 2)
        assert list(prefetcher.take([1])) == [1]  # 0 was skipped
        settle(prefetcher, 2)
        assert source.loads == [0, 1, 2, 3]
        assert prefetcher.take([0]) == {}

    @pytest.mark.parametrize("when", ["waiting", "loading", "loaded"])
    def test_a_put_makes_the_copy_worthless(self, source, ahead, when):
        prefetcher = ahead(2)
        if when == "waiting":
            prefetcher.request([1])
        prefetcher.request([5])
        if when == "loaded":
            source.let(1)
            settle(prefetcher, 1)
        else:
            source.wait_started()
        prefetcher.invalidate([5])
        source.let(2)
        assert prefetcher.take([5]) == {}
        prefetcher.request([7])
        settle(prefetcher, 2 if when == "waiting" else 1)
        assert source.loads.count(5) == (0 if when == "waiting" else 1)

    def test_a_put_wakes_who_waits_for_the_old_copy(self, source, ahead):
        prefetcher = ahead(1)
        prefetcher.request([5])
        source.wait_started()
        got = []
        taker = threading.Thread(target=lambda: got.append(prefetcher.take([5])))
        taker.start()
        taker.join(0.02)
        prefetcher.invalidate([5])
        taker.join(WAIT_S / 2)  # sooner than the load itself gives up
        assert got == [{}]

    def test_a_failed_load_is_left_to_the_caller_and_the_next_goes_on(self, source, ahead):
        prefetcher = ahead(1)
        source.let(5)
        prefetcher.request([666, 3])
        settle(prefetcher, 1)
        assert list(prefetcher.take([666, 3])) == [3]
        prefetcher.request([999, 4])
        prefetcher.request([5])
        settle(prefetcher, 1)
        assert list(prefetcher.take([999, 4, 5])) == [5]

    def test_zero_loads_nothing(self, source, ahead):
        prefetcher = ahead(0)
        prefetcher.request([1])
        assert prefetcher.take([1]) == {}
        assert prefetcher._thread is None
        assert source.loads == []

    def test_close_frees_who_waits(self, source, ahead):
        prefetcher = ahead(1)
        prefetcher.request([5])
        source.wait_started()
        got = []
        taker = threading.Thread(target=lambda: got.append(prefetcher.take([5])))
        taker.start()
        closer = threading.Thread(target=prefetcher.close)
        closer.start()
        taker.join(WAIT_S)
        source.let(1)
        closer.join(WAIT_S)
        assert got == [{}]
        prefetcher.request([6])
        assert prefetcher.take([6]) == {}


class TestWriter:
    def test_jobs_run_in_order_and_drain_waits(self):
        writer, done = BackgroundWriter("test"), []
        for i in range(50):
            (writer.submit if i % 2 else writer.submit_step)(lambda i=i: done.append(i))
        writer.drain()
        assert done == list(range(50))
        writer.close()
        writer.close()

    def test_close_runs_what_is_queued(self):
        writer, gate, done = BackgroundWriter("test"), threading.Event(), []
        writer.submit(lambda: gate.wait(WAIT_S))
        writer.submit(lambda: done.append(1))
        gate.set()
        writer.close()
        assert done == [1]
        with pytest.raises(StoreError, match="after close"):
            writer.submit(lambda: None)
        writer.drain()  # and waits for nobody

    def test_steps_wait_when_the_disk_is_behind(self):
        writer, gate = BackgroundWriter("test"), threading.Event()
        for _ in range(MAX_UNWRITTEN_STEPS):
            assert writer.submit_step(lambda: gate.wait(WAIT_S)) < WAIT_S / 2
        writer.submit(lambda: None)  # packing never waits
        waiting = threading.Thread(target=lambda: writer.submit_step(lambda: None))
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        gate.set()
        waiting.join(WAIT_S)
        assert not waiting.is_alive()
        writer.close()

    def test_the_first_error_stops_everything_and_is_told_every_time(self):
        writer, ran = BackgroundWriter("test"), []

        def fail():
            raise ZeroDivisionError("the reason")

        gate = threading.Event()
        writer.submit(lambda: gate.wait(WAIT_S))
        writer.submit(fail)
        writer.submit(lambda: ran.append(1))
        gate.set()
        for call in (writer.drain, writer.check, lambda: writer.submit(fail), lambda: writer.submit_step(fail)):
            with pytest.raises(StoreError, match="the reason") as caught:
                call()
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert not ran
        assert writer.failed
        writer.close()

    def test_an_error_frees_who_waits_and_close_tells_it_if_nobody_did(self):
        writer, gate = BackgroundWriter("test"), threading.Event()

        def fail():
            gate.wait(WAIT_S)
            raise MemoryError("none left")

        for _ in range(MAX_UNWRITTEN_STEPS):
            writer.submit_step(fail)
        problems = []

        def submit():
            try:
                writer.submit_step(fail)
            except StoreError as error:
                problems.append(error)

        waiting = threading.Thread(target=submit)
        waiting.start()
        gate.set()
        waiting.join(WAIT_S)
        assert len(problems) == 1

        silent = BackgroundWriter("test")
        silent.submit(fail)
        with pytest.raises(StoreError, match="none left"):
            silent.close()
        silent.close()
        writer.close()
