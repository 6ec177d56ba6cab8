"""The section "activations": compression of activations and their gradients between stages.

A bit width is fixed or follows an error bound (`ConstantError`). With "auto" or a rate in `mbit_per_s`,
`pipecomp.initialize` chooses the maximum when the run begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from pipecomp.config.checks import OneOf, Section
from pipecomp.errors import ConfigError, require
from pipecomp.utils.serialization import serializable

METHODS = ("none", "fp16", "bf16", "direct", "aqsgd")
EVAL_METHODS = ("full", *(method for method in METHODS if method not in ("none", "aqsgd")))
FEWEST = {"forward_bits": 2, "backward_bits": 4}
"""Lower bounds of the maximum that is chosen when a run begins; users may set fewer bits."""
DEFAULT_MIN, DEFAULT_MAX = 2, 8  # bits of a ConstantError
BITS_KEYS = ("forward_bits", "backward_bits", "first_visit", "backward_first_visit")

_BITS = "a whole number from 1 to 8"
_ERROR = "an object with 'error'"
_QUANTIZED_ONLY = ("forward_bits", "backward_bits", "rounding", "scale", "gain", "group_size", "backward_top_k")
_Rate = Annotated[int | float, Field(gt=0, le=1e6)]


@serializable
class ConstantError(Section):
    """The fewest bits, packet by packet, that keep the relative error below a bound (docs/algorithms.md, 1.2).

    Attributes:
        error: bound of a packet's ‖sent − x‖ / ‖x‖, above 0 and below 1. For a delta too, x is the value itself.
        min, max: fewest and most bits, 1 to 8. A packet whose error exceeds the bound even with `max` bits uses `max`.
        mbit_per_s: rate of each link in this direction in Mbit/s, headers included; one number for all links or a list.
            When a run begins, `max` is lowered to the bits whose transfer is hidden by computation, but not below
            FEWEST or `min`. None: `max` stays.
    """

    error: int | float = Field(gt=0, lt=1, description="a number above 0 and below 1")
    min: int = Field(default=DEFAULT_MIN, ge=1, le=8)
    max: int = Field(default=DEFAULT_MAX, ge=1, le=8)
    mbit_per_s: _Rate | Annotated[tuple[_Rate, ...], Field(strict=False, min_length=1)] | None = Field(
        default=None, description="a number of Mbit/s above 0, at most a million, or a list with one for each link"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        hint = "A fixed width is a plain number of bits."
        require(self.min < self.max, "max", self.max, f"more than min, {self.min}", hint)
        return self

    def __str__(self) -> str:
        rates = "/".join(f"{rate:g}" for rate in each_link(self.mbit_per_s) if rate is not None)
        within = f", within {rates} Mbit/s" if rates else ""
        return f"{self.min} to {self.max} (error {self.error:g}{within})"

    def at_most(self, bits: int) -> int | ConstantError:
        """Lower the maximum to `bits` and drop the rate; return `min` if no other width is left."""
        most = min(bits, self.max)
        return self.min if most <= self.min else self.replace(max=most, mbit_per_s=None)


SCALES = ("max", "rms", "channels", "cached_channels", "auto")
GAINS = ("auto", "least_error", "unbiased")
CHANNEL_TOKENS = 64  # of a packet from which on its channels' scales are at most a sixteenth of its bytes, at 2 bits


@serializable
class Scales(Section):
    """Kinds of scale, one for each direction.

    Attributes:
        forward: kind for activations.
        backward: kind for gradients.
    """

    forward: Annotated[str, OneOf(SCALES)] = "max"
    backward: Annotated[str, OneOf(SCALES)] = "max"

    def __str__(self) -> str:
        return f"{self.forward} forward, {self.backward} back"


@serializable
class Gains(Section):
    """Kinds of gain, one for each direction.

    Attributes:
        forward: kind for activations; a list has one entry per link.
        backward: kind for gradients.
    """

    forward: (
        Annotated[str, OneOf(GAINS)]
        | Annotated[tuple[Annotated[str, OneOf(GAINS)], ...], Field(strict=False, min_length=1)]
    ) = Field(default="auto", description=f"{OneOf(GAINS)}, or a list of these with one for each link")
    backward: Annotated[str, OneOf(GAINS)] = "auto"


Bits = int | str | tuple[int | ConstantError, ...] | ConstantError
_LinkBits = Annotated[int, Field(ge=1, le=8)] | ConstantError
_BitsField = (
    _LinkBits | Annotated[str, OneOf(("auto",))] | Annotated[tuple[_LinkBits, ...], Field(strict=False, min_length=1)]
)
_BITS_ALLOWED = f"{_BITS}, {_ERROR}, a list of these with one for each link, or 'auto'"


class Activations(Section):
    """Encoding of activations and gradients between stages (AQ-SGD, arXiv:2206.01299; docs/algorithms.md, 1).

    Attributes:
        method: "none" sends the training dtype, "fp16" and "bf16" cast, "direct" quantizes the activation itself
            (DirectQ), "aqsgd" quantizes its change since the sample's last visit.
        forward_bits, backward_bits: 1 to 8 bits per value for "direct" and "aqsgd", or a ConstantError (an object in
            JSON). A list has one entry per link. "auto": `pipecomp.initialize` measures and chooses a ConstantError for
            each link.
        first_visit: encoding of a sample's first activation: "full" is the training dtype (the paper), 1 to 8 bits or a
            ConstantError quantize it.
        rounding: "nearest" or "stochastic".
        scale: "max", "rms", "channels" (scales of channels are sent with each packet) or "cached_channels" (both ends
            compute them from cached activations); one of these, or an object with `forward` and `backward`. "auto":
            `pipecomp.initialize` chooses by the tokens of a packet, see `automatic_scale`.
        gain: with scales of channels, "least_error" or "unbiased"; one of these, or an object with `forward` and
            `backward`. "auto": least error forward on links that carry values after dropout, else unbiased.
        group_size: values that share a scale; None for a token's whole row.
        backward_top_k: share of gradient values kept per group, the rest is zero (paper, H.6).
        backward_method: "direct" quantizes gradients themselves, "delta" their change since the sample's last visit.
        backward_first_visit: bits, 1 to 8 or a ConstantError, of a sample's first gradient with "delta".
        eval: encoding during evaluation: "full" (the training dtype), "fp16", "bf16" or "direct" (forward_bits).
        rotation: apply a seeded Walsh–Hadamard rotation before quantizing activations themselves: with "direct", and
            quantized first visits of "aqsgd".
    """

    section: ClassVar[str] = "activations"
    METHODS: ClassVar[tuple[str, ...]] = METHODS
    QUANTIZED: ClassVar[tuple[str, ...]] = ("direct", "aqsgd")

    method: Annotated[str, OneOf(METHODS)] = "none"
    forward_bits: _BitsField = Field(default=4, description=_BITS_ALLOWED)
    backward_bits: _BitsField = Field(default=8, description=_BITS_ALLOWED)
    first_visit: _LinkBits | Annotated[str, OneOf(("full",))] = Field(
        default="full", description=f"'full', {_BITS} or {_ERROR}"
    )
    rounding: Annotated[str, OneOf(("nearest", "stochastic"))] = "nearest"
    scale: Annotated[str, OneOf(SCALES)] | Scales = Field(
        default="max", description=f"{OneOf(SCALES)}, or an object with 'forward' and 'backward'"
    )
    gain: Annotated[str, OneOf(GAINS)] | Gains = Field(
        default="auto", description=f"{OneOf(GAINS)}, or an object with 'forward' and 'backward'"
    )
    group_size: int | None = Field(
        default=None, ge=1, lt=2**32, description="null or a whole number of at least 1, below 2**32"
    )
    backward_top_k: int | float | None = Field(
        default=None, gt=0, le=1, description="null or a share above 0, at most 1"
    )
    backward_method: Annotated[str, OneOf(("direct", "delta"))] = "direct"
    backward_first_visit: _LinkBits = Field(default=8, description=f"{_BITS} or {_ERROR}")
    eval: Annotated[str, OneOf(EVAL_METHODS)] = "full"
    rotation: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        quantized, delta = self.method in self.QUANTIZED, self.backward_method == "delta"
        for key in FEWEST:
            ok = quantized or getattr(self, key) != "auto"
            require(ok, key, "auto", "a number of bits", "'auto' needs method 'direct' or 'aqsgd'.")
        hint = f"Deltas need the store of method 'aqsgd', not {self.method!r}."
        require(self.method == "aqsgd" or not delta, "backward_method", self.backward_method, "'direct'", hint)
        hint = "The kept values differ from visit to visit, so backward_method 'delta' cannot encode their changes."
        require(self.backward_top_k is None or not delta, "backward_top_k", self.backward_top_k, "null", hint)
        if self.backward_top_k is not None:
            ok = not any(isinstance(bits, ConstantError) for bits in each_link(self.backward_bits))
            hint = "With backward_top_k the error is dominated by the dropped values, so bits cannot follow it."
            require(ok, "backward_bits", bits_text(self.backward_bits), f"{_BITS}, a list or 'auto'", hint)
        self._check_rates()
        rotates = self.method == "direct" or (self.method == "aqsgd" and self.first_visit != "full")
        allowed = "false; true with 'direct', or with 'aqsgd' and a quantized first_visit"
        require(rotates or not self.rotation, "rotation", True, allowed)
        self._check_scales()
        return self

    def _check_scales(self) -> None:
        """Reject scales that do not suit the other settings."""
        for direction in ("forward", "backward"):
            scale = self.scale_of(direction)
            key = "scale" if isinstance(self.scale, str) else f"scale.{direction}"
            hint = "Clipping at an rms scale would bias stochastic rounding."
            require(scale in ("max", "auto") or self.rounding != "stochastic", key, scale, "'max' or 'auto'", hint)
            if direction == "backward" and self.backward_top_k is not None:
                hint = "backward_top_k keeps other channels of each row, so they share no scale."
                require("channels" not in scale, key, scale, "'max', 'rms' or 'auto' of gradients", hint)
        hint = "Scales of cached activations need method 'aqsgd'."
        cached = isinstance(self.scale, str) and self.scale == "cached_channels"
        require(self.method == "aqsgd" or not cached, "scale", self.scale, "'max', 'rms' or 'channels'", hint)
        if isinstance(self.scale, Scales):
            ok = self.method == "aqsgd" or self.scale.forward != "cached_channels"
            require(ok, "scale.forward", self.scale.forward, "'max', 'rms' or 'channels'", hint)
            ok = self.backward_method == "delta" or self.scale.backward != "cached_channels"
            hint = "Scales of cached gradients need backward_method 'delta'."
            require(ok, "scale.backward", self.scale.backward, "'max', 'rms' or 'channels'", hint)

    def scale_of(self, direction: str) -> str:
        """Return the kind of scale of "forward" or "backward"."""
        scale = self.scale
        return scale if isinstance(scale, str) else str(getattr(scale, direction))

    def gain_of(self, direction: str, link: int = 0) -> str:
        """Return the gain of "forward" or "backward", for kernels: "auto" that no model has settled is unbiased."""
        if "channels" not in self.scale_of(direction):
            return "least_error"
        gain = self.gain if isinstance(self.gain, str) else getattr(self.gain, direction)
        gain = gain[min(link, len(gain) - 1)] if isinstance(gain, tuple) else gain
        return "unbiased" if gain == "auto" else str(gain)

    def automatic_scale(self, direction: str, tokens: int, *, gpu: bool = False) -> str:
        """Choose the kind of scale for "auto".

        Scales of channels halve the error, and cost a byte a channel with every packet. Short packets take those of
        cached values, or scales of tokens: "rms" of activations that are quantized themselves, "max" of gradients.

        Args:
            direction: "forward" or "backward".
            tokens: Number of tokens of a packet.
            gpu: Whether values are on a GPU, which chooses bits by an error without waiting only with "max".
        """
        forward = direction == "forward"
        keys = ("forward_bits", "first_visit") if forward else ("backward_bits", "backward_first_visit")
        settings = (each for key in keys for each in each_link(getattr(self, key)))
        if gpu and any(isinstance(each, ConstantError) or each == "auto" for each in settings):
            return "max"
        if self.rounding == "stochastic" or (not forward and self.backward_top_k is not None):
            return "max"
        if tokens >= CHANNEL_TOKENS:
            return "channels"
        if self.method == "aqsgd" if forward else self.backward_method == "delta":
            return "cached_channels"
        return "rms" if forward else "max"

    def with_scales(self, tokens: int, *, gpu: bool = False) -> Self:
        """Return the settings with "auto" of `scale` settled by `automatic_scale`."""
        kinds = {direction: self.scale_of(direction) for direction in ("forward", "backward")}
        if "auto" not in kinds.values():
            return self
        settled = {d: self.automatic_scale(d, tokens, gpu=gpu) if kind == "auto" else kind for d, kind in kinds.items()}
        return self.replace(scale=Scales(**settled))

    def with_dropout(self, links: Iterable[bool]) -> Self:
        """Return the settings with `gain` settled.

        Args:
            links: For each link whether its activations differ from visit to visit by dropout.
        """
        given = self.gain if isinstance(self.gain, Gains) else Gains(forward=self.gain, backward=self.gain)
        dropout = tuple(links)

        def settled(link: int) -> str:
            gain = given.forward[link] if isinstance(given.forward, tuple) else given.forward
            return ("least_error" if dropout[link] else "unbiased") if gain == "auto" else gain

        forward = per_link(settled(link) for link in range(len(dropout))) if dropout else given.forward
        return self.replace(gain=Gains(forward=forward, backward=given.backward))

    def describe_scales(self) -> str:
        """Describe scales and gains for people, such as "scales of channels forward (least error)"; "" for "max"."""
        parts = []
        for direction, name in (("forward", "forward"), ("backward", "back")):
            kind = self.scale_of(direction)
            if kind == "max":
                continue
            gain = self.gain if isinstance(self.gain, str) else getattr(self.gain, direction)
            gains = "unbiased" if direction == "backward" and gain == "auto" else "/".join(each_link(gain))
            known = "channels" in kind and gains != "auto"
            parts.append(f"{kind} {name}" + (f" ({gains})" if known else ""))
        return f"scales of {' and '.join(parts)}".replace("_", " ") if parts else ""

    def _check_rates(self) -> None:
        """Reject rates that have no effect."""
        for name in BITS_KEYS:
            bits = getattr(self, name)
            for link, of_link in enumerate(each_link(bits)):
                if not isinstance(of_link, ConstantError) or of_link.mbit_per_s is None:
                    continue
                rate = of_link.mbit_per_s
                key = f"{name}[{link}]" if isinstance(bits, tuple) else name
                require(
                    not (isinstance(bits, tuple) and isinstance(rate, tuple)),
                    f"{key}.mbit_per_s",
                    rate,
                    "a number of Mbit/s above 0, of this link",
                )
                hint = "Only forward_bits and backward_bits follow a rate."
                require(name in FEWEST, f"{key}.mbit_per_s", rate, "null", hint)
                allowed = f"only with method 'direct' or 'aqsgd', not {self.method!r}"
                require(self.method in self.QUANTIZED, f"{key}.mbit_per_s", rate, allowed)
                least = max(of_link.min, FEWEST[name])
                hint = f"With mbit_per_s the maximum is never lowered below {least}."
                require(of_link.max > least, f"{key}.max", of_link.max, f"more than {least}", hint)

    def measured(self, key: str) -> bool:
        """Return True if bits are chosen when a run begins. key: "forward_bits" or "backward_bits"."""
        every = each_link(getattr(self, key))
        return any(
            bits == "auto" or (isinstance(bits, ConstantError) and bits.mbit_per_s is not None) for bits in every
        )

    def bits(self, link: int) -> tuple[int | ConstantError, int | ConstantError]:
        """Return the forward and backward bits of one link.

        Raises:
            ConfigError: while one of them is still to be chosen, and if a list is too short.
        """
        return self._bits_of("forward_bits", link), self._bits_of("backward_bits", link)

    def _bits_of(self, key: str, link: int) -> int | ConstantError:
        got = getattr(self, key)
        if self.measured(key):
            hint = "Only pipecomp.initialize settles 'auto' and mbit_per_s."
            raise ConfigError(f"activations.{key}", bits_text(got), f"{_BITS} or {_ERROR}", hint)
        if isinstance(got, tuple):
            require(link < len(got), f"activations.{key}", list(got), f"a number for link {link} too")
        setting = bits_of_link(got, link)
        return setting if isinstance(setting, ConstantError) else int(setting)

    def check_links(self, links: int) -> None:
        """Raise ConfigError unless every list of bits or rates has one entry for each of `links` links."""
        for key in FEWEST:
            got = getattr(self, key)
            rates = got.mbit_per_s if isinstance(got, ConstantError) else None
            for name, entries in ((key, got), (f"{key}.mbit_per_s", rates)):
                if isinstance(entries, tuple):
                    allowed = f"one number, or {links}: one for each link between {links + 1} stages"
                    require(len(entries) == links, f"activations.{name}", list(entries), allowed)
        gains = self.gain.forward if isinstance(self.gain, Gains) else self.gain
        if isinstance(gains, tuple):
            allowed = f"one gain, or {links}: one for each link between {links + 1} stages"
            require(len(gains) == links, "activations.gain.forward", list(gains), allowed)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        for key in ("scale", "gain"):
            if isinstance(values[key], Section):
                values[key] = values[key].model_dump()
        if values["gain"] == "auto":  # checkpoints without this key compare with it
            values.pop("gain")
        return values | {key: plain_bits(values[key]) for key in BITS_KEYS}

    def check_given(self) -> None:
        """Reject keys that have no effect with the methods."""
        if self.method not in self.QUANTIZED:
            keys = _QUANTIZED_ONLY[1:] if self.eval == "direct" else _QUANTIZED_ONLY
            self.refuse_given(keys, f"only with method 'direct' or 'aqsgd', not {self.method!r}")
        kinds = [self.scale_of(direction) for direction in ("forward", "backward")]
        if not any("channels" in kind or kind == "auto" for kind in kinds):
            self.refuse_given(("gain",), "only with scale 'channels', 'cached_channels' or 'auto'")
        if self.backward_method != "delta":
            self.refuse_given(("backward_first_visit",), "only with backward_method 'delta'")
        if self.method != "aqsgd":
            self.refuse_given(("first_visit",), f"only with method 'aqsgd', not {self.method!r}")

    def check_clusters(self) -> None:
        """Reject settings of later visits if the store keeps cluster centers instead of samples."""
        self.refuse_given(("first_visit",), "not with store.clusters, where no sample has a first visit")
        hint = "Cluster centers hold no gradient of a sample, so its next one cannot be sent as a change."
        allowed = "'direct' with store.clusters"
        require(self.backward_method == "direct", "activations.backward_method", self.backward_method, allowed, hint)


def each_link(setting: Any) -> tuple[Any, ...]:
    """Return the settings of all links, or a tuple of the one that they share."""
    return setting if isinstance(setting, tuple) else (setting,)


def per_link(settings: Iterable[Any]) -> Any:
    """Combine one setting per link; return a single one if all are equal."""
    values = tuple(settings)
    return values[0] if len(set(values)) == 1 else values


def bits_of_link(bits: Bits, link: int) -> int | str | ConstantError:
    """Return a link's bits: a number, "auto", or a ConstantError with the rate of that link."""
    setting = bits[link] if isinstance(bits, tuple) else bits
    if isinstance(setting, ConstantError) and isinstance(setting.mbit_per_s, tuple):
        return setting.replace(mbit_per_s=setting.mbit_per_s[link])
    return setting


def bits_text(bits: Bits) -> str:
    """Format bits for people: "4", "8/2/8" for links that differ, or "2 to 8 (error 0.07)"."""
    return "/".join(map(str, each_link(bits)))


def plain_bits(bits: Any) -> Any:
    """Convert bits to plain values for JSON; a rate only if there is one."""
    if isinstance(bits, tuple):
        return tuple(map(plain_bits, bits))
    return bits.model_dump(exclude_none=True) if isinstance(bits, ConstantError) else bits
