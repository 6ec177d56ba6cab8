"""Bytes of one stored activation: a versioned header, then m at z bits.

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
±65504. Activations lie far inside that range, and float16 keeps 11 significant bits where bfloat16 keeps 8, which limit
how close later deltas can come. z = 32: float32 unchanged.
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

from pipecomp.buffers.base import CachedActivation, DamagedStoreError
from pipecomp.errors import ConfigError, NonFiniteError, ShapeError
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
    """Decoded header of a stored value."""

    sample: int
    version: int
    n: int
    H: int
    bits: int
    group_size: int  # 0: the whole row
    crc: int


@dataclass(frozen=True)
class ValueFormat:
    """Stored form of m: z = `bits`, and the quantizer's group size if z is 8 or less."""

    bits: int = 32
    group_size: int | None = None

    def __post_init__(self) -> None:
        if self.bits not in BITS or isinstance(self.bits, bool):
            raise ConfigError("store.bits", self.bits, ", ".join(map(str, BITS)))
        ops.groups(1, self.group_size)  # ConfigError for an invalid group size

    @property
    def grouping(self) -> int | None:
        """Effective group size: None without quantization."""
        return self.group_size if self.bits <= 8 else None

    def size(self, n: int, H: int) -> int:
        """Return the bytes of a stored value of n tokens."""
        return HEADER_BYTES + _payload_bytes(n, H, self.bits, self.grouping)

    def check(self, sample: int, version: int, m_nH: Tensor, where: str, *, values: bool = True) -> None:
        """Raise unless `pack` can store this.

        Args:
            sample: id, for the error.
            version: version of m.
            m_nH: float32 [n, H].
            where: names store and sample in errors.
            values: also check the values, which waits for a GPU.

        Raises:
            ConfigError: sample or version is out of range.
            ShapeError: dtype or shape of the tensor.
            NonFiniteError: values that z bits cannot hold; 32 bits hold every float32, NaN included.
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
        """Encode m [n, H], which lies on the host and has passed `check`; m is not modified.

        The only place where m is rounded to z bits.
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
        visit = ops.EncodeItem(m_nH, None, ops.QuantizerOptions(self.bits, self.grouping))
        try:
            ops.encode_batch([visit], payload).check()
        except NonFiniteError as error:
            raise NonFiniteError(f"{where}: {error}") from error
        return payload


def read_header(value: bytes | bytearray | memoryview, where: str) -> ValueHeader:
    """Decode the header of a stored value from at least its first HEADER_BYTES; DamagedStoreError if it is invalid."""
    if len(value) < HEADER_BYTES:
        raise DamagedStoreError(f"{where}: {len(value)} bytes, expected at least {HEADER_BYTES}")
    magic, version, bits, reserved, sample, m_version, n, H, group_size = _FIELDS.unpack_from(value)
    if magic != MAGIC:
        raise DamagedStoreError(f"{where}: begins with {magic.hex()}, expected {MAGIC.hex()}")
    if version != FORMAT:
        raise DamagedStoreError(f"{where}: format version {version}, expected {FORMAT}")
    header = ValueHeader(sample, m_version, n, H, bits, group_size, *_CRC.unpack_from(value, _FIELDS.size))
    too_large = n * H * bits > 8 * MAX_BYTES  # a damaged header must not cause such an allocation
    if bits not in BITS or reserved or not H or (bits > 8 and group_size) or too_large:
        raise DamagedStoreError(f"{where}: not a header of a stored value: {header}")
    return header


def stored_size(header: ValueHeader) -> int:
    """Return the bytes of the whole value of a header."""
    return HEADER_BYTES + _payload_bytes(header.n, header.H, header.bits, header.group_size or None)


def verify_value(value: bytearray | memoryview, where: str) -> ValueHeader:
    """Check length and CRC-32 of a stored value, and return its header; DamagedStoreError, naming `where`."""
    header = read_header(value, where)
    if stored_size(header) != len(value):
        raise DamagedStoreError(f"{where}: {len(value)} bytes, expected {stored_size(header)} by its header")
    view = memoryview(value)
    crc = ops.crc32(view[HEADER_BYTES:], zlib.crc32(view[: _FIELDS.size]))
    if crc != header.crc:
        raise DamagedStoreError(f"{where}: damaged: CRC-32 {crc:#010x}, expected {header.crc:#010x}")
    return header


def unpack(value: bytearray | memoryview, where: str, *, alias: bool = False) -> CachedActivation:
    """Verify and decode a stored value.

    Args:
        value: header and payload.
        where: names store and sample in errors.
        alias: with 32 bits the tensor may share `value`'s memory, which has no other user.

    Raises:
        DamagedStoreError: length or CRC-32 is wrong.
    """
    return decode_value(value, verify_value(value, where), alias=alias)


def decode_value(value: bytearray | memoryview, header: ValueHeader, *, alias: bool = False) -> CachedActivation:
    """Decode a value that `verify_value` has passed, or that never left this process's memory; alias as in `unpack`."""
    n, H, bits, grouping = header.n, header.H, header.bits, header.group_size or None
    if n == 0:
        return CachedActivation(header.version, torch.empty(0, H, dtype=torch.float32))
    if bits == 32:
        m_nH = _payload_tensor(value, "<f4", n * H).view(n, H)
        return CachedActivation(header.version, m_nH if alias else m_nH.clone())
    if bits == 16:
        return CachedActivation(header.version, _payload_tensor(value, "<f2", n * H).view(n, H).float())
    m_nH = torch.empty(n, H, dtype=torch.float32)
    payload = torch.from_numpy(np.frombuffer(value, np.uint8, offset=HEADER_BYTES))
    ops.decode_batch(payload, [ops.DecodeItem(m_nH, ops.QuantizerOptions(bits, grouping))])
    return CachedActivation(header.version, m_nH)


def _payload_tensor(value: bytearray | memoryview, dtype: str, count: int) -> Tensor:
    array = np.frombuffer(value, dtype, count, HEADER_BYTES)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


def _payload_bytes(n: int, H: int, bits: int, group_size: int | None) -> int:
    if bits > 8:
        return n * H * bits // 8
    return n * ops.quantized_row_bytes(H, bits, group_size)
