"""Several TCP connections between two ranks: every message arrives once, whole and in order."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from pipecomp.errors import LinkError, LinkTimeoutError, PeerLostError, WireError
from pipecomp.stages.link.tls import TlsTransport
from pipecomp.tls import handshake
from pipecomp.tls.frames import (
    CONTENT_BYTES,
    EAGER_BYTES,
    FIRST_LINK_STREAM,
    MAX_SUBFLOWS,
    STRIPE_UNIT,
    FrameHeader,
    FrameKind,
)
from pipecomp.tls.handshake import SubflowId
from pipecomp.tls.process_group import Collectives
from pipecomp.tls.receive_queue import ReceiveQueue
from pipecomp.tls.routes import DIRECT, RELAYED, connect_direct
from pipecomp.tls.send_queue import SendQueue
from pipecomp.tls.stream import close_socket
from tests.tls.meshes import WAIT_S, Trouble, close_all, meet_all, together

SIZES = (0, 1, STRIPE_UNIT, STRIPE_UNIT + 1, EAGER_BYTES, EAGER_BYTES + 1, CONTENT_BYTES, CONTENT_BYTES + 1, 3_000_001)
STREAM = FIRST_LINK_STREAM + 1


def ends_of(a, b, count: int, timeout_s: float = 30.0) -> list[TlsTransport]:
    """Both ends of a link between two ranks, with `count` streams."""
    ends = [TlsTransport(a, b.rank, timeout_s=timeout_s), TlsTransport(b, a.rank, timeout_s=timeout_s)]
    use(ends, count)
    return ends


def use(ends, *counts: int) -> None:
    both = counts * 2 if len(counts) == 1 else counts
    together([lambda end=end, count=count: end.use_streams(count) for end, count in zip(ends, both, strict=True)])


def packets_of(*sizes: int) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, 256, size, dtype=np.uint8) for size in sizes]


def exchange(ends, packets) -> None:
    """Send all packets in both directions at once, and check what arrives."""
    for packet in packets:
        ends[0].send(packet)
        ends[1].send(packet[::-1].copy())
    for packet in packets:
        assert np.array_equal(ends[1].recv(), packet)
        assert np.array_equal(ends[0].recv(), packet[::-1])


@pytest.mark.parametrize("quiet", [(), (1, 2)], ids=[DIRECT, RELAYED])
def test_packets_of_all_sizes_over_changing_numbers_of_streams(folders, quiet):
    before = threading.active_count()
    meshes = meet_all(folders, quiet)
    ends = ends_of(meshes[1], meshes[2], 1)
    packets = packets_of(*SIZES, *np.random.default_rng(1).integers(0, 3 * CONTENT_BYTES, 15).tolist())
    for count in (3, 8, 2, 1, 4):
        use(ends, count)
        assert ends[0].streams == len(meshes[2].connections[1].subflows) == count
        exchange(ends, packets)
        subflows = meshes[1].connections[2].subflows
        assert all(subflow.resumable.received > 0 for subflow in subflows), "each carries something"
    for end in ends:
        end.close()
    close_all(meshes)
    assert threading.active_count() == before
    for mesh in meshes:
        for connection in mesh.connections.values():
            assert all(s.resumable.current()[0].sock.fileno() == -1 for s in connection.subflows)


def test_streams_that_are_lost_again_and_again(folders):
    meshes = meet_all(folders[:2])
    ends = ends_of(*meshes, 4)
    here, there = meshes[0].connections[1], meshes[1].connections[0]
    packets = packets_of(*np.random.default_rng(2).integers(0, 6 * CONTENT_BYTES, 40).tolist())

    class One:
        def __init__(self, subflow):
            self.resumable = subflow.resumable

    with Trouble(*[One(s) for s in (*here.subflows, *there.subflows)], seed=3):
        for number, packet in enumerate(packets):
            ends[0].send(packet)
            ends[1].send(packet[::-1].copy())
            if number % 10 == 9:
                total = [torch.full((50_000,), float(mesh.rank + 1)) for mesh in meshes]
                groups = [Collectives(mesh, range(2), 5 + number) for mesh in meshes]
                together([lambda g=g, t=t: g.all_reduce_(t, "SUM") for g, t in zip(groups, total, strict=True)])
                assert all(torch.equal(t, torch.full((50_000,), 3.0)) for t in total)
            time.sleep(0.025)
        for packet in packets:
            assert np.array_equal(ends[1].recv(), packet)
            assert np.array_equal(ends[0].recv(), packet[::-1])
    assert sum(subflow.resumable.reconnects for subflow in here.subflows[1:]) > 0
    assert ends[0]._inbox.empty()
    assert ends[1]._inbox.empty()
    close_all(meshes)


def test_others_go_on_while_one_stream_is_made_anew(two, monkeypatch):
    ends = ends_of(*two, 3)
    lost = two[1].connections[0].subflows[2].resumable
    may_dial, waits = threading.Event(), threading.Event()
    original = lost._dialer.dials[0]

    def late(*arguments):
        waits.set()
        may_dial.wait(WAIT_S)
        return original(*arguments)

    monkeypatch.setattr(lost, "_dialer", lost._dialer._replace(dials=(late,)))
    close_socket(lost.current()[0].sock)
    assert waits.wait(WAIT_S)
    there = two[0].connections[1].subflows[2].resumable
    until = time.monotonic() + WAIT_S
    while not there.is_down:
        assert time.monotonic() < until
        time.sleep(0.01)
    exchange(ends, packets_of(*SIZES))  # over the other two
    assert lost.is_down
    may_dial.set()
    exchange(ends, packets_of(*SIZES))
    while lost.reconnects == 0:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_collectives_use_all_streams(two):
    ends_of(*two, 4)
    total = [torch.arange(1_000_001, dtype=torch.float32) * (mesh.rank + 1) for mesh in two]
    groups = [Collectives(mesh, range(2), 9) for mesh in two]
    before = [s.resumable.received for s in two[0].connections[1].subflows]
    together([lambda g=g, t=t: g.all_reduce_(t, "SUM") for g, t in zip(groups, total, strict=True)])
    assert all(torch.equal(t, torch.arange(1_000_001, dtype=torch.float32) * 3) for t in total)
    after = [s.resumable.received for s in two[0].connections[1].subflows]
    assert all(b > a for a, b in zip(before, after, strict=True))


def test_the_end_does_not_overtake_packets(folders):
    """A close notice travels on the first stream, the packet before it on all."""
    meshes = meet_all(folders[:2])
    ends = ends_of(*meshes, 8)
    packets = packets_of(5_000_000, 100, 2_000_000)
    for packet in packets:
        ends[0].send(packet)
    ends[0].close()
    for packet in packets:
        assert np.array_equal(ends[1].recv(), packet)
    with pytest.raises(PeerLostError, match="has ended its run"):
        ends[1].recv()
    close_all(meshes)


class TestAgreement:
    def test_another_number_than_the_peers_is_an_error_that_names_both(self, two):
        ends = [TlsTransport(two[0], 1, timeout_s=30.0), TlsTransport(two[1], 0, timeout_s=30.0)]
        raised = []

        def go(end, count):
            with pytest.raises(LinkError) as error:
                end.use_streams(count)
            raised.append(str(error.value))

        together([lambda: go(ends[0], 4), lambda: go(ends[1], 2)])
        assert any("rank 1 uses 2 streams, this rank 4" in text for text in raised)
        assert any("rank 0 uses 4 streams, this rank 2" in text for text in raised)
        assert all("transport.streams" in text for text in raised)

    def test_a_peer_that_does_not_agree_in_time(self, two):
        end = TlsTransport(two[0], 1, timeout_s=1.0)
        two[1].set_timeout(30.0)
        with pytest.raises(LinkTimeoutError, match="rank 1 did not agree on streams within 1 s"):
            end.use_streams(2)

    def test_nobody_joins_without_the_secret(self, two):
        """Not even a process with the rank's own certificate."""
        ends_of(*two, 3)
        connection = two[1].connections[0]
        streams = [subflow.resumable.current()[0] for subflow in two[0].connections[1].subflows]
        address = two[0]._config.address
        for identity in (SubflowId(1, ""), SubflowId(2, "0" * 32), SubflowId(3, connection._secret)):
            with pytest.raises(handshake.ConnectionRejectedError, match="no such stream"):
                connect_direct(address, two[1]._own, 0, handshake.RESUME, identity)
        assert streams == [subflow.resumable.current()[0] for subflow in two[0].connections[1].subflows]
        assert len(connection._secret) == 32

    @pytest.mark.parametrize("number", [-1, MAX_SUBFLOWS, 1.5, "1"])
    def test_a_number_that_is_none_is_refused(self, two, number):
        with pytest.raises(handshake.ConnectionRejectedError, match="invalid number of a stream"):
            connect_direct(two[0]._config.address, two[1]._own, 0, handshake.RESUME, SubflowId(number))


def take_all(queue: SendQueue, subflows: int) -> list[tuple[int, FrameHeader, bytes]]:
    """Subflow, header and content of everything that may be sent, taken in turn."""
    found = []
    while True:
        before = len(found)
        for subflow in range(subflows):
            parts = queue.next_frames(0, 0.0, subflow)
            for beginning, content in zip(parts[::2], parts[1::2], strict=True):
                found.append((subflow, FrameHeader.unpack(memoryview(beginning)), bytes(content)))
        if len(found) == before:
            return found


class Sink:
    """Keeps what is delivered."""

    most_bytes = 1 << 22

    def __init__(self):
        self.came = []

    def deliver(self, packet, began):
        self.came.append(packet)

    def failed(self, error):
        self.error = error


def opened_queue(subflows: int) -> SendQueue:
    queue = SendQueue()
    queue.use_subflows(subflows)
    queue.add_credit(STREAM, 1 << 28)
    return queue


class TestFrames:
    """Both queues without a network."""

    def test_with_one_subflow_the_frames_are_those_of_before(self):
        queue = opened_queue(1)
        queue.send(STREAM, 0, memoryview(bytes(CONTENT_BYTES + 5)))
        frames = take_all(queue, 1)
        assert [(h.kind, h.size, h.total) for _, h, _ in frames] == [
            (FrameKind.DATA, CONTENT_BYTES, CONTENT_BYTES + 5),
            (FrameKind.DATA, 5, CONTENT_BYTES + 5),
        ]
        assert frames[0][1].pack().hex() == "01000000000002000100000000000010" + "00" * 8 + "0500020000000000"

    def test_short_messages_and_control_frames_stay_on_the_first(self):
        queue = opened_queue(4)
        for size in (0, 5, STRIPE_UNIT):
            queue.send(STREAM, 0, memoryview(bytes(size)))
        queue.send_control(FrameHeader(FrameKind.NOTICE, 0, STREAM))
        assert {(subflow, h.kind) for subflow, h, _ in take_all(queue, 4)} == {
            (0, FrameKind.NOTICE),
            (0, FrameKind.DATA),
        }

    def test_golden_bytes_of_a_striped_message(self):
        queue = opened_queue(2)
        content = bytes(range(256)) * 64 + b"end"
        queue.send(STREAM, 7, memoryview(content))
        frames = take_all(queue, 2)
        packed = [(subflow, h.pack().hex(), len(content)) for subflow, h, content in frames]
        total = (STRIPE_UNIT + 3).to_bytes(8, "little").hex()
        assert packed == [
            (0, "09000000" + "00000000" + "0100000000000010" + "0700000000000000" + total, 0),
            (0, "0a000000" + "00400000" + "00" * 8 + "00" * 8 + total, STRIPE_UNIT),
            (1, "0a000000" + "03000000" + "00" * 8 + "0040000000000000" + total, 3),
        ]
        assert b"".join(content for _, _, content in frames) == content

    @pytest.mark.parametrize("seed", range(5))
    def test_any_order_of_subflows_gives_messages_in_order(self, seed):
        queue, receiver, sink = opened_queue(4), ReceiveQueue(), Sink()
        receiver.open_stream(STREAM, sink)
        packets = packets_of(40_000, 3, 1_000_000, 20_000, 0, 300_001, 70_000)
        for packet in packets:
            queue.send(STREAM, 0, memoryview(packet))
        lanes: list[list] = [[], [], [], []]
        for subflow, header, content in take_all(queue, 4):
            lanes[subflow].append((header, content))
        draw = np.random.default_rng(seed)
        begun = 0
        while any(lanes):
            at = int(draw.choice([i for i, lane in enumerate(lanes) if lane]))
            header, content = lanes[at][0]
            if header.kind == FrameKind.STRIPED:
                receiver.begin_striped(header)
                begun += 1
            elif header.kind == FrameKind.STRIPE:
                if header.stream >= begun:
                    continue  # its reader waits for the first subflow
                receiver.stripe_buffer(header, 0.0)[:] = content
                receiver.commit_stripe(header)
            else:
                receiver.buffer_for(header)[:] = content
                receiver.commit(header)
            lanes[at].pop(0)
        assert [came.tobytes() for came in sink.came] == [packet.tobytes() for packet in packets]
        assert receiver._striped == receiver._undelivered == {}

    def test_a_link_that_is_written_ends_and_a_collective_that_is_acknowledged(self):
        queue = opened_queue(2)
        of_link = queue.send(STREAM, 0, memoryview(bytes(100_000)))
        frames = take_all(queue, 2)
        queue.receive_posted(3, 0, 1_000_000)
        of_group = queue.send(3, 0, memoryview(bytes(1_000_000)))
        frames += take_all(queue, 2)
        assert of_link.done
        assert not of_group.done
        counts = [sum(s == subflow for s, _, _ in frames) for subflow in (0, 1)]
        queue.acknowledge(counts[1], 1)
        assert not of_group.done
        queue.acknowledge(counts[0], 0)
        assert of_group.done
        assert queue.wait_acknowledged(0)

    def test_a_subflow_that_is_down_gets_nothing(self):
        queue = opened_queue(2)
        queue.pause(1)
        queue.send(STREAM, 0, memoryview(bytes(300_000)))
        assert {subflow for subflow, _, _ in take_all(queue, 2)} == {0}
        queue.resume(0, 1)
        queue.send(STREAM, 0, memoryview(bytes(300_000)))
        assert queue.next_frames(1, 0.0, 1)


class TestHostile:
    """Pieces that break the rules are refused before memory is taken or changed."""

    def receiver(self, total: int = 100_000) -> ReceiveQueue:
        receiver = ReceiveQueue()
        receiver.open_stream(STREAM, Sink())
        receiver.begin_striped(FrameHeader(FrameKind.STRIPED, 0, STREAM, 0, total))
        return receiver

    @pytest.mark.parametrize(
        ("offset", "size", "total"),
        [
            (98_304, STRIPE_UNIT, 100_000),  # beyond the end
            (1 << 63, 100, 100_000),
            (5, STRIPE_UNIT, 100_000),  # between two units
            (0, STRIPE_UNIT - 1, 100_000),
            (0, 0, 100_000),
            (0, STRIPE_UNIT, 100_001),  # of another message
        ],
    )
    def test_a_piece_out_of_range(self, offset, size, total):
        with pytest.raises(WireError, match="as a piece of a message of 100000"):
            self.receiver().stripe_buffer(FrameHeader(FrameKind.STRIPE, size, 0, offset, total), 0.0)

    def test_pieces_that_overlap(self):
        receiver = self.receiver()
        first = FrameHeader(FrameKind.STRIPE, 2 * STRIPE_UNIT, 0, STRIPE_UNIT, 100_000)
        receiver.stripe_buffer(first, 0.0)
        receiver.stripe_buffer(first, 0.0)  # again after a cut
        receiver.commit_stripe(first)
        for again in (first, first._replace(tag=0), first._replace(size=STRIPE_UNIT)):
            with pytest.raises(WireError, match="twice"):
                receiver.stripe_buffer(again, 0.0)
            with pytest.raises(WireError, match="twice"):
                receiver.commit_stripe(again)

    def test_a_piece_of_a_message_that_is_complete(self):
        receiver = self.receiver(STRIPE_UNIT + 1)
        for offset, size in ((0, STRIPE_UNIT), (STRIPE_UNIT, 1)):
            receiver.commit_stripe(FrameHeader(FrameKind.STRIPE, size, 0, offset, STRIPE_UNIT + 1))
        with pytest.raises(WireError, match="which is complete"):
            receiver.stripe_buffer(FrameHeader(FrameKind.STRIPE, 1, 0, STRIPE_UNIT, STRIPE_UNIT + 1), 0.0)

    def test_a_piece_of_a_message_that_never_begins(self):
        with pytest.raises(WireError, match="not its beginning within 0 s"):
            self.receiver().stripe_buffer(FrameHeader(FrameKind.STRIPE, STRIPE_UNIT, 1, 0, 100_000), 0.0)

    def test_a_piece_that_does_not_come(self):
        receiver = self.receiver()
        receiver.check_progress(60.0)
        with pytest.raises(WireError, match="0 of 100000 bytes of a message, and no more for 0 s"):
            receiver.check_progress(0.0)

    def test_a_message_that_nothing_waits_for(self):
        receiver = self.receiver()
        for header in (
            FrameHeader(FrameKind.STRIPED, 0, 3, 0, 1 << 40),  # no receive is posted
            FrameHeader(FrameKind.STRIPED, 0, STREAM, 0, STRIPE_UNIT),  # too short to be striped
        ):
            with pytest.raises(WireError, match="which nothing waits for"):
                receiver.begin_striped(header)
        with pytest.raises(WireError, match="allowed: 4194304"):
            receiver.begin_striped(FrameHeader(FrameKind.STRIPED, 0, STREAM, 0, 1 << 40))

    def test_messages_beyond_the_window(self):
        receiver = self.receiver(1 << 22)
        header = FrameHeader(FrameKind.STRIPED, 0, STREAM, 0, 1 << 22)
        for _ in range(63):
            receiver.begin_striped(header)
        with pytest.raises(WireError, match="beyond the receive window"):
            receiver.begin_striped(header)

    def test_a_frame_of_the_first_stream_on_another_one(self, two):
        ends = ends_of(*two, 2)
        frame = FrameHeader(FrameKind.NOTICE, 2, ends[0]._stream).pack() + b"{}"
        stream = two[1].connections[0].subflows[1].resumable.current()[0]
        stream.send(frame)
        with pytest.raises(WireError, match="rank 1 sent a frame NOTICE on stream 2"):
            ends[0].recv()

    def test_a_missing_piece_ends_the_connection_within_the_timeout(self, two):
        ends = ends_of(*two, 2, timeout_s=1.5)
        header = FrameHeader(FrameKind.STRIPED, 0, ends[0]._stream, 0, 100_000)
        two[1].connections[0]._send_queue.send_control(header)
        with pytest.raises(WireError, match="rank 1 sent 0 of 100000 bytes of a message"):
            ends[0].recv()
