"""Time for which a rank counts as waiting for the others, and the rank that is named where one is lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipecomp.distributed.heartbeat import Heartbeat, HeartbeatEntry
from pipecomp.engine import failure as engine_failure
from pipecomp.engine.failure import FailureGuard
from pipecomp.errors import PeerLostError
from pipecomp.stages.link.links import Links
from tests import fake_cuda

GPU = torch.device("cuda", 0)


def left(device: torch.device) -> list[Any]:
    """A heartbeat's calls at the end of a step."""
    told: list[Any] = []
    guard = FailureGuard(0, device)
    heartbeat: Any = SimpleNamespace(engine=1, enter=lambda: None, leave=told.append)
    guard.watch(Links(), heartbeat)
    with guard.propagate_failure(), guard.propagate_failure():
        assert not told
    return told


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(fake_cuda, "DEVICE", GPU)
    return fake_cuda.use_fake_cuda(monkeypatch)


def test_on_the_host_it_is_over_with_the_step():
    assert left(torch.device("cpu")) == [None]


def test_on_a_gpu_once_that_has_done_its_part(cuda):
    cuda.come = False
    (computing,) = left(GPU)
    assert computing()
    cuda.come = True
    assert not computing()


def test_what_fails_on_a_gpu_is_no_wait(cuda, monkeypatch):
    def query(event):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(fake_cuda.Event, "query", query)
    (computing,) = left(GPU)
    assert not computing()


def test_a_failure_ends_it_at_once():
    told: list[Any] = []
    guard = FailureGuard(0, torch.device("cpu"))
    heartbeat: Any = SimpleNamespace(
        engine=1,
        lost=None,
        enter=lambda: None,
        leave=lambda *computing: told.append(computing),
        stop=lambda *said: None,
        linger=lambda *said: None,
    )
    guard.watch(Links(), heartbeat)
    with pytest.raises(ValueError, match="broken"), guard.propagate_failure():
        raise ValueError("broken")
    assert told == [(), (None,)]
    assert guard.failed


@pytest.mark.parametrize(("told", "named"), [(PeerLostError("lost rank 2 (told by rank 1)", 2), 2), (None, 1)])
def test_who_was_waited_for_is_not_to_blame_where_another_was_lost(told, named):
    """While gradients are exchanged, a rank that ends because of a lost one looks like a lost one, too."""
    guard = FailureGuard(0, torch.device("cpu"))
    nothing: Any = {
        name: lambda *said: None for name in ("enter", "leave", "stop", "linger", "describe", "find_report")
    }
    guard.watch(Links(), SimpleNamespace(engine=1, lost=told, **nothing))
    with pytest.raises(PeerLostError) as caught, guard.propagate_failure():
        raise PeerLostError("gradients: rank 1 is gone or silent", 1)
    assert caught.value.rank == named


def test_of_ranks_that_say_nothing_the_longest_silent_one_is_lost(monkeypatch):
    """The others may wait in a collective for ranks that are there."""
    monkeypatch.setattr(engine_failure, "_FIND_LOST_S", 0.0)
    guard = FailureGuard(0, torch.device("cpu"))
    heartbeat = Heartbeat(0, 1, torch.distributed.HashStore())  # alone: without threads
    heartbeat._others = [1, 2, 3]
    heartbeat._entries = {
        rank: HeartbeatEntry("1 0 ", 0, "", None, since) for rank, since in ((1, 9.0), (2, 1.0), (3, 8.0))
    }
    for name in ("_read", "stop", "linger"):
        monkeypatch.setattr(heartbeat, name, lambda *_: None)
    guard.watch(Links(), heartbeat)
    with pytest.raises(PeerLostError, match="lost rank 2: it stopped without a report"), guard.propagate_failure():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer")
