"""What travels between two ranks inside TLS: frames with a fixed beginning.

    frame: kind u8, 3 bytes zero, content bytes u32, stream u64, tag u64, bytes of the whole message u64, content

TLS keeps frames from being read, changed, left out or repeated; what a rank of the run itself sends is checked here and
by who receives it. A message of a stream travels as DATA frames, between those of other streams.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from pipecomp.errors import WireError

VERSION = 3
CONTENT_BYTES = 1 << 17  # of a DATA frame: 10 ms at 100 Mbit/s, which is how long others wait behind it
CALL_BYTES = 1 << 22  # of a question to the key-value store, and of its answer
NOTE_BYTES = 1 << 14  # 1000 characters of up to 12 bytes in JSON, and what is around them
EAGER_BYTES = 1 << 16  # a message this short is sent before the receiver has asked for it
LINKS = 1 << 60  # streams from here on are links': nothing is sent on them before they are open, all with one tag
ROOM_BYTES = 1 << 28  # of an open stream's messages that may wait here to be taken
_EACH_BYTES = 256  # what keeping a message takes beside its content
_HEADER = struct.Struct("<BxxxIQQQ")
HEADER_BYTES = _HEADER.size


class Kind(enum.IntEnum):
    """Of a frame. All but DATA is sent before any DATA that waits."""

    DATA = 1  # a piece of a message
    ASK = 2  # a receive of `total` bytes is ready for a message of this stream and tag
    OPEN = 3  # there is room for `total` more bytes of messages of this stream, each as `room_for` says
    NOTE = 4  # JSON for who uses the stream: why it ends
    CALL = 5  # JSON: a question to the key-value store; `tag` numbers it
    ANSWER = 6  # JSON: its answer
    HAVE = 7  # `total` numbered frames have come so far; also sent when there is nothing to say
    BYE = 8  # nothing comes after this; JSON says why, unless the run is over

    @property
    def numbered(self) -> bool:
        """Whether frames of this kind are kept until they are acknowledged, and sent again on a new connection."""
        return self not in (Kind.HAVE, Kind.BYE)


_MOST = {
    Kind.DATA: CONTENT_BYTES,
    Kind.NOTE: NOTE_BYTES,
    Kind.CALL: CALL_BYTES,
    Kind.ANSWER: CALL_BYTES,
    Kind.BYE: NOTE_BYTES,
}


class Header(NamedTuple):
    """The beginning of a frame. size: bytes of content; total: of the message that it belongs to."""

    kind: Kind
    size: int
    stream: int = 0
    tag: int = 0
    total: int = 0


def room_for(total: int) -> int:
    """What both ends count for a message of `total` bytes that waits."""
    return total + _EACH_BYTES


def pack(header: Header) -> bytes:
    """As bytes."""
    return _HEADER.pack(*header)


def unpack(data: memoryview) -> Header:
    """WireError for a kind that does not exist, or content longer than its kind has."""
    kind, size, stream, tag, total = _HEADER.unpack(data)
    try:
        known = Kind(kind)
    except ValueError:
        raise WireError(f"a frame of unknown kind {kind}") from None
    most = _MOST.get(known, 0)
    if size > most:
        raise WireError(f"a frame {known.name} with {size} bytes, allowed: {most}")
    return Header(known, size, stream, tag, total)
