"""A transport inside one process, for tests and for running all stages of a small model in one process."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

import numpy as np

from pipecomp.errors import LinkTimeoutError, PeerLostError
from pipecomp.stages.link.transport import Traffic


class LoopbackTransport:
    """One end of a connection made by `loopback_pair`; packets are copied, so neither end sees the other's memory."""

    def __init__(self, peer: int, outbox: queue.SimpleQueue, inbox: queue.SimpleQueue, timeout_s: float) -> None:
        self.peer = peer
        self._outbox, self._inbox, self._timeout_s = outbox, inbox, timeout_s
        self._callback: Callable[[np.ndarray], None] | None = None
        self._sent = self._received = 0
        self._wait_s = 0.0
        self._closed = False

    def send(self, packet: np.ndarray) -> None:
        if self._closed:
            raise PeerLostError(f"the connection to rank {self.peer} is closed", self.peer)
        self._sent += packet.size
        self._outbox.put(packet.copy())

    def recv(self) -> np.ndarray:
        began = time.perf_counter()
        try:
            item = self._inbox.get(timeout=self._timeout_s)
        except queue.Empty:
            raise LinkTimeoutError(f"nothing from rank {self.peer} for {self._timeout_s:g} s") from None
        finally:
            self._wait_s += time.perf_counter() - began
        if isinstance(item, PeerLostError):
            self._inbox.put(item)
            raise item
        self._received += item.size
        if self._callback is not None:
            self._callback(item)
        return item

    def on_arrival(self, callback: Callable[[np.ndarray], None]) -> None:
        self._callback = callback

    def on_moved(self, record: Callable[[str, float, float, int | None, int], None]) -> None:
        """Packets take no time here: there is nothing to record."""

    def limit(self, most_bytes: int) -> None:
        """Packets are in memory already."""

    def flush(self) -> None:
        """Nothing is ever under way."""

    def abort(self, lost_rank: int, reason: str) -> None:
        self._outbox.put(PeerLostError(reason, lost_rank))

    def failure(self, wait_s: float = 0.0) -> Exception | None:
        """Nothing but a closed end can fail, and `recv` says that."""
        return None

    def traffic(self) -> Traffic:
        return Traffic(self._sent, self._received, 0.0, self._wait_s)

    def close(self) -> None:
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
