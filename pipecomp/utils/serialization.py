"""Serialization of nested containers as JSON, for files and between ranks.

JSON trees keep tuples apart from lists and allow any key. Unlike unpickling, reading them runs no code of the sender.

Note: [Messages between ranks]
    Ranks exchange plain values, and instances of classes registered with `serializable`: NamedTuples, dataclasses and
    pydantic models of plain values, rebuilt by their constructors. The format has no version field: all ranks of a run
    have the same version of pipecomp, checked at the rendezvous.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pipecomp.errors import WireError

JsonTree = Any  # JSON values
_SCALARS = (str, int, float, bool, type(None))
_KINDS = "dicts, lists, tuples, sets, text, bytes, numbers"
_records: dict[str, type] = {}
_Class = TypeVar("_Class", bound=type)


def encode_tree(value: Any, encode_leaf: Callable[[Any], JsonTree]) -> JsonTree:
    """Convert nested mappings, lists and tuples to JSON values.

    Args:
        value: the containers; mappings are restored as dicts.
        encode_leaf: called for everything else. Returns the leaf itself if JSON can represent it, or a dict with one
            key, a kind other than "dict", "list" and "tuple".
    """
    if isinstance(value, Mapping):
        items = value.items()
        return {"dict": [[encode_tree(key, encode_leaf), encode_tree(item, encode_leaf)] for key, item in items]}
    if isinstance(value, (tuple, list)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [encode_tree(item, encode_leaf) for item in value]}
    return encode_leaf(value)


def decode_tree(tree: JsonTree, decode_leaf: Callable[[str, Any], Any]) -> Any:
    """Restore the argument of `encode_tree`.

    Args:
        tree: the return value of `encode_tree`.
        decode_leaf: called with kind and content of each leaf that was encoded as a dict, in the same order.

    Raises:
        ValueError, TypeError: for a value that `encode_tree` cannot have returned.
    """
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "dict":
        return {decode_tree(key, decode_leaf): decode_tree(item, decode_leaf) for key, item in content}
    if kind in ("list", "tuple"):
        items = [decode_tree(item, decode_leaf) for item in content]
        return tuple(items) if kind == "tuple" else items
    return decode_leaf(kind, content)


def replace_nonfinite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON cannot represent, by None."""
    if isinstance(value, Mapping):
        return {key: replace_nonfinite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_nonfinite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_line(value: Any) -> str:
    """Return a line of JSON, with null for numbers that are not finite."""
    return json.dumps(replace_nonfinite(value)) + "\n"


# -- messages between ranks


def serializable(kind: _Class) -> _Class:
    """Allow ranks to exchange instances of this NamedTuple, dataclass or pydantic model of plain values."""
    _records[_class_name(kind)] = kind
    return kind


def encode(value: Any) -> bytes:
    """Encode plain containers and instances of `serializable` classes.

    Raises:
        TypeError: for anything else.
    """
    return json.dumps(_encode(value)).encode()


def decode(data: bytes) -> Any:
    """Restore the argument of `encode`.

    Raises:
        WireError: for bytes that `encode` cannot have returned.
    """
    try:
        return decode_tree(json.loads(data.decode()), _decode_leaf)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise WireError(f"cannot decode an object of another rank: {error}") from error


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _field_names(kind: Any) -> list[str]:
    return list(getattr(kind, "model_fields", None) or (field.name for field in dataclasses.fields(kind)))


def _encode(value: Any) -> JsonTree:
    if type(value) in _SCALARS:
        return value
    name = _class_name(type(value))
    if name in _records:  # before tuples: a NamedTuple is one
        items = value if isinstance(value, tuple) else [getattr(value, f) for f in _field_names(type(value))]
        return {"record": [name, [_encode(item) for item in items]]}
    if isinstance(value, Mapping):
        return {"dict": [[_encode(key), _encode(item)] for key, item in value.items()]}
    if isinstance(value, (tuple, list)):
        return {"tuple" if isinstance(value, tuple) else "list": [_encode(item) for item in value]}
    if isinstance(value, (set, frozenset)):
        return {"set": [_encode(item) for item in sorted(value, key=repr)]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": base64.b64encode(value).decode()}
    for kind in (str, bool, int, float):  # subclasses, such as enumerations
        if isinstance(value, kind):
            return kind(value)
    if getattr(value, "ndim", 1) == 0 and hasattr(value, "item"):  # NumPy scalars
        return _encode(value.item())
    raise TypeError(f"ranks exchange plain values only ({_KINDS}), not {type(value).__name__}")


def _decode_leaf(kind: str, content: Any) -> Any:
    if kind == "set":
        return {decode_tree(item, _decode_leaf) for item in content}
    if kind == "bytes":
        return base64.b64decode(content, validate=True)
    if kind == "record":
        name, items = content
        record, values = _records[name], [decode_tree(item, _decode_leaf) for item in items]
        if issubclass(record, tuple):
            return record(*values)
        return record(**dict(zip(_field_names(record), values, strict=True)))
    raise ValueError(f"unknown kind {kind!r}")
