"""The model that a stage is made of: of the same class, without what other stages have."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from pipecomp.errors import SplitError
from pipecomp.stages.partition.architectures import Architecture, SkippedBlock
from pipecomp.stages.partition.planning import SplitPlan, aliases, modules_read


def cut(model: Any, architecture: Architecture, plan: SplitPlan, index: int) -> Any:
    """Make a model of the same class with only what stage `index` needs, sharing modules and weights with `model`.

    Every module on the way to something that is taken out is copied without its contents, so `model` itself does not
    change. Tied weights whose original is another stage's become parameters of their own, with equal values.
    """
    lo, hi = plan.cuts[index], plan.cuts[index + 1]
    top: Any = shallow(model)
    base = model.base_model_prefix
    tied_names = [names for names in aliases(model) if len(names) > 1]
    top.config = _own_config(model, plan, bool(tied_names))

    own = list(top.get_submodule(f"{base}.{architecture.blocks}"))
    skip = SkippedBlock(architecture.block_returns_tuple)
    blocks = nn.ModuleList(block if lo <= i < hi else skip for i, block in enumerate(own))
    _graft(top, f"{base}.{architecture.blocks}", blocks)
    if index > 0:
        for path, replacement in architecture.before.items():
            _graft(top, f"{base}.{path}", None if replacement is None else replacement())
        for path in modules_read(model, architecture) if index == plan.num_stages - 1 else ():
            _graft(top, path, model.get_submodule(path))
    if index < plan.num_stages - 1:
        for path in architecture.after:
            _graft(top, f"{base}.{path}", nn.Identity())
        for name in [name for name in top._modules if name != base]:
            _graft(top, name, nn.Identity())

    held = dict(top.named_parameters(remove_duplicate=False))
    for group in plan.tied:
        if index in group.stages[1:]:
            name = group.parameters[group.stages.index(index)]
            fresh = _copy_of(held[name])
            for alias in [alias for alias, p in held.items() if p is held[name]]:
                replace_parameter(top, alias, fresh)
    if not plan.tie:
        for names in tied_names:
            for name in names[1:]:
                if name in held:
                    replace_parameter(top, name, _copy_of(held[name]))
    return top


def changed_on_the_way(model: Any, architecture: Architecture) -> bool:
    """Whether a later stage's model, cut by `cut`, changes what it receives in other places than its blocks.

    What an architecture computes there without a module of its own, as Granite multiplies its embeddings, every stage
    would compute once more.
    """
    top: Any = shallow(model)
    base = model.base_model_prefix
    blocks: Any = top.get_submodule(f"{base}.{architecture.blocks}")
    skip = SkippedBlock(architecture.block_returns_tuple)
    _graft(top, f"{base}.{architecture.blocks}", nn.ModuleList(skip for _ in blocks))
    for path in architecture.after:
        _graft(top, f"{base}.{path}", nn.Identity())
    like = next(model.parameters())
    sent_BSH = torch.linspace(-1, 1, 2 * int(model.config.hidden_size), dtype=like.dtype, device=like.device)
    sent_BSH = sent_BSH.view(1, 2, -1)
    with torch.no_grad():
        came_BSH = top.base_model(inputs_embeds=sent_BSH, **architecture.forward_options).last_hidden_state
    return not torch.equal(came_BSH, sent_BSH)


def _own_config(model: Any, plan: SplitPlan, has_ties: bool) -> Any:
    config = copy.deepcopy(model.config)
    config.architectures = [plan.model_class]
    expects_ties = bool(getattr(model, "_tied_weights_keys", None))  # DeBERTa's new head empties its class's
    if not plan.tie or (expects_ties and not has_ties):
        config.tie_word_embeddings = False
    return config


def _copy_of(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)


def shallow(module: nn.Module) -> nn.Module:
    """Copy a module but not what it holds, so that its tables can change without changing the original's.

    Calling the copy runs the copy: a compiled forward, which is the original's, is left behind, and a forward that was
    put on the original as a method becomes the copy's. Raises SplitError for one that may hold the original.
    """
    other = module.__class__.__new__(module.__class__)
    other.__dict__ = {
        key: copy.copy(value) if key.startswith("_") and isinstance(value, (dict, set)) else value
        for key, value in module.__dict__.items()
    }
    other.__dict__["_compiled_call_impl"] = None
    forward = module.__dict__.get("forward")
    if forward is not None:
        if getattr(forward, "__self__", None) is not module or not hasattr(forward, "__func__"):
            raise SplitError(
                f"{type(module).__name__}.forward was replaced by {forward!r}, which may run the whole model on every "
                "stage: split the model before it is changed, or put the forward on it with types.MethodType"
            )
        other.__dict__["forward"] = MethodType(forward.__func__, other)
    return other


def _own_way(top: nn.Module, way: Sequence[str]) -> nn.Module | None:
    """Copy the modules on a way, so that what lies there can be replaced in this model alone; None if it ends early."""
    for name in way:
        inner = top._modules.get(name)
        if inner is None:
            return None
        top._modules[name] = top = shallow(inner)
    return top


def _graft(top: nn.Module, path: str, module: nn.Module | None) -> None:
    """Put `module` at `path`, where the model has anything there."""
    *way, leaf = path.split(".")
    owner = _own_way(top, way)
    if owner is not None and owner._modules.get(leaf) is not None:
        owner._modules[leaf] = module


def replace_parameter(top: nn.Module, path: str, parameter: nn.Parameter) -> None:
    """Put a parameter at `path`; the model that its module comes from keeps its own."""
    *way, leaf = path.split(".")
    owner = _own_way(top, way)
    assert owner is not None, "the path of a parameter that the model has"
    owner._parameters[leaf] = parameter
