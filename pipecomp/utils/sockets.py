"""TCP sockets: unsent bytes from the kernel's own counters (Linux), and connections of small packets.

Note: [Unsent bytes]
    gloo reports a packet as sent once the kernel has accepted it, which on a slow link can be seconds before its last
    byte leaves. The kernel counts the bytes that the peer has not acknowledged. Those beyond the bandwidth-delay
    product of the path, delivery rate times minimum round trip, wait in a queue on this machine or on its line.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import struct
import termios
import time
from collections.abc import Callable, Collection
from typing import TypeVar

BLACK_HOLE = "small packets pass and large ones do not (MTU)"
_SMALL_SEGMENT = 536  # bytes: packets of 576, which every path carries
_TCP_INFO_BYTES = 168
_MIN_RTT, _DELIVERY_RATE = struct.Struct("148x I"), struct.Struct("160x Q")  # µs, bytes/s; Linux 4.9
_POLL_S = 0.0005
_Made = TypeVar("_Made")
_SLACK = 1 << 14  # bytes whose acknowledgements may be delayed, by up to 40 ms


def tcp_sockets() -> frozenset[int]:
    """Return the file descriptors of this process's connected TCP sockets; none on a system without /proc."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return frozenset()
    return frozenset(fd for fd in map(int, names) if _tcp_info(fd) is not None)


def record_sockets(make: Callable[[], _Made]) -> tuple[_Made, frozenset[int]]:
    """Call `make`; return its result and the TCP sockets that it connected."""
    before = tcp_sockets()
    result = make()
    return result, tcp_sockets() - before


def has_unsent_bytes(sockets: Collection[int]) -> bool:
    """Return whether any of the sockets has unsent bytes; a closed one has none."""
    return any(_queued(fd) > _SLACK for fd in sockets)


def wait_until_sent(sockets: Collection[int], most_s: float) -> None:
    """Wait until the sockets have no unsent bytes, at most `most_s` seconds."""
    until = time.monotonic() + most_s
    while has_unsent_bytes(sockets) and time.monotonic() < until:
        time.sleep(_POLL_S)


def shut_down_sockets(sockets: Collection[int]) -> None:
    """Shut connections down, which wakes threads that wait for data from them."""
    for fd in sockets:
        if _tcp_info(fd) is not None:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:  # may be closed already
                sock.shutdown(socket.SHUT_RDWR)


def connect_with_small_packets(address: tuple[str, int], wait_s: float) -> socket.socket:
    """Return a TCP connection whose packets have at most 576 bytes in both directions. Raises OSError."""
    problem = OSError("no address")
    for family, kind, protocol, _, where in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SMALL_SEGMENT)  # before the handshake announces it
            sock.settimeout(wait_s)
            sock.connect(where)
        except OSError as error:
            sock.close()
            problem = error
        else:
            return sock
    raise problem


def unacknowledged_bytes(sock: socket.socket) -> int:
    """Return the bytes that a TCP socket has accepted and its peer has not acknowledged."""
    found = array.array("i", [0])
    try:
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, found)
    except OSError:
        return 0
    return found[0]


def describe_black_hole(rank: int, peer: int, address: str) -> str:
    """Describe a path on which large packets vanish; short enough for a small packet.

    rank: this rank. peer: the other rank. address: the other rank's.
    """
    return (
        f"between {socket.gethostname()} (rank {rank}) and {address} (rank {peer}) {BLACK_HOLE}: "
        "ip link set dev NAME mtu 1280, on both machines; pipecomp doctor measures it"
    )


def _queued(fd: int) -> float:
    """Unacknowledged bytes of a TCP socket beyond the bandwidth-delay product of its path."""
    info = _tcp_info(fd)
    if info is None:
        return 0
    unacknowledged = array.array("i", [0])
    try:
        fcntl.ioctl(fd, termios.TIOCOUTQ, unacknowledged)
    except OSError:
        return 0
    (rtt_us,), (rate,) = _MIN_RTT.unpack_from(info), _DELIVERY_RATE.unpack_from(info)
    return unacknowledged[0] - rate * rtt_us / 1e6


def _tcp_info(fd: int) -> bytes | None:
    """TCP_INFO of a connected TCP socket; None for any other descriptor."""
    try:
        # SOCK_NONBLOCK keeps Python from applying socket.setdefaulttimeout(), which would limit its owner's waits.
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=fd)
    except OSError:
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return None
    finally:
        sock.detach()  # it is not ours
    return info if len(info) == _TCP_INFO_BYTES and info[0] == 1 else None
