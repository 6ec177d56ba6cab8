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
from pipecomp.files import replacing
from pipecomp.json_tree import describe, rebuild

FORMAT = "pipecomp gradient memories 1"
_TORCHS = ("error_dict", "p_memory_dict", "q_memory_dict")  # what PowerSGD keeps of each bucket


def number_parameters(state: State, parameters: Iterable[Tensor]) -> None:
    """Tie memories to parameters by the model's order.

    Otherwise the order of DDP's first buckets counts: another one when a model that has trained before goes on.
    """
    for parameter in parameters:
        state._numbers.setdefault(parameter, len(state._numbers))


def save(state: State, path: str | os.PathLike[str]) -> None:
    """Write what `state.state_dict()` holds, and PowerSGD's memories, to a file that appears whole or not at all."""
    content = state.state_dict()
    if state._hook is not None:
        content["torch"] = {
            key: {name: getattr(memory, name) for name in _TORCHS} for key, memory in state._hook._states.items()
        }
    tensors: dict[str, Tensor] = {}
    described = json.dumps(_describe(content, tensors))
    with replacing(path) as part:
        save_file(tensors, part, metadata={"format": FORMAT, "state": described})


def load(state: State, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> None:
    """Go on with what `save` wrote; device: where the gradients are.

    PowerSGD sends two steps whole, as at its start, before it uses its memories: DDP may cut its buckets anew after the
    first. Raises ConfigError if the file is not a whole one, or of another method, rank or number of ranks.
    """
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise ConfigError("gradient memories", os.fspath(path), f"a file that was saved whole ({error})") from error
    if metadata.get("format") != FORMAT:
        raise ConfigError("gradient memories", metadata.get("format"), f"{FORMAT!r}, in {Path(path).name}")
    content = _rebuild(json.loads(metadata["state"]), tensors)
    state.load_state_dict(content, device)
    if state._hook is not None:
        for key, memories in content["torch"].items():
            memory = state._hook._state(key)
            for name in _TORCHS:
                setattr(memory, name, {bucket: tensor.to(device) for bucket, tensor in memories[name].items()})


def _describe(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Plain containers as JSON; tensors are put aside, by name."""

    def put_aside(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        name = str(len(tensors))
        tensors[name] = leaf.detach().cpu().contiguous()
        return {"tensor": name}

    return describe(value, put_aside)


def _rebuild(described: Any, tensors: dict[str, Tensor]) -> Any:
    """What `_describe` was given."""
    return rebuild(described, lambda _, name: tensors[name])
