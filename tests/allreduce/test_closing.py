"""Closing a State while an average is under way."""

import threading
import time

import pytest
import torch

from pipecomp.allreduce import State, state


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
