"""A state's error-feedback residuals in a file: tensors as safetensors, all else as JSON in its header. No pickle.

number_parameters(state, model.parameters())    # before the first average, also in the run that saves
save(state, "memories-0.safetensors")           # between steps, each rank its own file
load(state, "memories-0.safetensors", device)   # of a state with the same method, rank and number of ranks
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipecomp.allreduce.state import State
from pipecomp.errors import ConfigError
from pipecomp.utils.files import atomic_write
from pipecomp.utils.serialization import decode_tree, encode_tree

FORMAT = "pipecomp gradient memories 1"


def number_parameters(state: State, parameters: Iterable[Tensor]) -> None:
    """Tie residuals to parameters by the model's order.

    Otherwise the order of DDP's first buckets counts: another one when a model that has trained before goes on.

    Args:
        state: before its first average.
        parameters: all that have gradients.
    """
    for parameter in parameters:
        state._number(parameter)


def save(state: State, path: str | os.PathLike[str]) -> None:
    """Write what `state.state_dict()` holds to a file that appears whole or not at all.

    Args:
        state: of this rank, between steps.
        path: a file of this rank's own.
    """
    tensors: dict[str, Tensor] = {}
    described = json.dumps(_describe(state.state_dict(), tensors))
    with atomic_write(path) as part:
        save_file(tensors, part, metadata={"format": FORMAT, "state": described})


def load(state: State, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> None:
    """Go on with what `save` wrote.

    PowerSGD without `adaptive` sends two steps uncompressed, as at its start, before it uses what it kept.

    Args:
        state: with the same options, rank and number of ranks as the one that was saved.
        path: what `save` was given.
        device: where the gradients are.

    Raises:
        ConfigError: if the file is not a whole one, or of another method, rank or number of ranks.
    """
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise ConfigError("gradient memories", os.fspath(path), f"a file that was saved whole ({error})") from error
    if metadata.get("format") != FORMAT:
        raise ConfigError("gradient memories", metadata.get("format"), f"{FORMAT!r}, in {Path(path).name}")
    state.load_state_dict(_rebuild(json.loads(metadata["state"]), tensors), device)


def _describe(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Plain containers as JSON; tensors are put aside, by name."""

    def put_aside(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        name = str(len(tensors))
        tensors[name] = leaf.detach().cpu().contiguous()
        return {"tensor": name}

    return encode_tree(value, put_aside)


def _rebuild(described: Any, tensors: dict[str, Tensor]) -> Any:
    """What `_describe` was given."""
    return decode_tree(described, lambda _, name: tensors[name])
