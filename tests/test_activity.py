"""Activities of a process: reported when they take long, interrupted after their limit."""

from __future__ import annotations

import os
import queue
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from pipecomp.distributed import heartbeat
from pipecomp.distributed.heartbeat import Heartbeat, RankPlace
from pipecomp.distributed.preemption import LOST_STATUS
from pipecomp.errors import StalledError
from pipecomp.utils import activity
from pipecomp.utils.activity import Activity, current_activity, explain_data, local_activity, waiting_for_data
from tests.limits import HANG_S


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Heartbeat]:
    """A process that is its run's only rank."""
    monkeypatch.setattr(heartbeat, "DEFAULT_TIMEOUT_S", 0.2)
    found = Heartbeat(0, 1, dist.HashStore())
    yield found
    found.end()


def read_pipe() -> None:
    read, write = os.pipe()
    try:
        os.read(read, 1)
    finally:
        os.close(read)
        os.close(write)


def read_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.recv(1)


def compute() -> None:
    while True:
        pass


WAITS: list[Callable[[], Any]] = [
    lambda: time.sleep(HANG_S),
    lambda: threading.Event().wait(),
    lambda: queue.Queue().get(),
    read_pipe,
    read_socket,
    compute,
]


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_is_interrupted_after_its_limit(watch: Heartbeat, wait: Callable[[], Any]) -> None:
    with pytest.raises(StalledError) as caught, Activity("waits here", 0.3, explain=lambda: "It is slow"):
        wait()
    host = re.escape(socket.gethostname())
    assert re.match(rf"rank 0 on {host} waits here since 0 s at .* in \S+, step \d+\. It is slow", str(caught.value))
    assert current_activity() is None


def test_a_signal_that_ends_no_wait_is_sent_again(watch: Heartbeat, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that arrives just before the wait in the kernel does not end it."""
    missed: list[tuple[int, int]] = []

    def send(thread: int, number: int) -> None:
        if len(missed) < 2:
            missed.append((thread, number))
        else:
            sent(thread, number)

    sent = signal.pthread_kill
    monkeypatch.setattr(activity.signal, "pthread_kill", send)
    with pytest.raises(StalledError), Activity("waits here", 0.2):
        time.sleep(HANG_S)
    assert len(missed) == 2


def test_a_body_that_goes_on_is_interrupted_again(watch: Heartbeat) -> None:
    """Libraries catch errors and try again."""
    errors: list[StalledError] = []
    with Activity("waits here", 0.2):
        while len(errors) < 3:
            try:
                time.sleep(HANG_S)
            except StalledError as error:
                errors.append(error)
    assert current_activity() is None


def test_what_ends_in_time_is_left_alone(watch: Heartbeat) -> None:
    """Every inner activity counts as progress of the outer one, which takes longer than its limit."""
    began = time.monotonic()
    with Activity("outer", 0.8):
        while time.monotonic() < began + 2:
            with Activity("inner", 0.8):
                time.sleep(0.1)
    time.sleep(0.3)  # an error that was late would come now


def test_one_without_a_limit_hides_the_outer_one(watch: Heartbeat) -> None:
    with Activity("a callback", 0.2), Activity("trains"):
        time.sleep(0.8)


@pytest.mark.parametrize(("trains", "status"), [(False, 1), (True, LOST_STATUS)])
def test_another_thread_ends_the_process(
    watch: Heartbeat, monkeypatch: pytest.MonkeyPatch, capfd: Any, trains: bool, status: int
) -> None:
    """Nothing can interrupt it; the others learn why. Before training it would stall again."""
    if trains:
        watch.begin()
    ended: queue.Queue[int] = queue.Queue()

    def end(status: int) -> None:
        watch._ended.set()
        ended.put(status)
        sys.exit()  # this thread alone

    monkeypatch.setattr(heartbeat.os, "_exit", end)
    monkeypatch.setattr(heartbeat, "_INTERRUPT_S", 0.2)
    release = threading.Event()

    def wait() -> None:
        with Activity("waits there", 0.2):
            release.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    assert ended.get(timeout=HANG_S) == status
    release.set()
    thread.join()
    said = capfd.readouterr().err
    assert "StalledError: rank 0 on" in said
    assert "waits there" in said
    assert watch._state.startswith("stopped 0 rank 0 stopped: StalledError: rank 0 on ")


def test_what_takes_long_is_printed(watch: Heartbeat, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(activity, "NOTICE_S", 0.2)
    with waiting_for_data([1]):
        time.sleep(1.2)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) in (2, 3), "each time after twice as long"
    assert re.fullmatch(rf"pipecomp: rank \d+: waits for its data since \d s, on {socket.gethostname()}", lines[0])


def test_what_another_machine_does_is_printed(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(heartbeat, "NOTICE_S", 1.0)
    store = dist.HashStore()
    ranks = [Heartbeat(rank, 2, store) for rank in range(2)]
    for each in ranks:
        each.places = [RankPlace("here", 0, "", "a"), RankPlace("there", 1, "/logs/1", "b")]
        each.begin()
    deadline = time.monotonic() + HANG_S
    text = ""
    with local_activity("is in the callback Upload.on_log"):
        while "rank 1 on there is in the callback" not in text and time.monotonic() < deadline:
            time.sleep(0.1)
            text += capfd.readouterr().err
        described = ranks[0].describe(1)
    for each in ranks:
        each.end()
    assert re.search(r"rank 1 on there is in the callback Upload\.on_log since \d+ s", text)
    assert re.match(
        r"Last report of rank 1 on there, stage 1: step \d+, is in the callback Upload\.on_log since \d+ s\. "
        r"Its output is in /logs/1\. Run the same command again",
        described,
    )


def test_a_killed_process_of_the_same_machine_was_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine may have a host of the same name."""
    kills = iter([2, 3])
    monkeypatch.setattr(heartbeat, "count_oom_kills", lambda: next(kills))
    rank = Heartbeat(0, 1, dist.HashStore())
    rank.places = [RankPlace("here", stage, "", name) for stage, name in enumerate("aab")]
    try:
        assert "Out of memory: the kernel has killed 1 process" in rank.describe(1)
        assert "Out of memory" not in rank.describe(2)
    finally:
        rank.end()


class Samples:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> int:
        return i


def test_a_loader_is_described() -> None:
    loader: Any = DataLoader(Samples(), batch_size=2, num_workers=2, prefetch_factor=4)  # type: ignore[arg-type]
    text = explain_data(loader)
    assert "The loader is DataLoader(dataset=Samples, num_workers=2, prefetch_factor=4, batch_size=2" in text
    assert "transport.data_timeout_s" in text
    assert "The loader is list_iterator()" in explain_data(iter([1]))


@pytest.mark.parametrize(("workers", "free", "said"), [(2, 0, True), (2, 50 << 20, False), (0, 0, False)])
def test_full_shared_memory_is_named(monkeypatch: pytest.MonkeyPatch, workers: int, free: int, said: bool) -> None:
    usage = SimpleNamespace(total=64 << 20, free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert ("/dev/shm is full (0" in explain_data(SimpleNamespace(num_workers=workers))) == said
