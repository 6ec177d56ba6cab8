"""The "pipecomp" section of a DeepSpeed configuration, as frozen dataclasses that are checked once, when they are made.

A key that is unknown, a value of the wrong type or out of range, and a setting that could not take effect beside the
others (bits for a method that has none, a store for a method that keeps nothing) are all `ConfigError`s that name the
key, what it got and what is allowed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipecomp.allreduce.options import Gradients
from pipecomp.config.activations import Activations, ConstantError, bits_of_link, plain_bits
from pipecomp.config.checks import is_number, require_choice, require_unset, values_of
from pipecomp.errors import ConfigError, require

MAX_CLUSTERS = 1 << 16
_TRUE = "true or false"
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MOST_SEED = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class Store:
    """Where both ends of a link keep the cached activations of "aqsgd".

    Attributes:
        backend: "lmdb" (on disk, survives restarts) or "memory".
        path: folder for "lmdb"; each rank writes below it.
        bits: 2, 4, 8, 16 or 32 bits a stored value (paper, H.5).
        max_bytes: budget per link end, None for no limit.
        prefetch: micro-batches whose cached activations are loaded ahead, 0 for none.
        drift_check: every so many steps both ends of a link compare digests of the cached activations that changed,
            None for never.
        in_checkpoints: copy the store into every checkpoint, so that training goes on with the same losses; it takes as
            much space again.
        run: a name for the run; a store that is of a run with another name is refused. None: a random one, which a run
            that goes on from a checkpoint takes from there.
        on_write_error: "stop", or "continue" without storing new samples while the disk refuses writes.
        pinned_bytes: most pinned host memory through which a rank's links, stores and compressed gradients reach its
            GPU, None for 256 MiB; torch pins more for batches and gloo's collectives. Of no effect, and so refused,
            where stages compute on the CPU.
        clusters: keep so many cluster centers of tokens' activations in place of every sample's, None to keep samples
            (docs/algorithms.md, 1.8).
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
    clusters: int | None = None

    def __post_init__(self) -> None:
        require_choice("store.backend", self.backend, ("lmdb", "memory"))
        require(isinstance(self.path, str) and self.path != "", "store.path", self.path, "a folder name")
        require("\0" not in self.path, "store.path", self.path, "a folder name, without zero bytes")
        ok = is_number(self.bits, 2) and self.bits in (2, 4, 8, 16, 32)
        require(ok, "store.bits", self.bits, "2, 4, 8, 16 or 32")
        ok = self.max_bytes is None or is_number(self.max_bytes, 1)
        require(ok, "store.max_bytes", self.max_bytes, "null or a number of bytes above 0")
        require(is_number(self.prefetch, 0, 64), "store.prefetch", self.prefetch, "a whole number from 0 to 64")
        require_choice("store.on_write_error", self.on_write_error, ("stop", "continue"))
        ok = self.pinned_bytes is None or is_number(self.pinned_bytes, 1)
        require(ok, "store.pinned_bytes", self.pinned_bytes, "null or a number of bytes above 0")
        ok = self.drift_check is None or is_number(self.drift_check, 1)
        require(ok, "store.drift_check", self.drift_check, "null or a number of steps of at least 1")
        require(isinstance(self.in_checkpoints, bool), "store.in_checkpoints", self.in_checkpoints, "true or false")
        ok = self.run is None or (isinstance(self.run, str) and RUN_NAME.fullmatch(self.run) is not None)
        require(ok, "store.run", self.run, "null or a name of letters, digits, '.', '_' and '-', at most 64")
        c = self.clusters
        ok = c is None or (is_number(c, 2, MAX_CLUSTERS) and c.bit_count() == 1)
        allowed = f"null or a power of two from 2 to {MAX_CLUSTERS}: a token's center is named in whole bits"
        require(ok, "store.clusters", c, allowed)

    def check_given(self, given: Mapping[str, object]) -> None:
        """Refuse what only files have for the memory backend, and what only samples have where centers are kept."""
        if self.backend == "memory":
            for key in ("path", "run", "in_checkpoints", "on_write_error"):
                if given.get(key) is not False:
                    require_unset("store", key, given, "only with backend 'lmdb', not 'memory'")
        if self.clusters is None:
            return
        require(self.bits == 32, "store.bits", self.bits, "32 with store.clusters, whose centers are few")
        for key, why in (
            ("max_bytes", "whose number of centers says what is kept"),
            ("prefetch", "whose centers are in memory"),
        ):
            require_unset("store", key, given, f"not with store.clusters, {why}")
        allowed = "'stop' with store.clusters, whose centers move with every packet"
        require(self.on_write_error == "stop", "store.on_write_error", self.on_write_error, allowed)


@dataclass(frozen=True, kw_only=True)
class Transport:
    """How bytes travel between stages.

    Attributes:
        backend: "tls" lets everything between ranks go over connections that are encrypted, and open only to machines
            with keys of this run; "gloo" sends from host memory over TCP as it is; "auto" takes "tls" where
            PIPECOMP_KEYS names keys, else "gloo".
        checksum: a CRC-32 over every packet.
        timeout_s: seconds of silence after which a peer counts as lost, three quarters of them in a collective over
            gloo.
        keys: this machine's folder of keys, for "tls"; None: PIPECOMP_KEYS.
        trusted_network: "gloo" also at an address that the whole internet may reach.
    """

    backend: str = "auto"
    checksum: bool = True
    timeout_s: float = 120.0
    keys: str | None = None
    trusted_network: bool = False

    def __post_init__(self) -> None:
        require_choice("transport.backend", self.backend, ("auto", "gloo", "tls"))
        if self.keys is not None:
            require(isinstance(self.keys, str) and self.keys != "", "transport.keys", self.keys, "null or a folder")
        require(isinstance(self.trusted_network, bool), "transport.trusted_network", self.trusted_network, _TRUE)
        require(isinstance(self.checksum, bool), "transport.checksum", self.checksum, "true or false")
        ok = is_number(self.timeout_s, 1, 86400, (int, float))
        require(ok, "transport.timeout_s", self.timeout_s, "seconds from 1 to 86400")

    def check_given(self, given: Mapping[str, object]) -> None:
        """Refuse what only one of the backends has."""
        if self.backend != "tls":
            require_unset("transport", "keys", given, f"only with backend 'tls', not '{self.backend}'")
        if self.backend == "tls" and given.get("trusted_network") is not False:
            require_unset("transport", "trusted_network", given, "only with backend 'gloo', not 'tls'")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole section.

    Attributes:
        activations, store, gradients, transport: the sections of these names.
        seed: for shuffling, stochastic rounding and random weights.
        tie: keep weights tied that the model ties.
        kernels: what quantizes: "native" (CPU tensors), "triton" (GPU tensors), "torch" (slow, anywhere), or "auto".
        in_flight: micro-batches that the first stage may run ahead of their backwards, later ones fewer, the last none;
            "auto" finds out.
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
        require(is_number(self.seed, 0, MOST_SEED), "seed", self.seed, "a whole number from 0 to 2**32 - 1")
        require(isinstance(self.tie, bool), "tie", self.tie, "true or false")
        ok = self.in_flight == "auto" or is_number(self.in_flight, 1)
        require(ok, "in_flight", self.in_flight, "'auto' or a whole number of at least 1")
        require_choice("kernels", self.kernels, ("auto", "torch", "native", "triton"))

    @classmethod
    def from_dict(cls, section: object) -> Config:
        """Read the value of the "pipecomp" key. Raises ConfigError for anything that is not exactly right."""
        given = values_of("", section, cls)
        parts: dict[str, Any] = {}
        for name, kind in ((f.name, f.default_factory) for f in dataclasses.fields(cls)):
            if name in given and isinstance(kind, type):
                values = values_of(name, given[name], kind)
                parts[name] = kind(**values)
                parts[name].check_given(values)
        config = cls(**{**given, **parts})
        if config.activations.method != "aqsgd" and "store" in given:
            method = config.activations.method
            raise ConfigError("store", given["store"], f"only with activations.method 'aqsgd', not {method!r}")
        if config.activations.backward_method == "delta" and config.store.on_write_error == "continue":
            allowed = "'stop' with activations.backward_method 'delta'"
            raise ConfigError("store.on_write_error", "continue", allowed)
        if config.store.clusters is not None:
            config.activations.check_clusters(given.get("activations", {}))
        return config

    def link_settings(self, link: int) -> dict[str, Any]:
        """List all that both ends of a link must agree on to hold the same cached activations."""
        a = self.activations
        gradients = {
            "backward_bits": _without_rate(bits_of_link(a.backward_bits, link)),
            "backward_method": a.backward_method,
            "backward_first_visit": plain_bits(a.backward_first_visit),
        }
        return {
            **(gradients if a.backward_method == "delta" else {}),  # else a store holds none
            **({} if self.store.clusters is None else {"clusters": self.store.clusters}),
            "method": a.method,
            "forward_bits": _without_rate(bits_of_link(a.forward_bits, link)),
            "first_visit": plain_bits(a.first_visit),
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
        values["activations"] = self.activations.as_dict()
        values["gradients"] = self.gradients.as_dict()
        values["store"].pop("path")
        if self.store.clusters is None:  # as before there were any, so that earlier runs can go on
            values["store"].pop("clusters")
        values["transport"].pop("keys")  # of this machine, as its network is
        values["transport"].pop("trusted_network")
        values.pop("kernels")  # all give the same bytes
        return values


def _without_rate(bits: Any) -> Any:
    """As JSON has it, without what the line carries: the next start may know that better, and use the same store."""
    return plain_bits(dataclasses.replace(bits, mbit_per_s=None) if isinstance(bits, ConstantError) else bits)


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
