"""The wire format of links: one versioned little-endian packet per micro-batch and direction.

    header   59 bytes   magic "PCMP", format version, kind, flags, method, bits, first-visit bits, dtype, payload dtype,
                        link, step, micro-batch, samples B, padded tokens S, hidden size H, group size, payload bytes,
                        CRC-32 of the micro-batch's tokens and of its labels (0: not compared)
                        flags: 1 checksum, 2 packed (a row of S tokens holds several samples, one after another)
    samples  B × 33     id, form, first real token, real tokens n, version it builds on, version it makes
    payload
    check    4 bytes    CRC-32 (zlib's) over all before it; zero without the checksum flag

Lengths are checked against the header's own numbers, and they and the number of samples against the caller's limits,
before anything is allocated. Bytes that are not exactly one such packet raise `WireError` with the difference.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple, TypeVar

import numpy as np

from pipecomp.errors import WireError
from pipecomp.kernels import ops

MAGIC = b"PCMP"
VERSION = 2
MAX_PAYLOAD_BYTES = 1 << 34
MAX_SAMPLES = (1 << 32) - 1  # of a u32

_FIELDS = {  # of the header, after magic and version; named as in PacketHeader, except flags, samples and payload_bytes
    "kind": "B",
    "flags": "B",
    "method": "B",
    "bits": "B",
    "first_bits": "B",
    "dtype": "B",
    "payload_dtype": "B",
    "link": "H",
    "step": "Q",
    "micro_batch": "I",
    "samples": "I",
    "tokens": "I",
    "hidden": "I",
    "group_size": "I",
    "payload_bytes": "Q",
    "tokens_crc": "I",
    "labels_crc": "I",
}
_HEADER = struct.Struct("<4sH" + "".join(_FIELDS.values()))
_SAMPLE = struct.Struct("<QBIIQQ")
_CHECK = struct.Struct("<I")
_FLAG_CHECKSUM = 1
_FLAG_PACKED = 2
_FLAGS_AT = 7  # byte of the header


@enum.unique
class PacketKind(enum.IntEnum):
    """Purpose of a packet."""

    ACTIVATION = 1
    GRADIENT = 2
    EVAL_ACTIVATION = 3
    INVENTORY = 4


@enum.unique
class PayloadMethod(enum.IntEnum):
    """Coding of the payload's values."""

    CAST = 1  # plain values of the payload's dtype
    QUANTIZED = 2  # scales, then packed codes
    TOP_K = 3  # positions, scales, then packed codes of the kept values
    TABLE = 4  # an inventory
    CLUSTERED = 5  # numbers of cluster centers, then the changes from them as QUANTIZED
    CHANNELS = 6  # scales of channels, then as QUANTIZED
    CACHED_CHANNELS = 7  # as QUANTIZED, with scales of channels that both ends compute; first visits as CHANNELS
    CLUSTERED_CHANNELS = 8  # numbers of cluster centers, then the changes from them as CHANNELS or CACHED_CHANNELS


@enum.unique
class Form(enum.IntEnum):
    """Meaning of a sample's rows."""

    PLAIN = 0  # no message store
    FULL = 1  # a first visit: sets m
    DELTA = 2  # added to the cached activation, or to cluster centers, of version `base`
    NOT_KEPT = 3  # a first visit that its sender does not cache; in a gradient: one that this end did not cache


@enum.unique
class DType(enum.IntEnum):
    """Wire name of a floating-point dtype."""

    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2


class Sample(NamedTuple):
    """One sample of a micro-batch: `count` real tokens from position `start`."""

    id: int
    form: Form
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls
    base: int = 0
    version: int = 0


class BatchDigest(NamedTuple):
    """CRC-32 of a micro-batch's tokens and labels as the first stage loaded them; 0 for what is not compared."""

    tokens_crc: int = 0
    labels_crc: int = 0


NO_DIGEST = BatchDigest()
_Code = TypeVar("_Code", bound=enum.IntEnum)
_CODES: dict[str, type[enum.IntEnum]] = {
    "kind": PacketKind,
    "method": PayloadMethod,
    "dtype": DType,
    "payload_dtype": DType,
}


@cache  # calling the enum takes longer than all other work on a sample
def _member(codes: type[_Code], code: int) -> _Code:
    return codes(code)


@dataclass(frozen=True, slots=True, kw_only=True)
class PacketHeader:
    """All of a packet except its payload. `bits` and `first_bits` are 0 where values are not quantized."""

    kind: PacketKind
    method: PayloadMethod
    link: int
    step: int
    micro_batch: int
    dtype: DType = DType.FLOAT32  # of the stages' computation
    payload_dtype: DType = DType.FLOAT32  # of plain values
    bits: int = 0
    first_bits: int = 0
    tokens: int = 0  # S, padding included
    hidden: int = 0
    group_size: int = 0  # 0: a whole row
    samples: tuple[Sample, ...] = field(default=())
    packed: bool = False  # samples share rows of S tokens; one that starts at 0 begins a row
    tokens_crc: int = 0
    labels_crc: int = 0

    @property
    def rows(self) -> int:
        """Number of rows of S tokens."""
        return sum(s.start == 0 for s in self.samples) if self.packed else len(self.samples)

    def quantized(self) -> tuple[int, int]:
        """Count the quantized values and the bits of their codes."""
        if self.method in (PayloadMethod.CAST, PayloadMethod.TOP_K, PayloadMethod.TABLE):
            return 0, 0
        values = total = 0
        for s in self.samples:
            first = s.form is Form.FULL or (s.form is Form.NOT_KEPT and self.kind is not PacketKind.GRADIENT)
            bits = self.first_bits if first else self.bits
            values += s.count * self.hidden if bits else 0
            total += s.count * self.hidden * bits
        return values, total

    def describe(self) -> str:
        """Name the packet in an error."""
        return f"{self.kind.name.lower()} of micro-batch {self.micro_batch}, step {self.step}, link {self.link}"


def packet_bytes(samples: int, payload_bytes: int) -> int:
    """Return the length of a whole packet."""
    return _HEADER.size + samples * _SAMPLE.size + payload_bytes + _CHECK.size


def encode(header: PacketHeader, payload: np.ndarray, *, checksum: bool = True) -> np.ndarray:
    """Return one packet, uint8 [length], with a copy of `payload`, uint8."""
    out = np.empty(packet_bytes(len(header.samples), payload.size), dtype=np.uint8)
    write_header(out, header, checksum=checksum)
    payload_view(out, len(header.samples))[:] = payload
    write_checksum(out)
    return out


def write_header(out: np.ndarray, header: PacketHeader, *, checksum: bool = True) -> None:
    """Write everything before the payload of a packet, uint8 [packet_bytes]."""
    payload = out.size - packet_bytes(len(header.samples), 0)
    flags = (_FLAG_CHECKSUM if checksum else 0) | (_FLAG_PACKED if header.packed else 0)
    own = {"flags": flags, "samples": len(header.samples), "payload_bytes": payload}
    fields = (own[name] if name in own else getattr(header, name) for name in _FIELDS)
    _HEADER.pack_into(out, 0, MAGIC, VERSION, *fields)
    at = _HEADER.size
    for s in header.samples:
        _SAMPLE.pack_into(out, at, *s)
        at += _SAMPLE.size


def payload_view(packet: np.ndarray, samples: int) -> np.ndarray:
    """Return the payload of a packet, uint8 [packet_bytes], as a view."""
    return packet[_HEADER.size + samples * _SAMPLE.size : packet.size - _CHECK.size]


def write_checksum(packet: np.ndarray) -> None:
    """Write the check at the end of a packet that has its header and payload."""
    end = packet.size - _CHECK.size
    _CHECK.pack_into(packet, end, ops.crc32(packet[:end]) if packet[_FLAGS_AT] & _FLAG_CHECKSUM else 0)


def decode(
    packet: np.ndarray, *, max_payload_bytes: int = MAX_PAYLOAD_BYTES, max_samples: int = MAX_SAMPLES
) -> tuple[PacketHeader, np.ndarray]:
    """Return header and payload, a view into `packet`, uint8 [length]. Raises WireError for anything else."""
    header, payload = parse(packet, max_payload_bytes=max_payload_bytes, max_samples=max_samples)
    verify(packet)
    return header, payload


def parse(
    packet: np.ndarray, *, max_payload_bytes: int = MAX_PAYLOAD_BYTES, max_samples: int = MAX_SAMPLES
) -> tuple[PacketHeader, np.ndarray]:
    """Return header and payload as `decode`, without verifying the checksum."""
    if packet.size < _HEADER.size + _CHECK.size:
        raise WireError(f"packet of {packet.size} bytes is shorter than a header of {_HEADER.size}")
    magic, version, *values = _HEADER.unpack_from(packet, 0)
    fields = dict(zip(_FIELDS, values, strict=True))
    flags, count, payload = (fields.pop(name) for name in ("flags", "samples", "payload_bytes"))
    if magic != MAGIC:
        raise WireError(f"packet begins with {magic!r}, not {MAGIC!r}: these bytes are not from pipecomp")
    if version != VERSION:
        raise WireError(f"packet has format version {version}, this rank reads {VERSION}: install the same pipecomp")
    if payload > max_payload_bytes:
        raise WireError(f"packet claims a payload of {payload} bytes, above the limit of {max_payload_bytes}")
    if count > max_samples:  # each becomes an object, many times as large as its bytes
        raise WireError(f"packet claims {count} samples, above the limit of {max_samples}")
    expected = packet_bytes(count, payload)
    if packet.size != expected:
        raise WireError(f"packet has {packet.size} bytes where its header says {expected}")
    if flags & ~(_FLAG_CHECKSUM | _FLAG_PACKED):
        raise WireError(f"packet has unknown flags {flags:#x}")
    table = packet[_HEADER.size : _HEADER.size + count * _SAMPLE.size]
    try:
        fields.update({name: _member(codes, fields[name]) for name, codes in _CODES.items()})
        samples = tuple(Sample(i, _member(Form, form), *rest) for i, form, *rest in _SAMPLE.iter_unpack(table))
    except ValueError as error:
        raise WireError(f"packet has an unknown code: {error}") from error
    header = PacketHeader(**fields, samples=samples, packed=bool(flags & _FLAG_PACKED))
    for s in samples:
        if s.start + s.count > header.tokens:
            what = f"sample {s.id} has tokens {s.start}..{s.start + s.count} of {header.tokens}"
            raise WireError(f"{header.describe()}: {what}")
    return header, payload_view(packet, count)


def verify(packet: np.ndarray) -> None:
    """Raise WireError if the check of a parsed packet does not match its bytes."""
    (sent,) = _CHECK.unpack_from(packet, packet.size - _CHECK.size)
    check = ops.crc32(packet[: -_CHECK.size]) if packet[_FLAGS_AT] & _FLAG_CHECKSUM else 0
    if check != sent:
        raise WireError(f"packet was changed on the way: CRC-32 {check:#010x}, sent with {sent:#010x}")
