"""A transport over the mesh of TLS connections (pipecomp/tls): one stream of messages for each link, both directions.

Frames of a link and of collectives take turns on the same connection. The peer grants room for packets, and nothing is
sent without; a packet longer than agreed, or without room, ends the connection before memory is allocated.
"""

from __future__ import annotations

import queue
import threading
import time

import numpy as np

from pipecomp.errors import LinkError, PeerLostError, foreign_text
from pipecomp.stages.link.transport import OutgoingPacket, Pacer, TransportBase
from pipecomp.tls.connection import Connection
from pipecomp.tls.frames import CONTENT_BYTES, HEADER_BYTES
from pipecomp.tls.mesh import Mesh
from pipecomp.tls.receive_queue import Transfer

_RECORD_BYTES, _SEAL_BYTES = 1 << 14, 22  # of a TLS record, and its overhead
_PACED_BYTES = 1 << 19  # held back at once, like gloo's frames
_ABORT_S = 2.0
_REASON = 1000  # characters


class TlsTransport(TransportBase):
    """One end of a link between two ranks of a mesh.

    Args:
        mesh: Mesh of this process; both ends must make their transports in the same order.
        peer: Global rank at the other end.
        timeout_s: Silence after which the peer counts as lost.
        pacer: Slows down sending.
    """

    def __init__(self, mesh: Mesh, peer: int, *, timeout_s: float, pacer: Pacer | None = None) -> None:
        if peer not in mesh.connections:
            raise LinkError(f"a transport joins this rank ({mesh.rank}) and one other, not rank {peer}")
        super().__init__(peer)
        self._mesh = mesh
        self._connection: Connection = mesh.connections[peer]
        self._connection.timeout_s = timeout_s
        self.streams = len(self._connection.subflows)
        self._stream = mesh.next_stream(peer)
        self._pacer = pacer
        self._held: queue.SimpleQueue[tuple[OutgoingPacket, float] | None] = queue.SimpleQueue()  # packet, time
        self._holding = False  # whether a thread sends packets after holding them back or waiting for them
        self._connection.open_stream(self._stream, self)

    # -- called by links

    def send(self, packet: OutgoingPacket) -> None:
        self.check_open()
        self.count_queued(packet.size)
        if not (self._holding or self._pacer) and isinstance(packet, np.ndarray):
            self._send_now(packet)
            return
        if not self._holding:
            self._holding = True
            threading.Thread(target=self._send_held, name=f"pipecomp-pace-{self.peer}", daemon=True).start()
        self._held.put((packet, time.monotonic()))

    def use_streams(self, count: int) -> None:
        """Spread the packets, and all long messages to this peer, over `count` TCP connections."""
        if count != len(self._connection.subflows):
            self._connection.use_subflows(count)
        self.streams = count

    def recv(self) -> np.ndarray:
        packet = super().recv()
        self._connection.release(self._stream, packet.size)
        return packet

    def sending(self) -> bool:
        return self._waiting > 0 and self._failure is None

    def abort(self, lost_rank: int, reason: str) -> None:
        self._mesh.hurry()
        self._connection.send_notice(self._stream, {"lost": lost_rank, "reason": reason[:_REASON]})
        self._connection.flush(_ABORT_S)

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._connection.drain(self._empty)
        if len(self._connection.subflows) > 1:  # the notice must not overtake pieces on the other streams
            self._connection.drain(self._connection.flush)
        self._held.put(None)
        self._connection.send_notice(self._stream, {"closed": True})
        self._connection.flush(_ABORT_S)

    # -- sending

    def _send_now(self, packet: np.ndarray) -> None:
        self._connection.send(self._stream, 0, memoryview(np.ascontiguousarray(packet))).add_done_callback(
            self._after_send
        )

    def _after_send(self, transfer: Transfer) -> None:
        self.count_left(len(transfer.view))
        if transfer.error is None:
            self.report_transfer("send", transfer.began, len(transfer.view), transfer.ended)

    def _send_held(self) -> None:
        while (item := self._held.get()) is not None:
            try:
                packet, queued = self.finish_queued(*item)
                for at in range(0, max(1, packet.size) if self._pacer else 0, _PACED_BYTES):
                    assert self._pacer is not None
                    self._pacer.hold(bytes_on_wire(min(_PACED_BYTES, packet.size - at)), queued)
                self._send_now(packet)
            except Exception as error:
                self.failed(error)
                return

    def _empty(self, wait_s: float) -> bool:
        """Wait until all packets have left or none can; return False after `wait_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting == 0 or self._failure is not None, wait_s)

    # -- called by the connection's receiving thread

    def noted(self, note: dict) -> None:
        """Fail with the reason that the peer has sent."""
        lost, reason = note.get("lost"), note.get("reason")
        if isinstance(lost, int) and isinstance(reason, str):
            self.failed(PeerLostError(f"{foreign_text(reason)} (told by rank {self.peer})", lost))
        else:
            self.failed(PeerLostError(f"rank {self.peer} has ended its run and closed the connection", self.peer))


def bytes_on_wire(size: int) -> int:
    """Return the bytes on TCP of a packet of `size` bytes, with frame headers and TLS records."""
    frames = max(1, -(-size // CONTENT_BYTES))
    records = frames + -(-size // _RECORD_BYTES)
    return size + frames * HEADER_BYTES + records * _SEAL_BYTES
