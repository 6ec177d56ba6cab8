"""Comparison of both ends of a link: settings and stores at the start and after a resume, changes while training.

At the start a sample stays only if both ends hold the same version of it with the same digest; both drop everything
else, and send it as a first visit next time. Ends with equal stores exchange two short packets. Otherwise both send a
table of what they hold, which may be longer than any packet of training: each end first reports that it is ready to
accept one of the length that the other has announced.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np

from pipecomp.buffers.base import CachedVersion, MessageStore, entry_name
from pipecomp.codecs.wire import PacketHeader, PacketKind, PayloadMethod, encode, packet_bytes
from pipecomp.errors import DriftError, LinkError, WireError
from pipecomp.stages.link.endpoint import Endpoint, LinkSender
from pipecomp.stages.link.packet import Position

# Note: Drift
# A delta names the version that it builds on, so a wrong base is refused. But if memory, a disk or arithmetic fails at
# one end, both could hold different values under one version, and only the loss would show it. Every few steps each end
# hashes sample, version and CRC-32 of the stored value, which packing has computed anyway, of all entries put since the
# last check, and sends the digest of 16 bytes. If the digests differ, both ends send the lines themselves and drop the
# samples that differ.

_SUMMARY = struct.Struct("<QQ32s32s")  # samples, highest version, SHA-256 of the table, SHA-256 of the settings
_DIGEST = struct.Struct("<Q16s")  # samples, BLAKE2b of their lines
_ROW = np.dtype([("sample", "<u8"), ("version", "<u8"), ("digest", "<u4")])
_MAX_VERSION = 1 << 63  # versions are counted on from there, and must fit into packets
_SUMMARY_PART, _TABLE_PART, _DRIFT_PART, _DRIFT_TABLE_PART, _READY_PART = range(5)
_SHOWN = 8
_log = logging.getLogger("pipecomp")


def summarize(store: MessageStore) -> tuple[int, int, bytes]:
    """Return a store's samples, their highest version (0: none), and a SHA-256 of all versions and CRC-32s."""
    return _summary(as_table(store.inventory()))


def as_table(lines: Iterable[CachedVersion]) -> np.ndarray:
    """Return rows of sample, version and digest, as they are sent."""
    return np.array([(h.sample, h.version, h.digest) for h in lines], dtype=_ROW)


def reconcile_stores(end: Endpoint, settings: dict[str, Any]) -> int:
    """Make this end and its peer hold the same samples; both must call it.

    Args:
        end: End of this rank.
        settings: JSON values that must be equal at both ends.

    Returns:
        The number of samples that were dropped here.

    Raises:
        LinkError: The settings differ.
    """
    store = end.store
    end.reload()  # the store may be another checkpoint's, and what differs is dropped below
    end.changed.clear()  # the tables cover it
    table = as_table(store.inventory() if store is not None else [])
    described = json.dumps(settings, sort_keys=True).encode()
    mine = (*_summary(table), hashlib.sha256(described).digest())
    send_part(end, 0, _SUMMARY_PART, _SUMMARY.pack(*mine))
    summary = recv_part(end, 0, _SUMMARY_PART)
    if len(summary) != _SUMMARY.size:
        raise WireError(end.context.peer_error(f"sent a summary of {len(summary)} bytes"))
    theirs = _SUMMARY.unpack(summary)
    if theirs[3] != mine[3]:
        text = f"has other settings than this rank, which has {described.decode()}"
        remedy = "give all ranks the same configuration and the same version of pipecomp"
        raise LinkError(end.context.peer_error(f"{text}: {remedy}"))
    if theirs[1] > _MAX_VERSION:
        text = f"holds version {theirs[1]} of an activation, allowed: at most {_MAX_VERSION}"
        raise WireError(end.context.peer_error(text))
    if isinstance(end, LinkSender):
        end.next_version = max(mine[1], theirs[1]) + 1
    if theirs[:3] == mine[:3]:
        return 0
    with end.accepting(packet_bytes(0, theirs[0] * _ROW.itemsize)):
        send_part(end, 0, _READY_PART, b"")
        recv_part(end, 0, _READY_PART)
        other = _exchange_tables(end, 0, _TABLE_PART, table, rows=theirs[0])
    drop = np.setdiff1d(table, other)["sample"].tolist()
    if drop:
        assert store is not None
        store.drop(drop)
    return len(drop)


def check_drift(end: Endpoint, step: int) -> list[int]:
    """Compare the entries that changed since the last check with the peer's; both must call it.

    Args:
        end: End of this rank, with a store.
        step: Training step that has ended but is not committed yet.

    Returns:
        The entries that differed, which both ends have dropped.

    Raises:
        DriftError: Some differed at the last check too: hardware is failing, and a repair would hide it.
    """
    assert end.store is not None
    table = as_table(line for line in end.store.versions(sorted(end.changed)) if line is not None)
    end.changed.clear()
    mine = _DIGEST.pack(len(table), hashlib.blake2b(table.tobytes(), digest_size=16).digest())
    end.stats.drift_checks += 1
    end.stats.drift_check_bytes += send_part(end, step, _DRIFT_PART, mine)
    theirs = recv_part(end, step, _DRIFT_PART)
    if theirs == mine:
        end.drifted = False
        return []
    if len(theirs) != _DIGEST.size:
        raise WireError(end.context.peer_error(f"sent a digest of {len(theirs)} bytes"))
    other = _exchange_tables(end, step, _DRIFT_TABLE_PART, table, rows=_DIGEST.unpack(theirs)[0])
    entries: list[int] = np.unique(np.setxor1d(table, other)["sample"]).tolist()
    names = ", ".join(map(entry_name, entries[:_SHOWN]))
    if entries[_SHOWN:]:
        names += f" and {len(entries) - _SHOWN} more"
    kind, next_time = "samples", "send them as first visits next time"
    if not end.caches_samples:
        kind, next_time = "blocks of cluster centers", "make them anew"
    peer = end.transport.peer
    text = f"link {end.index}, step {step}: this end and rank {peer} hold different cached activations of {names}"
    if end.drifted:
        raise DriftError(
            f"{text} ({kind}), as they did at the last check: memory, a disk or a kernel is failing at one of them. "
            "`pipecomp doctor` checks kernels, `pipecomp store verify` the store"
        )
    _log.warning("%s (%s): both drop them, and %s", text, kind, next_time)
    end.store.drop(entries)
    end.reload()
    end.drifted = True
    end.stats.drifts += 1
    end.stats.drift_samples += len(entries)
    return entries


def send_part(end: Endpoint, step: int, part: int, payload: bytes) -> int:
    """Send a part of an inventory; return the bytes of the packet."""
    header = PacketHeader(
        kind=PacketKind.INVENTORY, method=PayloadMethod.TABLE, link=end.index, step=step, micro_batch=part
    )
    packet = encode(header, np.frombuffer(payload, dtype=np.uint8))
    end.transport.send(packet)
    return packet.size


def recv_part(end: Endpoint, step: int, part: int) -> bytes:
    """Receive the payload of the same part from the peer. Raises LinkError if anything else comes."""
    return end.receive(PacketKind.INVENTORY, Position(step, part)).payload.tobytes()


def _exchange_tables(end: Endpoint, step: int, part: int, table: np.ndarray, *, rows: int) -> np.ndarray:
    send_part(end, step, part, table.tobytes())
    data = recv_part(end, step, part)
    if len(data) != rows * _ROW.itemsize:
        raise WireError(end.context.peer_error(f"sent {len(data)} bytes for {rows} samples"))
    return np.frombuffer(data, dtype=_ROW)


def _summary(table: np.ndarray) -> tuple[int, int, bytes]:
    highest = int(table["version"].max()) if len(table) else 0
    return len(table), highest, hashlib.sha256(table.tobytes()).digest()
