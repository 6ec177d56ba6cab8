"""Number of TCP connections of a link: measured at the start, or as configured.

# Note: when one TCP connection is not enough
A TCP connection carries at most its window in a round trip. Linux's default windows of 4 to 6 MB fill 1 Gbit/s up to a
round trip of about 40 ms, and at 200 ms an eighth of it; after a lost packet the window is halved, and grows again by
one packet a round trip. Several connections have several windows. On a short line they gain nothing, so nothing but the
round trip is measured there.
"""

from __future__ import annotations

import math
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from pipecomp.errors import LinkError
from pipecomp.stages.link.transport import Transport
from pipecomp.tls.frames import MAX_SUBFLOWS
from pipecomp.utils.units import format_rate, format_time

MIN_ROUND_TRIP_S = 0.02  # below, one stream is used and no rate measured
TOLERANCE = 0.1  # of the best rate, for fewer streams
COUNTS = (1, 2, 4, 8)
_PINGS = 4  # the first one opens the connection
_FIXED_S, _ROUND_TRIPS, _MOST_S = 0.5, 10, 8.0  # seconds of one rate: TCP's slow start takes about 8 round trips
_BLOCK_BYTES = (1 << 15, 1 << 20)  # first and largest
_AHEAD_BYTES = 1 << 21  # that wait for the network in this process
_POLL_S = 0.002
_PACKET = struct.Struct("<4sIdd")  # mark, kind, two values
_MARK = b"PCST"


class _PacketKind(IntEnum):
    PING, RATE, REPORT, USE, BLOCK, LAST = range(6)


@dataclass(frozen=True)
class StreamChoice:
    """The streams of a link.

    Attributes:
        streams: TCP connections.
        round_trip_s: Round trip of small packets; None if it was not measured.
        rates: By number of streams, bytes per second of both directions together; empty if none was measured.
    """

    streams: int
    round_trip_s: float | None = None
    rates: Mapping[int, float] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.round_trip_s is None:
            return f"{self.streams} as configured"
        text = f"{self.streams} at a round trip of {format_time(self.round_trip_s)}"
        rates = ", ".join(f"{format_rate(8 * rate)} with {count}" for count, rate in self.rates.items())
        return f"{text} ({rates}, both directions together)" if rates else text


def fewest_streams(rates: Mapping[int, float]) -> int:
    """Return the fewest streams whose rate is within TOLERANCE of the best one.

    Example:
        >>> fewest_streams({1: 15e6, 2: 30e6, 4: 58e6, 8: 61e6})
        4
    """
    best = max(rates.values())
    return min(count for count, rate in rates.items() if rate >= (1 - TOLERANCE) * best)


def measure_round_trips(stage: int, transports: Mapping[str, Transport]) -> dict[str, float]:
    """Measure the round trips of this rank's links; all ranks of a run must call this together.

    Args:
        stage: This rank's stage. Links of even stages to the next are measured first, then the others.
        transports: By "to_previous" and "to_next".

    Returns:
        Seconds, by the same names.

    Raises:
        LinkError: The other end sends something else; also whatever the transports raise.
    """
    round_trips = {}
    for name in _in_turn(stage, transports):
        transports[name].use_streams(1)
        round_trips[name] = (_lead_pings if name == "to_next" else _follow_pings)(transports[name])
    return round_trips


def choose_streams(
    stage: int, transports: Mapping[str, Transport], round_trips: Mapping[str, float]
) -> dict[str, StreamChoice]:
    """Choose the number of streams of this rank's links by their rates, and use it; all ranks must call this together.

    Args:
        stage: This rank's stage.
        transports: By "to_previous" and "to_next". The long ones can use MAX_SUBFLOWS streams.
        round_trips: From `measure_round_trips`.

    Returns:
        By the same names.

    Raises:
        LinkError: The other end sends something else; also whatever the transports raise.
    """
    choices = {}
    for name in _in_turn(stage, transports):
        transport, count = transports[name], 1
        rates = {}
        if is_long(round_trips[name]):
            rates = (_lead_rates if name == "to_next" else _follow_rates)(transport, round_trips[name])
            count = fewest_streams(rates)
            transport.use_streams(count)
        choices[name] = StreamChoice(count, round_trips[name], rates)
    return choices


def is_long(round_trip_s: float) -> bool:
    """Return whether a link with this round trip may need several streams."""
    return round_trip_s > MIN_ROUND_TRIP_S


def _in_turn(stage: int, transports: Mapping[str, Transport]) -> list[str]:
    return sorted(transports, reverse=bool(stage % 2))


# -- both ends of a measurement


def _send(transport: Transport, kind: _PacketKind, first: float = 0.0, second: float = 0.0) -> None:
    transport.send(np.frombuffer(_PACKET.pack(_MARK, kind, first, second), dtype=np.uint8))


def _receive(transport: Transport, kind: _PacketKind) -> tuple[float, float]:
    packet = transport.recv()
    if packet.size == _PACKET.size:
        mark, found, first, second = _PACKET.unpack(packet.tobytes())
        if mark == _MARK and found == kind and math.isfinite(first) and math.isfinite(second):
            return first, second
    raise LinkError(f"rank {transport.peer} sent {packet.size} bytes while the streams of the link were measured")


def _lead_pings(transport: Transport) -> float:
    """Measure the round trip, and tell the other end."""
    trips = []
    for _ in range(_PINGS):
        began = time.perf_counter()
        _send(transport, _PacketKind.PING)
        _receive(transport, _PacketKind.PING)
        trips.append(time.perf_counter() - began)
    seconds = min(trips)  # the others had to wait for a busy machine, or opened the connection
    _send(transport, _PacketKind.PING, seconds)
    return seconds


def _follow_pings(transport: Transport) -> float:
    for _ in range(_PINGS):
        _receive(transport, _PacketKind.PING)
        _send(transport, _PacketKind.PING)
    return _receive(transport, _PacketKind.PING)[0]


def _lead_rates(transport: Transport, round_trip_s: float) -> dict[int, float]:
    """Measure until twice the streams bring little; each rate takes up to `_MOST_S` seconds, and a queue's drain."""
    rates: dict[int, float] = {}
    for count in COUNTS:
        _send(transport, _PacketKind.USE, count)
        transport.use_streams(count)
        own = _exchange_blocks(transport, round_trip_s)
        rates[count] = own + _receive(transport, _PacketKind.REPORT)[0]
        if count > 1 and rates[count // 2] >= (1 - TOLERANCE) * rates[count]:
            break
    _send(transport, _PacketKind.USE, 0)
    for count in rates:
        _send(transport, _PacketKind.RATE, count, rates[count])
    _send(transport, _PacketKind.RATE)
    return rates


def _follow_rates(transport: Transport, round_trip_s: float) -> dict[int, float]:
    while count := int(_receive(transport, _PacketKind.USE)[0]):
        if count not in COUNTS:
            raise LinkError(f"rank {transport.peer} measures {count} streams, allowed: 1 to {MAX_SUBFLOWS}")
        transport.use_streams(count)
        _send(transport, _PacketKind.REPORT, _exchange_blocks(transport, round_trip_s))
    rates: dict[int, float] = {}
    while len(rates) <= len(COUNTS) and (found := _receive(transport, _PacketKind.RATE))[0]:
        rates[int(found[0])] = found[1]
    if not rates or any(count not in COUNTS or rate <= 0 for count, rate in rates.items()):
        raise LinkError(f"rank {transport.peer} sent rates that are none: {rates}")
    return rates


def _exchange_blocks(transport: Transport, round_trip_s: float) -> float:
    """Send blocks for a while, and return the rate in bytes per second at which the other end's arrive.

    The rate is that of the second half of the bytes, when TCP's windows have grown.
    """
    seconds = min(_MOST_S, _FIXED_S + _ROUND_TRIPS * round_trip_s)
    failed: list[Exception] = []

    def send_blocks() -> None:
        size, until = _BLOCK_BYTES[0], time.monotonic() + seconds
        try:
            while time.monotonic() < until:
                if transport.waiting_bytes < min(_AHEAD_BYTES, 2 * size):
                    transport.send(_block(size, _PacketKind.BLOCK))
                    size = min(_BLOCK_BYTES[1], 2 * size) if transport.waiting_bytes == 0 else size
                else:
                    time.sleep(_POLL_S)
            transport.send(_block(_PACKET.size, _PacketKind.LAST))
        except Exception as error:
            failed.append(error)

    sender = threading.Thread(target=send_blocks, name=f"pipecomp-measure-{transport.peer}", daemon=True)
    sender.start()
    arrivals: list[tuple[float, int]] = []
    while True:
        block = transport.recv()
        mark, kind, _, _ = _PACKET.unpack_from(block) if block.size >= _PACKET.size else (b"", -1, 0.0, 0.0)
        if mark != _MARK or kind not in (_PacketKind.BLOCK, _PacketKind.LAST) or block.size > _BLOCK_BYTES[1]:
            raise LinkError(f"rank {transport.peer} sent {block.size} bytes while the rate of the link was measured")
        if kind == _PacketKind.LAST:
            break
        arrivals.append((time.perf_counter(), block.size))
    sender.join()
    if failed:
        raise failed[0]
    return _late_rate(arrivals)


def _block(size: int, kind: _PacketKind) -> np.ndarray:
    block = np.zeros(size, dtype=np.uint8)
    _PACKET.pack_into(block, 0, _MARK, kind, 0.0, 0.0)
    return block


def _late_rate(arrivals: Sequence[tuple[float, int]]) -> float:
    """Bytes per second of the arrivals after half of the time."""
    if not arrivals or arrivals[0][0] == arrivals[-1][0]:
        return 1.0
    middle = (arrivals[0][0] + arrivals[-1][0]) / 2
    late = [(at, size) for at, size in arrivals if at >= middle]
    before = max(at for at, _ in arrivals if at < middle)
    return sum(size for _, size in late) / max(arrivals[-1][0] - before, 1e-6)
