"""The section "gradients": compression of the exchanges between replicas, and local steps.

`METHODS` has the options of each gradient method; the methods themselves are in `pipecomp.allreduce.methods`.
To add one, write a `MethodOptions` and give it a line in `METHODS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, Field, create_model, model_validator

from pipecomp.config.checks import OneOf, Section
from pipecomp.errors import ConfigError, require

Adaptable = tuple[str, tuple[Any, ...]]
_WIDTHS = (2, 3, 4, 5, 6, 8)
_MAX_NORM = 2**53

# -- options of gradient methods


class MethodOptions(Section):
    """Options of a gradient method.

    Attributes:
        by_matrix: the method compresses matrices, and needs the shapes of parameters.
        in_optimizer: an optimizer exchanges its momentum with the method, so that gradients stay local.
        measured: options that `pipecomp bench allreduce` measures.
        added: options that older checkpoints lack, with their defaults.
    """

    section: ClassVar[str] = "gradients"
    by_matrix: ClassVar[bool] = False
    in_optimizer: ClassVar[bool] = False
    measured: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    added: ClassVar[Mapping[str, Any]] = {}

    def adaptable(self) -> Adaptable | None:
        """Return the option that may differ between layers (`gradients.adaptive`), and the default values to try."""
        return None


def _width(default: int, least: int = 2) -> Any:
    """Declare the bits of a value, from `least` to 8."""
    return Field(default=default, ge=least, le=8)


def _check_exponential(bits: int) -> None:
    require(bits in (4, 8), "bits", bits, "4 or 8 with exponential levels", "Codes hold a sign and an exponent.")


def _ascending(bits: tuple[int, ...]) -> tuple[int, ...]:
    ok = list(bits) == sorted(set(bits)) and bits[0] <= 8
    require(ok, "", bits, "two or more ascending numbers from 2 to 16, the first at most 8")
    return bits


_ScaleWidths = Annotated[
    tuple[Annotated[int, Field(ge=2, le=16)], ...],
    Field(strict=False, min_length=2, description="two or more ascending numbers from 2 to 16, the first at most 8"),
    AfterValidator(_ascending),
]
_Share = Annotated[float, Field(gt=0, le=1, description="a share above 0, at most 1")]


def _norm(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        require(len(value) == 2, "", value, "'inf', a number of at least 1, or a pair of these")
        return tuple(map(_one_norm, value))
    return _one_norm(value)


def _one_norm(value: Any) -> str | float:
    if value == "inf":
        return "inf"
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 1
    require(ok, "", value, "'inf', a number of at least 1, or a pair of these")
    require(isinstance(value, float) or value <= _MAX_NORM, "", value, "a number up to 2**53, or 'inf'")
    return "inf" if math.isinf(value) else value


_Norm = Annotated[Any, BeforeValidator(_norm)]
_MAX_OF_L2 = (2, "inf")


def _exponents(norm: Any) -> tuple[float, float]:
    """Return (q, p): q within a worker, p over workers."""
    q, p = norm if isinstance(norm, tuple) else (norm, norm)
    return float(q), float(p)


class NoOptions(MethodOptions):
    """`none`, `fp16` and `terngrad`."""


class GlobalQsgdOptions(MethodOptions):
    """`global_qsgd`.

    Attributes:
        levels: "linear" or "exponential" (4 or 8 bits).
        bits: bits per value.
        norm: "inf", a number p >= 1, or [q, p]: the p-norm over workers of each worker's q-norm.
        sparse: send only the values that are not rounded to zero (norm 2).
    """

    levels: Annotated[str, OneOf(("linear", "exponential"))] = "exponential"
    bits: int = _width(8)
    norm: _Norm = "inf"
    sparse: bool = False

    measured: ClassVar = (
        {"levels": "exponential", "bits": 8},
        {"levels": "exponential", "bits": 4},
        {"levels": "linear", "bits": 8},
        {"levels": "linear", "bits": 4},
        {"levels": "linear", "sparse": True},
    )

    @model_validator(mode="before")
    @classmethod
    def _set_sparse_defaults(cls, values: dict[str, Any]) -> dict[str, Any]:
        if values.get("sparse") is not True:
            return values
        return {"norm": 2, "bits": 2 if values.get("levels") == "linear" else 4, **values}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.exponential:
            _check_exponential(self.bits)
        hint = "Other norms round few values to zero."
        require(not self.sparse or self.norm == 2, "norm", self.norm, "2 with sparse", hint)
        return self

    @property
    def exponential(self) -> bool:
        """True if levels are powers of two."""
        return self.levels == "exponential"

    @property
    def exponents(self) -> tuple[float, float]:
        """(q, p): q within a worker, p over workers."""
        return _exponents(self.norm)

    def adaptable(self) -> Adaptable | None:
        if self.sparse:  # the size of sparse codes depends on the values
            return None
        return "bits", (4, 8) if self.exponential else _WIDTHS


class LinearOptions(MethodOptions):
    """`qsgd` and `qsgd_mn`. bits: bits per value, for linear levels."""

    bits: int = _width(8)

    measured: ClassVar = ({"bits": 8},)

    def adaptable(self) -> Adaptable | None:
        return "bits", _WIDTHS


class NuQsgdOptions(MethodOptions):
    """`nuqsgd`. bits: bits per value, 4 or 8, for exponential levels."""

    bits: int = _width(4)

    measured: ClassVar = ({"bits": 4},)

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_exponential(self.bits)
        return self

    def adaptable(self) -> Adaptable | None:
        return "bits", (4, 8)


class MultiScaleOptions(MethodOptions):
    """`qsgd_mn_ts`.

    Attributes:
        bits: width of each scale, ascending; codes have the first width.
        norm: as for `global_qsgd`.
    """

    bits: _ScaleWidths = (4, 8)
    norm: _Norm = _MAX_OF_L2

    measured: ClassVar = ({"bits": (4, 8)},)
    added: ClassVar = {"norm": _MAX_OF_L2}

    @property
    def exponents(self) -> tuple[float, float]:
        """(q, p): q within a worker, p over workers."""
        return _exponents(self.norm)


class RandomKOptions(MethodOptions):
    """Options of methods that send K random coordinates.

    Attributes:
        k: coordinates, a number or a share below 1.
        rescale: multiply by d/k, which makes the mean unbiased.
        error_feedback: add dropped values to later gradients.
        coordinates: "random": drawn anew in every call; "walk": the next k of a random order of all, which is drawn
            anew at its end.
        norm: norm of the k values, as for `global_qsgd`.
    """

    k: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)] = Field(
        default=10_000, description="a whole number of at least 1, or a share between 0 and 1"
    )
    rescale: bool = False
    error_feedback: bool = False
    coordinates: Annotated[str, OneOf(("random", "walk"))] = "random"
    norm: _Norm = _MAX_OF_L2

    measured: ClassVar = ({"k": 10_000},)
    added: ClassVar = {"coordinates": "random", "norm": _MAX_OF_L2}

    @property
    def exponents(self) -> tuple[float, float]:
        """(q, p): q within a worker, p over workers."""
        return _exponents(self.norm)

    def adaptable(self) -> Adaptable | None:
        """Only a share scales with the size of a group of layers, and a walk needs the same layers in every call."""
        if not isinstance(self.k, float) or self.coordinates == "walk":
            return None
        return "k", (self.k / 4, self.k / 2, min(2 * self.k, 0.99))

    def count_of(self, d: int) -> int:
        """Return K for a bucket of d values."""
        return min(d, max(1, round(self.k * d)) if isinstance(self.k, float) else self.k)


class GrandKOptions(RandomKOptions):
    """`grandk_mn`. bits: bits per value."""

    bits: int = _width(8)

    @model_validator(mode="after")
    def _check(self) -> Self:
        hint = "Error feedback would send the dropped values a second time."
        require(not (self.rescale and self.error_feedback), "rescale", True, "false with error_feedback", hint)
        return self


class GrandKMultiScaleOptions(RandomKOptions):
    """`grandk_mn_ts`. bits: width of each scale, ascending."""

    bits: _ScaleWidths = (4, 8)


class CasqOptions(MethodOptions):
    """`casq`.

    Attributes:
        bits: bits per cluster number.
        buckets: number of means as a share of the values; 0: each cluster's values become its center.
        allocation: buckets of a cluster: "entropy" of its histogram times its share of the values, or "equal".
        interval: steps between clusterings.
        sample: share of the values that are clustered.
        error_feedback: add what the means leave out to later gradients.
    """

    bits: int = _width(4, least=1)
    buckets: float = Field(default=0.005, ge=0, le=1, description="a share from 0 to 1")
    allocation: Annotated[str, OneOf(("entropy", "equal"))] = "entropy"
    interval: int = Field(default=100, ge=1)
    sample: _Share = 0.1
    error_feedback: bool = True

    measured: ClassVar = ({"bits": 4},)
    added: ClassVar = {"allocation": "entropy", "sample": 0.1, "error_feedback": True}

    @model_validator(mode="after")
    def _check(self) -> Self:
        ok = self.buckets > 0 or self.allocation == "entropy"
        require(ok, "allocation", self.allocation, "'entropy' with 0 buckets", "There are none to allocate.")
        return self


class DoubleSqueezeOptions(MethodOptions):
    """`double_squeeze`. bits: bits per value. group_size: values that share a scale."""

    bits: int = _width(4, least=1)
    group_size: int = Field(default=128, ge=1)

    measured: ClassVar[Sequence[Mapping[str, Any]]] = ({"bits": 4},)

    def adaptable(self) -> Adaptable | None:
        return "bits", (1, *_WIDTHS)


class QuantizedAdamOptions(DoubleSqueezeOptions):
    """`quantized_adam`: double_squeeze for an optimizer's momentum. freeze_step: step that freezes the variance."""

    freeze_step: int = Field(ge=1)

    in_optimizer: ClassVar = True
    measured: ClassVar = ()

    def adaptable(self) -> Adaptable | None:
        return None


class PowerSgdOptions(MethodOptions):
    """`powersgd`. rank: rank of the factors."""

    rank: int = Field(default=1, ge=1)

    by_matrix: ClassVar = True
    measured: ClassVar = ({"rank": 1}, {"rank": 2})

    def adaptable(self) -> Adaptable | None:
        return "rank", (max(1, self.rank // 4), max(1, self.rank // 2), 2 * self.rank, 4 * self.rank)


METHODS: dict[str, type[MethodOptions]] = {
    "none": NoOptions,
    "global_qsgd": GlobalQsgdOptions,
    "qsgd_mn": LinearOptions,
    "qsgd_mn_ts": MultiScaleOptions,
    "grandk_mn": GrandKOptions,
    "grandk_mn_ts": GrandKMultiScaleOptions,
    "qsgd": LinearOptions,
    "terngrad": NoOptions,
    "nuqsgd": NuQsgdOptions,
    "casq": CasqOptions,
    "double_squeeze": DoubleSqueezeOptions,
    "quantized_adam": QuantizedAdamOptions,
    "powersgd": PowerSgdOptions,
    "fp16": NoOptions,
}

# -- adaptive compression


class Adaptive(Section):
    """One option of a method differs between layers (`pipecomp.allreduce.adaptive`).

    Attributes:
        every: steps from one plan to the next; all layers have the method's own value until the first.
        error: bound of a plan's squared error, relative to the error with the method's own value in all layers.
        option: the method's option: "bits", "k" with the GRandK methods, or "rank" with PowerSGD.
        values: candidates in ascending order, the method's own value among them.
    """

    section: ClassVar[str] = "gradients.adaptive"

    every: int = Field(default=100, ge=1)
    error: float = Field(default=1.0, gt=0, allow_inf_nan=False, description="a number above 0")
    option: str
    values: tuple[Any, ...]

    @classmethod
    def from_mapping(cls, section: object, options: MethodOptions, method: str) -> Adaptive:
        """Read the section, such as {"every": 100, "error": 1.0, "bits": [2, 3, 4]}; all keys are optional.

        Raises:
            ConfigError: for keys and values that are not allowed or have no effect with this method.
        """
        if not isinstance(section, Mapping):
            raise ConfigError(cls.section, section, "null, or an object with every, error and an option's values")
        adaptable = options.adaptable()
        if adaptable is None:
            hint = f"With {method!r} and these options, all layers are compressed in the same way."
            raise ConfigError(cls.section, dict(section), "null", hint)
        option, default = adaptable
        for key, value in section.items():
            if key not in ("every", "error", option):
                raise ConfigError(f"{cls.section}.{key}", value, f"the keys every, error, {option} with {method!r}")
        values = _candidates(options, option, section.get(option, default))
        return cls(option=option, values=values, **{key: section[key] for key in ("every", "error") if key in section})

    def as_dict(self) -> dict[str, Any]:
        """Return the complete section."""
        return {"every": self.every, "error": self.error, self.option: self.values}


def _candidates(options: MethodOptions, option: str, values: Any) -> tuple[Any, ...]:
    """Return the method's own value and the given ones, each validated as the method's option."""
    key, own = f"{Adaptive.section}.{option}", getattr(options, option)
    if not isinstance(values, (list, tuple)):
        raise ConfigError(key, values, "a list")
    candidates = {own}
    for value in values:
        try:
            candidates.add(getattr(options.replace(**{option: value}), option))
        except ConfigError as error:
            raise ConfigError(key, values, f"a list of values, each {error.allowed}", error.hint) from error
        require(type(value) is type(own), key, values, f"values of the type of {option} itself, {own}")
    require(
        len(candidates) > 1, key, values, f"other values than {own}", "All layers have this value without adaptive."
    )
    return tuple(sorted(candidates))


# -- local steps

_LOCAL_KEYS = ("local_steps", "local_steps_warmup", "outer", "second_moments", "fragments", "overlap", "mixing")


class Outer(Section):
    """The outer optimizer: SGD on the mean movement of the replicas (DiLoCo, arXiv:2311.08105).

    Attributes:
        optimizer: "nesterov" (DiLoCo's), or "sgd" with or without heavy-ball momentum.
        lr: learning rate; 1 without momentum is plain averaging. None: a rate of each row's own (`CommonWeights.step`).
        momentum: momentum of the outer gradients.
    """

    optimizer: Annotated[str, OneOf(("nesterov", "sgd"))] = "sgd"
    lr: float | None = Field(default=None, gt=0, allow_inf_nan=False, description="a number above 0")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="a number from 0 to below 1")

    @model_validator(mode="before")
    @classmethod
    def _set_nesterov_defaults(cls, values: Any) -> Any:
        nesterov = isinstance(values, Mapping) and values.get("optimizer") == "nesterov"
        return {"lr": 0.7, "momentum": 0.9, **values} if nesterov else values

    @model_validator(mode="after")
    def _check(self) -> Self:
        plain = self.optimizer == "sgd"
        require(plain or self.momentum > 0, "momentum", self.momentum, "a number above 0 with 'nesterov'")
        ok = self.lr is not None or (plain and self.momentum == 0)
        require(ok, "lr", self.lr, "a number above 0 with momentum")
        return self

    @property
    def keeps_equal_weights(self) -> bool:
        """True if an outer step does not change weights that are equal on all replicas."""
        return self.lr in (None, 1) and self.momentum == 0


NESTEROV = Outer(optimizer="nesterov")  # lr 0.7, momentum 0.9: arXiv:2311.08105, for pre-training


class LocalSteps(Section):
    """Interval and method of averaging between replicas (DiLoCo, arXiv:2311.08105; Streaming DiLoCo, arXiv:2501.18512).

    Attributes:
        local_steps: H, inner steps between averages.
        local_steps_warmup: steps over which the interval grows from 1 to H.
        outer: the outer optimizer.
        second_moments: "rows": replicas share the means of the rows of their Adam's second moments; "own": nothing.
        fragments: F, parts of the weights that are averaged in turn.
        overlap: T, inner steps that run while a fragment is averaged.
        mixing: α, share of its own weights that a replica keeps when averaged ones arrive late, beside 1 − α of the
            averaged ones (arXiv:2501.18512, section 2.4). None: it takes the averaged ones and adds the steps it has
            taken since it sent its own.
    """

    section: ClassVar[str] = "gradients"

    local_steps: int = Field(ge=1)
    local_steps_warmup: int = Field(default=0, ge=0)
    outer: Outer = Outer()
    second_moments: Annotated[str, OneOf(("rows", "own"))] = "rows"
    fragments: int = Field(default=1, ge=1)
    overlap: int = Field(default=0, ge=0)
    mixing: float | None = Field(default=None, ge=0, lt=1, description="a number from 0 to below 1")

    @model_validator(mode="after")
    def _check(self) -> Self:
        h = self.local_steps
        for key in ("local_steps_warmup", "fragments", "overlap", "second_moments"):
            value = getattr(self, key)
            ok = h > 1 or value == type(self).model_fields[key].default
            require(ok, key, value, "only with local_steps of at least 2")
        require(self.fragments <= h, "fragments", self.fragments, f"a whole number from 1 to {h}")
        require(self.overlap < h, "overlap", self.overlap, f"a whole number from 0 to {h - 1}")
        require(self.mixing is None or self.overlap > 0, "mixing", self.mixing, "only with gradients.overlap")
        return self

    def interval(self, began: int) -> int:
        """Return the inner steps of the interval that begins after step `began`: 1 at first, H after the warm-up."""
        if began >= self.local_steps_warmup:
            return self.local_steps
        return 1 + began * (self.local_steps - 1) // self.local_steps_warmup

    @property
    def shares_rows(self) -> bool:
        """True if replicas also average statistics of each row, uncompressed."""
        return self.local_steps > 1 and (self.second_moments == "rows" or self.outer.lr is None)

    @property
    def ever_synchronous(self) -> bool:
        """True if some intervals have one step, so that gradients are averaged in it."""
        return self.interval(0) == 1

    def as_dict(self) -> dict[str, Any]:
        """Return plain values of the complete section, without those that are None."""
        return {key: value for key, value in self.model_dump().items() if value is not None}


# -- the section

_OPTIONS = tuple(dict.fromkeys(name for options in METHODS.values() for name in options.model_fields))
_ADDED_KEYS = ("coordinates", "allocation", "sample")  # no older method had options of these names

if TYPE_CHECKING:
    _Flat = Any
else:
    _Flat = create_model(
        "_Flat",
        __base__=Section,
        method=(str, "none"),
        **{name: (Any, None) for name in (*_OPTIONS, "adaptive", *_LOCAL_KEYS)},
    )


class Gradients(_Flat):
    """Compression of exchanges in data-parallel groups, and of tied weights' gradients.

    The fields are `method`, the options of all methods, `adaptive`, and those of local steps, completed by defaults.

    Args:
        method: a name in `METHODS`; "none" is an uncompressed all-reduce.
        adaptive: None, or a mapping for `Adaptive.from_mapping`: one option's value may then differ between layers.
        local_steps, local_steps_warmup, outer, second_moments, fragments, overlap, mixing: None, or the settings of
            `LocalSteps`; all are None without `local_steps`.
        **options: those of the method; None and omitted options have the method's defaults. Options of other methods
            are None.

    Raises:
        ConfigError: for an unknown method, an option of another method, and values that are not allowed, alone or
            together.

    Example:
        >>> Gradients(method="double_squeeze", bits=3).group_size
        128
    """

    section: ClassVar[str] = "gradients"

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        """Validate the options of the method, of adaptive compression and of local steps, and fill in defaults."""
        if not isinstance(values, Mapping):
            return values  # pydantic refuses it
        name = values.get("method", "none")
        known = isinstance(name, str) and name in METHODS
        require(known, "method", name, ", ".join(map(repr, METHODS)))
        schema, present = METHODS[name], {key: value for key, value in values.items() if value is not None}
        for key in _OPTIONS:
            if key in present and key not in schema.model_fields:
                users = ", ".join(repr(other) for other, takes in METHODS.items() if key in takes.model_fields)
                raise ConfigError(key, present[key], f"only with {users}, not {name!r}")
        options = schema(**{key: present[key] for key in schema.model_fields if key in present})
        completed = {**values, **options.model_dump()}
        if "adaptive" in present:
            completed["adaptive"] = Adaptive.from_mapping(present["adaptive"], options, name).as_dict()
        local = {key: present[key] for key in _LOCAL_KEYS if key in present}
        if "local_steps" in local:
            hint = "The optimizer averages its momentum in every step."
            require(not schema.in_optimizer, "local_steps", local["local_steps"], f"null with {name!r}", hint)
            completed |= LocalSteps(**local).as_dict()
        for key in () if "local_steps" in local else local:
            raise ConfigError(key, local[key], "only with gradients.local_steps")
        return completed

    @property
    def method_options(self) -> MethodOptions:
        """The method's options."""
        schema = METHODS[self.method]
        return schema(**{name: getattr(self, name) for name in schema.model_fields})

    @property
    def adaptive_options(self) -> Adaptive | None:
        """The settings of adaptive compression."""
        return None if self.adaptive is None else Adaptive.from_mapping(self.adaptive, self.method_options, self.method)

    @property
    def local(self) -> LocalSteps | None:
        """The settings of local steps; None if gradients are averaged in every step."""
        settings = {name: getattr(self, name) for name in _LOCAL_KEYS if getattr(self, name) is not None}
        return LocalSteps(**settings) if settings else None

    @property
    def exchanges_in_optimizer(self) -> bool:
        """True if the optimizer exchanges its momentum, so that gradients stay local."""
        return METHODS[self.method].in_optimizer

    def state_options(self) -> dict[str, Any]:
        """Return the arguments of a `State`: the method, and its options."""
        if self.exchanges_in_optimizer:
            return {"method": "double_squeeze", "bits": self.bits, "group_size": self.group_size}
        return {k: v for k, v in self.model_dump().items() if v is not None and k not in _LOCAL_KEYS}

    def as_dict(self) -> dict[str, Any]:
        """Return all options as plain values; `adaptive` and local steps only if they are set.

        Note:
            Checkpoints and stores compare these values, so keys that were added later are absent by default.
        """
        values = self.model_dump()
        for name, default in METHODS[self.method].added.items():
            if values[name] == default:
                values[name] = None
        for name in ("adaptive", *_LOCAL_KEYS, *_ADDED_KEYS):
            if values[name] is None:
                del values[name]
        return values
