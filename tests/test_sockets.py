"""The system's count of bytes that have not left, and the sockets of a gloo group."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.utils.sockets import has_unsent_bytes, tcp_sockets
from tests.limits import HANG_S, until

BYTES = 1 << 20


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection, the second of which takes little before it reads."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 13)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()) as one:
            other, _ = listener.accept()
            with other:
                yield one, other


def test_a_default_for_new_sockets_changes_none_that_is_there(ends):
    """Somebody else's, which that owner reads and expects to wait."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(20.0)
    try:
        assert {end.fileno() for end in ends} <= tcp_sockets()
    finally:
        socket.setdefaulttimeout(before)
    assert all(os.get_blocking(end.fileno()) for end in ends)


def test_bytes_are_leaving_until_the_other_side_has_them(ends):
    one, other = ends
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * BYTES)
    assert not has_unsent_bytes([one.fileno()])
    one.sendall(bytes(BYTES))  # the system has taken it all
    assert has_unsent_bytes([one.fileno()])
    assert not has_unsent_bytes([other.fileno()])
    reading = threading.Thread(target=other.recv, args=(BYTES, socket.MSG_WAITALL))
    reading.start()
    reading.join(HANG_S)
    until(lambda: not has_unsent_bytes([one.fileno()]))


def test_only_connections_count(ends):
    one, other = ends
    with socket.socket() as alone, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        found = tcp_sockets()
        assert {one.fileno(), other.fileno()} <= found
        assert not found & {alone.fileno(), datagrams.fileno(), 0, 1, 2}


def test_a_socket_that_was_closed_since_has_nothing_to_send(ends):
    one, _ = ends
    number = one.fileno()
    one.close()
    assert not has_unsent_bytes([number])
    with open(os.devnull) as file:  # another file may have its number
        assert not has_unsent_bytes([file.fileno()])


def acknowledged(number: int) -> int:
    """Bytes that the other side of a connection has taken."""
    with socket.socket(fileno=os.dup(number)) as same:
        return struct.unpack_from("Q", same.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128), 120)[0]


def sockets_of_groups(rank: int, world: int, note: Any) -> tuple[dict, int]:
    """Number of sockets by neighbours, and bytes of a packet that left through those of the first."""
    import numpy as np
    import torch.distributed as dist

    from pipecomp.stages.link.gloo import GlooTransport, neighbour_groups

    dist.init_process_group("gloo")
    groups = neighbour_groups([[0, 1, 2]], HANG_S)
    counts = {pair: len(neighbours.sockets) for pair, (neighbours,) in groups.items()}
    left = 0
    if rank < 2:
        group, sockets = groups[0, 1][0]
        transport = GlooTransport(group, timeout_s=HANG_S, sockets=sockets)
        before = sum(map(acknowledged, sockets))
        if rank == 0:
            transport.send(np.zeros(BYTES, dtype=np.uint8))
            until(lambda: not transport.sending())
            left = sum(map(acknowledged, sockets)) - before
        else:
            transport.recv()
        transport.close()
    dist.barrier()
    dist.destroy_process_group()
    return counts, left


@pytest.mark.ranks
def test_a_groups_sockets_are_known():
    found = run_ranks(3, sockets_of_groups, timeout_s=HANG_S)
    assert [found[rank][0] for rank in range(3)] == [{(0, 1): 1}, {(0, 1): 1, (1, 2): 1}, {(1, 2): 1}]
    assert found[0][1] > BYTES - (1 << 15)
