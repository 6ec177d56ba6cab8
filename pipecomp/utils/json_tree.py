"""Nested containers as JSON that keeps tuples apart from lists and takes any keys; what JSON cannot hold is put aside.

Reading them runs nobody's code, as unpickling would.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

Described = Any  # JSON values


def describe(value: Any, put_aside: Callable[[Any], Described]) -> Described:
    """`put_aside(leaf)` gets all that is no mapping, list or tuple; mappings arrive as dicts.

    It returns the leaf itself if JSON holds it, or a dict with one key, a kind other than "dict", "list" and "tuple".
    """
    if isinstance(value, Mapping):
        return {"dict": [[describe(key, put_aside), describe(item, put_aside)] for key, item in value.items()]}
    if isinstance(value, (tuple, list)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [describe(item, put_aside) for item in value]}
    return put_aside(value)


def rebuild(described: Described, fetch: Callable[[str, Any], Any]) -> Any:
    """Rebuild what `describe` was given. `fetch(kind, content)`: a leaf that was put aside, in the order of `describe`.

    Raises ValueError or TypeError for what `describe` cannot have returned.
    """
    if not isinstance(described, dict):
        return described
    ((kind, content),) = described.items()
    if kind == "dict":
        return {rebuild(key, fetch): rebuild(item, fetch) for key, item in content}
    if kind in ("list", "tuple"):
        items = [rebuild(item, fetch) for item in content]
        return tuple(items) if kind == "tuple" else items
    return fetch(kind, content)


def finite(value: Any) -> Any:
    """JSON has no NaN and no Infinity: null in their place."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_line(value: Any) -> str:
    """A line of JSON, null for numbers that are none."""
    return json.dumps(finite(value)) + "\n"
