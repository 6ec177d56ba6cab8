"""Measurements between two ranks: bandwidth and round trip of a connection; loss, jitter and MTU of its path.

The lower rank of a pair leads: it sends commands, the other one answers them. A connection is gloo's, TLS, or a link of
a pipeline. Loss, jitter and MTU are measured with UDP beside it: the other rank sends everything back.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import math
import select
import socket
import statistics
import struct
import sys
import threading
import time
from datetime import timedelta
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pipecomp.distributed.placement import list_interfaces
from pipecomp.doctor.finding import OK, WARNING, Finding, judge
from pipecomp.utils.serialization import serializable
from pipecomp.utils.sockets import BLACK_HOLE
from pipecomp.utils.units import format_rate, format_time

# -- connections

_PINGS, _PING_SECONDS = 30, 0.5
_FIRST_BYTES, _MOST_BYTES = 1 << 16, 1 << 26
_LONG_ENOUGH_S, _AIM_S, _GROWTH = 0.25, 0.5, 8
_TRANSFERS, _TRANSFERS_S = 3, 1.5  # that are measured, and seconds after which no further one begins


@serializable
class LinkMeasurement(NamedTuple):
    """Measurement of a connection, seen from the leading rank.

    Attributes:
        out_bit_s: Bits per second to the other rank.
        back_bit_s: Bits per second from the other rank.
        round_trip_s: Median round trip of small packets.
        spread: Lowest and highest of several measured rates, as factors of their median, in the direction where they
            differ most.
    """

    out_bit_s: float
    back_bit_s: float
    round_trip_s: float
    spread: tuple[float, float] = (1.0, 1.0)


class _TransferCommand(IntEnum):
    PING, TAKE, GIVE, END = range(4)


class Peer(Protocol):
    """The other rank, an ordered channel of tensors. `receive` fills the given tensor or returns another one."""

    def send(self, tensor: Tensor) -> None:
        """Send a tensor."""

    def receive(self, tensor: Tensor) -> Tensor:
        """Receive a tensor of the same size and dtype."""


class GlooPeer:
    """A rank of the default process group. torch's RuntimeError if nothing arrives within `limit_s` seconds."""

    def __init__(self, rank: int, limit_s: float) -> None:
        self._rank, self._limit = rank, timedelta(seconds=limit_s)

    def send(self, tensor: Tensor) -> None:  # noqa: D102 (inherited)
        work = dist.isend(tensor, self._rank)
        assert work is not None, "ranks of the default group only"
        work.wait(self._limit)

    def receive(self, tensor: Tensor) -> Tensor:  # noqa: D102 (inherited)
        work = dist.irecv(tensor, self._rank)
        assert work is not None, "ranks of the default group only"
        work.wait(self._limit)
        return tensor


def lead(peer: Peer) -> LinkMeasurement:
    """Measure the connection to another rank, which must call `follow`; takes about four seconds.

    Raises RuntimeError if nothing comes through in time; it begins with `BLACK_HOLE` if small packets do.
    """
    round_trip_s = _ping(peer)
    try:
        out = _measure_rate(peer, _TransferCommand.TAKE, round_trip_s)
        back = _measure_rate(peer, _TransferCommand.GIVE, round_trip_s)
    except RuntimeError as error:
        raise RuntimeError(f"{BLACK_HOLE}: {error}") from error
    _send_command(peer, _TransferCommand.END)
    spread = min(out[0], back[0]), max(out[2], back[2])
    return LinkMeasurement(out[1], back[1], round_trip_s, spread)


def follow(peer: Peer) -> None:
    """Answer the leading rank until it is done."""
    while True:
        command, size = peer.receive(torch.empty(2, dtype=torch.int64)).tolist()
        if command == _TransferCommand.PING:
            peer.send(torch.zeros(1, dtype=torch.uint8))
        elif command == _TransferCommand.TAKE:
            peer.receive(torch.empty(size, dtype=torch.uint8))
            peer.send(torch.zeros(1, dtype=torch.uint8))
        elif command == _TransferCommand.GIVE:
            peer.send(torch.zeros(size, dtype=torch.uint8))
        else:
            return


def _send_command(peer: Peer, command: _TransferCommand, size: int = 0) -> None:
    peer.send(torch.tensor([command, size]))


def _ping(peer: Peer) -> float:
    """Return the median round trip in seconds."""
    trips: list[float] = []
    began = time.perf_counter()
    # The first one opens the connection. Two more even on the slowest link.
    while len(trips) < 3 or (len(trips) <= _PINGS and time.perf_counter() - began < _PING_SECONDS):
        start = time.perf_counter()
        _send_command(peer, _TransferCommand.PING)
        peer.receive(torch.empty(1, dtype=torch.uint8))
        trips.append(time.perf_counter() - start)
    return statistics.median(trips[1:])


def _measure_rate(peer: Peer, command: _TransferCommand, round_trip_s: float) -> tuple[float, float, float]:
    """Measure a rate by transfers that grow until one takes long enough, and by further ones of that size.

    Returns the lowest rate as a factor of the median, the median in bits per second, and the highest as a factor.
    """
    size = _FIRST_BYTES
    buffer = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
    rates: list[float] = []
    started = time.perf_counter()
    while True:
        if buffer.numel() < size:
            buffer = torch.zeros(size, dtype=torch.uint8)
        _send_command(peer, command, size)
        began = time.perf_counter()
        if command == _TransferCommand.TAKE:
            peer.send(buffer[:size])
            peer.receive(torch.empty(1, dtype=torch.uint8))
        else:
            peer.receive(buffer[:size])
        whole_s = time.perf_counter() - began
        # Note: latency is not bandwidth. It can be subtracted only while it is the smaller part.
        seconds = max(whole_s - round_trip_s, 1e-6)
        if rates or seconds >= max(_LONG_ENOUGH_S, round_trip_s) or size == _MOST_BYTES:
            rates.append(8 * size / max(seconds, whole_s / 2))
            if len(rates) == _TRANSFERS or time.perf_counter() - started > _TRANSFERS_S:
                rate = statistics.median(rates)
                return min(rates) / rate, rate, max(rates) / rate
            continue
        growth = max(_AIM_S, 2 * round_trip_s) / seconds
        size = min(_MOST_BYTES, int(size * min(_GROWTH, max(2.0, growth))))


# -- packets

_PROBES, _EVERY_S, _PROBE_BYTES = 100, 0.01, 128  # 100 kbit/s for a second
_COPIES = 4  # of a packet whose size is tried: one may be lost
_SIZES = (9000, 8900, 4000, 1500, 1492, 1480, 1460, 1440, 1420, 1400, 1380, 1360, 1320, 1280, 1200, 1000, 800, 576)
_HEADERS = {4: 28, 6: 48}  # bytes of IP and UDP
_NUMBER = struct.Struct("<q")
_LATE_S, _MOST_LATE_S = 0.1, 1.0
_LOSSY, _JITTERY_S = 0.005, 0.02
# Linux's numbers of the socket option for fragmentation, which Python's socket module does not name.
_MTU_DISCOVER = {4: (socket.IPPROTO_IP, 10), 6: (socket.IPPROTO_IPV6, 23)}
_FRAGMENT, _NEVER_FRAGMENT = 0, 3


class PacketPath(NamedTuple):
    """Path of packets between two machines, there and back.

    Attributes:
        sent: Small packets sent.
        came: Small packets that came back.
        round_trip_s: Median of their round trips.
        jitter_s: Mean difference between round trips of consecutive packets.
        mtu: Bytes of the largest IP packet that came back unfragmented, 0 if unknown.
        interface_mtu: MTU of the interface.
        cut: True if larger packets come back in fragments; None if no larger ones are possible.
    """

    sent: int
    came: int
    round_trip_s: float
    jitter_s: float
    mtu: int
    interface_mtu: int
    cut: bool | None


def lead_path(peer: Peer, address: str) -> PacketPath | None:
    """Measure the path to a rank of another machine, which must call `follow_path`; takes about three seconds.

    Args:
        peer: The other rank.
        address: This machine's address towards the other.

    Returns:
        The measurement; None if no UDP socket can be opened.
    """
    length, port, *packed = peer.receive(torch.empty(18, dtype=torch.int64)).tolist()
    try:
        if not length:
            return None
        with _open_udp(address) as udp:
            udp.connect((str(ipaddress.ip_address(bytes(packed[:length]))), port))
            return _measure_path(udp)
    except OSError:
        return None
    finally:
        peer.send(torch.zeros(1, dtype=torch.int64))


def follow_path(peer: Peer, address: str) -> None:
    """Echo the leading rank's packets until it is done. The arguments are those of `lead_path`."""
    try:
        udp = _open_udp(address)
    except OSError:
        peer.send(torch.zeros(18, dtype=torch.int64))
        peer.receive(torch.empty(1, dtype=torch.int64))
        return
    with udp:
        own, port = udp.getsockname()[:2]
        packed = ipaddress.ip_address(own.split("%")[0]).packed
        peer.send(torch.tensor([len(packed), port, *packed.ljust(16, b"\0")]))
        done = threading.Event()
        echo = threading.Thread(target=_echo, args=(udp, done))
        echo.start()
        try:
            peer.receive(torch.empty(1, dtype=torch.int64))
        finally:
            done.set()
            echo.join()


def _open_udp(address: str) -> socket.socket:
    udp = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind((address, 0))
    return udp


def _echo(udp: socket.socket, done: threading.Event) -> None:
    while not done.is_set():
        if select.select([udp], [], [], 0.05)[0]:
            with contextlib.suppress(OSError):  # too large to send back: counts as lost
                packet, sender = udp.recvfrom(1 << 16)
                _allow_fragments(udp, packet[-1:] == b"c")
                udp.sendto(packet, sender)


def _ip_version(udp: socket.socket) -> int:
    return 6 if udp.family == socket.AF_INET6 else 4


def _allow_fragments(udp: socket.socket, allowed: bool) -> None:
    if sys.platform == "linux":
        udp.setsockopt(*_MTU_DISCOVER[_ip_version(udp)], _FRAGMENT if allowed else _NEVER_FRAGMENT)


def _measure_path(udp: socket.socket) -> PacketPath:
    trips = _round_trips(udp)
    steps = [abs(b - a) for a, b in itertools.pairwise(trips)]
    own = udp.getsockname()[0].split("%")[0]
    limit = next((i.mtu for i in list_interfaces().values() if own in i.addresses), 0)
    mtu, cut = 0, None
    if trips and limit and sys.platform == "linux":
        wait_s = min(_MOST_LATE_S, _LATE_S + 2 * max(trips))  # for a packet that may be lost
        mtu = _largest_packet(udp, limit, wait_s)
        cut = _comes_back(udp, limit, wait_s, fragments=True) if mtu < limit else None
    trip_s = statistics.median(trips) if trips else 0.0
    return PacketPath(_PROBES, len(trips), trip_s, statistics.mean(steps) if steps else 0.0, mtu, limit, cut)


def _round_trips(udp: socket.socket) -> list[float]:
    """Return the round trips of the small packets that came back, in the order in which they were sent."""
    left: dict[int, float] = {}
    trips: dict[int, float] = {}

    def receive(until: float) -> None:
        while (wait := until - time.perf_counter()) > 0 and len(trips) < _PROBES:
            if select.select([udp], [], [], wait)[0]:
                with contextlib.suppress(ConnectionError):  # an earlier packet was refused
                    number = _NUMBER.unpack_from(udp.recv(1 << 16))[0]
                    trips.setdefault(number, time.perf_counter() - left[number])

    began = time.perf_counter()
    for number in range(_PROBES):
        left[number] = time.perf_counter()
        with contextlib.suppress(ConnectionError):
            udp.send(_NUMBER.pack(number).ljust(_PROBE_BYTES, b"."))
        receive(began + (number + 1) * _EVERY_S)
    receive(time.perf_counter() + _MOST_LATE_S)
    return [trips[number] for number in sorted(trips)]


def _largest_packet(udp: socket.socket, limit: int, wait_s: float) -> int:
    """Return the largest of `limit` and _SIZES that comes back unfragmented; 0 if none does."""
    sizes = [limit, *(size for size in _SIZES if size < limit)]
    low, high = 0, len(sizes)  # sizes[high:] come back
    while low < high:
        middle = 0 if high == len(sizes) and low == 0 else (low + high) // 2  # the interface's own first: often it does
        if _comes_back(udp, sizes[middle], wait_s, fragments=False):
            high = middle
        else:
            low = middle + 1
    return sizes[low] if low < len(sizes) else 0


def _comes_back(udp: socket.socket, size: int, wait_s: float, *, fragments: bool) -> bool:
    """Return True if an IP packet of this size comes back. fragments: True if it may be fragmented."""
    _allow_fragments(udp, fragments)
    number = -size - (1 << 20) * fragments
    packet = _NUMBER.pack(number).ljust(size - _HEADERS[_ip_version(udp)] - 1, b".") + (b"c" if fragments else b"w")
    for _ in range(_COPIES):
        with contextlib.suppress(OSError):  # too large for this machine already
            udp.send(packet)
    until = time.perf_counter() + wait_s
    while (wait := until - time.perf_counter()) > 0:
        if select.select([udp], [], [], wait)[0]:
            with contextlib.suppress(OSError):
                if _NUMBER.unpack_from(udp.recv(1 << 16))[0] == number:
                    return True
    return False


def check_path(ranks: tuple[int, int], path: PacketPath | None) -> list[Finding]:
    """Check loss, jitter and size of packets between two ranks; path: None if it could not be measured."""
    check = f"packets {ranks[0]}–{ranks[1]}"
    if path is None or not path.came:
        fact = "UDP does not get through, so that loss, jitter and the largest packet are not known"
        return [Finding(check, OK, fact, "Training needs TCP only; a firewall may block UDP.")]
    lost = 1 - path.came / path.sent
    limit = tcp_limit_bit_s(path.mtu or 1500, path.round_trip_s, lost)
    lossy = (
        f"each lost one halves TCP's rate for a while, at this round trip to about {format_rate(limit)} for a "
        "connection with Reno's congestion control; cubic and bbr lose less"
    )
    remedy = "Use a cable instead of a radio link; sysctl -w net.ipv4.tcp_congestion_control=bbr"
    uneven = f"a stage waits some {format_time(path.jitter_s)} longer for packets than planned"
    loss = judge(
        check,
        f"{path.sent - path.came} of {path.sent} lost there and back, jitter {format_time(path.jitter_s)}",
        (lost > _LOSSY, WARNING, lossy, remedy),
        (path.jitter_s > _JITTERY_S, WARNING, uneven, "Use more micro-batches (gradient_accumulation_steps)."),
    )
    return [loss, *_check_mtu(f"MTU {ranks[0]}–{ranks[1]}", path)]


def _check_mtu(check: str, path: PacketPath) -> list[Finding]:
    if not path.interface_mtu or sys.platform != "linux":
        return []
    pieces = -(-path.interface_mtu // max(path.mtu, 1))
    fragmented = f"larger ones are fragmented, as by a tunnel: {pieces} packets for one, and if one is lost, all are"
    dropped = (
        "larger ones vanish, as in a tunnel whose MTU is set too high: connections start, and stand still for seconds "
        "with the first large packet unless routers report it by ICMP"
    )
    advice = f"ip link set dev NAME mtu {path.mtu or 576}, on both machines, for the interface that leads to the other."
    consequence = fragmented if path.cut else dropped
    if path.mtu == 0:
        fact = f"the interface takes {path.interface_mtu} bytes, and no size that was tried comes through unfragmented"
        return [Finding(check, WARNING, f"{fact}: {consequence}", advice)]
    fact = f"{path.mtu} bytes come through whole, the interface takes {path.interface_mtu}"
    return [judge(check, fact, (path.mtu < path.interface_mtu, WARNING, consequence, advice))]


def tcp_limit_bit_s(mtu: int, round_trip_s: float, lost: float) -> float:
    """Return the rate of a TCP connection with a share of lost packets: 1.22 · MSS / (round trip · √lost).

    Source: M. Mathis et al., The macroscopic behavior of the TCP congestion avoidance algorithm, 1997.
    """
    if lost <= 0 or round_trip_s <= 0:
        return math.inf
    return 8 * (mtu - 40) * 1.22 / (round_trip_s * math.sqrt(lost))
