"""Nested arrays as plain bytes, to send them to another rank: a header in JSON, then the arrays' values.

bytes of the header u64 little-endian, header, values of all arrays one after the other
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np

from pipecomp.errors import DataError, WireError
from pipecomp.utils.serialization import decode_tree, encode_tree

_LENGTH = struct.Struct("<Q")
_KINDS = "biufc"  # of numpy dtypes: numbers only


def pack(value: Any) -> bytes:
    """Pack nested values.

    Args:
        value: Arrays of numbers, None, numbers, strings, and lists, tuples and mappings of them, which arrive as dicts.

    Raises:
        DataError: For anything else.
    """
    arrays: list[np.ndarray] = []

    def put_aside(leaf: Any) -> Any:
        leaf = leaf.item() if isinstance(leaf, np.generic) else leaf
        if leaf is None or isinstance(leaf, (bool, int, float, str)):
            return leaf
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in _KINDS:
            arrays.append(leaf.astype(leaf.dtype.newbyteorder("<"), copy=False))
            return {"array": [arrays[-1].dtype.str, list(leaf.shape)]}
        shown = f"array of {leaf.dtype}" if isinstance(leaf, np.ndarray) else type(leaf).__name__
        allowed = "only arrays of numbers, numbers, texts, and lists of them"
        raise DataError(f"cannot send {shown} to another rank: {allowed}")

    header = json.dumps(encode_tree(value, put_aside)).encode()
    return b"".join([_LENGTH.pack(len(header)), header, *(array.tobytes() for array in arrays)])


def unpack(data: bytes) -> Any:
    """Return what `pack` was given. Lengths are checked before anything is allocated.

    Args:
        data: What `pack` returned.

    Raises:
        WireError: For other bytes.
    """
    end = _LENGTH.size

    def fetch(kind: str, content: Any) -> np.ndarray:
        nonlocal end
        dtype, shape = np.dtype(content[0]), tuple(content[1])
        if kind != "array" or dtype.kind not in _KINDS or any(not isinstance(n, int) or n < 0 for n in shape):
            raise ValueError(f"no array of numbers: {kind} {content}")
        begin, count = end, math.prod(shape)
        end += count * dtype.itemsize
        return np.frombuffer(data, dtype, count, begin).reshape(shape).copy()

    try:
        (length,) = _LENGTH.unpack_from(data)
        end += length
        value = decode_tree(json.loads(data[_LENGTH.size : end]), fetch)
    except (struct.error, ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise WireError(f"{len(data)} bytes are no packed arrays: {error}") from error
    if end != len(data):
        raise WireError(f"packed arrays have {len(data)} bytes where their header says {end}")
    return value
