"""The settings of adaptive compression, `gradients.adaptive`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipecomp.allreduce.method import Method, whole
from pipecomp.errors import ConfigError

KEY = "gradients.adaptive"


@dataclass(frozen=True, kw_only=True)
class Adaptive:
    """Let one option of a method differ between layers: see `adaptive.py`.

    Args:
        every: steps from one plan to the next; until the first, all layers have the method's own value.
        error: what a plan's squared error may be, as a multiple of that with the method's own value everywhere.
        option: which of the method's options: "bits", "k" with the GRandK methods, or "rank" with PowerSGD.
        values: what is tried for it, ascending; the method's own value is always among them.
    """

    every: int = 100
    error: float = 1.0
    option: str
    values: tuple[Any, ...]

    @classmethod
    def checked(cls, given: object, method: Method, name: str) -> Adaptive:
        """Read what a configuration has: {"every": 100, "error": 1.0, "bits": [2, 3, 4]}, or less.

        Raises:
            ConfigError: for keys and values that are not allowed or could not take effect with this method.
        """
        if not isinstance(given, Mapping):
            raise ConfigError(KEY, given, "null, or an object with every, error and an option's values")
        adaptable = method.adaptable()
        if adaptable is None:
            raise ConfigError(KEY, dict(given), f"null with {name!r} and these options: no layer can have its own")
        option, usual = adaptable
        for key, value in given.items():
            if key not in ("every", "error", option):
                raise ConfigError(f"{KEY}.{key}", value, f"no such key; with {name!r} there are every, error, {option}")
        every = whole(1)(f"{KEY}.every", given.get("every", 100))
        error = given.get("error", 1.0)
        if not isinstance(error, (int, float)) or isinstance(error, bool) or not 0 < error <= sys.float_info.max:
            raise ConfigError(f"{KEY}.error", error, "a number above 0")
        values = _values(method, name, option, given.get(option, usual))
        return cls(every=every, error=float(error), option=option, values=values)

    def as_dict(self) -> dict[str, Any]:
        """As a configuration has it, complete."""
        return {"every": self.every, "error": self.error, self.option: self.values}


def _values(method: Method, name: str, option: str, given: Any) -> tuple[Any, ...]:
    """What is tried, each as the method itself would check it."""
    key, own = f"{KEY}.{option}", getattr(method, option)
    if not isinstance(given, (list, tuple)):
        raise ConfigError(key, given, "a list")
    found = {own}
    for value in given:
        try:
            found.add(method.checks()[option](key, value))
            dataclasses.replace(method, **{option: value}).check(name)
        except ConfigError as error:
            raise ConfigError(key, given, f"of each value {error.allowed}") from error
        if type(value) is not type(own):
            raise ConfigError(key, given, f"values of the kind of {option} itself ({own})")
    if len(found) == 1:
        raise ConfigError(key, given, f"other values than {own}, which all layers have without")
    return tuple(sorted(found))
