"""How long a rank counts as waiting for the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipecomp.engine.failure_guard import FailureGuard
from pipecomp.stages.link.links import Links
from tests import fake_cuda

GPU = torch.device("cuda", 0)


def left(device: torch.device) -> list[Any]:
    """What the heartbeat was told at the end of a step."""
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
        engine=1, enter=lambda: None, leave=lambda *computing: told.append(computing), stopped=lambda *said: None
    )
    guard.watch(Links(), heartbeat)
    with pytest.raises(ValueError, match="broken"), guard.propagate_failure():
        raise ValueError("broken")
    assert told == [(), (None,)]
    assert guard.failed
