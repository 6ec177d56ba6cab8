"""Partition of a model into stages, from names and shapes alone: cuts, and the modules and weights of each stage.

n blocks, K stages. No weight is allocated. Costs are in multiply-adds per token, or in seconds if blocks were timed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from pipecomp.errors import SplitError
from pipecomp.stages.partition.architectures import architecture_of, head_name
from pipecomp.stages.partition.quantization import count_values, stored_bytes
from pipecomp.stages.partition.structure import Architecture

UPDATE_COST = 0.05
"""Cost of a parameter that no token is multiplied with (an embedding), in multiply-adds per token.

The optimizer reads and writes each parameter once a step, whatever the number of tokens: about 30 bytes, against 3
multiply-adds for each token of the step. With 1,000 tokens in a step that ratio is near 0.05; with more it is less.
"""


@dataclass(frozen=True, kw_only=True)
class TiedGroup:
    """A weight copied to several stages. The gradients of the copies are summed, so that they stay equal.

    Attributes:
        name: Hugging Face's name of the original.
        stages: stages with a copy, rising; the first one saves it.
        parameters: its name on each of these stages (`transformer.wte.weight` on the first, `lm_head.weight` on the
            last).
        trained: False if it is frozen: then there are no gradients to sum.
    """

    name: str
    stages: tuple[int, ...]
    parameters: tuple[str, ...]
    trained: bool = True


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """Partition of a model.

    Attributes:
        architecture: `config.model_type`.
        model_class: the Hugging Face class.
        cuts: K + 1 rising block numbers, 0 and `blocks` included; stage i has blocks cuts[i] to cuts[i + 1] - 1.
        blocks: n.
        parameters: elements per stage, copies of tied weights included.
        trained: number of these that are not frozen.
        frozen_bytes: bytes of each stage's frozen weights in the model's dtype or quantized, with their scales.
        costs: per stage, in multiply-adds per token, or in seconds if the blocks were timed.
        tied: weights with copies on several stages; empty with `tie=False`.
        tie: whether tied weights stay tied.
        first_trained_block: the first block that trains anything; 0 if embeddings do, n if only the head does.
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
    frozen_bytes: tuple[int, ...] = ()
    first_trained_block: int = 0

    @property
    def num_stages(self) -> int:
        """K."""
        return len(self.cuts) - 1

    @property
    def lowest_trained(self) -> int:
        """The first stage that trains anything, 0 if none does. Stages before it compute no gradients.

        Note: [Frozen stages] Backpropagation ends at the lowest trained parameter. Stages below it run forwards only,
        and the links to them carry no gradients. All ranks compare `trained` at the start, so that both ends of a link
        agree. A stage above it passes gradients on even if all its own parameters are frozen.
        """
        return next((stage for stage, trained in enumerate(self.trained) if trained), 0)

    @property
    def trained_ties(self) -> tuple[TiedGroup, ...]:
        """The tied weights whose gradients are summed over stages."""
        return tuple(group for group in self.tied if group.trained)


def balance(
    block_costs: Sequence[float],
    num_stages: int,
    *,
    first: float = 0.0,
    last: float = 0.0,
    slowdowns: Sequence[float] = (),
) -> list[int]:
    """Find the cuts that minimize the largest stage cost; among those, the sum of squares. O(K n^2).

    Args:
        block_costs: costs of the n blocks.
        num_stages: K; every stage gets one block at least.
        first: additional cost of the first stage, for the embeddings.
        last: additional cost of the last stage, for the head.
        slowdowns: factor of each stage's costs; empty for 1.

    Returns:
        K + 1 cuts [0, ..., n].

    Raises:
        SplitError: K is not in 1..n, or slowdowns are not K positive numbers.
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

    def search(limit: float, squares: bool) -> tuple[float, list[int]]:
        """Minimize the maximum, or the sum of squares, over partitions with no stage above `limit`."""
        table: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}  # by the last cut
        for stage in range(num_stages):
            row: dict[int, tuple[float, list[int]]] = {}
            for hi in [n] if stage == num_stages - 1 else range(stage + 1, n):
                for lo, (so_far, cuts) in table.items():
                    c = cost(stage, lo, hi)
                    if lo >= hi or c > limit:
                        continue
                    total = so_far + c * c if squares else max(so_far, c)
                    if hi not in row or total < row[hi][0]:
                        row[hi] = (total, [*cuts, hi])
            table = row
        return table[n]

    smallest_maximum, _ = search(float("inf"), squares=False)
    return search(smallest_maximum * (1 + 1e-9), squares=True)[1]


def complete_cuts(
    blocks: int, num_stages: int | None, cuts: Sequence[int] | None, choose: Callable[[int], list[int]]
) -> list[int]:
    """Return `cuts` with both ends, [0, ..., blocks], or `choose(num_stages)` without any. SplitError if impossible."""
    whole = isinstance(num_stages, int) and not isinstance(num_stages, bool)
    if num_stages is not None and not (whole and 1 <= num_stages <= blocks):
        raise SplitError(
            f"num_stages: got {num_stages!r}, allowed: a whole number, 1 to {blocks} (the number of blocks)"
        )
    if cuts is None:
        if num_stages is None:
            raise SplitError("nowhere to cut: give num_stages=K, or cuts=[0, ..., number of blocks]")
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


def plan_model(
    model: Any,
    num_stages: int | None = None,
    cuts: Sequence[int] | None = None,
    block_seconds: Sequence[float] | None = None,
    *,
    tie: bool = True,
    end_seconds: tuple[float, float] | None = None,
    slowdowns: Sequence[float] = (),
    parts: ModelParts | None = None,
) -> SplitPlan:
    """Plan the partition of a Hugging Face model, which may be on the meta device. Other arguments as for `plan`.

    end_seconds: beside `block_seconds`, of the embeddings and of the head; by default as many as a block takes for as
    many parameters. slowdowns: factor of the seconds on each stage's machine, for cuts that are chosen; empty: 1.
    parts: parts of the model, if they are known.
    """
    if not hasattr(model, "config"):
        allowed = "a Hugging Face model, or the result of pipecomp.stages.modules for an nn.Sequential"
        raise SplitError(f"model: got {type(model).__name__}, allowed: {allowed}")
    parts = parts or ModelParts(model)
    named = dict(model.named_parameters(remove_duplicate=False))
    costs, first, last = _costs(named, parts, block_seconds, end_seconds)
    balanced = partial(balance, costs, first=first, last=last, slowdowns=slowdowns)
    bounds = complete_cuts(parts.blocks, num_stages, cuts, balanced)
    stages = range(len(bounds) - 1)
    tied: list[TiedGroup] = []
    held: list[list[str]] = [[] for _ in stages]  # one name for each parameter of a stage
    for names in aliases(model) if tie else [[name] for name in named]:
        first_name: dict[int, str] = {}
        for name in names:
            for stage in parts.owners(bounds, name):
                first_name.setdefault(stage, name)
        for stage, name in first_name.items():
            held[stage].append(name)
        if len(first_name) > 1:
            owners = tuple(sorted(first_name))
            parameters = tuple(first_name[stage] for stage in owners)
            trained = named[names[0]].requires_grad
            tied.append(TiedGroup(name=names[0], stages=owners, parameters=parameters, trained=trained))
    if tied and not tie:
        raise SplitError(
            f"tie=False: several stages of {parts.head} use {', '.join(group.name for group in tied)}; stages with "
            "copies of their own could not be saved as one Hugging Face model"
        )
    of_stages = [sum(costs[lo:hi]) for lo, hi in pairwise(bounds)]
    of_stages[0] += first
    of_stages[-1] += last
    return SplitPlan(
        architecture=parts.architecture.model_type,
        model_class=parts.head,
        cuts=tuple(bounds),
        blocks=parts.blocks,
        parameters=tuple(sum(count_values(named[name]) for name in names) for names in held),
        trained=tuple(sum(named[name].numel() for name in names if named[name].requires_grad) for names in held),
        frozen_bytes=tuple(
            round(sum(stored_bytes(named[name]) for name in names if not named[name].requires_grad)) for names in held
        ),
        costs=tuple(of_stages),
        tied=tuple(tied),
        tie=tie,
        first_trained_block=min((_block_from(parts, name) for name, p in named.items() if p.requires_grad), default=0),
    )


def _block_from(parts: ModelParts, name: str) -> int:
    """Return the block at whose input a parameter's gradient ends: 0 for the embeddings, n for the head."""
    part = parts.part_of(name)
    return parts.block_of(name) if part == "block" else parts.blocks if part in ("after", "head") else 0


def _costs(
    named: Mapping[str, nn.Parameter],
    parts: ModelParts,
    block_seconds: Sequence[float] | None,
    end_seconds: tuple[float, float] | None,
) -> tuple[list[float], float, float]:
    """Return the costs of each block, and the additional ones of the first and the last stage.

    An embedding's update costs by its parameters, also where blocks were timed.
    """
    per_token = parts.architecture.heads[parts.head].per_token
    per_block, embeddings, matrix = [0.0] * parts.blocks, 0, 0
    for name, parameter in named.items():
        part, size = parts.part_of(name), count_values(parameter)
        if part == "block":
            per_block[parts.block_of(name)] += size
        if part == "before":
            embeddings += size
        if per_token and (part == "head" or _is_under(name, parts.read_by_head)):
            matrix += size
    if block_seconds is None:
        return per_block, UPDATE_COST * embeddings, matrix
    measured = [float(s) for s in block_seconds]
    if len(measured) != parts.blocks or not all(0 < s < float("inf") for s in measured):
        raise SplitError(f"block_seconds: got {block_seconds!r}, allowed: {parts.blocks} positive times, one per block")
    rate = sum(measured) / sum(per_block)
    first, last = end_seconds or (0.0, matrix * rate)
    return measured, first + UPDATE_COST * embeddings * rate, last


class ModelParts:
    """Parts of a Hugging Face model, by the names of its parameters.

    Attributes:
        architecture: the entry for its config.
        head: name of its class among the entry's heads.
        base: name of the base model in it.
        blocks: n.
        read_by_head: paths of the first stage's modules that the head reads too.
    """

    def __init__(self, model: Any, architecture: Architecture | None = None) -> None:
        self.architecture = architecture or architecture_of(model.config, type(model))
        self.head = head_name(self.architecture, type(model))
        self.base = str(model.base_model_prefix)
        path = f"{self.base}.{self.architecture.blocks}"
        try:
            self.blocks = len(model.get_submodule(path))
        except (AttributeError, TypeError) as error:
            message = f"{self.architecture.model_type}: {type(model).__name__} has no list of blocks at {path}"
            raise SplitError(message) from error
        reads = self.architecture.heads[self.head].reads(model.config)
        self.read_by_head = tuple(f"{self.base}.{path}" for path in reads)

    def part_of(self, name: str) -> str:
        """Return a parameter's part of the model: block, before, after, shared or head. SplitError if it has none."""
        if not name.startswith(self.base + "."):
            return "head"
        inner, architecture = name[len(self.base) + 1 :], self.architecture
        for part, paths in (
            ("block", (architecture.blocks,)),
            ("before", architecture.before),
            ("after", architecture.after),
            ("shared", architecture.shared),
        ):
            if _is_under(inner, paths):
                return part
        raise SplitError(f"{architecture.model_type}: the architecture's entry assigns {name} to no stage")

    def block_of(self, name: str) -> int:
        """Return the number of the block of a parameter whose part is "block"."""
        return int(name.removeprefix(f"{self.base}.{self.architecture.blocks}.").split(".", 1)[0])

    def owners(self, cuts: Sequence[int], name: str) -> Sequence[int]:
        """Return the stages that hold a parameter of this name, rising."""
        last, part = len(cuts) - 2, self.part_of(name)
        if part == "shared":
            return range(last + 1)
        if part == "before":
            return sorted({0, last}) if _is_under(name, self.read_by_head) else [0]
        if part == "block":
            return [bisect_right(cuts, self.block_of(name)) - 1]
        return [last]


def aliases(model: nn.Module) -> list[list[str]]:
    """List the names of each parameter, in the model's order; several for a tied weight."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def _is_under(name: str, paths: Iterable[str]) -> bool:
    return any(name == path or name.startswith(path + ".") for path in paths)
