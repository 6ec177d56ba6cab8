"""What a model asks of a stage, block by block: operations, seconds and memory for one sample of S tokens.

Counted on shapes alone, with Hugging Face's own code and no memory for a weight: a 70B model is profiled on a laptop.
All blocks count as much as one from the middle. Attention is counted as if each token saw all others and the matrix
were kept; fused kernels keep less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from pipecomp.errors import ConfigError, require
from pipecomp.schedule import SavedTensorBytes
from pipecomp.stages.partition.architectures import architecture_of, default_loss
from pipecomp.stages.partition.loading import Source, resolve, skeleton
from pipecomp.stages.partition.planning import SplitPlan, plan_model
from pipecomp.stages.partition.splitting import Stage, take_stage
from pipecomp.utils.serialization import serializable

_AFTER_PADDING = {"roberta", "xlm-roberta", "camembert"}  # their positions begin after that of the padding token
BACKWARD = 2.0  # backward operations for each forward one: the gradients of inputs and of weights


@serializable
@dataclass(frozen=True, kw_only=True)
class PartCost:
    """Of one part of the model on one sample.

    flops: of its forward (a multiply-add is two). kept_bytes: what the forward keeps for the backward. forward_s,
    backward_s: None where nothing was measured.
    """

    flops: float
    kept_bytes: float
    forward_s: float | None = None
    backward_s: float | None = None

    def __sub__(self, other: PartCost) -> PartCost:
        """Tell what one part has more than another; never less than nothing."""

        def less(a: float | None, b: float | None) -> float | None:
            return None if a is None or b is None else max(0.0, a - b)

        return PartCost(
            flops=max(0.0, self.flops - other.flops),
            kept_bytes=max(0.0, self.kept_bytes - other.kept_bytes),
            forward_s=less(self.forward_s, other.forward_s),
            backward_s=less(self.backward_s, other.backward_s),
        )


@serializable
@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model's blocks, and what its first and last stage have besides (embeddings; head and loss).

    hidden: H. tokens: S. call_s: seconds of a stage's forward that do not depend on the number of samples, and of its
    backward. measured: where the seconds come from, for people. again_bytes: where blocks are recomputed, what one
    keeps of a sample while its backward runs; a stage has it once, however many micro-batches are in flight.
    """

    hidden: int
    tokens: int
    blocks: tuple[PartCost, ...]
    first: PartCost
    last: PartCost
    call_s: tuple[float, float] = (0.0, 0.0)
    measured: str = ""
    again_bytes: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Give it for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> Profile:
        """Read what `as_dict` gave. ConfigError if it is anything else."""
        try:
            parts = {name: PartCost(**values[name]) for name in ("first", "last")}
            blocks = tuple(PartCost(**block) for block in values["blocks"])
            return cls(**{**values, **parts, "blocks": blocks, "call_s": tuple(values["call_s"])})
        except (KeyError, TypeError) as error:
            raise ConfigError("profile", str(error), "the profile that pipecomp plan --measure --json wrote") from error

    def estimated(self, flops_per_s: float) -> Profile:
        """Give it seconds from a speed."""
        require(flops_per_s > 0, "speed", flops_per_s, "a number above 0")

        def timed(cost: PartCost) -> PartCost:
            forward_s = cost.flops / flops_per_s
            return replace(cost, forward_s=forward_s, backward_s=BACKWARD * forward_s)

        return replace(
            self,
            blocks=tuple(map(timed, self.blocks)),
            first=timed(self.first),
            last=timed(self.last),
            measured=f"estimated for {flops_per_s / 1e12:g} TFLOP/s",
        )

    def recomputing(self, dtype: torch.dtype) -> Profile:
        """Let blocks keep their inputs alone, and do their forward once more in the backward; head and loss do not.

        The profile must have seconds. dtype: of activations.
        """
        inputs = float(self.tokens * self.hidden * dtype.itemsize)
        blocks = tuple(replace(block, kept_bytes=inputs, backward_s=seconds(block)) for block in self.blocks)
        return replace(self, blocks=blocks, again_bytes=max(block.kept_bytes for block in self.blocks))

    def block_seconds(self) -> list[float]:
        """Tell forward and backward of each block, to balance stages by."""
        return [seconds(block) for block in self.blocks]

    def end_seconds(self) -> tuple[float, float]:
        """Tell forward and backward of the embeddings, and of the head with its loss."""
        return seconds(self.first), seconds(self.last)

    def stage_seconds(self, plan: SplitPlan, samples: int) -> list[tuple[float, float]]:
        """Tell forward and backward of each stage on a micro-batch of so many samples."""
        found = []
        for k, (lo, hi) in enumerate(pairwise(plan.cuts)):
            parts = [*self.blocks[lo:hi], *_ends(self, k, plan.num_stages)]
            forward, backward = (sum(getattr(p, name) for p in parts) for name in ("forward_s", "backward_s"))
            found.append((self.call_s[0] + samples * forward, self.call_s[1] + samples * backward))
        return found

    def kept_bytes(self, plan: SplitPlan, samples: int) -> list[float]:
        """Count the bytes that each stage keeps of one micro-batch in flight; `again_bytes` are not among them."""
        return [
            samples * sum(p.kept_bytes for p in [*self.blocks[lo:hi], *_ends(self, k, plan.num_stages)])
            for k, (lo, hi) in enumerate(pairwise(plan.cuts))
        ]


def _ends(profile: Profile, stage: int, stages: int) -> list[PartCost]:
    return [part for at, part in ((0, profile.first), (stages - 1, profile.last)) if at == stage]


def seconds(cost: PartCost) -> float:
    """Add forward and backward."""
    if cost.forward_s is None or cost.backward_s is None:
        raise ConfigError("profile", None, "seconds for every part: measure, or give a speed")
    return cost.forward_s + cost.backward_s


def without_weights(model: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Make the model, config, folder or hub name a Hugging Face model on the meta device."""
    found = resolve(model)
    return skeleton(Source(config=found.config, model_class=found.model_class), dtype)


def cut_apart(model: Any) -> tuple[SplitPlan, list[int]]:
    """Plan a stage for every block, and name the stages that stand for all: first, middle, last."""
    blocks = plan_model(model, 1).blocks
    middle = 1 if blocks > 2 else 0
    return plan_model(model, cuts=list(range(blocks))), sorted({0, middle, blocks - 1})


def assemble(found: Mapping[int, PartCost], plan: SplitPlan, *, hidden: int, tokens: int, **more: Any) -> Profile:
    """Make a profile from the costs of the stages that `cut_apart` names."""
    blocks = plan.blocks
    block = found[1 if blocks > 2 else 0]
    return Profile(
        hidden=hidden,
        tokens=tokens,
        blocks=(block,) * blocks,
        first=found[0] - block,
        last=found[blocks - 1] - block,
        **more,
    )


def most_tokens(config: Any) -> int | None:
    """Tell the most tokens that a sample of this Hugging Face config's model may have; None for any number."""
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and getattr(config, "model_type", None) in _AFTER_PADDING:
        positions -= (config.pad_token_id or 0) + 1
    return positions


def check_tokens(model: Any, tokens: int) -> None:
    """Raise ConfigError for samples that are too long for the model, which is given as for `pipecomp.stages.plan`."""
    longest = most_tokens(resolve(model).config)
    require(
        tokens >= 1 and (longest is None or tokens <= longest),
        "tokens",
        tokens,
        f"1 to {longest or 'any number'}, the model's positions",
    )


def count(model: Any, tokens: int, dtype: torch.dtype = torch.float32) -> Profile:
    """Count a model's operations and memory for samples of `tokens` tokens; no seconds.

    model: as for `pipecomp.stages.plan`; only its config is looked at. Raises SplitError for unknown architectures,
    ConfigError for more tokens than the model takes.
    """
    check_tokens(model, tokens)
    # The model's code looks into tensors that are on the meta device, but not into ones that it sees are fake.
    with FakeTensorMode(allow_non_fake_inputs=True):
        whole = without_weights(model, dtype)
        plan, chosen = cut_apart(whole)
        found = {k: _count_stage(take_stage(whole, plan, k), tokens, dtype) for k in chosen}
    return assemble(found, plan, hidden=int(whole.config.hidden_size), tokens=tokens)


def _count_stage(stage: Stage, tokens: int, dtype: torch.dtype) -> PartCost:
    kept = SavedTensorBytes(stage.parameters())
    with FlopCounterMode(display=False) as operations, kept.counting():
        logits = stage(example(stage, 1, tokens, dtype, "meta"))
        if stage.is_last and architecture_of(stage.config).heads[stage.plan.model_class].per_token:
            default_loss(stage.config)(logits.float(), torch.zeros((1, tokens), dtype=torch.int64, device="meta"))
    return PartCost(flops=float(operations.get_total_flops()), kept_bytes=float(kept.bytes))


def example(stage: Stage, samples: int, tokens: int, dtype: torch.dtype, device: Any) -> dict[str, Any]:
    """Make inputs of a stage, without padding."""
    if stage.is_first:
        ids = torch.zeros((samples, tokens), dtype=torch.int64, device=device)
        return {"input_ids": ids, "attention_mask": None}
    x_BSH = torch.zeros((samples, tokens, stage.hidden_size), dtype=dtype, device=device, requires_grad=True)
    return {"hidden_states": x_BSH, "attention_mask": None}


def balanced(
    model: Any,
    profile: Profile | None,
    stages: int | Sequence[int],
    *,
    tie: bool = True,
    slowdowns: Sequence[float] = (),
) -> SplitPlan:
    """Plan where to cut a model (on the meta device) into so many stages, or at given blocks; by seconds if it has any.

    slowdowns: how many times those seconds each stage's machine takes.
    """
    by: dict[str, Any] = {}
    if profile is not None and profile.blocks[0].forward_s is not None:
        by = {"block_seconds": profile.block_seconds(), "end_seconds": profile.end_seconds()}
    if isinstance(stages, int):
        return plan_model(model, stages, **by, tie=tie, slowdowns=slowdowns)
    return plan_model(model, cuts=list(stages), **by, tie=tie)


def tied_values(model: Any, plan: SplitPlan) -> tuple[int, ...]:
    """Count the values of each weight that several stages hold, in the order of `plan.tied`."""
    sizes = {name: p.numel() for name, p in model.named_parameters(remove_duplicate=False)}
    return tuple(sizes[group.name] for group in plan.tied)
