"""What has been handed to the system and has not left this machine's line yet, by socket (Linux).

gloo counts a packet as sent when the system has taken it, which for a slow link can be seconds before the last byte is
on its way. The kernel knows better: bytes that the other side has not acknowledged wait here or in a queue behind here,
except for those that the path holds anyway, a round trip's worth at the rate at which they are delivered.
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

_TCP_INFO_BYTES = 168
_MIN_RTT, _DELIVERY_RATE = struct.Struct("148x I"), struct.Struct("160x Q")  # µs, bytes/s; Linux 4.9
_POLL_S = 0.0005
_Made = TypeVar("_Made")
_SLACK = 1 << 14  # bytes: acknowledgements of the last ones may be 40 ms late


def tcp_sockets() -> frozenset[int]:
    """List this process's connected TCP sockets; none where the system has no /proc."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return frozenset()
    return frozenset(fd for fd in map(int, names) if _tcp_info(fd) is not None)


def with_sockets(make: Callable[[], _Made]) -> tuple[_Made, frozenset[int]]:
    """Return what `make` makes, and the sockets that it has connected for it."""
    before = tcp_sockets()
    made = make()
    return made, tcp_sockets() - before


def leaving(sockets: Collection[int]) -> bool:
    """Tell whether bytes wait to leave through one of the sockets; one that is closed has none."""
    return any(_queued(fd) > _SLACK for fd in sockets)


def wait_until_left(sockets: Collection[int], most_s: float) -> None:
    """Return when nothing waits to leave through the sockets any more, or after `most_s`."""
    until = time.monotonic() + most_s
    while leaving(sockets) and time.monotonic() < until:
        time.sleep(_POLL_S)


def cut(sockets: Collection[int]) -> None:
    """End the connections of sockets, so that whoever waits for what comes through them waits no more."""
    for fd in sockets:
        if _tcp_info(fd) is not None:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:  # it may have ended meanwhile
                sock.shutdown(socket.SHUT_RDWR)


def _queued(fd: int) -> float:
    """Bytes of a TCP socket that are not acknowledged, beyond what its path holds."""
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
    """The kernel's account of a connected TCP socket; None for anything else."""
    try:
        # SOCK_NONBLOCK keeps Python from applying socket.setdefaulttimeout(), which would end its owner's waits.
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
