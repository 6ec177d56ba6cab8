"""Transports move packets between two neighboring ranks: in order, both directions at once.

`Transport` is the seam between links and networks. `send` never blocks on the network, `recv` waits; both raise what
ended the connection. `TransportBase` holds what all implementations share: the receive queue, back-pressure for
senders, and the first error. `LoopbackTransport` joins two ends in one process; gloo.py and tls.py join processes.
`ReceiveStaging` copies packets to the device as they arrive.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pipecomp.codecs.wire import MAX_SAMPLES, PacketHeader, PacketKind, parse, verify
from pipecomp.errors import LinkError, LinkTimeoutError, PeerLostError
from pipecomp.kernels.staging import Copy, Staging
from pipecomp.tls.frames import ROOM_BYTES

MAX_PACKET_BYTES = 1 << 34  # until both ends have agreed on less
_AT_ONCE_S = 1e-3  # waiting for a finished packet takes less


class Pacer(Protocol):
    """Slows a connection down to the speed of another one, for measurements."""

    def hold(self, size: int, ready: float) -> None:
        """Return when `size` bytes, ready to leave at the monotonic time `ready`, would have arrived."""


PacerTo = Callable[[int], Pacer | None]  # from a rank to the pacer of the connection to it
TransferCallback = Callable[[str, float, float, int | None, int], None]


def unpaced(rank: int) -> None:
    """Slow no connection down: a PacerTo."""


class PendingPacket(Protocol):
    """A packet on its way from a device; the sending thread waits for it."""

    @property
    def size(self) -> int:
        """Bytes of the packet; an upper bound until it is finished."""

    def finish(self) -> np.ndarray:
        """Wait for the packet, uint8 [n].

        Raises the reason why it must not be sent; the connection then sends nothing more.
        """


OutgoingPacket = np.ndarray | PendingPacket


def finish_packet(packet: OutgoingPacket) -> np.ndarray:
    """Return the packet's bytes, after waiting for them if they are pending."""
    return packet if isinstance(packet, np.ndarray) else packet.finish()


class Transport(Protocol):
    """One end of a connection between two ranks.

    Attributes:
        peer: Global rank at the other end.
        on_arrival: Called with every packet on the receiving thread, before `recv` returns it.
        on_transfer: Called as `on_transfer("send" or "receive", start, end, None, bytes)` for every packet; times of
            `time.perf_counter`.
        streams: TCP connections that packets are spread over.
        waiting_bytes: Bytes of packets that wait to leave.
    """

    peer: int
    streams: int
    waiting_bytes: int
    on_arrival: Callable[[np.ndarray], None] | None
    on_transfer: TransferCallback | None

    def send(self, packet: OutgoingPacket) -> None:
        """Queue a packet, uint8 [n], without waiting for the transfer. The caller must not modify it afterwards.

        If a pending packet cannot be finished, the next call of `send` or `recv` raises its error.
        """

    def wait_for_room(self) -> None:
        """Block while packets of 256 MiB or more wait to leave, for callers that never wait for the peer.

        Raises the error that ended the connection.
        """

    def use_streams(self, count: int) -> None:
        """Spread packets over `count` TCP connections from now on; the other end must call this with the same number.

        All earlier packets of both ends must have been received. Raises LinkError if the numbers differ.
        """

    def sending(self) -> bool:
        """Return True while a packet waits to leave or is leaving."""

    def recv(self) -> np.ndarray:
        """Wait for the next packet, uint8 [n].

        Raises LinkTimeoutError after the transport's time of silence, PeerLostError if the peer is gone.
        """

    def limit(self, max_bytes: int) -> None:
        """Refuse packets of more bytes from now on: WireError before memory is allocated."""

    def abort(self, lost_rank: int, reason: str) -> None:
        """Notify the peer, if it can be reached, that `lost_rank` is gone; its next `recv` raises PeerLostError."""

    def failed(self, error: Exception) -> None:
        """Make every later call raise this error, unless another came first; a waiting `recv` raises it too."""

    def failure(self, wait_s: float = 0.0) -> Exception | None:
        """Return the error that ended the connection, if any, waiting up to `wait_s` seconds for one."""

    def close(self) -> None:
        """Close the connection in order; safe to call twice."""


class TransportBase:
    """Receive queue, back-pressure for senders, and the first error of a Transport.

    A subclass calls `check_open` and `count_queued` in `send`, `finish_queued` and `count_left` where it sends,
    `deliver` on its receiving thread, and `failed` anywhere.

    Args:
        peer: Global rank at the other end.
        silence_s: Timeout of `recv`; None if the subclass detects silence.
    """

    def __init__(self, peer: int, silence_s: float | None = None) -> None:
        self.peer, self.most_bytes = peer, MAX_PACKET_BYTES
        self.on_arrival: Callable[[np.ndarray], None] | None = None
        self.on_transfer: TransferCallback | None = None
        self._silence_s = silence_s
        self._inbox: queue.SimpleQueue[np.ndarray | Exception] = queue.SimpleQueue()
        self.streams = 1
        self._waiting, self.waiting_bytes = 0, 0  # packets that have not left
        self._changed = threading.Condition()  # guards the counts above, and `_failure`
        self._failure: Exception | None = None
        self._failed = threading.Event()
        self._closing = False

    def recv(self) -> np.ndarray:
        try:
            item = self._inbox.get(timeout=self._silence_s)
        except queue.Empty:
            raise LinkTimeoutError(f"nothing from rank {self.peer} for {self._silence_s:g} s", self.peer) from None
        if isinstance(item, Exception):
            self._inbox.put(item)
            raise item
        return item

    def wait_for_room(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.waiting_bytes < ROOM_BYTES or self._failure is not None)
        self.check_open()

    def limit(self, max_bytes: int) -> None:
        self.most_bytes = max_bytes

    def failure(self, wait_s: float = 0.0) -> Exception | None:
        self._failed.wait(wait_s)
        return self._failure

    def failed(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
            self._failed.set()
            self._inbox.put(error)
        with self._changed:
            self._changed.notify_all()

    def check_open(self) -> None:
        """Raise the error that ended the connection; LinkError if this end closed it."""
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise LinkError(f"the connection to rank {self.peer} is closed")

    def count_queued(self, size: int) -> None:
        """Count a packet that waits to leave."""
        with self._changed:
            self._waiting += 1
            self.waiting_bytes += size

    def finish_queued(self, outgoing: OutgoingPacket, queued: float) -> tuple[np.ndarray, float]:
        """Wait for a queued packet, which may turn out shorter than its `size`.

        Returns the packet and when it was ready, of `time.monotonic`: `queued`, or now if it had to be waited for. A
        paced connection carries nothing earlier, because a GPU may still compute a packet when it is queued.
        """
        size, began = outgoing.size, time.monotonic()
        packet = finish_packet(outgoing)
        ended = time.monotonic()
        with self._changed:
            self.waiting_bytes -= size - packet.size
        return packet, ended if ended - began > _AT_ONCE_S else queued

    def count_left(self, size: int) -> None:
        """Count a packet that has left."""
        with self._changed:
            self._waiting -= 1
            self.waiting_bytes -= size
            self._changed.notify_all()

    def deliver(self, packet: np.ndarray, began: float) -> None:
        """Queue a received packet, uint8 [n], for `recv`. began: arrival of its first byte, of perf_counter."""
        if self._closing:
            return
        self.report_transfer("receive", began, packet.size)
        if self.on_arrival is not None:
            try:
                self.on_arrival(packet)
            except Exception as error:  # surfaces on the thread that calls `recv`
                self.failed(error)
                return
        self._inbox.put(packet)

    def report_transfer(self, direction: str, began: float, size: int, ended: float | None = None) -> None:
        """Pass a packet's transfer to `on_transfer`. ended: of perf_counter; None for now."""
        if self.on_transfer is not None:
            self.on_transfer(direction, began, time.perf_counter() if ended is None else ended, None, size)


class LoopbackTransport(TransportBase):
    """One end of a connection inside one process, made by `loopback_pair`; packets are copied."""

    other: LoopbackTransport

    def send(self, packet: OutgoingPacket) -> None:
        self.check_open()
        self.other.deliver(finish_packet(packet).copy(), time.perf_counter())

    def use_streams(self, count: int) -> None:
        if count != 1:
            raise LinkError(f"a connection inside one process has 1 stream, not {count}")

    def sending(self) -> bool:
        return False

    def abort(self, lost_rank: int, reason: str) -> None:
        self.other.failed(PeerLostError(reason, lost_rank))

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self.abort(self.other.peer, f"the peer of rank {self.peer} closed the connection")


def loopback_pair(
    ranks: tuple[int, int] = (0, 1), timeout_s: float = 10.0
) -> tuple[LoopbackTransport, LoopbackTransport]:
    """Make two joined ends: the first belongs to rank `ranks[0]`, the second to `ranks[1]`."""
    a, b = LoopbackTransport(ranks[1], timeout_s), LoopbackTransport(ranks[0], timeout_s)
    a.other, b.other = b, a
    return a, b


class ReceivedPacket(NamedTuple):
    """A packet and its header, parsed once."""

    packet: np.ndarray
    header: PacketHeader
    payload: np.ndarray  # a view into `packet`
    copy: Copy | None = None  # of the whole packet to the device, under way


class ReceiveStaging:
    """Copies each packet of a transport to the stage's device as it arrives, before its turn.

    Attributes:
        max_samples: Largest number of samples in a packet; more raise WireError before they are parsed.
        on_header: Called with the header of every arriving packet, on the receiving thread.
    """

    def __init__(self, transport: Transport, staging: Staging) -> None:
        self.max_samples = MAX_SAMPLES
        self.on_header: Callable[[PacketHeader], None] | None = None
        self._staging = staging
        self._arrived: dict[int, ReceivedPacket] = {}  # by the packet's identity, unique while the packet is in here
        transport.on_arrival = self._stage

    def _stage(self, packet: np.ndarray) -> None:
        if self._staging.immediate and self.on_header is None:
            return
        header, payload = parse(packet, max_samples=self.max_samples)
        copy = None
        if not self._staging.immediate and header.kind is not PacketKind.INVENTORY:  # the host reads inventories
            copy = self._staging.to_device(_tensor(packet))
        self._arrived[id(packet)] = ReceivedPacket(packet, header, payload, copy)
        if self.on_header is not None:
            self.on_header(header)

    def open(self, packet: np.ndarray) -> ReceivedPacket:
        """Parse a packet that `recv` returned, unless it was parsed on arrival, and verify its checksum.

        Raises WireError for anything that is not a packet.
        """
        received = self._arrived.pop(id(packet), None)
        if received is None:
            received = ReceivedPacket(packet, *parse(packet, max_samples=self.max_samples))
        verify(packet)
        return received

    def payload(self, received: ReceivedPacket) -> Tensor:
        """Return the payload on the device: uint8 [bytes], at any address.

        What the device computes from here on waits for the copy; this thread does not.
        """
        payload = received.payload
        if received.copy is None:  # it arrived before the device was known
            return self._staging.to_device(_tensor(payload)).wait()
        start = payload.ctypes.data - received.packet.ctypes.data
        return received.copy.wait()[start : start + payload.size]


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())
