"""The section "activations": what is sent between stages, with how many bits.

A number of bits is given, or follows an error (`ConstantError`), whose most bits may be found when a run begins: for
"auto", and within a line's rate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pipecomp.config.checks import is_number, require_choice, require_unset, values_of
from pipecomp.errors import ConfigError, require
from pipecomp.utils.serialization import serializable

BITS = "a whole number from 1 to 8"
FEWEST = {"forward_bits": 2, "backward_bits": 4}
"""The fewest that the most bits of a packet are set to when a run begins; people may choose fewer."""
_ERROR = "an object with 'error'"
_RATES = "a number of Mbit/s above 0, at most a million, or a list with one for each link"


@serializable
@dataclass(frozen=True, kw_only=True)
class ConstantError:
    """The fewest bits, packet by packet, that keep an error (docs/algorithms.md, 1.2).

    Attributes:
        error: the largest ‖sent − x‖ / ‖x‖ of a packet, above 0 and below 1; of a change too it is relative to the
            value x itself.
        min, max: the fewest and the most bits, 1 to 8; max is taken where even that does not keep the error.
        mbit_per_s: what the line carries that way, in Mbit/s with all headers, of all links or of each: when a run
            begins, max falls to the bits that compute hides there, not below FEWEST or min. None: max stays.
    """

    error: float
    min: int = 2
    max: int = 8
    mbit_per_s: float | tuple[float, ...] | None = None

    def __str__(self) -> str:
        rates = "/".join(f"{rate:g}" for rate in each_link(self.mbit_per_s) if rate is not None)
        within = f", within {rates} Mbit/s" if rates else ""
        return f"{self.min} to {self.max} (error {self.error:g}{within})"

    def at_most(self, bits: int) -> int | ConstantError:
        """Limit it to so many bits, and to no rate; a number of bits where that leaves only one."""
        made = dataclasses.replace(self, max=min(bits, self.max), mbit_per_s=None)
        return made.min if made.max <= made.min else made

    @classmethod
    def of(cls, key: str, given: object) -> ConstantError:
        """Read a mapping of the configuration. ConfigError, with `key`, for anything that is not exactly right."""
        values = values_of(key, given, cls)
        require("error" in values, key, values, "an object with 'error', and perhaps 'min', 'max' and 'mbit_per_s'")
        rates = values.get("mbit_per_s")
        if isinstance(rates, list):  # as JSON has it
            values["mbit_per_s"] = rates = tuple(rates)
        made = cls(**values)
        ok = is_number(made.error, 0, 1, (int, float)) and made.error not in (0, 1)
        require(ok, f"{key}.error", made.error, "a number above 0 and below 1")
        for name in ("min", "max"):
            require(is_number(getattr(made, name), 1, 8), f"{key}.{name}", getattr(made, name), BITS)
        allowed = f"more than min, which is {made.min}: else a number of bits says it"
        require(made.min < made.max, f"{key}.max", made.max, allowed)
        every = each_link(rates)
        ok = every != () and all(is_number(rate, 0, 1e6, (int, float)) and rate > 0 for rate in every)
        require(rates is None or ok, f"{key}.mbit_per_s", list(every) if every is rates else rates, _RATES)
        return made


Bits = int | str | tuple[int | ConstantError, ...] | ConstantError
BITS_KEYS = ("forward_bits", "backward_bits", "first_visit", "backward_first_visit")


@dataclass(frozen=True, kw_only=True)
class Activations:
    """What crosses the links between stages (AQ-SGD, arXiv:2206.01299; docs/algorithms.md, 1).

    Attributes:
        method: "none" sends the training dtype, "fp16" and "bf16" cast, "direct" quantizes the activation itself
            (DirectQ), "aqsgd" quantizes its change since the sample's last visit.
        forward_bits, backward_bits: 1 to 8 bits a value for "direct" and "aqsgd", or a ConstantError (in JSON an
            object): every packet has the fewest that keep its error. A list has one of them for each link. With "auto"
            `pipecomp.initialize` measures and chooses a ConstantError for each.
        first_visit: "full" sends a sample's first activation in the training dtype (the paper); 1 to 8, or a
            ConstantError, quantizes it too.
        rounding: "nearest" or "stochastic".
        scale: "max" or "rms".
        group_size: values that share a scale, None: a token's whole row.
        backward_top_k: the share of gradient values kept per group, the rest is zero (paper, H.6).
        backward_method: "direct" quantizes gradients themselves, "delta" their change since the sample's last visit, as
            "aqsgd" does with activations.
        backward_first_visit: bits, 1 to 8 or a ConstantError, of a sample's first gradient with "delta".
        eval: what evaluation sends: "full" (the training dtype), "fp16", "bf16" or "direct" (forward_bits).
        rotation: a seeded Walsh–Hadamard rotation before quantizing activations themselves: the first visits of
            "aqsgd", if these are quantized, or what "direct" sends.
    """

    method: str = "none"
    forward_bits: Bits = 4
    backward_bits: Bits = 8
    first_visit: str | int | ConstantError = "full"
    rounding: str = "nearest"
    scale: str = "max"
    group_size: int | None = None
    backward_top_k: float | None = None
    backward_method: str = "direct"
    backward_first_visit: int | ConstantError = 8
    eval: str = "full"
    rotation: bool = False

    METHODS: ClassVar[tuple[str, ...]] = ("none", "fp16", "bf16", "direct", "aqsgd")
    QUANTIZED: ClassVar[tuple[str, ...]] = ("direct", "aqsgd")
    EVAL: ClassVar[tuple[str, ...]] = ("full", *(method for method in METHODS if method not in ("none", "aqsgd")))

    def __post_init__(self) -> None:
        require_choice("activations.method", self.method, self.METHODS)
        for key in BITS_KEYS:
            got = getattr(self, key)
            if isinstance(got, (Mapping, ConstantError)):  # a mapping as JSON has it
                object.__setattr__(self, key, ConstantError.of(f"activations.{key}", plain_bits(got)))
        for key in FEWEST:
            if isinstance(getattr(self, key), (list, tuple)):
                object.__setattr__(self, key, _of_links(f"activations.{key}", getattr(self, key)))
            if getattr(self, key) != "auto":
                _require_bits(f"activations.{key}", getattr(self, key))
            elif self.method not in self.QUANTIZED:
                raise ConfigError(f"activations.{key}", "auto", "a number; 'auto' with method 'direct' or 'aqsgd'")
        ok = self.first_visit == "full" or _is_bits(self.first_visit)
        require(ok, "activations.first_visit", self.first_visit, f"'full', {BITS} or {_ERROR}")
        require_choice("activations.rounding", self.rounding, ("nearest", "stochastic"))
        require_choice("activations.scale", self.scale, ("max", "rms"))
        n, k = self.group_size, self.backward_top_k
        ok = n is None or is_number(n, 1, 2**32 - 1)
        require(ok, "activations.group_size", n, "null or a whole number of at least 1, below 2**32")
        ok = k is None or (k != 0 and is_number(k, 0, 1, (int, float)))
        require(ok, "activations.backward_top_k", k, "null or a share above 0, at most 1")
        require_choice("activations.backward_method", self.backward_method, ("direct", "delta"))
        first, delta = self.backward_first_visit, self.backward_method == "delta"
        require(_is_bits(first), "activations.backward_first_visit", first, f"{BITS} or {_ERROR}")
        allowed = f"'direct'; 'delta' only with method 'aqsgd', whose store it needs, not {self.method!r}"
        require(self.method == "aqsgd" or not delta, "activations.backward_method", self.backward_method, allowed)
        allowed = "null with backward_method 'delta', whose changes of kept values are no changes of others"
        require(k is None or not delta, "activations.backward_top_k", k, allowed)
        require_choice("activations.eval", self.eval, self.EVAL)
        require(isinstance(self.rotation, bool), "activations.rotation", self.rotation, "true or false")
        self._check_errors()
        something = self.method == "direct" or (self.method == "aqsgd" and self.first_visit != "full")
        allowed = "false; true with 'direct', or with 'aqsgd' and a quantized first_visit"
        require(something or not self.rotation, "activations.rotation", True, allowed)
        allowed = "'max' with rounding 'stochastic' (clipping at an rms scale is a bias)"
        require(self.scale == "max" or self.rounding != "stochastic", "activations.scale", self.scale, allowed)

    def _check_errors(self) -> None:
        """Refuse what a constant error does not go together with."""
        allowed = f"{BITS}, a list or 'auto' with backward_top_k, whose error is in what it leaves out"
        errors = [bits for bits in each_link(self.backward_bits) if isinstance(bits, ConstantError)]
        ok = self.backward_top_k is None or not errors
        require(ok, "activations.backward_bits", bits_text(self.backward_bits), allowed)
        for key in BITS_KEYS:
            for bits in each_link(getattr(self, key)):
                if isinstance(bits, ConstantError) and bits.mbit_per_s is not None:
                    self._check_rate(key, bits)

    def _check_rate(self, key: str, bits: ConstantError) -> None:
        """Refuse a rate that could not take effect."""
        where = f"activations.{key}"
        hint = "Only forward_bits and backward_bits follow a rate."
        require(key in FEWEST, f"{where}.mbit_per_s", bits.mbit_per_s, "null", hint)
        allowed = f"only with method 'direct' or 'aqsgd', not {self.method!r}"
        require(self.method in self.QUANTIZED, f"{where}.mbit_per_s", bits.mbit_per_s, allowed)
        least = max(bits.min, FEWEST[key])
        allowed = f"more than {least} with mbit_per_s, which leaves at least {least} bits as the most"
        require(bits.max > least, f"{where}.max", bits.max, allowed)

    def measured(self, key: str) -> bool:
        """Say whether bits are found when a run begins. key: "forward_bits" or "backward_bits"."""
        every = each_link(getattr(self, key))
        return any(
            bits == "auto" or (isinstance(bits, ConstantError) and bits.mbit_per_s is not None) for bits in every
        )

    def bits(self, link: int) -> tuple[int | ConstantError, int | ConstantError]:
        """Forward and backward, of one link. ConfigError while one of them is to be found, or a list is too short."""
        return self._bits_of("forward_bits", link), self._bits_of("backward_bits", link)

    def _bits_of(self, key: str, link: int) -> int | ConstantError:
        got = getattr(self, key)
        if self.measured(key):
            allowed = f"{BITS} or {_ERROR}; only pipecomp.initialize settles 'auto' and mbit_per_s"
            raise ConfigError(f"activations.{key}", bits_text(got), allowed)
        if isinstance(got, tuple):
            require(link < len(got), f"activations.{key}", list(got), f"a number for link {link} too")
        found = bits_of_link(got, link)
        return found if isinstance(found, ConstantError) else int(found)

    def check_links(self, links: int) -> None:
        """ConfigError if a list of bits or of rates is not one for each of so many links."""
        for key in FEWEST:
            got = getattr(self, key)
            rates = got.mbit_per_s if isinstance(got, ConstantError) else None
            for name, found in ((key, got), (f"{key}.mbit_per_s", rates)):
                if isinstance(found, tuple):
                    allowed = f"one number, or {links}: one for each link between {links + 1} stages"
                    require(len(found) == links, f"activations.{name}", list(found), allowed)

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return values | {key: plain_bits(values[key]) for key in BITS_KEYS}

    def check_given(self, given: Mapping[str, object]) -> None:
        """Refuse the keys in `given` that `method` gives no effect."""
        if self.method not in self.QUANTIZED:
            for key in ("forward_bits", "backward_bits", "rounding", "scale", "group_size", "backward_top_k"):
                if key == "forward_bits" and self.eval == "direct":
                    continue
                require_unset("activations", key, given, f"only with method 'direct' or 'aqsgd', not {self.method!r}")
        if self.backward_method != "delta":
            require_unset("activations", "backward_first_visit", given, "only with backward_method 'delta'")
        if self.method != "aqsgd":
            require_unset("activations", "first_visit", given, f"only with method 'aqsgd', not {self.method!r}")

    def check_clusters(self, given: Mapping[str, object]) -> None:
        """Refuse the settings in `given` that say how samples come back, where `store.clusters` keeps none of them."""
        allowed = "not with store.clusters, where no sample has a first visit"
        require_unset("activations", "first_visit", given, allowed)
        allowed = "'direct' with store.clusters, which keeps nothing of a sample that its next gradient could change"
        require(self.backward_method == "direct", "activations.backward_method", self.backward_method, allowed)


def each_link(setting: Any) -> tuple[Any, ...]:
    """All that a setting has: one for each link, or the one of all."""
    return setting if isinstance(setting, tuple) else (setting,)


def per_link(settings: Iterable[Any]) -> Any:
    """Make a setting of one for each link: the one of all where they are alike."""
    found = tuple(settings)
    return found[0] if len(set(found)) == 1 else found


def bits_of_link(bits: Bits, link: int) -> int | str | ConstantError:
    """Pick a link's bits: a number, "auto", or what keeps an error, with the rate of that link."""
    found = bits[link] if isinstance(bits, tuple) else bits
    if isinstance(found, ConstantError) and isinstance(found.mbit_per_s, tuple):
        return dataclasses.replace(found, mbit_per_s=found.mbit_per_s[link])
    return found


def bits_text(bits: Bits) -> str:
    """For people: "4", "8/2/8" on links that differ, or "2 to 8 (error 0.07)"."""
    return "/".join(map(str, each_link(bits)))


def plain_bits(bits: Any) -> Any:
    """As JSON has it; a rate only where there is one."""
    if isinstance(bits, tuple):
        return tuple(map(plain_bits, bits))
    if not isinstance(bits, ConstantError):
        return bits
    return {key: value for key, value in dataclasses.asdict(bits).items() if value is not None}


def _of_links(key: str, given: list[Any] | tuple[Any, ...]) -> tuple[Any, ...]:
    """Read a list, one for each link, as JSON has it or as it is; each has one rate."""
    found = [
        ConstantError.of(f"{key}[{link}]", plain_bits(bits)) if isinstance(bits, (Mapping, ConstantError)) else bits
        for link, bits in enumerate(given)
    ]
    for link, bits in enumerate(found):
        rate = getattr(bits, "mbit_per_s", None)
        require(
            not isinstance(rate, tuple), f"{key}[{link}].mbit_per_s", rate, "a number of Mbit/s above 0, of this link"
        )
    return tuple(found)


def _is_bits(value: object) -> bool:
    return isinstance(value, ConstantError) or is_number(value, 1, 8)


def _require_bits(key: str, got: Any) -> None:
    every = each_link(got)
    allowed = f"{BITS}, {_ERROR}, a list of these with one for each link, or 'auto'"
    require(every != () and all(map(_is_bits, every)), key, list(got) if isinstance(got, tuple) else got, allowed)
