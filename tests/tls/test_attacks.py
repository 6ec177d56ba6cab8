"""Attacks on the way, at the port and in the relay's place end a connection, and no more."""

from __future__ import annotations

import contextlib
import itertools
import resource
import socket
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecomp.errors import LinkError, WireError
from pipecomp.tls import handshake, receive_queue
from pipecomp.tls.frames import (
    CONTENT_BYTES,
    EAGER_BYTES,
    HEADER_BYTES,
    FrameHeader,
    FrameKind,
)
from pipecomp.tls.handshake import Credentials
from pipecomp.tls.listener import MAX_PENDING, Address
from pipecomp.tls.mesh import JoinConfig, connect_mesh
from pipecomp.tls.receive_queue import ReceiveQueue
from pipecomp.tls.routes import RELAYED, connect
from pipecomp.tls.stream import NoAnswerError
from tests.tls.meshes import WAIT_S, close_all, free_address, meet_all, together

SECRET = b"a sample's text, which nobody else must read. " * 4000
PIECES = 8
STRANGERS = 1000


class Between:
    """A machine on the way from rank 1 to rank 0, which sees and may change every byte."""

    def __init__(self, to: Address) -> None:
        self.seen: list[bytes] = []
        self.change = lambda data: data  # of what rank 1 sends
        self.changes = 0
        self._to = to
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._server.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                try:
                    far = socket.create_connection((self._to.host, self._to.port))
                except OSError:
                    near.close()  # rank 0 does not listen yet: rank 1 asks again
                    continue
                for pair in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source: socket.socket, to: socket.socket, forward: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(16384):
                self.seen.append(data)
                to.sendall(self.change(data) if forward else data)
        for sock in (source, to):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def tapped(folders):
    """Two ranks, and who stands between them."""
    address = free_address()
    between = Between(address)

    def one(rank: int):
        where = address if rank == 0 else between.address
        while True:
            try:
                return connect_mesh(JoinConfig(rank, 2, where), Credentials(folders[rank]), wait_s=WAIT_S)
            except LinkError:
                continue  # closed before rank 0 listened
            except Exception as error:
                if "closed the connection" not in str(error):
                    raise

    meshes = together([lambda: one(0), lambda: one(1)])
    yield (*meshes, between)
    close_all(meshes)
    between.close()


def pass_over(a, b) -> list[bytes | Exception]:
    """Return the PIECES messages of b's that arrive at a."""
    arriving = [bytearray(len(SECRET)) for _ in range(PIECES)]
    receives = [a.receive(1, 0, memoryview(into)) for into in arriving]
    for _ in range(PIECES):
        b.send(1, 0, memoryview(SECRET))
    found: list[bytes | Exception] = []
    for transfer, into in zip(receives, arriving, strict=True):
        try:
            transfer.wait(WAIT_S)
            found.append(bytes(into))
        except LinkError as error:
            found.append(error)
    return found


def test_a_listener_reads_nothing(tapped):
    first, second, between = tapped
    assert pass_over(first.connections[1], second.connections[0]) == [SECRET] * PIECES
    seen = b"".join(between.seen)
    assert len(seen) > PIECES * len(SECRET)
    for known in (SECRET[:24], b"machine-1", b'"rank"', b"session", b"PCMP"):
        assert known not in seen


@pytest.mark.parametrize("what", ["changed", "repeated", "left out", "inserted", "swapped"])
def test_bytes_that_were_tampered_with_are_not_taken_but_sent_again(tapped, what):
    first, second, between = tapped
    held: list[bytes] = []
    count = iter(range(10**9))

    def change(data: bytes) -> bytes:
        number = next(count)
        if what == "changed":
            return data[:-1] + bytes([data[-1] ^ 1]) if number == 3 else data
        if what == "repeated":
            return data + data if number == 3 else data
        if what == "left out":
            return b"" if number == 3 else data
        if what == "inserted":
            return FrameHeader(FrameKind.DATA, 4, 1, 0, 4).pack() + b"evil" + data if number == 3 else data
        if number == 3:
            held.append(data)
            return b""
        return data + held.pop() if held else data

    between.change = change
    assert pass_over(first.connections[1], second.connections[0]) == [SECRET] * PIECES
    assert first.connections[1].resumable.reconnects == second.connections[0].resumable.reconnects == 1


def test_the_relay_sees_ciphertext(folders, monkeypatch):
    seen: list[bytes] = []
    original = socket.socket.sendall

    def record(self, data, *flags):
        if threading.current_thread().name.startswith("pipecomp-relay"):
            seen.append(bytes(data))
        return original(self, data, *flags)

    monkeypatch.setattr(socket.socket, "sendall", record)
    meshes = meet_all(folders, quiet=(1, 2))
    assert meshes[1].routes[2] == RELAYED
    assert pass_over(meshes[2].connections[1], meshes[1].connections[2]) == [SECRET] * PIECES
    close_all(meshes)
    carried = b"".join(seen)
    assert len(carried) > PIECES * len(SECRET)
    for known in (SECRET[:24], b"machine-1", b"session"):
        assert known not in carried


@pytest.fixture
def many_files():
    """As many open connections as the tests below make."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 3 * STRANGERS:
        pytest.skip(f"a process may have {hard} open files here, and the test needs {3 * STRANGERS}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3 * STRANGERS), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("garbage", [False, True], ids=["idle", "garbage"])
def test_a_thousand_strangers_change_nothing(folders, many_files, garbage):
    """They stay as long as they are let, and a rank that lost its connection still comes in among them."""
    meshes = meet_all(folders[:2])
    where = meshes[0]._listener.address
    strangers = []
    for number in range(STRANGERS):
        strangers.append(socket.create_connection((where.host, where.port)))
        if garbage:
            with contextlib.suppress(OSError):
                strangers[-1].sendall(np.random.default_rng(number).bytes(300))
        if number % 250 == 0:
            assert pass_over(meshes[0].connections[1], meshes[1].connections[0]) == [SECRET] * PIECES
        if number == STRANGERS // 2:
            meshes[1].connections[0].resumable.current()[0].close()
    assert len(meshes[0]._listener._pending) <= MAX_PENDING + 1
    assert pass_over(meshes[1].connections[0], meshes[0].connections[1]) == [SECRET] * PIECES
    assert meshes[1].connections[0].resumable.reconnects == 1
    for sock in strangers:
        sock.close()
    close_all(meshes)


def test_a_slow_handshake_keeps_nobody_out(folders, monkeypatch):
    monkeypatch.setattr("pipecomp.tls.listener.PENDING_TIMEOUT_S", 1.0)
    meshes = meet_all(folders[:2])
    where = meshes[0]._listener.address
    slow = [socket.create_connection((where.host, where.port)) for _ in range(MAX_PENDING)]
    beginning = bytes.fromhex("16030102000100")  # of a ClientHello, which goes on a byte at a time
    ended = 0
    for byte in itertools.chain(beginning, itertools.repeat(0, 60)):
        for sock in slow:
            with contextlib.suppress(OSError):
                sock.send(bytes([byte]))
        time.sleep(0.1)
        meshes[1].connections[0].resumable.current()[0].close()
        assert pass_over(meshes[0].connections[1], meshes[1].connections[0]) == [SECRET] * PIECES
        ended = MAX_PENDING - len(meshes[0]._listener._pending)
        if ended == MAX_PENDING:
            break
    assert ended == MAX_PENDING
    for sock in slow:
        sock.close()
    close_all(meshes)


@pytest.mark.parametrize(
    ("joined", "beginning"), [(False, b"\x16\x03\x03\x40\x00"), (True, b"\x00\x40\x00\x00")], ids=["TLS", "JSON"]
)
def test_a_dial_that_gets_a_byte_now_and_then_ends(folders, monkeypatch, joined, beginning):
    """Each byte ends one wait and begins the next: rank 0's place is taken by who says nothing so."""
    monkeypatch.setattr("pipecomp.tls.handshake.HANDSHAKE_S", 1.0)
    trust, over = Credentials(folders[0]), threading.Event()

    def serve(server: socket.socket) -> None:
        sock, _ = server.accept()
        with sock, contextlib.suppress(OSError):
            say = sock.sendall
            if joined:
                say = trust.secure(sock, server=True)[0].send
            for byte in itertools.chain(beginning, itertools.repeat(0, int(WAIT_S / 0.05))):
                say(bytes([byte]))
                if over.wait(0.05):
                    break

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,), daemon=True)
        thread.start()
        where, wish = Address("127.0.0.1", server.getsockname()[1]), handshake.ConnectRequest(handshake.JOIN, 0)
        with pytest.raises(NoAnswerError, match="it does not answer"):
            connect(where, handshake.RankInfo(Credentials(folders[1]), 1, 2, ""), wish, wait_s=WAIT_S)
        over.set()
        thread.join(WAIT_S)


def test_who_does_not_take_its_answer_is_waited_for_a_while_only(folders, monkeypatch):
    """The listening side holds what its threads need while it answers."""
    late: list[Exception] = []
    real = handshake.accept

    def welcome(*args):
        try:
            real(*args)
        except TimeoutError as error:
            late.append(error)
            monkeypatch.setattr(handshake, "_REPLY_S", WAIT_S)
            raise

    meshes = meet_all(folders[:2])
    monkeypatch.setattr(handshake, "_REPLY_S", -1.0)
    monkeypatch.setattr(handshake, "accept", welcome)
    meshes[1].connections[0].resumable.current()[0].close()
    assert pass_over(meshes[0].connections[1], meshes[1].connections[0]) == [SECRET] * PIECES
    assert len(late) == 1
    close_all(meshes)


def test_a_replayed_connection_is_refused(tapped):
    """Everything that rank 1 has sent is sent to rank 0 once more, by a stranger who recorded it."""
    first, second, between = tapped
    recorded: list[bytes] = []
    between.change = lambda data: recorded.append(data) or data
    second.connections[0].resumable.current()[0].close()  # a new connection, from its first byte on
    assert pass_over(first.connections[1], second.connections[0]) == [SECRET] * PIECES
    assert second.connections[0].resumable.reconnects == 1
    between.change = lambda data: data
    received = first.connections[1].resumable.received
    with socket.create_connection((between._to.host, between._to.port), WAIT_S) as stranger:
        stranger.settimeout(WAIT_S)
        with contextlib.suppress(ConnectionError):
            stranger.sendall(b"".join(recorded))
            while stranger.recv(1 << 16):  # rank 0's half of the handshake, an alert and the end
                continue
    assert first.connections[1].resumable.reconnects == 1
    assert first.connections[1].failure is None
    assert pass_over(first.connections[1], second.connections[0]) == [SECRET] * PIECES
    assert first.connections[1].resumable.received > received


HEADERS = st.builds(
    FrameHeader,
    kind=st.just(FrameKind.DATA),
    size=st.integers(0, 64) | st.integers(0, CONTENT_BYTES),
    stream=st.integers(0, 3),
    tag=st.integers(0, 2),
    total=st.integers(0, 100) | st.sampled_from([EAGER_BYTES, EAGER_BYTES + 1, 2**40, 2**64 - 1]),
)


class Bounded:
    most_bytes = 80

    def deliver(self, packet, began):
        assert packet.size <= self.most_bytes

    def noted(self, note):
        """Nothing to do."""

    def failed(self, error):
        """Nothing to do."""


@settings(max_examples=200, deadline=None)
@given(st.lists(HEADERS, max_size=40), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 90))))
def test_any_frames_take_bounded_memory(headers, receives):
    queue = ReceiveQueue()
    queue.open_stream(3, Bounded())
    taken = [0]
    real = np.empty

    class Counting:
        uint8, ndarray = np.uint8, np.ndarray

        @staticmethod
        def empty(count, dtype):
            taken[0] += count
            return real(count, dtype=dtype)

    receive_queue.np, before = Counting, receive_queue.np
    try:
        for stream, tag, size in receives:
            queue.receive(stream, tag, memoryview(bytearray(size)))
        for header in headers:
            place = queue.buffer_for(header)
            assert len(place) == header.size
            queue.commit(header)
    except WireError:
        pass
    finally:
        receive_queue.np = before
    assert taken[0] <= len(headers) * EAGER_BYTES


@settings(max_examples=300, deadline=None)
@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_beginning_of_a_frame(data):
    try:
        header = FrameHeader.unpack(memoryview(data))
    except WireError:
        return
    assert header.size <= 1 << 22
