"""What transports share: packets that have come, for `recv`; room for those that go; and what ended the connection."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import numpy as np

from pipecomp.errors import LinkError, LinkTimeoutError
from pipecomp.stages.link.transport import MAX_PACKET_BYTES, Moved, Outgoing, finished_at
from pipecomp.tls.frames import ROOM_BYTES


class Delivery:
    """The half of a Transport that looks at this process; the other half moves bytes.

    That half calls `deliver` on its receiving thread, `check_open` before it sends, `queued`, `found`, `gone` and
    `failed`.
    silence_s: how long `recv` waits; None where that thread notices silence.
    """

    def __init__(self, peer: int, silence_s: float | None = None) -> None:
        self.peer, self.most_bytes = peer, MAX_PACKET_BYTES
        self._silence_s = silence_s
        self.on_arrival: Callable[[np.ndarray], None] | None = None
        self.on_moved: Moved | None = None
        self._inbox: queue.SimpleQueue[np.ndarray | Exception] = queue.SimpleQueue()
        self._waiting, self._waiting_bytes = 0, 0  # packets that have not left
        self._changed = threading.Condition()  # what waits, or whether this end has failed
        self._failure: Exception | None = None
        self._failed = threading.Event()
        self._closing = False

    def recv(self) -> np.ndarray:
        """Wait for the next packet; see Transport."""
        try:
            item = self._inbox.get(timeout=self._silence_s)
        except queue.Empty:
            raise LinkTimeoutError(f"nothing from rank {self.peer} for {self._silence_s:g} s") from None
        if isinstance(item, Exception):
            self._inbox.put(item)
            raise item
        return item

    def wait_for_room(self) -> None:
        """Wait until others may be queued; see Transport."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting_bytes < ROOM_BYTES or self._failure is not None)
        self.check_open()

    def limit(self, most_bytes: int) -> None:
        """Take no packet of more bytes; see Transport."""
        self.most_bytes = most_bytes

    def failure(self, wait_s: float = 0.0) -> Exception | None:
        """Find what ended the connection; see Transport."""
        self._failed.wait(wait_s)
        return self._failure

    def check_open(self) -> None:
        """Raise what ended the connection, LinkError if this end did."""
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise LinkError(f"the connection to rank {self.peer} is closed")

    def queued(self, size: int) -> None:
        """A packet of so many bytes waits to leave."""
        with self._changed:
            self._waiting += 1
            self._waiting_bytes += size

    def found(self, outgoing: Outgoing, queued: float) -> tuple[np.ndarray, float]:
        """Wait for a packet that waits to leave, and may turn out to be shorter than it said; see `finished_at`."""
        said = outgoing.size
        packet, queued = finished_at(outgoing, queued)
        with self._changed:
            self._waiting_bytes -= said - packet.size
        return packet, queued

    def gone(self, size: int) -> None:
        """A packet of so many bytes waits no more."""
        with self._changed:
            self._waiting -= 1
            self._waiting_bytes -= size
            self._changed.notify_all()

    def deliver(self, packet: np.ndarray, began: float) -> None:
        """A packet has come, uint8 [n]; its first byte at `began` of perf_counter."""
        if self._closing:
            return
        self.moved("receive", began, packet.size)
        if self.on_arrival is not None:
            try:
                self.on_arrival(packet)
            except Exception as error:  # the packet itself decides later, on the thread that asks for it
                self.failed(error)
                return
        self._inbox.put(packet)

    def moved(self, what: str, began: float, size: int, ended: float | None = None) -> None:
        """Tell `on_moved` of a packet that has gone or come; ended: of perf_counter, now by default."""
        if self.on_moved is not None:
            self.on_moved(what, began, time.perf_counter() if ended is None else ended, None, size)

    def failed(self, error: Exception) -> None:
        """Nothing more will come; see Transport."""
        if self._failure is None:
            self._failure = error
            self._failed.set()
            self._inbox.put(error)
        with self._changed:
            self._changed.notify_all()
