"""What each stage of a partition holds, worked out from names and shapes alone: nothing here allocates a weight.

n blocks, K stages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from torch import nn

from pipecomp.errors import SplitError
from pipecomp.stages.partition.architectures import Architecture, architecture_of, head_name

UPDATE_COST = 0.05
"""What a parameter costs that no token is multiplied with (an embedding), in multiply-adds per token.

Each parameter is read and written by the optimizer once a step, whatever the number of tokens: about 30 bytes, against
3 multiply-adds for each token of the step. With 1,000 tokens in a step that ratio is near 0.05; with more it is less.
"""


def balance(
    block_costs: Sequence[float],
    num_stages: int,
    *,
    first: float = 0.0,
    last: float = 0.0,
    slowdowns: Sequence[float] = (),
) -> list[int]:
    """Cuts [0, ..., n] of K stages that minimize the largest stage cost; among those, the sum of squares.

    first, last: what the first stage pays for the embeddings and the last one for the head, on top of their blocks.
    slowdowns: what each stage's costs are multiplied with, one for each; empty for 1.
    Every stage gets one block at least. Raises SplitError if K is not in 1..n. O(K n^2).
    """
    n = len(block_costs)
    if not 1 <= num_stages <= n:
        raise SplitError(f"num_stages: got {num_stages}, allowed: 1 to {n} (the number of blocks)")
    if slowdowns and (len(slowdowns) != num_stages or not all(0 < slowdown < float("inf") for slowdown in slowdowns)):
        raise SplitError(f"slowdowns: got {list(slowdowns)}, allowed: {num_stages} numbers above 0, one for each stage")
    sums = [0.0, *accumulate(block_costs)]

    def cost(stage: int, lo: int, hi: int) -> float:
        whole = sums[hi] - sums[lo] + (first if stage == 0 else 0.0) + (last if stage == num_stages - 1 else 0.0)
        return whole * (slowdowns[stage] if slowdowns else 1.0)

    def best(limit: float, squares: bool) -> tuple[float, list[int]]:
        """Over partitions with no stage above `limit`: the least maximum, or the least sum of squares."""
        table: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
        for stage in range(num_stages):
            ends = [n] if stage == num_stages - 1 else range(stage + 1, n)
            row: dict[int, tuple[float, list[int]]] = {}
            for hi in ends:
                for lo, (so_far, cuts) in table.items():
                    c = cost(stage, lo, hi)
                    if lo >= hi or c > limit:
                        continue
                    total = so_far + c * c if squares else max(so_far, c)
                    if hi not in row or total < row[hi][0]:
                        row[hi] = (total, [*cuts, hi])
            table = row
        return table[n]

    smallest_maximum, _ = best(float("inf"), squares=False)
    return best(smallest_maximum * (1 + 1e-9), squares=True)[1]


def settle_cuts(
    blocks: int, num_stages: int | None, cuts: Sequence[int] | None, choose: Callable[[int], list[int]]
) -> list[int]:
    """Complete `cuts` with both ends, [0, ..., blocks]; without any, `choose(num_stages)` says. Raises SplitError."""
    if num_stages is not None and (isinstance(num_stages, bool) or not isinstance(num_stages, int)):
        raise SplitError(f"num_stages: got {num_stages!r}, allowed: a whole number from 1 to {blocks}")
    if num_stages is not None and not 1 <= num_stages <= blocks:
        raise SplitError(f"num_stages: got {num_stages}, allowed: 1 to {blocks} (the number of blocks)")
    if cuts is None:
        if num_stages is None:
            raise SplitError("say where to cut: num_stages=K, or cuts=[0, ..., number of blocks]")
        return choose(num_stages)
    bounds = list(cuts)
    if any(isinstance(c, bool) or not isinstance(c, int) for c in bounds):
        raise SplitError(f"cuts: got {cuts!r}, allowed: whole numbers, each the first block of a stage")
    if bounds and bounds[-1] < blocks:
        bounds.append(blocks)
    rising = all(a < b for a, b in pairwise(bounds))
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != blocks or not rising:
        raise SplitError(f"cuts: got {list(cuts)}, allowed: rising block numbers from 0 to {blocks}")
    if num_stages is not None and len(bounds) - 1 != num_stages:
        raise SplitError(f"cuts: got {list(cuts)} for {len(bounds) - 1} stages, but num_stages is {num_stages}")
    return bounds


@dataclass(frozen=True, kw_only=True)
class TiedGroup:
    """A weight of which several stages hold a copy; their gradients must be summed, so that the copies stay equal.

    Attributes:
        name: Hugging Face's name of the original.
        stages: who holds it, rising; the first one saves it.
        parameters: its name on each of these stages (`transformer.wte.weight` on the first, `lm_head.weight` on the
            last).
        trained: False where it is frozen: then there are no gradients to sum.
    """

    name: str
    stages: tuple[int, ...]
    parameters: tuple[str, ...]
    trained: bool = True


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """How a model is partitioned.

    Attributes:
        architecture: `config.model_type`.
        model_class: the Hugging Face class.
        cuts: K + 1 rising block numbers, 0 and `blocks` included; stage i has blocks cuts[i] to cuts[i + 1] - 1.
        parameters: elements per stage, copies of tied weights included.
        trained: those of them that are not frozen.
        costs: per stage, in multiply-adds per token, or in seconds if the blocks were timed.
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
        """K."""
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
    end_seconds: tuple[float, float] | None = None,
    slowdowns: Sequence[float] = (),
) -> SplitPlan:
    """Plan the split of a Hugging Face model, which may be on the meta device. Arguments and errors as for `plan`.

    end_seconds: beside `block_seconds`, of the embeddings and of the head; None: as many as a block's for as many
    parameters. slowdowns: how many times the others' seconds each stage's machine takes, for cuts that are chosen;
    empty: all alike.
    """
    if not hasattr(model, "config"):
        allowed = "a Hugging Face model, or what pipecomp.stages.modules makes of an nn.Sequential"
        raise SplitError(f"model: got {type(model).__name__}, allowed: {allowed}")
    architecture = architecture_of(model.config)
    head = head_name(architecture, type(model))
    named = dict(model.named_parameters(remove_duplicate=False))
    costs = _costs(model, architecture, block_seconds, end_seconds)
    balanced = partial(balance, costs.blocks, first=costs.first, last=costs.last, slowdowns=slowdowns)
    bounds = settle_cuts(len(costs.blocks), num_stages, cuts, balanced)
    tied, held = _tied_groups(model, architecture, bounds)
    if not tie:
        one_name = [group.name for group in tied if len(set(group.parameters)) < len(group.stages)]
        if one_name:
            raise SplitError(
                f"tie=False: several stages of {head} use {', '.join(one_name)}; stages that each have their own could "
                "not be saved as one Hugging Face model"
            )
        tied = []
        held = [[n for n in named if k in _owners(model, architecture, bounds, n)] for k in range(len(bounds) - 1)]
    return SplitPlan(
        architecture=architecture.model_type,
        model_class=head,
        cuts=tuple(bounds),
        blocks=len(costs.blocks),
        parameters=tuple(sum(named[name].numel() for name in names) for names in held),
        trained=tuple(sum(named[name].numel() for name in names if named[name].requires_grad) for names in held),
        costs=costs.of_stages(bounds),
        tied=tuple(tied),
        tie=tie,
    )


class _Costs(NamedTuple):
    """Of each block, and of what the first and the last stage compute besides: multiply-adds per token, or seconds."""

    blocks: list[float]
    first: float
    last: float

    def of_stages(self, bounds: Sequence[int]) -> tuple[float, ...]:
        found = [sum(self.blocks[lo:hi]) for lo, hi in pairwise(bounds)]
        found[0] += self.first
        found[-1] += self.last
        return tuple(found)


def _costs(
    model: Any,
    architecture: Architecture,
    block_seconds: Sequence[float] | None,
    end_seconds: tuple[float, float] | None,
) -> _Costs:
    """By the parameters of each part, or by seconds; those of an embedding's update are by its parameters always."""
    base, blocks = model.base_model_prefix, block_count(model, architecture)
    per_token = architecture.heads[head_name(architecture, type(model))].per_token
    reads = modules_read(model, architecture)
    per_block, embeddings, matrix = [0.0] * blocks, 0, 0
    for name, parameter in model.named_parameters(remove_duplicate=False):
        part, size = part_of(architecture, base, name), parameter.numel()
        if (block := block_of(architecture, base, name)) is not None:
            per_block[block] += size
        if part == "before":
            embeddings += size
        if per_token and (part == "head" or _is_under(name, reads)):
            matrix += size
    if block_seconds is None:
        return _Costs(per_block, UPDATE_COST * embeddings, matrix)
    measured = [float(s) for s in block_seconds]
    if len(measured) != blocks or not all(0 < s < float("inf") for s in measured):
        raise SplitError(f"block_seconds: got {block_seconds!r}, allowed: {blocks} positive times, one per block")
    rate = sum(measured) / sum(per_block)
    first, last = end_seconds or (0.0, matrix * rate)
    return _Costs(measured, first + UPDATE_COST * embeddings * rate, last)


def block_count(model: Any, architecture: Architecture) -> int:
    """How many blocks the model has. SplitError if there is no list at the architecture's path."""
    try:
        return len(getattr(model, model.base_model_prefix).get_submodule(architecture.blocks))
    except (AttributeError, TypeError) as error:
        raise SplitError(
            f"{architecture.model_type}: {type(model).__name__} has no list of blocks at "
            f"{model.base_model_prefix}.{architecture.blocks}"
        ) from error


def block_of(architecture: Architecture, base: str, name: str) -> int | None:
    """Find the number of the block that a parameter belongs to, or None."""
    prefix = f"{base}.{architecture.blocks}."
    return int(name[len(prefix) :].split(".", 1)[0]) if name.startswith(prefix) else None


def part_of(architecture: Architecture, base: str, name: str) -> str:
    """Which part of the model a parameter belongs to: block, before, after, shared or head. SplitError if none."""
    if not name.startswith(base + "."):
        return "head"
    inner = name[len(base) + 1 :]
    for part, paths in (
        ("block", (architecture.blocks,)),
        ("before", architecture.before),
        ("after", architecture.after),
        ("shared", architecture.shared),
    ):
        if _is_under(inner, paths):
            return part
    raise SplitError(f"{architecture.model_type}: the architecture's entry does not say which stages have {name}")


def aliases(model: nn.Module) -> list[list[str]]:
    """List the names of each parameter, in the model's order; more than one where a weight is tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def modules_read(model: Any, architecture: Architecture) -> tuple[str, ...]:
    """Full paths of the modules that the first stage has and the head reads too."""
    head = architecture.heads[head_name(architecture, type(model))]
    return tuple(f"{model.base_model_prefix}.{path}" for path in head.reads(model.config))


def _is_under(name: str, paths: Iterable[str]) -> bool:
    return any(name == path or name.startswith(path + ".") for path in paths)


def _owners(model: Any, architecture: Architecture, cuts: Sequence[int], name: str) -> Sequence[int]:
    """Find the stages that hold a parameter of this name, rising."""
    stages, base = len(cuts) - 1, str(model.base_model_prefix)
    part = part_of(architecture, base, name)
    if part == "shared":
        return range(stages)
    if part == "before":
        return sorted({0, stages - 1}) if _is_under(name, modules_read(model, architecture)) else range(1)
    if part == "block":
        block = block_of(architecture, base, name)
        assert block is not None, "part_of says that it is a block's"
        return [bisect_right(cuts, block) - 1]
    return range(stages - 1, stages)


def _tied_groups(
    model: Any, architecture: Architecture, cuts: Sequence[int]
) -> tuple[list[TiedGroup], list[list[str]]]:
    """Find the weights that several stages need, and per stage one name for each parameter that it holds."""
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
