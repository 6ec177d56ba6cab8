"""Merging of a saved LoRA adapter into its base model, one tensor at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipecomp.errors import SplitError
from pipecomp.stages.partition import adapters
from pipecomp.stages.partition.checkpoints import Checkpoint
from pipecomp.stages.partition.loading import pretrained, skeleton
from pipecomp.stages.partition.planning import ModelParts
from pipecomp.utils.files import atomic_write

_INDEX = "model.safetensors.index.json"


def merge_adapter(base: str, adapter: str, out: str | Path) -> None:
    """Write a base model with an adapter merged into its weights, as a `from_pretrained` folder.

    Args:
        base: Folder or hub name of the base model. Its files are read one tensor at a time; memory holds one file of
            the merged model.
        adapter: Folder of the adapter, whose other files, such as a tokenizer, are copied.
        out: The new folder.

    Raises:
        SplitError: The base is quantized, or the adapter does not fit.
        OSError: The folder cannot be written.
    """
    from safetensors.torch import save_file

    source = pretrained(base, lora=adapter)
    if getattr(source.config, "quantization_config", None) is not None:
        raise SplitError(f"--merge: {base} is quantized: merge into the model that it was made from")
    assert source.adapter is not None
    whole = skeleton(source)
    tuned, _ = adapters.read_saved(
        source.adapter, whole, adapters.saved_names(whole, source.adapter), whole.state_dict()
    )
    folder = Path(out)
    with Checkpoint(base) as checkpoint:
        checkpoint.convert(whole, [adapters.base_name(name) for name in whole.state_dict()])
        own = _own_names(whole, checkpoint)
        _check_complete(own.values(), source.adapter.name, tuned)
        folder.mkdir(parents=True, exist_ok=True)
        files = sorted(set(checkpoint.files.values()))
        weight_map: dict[str, str] = {}
        for number, file in enumerate(files, 1):
            name = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
            tensors = {
                raw: _merged(checkpoint.read(raw), own.get(raw), whole, source.adapter, tuned).contiguous()
                for raw, at in checkpoint.files.items()
                if at == file
            }
            with atomic_write(folder / name) as part:
                save_file(tensors, str(part), metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, name)
    if len(files) > 1:
        with atomic_write(folder / _INDEX) as part:
            Path(part).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2) + "\n")
    source.config.save_pretrained(folder)
    if getattr(whole, "generation_config", None) is not None:
        whole.generation_config.save_pretrained(folder)
    for path in Path(adapter).iterdir():
        if path.is_file() and not path.name.startswith("adapter_") and path.name != "README.md":
            shutil.copyfile(path, folder / path.name)


def _own_names(whole: Any, checkpoint: Checkpoint) -> dict[str, str]:
    """Map the checkpoint's names of tensors to the adapted model's names of the modules' base weights."""
    parts = ModelParts(whole)
    plain = {adapters.base_name(name): name for name in whole.state_dict() if ".modules_to_save." not in name}
    ignored = getattr(whole, "_keys_to_ignore_on_load_unexpected", None) or ()
    matched, _ = checkpoint.match(plain, parts.base, parts.architecture, ignored)
    return {raw: plain[name] for name, raw in matched.items()}


def _parts(name: str, adapter: str) -> tuple[str, str, str, str]:
    """Name the adapter's tensors that change a base tensor: its trained copy, A, B and DoRA's magnitude."""
    layer = name.removesuffix(".base_layer.weight")
    if layer == name:  # no LoRA layer
        return name.replace(".original_module.", f".modules_to_save.{adapter}."), "", "", ""
    magnitude = f"{layer}.lora_magnitude_vector.{adapter}.weight"
    return "", f"{layer}.lora_A.{adapter}.weight", f"{layer}.lora_B.{adapter}.weight", magnitude


def _check_complete(names: Iterable[str], adapter: str, tuned: Mapping[str, Tensor]) -> None:
    """Raise SplitError for an adapter's tensor that changes none of these base tensors, or not as a matrix."""
    used = {part for name in names for part in _parts(name, adapter)}
    for name, value in tuned.items():
        if name not in used or (".lora_" in name and value.dim() > 2):
            why = "is no LoRA weight of a linear layer, and cannot be merged here: use peft's merge_and_unload"
            raise SplitError(f"--merge: {name} {why}")


def _merged(
    value: Tensor, name: str | None, whole: Any, adapter: adapters.Adapter, tuned: Mapping[str, Tensor]
) -> Tensor:
    """Return a base tensor with the adapter's change of it."""
    if name is None:
        return value
    trained, key_a, key_b, key_m = _parts(name, adapter.name)
    if trained in tuned:
        return tuned[trained].to(value.dtype)
    if key_a not in tuned:
        return value
    layer = whole.get_submodule(name.removesuffix(".base_layer.weight"))
    changed = value.float().T if layer.fan_in_fan_out else value.float()
    changed = changed + layer.scaling[adapter.name] * (tuned[key_b].float() @ tuned[key_a].float())
    if key_m in tuned:
        changed = changed * (tuned[key_m].float() / torch.linalg.norm(changed, dim=1)).unsqueeze(1)
    return (changed.T if layer.fan_in_fan_out else changed).to(value.dtype)
