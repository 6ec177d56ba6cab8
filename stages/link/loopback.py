"""A transport inside one process, for tests and for running all stages of a small model in one process."""

from __future__ import annotations

import queue
from collections.abc import Callable

import numpy as np

from pipecomp.errors import LinkTimeoutError, PeerLostError
from pipecomp.stages.link.transport import Moved, Outgoing, finished


class LoopbackTransport:
    """One end of a connection made by `loopback_pair`; packets are copied, so neither end sees the other's memory."""

    def __init__(self, peer: int, outbox: queue.SimpleQueue, inbox: queue.SimpleQueue, timeout_s: float) -> None:
        self.peer = peer
        self._outbox, self._inbox, self._timeout_s = outbox, inbox, timeout_s
        self.on_arrival: Callable[[np.ndarray], None] | None = None
        self.on_moved: Moved | None = None  # packets take no time here: nothing is told
        self._closed = False

    def send(self, packet: Outgoing) -> None:
        """Queue a packet; see Transport."""
        if self._closed:
            raise PeerLostError(f"the connection to rank {self.peer} is closed", self.peer)
        self._outbox.put(finished(packet).copy())

    def sending(self) -> bool:
        """No packet waits; see Transport."""
        return False

    def recv(self) -> np.ndarray:
        """Wait for the next packet; see Transport."""
        try:
            item = self._inbox.get(timeout=self._timeout_s)
        except queue.Empty:
            raise LinkTimeoutError(f"nothing from rank {self.peer} for {self._timeout_s:g} s") from None
        if isinstance(item, Exception):
            self._inbox.put(item)
            raise item
        if self.on_arrival is not None:
            self.on_arrival(item)
        return item

    def limit(self, most_bytes: int) -> None:
        """Do nothing: packets are in memory already."""

    def abort(self, lost_rank: int, reason: str) -> None:
        """Tell the peer that a rank is gone; see Transport."""
        self._outbox.put(PeerLostError(reason, lost_rank))

    def failed(self, error: Exception) -> None:
        """Nothing more will come; see Transport."""
        self._inbox.put(error)

    def failure(self, wait_s: float = 0.0) -> Exception | None:
        """Nothing but a closed end can fail, and `recv` says that."""
        return None

    def close(self) -> None:
        """End the connection in order; see Transport."""
        if not self._closed:
            self._closed = True
            self._outbox.put(PeerLostError(f"the peer of rank {self.peer} closed the connection", self.peer))


def loopback_pair(
    ranks: tuple[int, int] = (0, 1), timeout_s: float = 10.0
) -> tuple[LoopbackTransport, LoopbackTransport]:
    """Two joined ends: the first is rank `ranks[0]`'s, whose peer is `ranks[1]`."""
    a_to_b: queue.SimpleQueue = queue.SimpleQueue()
    b_to_a: queue.SimpleQueue = queue.SimpleQueue()
    return (
        LoopbackTransport(ranks[1], a_to_b, b_to_a, timeout_s),
        LoopbackTransport(ranks[0], b_to_a, a_to_b, timeout_s),
    )
