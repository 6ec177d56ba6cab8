"""Ranks on this machine end with the function that started them, whenever that ends."""

from __future__ import annotations

import time
from multiprocessing.context import ForkServerProcess
from typing import Any

import pytest

from pipecomp.cluster.local_ranks import run_ranks
from tests.limits import HANG_S

pytestmark = pytest.mark.ranks


def sleep(rank: int, world: int, note: Any) -> None:
    time.sleep(HANG_S)


def test_ctrl_c_between_two_starts_ends_those_that_run(monkeypatch):
    workers = []
    start = ForkServerProcess.start

    def interrupted(worker: ForkServerProcess) -> None:
        workers.append(worker)
        if len(workers) == 2:
            raise KeyboardInterrupt
        start(worker)

    monkeypatch.setattr(ForkServerProcess, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(3, sleep, timeout_s=HANG_S)
    first, second = workers
    assert not first.is_alive()
    assert first.exitcode is not None
    assert second.pid is None
