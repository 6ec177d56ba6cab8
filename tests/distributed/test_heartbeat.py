"""Heartbeats, several watches in one process over one store; `dist/test_silence.py` has them over processes."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from pipecomp.distributed import heartbeat
from pipecomp.distributed.heartbeat import (
    FailureReport,
    Heartbeat,
    StoreSilentError,
    abandoned_store_threads,
    call_store,
)
from pipecomp.errors import ConfigError, LinkTimeoutError, PeerLostError
from tests.limits import HANG_S


@pytest.fixture
def watches(monkeypatch):
    """Three ranks' watches that notice silence after 1.5 s."""
    monkeypatch.setattr(heartbeat, "DEFAULT_TIMEOUT_S", 2.0)
    store = dist.HashStore()
    found = [Heartbeat(rank, 3, store) for rank in range(3)]
    yield found
    for each in found:
        each.end()
        assert not any(thread.is_alive() for thread in each._threads)


def until(condition):
    """True as soon as it holds, False if that takes too long for any machine."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_a_silent_rank_is_lost_to_those_that_have_an_engine(watches):
    for each in watches[:2]:
        each.begin()
    watches[2].end()
    assert until(lambda: all(each.lost is not None for each in watches[:2]))
    assert isinstance(watches[0].lost, LinkTimeoutError)
    assert "from rank 2" in str(watches[0].lost)
    with pytest.raises(LinkTimeoutError, match="from rank 2"):
        watches[0].enter()


def test_a_silent_rank_is_lost_to_those_that_wait_without_an_engine(watches, monkeypatch):
    """While records are exchanged, or a plan is read."""
    ended = threading.Event()
    monkeypatch.setattr(heartbeat, "_GRACE_S", 0.0)
    monkeypatch.setattr(Heartbeat, "_end_process", lambda self, *problem: (ended.set(), self._ended.set()))
    assert until(lambda: all(len(each._entries) == 2 for each in watches[:2]))
    with watches[0].waiting():
        watches[2].end()
        assert until(ended.is_set)
        assert isinstance(watches[0].lost, LinkTimeoutError)
        assert watches[0].lost.rank == 2
    assert watches[0]._waiting_since is None
    assert watches[1].lost is None, "it does not wait"


@pytest.mark.parametrize("failure", [PeerLostError("its connection was closed", 2), OSError("reset")])
def test_a_rank_whose_connection_has_ended_is_missed(watches, monkeypatch, failure):
    """Some time later: its own report says more."""
    connections = {1: SimpleNamespace(failure=None), 2: SimpleNamespace(failure=failure)}
    monkeypatch.setattr(heartbeat, "current_mesh", lambda: SimpleNamespace(connections=connections))
    assert watches[0].missed(2) is None
    monkeypatch.setattr(heartbeat, "_GRACE_S", 0.0)
    assert until(lambda: watches[0].missed(2) is not None)
    lost = watches[0].missed(2)
    assert isinstance(lost, PeerLostError)
    assert (lost.rank, str(failure) in str(lost)) == (2, True)
    assert watches[0].missed(1) is None


def test_a_failure_is_told_to_those_that_wait_without_an_engine(watches, monkeypatch):
    monkeypatch.setattr(heartbeat, "LINGER_S", 0.0)
    with watches[0].waiting():
        watches[2].report_end("it got SIGTERM")
        assert until(lambda: watches[0].lost is not None)
    assert isinstance(watches[0].lost, PeerLostError)
    assert "rank 2 stopped: it got SIGTERM" in str(watches[0].lost)


def test_a_collective_of_an_engine_counts_its_own_waiting(watches):
    watches[0].begin()
    with watches[0].waiting():
        assert watches[0]._waiting_since is None
    watches[0].enter()
    with watches[0].waiting():
        pass
    assert watches[0]._waiting_since is not None


def test_a_rank_that_has_closed_its_engine_is_not_missed(watches):
    for each in watches:
        each.begin()
    assert until(lambda: len(watches[0]._entries) == 2)
    watches[2].close(watches[2].engine)
    assert until(lambda: watches[0]._entries[2].state == "left")
    watches[2].end()
    since = watches[0]._entries[2].since
    assert until(lambda: time.monotonic() > since + 2.5)
    assert watches[0].lost is None


def test_closing_an_engine_leaves_the_one_that_was_made_after_it(watches):
    each = watches[1]
    each.begin()
    first = each.engine
    each.begin()
    each.on_exit = on_exit = lambda report: None
    each.close(first)
    assert each._state == ""
    assert each.on_exit is on_exit
    each.close(each.engine)
    assert each._state == "left"
    assert each.on_exit is not on_exit, "what it would have closed is not kept"


def test_why_a_start_failed_is_told_to_the_others(watches, monkeypatch):
    monkeypatch.setattr(heartbeat, "LINGER_S", 0.5)  # nobody here answers that it has stopped too
    for each in watches[1:]:
        each.begin()
    with pytest.raises(ConfigError), watches[0].starting():
        raise ConfigError("key", 1, "another")
    assert until(lambda: all(each.lost is not None for each in watches[1:]))
    lost = watches[2].lost
    assert isinstance(lost, PeerLostError)
    assert lost.rank == 0
    assert str(lost).startswith("rank 0 could not start: ConfigError: key: got 1")
    assert watches[2]._reported() is not None
    watches[2].begin()  # another engine: what ended the one before is over
    assert watches[2].lost is None
    assert watches[2]._reported() is None
    watches[2].enter()


def test_an_exception_that_ends_a_rank_is_told_to_those_that_wait_for_it(watches, monkeypatch):
    monkeypatch.setattr(sys, "last_value", KeyError("a column\n\x1b[2J"), raising=False)
    monkeypatch.setattr(heartbeat, "LINGER_S", 0.0)
    monkeypatch.delattr("builtins.get_ipython", raising=False)
    watches[2].exit()  # before an engine: rank 0 compares arguments, rank 1 makes its engine
    watches[1].begin()
    assert until(lambda: watches[1].lost is not None and watches[0].missed(2) is not None)
    for told in (watches[0].missed(2), watches[1].lost):
        assert isinstance(told, PeerLostError)
        assert told.rank == 2
        assert "rank 2 stopped: KeyError: 'a column" in str(told)
        assert str(told).isprintable()


def test_why_a_process_ends_is_reported_once(watches, monkeypatch):
    monkeypatch.setattr(heartbeat, "LINGER_S", 0.0)
    for each in watches:
        each.begin()
    watches[1].find_failure = lambda: PeerLostError("lost rank 0: its connection was closed", 0)
    assert watches[1].report_end("it got SIGTERM") == "lost rank 0: its connection was closed"
    assert until(lambda: watches[2].lost is not None)
    assert (watches[2].lost.rank, "lost rank 0: its connection" in str(watches[2].lost)) == (0, True)
    watches[1].stop(FailureReport(2, "what follows from it"))
    assert watches[1]._state.startswith("stopped 0 lost rank 0")
    monkeypatch.setattr(heartbeat, "_ON_EXIT_S", 0.0)
    assert watches[1].report_end("it got SIGTERM") == "", "an error ends it already"


def test_where_a_launcher_ends_all_ranks_none_is_the_cause(watches, monkeypatch):
    monkeypatch.setattr(heartbeat, "LINGER_S", 0.0)
    for each in watches:
        each.begin()
    watches[1].find_failure = lambda: PeerLostError("rank 0 stopped: it got SIGTERM", 0)
    assert watches[1].report_end("it got SIGTERM") == ""
    assert until(lambda: watches[2].lost is not None)
    assert (watches[2].lost.rank, "rank 1 stopped: it got SIGTERM" in str(watches[2].lost)) == (1, True)


def test_rank_0_stays_until_all_others_know(watches):
    for each in watches[1:]:
        each.begin()
    gone = threading.Event()

    def fail():
        with pytest.raises(ConfigError), watches[0].starting():
            raise ConfigError("key", 1, "another")
        gone.set()

    failing = threading.Thread(target=fail)
    failing.start()
    assert until(lambda: watches[1].lost is not None)
    watches[1].stop(FailureReport(0, "rank 0 could not start"))
    watches[2].end()  # and one that is silent
    assert until(gone.is_set)
    failing.join()
    assert watches[0]._entries[1].state == "stopped"


def test_the_end_waits_for_a_question_that_was_given_up(watches):
    """Inside torch its thread would abort the process."""
    answer = threading.Event()
    with pytest.raises(StoreSilentError):
        call_store(answer.wait, 0.0)
    assert abandoned_store_threads()
    threading.Timer(0.1, answer.set).start()
    watches[0].end()
    assert not abandoned_store_threads()


def test_a_rank_whose_gpu_waits_for_the_others_waits(watches, monkeypatch):
    """With NCCL a step returns at once; who then reads its loss waits there."""
    ended = threading.Event()
    monkeypatch.setattr(heartbeat, "_GRACE_S", 0.0)
    monkeypatch.setattr(Heartbeat, "_end_process", lambda self, *problem: (ended.set(), self._ended.set()))
    for each in watches[:2]:
        each.begin()
        each.enter()
    watches[0].leave(lambda: True)
    watches[1].leave()  # its process goes on, and would fail the test
    watches[2].end()
    assert until(ended.is_set)
    assert not watches[1]._ended.is_set()


def test_a_rank_whose_gpu_is_done_does_not_wait(watches, monkeypatch):
    monkeypatch.setattr(heartbeat, "_GRACE_S", 0.0)
    monkeypatch.setattr(Heartbeat, "_end_process", lambda self, *problem: self._ended.set())
    watches[0].begin()
    watches[0].enter()
    watches[0].leave(lambda: False)
    watches[2].end()
    assert until(lambda: watches[0].lost is not None)
    since = time.monotonic()
    assert until(lambda: time.monotonic() > since + 2.0)
    assert not watches[0]._ended.is_set()
