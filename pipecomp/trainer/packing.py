"""Nested arrays as plain bytes, to send them to another rank: a header in JSON, then the arrays' values.

    bytes of the header u64 little-endian, header, values of all arrays one after the other

Reading them runs nobody's code, as unpickling would.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipecomp.errors import DataError, WireError

_LENGTH = struct.Struct("<Q")
_KINDS = "biufc"  # of numpy dtypes: numbers only


def pack(value: Any) -> bytes:
    """Arrays of numbers, None, numbers, texts, and lists, tuples and mappings of them (which arrive as dicts).

    Raises DataError for anything else.
    """
    arrays: list[np.ndarray] = []
    header = json.dumps(_describe(value, arrays)).encode()
    return b"".join([_LENGTH.pack(len(header)), header, *(array.tobytes() for array in arrays)])


def unpack(data: bytes) -> Any:
    """What `pack` was given. Raises WireError for other bytes; lengths are checked before anything is allocated."""
    try:
        (length,) = _LENGTH.unpack_from(data)
        described = json.loads(data[_LENGTH.size : _LENGTH.size + length])
        value, end = _rebuild(described, data, _LENGTH.size + length)
    except (struct.error, ValueError, TypeError, KeyError, RecursionError) as error:
        raise WireError(f"{len(data)} bytes are no packed arrays: {error}") from error
    if end != len(data):
        raise WireError(f"packed arrays have {len(data)} bytes where their header says {end}")
    return value


def _describe(value: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS:
        array = value.astype(value.dtype.newbyteorder("<"), copy=False)
        arrays.append(array)
        return {"array": [array.dtype.str, list(array.shape)]}
    if isinstance(value, Mapping):
        return {"dict": [[_describe(key, arrays), _describe(item, arrays)] for key, item in value.items()]}
    if isinstance(value, (tuple, list)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_describe(item, arrays) for item in value]}
    shown = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    raise DataError(f"cannot send {shown} to another rank: only arrays of numbers, numbers, texts, and lists of them")


def _rebuild(described: Any, data: bytes, at: int) -> tuple[Any, int]:
    """A value, and where in `data` the next array begins."""
    if not isinstance(described, dict):
        return described, at
    ((kind, content),) = described.items()
    if kind == "array":
        dtype, shape = np.dtype(content[0]), tuple(content[1])
        if dtype.kind not in _KINDS or any(not isinstance(n, int) or n < 0 for n in shape):
            raise ValueError(f"no array of numbers: {content}")
        count = 1
        for n in shape:
            count *= n
        return np.frombuffer(data, dtype, count, at).reshape(shape).copy(), at + count * dtype.itemsize
    if kind == "dict":
        pairs = {}
        for key, item in content:
            pairs[_rebuild(key, data, at)[0]], at = _rebuild(item, data, at)
        return pairs, at
    if kind not in ("list", "tuple"):
        raise ValueError(f"unknown kind {kind!r}")
    items = []
    for item in content:
        value, at = _rebuild(item, data, at)
        items.append(value)
    return (tuple(items) if kind == "tuple" else items), at
