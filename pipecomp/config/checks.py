"""What the sections of a configuration check their values with: types, ranges, choices, and keys that are not there."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any

from pipecomp.errors import ConfigError, require

_OBJECTS = ("activation_checkpointing", "bf16", "fp16", "optimizer", "scheduler", "torch_autocast", "zero_optimization")


def require_objects(ds_config: Mapping[str, Any]) -> None:
    """ConfigError for a section of DeepSpeed's that is no object, as in "bf16": true; null is none, either."""
    for key in _OBJECTS:
        allowed = "an object with keys and values, or leave it out"
        require(isinstance(ds_config.get(key, {}), Mapping), key, ds_config.get(key), allowed)


def batch_sizes(config: dict[str, Any], replicas: int) -> tuple[int, int]:
    """Return samples of a micro-batch and micro-batches of a step. Raises ConfigError for the configuration's."""
    micro = _size(config, "train_micro_batch_size_per_gpu")
    if micro is None:
        raise ConfigError("train_micro_batch_size_per_gpu", None, "a whole number of at least 1")
    accumulation, batch = _size(config, "gradient_accumulation_steps"), _size(config, "train_batch_size")
    if batch is not None and batch != micro * replicas * (accumulation or max(1, batch // (micro * replicas))):
        allowed = f"a multiple of micro-batch × replicas, {micro} × {replicas}"
        if accumulation is not None:
            allowed = f"micro-batch × accumulation × replicas, {micro * accumulation * replicas}"
        raise ConfigError("train_batch_size", batch, allowed)
    if accumulation is None:
        accumulation = 1 if batch is None else batch // (micro * replicas)
    return micro, accumulation


def _size(config: dict[str, Any], key: str) -> int | None:
    value = config.get(key)
    require(value is None or is_number(value, 1), key, value, "a whole number of at least 1")
    return value


def is_number(value: object, low: float, high: float = math.inf, kind: type | tuple[type, ...] = int) -> bool:
    """Whether it is a number of that kind from `low` to `high`, not a bool."""
    return isinstance(value, kind) and not isinstance(value, bool) and low <= value <= high  # type: ignore[operator]


def require_choice(key: str, got: object, choices: tuple[str, ...]) -> None:
    """ConfigError unless it is one of the choices."""
    require(isinstance(got, str) and got in choices, key, got, ", ".join(map(repr, choices)))


def require_unset(section: str, key: str, given: Mapping[str, object], allowed: str) -> None:
    """ConfigError if `given` has the key, other than as null."""
    if key in given and given[key] is not None:
        raise ConfigError(f"{section}.{key}", given[key], allowed)


def values_of(name: str, value: object, kind: type) -> dict[str, Any]:
    """Return `value` as a dict whose keys are all fields of the dataclass `kind`; ConfigError for anything else."""
    prefix = f"{name}." if name else ""
    if not isinstance(value, Mapping):
        raise ConfigError(name or "pipecomp", value, "an object with keys and values")
    fields = [f.name for f in dataclasses.fields(kind)]
    for key in value:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ConfigError(f"{prefix}{key}", value[key], f"no such key{hint}; known: {', '.join(fields)}")
    return dict(value)
