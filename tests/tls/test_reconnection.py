"""Connections that are lost and made anew: every message arrives once and unchanged, whatever was on its way."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import pytest
import torch

from pipecomp.errors import KeysError, LinkError, LinkTimeoutError, WireError
from pipecomp.stages.link.tls import TlsTransport
from pipecomp.tls import handshake
from pipecomp.tls.frames import CONTENT_BYTES, EAGER_BYTES, FIRST_LINK_STREAM, FrameHeader, FrameKind
from pipecomp.tls.process_group import Collectives
from pipecomp.tls.routes import DIRECT, RELAYED
from pipecomp.tls.send_queue import SendQueue
from pipecomp.tls.stream import close_socket
from tests.tls.meshes import WAIT_S, Trouble, close_all, kill, meet_all, together


@pytest.mark.parametrize("quiet", [(), (1, 2)], ids=[DIRECT, RELAYED])
def test_connections_that_are_lost_again_and_again(folders, quiet):
    meshes = meet_all(folders, quiet)
    a, b = meshes[1], meshes[2]
    ends = [TlsTransport(a, 2, timeout_s=30.0), TlsTransport(b, 1, timeout_s=30.0)]
    draw = np.random.default_rng(0)
    packets = [draw.integers(0, 256, int(draw.integers(0, 4 * CONTENT_BYTES)), dtype=np.uint8) for _ in range(60)]
    with Trouble(a.connections[2], b.connections[1], a.connections[0], seed=1):
        for number, packet in enumerate(packets):
            ends[0].send(packet)
            ends[1].send(packet[::-1].copy())
            if number % 10 == 9:
                total = [torch.full((50_000,), float(m.rank)) for m in meshes]
                groups = [Collectives(m, range(3), 5 + number) for m in meshes]
                together([lambda g=g, t=t: g.all_reduce_(t, "SUM") for g, t in zip(groups, total, strict=True)])
                assert all(torch.equal(t, torch.full((50_000,), 3.0)) for t in total)
            assert a.store.add("counted", 1) == number + 1  # a question is never asked twice
            time.sleep(0.025)
        for packet in packets:
            assert np.array_equal(ends[1].recv(), packet)
            assert np.array_equal(ends[0].recv(), packet[::-1])
    assert a.connections[2].resumable.reconnects > 0
    assert a.connections[0].resumable.reconnects > 0
    assert ends[0]._inbox.empty()
    assert ends[1]._inbox.empty()
    close_all(meshes)


def test_an_outage_that_says_nothing(folders, monkeypatch, caplog):
    """Nothing comes through for a while, and no end says so."""
    meshes = meet_all(folders[:2])
    for mesh in meshes:
        mesh.set_timeout(6.0)
    lost = [mesh.connections[1 - mesh.rank].resumable._stream.sock for mesh in meshes]
    real = socket.socket.send

    def send(self, data, *flags):
        return len(data) if self in lost else real(self, data, *flags)

    monkeypatch.setattr(socket.socket, "send", send)
    into = bytearray(100_000)
    waiting = meshes[0].connections[1].receive(1, 0, memoryview(into))
    meshes[1].connections[0].send(1, 0, memoryview(bytes(range(250)) * 400)).wait(WAIT_S)
    waiting.wait(WAIT_S)
    assert bytes(into) == bytes(range(250)) * 400
    assert meshes[0].connections[1].resumable.downtime_s >= 1.5
    assert "reconnected to rank" in caplog.text
    close_all(meshes)


def test_the_relay_goes_last(folders, monkeypatch):
    """Rank 0 ends at once, and what two others had still to say to each other is on its way through it."""
    meshes = meet_all(folders, (1, 2))
    original, slow = socket.socket.sendall, threading.Event()

    def late(self, data, *flags):
        if slow.is_set() and threading.current_thread().name.startswith("pipecomp-relay"):
            time.sleep(1.0)
        return original(self, data, *flags)

    monkeypatch.setattr(socket.socket, "sendall", late)
    slow.set()
    into = bytearray(1000)
    waiting = meshes[2].connections[1].receive(1, 0, memoryview(into))
    meshes[1].connections[2].send(1, 0, memoryview(bytes(range(250)) * 4))
    close_all(meshes)
    waiting.wait(WAIT_S)
    assert bytes(into) == bytes(range(250)) * 4
    assert meshes[1].connections[2].resumable.reconnects == 0


def test_a_relay_that_is_gone_is_not_waited_for(folders):
    """Two ranks have no other way to each other, and hear of it long before the time of silence is over."""
    meshes = meet_all(folders, (1, 2))
    kill(meshes[0])
    for sock in meshes[0]._relay._joined[1, 2, 0]:
        close_socket(sock)
    connection = meshes[1].connections[2]
    assert connection.timeout_s >= WAIT_S
    connection.wait_for_end(WAIT_S / 2)
    assert connection.failure is not None
    close_all(meshes[1:])


def test_a_way_through_the_relay_that_fails_leaves_no_socket(folders, monkeypatch):
    """A later comer at that port would be joined with it, and wait in vain."""
    meshes = meet_all(folders, (1, 2))
    # Their own connection would be made anew meanwhile, and come to the same relay.
    together([meshes[1].connections[2].close, meshes[2].connections[1].close])
    original, left = handshake.receive_request, []

    def fail(sock, own, purposes, buffered=b""):
        if purposes != (handshake.PEER,):
            return original(sock, own, purposes, buffered)
        left.append(sock)
        raise KeysError("somebody else is there")

    monkeypatch.setattr(handshake, "receive_request", fail)
    errors = []

    def go(mesh, other):
        with pytest.raises(LinkTimeoutError) as raised:
            mesh._routes._connect_relayed(other, 60.0)
        errors.append(raised.value)  # which keeps all that its frames have

    together([lambda: go(meshes[1], 2), lambda: go(meshes[2], 1)])
    assert [sock.fileno() for sock in left] == [-1]
    monkeypatch.undo()
    close_all(meshes)


def take_all(queue: SendQueue, epoch: int) -> list[tuple[int, bytes]]:
    """Tag and content of all DATA frames that may be sent."""
    found = []
    while parts := queue.next_frames(epoch, 0.0):
        for beginning, content in zip(parts[::2], parts[1::2], strict=True):
            header = FrameHeader.unpack(memoryview(beginning))
            if header.kind is FrameKind.DATA:
                found.append((header.tag, bytes(content)))
    return found


class TestSendQueue:
    def test_what_was_not_acknowledged_is_sent_again_in_order(self):
        queue = SendQueue()
        for tag in range(5):
            queue.receive_posted(1, tag, EAGER_BYTES + 1)
        transfers = [queue.send(1, tag, memoryview(bytes(EAGER_BYTES + 1))) for tag in range(5)]
        queue.send_control(FrameHeader(FrameKind.READY, 0, 1))
        assert [tag for tag, _ in take_all(queue, 0)] == [0, 1, 2, 3, 4]
        queue.acknowledge(3)  # the notice went first
        assert [t.done for t in transfers] == [True, True, False, False, False]
        epoch = queue.resume(4)
        assert transfers[2].done
        assert queue.next_frames(epoch - 1, 0.0) == []  # for a connection that is over
        with pytest.raises(WireError, match="an acknowledgement of 5 frames, of 4"):
            queue.acknowledge(5)  # the others were not sent again yet
        queue.send(1, 9, memoryview(b"x"))
        assert [tag for tag, _ in take_all(queue, epoch)] == [3, 4, 9]
        assert [tag for tag, _ in take_all(queue, queue.resume(4))] == [3, 4, 9]
        assert not queue.wait_acknowledged(0)
        queue.acknowledge(7)
        assert queue.wait_acknowledged(0)

    @pytest.mark.parametrize("stream", [1, FIRST_LINK_STREAM + 1])
    def test_who_sends_goes_on_when_the_system_has_it_if_nobody_changes_it(self, stream):
        queue, into = SendQueue(), bytearray(b"before")
        queue.add_credit(stream, 1 << 20)
        transfer = queue.send(stream, 0, memoryview(into))
        assert take_all(queue, 0) == [(0, b"before")]
        assert transfer.done
        if stream < FIRST_LINK_STREAM:
            into[:] = b"beyond"  # short ones are copied
        assert take_all(queue, queue.resume(0)) == [(0, b"before")]

    def test_no_more_is_kept_than_the_limit(self, monkeypatch):
        monkeypatch.setattr("pipecomp.tls.send_queue.MAX_UNACKNOWLEDGED_BYTES", 3 * CONTENT_BYTES)
        queue = SendQueue()
        queue.add_credit(1, 1 << 20)
        queue.send(1, 0, memoryview(bytes(10 * CONTENT_BYTES)))
        assert len(take_all(queue, 0)) == 3
        queue.acknowledge(2)
        assert len(take_all(queue, 0)) == 2

    @pytest.mark.parametrize("count", [-1, 2, 1 << 60])
    def test_acknowledgements_of_what_was_not_sent(self, count):
        queue = SendQueue()
        queue.send(1, 0, memoryview(b"x"))
        take_all(queue, 0)
        with pytest.raises(WireError, match="an acknowledgement of"):
            queue.acknowledge(count)

    def test_the_end_is_told_to_what_was_not_acknowledged(self):
        queue = SendQueue()
        queue.receive_posted(1, 0, EAGER_BYTES + 1)
        transfer = queue.send(1, 0, memoryview(bytes(EAGER_BYTES + 1)))
        take_all(queue, 0)
        queue.fail(LinkError("over"))
        with pytest.raises(LinkError, match="over"):
            transfer.wait(0)
