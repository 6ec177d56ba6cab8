"""Wire format between two ranks, inside TLS: frames with a fixed header.

    frame: kind u8, 3 zero bytes, content length u32, stream u64, tag u64, message length u64, content (little-endian)

TLS protects frames against strangers: none can be read, changed, dropped or repeated. Frames from a rank of the run are
checked here and by the receiver. A stream's messages travel as DATA frames, between those of other streams.

A connection with several subflows, TCP connections beside each other, carries long messages in pieces over all of them.
The first subflow carries everything else, a STRIPED frame at the beginning of each such message among it; the others
carry STRIPE and ACK frames only. With one subflow there are neither STRIPED, STRIPE nor SUBFLOWS frames.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from pipecomp.errors import WireError

VERSION = 4
MAX_SUBFLOWS = 8
CONTENT_BYTES = 1 << 17  # of a DATA frame: 10 ms at 100 Mbit/s, which other streams' frames wait behind it
STORE_BYTES = 1 << 22  # of a request to the key-value store, and of its reply
NOTICE_BYTES = 1 << 14  # 1000 characters of up to 12 bytes in JSON, and a margin
STRIPE_UNIT = 1 << 14  # bytes of a TLS record; pieces of a striped message begin at multiples of it
EAGER_BYTES = 1 << 16  # messages up to this length are sent before the receiver has posted its receive
FIRST_LINK_STREAM = 1 << 60  # streams from here on belong to links; they need credit before anything is sent
ROOM_BYTES = 1 << 28  # receive window of an open stream
_HEADER = struct.Struct("<BxxxIQQQ")
HEADER_BYTES = _HEADER.size


class FrameKind(enum.IntEnum):
    """Kind of a frame. All kinds but DATA and STRIPE are sent before any of these that waits."""

    DATA = 1  # a piece of a message
    READY = 2  # a receive of `total` bytes is posted for this stream and tag
    CREDIT = 3  # the receive window of this stream grows by `total` bytes, counted as `queues.window_cost` does
    NOTICE = 4  # JSON for the stream's user: the reason for its end
    STORE_REQUEST = 5  # JSON: a request to the key-value store, numbered by `tag`
    STORE_REPLY = 6  # JSON: its reply
    ACK = 7  # `total` numbered frames have arrived; also the keep-alive
    CLOSE = 8  # the last frame; JSON with the reason, empty at the orderly end of a run
    STRIPED = (
        9  # a message of `total` bytes begins that travels in STRIPE frames; both ends count these messages from 0
    )
    STRIPE = 10  # a piece of the striped message number `stream`, from its byte `tag` on
    SUBFLOWS = 11  # JSON: number of subflows, and the secret that admits further ones

    @property
    def numbered(self) -> bool:
        """True if frames of this kind are kept until acknowledged, and sent again on a new connection."""
        return self not in (FrameKind.ACK, FrameKind.CLOSE)


_MAX_CONTENT = {
    FrameKind.DATA: CONTENT_BYTES,
    FrameKind.NOTICE: NOTICE_BYTES,
    FrameKind.STORE_REQUEST: STORE_BYTES,
    FrameKind.STORE_REPLY: STORE_BYTES,
    FrameKind.CLOSE: NOTICE_BYTES,
    FrameKind.STRIPE: CONTENT_BYTES,
    FrameKind.SUBFLOWS: NOTICE_BYTES,
}


class FrameHeader(NamedTuple):
    """Header of a frame. size: bytes of content; total: bytes of the whole message."""

    kind: FrameKind
    size: int
    stream: int = 0
    tag: int = 0
    total: int = 0

    def pack(self) -> bytes:
        """Encode the header."""
        return _HEADER.pack(*self)

    @classmethod
    def unpack(cls, data: memoryview) -> FrameHeader:
        """Decode a header; WireError if its kind is unknown or its content too long for its kind."""
        kind, size, stream, tag, total = _HEADER.unpack(data)
        try:
            known = FrameKind(kind)
        except ValueError:
            raise WireError(f"a frame of unknown kind {kind}") from None
        limit = _MAX_CONTENT.get(known, 0)
        if size > limit:
            raise WireError(f"a frame {known.name} with {size} bytes, allowed: {limit}")
        return cls(known, size, stream, tag, total)
