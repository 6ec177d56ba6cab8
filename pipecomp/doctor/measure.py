"""Bandwidth, round trip and clock difference between two ranks, over gloo point-to-point or over a pipeline's link.

The lower rank of a pair leads: it sends commands, the other one answers them.
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
from pipecomp.utils.units import format_rate, format_time

_PINGS, _PING_SECONDS = 30, 0.5
_FIRST_BYTES, _MOST_BYTES = 1 << 16, 1 << 26
_LONG_ENOUGH_S, _AIM_S, _GROWTH = 0.25, 0.5, 8


@serializable
class LinkMeasurement(NamedTuple):
    """Between two ranks, seen from the leading one.

    out_bit_s, back_bit_s: bits per second to the other rank and from it. round_trip_s: median of small packets.
    clock_ahead_s: how far the other rank's clock is ahead; known to within clock_error_s.
    """

    out_bit_s: float
    back_bit_s: float
    round_trip_s: float
    clock_ahead_s: float
    clock_error_s: float


class _Command(IntEnum):
    PING, TAKE, GIVE, END = range(4)


class Peer(Protocol):
    """The other rank: takes tensors in order. `receive` fills the tensor or returns another one with what came."""

    def send(self, tensor: Tensor) -> None:
        """Send a tensor."""

    def receive(self, tensor: Tensor) -> Tensor:
        """Receive a tensor."""


class GlooPeer:
    """A rank of the world group. RuntimeError, torch's own, from any call if nothing comes for limit_s seconds."""

    def __init__(self, rank: int, limit_s: float) -> None:
        self._rank, self._limit = rank, timedelta(seconds=limit_s)

    def send(self, tensor: Tensor) -> None:
        """See Peer."""
        work = dist.isend(tensor, self._rank)
        assert work is not None, "ranks of the world group only"
        work.wait(self._limit)

    def receive(self, tensor: Tensor) -> Tensor:
        """See Peer."""
        work = dist.irecv(tensor, self._rank)
        assert work is not None, "ranks of the world group only"
        work.wait(self._limit)
        return tensor


def lead(peer: Peer) -> LinkMeasurement:
    """Measure between this rank and another, which must call `follow`; takes some two seconds."""
    round_trip_s, ahead_s, error_s = _ping(peer)
    out = _rate(peer, _Command.TAKE, round_trip_s)
    back = _rate(peer, _Command.GIVE, round_trip_s)
    _command(peer, _Command.END)
    return LinkMeasurement(out, back, round_trip_s, ahead_s, error_s)


def follow(peer: Peer) -> None:
    """Answer the leading rank until it is done; see `lead`."""
    while True:
        command, size = peer.receive(torch.empty(2, dtype=torch.int64)).tolist()
        arrived = time.time_ns()
        if command == _Command.PING:
            peer.send(torch.tensor([arrived, time.time_ns()]))
        elif command == _Command.TAKE:
            peer.receive(torch.empty(size, dtype=torch.uint8))
            peer.send(torch.zeros(1, dtype=torch.uint8))
        elif command == _Command.GIVE:
            peer.send(torch.zeros(size, dtype=torch.uint8))
        else:
            return


def _command(peer: Peer, command: _Command, size: int = 0) -> None:
    peer.send(torch.tensor([command, size]))


def _ping(peer: Peer) -> tuple[float, float, float]:
    """Round trip, how far the other clock is ahead, and how far off that may be; in seconds."""
    trips: list[float] = []
    clocks: list[tuple[float, float]] = []
    answer = torch.empty(2, dtype=torch.int64)
    began = time.perf_counter()
    # The first one sets the connection up. Two more even on the slowest link.
    while len(trips) < 3 or (len(trips) <= _PINGS and time.perf_counter() - began < _PING_SECONDS):
        left, start = time.time_ns(), time.perf_counter()
        _command(peer, _Command.PING)
        arrived, answered = peer.receive(answer).tolist()
        trip = time.perf_counter() - start
        trips.append(trip)
        # As NTP does: if both ways take equally long, the clocks differ by the mean of the two differences.
        ahead = ((arrived - left) + (answered - time.time_ns())) / 2e9
        clocks.append((trip / 2, ahead))
    error_s, ahead_s = min(clocks[1:])
    return statistics.median(trips[1:]), ahead_s, error_s


def _rate(peer: Peer, command: _Command, round_trip_s: float) -> float:
    """Bits per second, from transfers that grow until one takes long enough."""
    size = _FIRST_BYTES
    buffer = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
    while True:
        if buffer.numel() < size:
            buffer = torch.zeros(size, dtype=torch.uint8)
        _command(peer, command, size)
        began = time.perf_counter()
        if command == _Command.TAKE:
            peer.send(buffer[:size])
            peer.receive(torch.empty(1, dtype=torch.uint8))
        else:
            peer.receive(buffer[:size])
        whole_s = time.perf_counter() - began
        # How long a byte travels is no matter of bandwidth, and must be the smaller part to be taken off.
        seconds = max(whole_s - round_trip_s, 1e-6)
        if seconds >= max(_LONG_ENOUGH_S, round_trip_s) or size == _MOST_BYTES:
            return 8 * size / max(seconds, whole_s / 2)
        growth = max(_AIM_S, 2 * round_trip_s) / seconds
        size = min(_MOST_BYTES, int(size * min(_GROWTH, max(2.0, growth))))


# -- What a way between two machines does to packets: loss, jitter, and the largest packet that gets through whole.

_PROBES, _EVERY_S, _PROBE_BYTES = 100, 0.01, 128  # 100 kbit/s for a second
_COPIES = 4  # of a packet whose size is tried: one may be lost
_SIZES = (9000, 8900, 4000, 1500, 1492, 1480, 1460, 1440, 1420, 1400, 1380, 1360, 1320, 1280, 1200, 1000, 800, 576)
_HEADERS = {4: 28, 6: 48}  # of IP and UDP
_NUMBER = struct.Struct("<q")
_LATE_S, _MOST_LATE_S = 0.1, 1.0
_LOSSY, _JITTERY_S = 0.005, 0.02
# Linux's numbers, which Python's socket module does not name: whether a packet may be cut up on its way.
_DISCOVER = {4: (socket.IPPROTO_IP, 10), 6: (socket.IPPROTO_IPV6, 23)}
_MAY_BE_CUT, _NEVER_CUT = 0, 3


class PacketPath(NamedTuple):
    """A way there and back between two ranks of different machines.

    sent, came: small packets. round_trip_s: the median of theirs. jitter_s: how much their times differ from one to the
    next, the mean. mtu: bytes of the largest IP packet that came through whole, 0 where that cannot be tried.
    interface_mtu: what the interface takes. cut: whether larger ones come through in pieces; None if none are larger.
    """

    sent: int
    came: int
    round_trip_s: float
    jitter_s: float
    mtu: int
    interface_mtu: int
    cut: bool | None


def lead_path(peer: Peer, address: str) -> PacketPath | None:
    """Measure the way to a rank of another machine, which must call `follow_path`; takes some three seconds.

    address: this machine's on the way to the other. None where no UDP socket can be had there.
    """
    length, port, *packed = peer.receive(torch.empty(18, dtype=torch.int64)).tolist()
    try:
        if not length:
            return None
        with _socket(address) as udp:
            udp.connect((str(ipaddress.ip_address(bytes(packed[:length]))), port))
            return _measured(udp)
    except OSError:
        return None
    finally:
        peer.send(torch.zeros(1, dtype=torch.int64))


def follow_path(peer: Peer, address: str) -> None:
    """Send back what the leading rank sends, until it is done; see `lead_path`."""
    try:
        udp = _socket(address)
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


def _socket(address: str) -> socket.socket:
    """A UDP socket at one of this machine's addresses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    udp = socket.socket(family, socket.SOCK_DGRAM)
    udp.bind((address, 0))
    return udp


def _echo(udp: socket.socket, done: threading.Event) -> None:
    while not done.is_set():
        if select.select([udp], [], [], 0.05)[0]:
            with contextlib.suppress(OSError):  # too large for the way back: it does not come through, then
                packet, sender = udp.recvfrom(1 << 16)
                _let_be_cut(udp, packet[-1:] == b"c")
                udp.sendto(packet, sender)


def _let_be_cut(udp: socket.socket, allowed: bool) -> None:
    """Let routers cut packets into pieces, or not; only Linux can be told."""
    if sys.platform != "linux":
        return
    level, option = _DISCOVER[6 if udp.family == socket.AF_INET6 else 4]
    udp.setsockopt(level, option, _MAY_BE_CUT if allowed else _NEVER_CUT)


def _measured(udp: socket.socket) -> PacketPath:
    trips = _trips(udp)
    steps = [abs(b - a) for a, b in itertools.pairwise(trips)]
    own = udp.getsockname()[0].split("%")[0]
    limit = next((i.mtu for i in list_interfaces().values() if own in i.addresses), 0)
    mtu, cut = 0, None
    if trips and limit and sys.platform == "linux":
        late_s = _late(max(trips))
        mtu = _largest(udp, limit, late_s)
        cut = _comes(udp, limit, late_s, cut=True) if mtu < limit else None
    trip_s = statistics.median(trips) if trips else 0.0
    return PacketPath(_PROBES, len(trips), trip_s, statistics.mean(steps) if steps else 0.0, mtu, limit, cut)


def _late(round_trip_s: float) -> float:
    """How long to wait for a packet that may be lost."""
    return min(_MOST_LATE_S, _LATE_S + 2 * round_trip_s)


def _trips(udp: socket.socket) -> list[float]:
    """Seconds there and back of the small packets that came, in the order in which they were sent."""
    left: dict[int, float] = {}
    trips: dict[int, float] = {}

    def take(until: float) -> None:
        while (wait := until - time.perf_counter()) > 0 and len(trips) < _PROBES:
            if select.select([udp], [], [], wait)[0]:
                with contextlib.suppress(ConnectionError):  # of an earlier packet, which nobody took
                    number = _NUMBER.unpack_from(udp.recv(1 << 16))[0]
                    trips.setdefault(number, time.perf_counter() - left[number])

    began = time.perf_counter()
    for number in range(_PROBES):
        left[number] = time.perf_counter()
        with contextlib.suppress(ConnectionError):
            udp.send(_NUMBER.pack(number).ljust(_PROBE_BYTES, b"."))
        take(began + (number + 1) * _EVERY_S)
    take(time.perf_counter() + _MOST_LATE_S)
    return [trips[number] for number in sorted(trips)]


def _largest(udp: socket.socket, limit: int, late_s: float) -> int:
    """The largest size that comes through whole, of the interface's own and of _SIZES; 0 if none does."""
    sizes = [limit, *(size for size in _SIZES if size < limit)]
    low, high = 0, len(sizes)  # sizes[high:] come through
    while low < high:
        middle = 0 if high == len(sizes) and low == 0 else (low + high) // 2  # the interface's own first: often it does
        if _comes(udp, sizes[middle], late_s, cut=False):
            high = middle
        else:
            low = middle + 1
    return sizes[low] if low < len(sizes) else 0


def _comes(udp: socket.socket, size: int, late_s: float, *, cut: bool) -> bool:
    """Whether an IP packet of so many bytes comes back. cut: whether it may be cut into pieces."""
    _let_be_cut(udp, cut)
    content = size - _HEADERS[6 if udp.family == socket.AF_INET6 else 4]
    number = -size - (1 << 20) * cut
    packet = _NUMBER.pack(number).ljust(content - 1, b".") + (b"c" if cut else b"w")
    for _ in range(_COPIES):
        with contextlib.suppress(OSError):  # too large for this machine already
            udp.send(packet)
    until = time.perf_counter() + late_s
    while (wait := until - time.perf_counter()) > 0:
        if select.select([udp], [], [], wait)[0]:
            with contextlib.suppress(OSError):
                if _NUMBER.unpack_from(udp.recv(1 << 16))[0] == number:
                    return True
    return False


# -- what it means


def check_path(ranks: tuple[int, int], path: PacketPath | None) -> list[Finding]:
    """Check loss, jitter and size of packets between two ranks; path: None if it could not be measured."""
    between = f"packets {ranks[0]}–{ranks[1]}"
    if path is None or not path.came:
        found = "UDP does not get through, so loss, jitter and the largest packet are not known"
        return [Finding(between, OK, found, "Training needs TCP only; a firewall may stop UDP.")]
    return [_check_loss(between, path), *_check_mtu(f"MTU {ranks[0]}–{ranks[1]}", path)]


def _check_loss(check: str, path: PacketPath) -> Finding:
    lost = 1 - path.came / path.sent
    limit = tcp_limit_bit_s(path.mtu or 1500, path.round_trip_s, lost)
    many = (
        f"each lost one halves TCP's rate for a while, at this round trip to about {format_rate(limit)} for a "
        "connection with Reno's control; cubic and bbr lose less"
    )
    uneven = f"a stage waits some {format_time(path.jitter_s)} longer for packets than the plan says"
    return judge(
        check,
        f"{path.sent - path.came} of {path.sent} lost there and back, jitter {format_time(path.jitter_s)}",
        (
            lost > _LOSSY,
            WARNING,
            many,
            "Use a cable instead of a radio link; sysctl -w net.ipv4.tcp_congestion_control=bbr",
        ),
        (path.jitter_s > _JITTERY_S, WARNING, uneven, "Use more micro-batches (gradient_accumulation_steps)."),
    )


def _check_mtu(check: str, path: PacketPath) -> list[Finding]:
    if not path.interface_mtu or sys.platform != "linux":
        return []
    pieces = -(-path.interface_mtu // max(path.mtu, 1))
    in_pieces = (
        f"larger ones are cut up on the way, as by a tunnel: {pieces} packets for one, and if one is lost, all are"
    )
    gone = (
        "larger ones vanish, as in a tunnel whose MTU is set too high: connections start, and stand still for seconds "
        "with the first large packet unless routers say so by ICMP"
    )
    advice = f"ip link set dev NAME mtu {path.mtu}, on both machines, for the interface that leads to the other."
    if path.mtu == 0:
        found = f"the interface takes {path.interface_mtu} bytes, and none that were tried come through whole"
        return [Finding(check, WARNING, f"{found}: {in_pieces if path.cut else gone}", advice.replace(" 0,", " 576,"))]
    smaller = path.mtu < path.interface_mtu
    return [
        judge(
            check,
            f"{path.mtu} bytes come through whole, the interface takes {path.interface_mtu}",
            (smaller and bool(path.cut), WARNING, in_pieces, advice),
            (smaller, WARNING, gone, advice),
        )
    ]


def tcp_limit_bit_s(mtu: int, round_trip_s: float, lost: float) -> float:
    """What a TCP connection reaches with this share of packets lost: 1.22 · MSS / (round trip · √lost).

    M. Mathis et al., The macroscopic behavior of the TCP congestion avoidance algorithm, 1997.
    """
    if lost <= 0 or round_trip_s <= 0:
        return math.inf
    return 8 * (mtu - 40) * 1.22 / (round_trip_s * math.sqrt(lost))
