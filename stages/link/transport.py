"""The seam between links and networks: packets, in order, both directions at once. No implementation here.

A transport joins two ranks. `send` never blocks on the network, `recv` waits; both raise what ended the connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

MAX_PACKET_BYTES = 1 << 34  # before both ends have agreed on less


class Traffic(NamedTuple):
    """Counters of one end since it was opened."""

    bytes_sent: int
    bytes_received: int
    send_seconds: float  # time in which something was being sent
    wait_seconds: float  # time in which `recv` had to wait


class Pacer(Protocol):
    """Makes a link as slow as another one, for measurements."""

    def hold(self, size: int, ready: float) -> None:
        """Return when `size` bytes, ready to leave at the monotonic time `ready`, would have arrived."""
        ...


PacerTo = Callable[[int], Pacer | None]  # from a rank to what slows down the link to it


def unpaced(rank: int) -> None:
    """A PacerTo that slows nothing down."""


class Transport(Protocol):
    """One end of a connection between two ranks."""

    peer: int  # global rank at the other end

    def send(self, packet: np.ndarray) -> None:
        """Queue uint8 [n] for sending and return; the caller must not change it any more."""
        ...

    def recv(self) -> np.ndarray:
        """The next packet, uint8 [n].

        Raises LinkTimeoutError after the transport's time of silence, PeerLostError if the peer is gone.
        """
        ...

    def on_arrival(self, callback: Callable[[np.ndarray], None]) -> None:
        """Call `callback` with every packet as it arrives, before `recv` hands it out, on another thread."""
        ...

    def on_moved(self, record: Callable[[str, float, float, int | None, int], None]) -> None:
        """Call `record("send" or "receive", start, end, None, bytes)` for every packet; times of perf_counter."""
        ...

    def limit(self, most_bytes: int) -> None:
        """From now on no packet of the peer has more bytes: one that has is a WireError before memory is taken."""
        ...

    def flush(self) -> None:
        """Wait until everything queued has been handed to the network."""
        ...

    def abort(self, lost_rank: int, reason: str) -> None:
        """Tell the peer, if it can still be told, that `lost_rank` is gone; its next `recv` raises that."""
        ...

    def failure(self, wait_s: float = 0.0) -> Exception | None:
        """What ended the connection, if anything did, waiting up to `wait_s` seconds for it to show."""
        ...

    def traffic(self) -> Traffic:
        """Counters so far."""
        ...

    def close(self) -> None:
        """End the connection in order; safe to call twice."""
        ...
