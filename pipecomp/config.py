"""The "pipecomp" section of a DeepSpeed configuration, as frozen dataclasses that are checked once, when they are made.

A key that is unknown, a value of the wrong type or out of range, and a setting that could not take effect beside the
others (bits for a method that has none, a store for a method that keeps nothing) are all `ConfigError`s that name the
key, what it got and what is allowed.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pipecomp.allreduce.options import Gradients
from pipecomp.errors import ConfigError

_TRUE = "true or false"
BITS = "a whole number from 1 to 8"
_ERROR = "an object with 'error'"
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _is_number(value: object, low: float, high: float = math.inf, kind: type | tuple[type, ...] = int) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and low <= value <= high  # type: ignore[operator]


def _is_bits(value: object) -> bool:
    return isinstance(value, ConstantError) or _is_number(value, 1, 8)


def _require(ok: bool, key: str, got: object, allowed: str) -> None:
    if not ok:
        raise ConfigError(key, got, allowed)


def _require_choice(key: str, got: object, choices: tuple[str, ...]) -> None:
    _require(isinstance(got, str) and got in choices, key, got, ", ".join(map(repr, choices)))


def _require_bits(key: str, got: Any) -> None:
    every = list(got) if isinstance(got, tuple) else [got]
    ok = every != [] and all(_is_number(bits, 1, 8) for bits in every)
    allowed = f"{BITS}, a list with one for each link, 'auto', or {_ERROR}"
    _require(ok or isinstance(got, ConstantError), key, every if isinstance(got, tuple) else got, allowed)


@dataclass(frozen=True, kw_only=True)
class ConstantError:
    """The fewest bits, packet by packet, that keep an error (docs/algorithms.md, 1.2).

    error: the largest ‖sent − x‖ / ‖x‖ of a packet, above 0 and below 1; of a change too it is relative to the value x
    itself. min, max: the fewest and the most bits, 1 to 8; max is taken where even that does not keep the error.
    """

    error: float
    min: int = 2
    max: int = 8

    def __str__(self) -> str:
        return f"{self.min} to {self.max} (error {self.error:g})"

    @classmethod
    def of(cls, key: str, given: object) -> ConstantError:
        """Read a mapping of the configuration. ConfigError, with `key`, for anything that is not exactly right."""
        values = _section(key, given, cls)
        _require("error" in values, key, values, "an object with 'error', and perhaps 'min' and 'max'")
        made = cls(**values)
        ok = _is_number(made.error, 0, 1, (int, float)) and made.error not in (0, 1)
        _require(ok, f"{key}.error", made.error, "a number above 0 and below 1")
        for name in ("min", "max"):
            _require(_is_number(getattr(made, name), 1, 8), f"{key}.{name}", getattr(made, name), BITS)
        allowed = f"more than min, which is {made.min}: else a number of bits says it"
        _require(made.min < made.max, f"{key}.max", made.max, allowed)
        return made


Bits = int | str | tuple[int, ...] | ConstantError
BITS_KEYS = ("forward_bits", "backward_bits", "first_visit", "backward_first_visit")


@dataclass(frozen=True, kw_only=True)
class Activations:
    """What crosses the links between stages (AQ-SGD, arXiv:2206.01299; docs/algorithms.md, 1).

    method: "none" sends the training dtype, "fp16" and "bf16" cast, "direct" quantizes the activation itself (DirectQ),
    "aqsgd" quantizes its change since the sample's last visit.
    forward_bits, backward_bits: 1 to 8 bits a value for "direct" and "aqsgd"; a list has one number for each link; with
    "auto" `pipecomp.initialize` measures and chooses; with a ConstantError (in JSON an object) every packet has the
    fewest that keep its error.
    first_visit: "full" sends a sample's first activation in the training dtype (the paper); 1 to 8, or a ConstantError,
    quantizes it too.
    rounding: "nearest" or "stochastic"; scale: "max" or "rms"; group_size: values that share a scale, None: a token's
    whole row. backward_top_k: the share of gradient values kept per group, the rest is zero (paper, H.6).
    rotation: a seeded Walsh–Hadamard rotation before quantizing activations themselves: the first visits of "aqsgd", if
    these are quantized, or what "direct" sends.
    backward_method: "direct" quantizes gradients themselves, "delta" their change since the sample's last visit, as
    "aqsgd" does with activations; backward_first_visit: bits, 1 to 8 or a ConstantError, of a sample's first gradient
    with "delta".
    eval: what evaluation sends: "full" (the training dtype), "fp16", "bf16" or "direct" (forward_bits).
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
        _require_choice("activations.method", self.method, self.METHODS)
        for key in BITS_KEYS:
            got = getattr(self, key)
            if isinstance(got, (Mapping, ConstantError)):  # a mapping as JSON has it
                object.__setattr__(self, key, ConstantError.of(f"activations.{key}", _plain(got)))
        for key in ("forward_bits", "backward_bits"):
            if isinstance(getattr(self, key), list):  # as JSON has it
                object.__setattr__(self, key, tuple(getattr(self, key)))
            if getattr(self, key) != "auto":
                _require_bits(f"activations.{key}", getattr(self, key))
            elif self.method not in self.QUANTIZED:
                raise ConfigError(f"activations.{key}", "auto", "a number; 'auto' with method 'direct' or 'aqsgd'")
        ok = self.first_visit == "full" or _is_bits(self.first_visit)
        _require(ok, "activations.first_visit", self.first_visit, f"'full', {BITS} or {_ERROR}")
        _require_choice("activations.rounding", self.rounding, ("nearest", "stochastic"))
        _require_choice("activations.scale", self.scale, ("max", "rms"))
        n, k = self.group_size, self.backward_top_k
        ok = n is None or _is_number(n, 1, 2**32 - 1)
        _require(ok, "activations.group_size", n, "null or a whole number of at least 1, below 2**32")
        ok = k is None or (k != 0 and _is_number(k, 0, 1, (int, float)))
        _require(ok, "activations.backward_top_k", k, "null or a share above 0, at most 1")
        _require_choice("activations.backward_method", self.backward_method, ("direct", "delta"))
        first, delta = self.backward_first_visit, self.backward_method == "delta"
        _require(_is_bits(first), "activations.backward_first_visit", first, f"{BITS} or {_ERROR}")
        allowed = f"'direct'; 'delta' only with method 'aqsgd', whose store it needs, not {self.method!r}"
        _require(self.method == "aqsgd" or not delta, "activations.backward_method", self.backward_method, allowed)
        allowed = "null with backward_method 'delta', whose changes of kept values are no changes of others"
        _require(k is None or not delta, "activations.backward_top_k", k, allowed)
        _require_choice("activations.eval", self.eval, self.EVAL)
        _require(isinstance(self.rotation, bool), "activations.rotation", self.rotation, "true or false")
        self._check_errors()
        something = self.method == "direct" or (self.method == "aqsgd" and self.first_visit != "full")
        allowed = "false; true with 'direct', or with 'aqsgd' and a quantized first_visit"
        _require(something or not self.rotation, "activations.rotation", True, allowed)
        allowed = "'max' with rounding 'stochastic' (clipping at an rms scale is a bias)"
        _require(self.scale == "max" or self.rounding != "stochastic", "activations.scale", self.scale, allowed)

    def _check_errors(self) -> None:
        """Refuse what a constant error does not go together with."""
        both = (self.forward_bits, self.backward_bits)
        for key, got in zip(("forward_bits", "backward_bits"), both, strict=True):
            if isinstance(got, ConstantError):
                allowed = f"{BITS}, a list, or 'auto' for both: 'auto' does not know how many bits an error takes"
                _require("auto" not in both, f"activations.{key}", str(got), allowed)
        allowed = f"{BITS}, a list or 'auto' with backward_top_k, whose error is in what it leaves out"
        ok = self.backward_top_k is None or not isinstance(self.backward_bits, ConstantError)
        _require(ok, "activations.backward_bits", str(self.backward_bits), allowed)

    def bits(self, link: int) -> tuple[int | ConstantError, int | ConstantError]:
        """Forward and backward, of one link. ConfigError while one of them is "auto", or a list that is too short."""
        return self._bits_of("forward_bits", link), self._bits_of("backward_bits", link)

    def _bits_of(self, key: str, link: int) -> int | ConstantError:
        got = getattr(self, key)
        if got == "auto":
            raise ConfigError(f"activations.{key}", "auto", f"{BITS}; only pipecomp.initialize settles 'auto'")
        if isinstance(got, tuple):
            _require(link < len(got), f"activations.{key}", list(got), f"a number for link {link} too")
        found = bits_of_link(got, link)
        return found if isinstance(found, ConstantError) else int(found)

    def check_links(self, links: int) -> None:
        """ConfigError if a list of bits is not one for each of so many links."""
        for key in ("forward_bits", "backward_bits"):
            got = getattr(self, key)
            if isinstance(got, tuple):
                allowed = f"one number, or {links}: one for each link between {links + 1} stages"
                _require(len(got) == links, f"activations.{key}", list(got), allowed)

    def check_given(self, given: Mapping[str, object]) -> None:
        """Refuse the keys in `given` that `method` gives no effect."""
        if self.method not in self.QUANTIZED:
            for key in ("forward_bits", "backward_bits", "rounding", "scale", "group_size", "backward_top_k"):
                if key == "forward_bits" and self.eval == "direct":
                    continue
                _require_unset("activations", key, given, f"only with method 'direct' or 'aqsgd', not {self.method!r}")
        if self.backward_method != "delta":
            _require_unset("activations", "backward_first_visit", given, "only with backward_method 'delta'")
        if self.method != "aqsgd":
            _require_unset("activations", "first_visit", given, f"only with method 'aqsgd', not {self.method!r}")


@dataclass(frozen=True, kw_only=True)
class Store:
    """Where both ends of a link keep the cached activations of "aqsgd".

    backend: "lmdb" (on disk, survives restarts) or "memory". path: folder for "lmdb"; each rank writes below it.
    bits: 2, 4, 8, 16 or 32 bits a stored value (paper, H.5). max_bytes: budget per link end, None for no limit.
    prefetch: micro-batches whose cached activations are loaded ahead, 0 for none. drift_check: every so many steps both
    ends of a link compare digests of the cached activations that changed, None for never. in_checkpoints: copy the
    store into every checkpoint, so that training goes on with the same losses; it takes as much space again. run: a
    name for the run; a store that is of a run with another name is refused. None: a random one, which a run that goes
    on from a checkpoint takes from there. on_write_error: "stop", or "continue" without storing new samples while the
    disk refuses writes. pinned_bytes: most host memory of a rank that its GPU copies from and to, None for 256 MiB; of
    no effect, and so refused, where stages compute on the CPU.
    """

    backend: str = "lmdb"
    path: str = "messages"
    bits: int = 32
    max_bytes: int | None = None
    prefetch: int = 2
    drift_check: int | None = 10
    in_checkpoints: bool = False
    run: str | None = None
    on_write_error: str = "stop"
    pinned_bytes: int | None = None

    def __post_init__(self) -> None:
        _require_choice("store.backend", self.backend, ("lmdb", "memory"))
        _require(isinstance(self.path, str) and self.path != "", "store.path", self.path, "a folder name")
        _require("\0" not in self.path, "store.path", self.path, "a folder name, without zero bytes")
        ok = _is_number(self.bits, 2) and self.bits in (2, 4, 8, 16, 32)
        _require(ok, "store.bits", self.bits, "2, 4, 8, 16 or 32")
        ok = self.max_bytes is None or _is_number(self.max_bytes, 1)
        _require(ok, "store.max_bytes", self.max_bytes, "null or a number of bytes above 0")
        _require(_is_number(self.prefetch, 0, 64), "store.prefetch", self.prefetch, "a whole number from 0 to 64")
        _require_choice("store.on_write_error", self.on_write_error, ("stop", "continue"))
        ok = self.pinned_bytes is None or _is_number(self.pinned_bytes, 1)
        _require(ok, "store.pinned_bytes", self.pinned_bytes, "null or a number of bytes above 0")
        ok = self.drift_check is None or _is_number(self.drift_check, 1)
        _require(ok, "store.drift_check", self.drift_check, "null or a number of steps of at least 1")
        _require(isinstance(self.in_checkpoints, bool), "store.in_checkpoints", self.in_checkpoints, "true or false")
        ok = self.run is None or (isinstance(self.run, str) and RUN_NAME.fullmatch(self.run) is not None)
        _require(ok, "store.run", self.run, "null or a name of letters, digits, '.', '_' and '-', at most 64")

    def check_given(self, given: Mapping[str, object]) -> None:
        """Refuse what only files have for the memory backend."""
        if self.backend == "memory":
            for key in ("path", "run", "in_checkpoints", "on_write_error"):
                if given.get(key) is not False:
                    _require_unset("store", key, given, "only with backend 'lmdb', not 'memory'")


@dataclass(frozen=True, kw_only=True)
class Transport:
    """How bytes travel between stages.

    backend: "tls" lets everything between ranks go over connections that are encrypted, and open only to machines
    with keys of this run; "gloo" sends from host memory over TCP as it is; "auto" takes "tls" where PIPECOMP_KEYS names
    keys, else "gloo". checksum: a CRC-32 over every packet.
    timeout_s: seconds of silence after which a peer counts as lost (peers send a heartbeat four times as often).
    keys: this machine's folder of keys, for "tls"; None: PIPECOMP_KEYS. trusted_network: "gloo" also at an address that
    the whole internet may reach.
    """

    backend: str = "auto"
    checksum: bool = True
    timeout_s: float = 120.0
    keys: str | None = None
    trusted_network: bool = False

    def __post_init__(self) -> None:
        _require_choice("transport.backend", self.backend, ("auto", "gloo", "tls"))
        if self.keys is not None:
            _require(isinstance(self.keys, str) and self.keys != "", "transport.keys", self.keys, "null or a folder")
        _require(isinstance(self.trusted_network, bool), "transport.trusted_network", self.trusted_network, _TRUE)
        _require(isinstance(self.checksum, bool), "transport.checksum", self.checksum, "true or false")
        ok = _is_number(self.timeout_s, 1, 86400, (int, float))
        _require(ok, "transport.timeout_s", self.timeout_s, "seconds from 1 to 86400")

    def check_given(self, given: Mapping[str, object]) -> None:
        """Refuse what only one of the backends has."""
        if self.backend == "gloo":
            _require_unset("transport", "keys", given, "only with backend 'tls', not 'gloo'")
        if self.backend == "tls" and given.get("trusted_network") is not False:
            _require_unset("transport", "trusted_network", given, "only with backend 'gloo', not 'tls'")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole section. seed: for shuffling and stochastic rounding. tie: keep weights tied that the model ties.

    in_flight: micro-batches that the first stage may run ahead of their backwards, later ones fewer, the last none;
    "auto" finds out.
    kernels: what quantizes: "native" (CPU tensors), "triton" (GPU tensors), "torch" (slow, anywhere), or "auto".
    """

    activations: Activations = field(default_factory=Activations)
    store: Store = field(default_factory=Store)
    gradients: Gradients = field(default_factory=Gradients)
    transport: Transport = field(default_factory=Transport)
    seed: int = 0
    tie: bool = True
    kernels: str = "auto"
    in_flight: str | int = "auto"

    def __post_init__(self) -> None:
        _require(_is_number(self.seed, 0, 2**32 - 1), "seed", self.seed, "a whole number from 0 to 2**32 - 1")
        _require(isinstance(self.tie, bool), "tie", self.tie, "true or false")
        ok = self.in_flight == "auto" or _is_number(self.in_flight, 1)
        _require(ok, "in_flight", self.in_flight, "'auto' or a whole number of at least 1")
        _require_choice("kernels", self.kernels, ("auto", "torch", "native", "triton"))

    @classmethod
    def from_dict(cls, section: object) -> Config:
        """Read the value of the "pipecomp" key. Raises ConfigError for anything that is not exactly right."""
        given = _section("", section, cls)
        parts: dict[str, Any] = {}
        for name, kind in ((f.name, f.default_factory) for f in dataclasses.fields(cls)):
            if name in given and isinstance(kind, type):
                values = _section(name, given[name], kind)
                parts[name] = kind(**values)
                parts[name].check_given(values)
        config = cls(**{**given, **parts})
        if config.activations.method != "aqsgd" and "store" in given:
            method = config.activations.method
            raise ConfigError("store", given["store"], f"only with activations.method 'aqsgd', not {method!r}")
        if config.activations.backward_method == "delta" and config.store.on_write_error == "continue":
            allowed = "'stop' with activations.backward_method 'delta'"
            raise ConfigError("store.on_write_error", "continue", allowed)
        return config

    def link_settings(self, link: int) -> dict[str, Any]:
        """List all that both ends of a link must agree on to hold the same cached activations."""
        a = self.activations
        gradients = {
            "backward_bits": _plain(bits_of_link(a.backward_bits, link)),
            "backward_method": a.backward_method,
            "backward_first_visit": _plain(a.backward_first_visit),
        }
        return {
            **(gradients if a.backward_method == "delta" else {}),  # else a store holds none
            "method": a.method,
            "forward_bits": _plain(bits_of_link(a.forward_bits, link)),
            "first_visit": _plain(a.first_visit),
            "rotation": a.rotation,
            "rounding": a.rounding,
            "scale": a.scale,
            "group_size": a.group_size,
            "store_bits": self.store.bits,
            "max_bytes": self.store.max_bytes,
            "seed": self.seed,
        }

    def digest(self) -> str:
        """Return a short hash of `shared`, equal on ranks configured alike."""
        return hashlib.sha256(json.dumps(self.shared(), sort_keys=True).encode()).hexdigest()[:16]

    def shared(self) -> dict[str, Any]:
        """All settings, with their defaults, that must be equal on all ranks."""
        values = dataclasses.asdict(self)
        values["gradients"] = self.gradients.as_dict()
        values["store"].pop("path")
        values["transport"].pop("keys")  # of this machine, as its network is
        values["transport"].pop("trusted_network")
        values.pop("kernels")  # all give the same bytes
        return values


def read_json_object(key: str, path: str | os.PathLike) -> dict[str, Any]:
    """Read the object in a JSON file. ConfigError with `key` and the path: not readable, not JSON, not an object."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(key, str(path), f"a file that can be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(key, str(path), f"valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise ConfigError(key, str(path), "a JSON object")
    return found


def bits_of_link(bits: Bits, link: int) -> int | str | ConstantError:
    """Pick a link's bits: a number, "auto", or what keeps an error."""
    return bits[link] if isinstance(bits, tuple) else bits


def bits_text(bits: Bits) -> str:
    """For people: "4", "8/2/8" on links that differ, or "2 to 8 (error 0.07)"."""
    return "/".join(map(str, bits)) if isinstance(bits, tuple) else str(bits)


def _plain(bits: Any) -> Any:
    """As JSON has it."""
    return dataclasses.asdict(bits) if isinstance(bits, ConstantError) else bits


def _require_unset(section: str, key: str, given: Mapping[str, object], allowed: str) -> None:
    if key in given and given[key] is not None:
        raise ConfigError(f"{section}.{key}", given[key], allowed)


def _section(name: str, value: object, kind: type) -> dict[str, Any]:
    """`value` as a dict whose keys are all fields of `kind`."""
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
