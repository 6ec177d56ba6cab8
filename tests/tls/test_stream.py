"""Bytes under TLS over TCP, which comes in pieces of any length."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipecomp.errors import WireError
from pipecomp.tls.handshake import Credentials
from pipecomp.tls.key_folder import create_keys
from pipecomp.tls.stream import SecureStream
from tests.limits import HANG_S
from tests.tls.test_keys import machine

FRAME = 1 << 17
PACKET = 1448  # bytes of a TCP packet on most links


@pytest.fixture
def ends(tmp_path) -> Iterator[tuple[SecureStream, SecureStream]]:
    """Two ends of a connection under TLS; the first one sends."""
    first = create_keys(tmp_path / "first")
    trusts = Credentials(first), Credentials(machine(first, tmp_path / "second", "second", (1,)))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(trusts[0].secure, other, server=True)
            stream, _ = trusts[1].secure(one, server=False)
            yield stream, waiting.result(HANG_S)[0]


def sealed(stream: SecureStream, data: bytes) -> bytes:
    """Return the bytes on the socket for `data`."""
    stream._tls.write(data)
    return stream._outgoing.read()


def content(size: int) -> bytes:
    return bytes(i * 7 % 251 for i in range(size))


def receive_pieces(ends, whole: bytes, cuts: list[int], received: bytearray) -> None:
    """Send `whole` in pieces, the first ones just before the receiver's waits, the last three bytes by themselves."""
    sender, receiver = ends
    bounds = [0, *(min(cut, len(whole) - 3) for cut in cuts), len(whole) - 3, len(whole)]
    pieces = [whole[at:end] for at, end in itertools.pairwise(bounds)]
    in_order = threading.Lock()

    def send_one() -> None:
        with in_order:
            if pieces:
                sender.sock.sendall(pieces.pop(0))

    receiver.on_idle = send_one
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(receiver.receive_into, memoryview(received))
        try:
            while pieces:
                time.sleep(0.02)  # the receiver has what was there, and waits again
                send_one()
            done.result(HANG_S)
        finally:
            sender.close()  # ends a receiver that waits still


@pytest.mark.parametrize("timeout", [None, HANG_S])
@pytest.mark.parametrize("size", [1, 16_385, 40_000, FRAME])
@pytest.mark.parametrize("cuts", [[1], [5], [6], [16_000], [16_406], [16_407], [39_000], [32_768, 39_000]])
def test_what_has_come_in_part_is_received_when_the_rest_comes(ends, size, cuts, timeout):
    """The thread that receives never waits for more than is on its way, wherever OpenSSL stands in a record."""
    ends[1].sock.settimeout(timeout)
    data, received = content(size), bytearray(size)
    receive_pieces(ends, sealed(ends[0], data), cuts, received)
    assert received == data


@pytest.mark.parametrize(
    ("size", "text", "said"),
    [
        (65_537, b"", "a handshake message has 65537 bytes, allowed: 65536"),
        (2, b"[]", "not a JSON object"),
        (1, b"{", "not JSON"),
    ],
)
def test_what_is_no_message_of_a_handshake(ends, size, text, said):
    """As a stranger may send it to an invitation: no memory is taken for what is too long."""
    sender, receiver = ends
    receiver.sock.settimeout(HANG_S)
    sender.send(struct.pack("<I", size) + text)
    sender.close()
    with pytest.raises(WireError, match=f"{said}$"):
        receiver.receive_json()


def test_a_thread_that_receives_is_not_woken_for_every_packet(ends):
    sender, receiver = ends
    pulls = 0

    def pull() -> None:
        nonlocal pulls
        pulls += 1

    receiver.on_idle = pull
    receiver.sock.settimeout(HANG_S)  # as a line's: without one every packet wakes it
    data, received = content(FRAME), bytearray(FRAME)
    whole = sealed(sender, data)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(receiver.receive_into, memoryview(received))
        for at in range(0, len(whole), PACKET):
            sender.sock.sendall(whole[at : at + PACKET])
            time.sleep(0.002)
        done.result(HANG_S)
    assert received == data
    assert pulls < len(whole) / PACKET / 3
