"""Profile of a model: operations, seconds and memory of its blocks for one sample of S tokens.

Operations are counted on shapes alone, with Hugging Face's own code and no memory for weights, so that a laptop can
profile a 70B model. Every block counts as one from the middle. Attention is counted as if every token attended to all
others. Its matrix counts as kept where no fused kernel computes it: "eager" attention, and dropout on CPUs.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from pipecomp.errors import ConfigError, require
from pipecomp.schedule import SavedTensorBytes
from pipecomp.stages.partition.adapters import attach
from pipecomp.stages.partition.architectures import architecture_of, default_loss
from pipecomp.stages.partition.loading import Source, build_stage, resolve, skeleton
from pipecomp.stages.partition.planning import SplitPlan, plan_model
from pipecomp.stages.partition.quantization import plain_config
from pipecomp.stages.partition.splitting import take_stage
from pipecomp.stages.partition.stage import Stage
from pipecomp.utils.serialization import serializable

_MANY = 8  # samples
_POSITIONS_AFTER_PADDING = {"roberta", "xlm-roberta", "camembert"}  # positions start after the padding token's


@serializable
@dataclass(frozen=True, kw_only=True)
class PartCost:
    """Cost of one part of a model per sample.

    Attributes:
        flops: Operations of the forward; a multiply-add counts as two.
        kept_bytes: Bytes that the forward keeps for the backward.
        forward_s: Seconds of the forward; None if unknown.
        backward_s: Seconds of the backward; None if unknown.
        working_bytes: Bytes that forward and backward need for a moment beyond those kept, such as copies of logits.
        gradient_bytes: The same, however many samples there are: a weight's new gradient before it is added.
    """

    flops: float
    kept_bytes: float
    forward_s: float | None = None
    backward_s: float | None = None
    working_bytes: float = 0.0
    gradient_bytes: float = 0.0

    def __sub__(self, other: PartCost) -> PartCost:
        """Return the difference to another part's cost, at least 0; what is needed for a moment stays."""

        def less(a: float | None, b: float | None) -> float | None:
            return None if a is None or b is None else max(0.0, a - b)

        return PartCost(
            flops=max(0.0, self.flops - other.flops),
            kept_bytes=max(0.0, self.kept_bytes - other.kept_bytes),
            forward_s=less(self.forward_s, other.forward_s),
            backward_s=less(self.backward_s, other.backward_s),
            working_bytes=self.working_bytes,
            gradient_bytes=self.gradient_bytes,
        )


@serializable
@dataclass(frozen=True, kw_only=True)
class Profile:
    """Costs of a model's blocks, its embeddings, and its head with the loss.

    Attributes:
        hidden: Hidden size H.
        tokens: Tokens per sample S.
        blocks: Cost of each block.
        first: Cost of the embeddings.
        last: Cost of head and loss.
        call_s: Seconds of a stage's forward, and of its backward, that do not depend on the number of samples.
        measured: Source of the seconds, for tables.
        backward_operations: Operations of the backward per operation of the forward: 1 for gradients of inputs, 1 for
            those of weights, of which frozen ones have none.
        again_bytes: With activation checkpointing, bytes that a block keeps per sample while its backward runs. A
            stage has them once, however many micro-batches are in flight.
        spread: Lowest and highest of several measurements, as factors of the seconds.
    """

    hidden: int
    tokens: int
    blocks: tuple[PartCost, ...]
    first: PartCost
    last: PartCost
    call_s: tuple[float, float] = (0.0, 0.0)
    measured: str = ""
    backward_operations: float = 2.0
    again_bytes: float = 0.0
    spread: tuple[float, float] = (1.0, 1.0)

    def as_dict(self) -> dict[str, Any]:
        """Return the profile as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> Profile:
        """Decode the values of `as_dict`. ConfigError if they are anything else."""
        try:
            parts = {name: PartCost(**values[name]) for name in ("first", "last")}
            blocks = tuple(PartCost(**block) for block in values["blocks"])
            pairs = {"call_s": tuple(values["call_s"]), "spread": tuple(values.get("spread", (1.0, 1.0)))}
            return cls(**{**values, **parts, **pairs, "blocks": blocks})
        except (KeyError, TypeError) as error:
            raise ConfigError("profile", str(error), "a profile from pipecomp plan --measure --json") from error

    def estimated(self, flops_per_s: float) -> Profile:
        """Return the profile with seconds at a speed in operations per second."""
        require(flops_per_s > 0, "speed", flops_per_s, "a number above 0")

        def timed(cost: PartCost) -> PartCost:
            forward_s = cost.flops / flops_per_s
            return replace(cost, forward_s=forward_s, backward_s=self.backward_operations * forward_s)

        return replace(
            self,
            blocks=tuple(map(timed, self.blocks)),
            first=timed(self.first),
            last=timed(self.last),
            measured=f"estimated for {flops_per_s / 1e12:g} TFLOP/s",
        )

    def scaled(self, factor: float) -> Profile:
        """Return the profile with its seconds multiplied by a factor, and without spread."""

        def slower(cost: PartCost) -> PartCost:
            forward_s, backward_s = (None if s is None else factor * s for s in (cost.forward_s, cost.backward_s))
            return replace(cost, forward_s=forward_s, backward_s=backward_s)

        return replace(
            self,
            blocks=tuple(map(slower, self.blocks)),
            first=slower(self.first),
            last=slower(self.last),
            call_s=(factor * self.call_s[0], factor * self.call_s[1]),
            spread=(1.0, 1.0),
        )

    def recomputing(self, dtype: torch.dtype) -> Profile:
        """Return the profile with activation checkpointing: blocks keep their inputs and repeat their forward.

        Head and loss are not recomputed. The profile must have seconds. dtype: of activations.
        """
        inputs = float(self.tokens * self.hidden * dtype.itemsize)
        blocks = tuple(replace(block, kept_bytes=inputs, backward_s=seconds(block)) for block in self.blocks)
        return replace(self, blocks=blocks, again_bytes=max(block.kept_bytes for block in self.blocks))

    def block_seconds(self) -> list[float]:
        """Return forward plus backward seconds of each block."""
        return [seconds(block) for block in self.blocks]

    def stage_seconds(self, plan: SplitPlan, samples: int) -> list[tuple[float, float]]:
        """Return forward and backward seconds of each stage on a micro-batch of `samples`.

        Parts below the lowest trained parameter have no backward.
        """
        seconds = []
        for k in range(plan.num_stages):
            forward_s = sum(getattr(part, "forward_s") for part in self._parts(plan, k))  # noqa: B009 (None raises)
            backward_s = sum(getattr(part, "backward_s") for part in self._kept_parts(plan, k))  # noqa: B009
            call_s = self.call_s[1] if k >= plan.lowest_trained else 0.0
            seconds.append((self.call_s[0] + samples * forward_s, call_s + samples * backward_s))
        return seconds

    def kept_bytes(self, plan: SplitPlan, samples: int) -> list[float]:
        """Return the bytes that each stage keeps per micro-batch in flight, without `again_bytes`."""
        return [samples * sum(p.kept_bytes for p in self._kept_parts(plan, k)) for k in range(plan.num_stages)]

    def working_bytes(self, plan: SplitPlan, samples: int) -> list[float]:
        """Return the bytes that each stage needs for a moment, beyond what it keeps, for a micro-batch."""
        stages = range(plan.num_stages)
        return [max(p.gradient_bytes + samples * p.working_bytes for p in self._parts(plan, k)) for k in stages]

    def _parts(self, plan: SplitPlan, stage: int, first: int = 0) -> list[PartCost]:
        """Return the parts of a stage from block `first` on; with 0 the embeddings too."""
        lo, hi = plan.cuts[stage : stage + 2]
        parts = [*self.blocks[max(lo, first) : hi]]
        parts += [self.first] if stage == 0 and not first else []
        return parts + ([self.last] if stage == plan.num_stages - 1 else [])

    def _kept_parts(self, plan: SplitPlan, stage: int) -> list[PartCost]:
        """Return the parts of a stage that have a backward."""
        return self._parts(plan, stage, plan.first_trained_block)


def seconds(cost: PartCost) -> float:
    """Return forward plus backward seconds. ConfigError if they are unknown."""
    if cost.forward_s is None or cost.backward_s is None:
        raise ConfigError("profile", None, "seconds for every part: use --measure or --speed")
    return cost.forward_s + cost.backward_s


def without_weights(model: Any, dtype: torch.dtype = torch.float32, *, quantized: bool = False) -> Any:
    """Build a model on the meta device from a Hugging Face model, config, folder or hub name, or a Source.

    quantized: False for plain weights in place of quantized ones, which cannot be run without values.
    """
    source = resolve(model)
    config, quantizer = source.config, source.quantizer if quantized else None
    if not quantized:
        config = plain_config(config)
    described = Source(config=config, model_class=source.model_class, adapter=source.adapter, quantizer=quantizer)
    return skeleton(described, dtype)


def representative_stages(model: Any) -> tuple[SplitPlan, list[int]]:
    """Return a plan with a stage per block, and the stages that stand for all: first, middle, last."""
    blocks = plan_model(model, 1).blocks
    middle = 1 if blocks > 2 else 0
    return plan_model(model, cuts=list(range(blocks))), sorted({0, middle, blocks - 1})


def profile_from_stages(
    costs: Mapping[int, PartCost], plan: SplitPlan, *, hidden: int, tokens: int, **more: Any
) -> Profile:
    """Make a profile from the costs of the stages from `representative_stages`."""
    blocks = plan.blocks
    block = costs[1 if blocks > 2 else 0]
    return Profile(
        hidden=hidden,
        tokens=tokens,
        blocks=(block,) * blocks,
        first=costs[0] - block,
        last=costs[blocks - 1] - block,
        **more,
    )


def max_tokens(config: Any) -> int | None:
    """Return the maximum of tokens per sample for a Hugging Face config; None for no limit."""
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and getattr(config, "model_type", None) in _POSITIONS_AFTER_PADDING:
        positions -= (config.pad_token_id or 0) + 1
    return positions


def check_tokens(model: Any, tokens: int) -> None:
    """Raise ConfigError for more tokens per sample than the model (as for `pipecomp.stages.plan`) has positions."""
    longest = max_tokens(resolve(model).config)
    require(
        tokens >= 1 and (longest is None or tokens <= longest),
        "tokens",
        tokens,
        f"1 to {longest or 'any number'}, the model's positions",
    )


def count(model: Any, tokens: int, dtype: torch.dtype = torch.float32) -> Profile:
    """Count a model's operations and memory; the profile has no seconds.

    Args:
        model: As for `pipecomp.stages.plan`; only its config is read.
        tokens: Tokens per sample.
        dtype: Training precision.

    Raises:
        SplitError: Unknown architecture.
        ConfigError: More tokens than the model has positions.
    """
    check_tokens(model, tokens)
    plan, costs, hidden = count_stages(model, tokens, dtype)
    lowest = min(plan.first_trained_block, plan.blocks - 1)  # below it there is no backward
    weights = sum(plan.trained[lowest:]) / sum(plan.parameters[lowest:])
    return profile_from_stages(costs, plan, hidden=hidden, tokens=tokens, backward_operations=1.0 + weights)


def count_stages(model: Any, tokens: int, dtype: torch.dtype) -> tuple[SplitPlan, dict[int, PartCost], int]:
    """Count the stages of `representative_stages`; return their plan, their costs and the hidden size."""
    try:
        return _count_without_memory(model, tokens, dtype)
    except (DataDependentOutputException, DynamicOutputShapeException):  # its code reads values of tensors
        plan, chosen = representative_stages(without_weights(model, dtype))
        stages = {k: build_random_stage(model, plan, k, dtype) for k in chosen}
        for stage in stages.values():
            if getattr(stage.config, "_experts_implementation", None) == "grouped_mm":  # torch does not count it
                stage._model.set_experts_implementation("batched_mm")
        costs = {k: _count_stage(stage, tokens, dtype, "cpu") for k, stage in stages.items()}
        return plan, costs, stages[chosen[0]].hidden_size


def build_random_stage(model: Any, plan: SplitPlan, index: int, dtype: torch.dtype) -> Stage:
    """Build a stage of a model with random weights, and with the model's adapters. model: As for `plan`."""
    source = resolve(model)
    config_only = Source(config=plain_config(source.config), model_class=source.model_class)
    stage = build_stage(config_only, plan, index, dtype=dtype)
    assert isinstance(stage, Stage), "a language model's"
    if source.adapter is not None:
        attach(stage._model, source.adapter)
    return stage


def _count_without_memory(model: Any, tokens: int, dtype: torch.dtype) -> tuple[SplitPlan, dict[int, PartCost], int]:
    # Note: fake tensors, since model code reads values of tensors on the meta device, but not of fake ones.
    with FakeTensorMode(allow_non_fake_inputs=True):
        model_skeleton = without_weights(model, dtype)
        plan, chosen = representative_stages(model_skeleton)
        counted = dtype
        joined = getattr(model_skeleton.config, "_experts_implementation", None) == "grouped_mm"
        if joined:  # torch has its shapes for BF16 alone, and no count of its operations
            counted = torch.bfloat16
            model_skeleton = without_weights(model, counted)
        stages = {k: take_stage(model_skeleton, plan, k) for k in chosen}
        costs = {k: _count_stage(stage, tokens, counted) for k, stage in stages.items()}
        if joined:
            model_skeleton.set_experts_implementation("batched_mm")  # as many operations, but copies of weights
            for k, stage in stages.items():
                cost, factor = costs[k], dtype.itemsize / counted.itemsize
                costs[k] = PartCost(
                    flops=_count_stage(stage, tokens, counted).flops,
                    kept_bytes=factor * cost.kept_bytes,
                    working_bytes=factor * cost.working_bytes,
                    gradient_bytes=factor * cost.gradient_bytes,
                )
    return plan, costs, stages[chosen[0]].hidden_size


def _count_stage(stage: Stage, tokens: int, dtype: torch.dtype, device: str = "meta") -> PartCost:
    # Note: the operations of the CPU's fused attention are not counted.
    with FlopCounterMode(display=False) as operations, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        forward_with_loss(stage, example(stage, 1, tokens, dtype, device))
    with _fused_attention() if device == "meta" else contextlib.nullcontext():
        return replace(_count_memory(stage, tokens, dtype, device), flops=float(operations.get_total_flops()))


def forward_with_loss(stage: Stage, inputs: dict[str, Any]) -> Tensor:
    """Return a stage's output, or the model's loss of labels 0 where there are logits for every token."""
    out = stage(inputs)
    out = out["hidden_states"] if isinstance(out, dict) else out
    if stage.is_last and architecture_of(stage.config).heads[stage.plan.model_class].per_token:
        labels_BS = torch.zeros(out.shape[:2], dtype=torch.int64, device=out.device)
        return default_loss(stage.config)(out, labels_BS)
    return out


def _count_memory(stage: Stage, tokens: int, dtype: torch.dtype, device: str) -> PartCost:
    """Count what a stage keeps and needs for a moment; its operations count as 0.

    What further samples need is counted where they are many: with few, a weight's gradient may be what is largest.
    """
    trained = [p for p in stage.parameters() if p.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in trained]
    kept, needed = {}, {}
    for samples in (1, _MANY, 2 * _MANY):
        saved, live = SavedTensorBytes(stage.parameters()), _LiveBytes()
        with live:
            with saved.counting():
                result = forward_with_loss(stage, example(stage, samples, tokens, dtype, device))
            if result.requires_grad:
                result.backward(torch.ones_like(result))
            del result
        kept[samples], needed[samples] = saved.bytes, max(0, live.peak - saved.bytes)
    for hook in hooks:
        hook.remove()
    each = max(0.0, (needed[2 * _MANY] - needed[_MANY]) / _MANY)
    once = max(0.0, needed[1] - each)
    return PartCost(flops=0.0, kept_bytes=float(kept[1]), working_bytes=each, gradient_bytes=once)


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations make, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._bytes = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            storage = x.untyped_storage() if isinstance(x, Tensor) else None
            if storage is None or storage._cdata in given or storage in self._seen:
                continue
            self._seen.add(storage)
            self._bytes += storage.nbytes()
            weakref.finalize(storage, self._forget, storage.nbytes())
        self.peak = max(self.peak, self._bytes)
        return out

    def _forget(self, size: int) -> None:
        self._bytes -= size


@contextlib.contextmanager
def _fused_attention() -> Iterator[None]:
    """Let attention on the meta device keep what a fused kernel keeps; torch's own choice there is to keep all."""
    plain = torch.nn.functional.scaled_dot_product_attention

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p and not torch.cuda.is_available():
            return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if enable_gqa:
            key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
        bias = attn_mask.to(query.dtype) if attn_mask is not None and attn_mask.dtype == torch.bool else attn_mask
        fused = torch.ops.aten._scaled_dot_product_efficient_attention
        out: Tensor = fused(query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale)[0]
        return out

    torch.nn.functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = plain


def example(
    stage: Stage, samples: int, tokens: int, dtype: torch.dtype, device: Any, *, needs_gradient: bool = True
) -> dict[str, Any]:
    """Make inputs for a stage, without padding. needs_gradient: of the hidden states."""
    if stage.is_first:
        ids = torch.zeros((samples, tokens), dtype=torch.int64, device=device)
        return {"input_ids": ids, "attention_mask": None}
    shape = (samples, tokens, stage.hidden_size)
    x_BSH = torch.zeros(shape, dtype=dtype, device=device, requires_grad=needs_gradient)
    return {"hidden_states": x_BSH, "attention_mask": None}


def balanced(
    model: Any,
    profile: Profile | None,
    stages: int | Sequence[int],
    *,
    tie: bool = True,
    slowdowns: Sequence[float] = (),
) -> SplitPlan:
    """Plan the cuts of a model on the meta device, balanced by the profile's seconds if it has any.

    Args:
        model: From `without_weights`.
        profile: None to balance by parameters.
        stages: Number of stages, or the cuts themselves.
        tie: True to keep tied weights tied.
        slowdowns: Each stage's seconds as a multiple of the profile's.
    """
    by: dict[str, Any] = {}
    if profile is not None and profile.blocks[0].forward_s is not None:
        by["block_seconds"] = profile.block_seconds()
        by["end_seconds"] = seconds(profile.first), seconds(profile.last)
    if isinstance(stages, int):
        made = plan_model(model, stages, **by, tie=tie, slowdowns=slowdowns)
    else:
        made = plan_model(model, cuts=list(stages), **by, tie=tie)
    return replace(made, tied=made.trained_ties)  # frozen copies exchange nothing


def tied_values(model: Any, plan: SplitPlan) -> tuple[int, ...]:
    """Return the number of values of each tied weight, in the order of `plan.tied`."""
    sizes = {name: p.numel() for name, p in model.named_parameters(remove_duplicate=False)}
    return tuple(sizes[group.name] for group in plan.tied)
