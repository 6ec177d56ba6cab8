"""Exchanges between ranks, several of them in one process over one store."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from pipecomp.distributed import consistency, heartbeat, rendezvous
from pipecomp.distributed.consistency import AllRanks
from pipecomp.distributed.heartbeat import Heartbeat
from pipecomp.errors import LinkTimeoutError, PeerLostError
from tests.limits import HANG_S


@pytest.fixture
def make_ranks(monkeypatch):
    """Makes the exchanges of two ranks."""
    monkeypatch.setattr(consistency, "_numbers", iter([0, 0] * 10))
    store = dist.HashStore()
    return lambda make: [make(rank, store) for rank in range(2)]


def exchange(ranks: list[AllRanks], late_s: float) -> list:
    """Exchange the ranks' numbers, the second one `late_s` seconds later."""

    def late() -> list:
        time.sleep(late_s)
        return ranks[1].all_gather_object(1)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(ranks[0].all_gather_object, 0), pool.submit(late)
        return [first.result(), second.result()]


def test_a_rank_is_waited_for_as_long_as_its_heartbeats_arrive(make_ranks, monkeypatch, capfd):
    """It may send a state, load data or download a model, also in a run that has started again."""
    monkeypatch.setattr(rendezvous, "process_heartbeat", lambda: SimpleNamespace(missed=lambda rank: None))
    monkeypatch.setattr(rendezvous, "AllRanks", lambda **given: given)
    given = rendezvous.all_ranks()
    assert given["wait_s"] == math.inf
    ranks = make_ranks(lambda rank, store: AllRanks(rank, 2, store, **given))
    monkeypatch.setattr(consistency, "_NOTICE_S", 0.1)
    assert exchange(ranks, late_s=0.5) == [[0, 1], [0, 1]]
    assert "pipecomp: rank 0: waits for rank 1 since 0 s: see its output" in capfd.readouterr().err


def test_without_heartbeats_a_rank_has_a_limit(make_ranks):
    ranks = make_ranks(lambda rank, store: AllRanks(rank, 2, store, wait_s=0.2))
    with pytest.raises(LinkTimeoutError, match=r"rank 1 did not reach the start of the run within 0\.2 s"):
        ranks[0].all_gather_object(0)


class SilentStore(dist.HashStore):
    """A store whose server is stopped: torch's client waits for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()

    def check(self, keys: list[str]) -> bool:
        return self.answers.wait(HANG_S)


def test_a_store_that_does_not_answer_is_a_loss_of_rank_0(monkeypatch):
    store = SilentStore()
    monkeypatch.setattr(dist, "PrefixStore", lambda prefix, store: store)
    monkeypatch.setattr(consistency, "_SILENCE_S", 0.2)
    ranks = AllRanks(1, 2, store)
    try:
        with pytest.raises(PeerLostError, match=r"lost rank 0 at the start: .*does not answer") as found:
            ranks.all_gather_object(1)
        assert found.value.rank == 0
    finally:
        store.answers.set()


def test_a_rank_that_never_beats_has_the_limit_of_the_start(monkeypatch):
    monkeypatch.setattr(heartbeat, "JOIN_TIMEOUT_S", 0.2)
    watch = Heartbeat(0, 2, dist.HashStore())
    try:
        while (missed := watch.missed(1)) is None:
            time.sleep(0.01)
        assert isinstance(missed, LinkTimeoutError)
        assert missed.rank == 1
        assert "rank 1 did not reach the start of the run within 0.2 s" in str(missed)
    finally:
        watch.end()
