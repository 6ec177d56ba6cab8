"""The "pipecomp" section of a DeepSpeed configuration.

Unknown keys, values of the wrong type or out of range, and settings without effect (bits for a method without bits, a
store for a method without one) are ConfigErrors with the key, the value and the allowed values.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from pipecomp.config.activations import Activations, ConstantError, bits_of_link, plain_bits
from pipecomp.config.checks import OneOf, Section
from pipecomp.config.elastic import Elastic
from pipecomp.config.gradients import Gradients
from pipecomp.config.store import Store
from pipecomp.config.transport import TransportConfig
from pipecomp.errors import ConfigError, require
from pipecomp.rank_layout import LAYOUTS, STAGES_ACROSS

MOST_SEED = 2**32 - 1
_OWN: Any = {  # of a machine
    "store": {"path"},
    "transport": {"keys", "trusted_network"},
    "elastic": {"path"},
    "kernels": True,
}


class Config(Section):
    """The whole section.

    Attributes:
        activations, store, gradients, transport, elastic: the sections of these names.
        seed: seed of shuffling, stochastic rounding and random weights.
        tie: keep weights tied that the model ties.
        kernels: backend of quantization: "native" (CPU tensors), "triton" (GPU tensors), "torch" (slow, anywhere), or
            "auto".
        in_flight: micro-batches that the first stage may run ahead of their backward passes; fewer in later stages, and
            none in the last. "auto" measures.
        layout: order of ranks, "stages-across" or "replicas-across", see `pipecomp.rank_layout`.
    """

    activations: Activations = Activations()
    store: Store = Store()
    gradients: Gradients = Gradients()
    transport: TransportConfig = TransportConfig()
    elastic: Elastic = Elastic()
    seed: int = Field(default=0, ge=0, le=MOST_SEED, description="a whole number from 0 to 2**32 - 1")
    tie: bool = True
    kernels: Annotated[str, OneOf(("auto", "torch", "native", "triton"))] = "auto"
    in_flight: Annotated[int, Field(ge=1)] | Annotated[str, OneOf(("auto",))] = Field(
        default="auto", description="'auto' or a whole number of at least 1"
    )
    layout: Annotated[str, OneOf(LAYOUTS)] = STAGES_ACROSS

    @classmethod
    def from_dict(cls, section: object) -> Config:
        """Read the value of the "pipecomp" key.

        Raises:
            ConfigError: for invalid values, unknown keys, and settings without effect.
        """
        if not isinstance(section, Mapping):
            raise ConfigError("pipecomp", section, "an object with keys and values")
        config = cls(**section)
        activations, store = config.activations, config.store
        for part in (activations, store, config.transport, config.elastic):
            part.check_given()
        if "store" in config.model_fields_set:
            allowed = f"only with activations.method 'aqsgd', not {activations.method!r}"
            require(activations.method == "aqsgd", "store", section["store"], allowed)
        if activations.backward_method == "delta":
            allowed = "'stop' with activations.backward_method 'delta'"
            require(store.on_write_error == "stop", "store.on_write_error", store.on_write_error, allowed)
        if store.clusters is not None:
            activations.check_clusters()
        return config

    def link_settings(self, link: int) -> dict[str, Any]:
        """Return the settings that both ends of a link must share to hold the same cached activations."""
        a = self.activations
        gradients = {
            "backward_bits": _plain_bits_of_link(a, "backward_bits", link),
            "backward_method": a.backward_method,
            "backward_first_visit": plain_bits(a.backward_first_visit),
        }
        if a.scale_of("backward") != a.scale_of("forward"):
            gradients["backward_scale"] = a.scale_of("backward")
        return {
            **(gradients if a.backward_method == "delta" else {}),  # otherwise stores hold no gradients
            **({} if self.store.clusters is None else {"clusters": self.store.clusters}),
            "method": a.method,
            "forward_bits": _plain_bits_of_link(a, "forward_bits", link),
            "first_visit": plain_bits(a.first_visit),
            "rotation": a.rotation,
            "rounding": a.rounding,
            "scale": a.scale_of("forward"),
            "group_size": a.group_size,
            "store_bits": self.store.bits,
            "max_bytes": self.store.max_bytes,
            "seed": self.seed,
        }

    def digest(self) -> str:
        """Return a short hash of `shared`, equal on ranks with the same configuration."""
        return hashlib.sha256(json.dumps(self.shared(), sort_keys=True).encode()).hexdigest()[:16]

    def shared(self) -> dict[str, Any]:
        """Return all settings, defaults included, that must be equal on all ranks.

        Note:
            Checkpoints compare these values, so keys that were added later are absent by default.
        """
        values = {
            **self.model_dump(exclude=_OWN),
            "activations": self.activations.as_dict(),
            "gradients": self.gradients.as_dict(),
        }
        if self.store.clusters is None:
            values["store"].pop("clusters")
        if self.transport.streams == "auto":
            values["transport"].pop("streams")
        if not self.elastic.active:
            values.pop("elastic")
        if self.layout == STAGES_ACROSS:
            values.pop("layout")
        return values


def _plain_bits_of_link(activations: Activations, key: str, link: int) -> Any:
    """Return plain values without the rate: a later run may measure another one, and still use the same store."""
    bits = bits_of_link(getattr(activations, key), link)
    return plain_bits(bits.replace(mbit_per_s=None) if isinstance(bits, ConstantError) else bits)


def read_json_object(key: str, path: str | os.PathLike) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        ConfigError: with `key` and the path, for a file that cannot be read or holds no JSON object.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(key, str(path), f"a file that can be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(key, str(path), f"valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(key, str(path), "a JSON object")
    return value
