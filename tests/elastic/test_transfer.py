"""Records from one thread to another: differences, cancelling, full disks, and bytes that nobody should believe."""

from __future__ import annotations

import gc
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipecomp.elastic.index import RecordFolder
from pipecomp.elastic.record import StateRecord
from pipecomp.elastic.schedule import LineShare
from pipecomp.elastic.transfer import NO_BASE, HomePlan, RecordJob, RecordReceiver, RecordSender
from pipecomp.errors import PeerLostError
from tests.elastic.test_records import SESSION, info
from tests.limits import HANG_S

Change = Callable[[int, torch.Tensor], torch.Tensor]


class Line:
    """A group of two ranks in one process. change: replaces message number i, as somebody on the line could."""

    def __init__(self) -> None:
        self.messages: queue.Queue[torch.Tensor] = queue.Queue()
        self.change: Change = lambda number, data: data
        self.sent = self.bytes_sent = 0
        self.cut = False

    def exchange(self, outgoing: list[torch.Tensor], incoming: list[int]) -> Any:
        line = self
        if outgoing[1].numel():
            self.messages.put(self.change(self.sent, outgoing[1].clone()))
            self.sent += 1
            self.bytes_sent += outgoing[1].numel()

        class Pending:
            def finish(self) -> None:
                pass

            def wait(self) -> list[torch.Tensor]:
                while True:
                    try:
                        data = line.messages.get(timeout=0.05)
                    except queue.Empty:
                        if line.cut:
                            raise PeerLostError("rank 0 is gone", 0) from None
                        continue
                    if data.numel() != incoming[0]:
                        raise PeerLostError(f"{data.numel()} bytes where {incoming[0]} are expected", 0)
                    return [data, data]

        return Pending()

    def wait_until_sent(self) -> None:
        pass


class Ends:
    """Both ends of a line, and their folders."""

    def __init__(self, root: Path, limit: int = 1 << 25) -> None:
        self.line: Any = Line()
        plan = HomePlan(rank=1, stage=1, cuts=(0, 1, 2), homes=[1, 0], limits=[limit, limit], timeout_s=HANG_S)
        self.folders = [RecordFolder(root / "rank-0"), RecordFolder(root / "rank-1")]
        self.sender = RecordSender(self.line, self.folders[0], LineShare(lambda: None, 1.0), 1)
        self.receiver = RecordReceiver(self.line, self.folders[1], plan, 0)

    def send(self, step: int, files: dict[str, Any], base: int = NO_BASE, checkpoint: str | None = None) -> StateRecord:
        taken = StateRecord.take(info(step, 0, 2), files)
        job = RecordJob(step, SESSION, checkpoint, base, taken)
        self.receiver.put(job.without_record())
        self.sender.put(job)
        return taken

    def wait(self) -> None:
        until = time.monotonic() + HANG_S
        while (self.sender.busy or self.receiver.busy) and time.monotonic() < until:
            time.sleep(0.002)

    def close(self, *, failed: bool = False) -> None:
        for worker in (self.sender, self.receiver):
            worker.end(failed=failed)
        self.line.cut = failed
        for worker in (self.sender, self.receiver):
            worker.join(HANG_S)

    def held(self) -> list[int]:
        return self.folders[1].steps_of(0, SESSION)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = Ends(tmp_path)
    yield made
    made.close(failed=True)


def weights(scale: float = 1.0) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    return {
        "a.pt": {
            "w": scale * torch.randn(3000, generator=draw),
            "h": torch.full((5,), float("nan"), dtype=torch.bfloat16),
            "step": torch.tensor(3),
        }
    }


def test_records_arrive_bit_for_bit_and_differences_are_short(ends: Ends) -> None:
    first = ends.send(2, weights())
    second = ends.send(4, weights(1 + 1e-6), base=2)
    third = ends.send(6, {"a.pt": {"other": torch.ones(3)}}, base=4)  # nothing that a difference could be taken from
    ends.wait()
    assert ends.held() == [2, 4, 6]
    for taken in (first, second, third):
        for folder in ends.folders:
            held = folder.open(taken.info.step, 0)
            assert held is not None
            assert held.crc == taken.crc
    assert (ends.sender.records, ends.sender.failure, ends.receiver.failure) == (3, None, None)


def test_a_difference_takes_less_of_the_line(ends: Ends) -> None:
    sent = []
    for step, base in ((2, NO_BASE), (4, 2)):
        ends.send(step, weights(), base=base)
        ends.wait()
        sent.append(ends.line.bytes_sent)
    assert sent[1] - sent[0] < sent[0] / 5


def test_a_base_that_is_gone_costs_one_record(ends: Ends) -> None:
    ends.send(2, weights())
    ends.wait()
    (ends.folders[1].path / "step-2-rank-0.safetensors").write_bytes(b"x")
    ends.send(4, weights(2.0), base=2)
    ends.send(6, weights(3.0))
    ends.wait()
    assert ends.held() == [6]  # and the record of step 2 is no base any more
    assert "step 2, on which it is based, is missing or damaged" in str(ends.receiver.problem)


def flipped(number: int) -> Change:
    def change(at: int, data: torch.Tensor) -> torch.Tensor:
        if at == number:
            data[-1] ^= 1
        return data

    return change


def test_a_changed_block_is_refused_and_the_next_record_taken(ends: Ends) -> None:
    ends.line.change = flipped(3)  # prefix and header, then prefix and content of the first block
    ends.send(2, weights())
    ends.send(4, weights(2.0))
    ends.wait()
    assert ends.held() == [4]
    assert "the record of rank 0 of step 2 is discarded" in str(ends.receiver.problem)
    assert ends.receiver.failure is None
    assert sorted(path.name for path in ends.folders[1].path.iterdir()) == ["index.json", "step-4-rank-0.safetensors"]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_changed_frame_ends_the_second_home(ends: Ends, number: int) -> None:
    def change(at: int, data: torch.Tensor) -> torch.Tensor:
        if at == number:
            data[0 if number != 1 else 3] ^= 0x40
        return data

    ends.line.change = change
    ends.send(2, weights())
    ends.wait()
    assert ends.held() == []
    assert "WireError" in str(ends.receiver.failure)


@pytest.mark.parametrize("size", [(1 << 31) - 1, 1 << 27])
def test_an_announced_size_takes_no_memory(ends: Ends, size: int) -> None:
    def change(at: int, data: torch.Tensor) -> torch.Tensor:
        if at == 0:
            data[4:8] = torch.tensor(list(size.to_bytes(4, "little")), dtype=torch.uint8)
        return data

    ends.line.change = change
    ends.send(2, weights())
    ends.wait()
    assert f"with {size} bytes" in str(ends.receiver.failure)


def test_a_record_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    ends = Ends(tmp_path, limit=4000)
    ends.send(2, weights())
    ends.wait()
    assert "announces a record of 12018 bytes, allowed: 4000" in str(ends.receiver.failure)
    assert ends.held() == []


def test_a_record_of_another_rank_or_step_is_refused(ends: Ends) -> None:
    taken = StateRecord.take(info(4, 0, 2), weights())
    ends.receiver.put(RecordJob(2, SESSION, None, NO_BASE, None))
    ends.sender.put(RecordJob(4, SESSION, None, NO_BASE, taken))
    ends.wait()
    assert "sent the record of rank 0, step 4" in str(ends.receiver.failure)


def test_a_full_disk_costs_the_record_and_nothing_else(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ends.folders[1].path
    blocked = folder / "step-2-rank-0.safetensors.part"
    blocked.mkdir()  # no file can be opened there, as on a full disk
    ends.send(2, weights())
    ends.send(4, weights())
    ends.wait()
    assert ends.held() == [4]
    assert "is discarded" in str(ends.receiver.problem)
    blocked.rmdir()


def test_two_records_are_in_memory_at_most(ends: Ends) -> None:
    """Checkpoints may follow each other on a slow line."""
    line = threading.Event()
    ends.line.change = lambda number, data: (line.wait(HANG_S), data)[1]
    taken = [weakref.ref(ends.send(step, weights())) for step in (2, 4)]
    waiting = threading.Thread(target=ends.sender.wait_for_room)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    line.set()
    waiting.join(HANG_S)
    assert not waiting.is_alive()
    ends.wait()
    until = time.monotonic() + HANG_S
    while any(record() is not None for record in taken) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    assert [record() for record in taken] == [None, None], "nothing is kept after that"


@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_end_cancels_records_but_not_those_of_checkpoints(ends: Ends, checkpoint: bool) -> None:
    big = {"a.pt": {"w": torch.zeros(4 << 20)}}  # several blocks
    held = []
    ends.line.change = lambda at, data: (held.append(at), ends.sender.end(failed=False), data)[2] if at == 2 else data
    ends.send(2, big, checkpoint=str(ends.folders[0].path) if checkpoint else None)
    ends.wait()
    assert held
    assert ends.held() == ([2] if checkpoint else [])
    assert ends.receiver.failure is None
    assert not list(ends.folders[1].path.glob("*.part"))


def test_a_lost_rank_ends_the_threads(ends: Ends) -> None:
    ends.receiver.put(RecordJob(2, SESSION, None, NO_BASE, None))
    ends.line.cut = True
    ends.wait()
    assert "PeerLostError" in str(ends.receiver.failure)
    assert not ends.receiver.busy
