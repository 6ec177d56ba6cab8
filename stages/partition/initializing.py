"""Values for the parameters of a stage that no checkpoint has, as Hugging Face or peft starts them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pipecomp.errors import SplitError
from pipecomp.stages.partition.cutting import shallow
from pipecomp.stages.partition.planning import aliases
from pipecomp.stages.partition.splitting import Stage


def put(stage: Stage, names: Sequence[str], parameter: nn.Parameter) -> None:
    """Set a parameter under all its names, in a stage made from a skeleton: its modules are nobody else's."""
    for name in names:
        module, _, leaf = name.rpartition(".")
        stage.get_submodule(module)._parameters[leaf] = parameter


def initialize(stage: Stage, whole: Any, groups: list[list[str]], new: set[str], seed: int) -> None:
    """Give the parameters in `new`, and every buffer still on the meta device, the values Hugging Face gives them.

    whole, groups: the skeleton and its `aliases`. The generator is seeded by (seed, module name) for each module, and
    the global one left as it was.
    """
    from transformers.initialization import guard_torch_init_functions

    originals = {name: names[0] for names in groups for name in names if len(names) > 1} if stage.plan.tie else {}
    tied: list[tuple[str, nn.Parameter]] = []
    for names in aliases(stage):
        parameter = stage.get_parameter(names[0])
        if names[0] in new:
            # NaN, so that a weight which no initializer touches is noticed below.
            empty = torch.full(parameter.shape, float("nan"), dtype=parameter.dtype)
            parameter = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            put(stage, names, parameter)
            if names[0] in originals:
                tied.append((originals[names[0]], parameter))
        else:
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    todo: set[str] = set()
    for module_name, module in stage.named_modules():
        for buffer_name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[buffer_name] = torch.empty_like(buffer, device="cpu")
                todo.add(module_name)
    for name in new:
        parts = name.split(".")[:-1]
        todo |= {".".join(parts[:length]) for length in range(len(parts) + 1)}
    # Innermost first, as Hugging Face does: GPT-2's attention scales its projection's weights once more.
    modules = [(name, module) for name, module in stage.named_modules() if name in todo and module is not stage]
    modules.sort(key=lambda item: -item[0].count("."))

    with torch.no_grad(), guard_torch_init_functions(), torch.random.fork_rng(devices=[]):
        for name, parameter in tied:  # each copy as the original's module would, and no other module after it
            owner, _, leaf = name.rpartition(".")
            alone = shallow(whole.get_submodule(owner))
            alone._parameters[leaf] = parameter
            _seeded(stage, owner, alone, seed)
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        for name, module in modules:
            _seeded(stage, name, module, seed)
    for name, parameter in stage.named_parameters():
        if name in new and bool(parameter.isnan().any()):
            raise SplitError(f"{name}: {type(stage._model).__name__} does not say how to initialize it")
        if hasattr(parameter, "_is_hf_initialized"):
            del parameter._is_hf_initialized
    stage.check_what_it_receives()


def _seeded(stage: Stage, name: str, module: Any, seed: int) -> None:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)
    if stage.adapter is not None and hasattr(module, "reset_lora_parameters"):  # a layer with LoRA weights
        module.reset_lora_parameters(stage.adapter.name, stage.adapter.config.init_lora_weights)
    else:
        stage._model._init_weights(module)
