"""Fuzz targets of a mesh: frames, notices of failures, and the key-value store, as a rank of the run could send them.

A connection's receiving half gets frames as the bytes say, from a stream that is a piece of memory. A finding is any
exception but the project's own, which would end the receiving thread in another rank's name, and any allocation above
what the limits allow.
"""

from __future__ import annotations

import contextlib
import json
import queue
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch.distributed as dist

from pipecomp.distributed.heartbeat import Heartbeat, HeartbeatEntry
from pipecomp.errors import PeerLostError, PipecompError, WireError
from pipecomp.stages.link.tls import TlsTransport
from pipecomp.stages.link.transport import TransportBase
from pipecomp.tls.connection import Connection, _Subflow
from pipecomp.tls.frames import CONTENT_BYTES, EAGER_BYTES, FIRST_LINK_STREAM, STRIPE_UNIT, FrameHeader, FrameKind
from pipecomp.tls.receive_queue import MAX_UNEXPECTED_BYTES, ReceiveQueue
from pipecomp.tls.send_queue import MAX_UNACKNOWLEDGED_BYTES, SendQueue
from pipecomp.tls.store import ENTRY_BYTES, MAX_BYTES, KeyValueTable

MOST_PACKET = 1 << 15
EXPECTED = ((1, 0, 100), (1, 0, 64), (2, 5, EAGER_BYTES + 9))  # receives that are ready: stream, tag, bytes
_KINDS = tuple(FrameKind)
_SIZES = (0, 1, 16, 64, 100, 4095, 4096, EAGER_BYTES, EAGER_BYTES + 9, 1 << 20, 1 << 40, (1 << 64) - 1)
_STRIPED = (STRIPE_UNIT, STRIPE_UNIT + 5, 1 << 15, EAGER_BYTES + 9, 1 << 40)
_PIECES = (0, 5, STRIPE_UNIT, 2 * STRIPE_UNIT, EAGER_BYTES)
_HEAD = struct.Struct("<BBBBH")


class Stream:
    """A SecureStream that has these bytes and then ends."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def receive_into(self, view: memoryview) -> None:
        piece = self._data[self._at : self._at + len(view)]
        self._at += len(view)
        if len(piece) < len(view):
            raise EOFError
        view[:] = piece


class Resumable:
    """The part of a resumable stream that receiving uses."""

    timeout_s = 0.0  # a piece of a message that has not begun is not waited for

    def __init__(self) -> None:
        self.received, self.last_frame = 0, 0.0


class ReceivingSubflow(_Subflow):
    """The receiving half of a subflow, without threads: frames come when the target says so."""

    def __init__(self, connection: Connection, number: int) -> None:
        self.number, self._connection = number, connection
        self._send_queue, self._receive_queue = connection._send_queue, connection._receive_queue
        self.acknowledged, self.ack_due, self.resumable = 0, False, Resumable()  # type: ignore[assignment]

    def take(self, data: bytes) -> Exception:
        """Return the error that ends the connection."""
        try:
            self.receive_from(Stream(data))  # type: ignore[arg-type]
        except (PipecompError, EOFError) as error:
            return error


class Receiving(Connection):
    """The receiving half of a connection of two subflows."""

    def __init__(self, called: Callable[[Connection, int, Any], None]) -> None:
        self.peer, self.failure = 1, None
        self._send_queue, self._receive_queue = SendQueue(), ReceiveQueue()
        self._agreements = queue.SimpleQueue()
        self._on_store_request, self._on_store_reply = called, lambda number, value: None
        self.subflows = [ReceivingSubflow(self, number) for number in range(2)]
        self._send_queue.use_subflows(2)

    def take(self, data: bytes) -> Exception:
        """Return the error that ends the connection, from the first subflow."""
        return self.subflows[0].take(data)  # type: ignore[attr-defined]


class End(TlsTransport):
    """A link's end as its connection's receiving thread sees it."""

    def __init__(self) -> None:
        TransportBase.__init__(self, 1)
        self.limit(MOST_PACKET)


def fuzz_frames(data: bytes) -> None:
    """Frames of a rank of the run: as the bytes are, and repaired."""
    for frames in (data, repaired_frames(data)):
        table, end = KeyValueTable(), End()
        here = Receiving(table.serve)
        here.open_stream(FIRST_LINK_STREAM + 1, end)
        for stream, tag, size in EXPECTED:
            here.receive(stream, tag, memoryview(bytearray(size)))
        here.send(2, 7, memoryview(bytes(EAGER_BYTES + 9)))
        here._send_queue.next_frames(0, 0.0)
        str(here.take(frames))
        pieces = FrameHeader(FrameKind.STRIPED, 0, FIRST_LINK_STREAM + 1, 0, 2 * STRIPE_UNIT)
        with contextlib.suppress(WireError):  # the window may be used up
            here._receive_queue.begin_striped(pieces)
        str(here.subflows[1].take(frames))  # type: ignore[attr-defined]
        here._receive_queue.check_progress(60.0)
        while not end._inbox.empty():
            came = end._inbox.get()
            assert isinstance(came, Exception) or came.size <= MOST_PACKET, "a packet above the limit"
        assert here._receive_queue._unexpected_bytes <= MAX_UNEXPECTED_BYTES
        assert here._receive_queue._window[FIRST_LINK_STREAM + 1] > -MOST_PACKET - EAGER_BYTES
        assert here._send_queue._unacknowledged_bytes <= MAX_UNACKNOWLEDGED_BYTES
        assert table._bytes <= MAX_BYTES


def fuzz_notices(data: bytes) -> None:
    """A rank's reports of a failure: on a link and in its heartbeat."""
    with contextlib.suppress(ValueError, RecursionError):
        note = json.loads(data.decode(errors="replace"))
        if isinstance(note, dict):
            end = End()
            end.noted(note)
            found = end.failure()
            assert isinstance(found, PeerLostError)
            assert str(found)
    store = dist.HashStore()
    watch = Heartbeat(0, 1, store)  # alone: without threads
    watch.engine, watch._state, watch._others = 1, "", [1]
    for text in (data, b"1 1 " + data, b"1 1 stopped " + data):
        watch._entries = {1: HeartbeatEntry.parse(text, 1, 1)}
        reported = watch._reported()
        assert reported is None or isinstance(reported.rank, int)
        store.set("pipecomp/alive/1", np.frombuffer(text, dtype=np.uint8).tobytes().decode("latin-1"))
        lost = watch.find_lost(0.0)
        assert lost is None or isinstance(lost, PeerLostError)
        assert lost is None or "key-value store" not in str(lost), "rank 0 is not gone"


def fuzz_keystore(data: bytes) -> None:
    """Questions of a rank to the key-value store, one a line: as JSON, or as the arguments of one that exists."""
    table = KeyValueTable()
    here = Receiving(table.serve)
    table.set("pipecomp/alive/0", b"rank 0's", 0)
    for line in data.split(b"\n")[:32]:
        for text in (line, b'["set", "pipecomp/alive/0", ' + line + b"]", b'["add", "n", ' + line + b"]"):
            frame = FrameHeader(FrameKind.STORE_REQUEST, len(text), tag=1).pack() + text
            error = here.take(frame)
            assert isinstance(error, (WireError, EOFError)), error
    assert table.get(["pipecomp/alive/0"]) == [b"rank 0's"], "another rank wrote rank 0's key"
    assert table._bytes == sum(len(key) + ENTRY_BYTES + len(value) for key, value in table._values.items())


def repaired_frames(data: bytes) -> bytes:
    """Cut into frames that exist: 6 bytes choose kind, stream, tag, message's length and content's, then content."""
    out, at = bytearray(), 0
    while at + _HEAD.size <= len(data) and len(out) < 4 * CONTENT_BYTES:
        kind, stream, tag, total, size = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        known = _KINDS[kind % len(_KINDS)]
        if known is FrameKind.STRIPE:
            piece, whole = _PIECES[size % len(_PIECES)], _STRIPED[total % len(_STRIPED)]
            out += FrameHeader(known, piece, stream % 4, tag % 8 * STRIPE_UNIT // 2, whole).pack() + bytes(piece)
            continue
        where = FIRST_LINK_STREAM + 1 if stream % 4 == 0 else stream % 4
        lengths = _STRIPED if known is FrameKind.STRIPED else _SIZES
        length = lengths[total % len(lengths)]
        if known in (FrameKind.READY, FrameKind.CREDIT, FrameKind.ACK, FrameKind.STRIPED):
            out += FrameHeader(known, 0, where, tag % 8, length).pack()
            continue
        content = data[at : at + min(size % 5000, len(data) - at)]
        at += len(content)
        out += FrameHeader(known, len(content), where, tag % 8, length if total % 2 else len(content)).pack() + content
    return bytes(out)


MESH_TARGETS: dict[str, Callable[[bytes], None]] = {
    "frames": fuzz_frames,
    "notices": fuzz_notices,
    "keystore": fuzz_keystore,
}
