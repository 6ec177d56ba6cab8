"""What both ends of a link do before the first step: compare settings, then what their stores hold.

A sample stays only if both ends hold the same version of it with the same digest; everything else is dropped at both
ends and sent whole on its next visit. A run that starts with equal stores exchanges two short messages.
"""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

import numpy as np

from pipecomp.errors import LinkError, WireError
from pipecomp.stages.downstream import DownstreamEnd
from pipecomp.stages.upstream import UpstreamEnd
from pipecomp.wire import Header, Kind, Method, decode, encode

_SUMMARY = struct.Struct("<QQ32s32s")  # samples, highest version, SHA-256 of the table, SHA-256 of the settings
_ROW = np.dtype([("sample", "<u8"), ("version", "<u8"), ("digest", "<u4")])


def agree(end: UpstreamEnd | DownstreamEnd, settings: dict[str, Any]) -> int:
    """Make this end and its peer hold the same samples; both must call it. Returns how many samples were dropped here.

    settings: what must be equal at both ends, JSON values. Raises LinkError if it is not.
    """
    store = end.store
    held = store.inventory() if store is not None else []
    table = np.array([(h.sample, h.version, h.digest) for h in held], dtype=_ROW)
    highest = int(table["version"].max()) if len(table) else 0
    described = json.dumps(settings, sort_keys=True).encode()
    mine = (len(table), highest, hashlib.sha256(table.tobytes()).digest(), hashlib.sha256(described).digest())
    _send(end, 0, np.frombuffer(_SUMMARY.pack(*mine), dtype=np.uint8))
    summary = _recv(end, 0)
    if summary.size != _SUMMARY.size:
        raise WireError(f"link {end.index}: rank {end.transport.peer} sent a summary of {summary.size} bytes")
    theirs = _SUMMARY.unpack(summary.tobytes())
    if theirs[3] != mine[3]:
        raise LinkError(
            f"link {end.index}: rank {end.transport.peer} is configured otherwise than this rank, which has "
            f"{described.decode()}: give all ranks the same configuration and the same version of pipecomp"
        )
    if isinstance(end, UpstreamEnd):
        end.resume_versions(max(highest, theirs[1]))
    if theirs[:3] == mine[:3]:
        return 0
    _send(end, 1, table.view(np.uint8).reshape(-1))
    data = _recv(end, 1)
    if data.size != theirs[0] * _ROW.itemsize:
        raise WireError(f"link {end.index}: rank {end.transport.peer} sent {data.size} bytes for {theirs[0]} samples")
    other = np.frombuffer(data.tobytes(), dtype=_ROW)
    keep = np.intersect1d(table, other)["sample"]
    drop = np.setdiff1d(table["sample"], keep).tolist()
    if drop:
        assert store is not None
        store.drop(drop)
    return len(drop)


def _send(end: UpstreamEnd | DownstreamEnd, part: int, payload: np.ndarray) -> None:
    header = Header(kind=Kind.INVENTORY, method=Method.TABLE, link=end.index, step=0, micro_batch=part)
    end.transport.send(encode(header, [payload]))


def _recv(end: UpstreamEnd | DownstreamEnd, part: int) -> np.ndarray:
    header, payload = decode(end.transport.recv())
    if (header.kind, header.link, header.micro_batch) != (Kind.INVENTORY, end.index, part):
        raise LinkError(f"link {end.index}: rank {end.transport.peer} sent the {header.describe()}, not its inventory")
    return payload
