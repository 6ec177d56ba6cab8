"""What each stage of a split holds, worked out from names and shapes alone: nothing here allocates a weight.

n blocks, K stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from pipecomp.errors import SplitError
from pipecomp.stages.partition.architectures import Architecture, architecture_of, head_name
from pipecomp.stages.partition.balance import UPDATE_COST, balance, check_cuts


@dataclass(frozen=True, kw_only=True)
class TiedGroup:
    """One weight that several stages hold a copy of: their gradients must be summed, so that the copies stay equal.

    name: Hugging Face's name of the original. stages: who holds it, rising; the first one saves it. parameters: its
    name on each of these stages (`transformer.wte.weight` on the first, `lm_head.weight` on the last). trained: False
    where it is frozen: then there are no gradients to sum.
    """

    name: str
    stages: tuple[int, ...]
    parameters: tuple[str, ...]
    trained: bool = True


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """How a model is cut.

    architecture: `config.model_type`. model_class: the Hugging Face class. cuts: K + 1 rising block numbers, 0 and
    `blocks` included; stage i has blocks cuts[i] to cuts[i + 1] - 1. parameters: elements per stage, copies of tied
    weights included; trained: those of them that are not frozen. costs: per stage, in multiply-adds per token, or in
    seconds if the blocks were timed.
    tied: weights with copies on several stages; empty with `tie=False`.
    """

    architecture: str
    model_class: str
    cuts: tuple[int, ...]
    blocks: int
    parameters: tuple[int, ...]
    trained: tuple[int, ...]
    costs: tuple[float, ...]
    tied: tuple[TiedGroup, ...]
    tie: bool = True

    @property
    def num_stages(self) -> int:
        return len(self.cuts) - 1

    @property
    def trained_ties(self) -> tuple[TiedGroup, ...]:
        """Those of the tied weights whose gradients are summed over stages."""
        return tuple(group for group in self.tied if group.trained)


def plan_model(
    model: Any,
    num_stages: int | None = None,
    cuts: Sequence[int] | None = None,
    block_seconds: Sequence[float] | None = None,
    *,
    tie: bool = True,
    slowdowns: Sequence[float] = (),
) -> SplitPlan:
    """Plan the split of a Hugging Face model, which may be on the meta device. Arguments and errors as for `plan`.

    slowdowns: how many times the others' seconds each stage's machine takes, for cuts that are chosen; empty: all
    alike.
    """
    architecture = architecture_of(model.config)
    head = head_name(architecture, type(model))
    blocks = block_count(model, architecture)
    base = model.base_model_prefix

    named = dict(model.named_parameters(remove_duplicate=False))
    sizes = {name: p.numel() for name, p in named.items()}
    per_block = [0.0] * blocks
    for name, size in sizes.items():
        block = block_of(architecture, base, name)
        if block is not None:
            per_block[block] += size
    embeddings = UPDATE_COST * sum(n for name, n in sizes.items() if part_of(architecture, base, name) == "before")
    per_token, reads = architecture.heads[head].per_token, modules_read(model, architecture)
    in_head = (name for name in sizes if part_of(architecture, base, name) == "head" or _is_under(name, reads))
    matrix = sum(sizes[name] for name in in_head if per_token)

    if block_seconds is not None:
        measured = [float(s) for s in block_seconds]
        if len(measured) != blocks or not all(0 < s < float("inf") for s in measured):
            raise SplitError(f"block_seconds: got {block_seconds!r}, allowed: {blocks} positive times, one per block")
        rate = sum(measured) / sum(per_block)
        per_block, embeddings, matrix = measured, embeddings * rate, matrix * rate

    bounds = check_cuts(blocks, num_stages, cuts)
    if bounds is None:
        assert num_stages is not None, "check_cuts allows only one of them to be missing"
        bounds = balance(per_block, num_stages, first=embeddings, last=matrix, slowdowns=slowdowns)
    stages = len(bounds) - 1

    costs = [sum(per_block[lo:hi]) for lo, hi in pairwise(bounds)]
    costs[0] += embeddings
    costs[-1] += matrix

    tied, held = _tied_groups(model, architecture, bounds)
    if not tie:
        one_name = [group.name for group in tied if len(set(group.parameters)) < len(group.stages)]
        if one_name:
            raise SplitError(
                f"tie=False: several stages of {head} use {', '.join(one_name)}; stages that each have their own could "
                "not be saved as one Hugging Face model"
            )
        tied = []
        held = [[n for n in sizes if stage in _owners(model, architecture, bounds, n)] for stage in range(stages)]
    return SplitPlan(
        architecture=architecture.model_type,
        model_class=head,
        cuts=tuple(bounds),
        blocks=blocks,
        parameters=tuple(sum(sizes[name] for name in names) for names in held),
        trained=tuple(sum(sizes[name] for name in names if named[name].requires_grad) for names in held),
        costs=tuple(costs),
        tied=tuple(tied),
        tie=tie,
    )


def block_count(model: Any, architecture: Architecture) -> int:
    """How many blocks the model has. SplitError if there is no list at the architecture's path."""
    try:
        blocks = getattr(model, model.base_model_prefix).get_submodule(architecture.blocks)
        return len(blocks)
    except (AttributeError, TypeError) as error:
        raise SplitError(
            f"{architecture.model_type}: {type(model).__name__} has no list of blocks at "
            f"{model.base_model_prefix}.{architecture.blocks}"
        ) from error


def block_of(architecture: Architecture, base: str, name: str) -> int | None:
    """The number of the block that a parameter belongs to, or None."""
    prefix = f"{base}.{architecture.blocks}."
    return int(name[len(prefix) :].split(".", 1)[0]) if name.startswith(prefix) else None


def part_of(architecture: Architecture, base: str, name: str) -> str:
    """Which part of the model a parameter belongs to: block, before, after, shared or head. SplitError if none."""
    if not name.startswith(base + "."):
        return "head"
    inner = name[len(base) + 1 :]

    def under(*paths: str) -> bool:
        return any(inner == path or inner.startswith(path + ".") for path in paths)

    if under(architecture.blocks):
        return "block"
    if under(*architecture.before):
        return "before"
    if under(*architecture.after):
        return "after"
    if under(*architecture.shared):
        return "shared"
    raise SplitError(f"{architecture.model_type}: the architecture's entry does not say which stages have {name}")


def aliases(model: nn.Module) -> list[list[str]]:
    """The names of each parameter, in the model's order; more than one where a weight is tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def modules_read(model: Any, architecture: Architecture) -> tuple[str, ...]:
    """Full paths of the modules that the first stage has and the head reads too."""
    head = architecture.heads[head_name(architecture, type(model))]
    return tuple(f"{model.base_model_prefix}.{path}" for path in head.reads(model.config))


def _is_under(name: str, paths: Sequence[str]) -> bool:
    return any(name.startswith(path + ".") for path in paths)


def _owners(model: Any, architecture: Architecture, cuts: Sequence[int], name: str) -> Sequence[int]:
    """The stages that hold a parameter of this name, rising."""
    stages = len(cuts) - 1
    base = str(model.base_model_prefix)
    part = part_of(architecture, base, name)
    if part == "shared":
        return range(stages)
    if part == "before":
        return sorted({0, stages - 1}) if _is_under(name, modules_read(model, architecture)) else range(1)
    if part == "block":
        block = block_of(architecture, base, name)
        assert block is not None, "part_of says that it is a block's"
        stage = next(i for i in range(stages) if block < cuts[i + 1])
        return range(stage, stage + 1)
    return range(stages - 1, stages)


def _tied_groups(
    model: Any, architecture: Architecture, cuts: Sequence[int]
) -> tuple[list[TiedGroup], list[list[str]]]:
    """The weights that several stages need, and per stage one name for each parameter that it holds."""
    groups: list[TiedGroup] = []
    held: list[list[str]] = [[] for _ in cuts[1:]]
    for names in aliases(model):
        first_name: dict[int, str] = {}
        for name in names:
            for stage in _owners(model, architecture, cuts, name):
                first_name.setdefault(stage, name)
        for stage, name in first_name.items():
            held[stage].append(name)
        if len(first_name) > 1:
            stages = tuple(sorted(first_name))
            parameters = tuple(first_name[stage] for stage in stages)
            trained = model.get_parameter(names[0]).requires_grad
            groups.append(TiedGroup(name=names[0], stages=stages, parameters=parameters, trained=trained))
    return groups, held
