"""What both ends of a link do before the first step, and when a checkpoint is loaded: compare settings and stores.

A sample stays only if both ends hold the same version of it with the same digest; everything else is dropped at both
ends and sent as a first visit next time. A run that starts with equal stores exchanges two short packets. Where
stores differ, both ends send a table of what they hold, which may be longer than any packet of training: each end says
when it is ready to take one of the length that the other has announced, and none is sent before.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np

from pipecomp.buffers.base import CachedVersion, MessageStore
from pipecomp.codecs.wire import Header, Kind, Method, encode, packet_bytes
from pipecomp.errors import LinkError, WireError
from pipecomp.stages.link.endpoint import Position
from pipecomp.stages.link.link_end import LinkEnd
from pipecomp.stages.link.sender import LinkSender

_SUMMARY = struct.Struct("<QQ32s32s")  # samples, highest version, SHA-256 of the table, SHA-256 of the settings
_ROW = np.dtype([("sample", "<u8"), ("version", "<u8"), ("digest", "<u4")])
_MOST_VERSION = 1 << 63  # versions are counted on from there, and must fit into packets
_SUMMARY_PART, _TABLE_PART, _READY_PART = 0, 1, 4  # 2 and 3 are those of a check for drift


def summarize(store: MessageStore) -> tuple[int, int, bytes]:
    """Count what a store holds: samples, their highest version (0: none), and a SHA-256 of all versions and CRC-32s."""
    return _summary(as_table(store.inventory()))


def as_table(lines: Iterable[CachedVersion]) -> np.ndarray:
    """Rows of sample, version and digest, as they travel."""
    return np.array([(h.sample, h.version, h.digest) for h in lines], dtype=_ROW)


def agree(end: LinkEnd, settings: dict[str, Any]) -> int:
    """Make this end and its peer hold the same samples; both must call it. Returns how many samples were dropped here.

    settings: what must be equal at both ends, JSON values. Raises LinkError if it is not.
    """
    store = end.store
    end.reload()  # what is held may be another checkpoint's, and what differs will go
    end.changed.clear()  # it is compared here
    table = as_table(store.inventory() if store is not None else [])
    described = json.dumps(settings, sort_keys=True).encode()
    mine = (*_summary(table), hashlib.sha256(described).digest())
    send_part(end, 0, _SUMMARY_PART, _SUMMARY.pack(*mine))
    summary = recv_part(end, 0, _SUMMARY_PART)
    if len(summary) != _SUMMARY.size:
        raise WireError(end.peer(f"sent a summary of {len(summary)} bytes"))
    theirs = _SUMMARY.unpack(summary)
    if theirs[3] != mine[3]:
        what = f"is configured otherwise than this rank, which has {described.decode()}"
        raise LinkError(end.peer(f"{what}: give all ranks the same configuration and the same version of pipecomp"))
    if theirs[1] > _MOST_VERSION:
        raise WireError(end.peer(f"holds version {theirs[1]} of an activation, allowed: at most {_MOST_VERSION}"))
    if isinstance(end, LinkSender):
        end.next_version = max(mine[1], theirs[1]) + 1
    if theirs[:3] == mine[:3]:
        return 0
    with end.taking(packet_bytes(0, theirs[0] * _ROW.itemsize)):
        send_part(end, 0, _READY_PART, b"")
        recv_part(end, 0, _READY_PART)
        other = exchange_tables(end, 0, _TABLE_PART, table, rows=theirs[0])
    drop = np.setdiff1d(table, other)["sample"].tolist()
    if drop:
        assert store is not None
        store.drop(drop)
    return len(drop)


def exchange_tables(end: LinkEnd, step: int, part: int, table: np.ndarray, *, rows: int) -> np.ndarray:
    """Send this end's table, receive the peer's of `rows` rows."""
    send_part(end, step, part, table.tobytes())
    data = recv_part(end, step, part)
    if len(data) != rows * _ROW.itemsize:
        raise WireError(end.peer(f"sent {len(data)} bytes for {rows} samples"))
    return np.frombuffer(data, dtype=_ROW)


def send_part(end: LinkEnd, step: int, part: int, payload: bytes) -> int:
    """Send a part of an inventory; returns the bytes of the packet."""
    header = Header(kind=Kind.INVENTORY, method=Method.TABLE, link=end.index, step=step, micro_batch=part)
    packet = encode(header, np.frombuffer(payload, dtype=np.uint8))
    end.transport.send(packet)
    return packet.size


def recv_part(end: LinkEnd, step: int, part: int) -> bytes:
    """Receive the payload of the same part from the peer. LinkError if it is anything else that comes."""
    return end.receive(Kind.INVENTORY, Position(step, part))[2].tobytes()


def _summary(table: np.ndarray) -> tuple[int, int, bytes]:
    highest = int(table["version"].max()) if len(table) else 0
    return len(table), highest, hashlib.sha256(table.tobytes()).digest()
