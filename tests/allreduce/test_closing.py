"""Closing a State, and asking what it has counted, while an average is under way."""

import threading
import time

import pytest
import torch

from pipecomp.allreduce import State, state
from pipecomp.allreduce.loopback import LoopbackGroup, run_threads


@pytest.mark.parametrize(("failed", "done"), [(False, True), (True, False)])
def test_close_waits_for_an_average_unless_other_ranks_have_failed(
    failed: bool, done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "_FAILED_S", 0.05)
    averaging, may_end = threading.Event(), threading.Event()
    averages = State("double_squeeze")
    mean = averages._mean

    def slow_mean(job: object) -> None:
        averaging.set()
        may_end.wait(60)
        mean(job)  # type: ignore[arg-type]

    monkeypatch.setattr(averages, "_mean", slow_mean)
    future = averages.submit(torch.ones(10), "x")
    assert averaging.wait(60)
    if not failed:
        threading.Thread(target=lambda: (time.sleep(0.5), may_end.set())).start()
    averages.close(failed=failed)
    assert future.done() == done
    may_end.set()
    assert torch.allclose(future.wait(), torch.ones(10), atol=0.2)


def test_what_is_under_way_counts_neither_as_raw_nor_as_sent() -> None:
    """One without the other is no ratio, and an average may take many steps."""
    asked = threading.Barrier(2)

    def counted(group: LoopbackGroup) -> tuple[tuple[int, int], ...]:
        averages, may_go = State("double_squeeze", group=group), threading.Event()
        mean = averages._mean
        averages._mean = lambda job: (may_go.wait(60), mean(job))  # type: ignore[method-assign]
        future = averages.submit(torch.ones(1000), "x")
        before = averages.stats()
        asked.wait(60)
        may_go.set()
        future.wait()
        averages.close()
        return tuple((found["bytes_raw"], found["bytes_sent"]) for found in (before, averages.stats()))

    for before, (raw, sent) in run_threads(2, counted):
        assert before == (0, 0)
        assert raw == 4000
        assert 0 < sent < raw / 5
