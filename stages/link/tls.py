"""A transport over a mesh of connections under TLS (pipecomp/tls): one stream for each link, both ways.

Frames of a link take turns with those of collectives on the same connection. The other side says when it takes packets,
and for how many, so nothing is sent to who is not ready; a packet longer than was agreed, or one too many, ends the
connection before memory is taken.
"""

from __future__ import annotations

import queue
import threading
import time

import numpy as np

from pipecomp.errors import LinkError, PeerLostError
from pipecomp.stages.link.delivery import Delivery
from pipecomp.stages.link.transport import Outgoing, Pacer
from pipecomp.tls.connection import Connection
from pipecomp.tls.frames import CONTENT_BYTES, HEADER_BYTES
from pipecomp.tls.mesh import Mesh
from pipecomp.tls.queues import Transfer

_RECORD_BYTES, _SEAL_BYTES = 1 << 14, 22  # of TLS: what it seals at once, and what that adds
_PACED_BYTES = 1 << 19  # held back at once, as gloo's frames are
_ABORT_S = 2.0
_REASON = 1000  # characters


class TlsTransport(Delivery):
    """One end of a link between two ranks of a mesh.

    mesh: of this process; both ends must make their transports in the same order. timeout_s: silence after which the
    peer counts as lost. pacer: slows down what is sent.
    """

    def __init__(self, mesh: Mesh, peer: int, *, timeout_s: float, pacer: Pacer | None = None) -> None:
        if peer not in mesh.connections:
            raise LinkError(f"a transport joins this rank ({mesh.rank}) and one other, not rank {peer}")
        super().__init__(peer)
        self._mesh = mesh
        self._connection: Connection = mesh.connections[peer]
        self._connection.timeout_s = timeout_s
        self._stream = mesh.next_stream(peer)
        self._pacer = pacer
        self._paced: queue.SimpleQueue[tuple[Outgoing, float] | None] = queue.SimpleQueue()
        self._holding = False  # whether a thread hands over packets that are held back, or waited for
        self._connection.open_stream(self._stream, self)

    # -- what links call

    def send(self, packet: Outgoing) -> None:
        """Queue a packet; see Transport."""
        self.check_open()
        self.queued(packet.size)
        if not (self._holding or self._pacer) and isinstance(packet, np.ndarray):
            self._hand_over(packet)
            return
        if not self._holding:
            self._holding = True
            threading.Thread(target=self._hold_back, name=f"pipecomp-pace-{self.peer}", daemon=True).start()
        self._paced.put((packet, time.monotonic()))

    def recv(self) -> np.ndarray:
        """Wait for the next packet; see Transport."""
        packet = super().recv()
        self._connection.release(self._stream, packet.size)
        return packet

    def sending(self) -> bool:
        """Tell whether a packet waits; see Transport."""
        return self._waiting > 0 and self._failure is None

    def abort(self, lost_rank: int, reason: str) -> None:
        """Tell the peer that a rank is gone; see Transport."""
        self._mesh.hurry()
        self._connection.send_notice(self._stream, {"lost": lost_rank, "reason": reason[:_REASON]})
        self._connection.flush(_ABORT_S)

    def close(self) -> None:
        """End the connection in order; see Transport."""
        if self._closing:
            return
        self._closing = True
        self._connection.drain(self._empty)
        self._paced.put(None)
        self._connection.send_notice(self._stream, {"closed": True})
        self._connection.flush(_ABORT_S)

    # -- sending

    def _hand_over(self, packet: np.ndarray) -> None:
        self._connection.send(self._stream, 0, memoryview(np.ascontiguousarray(packet))).add_done_callback(
            self._after_send
        )

    def _after_send(self, transfer: Transfer) -> None:
        self.gone(len(transfer.view))
        if transfer.error is None:
            self.moved("send", transfer.began, len(transfer.view), transfer.ended)

    def _hold_back(self) -> None:
        while (item := self._paced.get()) is not None:
            try:
                packet, queued = self.found(*item)
                for at in range(0, max(1, packet.size) if self._pacer else 0, _PACED_BYTES):
                    assert self._pacer is not None
                    self._pacer.hold(bytes_on_wire(min(_PACED_BYTES, packet.size - at)), queued)
                self._hand_over(packet)
            except Exception as error:
                self.failed(error)
                return

    def _empty(self, wait_s: float) -> bool:
        """Whether all packets have left, or none can any more."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting == 0 or self._failure is not None, wait_s)

    # -- what the connection's receiving thread calls

    def noted(self, note: dict) -> None:
        """Fail as the peer says that it has."""
        lost, reason = note.get("lost"), note.get("reason")
        if isinstance(lost, int) and isinstance(reason, str):
            self.failed(PeerLostError(f"{reason} (told by rank {self.peer})", lost))
        else:
            self.failed(PeerLostError(f"rank {self.peer} has ended its run and closed the connection", self.peer))


def bytes_on_wire(size: int) -> int:
    """What TCP carries for a packet of `size` bytes: with the beginnings of frames, and what TLS adds."""
    frames = max(1, -(-size // CONTENT_BYTES))
    records = frames + -(-size // _RECORD_BYTES)
    return size + frames * HEADER_BYTES + records * _SEAL_BYTES
