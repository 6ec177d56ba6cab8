"""Bandwidth, round trip and clock difference between two ranks, over gloo point-to-point or over a pipeline's link.

The lower rank of a pair leads: it sends commands, the other one answers them.
"""

from __future__ import annotations

import statistics
import time
from datetime import timedelta
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pipecomp.utils.serialization import exchanged

_PINGS, _PING_SECONDS = 30, 0.5
_FIRST_BYTES, _MOST_BYTES = 1 << 16, 1 << 26
_LONG_ENOUGH_S, _AIM_S, _GROWTH = 0.25, 0.5, 8


@exchanged
class Measured(NamedTuple):
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


def lead(peer: Peer) -> Measured:
    """Measure between this rank and another, which must call `follow`; takes some two seconds."""
    round_trip_s, ahead_s, error_s = _ping(peer)
    out = _rate(peer, _Command.TAKE, round_trip_s)
    back = _rate(peer, _Command.GIVE, round_trip_s)
    _command(peer, _Command.END)
    return Measured(out, back, round_trip_s, ahead_s, error_s)


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
