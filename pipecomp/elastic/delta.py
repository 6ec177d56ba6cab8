"""Lossless compression of the difference between two versions of a block of values.

Between two records most values change in their low bits only. The bits of both versions are combined by XOR, so that
equal bits become zeros, whatever the values are: NaN payloads and negative zeros survive. The bytes are then sorted by
their place in the value, which puts the zeros of signs, exponents and high bits of the mantissa next to each other.
Each of these planes is left out if it is zero, compressed by zlib, or sent as it is if zlib gains little.

    block: for each plane: method u8, content bytes u32, content
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

from pipecomp.errors import WireError

BLOCK_BYTES = 1 << 20  # of values in one block
_PLANE = struct.Struct("<BI")
_ZERO, _RAW, _ZLIB = range(3)
_LEVEL = 1
_PROBE_BYTES = 1 << 14  # a plane whose middle does not shrink to _GAIN is sent as it is
_GAIN = 0.95
OVERHEAD_BYTES = 8 * _PLANE.size  # at most, of a block


def encode_block(new: np.ndarray, old: np.ndarray | None, itemsize: int) -> bytes:
    """Compress a block.

    Args:
        new: Its values, uint8 [n].
        old: The version that the receiver has, uint8 [n]; None if it has none.
        itemsize: Bytes of a value; n is a multiple.

    Returns:
        At most n + OVERHEAD_BYTES bytes.
    """
    changed = new if old is None else new ^ old
    parts: list[bytes | memoryview] = []
    for plane in changed.reshape(-1, itemsize).T:
        content: bytes | memoryview = b""
        method = _ZERO
        if plane.any():
            content, method = np.ascontiguousarray(plane).data, _RAW
            middle = max(0, plane.size // 2 - _PROBE_BYTES // 2)
            probe = content[middle : middle + _PROBE_BYTES]
            if len(zlib.compress(probe, _LEVEL)) < _GAIN * len(probe):
                smaller = zlib.compress(content, _LEVEL)
                if len(smaller) < len(content):
                    content, method = smaller, _ZLIB
        parts += [_PLANE.pack(method, len(content)), content]
    return b"".join(parts)


def decode_block(data: bytes | memoryview, old: np.ndarray | None, size: int, itemsize: int) -> np.ndarray:
    """Restore a block of `size` bytes, uint8; `old` and `itemsize` as in `encode_block`.

    Raises:
        WireError: For bytes that `encode_block` cannot have returned. No more than `size` bytes are decompressed.
    """
    values, at, length = np.empty((size // itemsize, itemsize), dtype=np.uint8), 0, size // itemsize
    data = memoryview(data)
    for plane in values.T:
        if at + _PLANE.size > len(data):
            raise WireError(f"a block of a record ends after {len(data)} bytes")
        method, count = _PLANE.unpack_from(data, at)
        at += _PLANE.size
        content = data[at : at + count]
        at += count
        if method == _ZERO and count == 0:
            plane[:] = 0
        elif method == _RAW and count == len(content) == length:
            plane[:] = np.frombuffer(content, dtype=np.uint8)
        elif method == _ZLIB and count == len(content):
            plane[:] = np.frombuffer(inflate(content, length), dtype=np.uint8)
        else:
            raise WireError(f"a block of a record has a plane of method {method} and {count} bytes, of {length} values")
    if at != len(data):
        raise WireError(f"a block of a record has {len(data)} bytes, its planes {at}")
    flat = values.reshape(-1)
    return flat if old is None else flat ^ old


def inflate(content: bytes | memoryview, size: int) -> bytes:
    """Decompress exactly `size` bytes, and allocate no more. Raises WireError for anything else."""
    stream = zlib.decompressobj()
    try:
        out = stream.decompress(content, size + 1)
    except zlib.error as error:
        raise WireError(f"{len(content)} bytes of a record cannot be decompressed: {error}") from error
    if len(out) != size or not stream.eof or stream.unused_data:
        raise WireError(f"{len(content)} bytes of a record are not {size} bytes, compressed")
    return out
