"""Validation shared by the sections of a configuration.

Sections are pydantic models. `Section` translates pydantic's errors to `ConfigError`, the only place that does.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, core_schema

from pipecomp.errors import ConfigError, require

_DEEPSPEED_SECTIONS = (
    "activation_checkpointing",
    "bf16",
    "fp16",
    "optimizer",
    "scheduler",
    "torch_autocast",
    "zero_optimization",
)
_OBJECT = "an object with keys and values"


class Section(BaseModel):
    """Base of all configuration models: strict, frozen, and without unknown keys.

    Validators raise ConfigError with a key relative to the model, "" for the value itself; `Section` adds the prefix.
    The allowed values in an error are a field's `description`, or else derived from its type.

    Attributes:
        section: dotted name of the section, the prefix of its keys; "" for a value nested in other models.

    Raises:
        ConfigError: for unknown keys, and for values that are not allowed, alone or together.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    section: ClassVar[str] = ""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _config_error(type(self), error.errors(include_url=False), values) from None

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some values changed, validated like a new one."""
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | changes)

    def refuse_given(self, keys: tuple[str, ...], allowed: str, hint: str | None = None) -> None:
        """Raise ConfigError if one of these keys is set; None and False count as unset."""
        for key in keys:
            value = getattr(self, key)
            if key in self.model_fields_set and value is not None and value is not False:
                raise ConfigError(f"{self.section}.{key}", value, allowed, hint)


@dataclass(frozen=True)
class OneOf:
    """Annotation of a string that is one of `choices`."""

    choices: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.literal_schema(list(self.choices))

    def __str__(self) -> str:
        return ", ".join(map(repr, self.choices))


def _config_error(model: type[Section], errors: list[ErrorDetails], values: Mapping[str, Any]) -> ConfigError:
    """Convert the errors of one key; unknown keys come first."""
    errors = sorted(errors, key=lambda error: error["type"] != "extra_forbidden")  # unknown keys first
    first = errors[0]["loc"][:1]
    for error in errors:
        inner = error.get("ctx", {}).get("error")
        if error["loc"][:1] == first and isinstance(inner, ConfigError):
            # Other parts of the location name branches of unions.
            indices = "".join(f"[{part}]" for part in error["loc"] if isinstance(part, int))
            key = _join(model.section, _join("".join(map(str, first)) + indices, inner.key))
            return ConfigError(key, inner.got, inner.allowed, inner.hint)
    name, fields = str(first[0]), model.model_fields
    key = _join(model.section, name)
    if name not in fields:
        near = difflib.get_close_matches(name, fields, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else None
        return ConfigError(key, values[name], f"the keys {', '.join(fields)}", hint)
    missing = errors[0]["type"] == "missing"
    if missing and not model.section:  # a nested object: the outer model adds its key
        optional = ", ".join(repr(key) for key in fields if key != name)
        return ConfigError("", dict(values), f"an object with {name!r}, and optionally {optional}")
    hint = "This key is required." if missing else None
    return ConfigError(key, values.get(name), _allowed_values(fields[name]), hint)


def _join(prefix: str, key: str) -> str:
    """Prepend a prefix that the key does not have yet."""
    if not prefix or key == prefix or key.startswith((f"{prefix}.", f"{prefix}[")):
        return key
    return f"{prefix}.{key}" if key else prefix


def _allowed_values(field: FieldInfo) -> str:
    """Describe the allowed values of a field for an error message."""
    if field.description is not None:
        return field.description
    kind: Any = field.annotation
    optional = isinstance(kind, types.UnionType) and types.NoneType in typing.get_args(kind)
    if optional:
        (kind,) = (part for part in typing.get_args(kind) if part is not types.NoneType)
    limits = {name: getattr(limit, name) for limit in field.metadata for name in ("ge", "le") if hasattr(limit, name)}
    choices = [item for item in field.metadata if isinstance(item, OneOf)]
    if choices:
        text = str(choices[0])
    elif kind is bool:
        text = "true or false"
    elif kind is int and "le" in limits:
        text = f"a whole number from {limits['ge']} to {limits['le']}"
    elif kind is int:
        text = f"a whole number of at least {limits['ge']}"
    else:
        text = _OBJECT
    return f"null or {text}" if optional else text


def require_choice(key: str, got: object, choices: tuple[str, ...]) -> None:
    """Raise ConfigError unless `got` is one of the choices."""
    require(isinstance(got, str) and got in choices, key, got, ", ".join(map(repr, choices)))


# -- DeepSpeed's own sections


def require_objects(ds_config: Mapping[str, Any]) -> None:
    """Raise ConfigError if a section of DeepSpeed's is not an object, as in "bf16": true or null."""
    for key in _DEEPSPEED_SECTIONS:
        require(isinstance(ds_config.get(key, {}), Mapping), key, ds_config.get(key), f"{_OBJECT}, or leave it out")


def batch_sizes(config: dict[str, Any], replicas: int) -> tuple[int, int]:
    """Return samples per micro-batch and micro-batches per step.

    Raises:
        ConfigError: for sizes that are missing, of the wrong type, or inconsistent.
    """
    micro = _batch_size(config, "train_micro_batch_size_per_gpu")
    if micro is None:
        raise ConfigError("train_micro_batch_size_per_gpu", None, "a whole number of at least 1")
    accumulation, batch = _batch_size(config, "gradient_accumulation_steps"), _batch_size(config, "train_batch_size")
    if batch is not None and batch != micro * replicas * (accumulation or max(1, batch // (micro * replicas))):
        allowed = f"a multiple of micro-batch × replicas, {micro} × {replicas}"
        if accumulation is not None:
            allowed = f"micro-batch × accumulation × replicas, {micro * accumulation * replicas}"
        raise ConfigError("train_batch_size", batch, allowed)
    if accumulation is None:
        accumulation = 1 if batch is None else batch // (micro * replicas)
    return micro, accumulation


def _batch_size(config: dict[str, Any], key: str) -> int | None:
    value = config.get(key)
    ok = value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)
    require(ok, key, value, "a whole number of at least 1")
    return value
