"""Export of the stages as one Hugging Face folder: each rank writes its own shard, one of them index and config.

With a LoRA adapter it is peft's folder: the adapter alone, in one file.

    every rank:  write_shard(stage, folder)
    barrier
    one rank:    write_index(stage, folder)

Until `write_index` runs, the shards have provisional names and the folder's earlier files are unchanged.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipecomp.errors import SplitError
from pipecomp.stages.partition import adapters
from pipecomp.stages.partition.adapters import Adapter
from pipecomp.stages.partition.loading import Source, skeleton
from pipecomp.stages.partition.planning import aliases
from pipecomp.stages.partition.stage import Stage
from pipecomp.utils.files import UNFINISHED, atomic_write_text

INDEX = "model.safetensors.index.json"
_WEIGHTS = re.compile(
    r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.part)?|(model\.safetensors|pytorch_model\.bin)\.index\.json"
    r"|adapter_(config\.json|model\.(safetensors|bin))"  # from_pretrained would apply it to the new weights
)


def write_shard(stage: Stage, folder: str | Path, *, state: Mapping[str, Tensor] | None = None) -> Path:
    """Write a stage's tensors into a folder that every rank must see.

    Tied weights are written by the first stage that has them, and there once.

    Args:
        stage: this rank's.
        folder: folder of the model; made if it is missing.
        state: values by Hugging Face's names, in place of the stage's own (such as float32 masters of bfloat16
            weights); all of them and no others.

    Returns:
        The file, under its provisional name.

    Raises:
        SplitError: names a tensor that `state` lacks, or that the stage does not have.
    """
    from safetensors.torch import save_file

    names = _names_to_write(stage)
    if stage.adapter is not None:
        # peft needs all tensors of an adapter to name them, copies that another stage writes included.
        saved_as = adapters.saved_names(stage._model, stage.adapter)
        names = {name: saved_as[name] for name in names if name in saved_as}
    values = stage.state_dict() if state is None else state
    missing = [name for name in names if name not in values]
    unknown = [name for name in values if name not in stage.state_dict()]
    if missing or unknown:
        wrong = f"it lacks {missing[0]}" if missing else f"the stage has no {unknown[0]}"
        raise SplitError(f"state for stage {stage.index}: {wrong}")
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder) / (shard_name(stage.index, stage.num_stages) + UNFINISHED)
    tensors = {saved: values[name].detach().to("cpu").contiguous() for name, saved in names.items()}
    if stage.adapter is None:
        tensors = _as_on_disk(stage._model, tensors)
    save_file(tensors, str(path), metadata={"format": "pt"})
    return path


def write_index(stage: Stage, folder: str | Path, *, generation_config: Any = None) -> Path:
    """Join the shards that all stages have written into one model; call it on one rank, after a barrier.

    Weights of an earlier save, whatever their number of files, are removed, and an adapter.

    Args:
        stage: any of them.
        folder: folder that `write_shard` wrote into.
        generation_config: default: that of the model that was split.

    Returns:
        The index, or an adapter's file.

    Raises:
        SplitError: before anything changes, if a shard or tensor is missing or duplicated.
    """
    folder = Path(folder)
    shards = [shard_name(index, stage.num_stages) for index in range(stage.num_stages)]
    weight_map, total_size, dtype = _read_headers(folder, shards)
    whole = skeleton(Source(config=stage.config, model_class=type(stage._model), adapter=stage.adapter))
    wanted = set(whole.state_dict()) - {name for names in aliases(whole) for name in names[1:]}
    # A script may have replaced the class's head; the last stage, which has it, wrote it as it is.
    wanted = {name for name in wanted if name.startswith(f"{whole.base_model_prefix}.")}
    if stage.adapter is None:
        values = whole.state_dict()
        wanted = set(_as_on_disk(stage._model, {name: values[name] for name in wanted}))
    else:
        saved_as = adapters.saved_names(whole, stage.adapter)
        wanted = {saved_as[name] for name in wanted if name in saved_as}
    missing = sorted(wanted - set(weight_map))
    if missing:
        raise SplitError(f"{folder}: no shard has {missing[0]}")
    if stage.adapter is not None:
        return _join_adapter(whole, stage.adapter, folder, shards)

    (folder / INDEX).unlink(missing_ok=True)  # a crash from here on leaves no loadable mixture
    for shard in shards:
        os.replace(folder / (shard + UNFINISHED), folder / shard)
    for path in folder.iterdir():
        if _WEIGHTS.fullmatch(path.name) and path.name not in shards:
            path.unlink()

    config = copy.deepcopy(stage.config)
    config.dtype = dtype
    config.save_pretrained(str(folder))
    generation_config = generation_config if generation_config is not None else stage.generation_config
    if generation_config is not None:
        try:
            generation_config.save_pretrained(str(folder))
        except ValueError:  # transformers refuses a setting: no reason to lose a trained model
            generation_config.to_json_file(folder / "generation_config.json")
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    atomic_write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
    return folder / INDEX


def _as_on_disk(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give tensors the names and layouts of the model's checkpoints, as transformers does when it saves."""
    from transformers.core_model_loading import revert_weight_conversion

    reverted: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return {name: value.contiguous() for name, value in reverted.items()}


def _join_adapter(whole: Any, adapter: Adapter, folder: Path, shards: list[str]) -> Path:
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for shard in shards:
        tensors |= load_file(str(folder / (shard + UNFINISHED)))
    saved_as = adapters.saved_names(whole, adapter)
    for names in aliases(whole):  # peft looks for a tied weight under all its names
        found = [saved_as[name] for name in names if name in saved_as]
        tensors |= {other: tensors[found[0]].clone() for other in found[1:]}
    path = adapters.write(folder, adapter, tensors)
    for shard in shards:
        (folder / (shard + UNFINISHED)).unlink()
    return path


def save_pretrained(stages: Sequence[Stage], folder: str | Path) -> None:
    """Save all stages of one process as one Hugging Face folder."""
    for stage in stages:
        write_shard(stage, folder)
    write_index(stages[0], folder)


def shard_name(index: int, num_stages: int) -> str:
    """Name a stage's file: `model-00001-of-00004.safetensors` for stage 0 of 4."""
    return f"model-{index + 1:05d}-of-{num_stages:05d}.safetensors"


def _names_to_write(stage: Stage) -> dict[str, str]:
    """Map the names of a stage's tensors to themselves: each weight once, without copies of an earlier stage's."""
    own = stage.tied_parameters()
    elsewhere = {id(own[group.name]) for group in stage.tied_groups if group.stages[0] != stage.index}
    names: dict[int | str, str] = {}
    for name, value in stage.state_dict(keep_vars=True).items():
        names.setdefault(id(value) if isinstance(value, nn.Parameter) else name, name)
    return {name: name for key, name in names.items() if key not in elsewhere}


def _read_headers(folder: Path, shards: list[str]) -> tuple[dict[str, str], int, torch.dtype]:
    """Return the file of each tensor, the bytes of all, and the dtype of the first floating-point one."""
    from safetensors import safe_open

    weight_map: dict[str, str] = {}
    total_size = 0
    dtype: torch.dtype | None = None
    for shard in shards:
        path = folder / (shard + UNFINISHED)
        if not path.is_file():
            raise SplitError(f"{path} is missing: each stage's write_shard comes before write_index, in one folder")
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if name in weight_map:
                    raise SplitError(f"{name} is in both {weight_map[name]} and {shard}")
                weight_map[name] = shard
                part = file.get_slice(name)
                sample = part[0:0] if part.get_shape() else part[()]
                total_size += sample.element_size() * int(torch.Size(part.get_shape()).numel())
                if dtype is None and sample.is_floating_point():
                    dtype = sample.dtype
    return weight_map, total_size, dtype or torch.float32
