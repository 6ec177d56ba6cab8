"""Cutting of a Hugging Face model into stages, which share its modules and weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from pipecomp.errors import SplitError
from pipecomp.stages.partition.adapters import check_saved, without_peft
from pipecomp.stages.partition.architectures import is_built_in
from pipecomp.stages.partition.equality import check_small_copy
from pipecomp.stages.partition.planning import ModelParts, SplitPlan, aliases, plan_model
from pipecomp.stages.partition.stage import Stage
from pipecomp.stages.partition.structure import (
    Architecture,
    NoEmbeddings,
    SkippedBlock,
    module_at,
    replace_module,
    replace_parameter,
    shallow_copy,
)


def split(
    model: Any,
    num_stages: int | None = None,
    cuts: Sequence[int] | None = None,
    *,
    block_seconds: Sequence[float] | None = None,
    tie: bool = True,
) -> list[Stage]:
    """Split a Hugging Face model into stages; each takes the output of the one before it.

    The stages hold the model's own parameters and modules, so training or moving them trains or moves the model's;
    only the copies of tied weights are new. The model keeps its structure and still works unsplit.

    Args:
        model: a model of a known architecture; it may have a LoRA adapter, or be a PeftModel.
        num_stages: K, cut so that the stages are balanced (see `plan`).
        cuts: instead, the first block of each stage, with or without the number of blocks at the end: [0, 2, 4].
        block_seconds: measured seconds of each block, for the balance.
        tie: False gives up the tie of input and output embeddings.

    Returns:
        K stages; the first takes a batch's `input_ids` and `attention_mask`, the last returns logits.

    Raises:
        SplitError: the model's class is unknown or the cuts are impossible.

    Example::

        first, last = split(GPT2LMHeadModel.from_pretrained("gpt2"), num_stages=2)
        logits_BSV = last(first({"input_ids": ids_BS}))
    """
    model = without_peft(model)
    plan = plan_model(model, num_stages, cuts, block_seconds, tie=tie)
    return [take_stage(model, plan, index) for index in range(plan.num_stages)]


def take_stage(model: Any, plan: SplitPlan, index: int) -> Stage:
    """Make stage `index` of a plan from the model's own modules, without other stages' weights.

    A small copy of the model must be equal to its stages, unless the architecture is one of pipecomp's own.
    """
    parts = ModelParts(model)
    if (parts.head, parts.blocks) != (plan.model_class, plan.blocks):
        planned, found = f"{plan.model_class} with {plan.blocks} blocks", f"{parts.head} with {parts.blocks}"
        raise SplitError(f"the plan is for {planned}, the model is {found}")
    if not 0 <= index < plan.num_stages:
        raise SplitError(f"index: got {index}, allowed: 0 to {plan.num_stages - 1}")
    check_saved(model)
    stage = Stage(_cut(model, parts, plan, index), plan, index, parts.architecture)
    if plan.num_stages > 1 and not is_built_in(parts.architecture):
        stage.carries_left_padding = check_small_copy(model.config, type(model), parts.architecture, split_unchecked)
    return stage


def split_unchecked(model: Any, cuts: Sequence[int], architecture: Architecture) -> list[Stage]:
    """Split a model of a given structure at the cuts, as `split` does, without comparing a small copy."""
    parts = ModelParts(model, architecture)
    plan = plan_model(model, cuts=cuts, parts=parts)
    return [Stage(_cut(model, parts, plan, index), plan, index, architecture) for index in range(plan.num_stages)]


def _cut(model: Any, parts: ModelParts, plan: SplitPlan, index: int) -> Any:
    """Make a model of the same class with only the modules of stage `index`, sharing modules and weights with `model`.

    Modules on the path to a removed one are copied shallowly, so `model` itself does not change. Tied weights whose
    original belongs to another stage become parameters of their own, with equal values.
    """
    lo, hi = plan.cuts[index], plan.cuts[index + 1]
    top: Any = shallow_copy(model)
    architecture, base = parts.architecture, parts.base
    ties = [names for names in aliases(model) if len(names) > 1]
    top.config = copy.deepcopy(model.config)
    top.config.architectures = [plan.model_class]
    expects_ties = bool(getattr(model, "_tied_weights_keys", None))  # DeBERTa's new head empties its class's
    if not plan.tie or (expects_ties and not ties):
        top.config.tie_word_embeddings = False

    own = list(top.get_submodule(f"{base}.{architecture.blocks}"))
    places = [block if lo <= i < hi else SkippedBlock(architecture, block) for i, block in enumerate(own)]
    if hi < len(own):
        places[hi].keeps = True
    replace_module(top, f"{base}.{architecture.blocks}", nn.ModuleList(places))
    if index > 0:
        for path, replacement in architecture.before.items():
            instead = None if replacement is None else replacement()
            if isinstance(instead, NoEmbeddings):
                instead.stand_for(module_at(model, f"{base}.{path}"), places[0])
            replace_module(top, f"{base}.{path}", instead)
        for path in parts.read_by_head if index == plan.num_stages - 1 else ():
            replace_module(top, path, model.get_submodule(path))
    if index < plan.num_stages - 1:
        for path in architecture.after:
            replace_module(top, f"{base}.{path}", nn.Identity())
        for name in [name for name in top._modules if name != base]:
            replace_module(top, name, nn.Identity())

    parameters = dict(top.named_parameters(remove_duplicate=False))
    copied: list[list[str]] = []  # names of each weight that gets a parameter of its own
    for group in plan.tied:
        if index in group.stages[1:]:
            weight = parameters[group.parameters[group.stages.index(index)]]
            copied.append([alias for alias, p in parameters.items() if p is weight])
    if not plan.tie:
        copied += [[name] for names in ties for name in names[1:] if name in parameters]
    for names in copied:
        old = parameters[names[0]]
        new = nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
        for name in names:
            replace_parameter(top, name, new)
    return top
