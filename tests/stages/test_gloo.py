"""The transport over gloo, one end of it: what the other end may send, and what becomes of errors in its threads."""

from __future__ import annotations

import queue
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pipecomp.errors import LinkError, LinkTimeoutError, NonFiniteError, PeerLostError, WireError
from pipecomp.stages.link import gloo, transport
from pipecomp.stages.link.gloo import FRAME_BYTES, GlooTransport, write_prefix
from tests.limits import HANG_S, until

DATA, ALIVE, ABORT, CLOSE = range(1, 5)
PREFIX_BYTES = 20


class Done:
    def wait(self, timeout: timedelta) -> None:
        """Nothing to wait for."""


class Receive:
    """Waits for what the test sends."""

    def __init__(self, incoming: queue.SimpleQueue, into: torch.Tensor) -> None:
        self._incoming, self._into = incoming, into

    def wait(self, timeout: timedelta) -> None:
        came = self._incoming.get(timeout=HANG_S)
        if isinstance(came, Exception):
            raise came
        self._into[: came.numel()].copy_(came)


class Group:
    """gloo's group of rank 0, this one, and rank 1, which is the test."""

    def __init__(self) -> None:
        self.incoming: queue.SimpleQueue = queue.SimpleQueue()
        self.sent: queue.SimpleQueue = queue.SimpleQueue()

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Done:
        self.sent.put(tensors[0].clone())
        return Done()

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Receive:
        return Receive(self.incoming, tensors[0])

    def come(self, kind: int, content: bytes = b"", total: int | None = None) -> None:
        frame = np.zeros(PREFIX_BYTES + len(content), dtype=np.uint8)
        write_prefix(frame, kind, len(content), len(content) if total is None else total)
        frame[PREFIX_BYTES:] = np.frombuffer(content, dtype=np.uint8)
        self.incoming.put(torch.from_numpy(frame))


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    return Group()


@pytest.fixture
def end(group: Group) -> GlooTransport:
    return GlooTransport(group, timeout_s=HANG_S)  # type: ignore[arg-type]


def test_packets_come_in_frames(group, end):
    group.come(DATA, b"ab", 5)
    group.come(ALIVE)
    group.come(DATA, b"cde", 5)
    group.come(DATA, b"", 0)
    assert end.recv().tobytes() == b"abcde"
    assert end.recv().size == 0


def test_packets_that_nobody_takes_wait_where_they_are_sent(group, end, monkeypatch):
    """A stage that runs far ahead, as in evaluation, does not fill this one's memory."""
    monkeypatch.setattr(gloo, "ROOM_BYTES", 1000)
    for i in range(5):
        group.come(DATA, bytes([i]) * 600)
    until(lambda: end._inbox.qsize() >= 2)
    time.sleep(0.05)
    assert (end._inbox.qsize(), group.incoming.qsize()) == (2, 3)
    assert [end.recv()[0] for _ in range(5)] == [0, 1, 2, 3, 4]


def test_who_could_queue_any_number_of_packets_waits_until_some_have_left(group, monkeypatch):
    monkeypatch.setattr(transport, "ROOM_BYTES", 1000)
    goes_on = threading.Event()
    real = group.send
    monkeypatch.setattr(group, "send", lambda *what: (goes_on.wait(HANG_S), real(*what))[1])
    end = GlooTransport(group, timeout_s=HANG_S)
    end.send(np.ones(999, dtype=np.uint8))
    end.wait_for_room()
    end.send(np.ones(9, dtype=np.uint8))
    waiting = threading.Thread(target=end.wait_for_room)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    goes_on.set()
    waiting.join(HANG_S)
    assert not waiting.is_alive()


def test_who_waits_for_room_hears_of_the_end(group, end, monkeypatch):
    monkeypatch.setattr(transport, "ROOM_BYTES", 1000)
    monkeypatch.setattr(Done, "wait", lambda self, timeout: threading.Event().wait(HANG_S))
    for _ in range(4):
        end.send(np.ones(1000, dtype=np.uint8))
    threading.Timer(0.05, lambda: end.failed(LinkError("it is over"))).start()
    with pytest.raises(LinkError, match="it is over"):
        end.wait_for_room()


def test_a_peer_whose_packets_nobody_takes_hears_of_this_end_now_and_then(group, monkeypatch):
    monkeypatch.setattr(gloo, "ROOM_BYTES", 1000)
    end = GlooTransport(group, timeout_s=0.4)
    for i in range(5):
        group.come(DATA, bytes([i]) * 600)
    until(lambda: end._inbox.qsize() == 5)


@pytest.mark.parametrize("ended", ["failed", "closed"])
def test_an_end_does_not_wait_until_packets_are_taken(group, end, monkeypatch, ended):
    monkeypatch.setattr(gloo, "ROOM_BYTES", 1000)
    group.come(DATA, bytes(1000))
    until(lambda: end._inbox.qsize() == 1)
    for _ in range(16):
        group.come(CLOSE)
    if ended == "failed":
        end.failed(LinkError("what another link's end says"))
        end._receiver.join(HANG_S / 8)  # no longer than it would wait
    else:
        end.close()
        assert group.sent.qsize() == 16, "one for each receive that the peer has posted"
    assert not end._receiver.is_alive()


def test_a_packet_above_the_limit(group, end):
    end.limit(1000)
    group.come(DATA, bytes(1000))
    assert end.recv().size == 1000
    group.come(DATA, bytes(1001))
    with pytest.raises(WireError, match="rank 1 announces a packet of 1001 bytes, allowed: 1000"):
        end.recv()


@pytest.mark.parametrize(
    ("content", "total", "said"),
    [
        (b"x", 9, "3 bytes of a packet of 9, announced as 10 bytes"),
        (b"x", 11, "3 bytes of a packet of 11, announced as 10 bytes"),
        (b"x" * 9, 10, "11 bytes of a packet of 10"),
    ],
)
def test_a_frame_that_does_not_go_on_with_its_packet(group, end, content, total, said):
    group.come(DATA, b"ab", 10)
    group.come(DATA, content, total)
    group.incoming.put(RuntimeError("the end, in the place of waiting for more"))
    with pytest.raises(WireError, match=f"rank 1 sent {said}"):
        end.recv()


def test_what_is_no_frame(group, end):
    group.incoming.put(torch.zeros(PREFIX_BYTES, dtype=torch.uint8))
    with pytest.raises(WireError, match="rank 1 sent bytes that are no frame"):
        end.recv()


@pytest.mark.parametrize(
    ("kind", "content", "error", "said"),
    [
        (99, b"", WireError, "rank 1 sent a frame of unknown kind 99"),
        (ABORT, b"abc", WireError, "without a rank"),
        (ABORT, b"\x07\0\0\0f\xc3\xbcll\xff", PeerLostError, "f\u00fcll\ufffd \\(told by rank 1\\)"),
    ],
)
def test_notices(group, end, kind, content, error, said):
    group.come(kind, content)
    with pytest.raises(error, match=said):
        end.recv()


def failure(end: Any) -> Exception:
    found = end.failure(HANG_S)
    assert found is not None
    with pytest.raises(type(found)):
        end.recv()
    with pytest.raises(type(found)):
        end.send(np.zeros(3, dtype=np.uint8))
    return found


@pytest.mark.parametrize("raised", [MemoryError(), KeyError("x"), AssertionError("no")], ids=repr)
def test_any_error_of_the_receiving_thread_is_told(group, end, raised):
    def deliver(packet: np.ndarray, began: float) -> None:
        raise raised

    end.deliver = deliver
    group.come(DATA, b"abc")
    found = failure(end)
    assert isinstance(found, LinkError)
    assert f"receiving from rank 1 failed: {type(raised).__name__}" in str(found)


@pytest.mark.parametrize("raised", [MemoryError(), ValueError("x")], ids=repr)
def test_any_error_of_the_sending_thread_is_told(group, raised):
    class Pacer:
        def hold(self, size: int, ready: float) -> None:
            raise raised

    end = GlooTransport(group, timeout_s=HANG_S, pacer=Pacer())
    end.send(np.zeros(3, dtype=np.uint8))
    found = failure(end)
    assert isinstance(found, LinkError)
    assert f"sending to rank 1 failed: {type(raised).__name__}" in str(found)


def test_a_slow_link_carries_nothing_before_it_is_there(group):
    """A GPU may still compute what is queued; what was there already counts from when it was queued."""
    held: list[float] = []

    class Pacer:
        def hold(self, size: int, ready: float) -> None:
            held.append(ready)

    class Late:
        size = 3

        def finish(self) -> np.ndarray:
            time.sleep(0.05)
            computed.append(time.monotonic())
            return np.zeros(3, dtype=np.uint8)

    computed: list[float] = []
    end = GlooTransport(group, timeout_s=HANG_S, pacer=Pacer())
    queued = time.monotonic()
    end.send(np.ones(3, dtype=np.uint8))
    end.send(Late())
    until(lambda: len(held) == 2)
    assert queued <= held[0] <= computed[0] <= held[1]


def test_behind_a_packet_that_proves_unfit_only_the_end_is_sent(group, end):
    class Unfit:
        size = 3

        def finish(self) -> np.ndarray:
            raise NonFiniteError("NaN")

    end.send(np.ones(3, dtype=np.uint8))
    end.send(Unfit())
    assert isinstance(failure(end), NonFiniteError)
    end.abort(0, "it is over")
    assert [int(group.sent.get(timeout=HANG_S)[0]) for _ in range(2)] == [DATA, ABORT]


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("[a.cc:1] Timed out waiting", LinkTimeoutError, "nothing from rank 1 for"),
        ("[a.cc:1] Connection closed by peer [1.2.3.4]:5", PeerLostError, "lost rank 1: its connection was closed"),
    ],
)
def test_what_gloo_says(group, end, text, error, said):
    group.incoming.put(RuntimeError(text))
    with pytest.raises(error, match=said):
        end.recv()


def test_frames_have_room_for_what_is_sent(group, end):
    end.send(np.arange(FRAME_BYTES + 5, dtype=np.int64).astype(np.uint8))
    sizes = [group.sent.get(timeout=HANG_S).numel() for _ in range(2)]
    assert max(sizes) == FRAME_BYTES
    assert sum(sizes) == FRAME_BYTES + 5 + 2 * PREFIX_BYTES
    assert gloo._PREFIX_BYTES == PREFIX_BYTES


class Slow:
    """A frame that takes a while."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s

    def wait(self, timeout: timedelta) -> None:
        time.sleep(self._wait_s)


def test_packets_that_wait_when_a_link_is_closed_are_sent(group, monkeypatch):
    monkeypatch.setattr(gloo, "_CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(gloo, "_CUT_S", 0.1)
    real = group.send
    monkeypatch.setattr(group, "send", lambda *what: (real(*what), Slow(0.1))[1])
    end = GlooTransport(group, timeout_s=1.5)  # less than all frames take, and far more than one
    for _ in range(12):
        end.send(np.ones(10, dtype=np.uint8))
    end.close()
    assert not end._sender.is_alive()
    kinds = [int(group.sent.get_nowait()[0]) for _ in range(group.sent.qsize())]
    assert [kind for kind in kinds if kind != ALIVE] == [DATA] * 12 + [CLOSE] * gloo._RING


def test_a_receiver_whose_peer_says_nothing_is_not_left_behind(group, monkeypatch):
    """A thread that is inside torch when the interpreter ends aborts the process."""
    monkeypatch.setattr(gloo, "_CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(gloo, "_CUT_S", HANG_S)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()) as here, listener.accept()[0]:

            def wait(self: Receive, timeout: timedelta) -> None:
                raise RuntimeError(f"gloo: {len(here.recv(1))} bytes")

            monkeypatch.setattr(Receive, "wait", wait)
            end = GlooTransport(group, timeout_s=HANG_S, sockets=frozenset({here.fileno()}))
            end.close()
            assert not end._receiver.is_alive()


@pytest.mark.parametrize("aborted", [False, True])
def test_a_link_where_nothing_moves_is_closed(group, monkeypatch, aborted):
    monkeypatch.setattr(gloo, "_CLOSE_SECONDS", 0.1)
    goes_on = threading.Event()
    monkeypatch.setattr(group, "send", lambda *what: Done())
    monkeypatch.setattr(Done, "wait", lambda self, timeout: goes_on.wait(HANG_S))
    end = GlooTransport(group, timeout_s=3600.0 if aborted else 0.2)
    end.send(np.ones(10, dtype=np.uint8))
    if aborted:
        end.abort(1, "it is over")
    end.close()
    assert end._sender.is_alive()
    goes_on.set()
