"""Methods that compress data-parallel gradients and the options that each takes, checked once when they are made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from pipecomp.errors import ConfigError

_MAX_NORM = 2**53
Bits = int | tuple[int, ...]
Norm = str | float | tuple[str | float, str | float]

# What each method takes, with its default; a method's other options are errors. REQUIRED has no default.
REQUIRED = object()
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "global_qsgd": {"levels": "exponential", "bits": 8, "norm": "inf", "sparse": False},
    "qsgd_mn": {"bits": 8},
    "qsgd_mn_ts": {"bits": (4, 8)},
    "grandk_mn": {"bits": 8, "k": 10_000, "rescale": False, "error_feedback": False},
    "grandk_mn_ts": {"bits": (4, 8), "k": 10_000, "rescale": False, "error_feedback": False},
    "qsgd": {"bits": 8},
    "terngrad": {},
    "nuqsgd": {"bits": 4},
    "casq": {"bits": 4, "buckets": 0.005, "interval": 100},
    "double_squeeze": {"bits": 4, "group_size": 128},
    "quantized_adam": {"bits": 4, "group_size": 128, "freeze_step": REQUIRED},
    "powersgd": {"rank": 1},
    "fp16": {},
}


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """What crosses data-parallel groups, and what tied weights exchange. None: the method's own default.

    method: "none" is an uncompressed all-reduce; the others are those of docs/algorithms.md, section 2.
    bits: of a value; for the two-scale methods (*_ts) a list, the narrow scale first. levels: "linear" or
    "exponential" (4 or 8 bits). norm: "inf", a number p >= 1, or [q, p]: the p-norm over workers of each worker's
    q-norm. sparse: send only what is not zero (norm 2). k: coordinates that all workers pick, a number of them or a
    share below 1. rescale: multiply by d/k, which makes it unbiased; error_feedback: keep what was not sent for later.
    buckets: share of the values that CASQ's means are of; interval: steps between its clusterings. group_size: values
    that share a scale. freeze_step: step at which the variance is frozen. rank: of PowerSGD's matrices.
    """

    method: str = "none"
    levels: str | None = None
    bits: Bits | None = None
    norm: Norm | None = None
    sparse: bool | None = None
    k: int | float | None = None
    rescale: bool | None = None
    error_feedback: bool | None = None
    buckets: float | None = None
    interval: int | None = None
    group_size: int | None = None
    freeze_step: int | None = None
    rank: int | None = None

    METHODS: ClassVar[tuple[str, ...]] = tuple(OPTIONS)

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or self.method not in OPTIONS:
            raise ConfigError("gradients.method", self.method, ", ".join(map(repr, OPTIONS)))
        takes = dict(OPTIONS[self.method])
        if self.sparse is True and "sparse" in takes:
            takes |= {"norm": 2, "bits": 2 if self.levels == "linear" else 4}
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name == "method":
                continue
            if name not in takes:
                if value is not None:
                    users = [f"'{m}'" for m, options in OPTIONS.items() if name in options]
                    raise ConfigError(f"gradients.{name}", value, f"only with {', '.join(users)}, not {self.method!r}")
                continue
            if value is None:
                value = takes[name]
            if value is REQUIRED:
                raise ConfigError(f"gradients.{name}", None, f"a whole number, which {self.method!r} needs")
            object.__setattr__(self, name, _CHECKS[name](f"gradients.{name}", value))
        self._check_together()

    def _check_together(self) -> None:
        if self.method in ("qsgd_mn_ts", "grandk_mn_ts"):
            bits = self.bits
            ok = isinstance(bits, tuple) and len(bits) >= 2 and list(bits) == sorted(set(bits)) and bits[0] <= 8
            if not ok:
                raise ConfigError("gradients.bits", bits, "two or more ascending numbers, the first at most 8")
            return
        if self.bits is not None and not isinstance(self.bits, int):
            raise ConfigError("gradients.bits", self.bits, f"one number with {self.method!r}")
        exponential = self.levels == "exponential" or self.method == "nuqsgd"
        if exponential and self.bits not in (4, 8):
            raise ConfigError("gradients.bits", self.bits, "4 or 8 with exponential levels")
        least = 1 if self.method in ("casq", "double_squeeze", "quantized_adam") else 2
        if self.bits is not None and not least <= self.bits <= 8:
            raise ConfigError("gradients.bits", self.bits, f"a whole number from {least} to 8 with {self.method!r}")
        if self.sparse and self.norm != 2:
            raise ConfigError("gradients.norm", self.norm, "2 with sparse (others leave few zeros)")
        if self.rescale and self.error_feedback:
            raise ConfigError("gradients.rescale", True, "false with error_feedback: what is kept would be sent twice")

    def check_given(self, given: Mapping[str, object]) -> None:
        """Nothing more to refuse: all of it is checked when it is made."""

    @property
    def exchanges_in_optimizer(self) -> bool:
        """Whether the optimizer exchanges (momentum), so that gradients stay local."""
        return self.method == "quantized_adam"


def norm_exponents(norm: Norm) -> tuple[float, float]:
    """(q, p) of a checked `norm`: q inside a worker, p over workers."""
    q, p = norm if isinstance(norm, tuple) else (norm, norm)
    return float(q), float(p)


def _whole(low: int, high: int | None = None) -> Any:
    def check(key: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
            limit = f"of at least {low}" if high is None else f"from {low} to {high}"
            raise ConfigError(key, value, f"a whole number {limit}")
        return value

    return check


def _bits(key: str, value: Any) -> Bits:
    if isinstance(value, (list, tuple)):
        return tuple(_whole(2, 16)(key, bits) for bits in value)
    bits: int = _whole(1, 16)(key, value)
    return bits


def _norm(key: str, value: Any) -> Norm:
    if isinstance(value, (list, tuple)) and len(value) == 2:
        q, p = (_one_norm(key, part) for part in value)
        return q, p
    return _one_norm(key, value)


def _one_norm(key: str, value: Any) -> str | float:
    if value == "inf":
        return "inf"
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 1
    if not ok:
        raise ConfigError(key, value, "'inf', a number of at least 1, or a pair of these")
    if isinstance(value, int) and value > _MAX_NORM:
        raise ConfigError(key, value, "a number up to 2**53, or 'inf'")
    return "inf" if math.isinf(value) else value


def _k(key: str, value: Any) -> int | float:
    share = isinstance(value, float) and 0 < value < 1
    if not share and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(key, value, "a whole number of at least 1, or a share between 0 and 1")
    number: int | float = value
    return number


def _share(key: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 1:
        raise ConfigError(key, value, "a share above 0, at most 1")
    return float(value)


def _bool(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(key, value, "true or false")
    return value


def _levels(key: str, value: Any) -> str:
    if value not in ("linear", "exponential"):
        raise ConfigError(key, value, "'linear' or 'exponential'")
    return str(value)


_CHECKS: dict[str, Any] = {
    "levels": _levels,
    "bits": _bits,
    "norm": _norm,
    "sparse": _bool,
    "k": _k,
    "rescale": _bool,
    "error_feedback": _bool,
    "buckets": _share,
    "interval": _whole(1),
    "group_size": _whole(1),
    "freeze_step": _whole(1),
    "rank": _whole(1),
}
