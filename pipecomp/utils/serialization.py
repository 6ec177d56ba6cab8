"""What ranks tell each other, as JSON: reading it runs nobody's code, as unpickling would.

Plain values travel as they are. Of classes only those that are marked with `exchanged` do: NamedTuples and dataclasses
of plain values, which are made anew by their constructors.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pipecomp.errors import WireError
from pipecomp.utils.json_tree import rebuild

_SCALARS = (str, int, float, bool, type(None))
_KINDS = "dicts, lists, tuples, sets, text, bytes, numbers"
_records: dict[str, type] = {}
_Class = TypeVar("_Class", bound=type)


def exchanged(kind: _Class) -> _Class:
    """Mark a NamedTuple or dataclass of plain values as one that ranks may send each other."""
    _records[_name(kind)] = kind
    return kind


def encode(value: Any) -> bytes:
    """A value of dicts, lists, tuples, sets, text, bytes, numbers, None and marked classes. TypeError for others."""
    return json.dumps(_describe(value)).encode()


def decode(data: bytes) -> Any:
    """What `encode` was given. WireError if it is anything else."""
    try:
        return rebuild(json.loads(data.decode()), _fetch)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise WireError(f"an object of another rank cannot be read: {error}") from error


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _describe(value: Any) -> Any:
    if type(value) in _SCALARS:
        return value
    name = _name(type(value))
    if name in _records:
        items = value if isinstance(value, tuple) else [getattr(value, f.name) for f in dataclasses.fields(value)]
        return {"record": [name, [_describe(item) for item in items]]}
    if isinstance(value, Mapping):
        return {"dict": [[_describe(key), _describe(item)] for key, item in value.items()]}
    if isinstance(value, (tuple, list)):
        return {"tuple" if isinstance(value, tuple) else "list": [_describe(item) for item in value]}
    if isinstance(value, (set, frozenset)):
        return {"set": [_describe(item) for item in sorted(value, key=repr)]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": base64.b64encode(value).decode()}
    for kind in (str, bool, int, float):  # subclasses, as enumerations are
        if isinstance(value, kind):
            return kind(value)
    if getattr(value, "ndim", 1) == 0 and hasattr(value, "item"):  # numpy's numbers
        return _describe(value.item())
    raise TypeError(f"ranks exchange plain values only ({_KINDS}), not {type(value).__name__}")


def _fetch(kind: str, content: Any) -> Any:
    if kind == "set":
        return {rebuild(item, _fetch) for item in content}
    if kind == "bytes":
        return base64.b64decode(content, validate=True)
    if kind == "record":
        name, items = content
        record, values = _records[name], [rebuild(item, _fetch) for item in items]
        if issubclass(record, tuple):
            return record(*values)
        names = [field.name for field in dataclasses.fields(record)]  # type: ignore[arg-type]
        return record(**dict(zip(names, values, strict=True)))
    raise ValueError(f"unknown kind {kind!r}")
