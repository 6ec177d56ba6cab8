"""Fuzz targets: one plain function per decoder. It takes any bytes and returns, or raises only what is a finding.

Each decoder gets the bytes twice: as they are, and repaired (right magic, lengths and checksum), so that what lies
behind the first checks is reached too. A finding is any exception but the project's own, and any allocation above
what the limits allow, which the address space that `run.py` leaves to the process turns into an exception.
"""

from __future__ import annotations

import contextlib
import json
import struct
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import torch

from pipecomp.buffers import MemoryStore
from pipecomp.buffers.base import entry_id
from pipecomp.buffers.value import HEADER_BYTES, read_header, stored_size, unpack
from pipecomp.codecs import wire
from pipecomp.config import Config
from pipecomp.errors import PipecompError
from pipecomp.stages.link import clusters, endpoint
from pipecomp.stages.link.endpoint import LinkReceiver, LinkSender, Position
from pipecomp.stages.link.layout import Layout
from pipecomp.stages.link.transport import loopback_pair
from tests.fuzz.mesh_targets import MESH_TARGETS

MAX_PAYLOAD_BYTES = 1 << 20
MAX_TENSOR_BYTES = 1 << 26  # the limit of the links here, so that what exceeds it shows
SETTINGS = {
    "top k": {"method": "aqsgd", "first_visit": 8, "backward_top_k": 0.3},
    "constant error": {
        "method": "aqsgd",
        "backward_method": "delta",
        **{key: {"error": 0.1} for key in ("forward_bits", "backward_bits", "first_visit", "backward_first_visit")},
    },
    "clusters": {"method": "aqsgd"},
    "changes": {"method": "aqsgd", "backward_method": "delta"},
    "channels": {"method": "aqsgd", "backward_method": "delta", "scale": "channels", "first_visit": 4},
    "cached channels": {"method": "aqsgd", "backward_method": "delta", "scale": "cached_channels", "first_visit": 4},
}
STORES = {"clusters": {"clusters": 16}}
# The last byte of an input chooses one of them: with one more, those of the corpus whose byte was set so are set anew.
ENDS = ("none", "direct", "aqsgd", *SETTINGS)


def fuzz_wire(data: bytes) -> None:
    """The message decoder, and both ends of a link for what it lets through."""
    _decode(np.frombuffer(data, dtype=np.uint8))
    message = np.frombuffer(_repaired_message(data), dtype=np.uint8)
    header = _decode(message)
    if header is not None:
        _receive(ENDS[data[-1] % len(ENDS)] if data else ENDS[0], header, message)


def fuzz_value(data: bytes) -> None:
    """The decoder of stored values."""
    for value in (bytearray(data), _repaired_value(data)):
        with contextlib.suppress(PipecompError):
            unpack(value, "fuzzed", alias=bool(data and data[-1] & 1))


def fuzz_config(data: bytes) -> None:
    """The configuration section, from JSON text or from what JSON cannot say."""
    for text in (data, b'{"activations": ' + data + b"}", b'{"gradients": ' + data + b"}"):
        try:
            section = json.loads(text)
        except (ValueError, RecursionError):
            continue
        try:
            config = Config.from_dict(section)
            config.digest()
            config.link_settings(0)
        except PipecompError as error:
            str(error)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "wire": fuzz_wire,
    "value": fuzz_value,
    "config": fuzz_config,
    **MESH_TARGETS,
}


def _decode(message: np.ndarray) -> wire.PacketHeader | None:
    try:
        header, payload = wire.decode(message, max_payload_bytes=MAX_PAYLOAD_BYTES)
    except PipecompError:
        return None
    assert payload.size <= MAX_PAYLOAD_BYTES, "a payload above the limit"
    assert wire.encode(header, payload, checksum=bool(message[7])).tobytes() == message.tobytes(), "decoded otherwise"
    return header


def _receive(name: str, header: wire.PacketHeader, message: np.ndarray) -> None:
    """Give a decoded message to the end of a link that would expect its place."""
    stores = {"store": STORES[name]} if name in STORES else {}
    config = Config.from_dict({"activations": SETTINGS.get(name, {"method": name}), **stores})
    there, here = loopback_pair(timeout_s=0.01)
    at = Position(header.step, header.micro_batch)
    store = MemoryStore() if config.activations.method == "aqsgd" else None
    gradients = header.kind is wire.PacketKind.GRADIENT
    there.send(message)
    with contextlib.suppress(PipecompError), _tensor_limit():
        if store is not None and name not in STORES:
            for sample in header.samples[:4]:
                held = torch.zeros(min(sample.count, 64), min(max(header.hidden, 1), 64))
                store.put(entry_id(sample.id, gradient=gradients), sample.base, held)
        if gradients:
            upstream = LinkSender(header.link, config, here, store)
            upstream.recv_gradient(Layout.of_header(header), at)
        else:
            downstream = LinkReceiver(header.link, config, here, store)
            downstream.recv_activation(at, training=header.kind is wire.PacketKind.ACTIVATION)
            downstream.end_step()


@contextlib.contextmanager
def _tensor_limit() -> Iterator[None]:
    before = endpoint.MAX_TENSOR_BYTES
    endpoint.MAX_TENSOR_BYTES = clusters.MAX_TENSOR_BYTES = MAX_TENSOR_BYTES
    try:
        yield
    finally:
        endpoint.MAX_TENSOR_BYTES = clusters.MAX_TENSOR_BYTES = before


def _repaired_message(data: bytes) -> bytes:
    """`data` after the magic and the version, cut into samples and payload as long as they are, with a checksum."""
    fixed, sample, check = 59, 33, 4
    if data[:4] == wire.MAGIC:
        data = data[6:-check]
    body = bytearray(b"PCMP" + struct.pack("<H", wire.VERSION) + data[:53].ljust(53, b"\0"))
    rest = data[53:]
    count = min(body[27], len(rest) // sample)
    body[6] = 1 + (body[6] - 1) % len(wire.PacketKind)
    body[7] &= 1
    body[8] = 1 + (body[8] - 1) % len(wire.PayloadMethod)
    body[11], body[12] = body[11] % 3, body[12] % 3
    struct.pack_into("<I", body, 27, count)
    struct.pack_into("<Q", body, fixed - 16, len(rest) - count * sample)
    body += rest
    for i in range(count):
        body[fixed + sample * i + 8] %= 4
    return bytes(body) + struct.pack("<I", zlib.crc32(body) if body[7] else 0)[:check]


def _repaired_value(data: bytes) -> bytearray:
    """`data` after the magic and the format; cut or filled to the length that it announces, with a checksum."""
    if data[:4] == b"PCMV":
        data = data[6:]
    head = bytearray(b"PCMV\x01\x00" + data[: HEADER_BYTES - 6].ljust(HEADER_BYTES - 6, b"\0"))
    head[6], head[7] = (2, 4, 8, 16, 32)[head[6] % 5], 0
    try:
        size = stored_size(read_header(head, "fuzzed"))
    except PipecompError:
        return head
    payload = data[HEADER_BYTES - 6 :][: max(0, min(size, MAX_PAYLOAD_BYTES) - HEADER_BYTES)]
    value = head + payload.ljust(max(0, min(size, MAX_PAYLOAD_BYTES) - HEADER_BYTES), b"\x40")
    struct.pack_into("<I", value, 36, zlib.crc32(value[40:], zlib.crc32(value[:36])))
    return value
