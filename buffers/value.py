"""The bytes of one cached activation: a versioned header, then m at z bits.

    offset  size  little-endian
    0       4     magic "PCMV"
    4       2     format version, 1
    6       1     z: bits a value, one of 2, 4, 8, 16, 32
    7       1     0
    8       8     sample id
    16      8     version of m
    24      4     n: tokens
    28      4     H: hidden size
    32      4     group size of the quantizer, 0 for a token's whole row
    36      4     CRC-32 of bytes 0 to 35 and of the payload
    40            payload

Payload, z = 2, 4, 8: float32 scales, a row's groups together, then the packed codes. z = 16: float16, saturated at
±65504. Activations lie far inside that range, and float16 keeps 11 significant bits where bfloat16 keeps 8; that is
what limits how close later deltas can come. z = 32: float32 as they are.
Shapes: n tokens, H hidden size, G groups in a row. Source of the z-bit store: arXiv:2206.01299, appendix H.5.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipecomp.buffers.base import CachedActivation
from pipecomp.errors import ConfigError, NonFiniteError, ShapeError, StoreError
from pipecomp.kernels import ops

MAGIC = b"PCMV"
FORMAT = 1
BITS = (2, 4, 8, 16, 32)
FLOAT16_MAX = 65504.0
FLOAT32_MAX = torch.finfo(torch.float32).max
QUANTIZER_MAX = 2.0**100

_FIELDS = struct.Struct("<4sHBBQQIII")
_CRC = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CRC.size
MAX_U32 = 2**32 - 1
MAX_U64 = 2**64 - 1
MAX_BYTES = 4_000_000_000  # of a value: `lmdb_file` numbers its pieces in 16 bits


class ValueHeader(NamedTuple):
    """What a stored value says about itself."""

    sample: int
    version: int
    n: int
    H: int
    bits: int
    group_size: int  # 0: the whole row
    crc: int


@dataclass(frozen=True)
class ValueFormat:
    """How an endpoint stores m: z = `bits`, and the quantizer's grouping where z is 8 or less."""

    bits: int = 32
    group_size: int | None = None

    def __post_init__(self) -> None:
        if self.bits not in BITS or isinstance(self.bits, bool):
            raise ConfigError("store.bits", self.bits, ", ".join(map(str, BITS)))
        ops.groups(1, self.group_size)  # ConfigError for a group size that is none

    @property
    def grouping(self) -> int | None:
        """The group size that takes effect; without quantization none does."""
        return self.group_size if self.bits <= 8 else None

    def size(self, n: int, H: int) -> int:
        """Bytes of a stored value of n tokens."""
        return HEADER_BYTES + _payload_bytes(n, H, self.bits, self.grouping)

    def check(self, sample: int, version: int, m_nH: Tensor, where: str, *, values: bool = True) -> None:
        """Raise unless `pack` can store this; its values are not looked at without `values`.

        ConfigError for the numbers, ShapeError for the tensor, NonFiniteError for values that z bits cannot hold; 32
        bits hold every float32, NaN included.
        """
        for key, number in (("sample", sample), ("version", version)):
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MAX_U64:
                raise ConfigError(key, number, "a whole number from 0 to 2**64 - 1")
        if m_nH.dtype != torch.float32 or m_nH.dim() != 2 or m_nH.shape[1] < 1 or max(m_nH.shape) > MAX_U32:
            raise ShapeError(f"{where}: m_nH: got {m_nH.dtype} {tuple(m_nH.shape)}, allowed: float32 [n, H], H >= 1")
        if (size := self.size(*m_nH.shape)) > MAX_BYTES:
            raise ShapeError(f"{where}: m_nH: {tuple(m_nH.shape)} takes {size} bytes, allowed: {MAX_BYTES}")
        if values and self.bits < 32 and m_nH.numel():
            low, high = (float(x) for x in torch.aminmax(m_nH.detach()))
            limit = FLOAT32_MAX if self.bits == 16 else QUANTIZER_MAX
            if not (-limit <= low and high <= limit):  # also false for NaN
                raise NonFiniteError(f"{where}: values from {low} to {high}, allowed: within ±{limit}")

    def pack(self, sample: int, version: int, m_nH: Tensor, where: str) -> bytearray:
        """Make the stored value of m [n, H], which `check` has passed and which lies on the host; m is not modified.

        Here, and only here, m is rounded to z bits.
        """
        n, H = m_nH.shape
        fields = _FIELDS.pack(MAGIC, FORMAT, self.bits, 0, sample, version, n, H, self.grouping or 0)
        payload = self._encode(m_nH.detach().contiguous(), where).numpy().data if n else b""
        return bytearray().join((fields, _CRC.pack(ops.crc32(payload, zlib.crc32(fields))), payload))

    def _encode(self, m_nH: Tensor, where: str) -> Tensor:
        if self.bits == 32:
            return m_nH
        if self.bits == 16:
            return m_nH.clamp(-FLOAT16_MAX, FLOAT16_MAX).to(torch.float16)
        payload = torch.empty(self.size(*m_nH.shape) - HEADER_BYTES, dtype=torch.uint8)
        visit = ops.Visit(m_nH, None, ops.Options(self.bits, self.grouping))
        try:
            ops.encode_batch([visit], payload).check()
        except NonFiniteError as error:
            raise NonFiniteError(f"{where}: {error}") from error
        return payload


def read_header(value: bytes | bytearray | memoryview, where: str) -> ValueHeader:
    """Read the header of a stored value, whose first HEADER_BYTES at least are given. StoreError if it is none."""
    if len(value) < HEADER_BYTES:
        raise StoreError(f"{where}: {len(value)} bytes, a stored value has at least {HEADER_BYTES}")
    magic, version, bits, reserved, sample, m_version, n, H, group_size = _FIELDS.unpack_from(value)
    if magic != MAGIC:
        raise StoreError(f"{where}: begins with {magic.hex()}, a stored value with {MAGIC.hex()}")
    if version != FORMAT:
        raise StoreError(f"{where}: format version {version}, this program reads version {FORMAT}")
    header = ValueHeader(sample, m_version, n, H, bits, group_size, *_CRC.unpack_from(value, _FIELDS.size))
    too_large = n * H * bits > 8 * MAX_BYTES  # whoever makes room for it takes all memory
    if bits not in BITS or reserved or not H or (bits > 8 and group_size) or too_large:
        raise StoreError(f"{where}: not a header of a stored value: {header}")
    return header


def stored_size(header: ValueHeader) -> int:
    """Bytes of the whole value that a header begins."""
    return HEADER_BYTES + _payload_bytes(header.n, header.H, header.bits, header.group_size or None)


def verify_value(value: bytearray | memoryview, where: str) -> ValueHeader:
    """Check a whole stored value; returns its header. StoreError, naming `where`, if the length or the CRC is wrong."""
    header = read_header(value, where)
    if stored_size(header) != len(value):
        raise StoreError(f"{where}: {len(value)} bytes, its header says {stored_size(header)}")
    if _checksum(value) != header.crc:
        raise StoreError(f"{where}: damaged: CRC-32 {_checksum(value):#010x}, stored with {header.crc:#010x}")
    return header


def unpack(value: bytearray | memoryview, where: str, *, alias: bool = False) -> CachedActivation:
    """Decode a stored value. StoreError, naming `where`, if the length or the CRC-32 is wrong. alias: see `decoded`."""
    return decoded(value, verify_value(value, where), alias=alias)


def decoded(value: bytearray | memoryview, header: ValueHeader, *, alias: bool = False) -> CachedActivation:
    """Decode a value that `verify_value` has passed, or that never left this process's memory.

    alias: with 32 bits the tensor may share `value`'s memory, which nobody else uses.
    """
    n, H, bits, grouping = header.n, header.H, header.bits, header.group_size or None
    if n == 0:
        return CachedActivation(header.version, torch.empty(0, H, dtype=torch.float32))
    if bits == 32:
        m_nH = _tensor(value, "<f4", n * H, HEADER_BYTES).view(n, H)
        return CachedActivation(header.version, m_nH if alias else m_nH.clone())
    if bits == 16:
        return CachedActivation(header.version, _tensor(value, "<f2", n * H, HEADER_BYTES).view(n, H).float())
    m_nH = torch.empty(n, H, dtype=torch.float32)
    payload = torch.from_numpy(np.frombuffer(value, np.uint8, offset=HEADER_BYTES))
    ops.decode_batch(payload, [ops.Arriving(m_nH, ops.Options(bits, grouping))])
    return CachedActivation(header.version, m_nH)


def _tensor(value: bytearray | memoryview, dtype: str, count: int, start: int) -> Tensor:
    array = np.frombuffer(value, dtype, count, start)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


def _payload_bytes(n: int, H: int, bits: int, group_size: int | None) -> int:
    if bits > 8:
        return n * H * bits // 8
    return n * ops.quantized_row_bytes(H, bits, group_size)


def _checksum(value: bytearray | memoryview) -> int:
    view = memoryview(value)
    return ops.crc32(view[HEADER_BYTES:], zlib.crc32(view[: _FIELDS.size]))
