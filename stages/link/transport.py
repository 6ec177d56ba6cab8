"""The seam between links and networks: packets, in order, both directions at once. No implementation here.

A transport joins two ranks. `send` never blocks on the network, `recv` waits; both raise what ended the connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

MAX_PACKET_BYTES = 1 << 34  # before both ends have agreed on less
_AT_ONCE_S = 1e-3  # waiting for a packet that is there already takes less


class Pacer(Protocol):
    """Makes a link as slow as another one, for measurements."""

    def hold(self, size: int, ready: float) -> None:
        """Return when `size` bytes, ready to leave at the monotonic time `ready`, would have arrived."""


PacerTo = Callable[[int], Pacer | None]  # from a rank to what slows down the link to it


def unpaced(rank: int) -> None:
    """Slow nothing down: a PacerTo."""


Moved = Callable[[str, float, float, int | None, int], None]


class Unfinished(Protocol):
    """A packet that is on its way from a device: the thread that sends it waits for it."""

    @property
    def size(self) -> int:
        """Bytes of the packet, or more as long as it is unfinished."""

    def finish(self) -> np.ndarray:
        """Wait for the packet, uint8 [n]. Raises what makes it unfit to be sent: then nothing is sent any more."""


Outgoing = np.ndarray | Unfinished


def finished(packet: Outgoing) -> np.ndarray:
    """Wait for a packet if that is needed."""
    return packet if isinstance(packet, np.ndarray) else packet.finish()


def finished_at(packet: Outgoing, queued: float) -> tuple[np.ndarray, float]:
    """Wait for a packet if that is needed; with when it was there: `queued`, or later, by time.monotonic().

    A link that is slowed down carries nothing before: a GPU may still compute what was queued.
    """
    began = time.monotonic()
    found = finished(packet)
    ended = time.monotonic()
    return found, ended if ended - began > _AT_ONCE_S else queued


class Transport(Protocol):
    """One end of a connection between two ranks."""

    peer: int  # global rank at the other end
    # Called with every packet as it arrives, before `recv` hands it out, on another thread.
    on_arrival: Callable[[np.ndarray], None] | None
    # Called as `on_moved("send" or "receive", start, end, None, bytes)` for every packet; times of perf_counter.
    on_moved: Moved | None

    def send(self, packet: Outgoing) -> None:
        """Queue uint8 [n] for sending and return; the caller must not change it any more.

        What an unfinished packet raises, the next call of `send` and `recv` raises.
        """

    def wait_for_room(self) -> None:
        """Wait while packets that have not left take 256 MiB and more, for who could queue any number of them.

        Raises what ended the connection.
        """

    def sending(self) -> bool:
        """Tell whether a packet waits to leave, or is leaving."""

    def recv(self) -> np.ndarray:
        """Wait for the next packet, uint8 [n].

        Raises LinkTimeoutError after the transport's time of silence, PeerLostError if the peer is gone.
        """

    def limit(self, most_bytes: int) -> None:
        """From now on take no packet of more bytes: one that has them is a WireError before memory is taken."""

    def abort(self, lost_rank: int, reason: str) -> None:
        """Tell the peer, if it can still be told, that `lost_rank` is gone; its next `recv` raises that."""

    def failed(self, error: Exception) -> None:
        """Let every call from here on raise this, unless another error was first; a `recv` that waits does, too."""

    def failure(self, wait_s: float = 0.0) -> Exception | None:
        """Find what ended the connection, if anything did, waiting up to `wait_s` seconds for it to show."""

    def close(self) -> None:
        """End the connection in order; safe to call twice."""
