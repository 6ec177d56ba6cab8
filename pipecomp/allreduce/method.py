"""What a gradient method is made of: options with their checks, what averages, and what is sent.

A method is a frozen dataclass whose fields are its options, each made by `option(default, check)`:

    @dataclass(frozen=True, kw_only=True)
    class Rounded(Method):
        bits: int = option(8, whole(2, 8))

        def average(self, residuals): return RoundedAverage(self.bits)
        def plan(self, d, n, shapes=None): return Plan((), (scattered(d, n, packed(self.bits)),))

d: values of a bucket, n: ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from pipecomp.allreduce.call import Call, Counters, Name
from pipecomp.allreduce.error_feedback import Residuals
from pipecomp.allreduce.exchanges import Plan, Shapes
from pipecomp.errors import ConfigError

if TYPE_CHECKING:
    from pipecomp.allreduce.adaptive_options import Adaptive

Check = Callable[[str, Any], Any]
REQUIRED = object()  # the default of an option that has none


class Average(Protocol):
    """Averages a flat bucket over the group's ranks."""

    def mean(self, x_d: Tensor, out_d: Tensor, call: Call) -> None:
        """Write the mean of all ranks' x (any float dtype) to out (float32, may be x): the same bits on every rank."""


class LayerAverage(Average, Protocol):
    """One that takes part in adaptive compression, see `adaptive.py`.

    exponents: (q, p) of the norm that a layer is divided by before `mean` gets it, with `call.norm` 1; None where
    scales are made from the values. largest: magnitude above which nothing can be sent.
    """

    exponents: tuple[float, float] | None
    largest: float

    def squared_error(self, x_d: Tensor, call: Call) -> float:
        """‖x − sent‖² of a layer of this rank (float32), divided as for `mean`."""


class HookAverage(Protocol):
    """Averages DDP's buckets by itself, as torch's own hooks do."""

    def run(self, bucket: Any, key: str, counters: Counters, layers: Sequence[Name]) -> torch.futures.Future[Tensor]:
        """The mean of a bucket. layers: numbers of its parameters, or the key of a tensor that is no bucket."""


@runtime_checkable
class Stateful(Protocol):
    """What averages and keeps something for the next time, beside `Residuals`. saved_as: its key in a state's dict."""

    saved_as: str

    def state_dict(self) -> dict[Any, Any]:
        """Plain containers and tensors, for `torch.save` and `saving.save`."""

    def load_state_dict(self, state: dict[Any, Any], device: torch.device) -> None:
        """Go on with what `state_dict` returned; device: where gradients are."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method's options, checked. Subclasses give `plan`, and `average` or `hook`.

    by_matrix: whether it looks at the shapes of parameters. in_optimizer: whether an optimizer exchanges with it (its
    momentum), so that gradients stay local. measured: options that `pipecomp bench allreduce` measures.
    """

    by_matrix: ClassVar[bool] = False
    in_optimizer: ClassVar[bool] = False
    measured: ClassVar[Sequence[Mapping[str, Any]]] = ({},)

    @classmethod
    def checks(cls) -> dict[str, Check]:
        """What checks each option."""
        return {f.name: f.metadata["check"] for f in fields(cls)}

    @classmethod
    def defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Options that are left out, beside those that are given."""
        return {f.name: f.default for f in fields(cls)}

    def check(self, name: str) -> None:
        """Raise ConfigError for options that do not go together; name: of this method."""

    def adaptable(self) -> tuple[str, tuple[Any, ...]] | None:
        """The option that may differ between layers (`gradients.adaptive`), and what is tried by default."""
        return None

    def average(self, residuals: Residuals) -> Average:
        """What averages; residuals: of one state."""
        raise AssertionError(f"{type(self).__name__} gives neither `average` nor `hook`")

    @property
    def by_hook(self) -> bool:
        """Whether it gives `hook`."""
        return type(self).hook is not Method.hook

    def hook(self, group: Any, adaptive: Adaptive | None = None) -> HookAverage | None:
        """What averages DDP's buckets over torch's `group`, in place of `average`; None if nothing does.

        adaptive: how the option that is `adaptable` differs between layers.
        """
        return None

    def plan(self, d: int, n: int, shapes: Shapes | None = None) -> Plan:
        """What the ranks exchange for a bucket. shapes: of its parameters, for methods that are `by_matrix`."""
        raise AssertionError(f"{type(self).__name__} gives no `plan`")


def option(default: Any, check: Check) -> Any:
    """A field of a Method. check(key, value) returns the value to use or raises ConfigError."""
    return field(default=default, metadata={"check": check})


# -- checks of one option


def whole(low: int, high: int | None = None) -> Check:
    """Whole numbers."""

    def check(key: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
            limit = f"of at least {low}" if high is None else f"from {low} to {high}"
            raise ConfigError(key, value, f"a whole number {limit}")
        return value

    return check


def widths(key: str, value: Any) -> int | tuple[int, ...]:
    """Bits of a value, or of several scales; how many, and of what size, is up to `one_width` and `many_widths`."""
    if isinstance(value, (list, tuple)):
        return tuple(whole(2, 16)(key, bits) for bits in value)
    bits: int = whole(1, 16)(key, value)
    return bits


def share(key: str, value: Any) -> float:
    """A share of a whole."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 1:
        raise ConfigError(key, value, "a share above 0, at most 1")
    return float(value)


def flag(key: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ConfigError(key, value, "true or false")
    return value


# -- checks of a method's options together


def one_width(bits: Any, name: str, least: int = 2) -> None:
    """ConfigError unless `bits` is one number from `least` to 8."""
    if not isinstance(bits, int):
        raise ConfigError("gradients.bits", bits, f"one number with {name!r}")
    if not least <= bits <= 8:
        raise ConfigError("gradients.bits", bits, f"a whole number from {least} to 8 with {name!r}")


def exponential_width(bits: Any, name: str) -> None:
    """ConfigError unless codes of `bits` have room for signs and exponents."""
    if isinstance(bits, int) and bits not in (4, 8):
        raise ConfigError("gradients.bits", bits, "4 or 8 with exponential levels")
    one_width(bits, name)


def many_widths(bits: Any, name: str) -> None:
    """ConfigError unless `bits` are those of two scales or more."""
    ok = isinstance(bits, tuple) and len(bits) >= 2 and list(bits) == sorted(set(bits)) and bits[0] <= 8
    if not ok:
        raise ConfigError("gradients.bits", bits, "two or more ascending numbers, the first at most 8")


@dataclass(frozen=True, kw_only=True)
class LinearLevels(Method):
    """A method whose one option is the width of its linear levels. bits: of a value."""

    bits: int = option(8, widths)

    measured: ClassVar = ({"bits": 8},)

    def check(self, name: str) -> None:
        """See Method."""
        one_width(self.bits, name)

    def adaptable(self) -> tuple[str, tuple[Any, ...]] | None:
        """See Method."""
        return "bits", (2, 3, 4, 5, 6, 8)
