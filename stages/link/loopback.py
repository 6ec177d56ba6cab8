"""A transport inside one process, for tests and for running all stages of a small model in one process."""

from __future__ import annotations

import time

from pipecomp.errors import PeerLostError
from pipecomp.stages.link.delivery import Delivery
from pipecomp.stages.link.transport import Outgoing, finished


class LoopbackTransport(Delivery):
    """One end of a connection made by `loopback_pair`; packets are copied, so neither end sees the other's memory."""

    other: LoopbackTransport

    def send(self, packet: Outgoing) -> None:
        """Give the other end a packet; see Transport."""
        self.check_open()
        self.other.deliver(finished(packet).copy(), time.perf_counter())

    def sending(self) -> bool:
        """No packet waits; see Transport."""
        return False

    def abort(self, lost_rank: int, reason: str) -> None:
        """Tell the peer that a rank is gone; see Transport."""
        self.other.failed(PeerLostError(reason, lost_rank))

    def close(self) -> None:
        """End the connection in order; see Transport."""
        if not self._closing:
            self._closing = True
            self.abort(self.other.peer, f"the peer of rank {self.peer} closed the connection")


def loopback_pair(
    ranks: tuple[int, int] = (0, 1), timeout_s: float = 10.0
) -> tuple[LoopbackTransport, LoopbackTransport]:
    """Two joined ends: the first is rank `ranks[0]`'s, whose peer is `ranks[1]`."""
    a, b = LoopbackTransport(ranks[1], timeout_s), LoopbackTransport(ranks[0], timeout_s)
    a.other, b.other = b, a
    return a, b
