"""A stage is the Hugging Face model with the other stages' blocks taken out, called through its own forward.

So masks, rotary embeddings and relative positions come from the model's own code, and every parameter keeps Hugging
Face's name. B micro-batch, S tokens, H hidden size, V vocabulary, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipecomp.errors import DataError, SplitError
from pipecomp.stages.link.boundary import Crossing, Layout
from pipecomp.stages.partition import losses
from pipecomp.stages.partition.adapters import adapter_of, check_saved, without_peft
from pipecomp.stages.partition.architectures import architecture_of, head_name
from pipecomp.stages.partition.batch_checks import BatchChecks, last_places
from pipecomp.stages.partition.cutting import changed_on_the_way, cut
from pipecomp.stages.partition.planning import SplitPlan, block_count, plan_model
from pipecomp.stages.partition.stage import PipelineStage


class Stage(PipelineStage):
    """One stage of a split model; make it with `split` or `build_stage`.

    Its parameters, buffers and state_dict have Hugging Face's names, without a prefix.

    Attributes, beside those of every stage:
        hidden_size: H.
        config: the unsplit model's config, a copy of its own.
        adapter: its LoRA adapter, None without.
        newly_initialized: parameters that its checkpoint lacked (a new classification head).
    """

    _model: Any
    config: Any

    def __init__(self, model: Any, plan: SplitPlan, index: int) -> None:
        """model: already cut to this stage (see `cut`). The stage takes over its children."""
        super().__init__(plan, index)
        # The same dictionaries, so that both see a parameter that .to() or an optimizer wrapper replaces; not a
        # child, because a child's name would become a prefix of every parameter's.
        for shared in ("_modules", "_parameters", "_buffers"):
            object.__setattr__(self, shared, getattr(model, shared))
        object.__setattr__(self, "_model", model)
        self.training = model.training
        self.config = model.config
        self.hidden_size = int(model.config.hidden_size)
        self.generation_config = getattr(model, "generation_config", None)
        self.adapter = adapter_of(model)
        self.newly_initialized: tuple[str, ...] = ()
        self._architecture = architecture_of(model.config)
        self._head = self._architecture.heads[plan.model_class]
        several = self.num_stages > 1
        self._checks = BatchChecks(model, plan.model_class, self._head, cut=several, is_first=self.is_first)
        if not any(p.is_meta for p in self.parameters()):
            self.check_what_it_receives()

    def check_what_it_receives(self) -> None:
        """Raise SplitError for a model that changes hidden states outside its blocks; its weights must be there."""
        if self.is_first:
            return
        try:
            changed = changed_on_the_way(self._model, self._architecture)
        except Exception as error:  # of the model's own code, which an entry that does not fit leads astray
            raise SplitError(
                f"{self._architecture.model_type}: past the first stage {self.plan.model_class} fails with "
                f"{type(error).__name__}: {error}. What its entry puts in the places of `before` must take what the "
                "modules there are called with, and `block_returns_tuple` say what its blocks return"
            ) from error
        if changed:
            raise SplitError(
                f"{self._architecture.model_type}: past the first stage {self.plan.model_class} changes what it "
                "receives before its first block or after its last one, as a dropout or a factor of the embeddings "
                "does, so that every stage would do it anew. `before` and `after` of its entry must name the module "
                "that does; code without a module of its own cannot be cut"
            )

    def train(self, mode: bool = True) -> Stage:
        """Switch dropout and the like on or off; see nn.Module."""
        self.training = mode
        self._model.train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Stage:
        """Move or cast (`.to`, `.bfloat16`), but leave buffers that no checkpoint holds in their dtype.

        Rotary frequencies rounded to bfloat16 would be wrong by up to 0.4 %, at every position.
        """
        fixed = [
            (module, name, buffer)
            for module in self.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name in module._non_persistent_buffers_set
        ]
        super()._apply(fn, recurse)
        for module, name, buffer in fixed:
            moved = module._buffers[name]
            if moved is not None and moved.dtype != buffer.dtype:
                module._buffers[name] = buffer.to(moved.device)
        return self

    def layout(self, ids: tuple[int, ...], inputs: Mapping[str, Tensor]) -> Layout:
        """On the first stage: which tokens of a micro-batch are real, by its attention mask.

        Raises DataError for padding where the head reads, since links carry none, where the mask and `pad_token_id` do
        not agree on what it reads, and for a token, or a type of token, without an embedding.
        """
        self._checks.tokens(ids, inputs)
        layout = Layout.of_mask(ids, inputs.get("attention_mask"), inputs["input_ids"].shape[1])
        self._checks.padding(layout)
        if self._pools_elsewhere:
            self._checks.last_tokens(inputs, ids)
        return layout

    def trained_labels(self, layout: Layout, labels: Tensor) -> Tensor:
        """Leave out what a causal model would have to predict from padding: the first real token of a sample.

        Links carry no padding, so the last stage knows nothing of it. labels: [B, S].
        """
        behind = [(i, start) for i, start in enumerate(layout.starts) if start]
        if self.num_stages == 1 or self._head.loss is not losses.causal_lm or not behind:
            return labels
        labels = labels.clone()
        for i, start in behind:
            labels[i, start] = -100
        return labels

    def check_labels(self, layout: Layout, labels: Tensor) -> None:
        """Raise DataError, with the sample, for a class that there is none of, or that would be predicted from padding.

        labels: those of `trained_labels`, [B, S] or [B, ...].
        """
        self._checks.labels(layout, labels)

    def next_layout(self, layout: Layout) -> Layout:
        """Give the layout of what this stage sends, from that of what it received: the same tokens."""
        return layout

    def crossing(self, link: int) -> Crossing:
        """Describe what crosses a link, counted from the first stage."""
        return Crossing(width=self.hidden_size, settings={"cut": self.plan.cuts[link + 1]})

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Recompute each block's activations in the backward pass instead of keeping them.

        gradient_checkpointing_kwargs: for `torch.utils.checkpoint.checkpoint`; default `{"use_reentrant": False}`.
        """
        options = gradient_checkpointing_kwargs or {"use_reentrant": False}
        if hasattr(self._model, "activation_checkpointing_enable"):  # the older name warns since transformers 5.2x
            self._model.activation_checkpointing_enable(options)
        else:
            self._model.gradient_checkpointing_enable(options)

    def kept_to_recompute(self, samples: int, tokens: int) -> int:
        """Values that checkpointed blocks keep for the backward: their inputs [B, S, H]."""
        blocks = self._model.base_model.get_submodule(self._architecture.blocks)
        checkpointed = sum(bool(getattr(block, "gradient_checkpointing", False)) for block in blocks)
        return checkpointed * samples * tokens * self.hidden_size

    def forward(self, inputs: Mapping[str, Tensor | None]) -> dict[str, Tensor | None] | Tensor:
        """Run this stage's part of the model.

        Args:
            inputs: on the first stage `input_ids` int64 [B, S], perhaps `attention_mask` [B, S] (1 for real tokens, 0
                for padding) and inputs that only the embeddings use (`token_type_ids`); on later stages exactly what
                the stage before returned.

        Returns:
            `{"hidden_states": [B, S, H], "attention_mask": the mask or None}`, on the last stage the logits, [B, S, V]
            or [B, C].

        Raises:
            DataError: other inputs.
        """
        given = self._checked(inputs)
        mask_BS = given.get("attention_mask")
        if self.is_first:
            call: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
            if self._pools_elsewhere:
                self._checks.last_tokens(given)
        else:
            call = {"inputs_embeds": given["hidden_states"], "attention_mask": mask_BS}

        if not self.is_last:
            hidden_BSH = self._model.base_model(**call, **self._architecture.forward_options).last_hidden_state
            return {"hidden_states": hidden_BSH, "attention_mask": mask_BS}
        if self._head.pools_last_token and not self.is_first:
            hidden_BSH = self._model.base_model(**call, **self._architecture.forward_options).last_hidden_state
            logits_BSC = self._model.score(hidden_BSH)
            if mask_BS is None or self.config.pad_token_id is None:
                return logits_BSC[:, -1]
            rows_B = torch.arange(logits_BSC.shape[0], device=logits_BSC.device)
            return logits_BSC[rows_B, last_places(mask_BS.to(logits_BSC.device))]
        return self._model(**call, **self._architecture.forward_options).logits

    def _checked(self, inputs: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        main = "input_ids" if self.is_first else "hidden_states"
        allowed = (main, "attention_mask", *(self._architecture.extra_inputs if self.is_first else ()))
        if not isinstance(inputs, Mapping):
            raise DataError(f"stage {self.index}: got {type(inputs).__name__}, needs a dict with {main}")
        for key in inputs:
            if key not in allowed:
                raise DataError(f"stage {self.index}: input {key!r} is not supported, allowed: {', '.join(allowed)}")
        tensor, dims = inputs.get(main), 2 if self.is_first else 3
        if tensor is None or tensor.dim() != dims:
            got = "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise DataError(f"stage {self.index}: {main} needs {dims} dimensions, got {got}")
        self._checks.length(tensor.shape[1])
        for key, value in inputs.items():
            if key != main and value is not None and value.shape != tensor.shape[:2]:
                raise DataError(
                    f"stage {self.index}: {key} has shape {tuple(value.shape)}, {main} needs {tuple(tensor.shape[:2])}"
                )
        return dict(inputs)

    @property
    def _pools_elsewhere(self) -> bool:
        """Whether this stage has the input_ids by which the model pools, and another one does it."""
        return self._head.pools_last_token and self.is_first and not self.is_last


def split(
    model: Any,
    num_stages: int | None = None,
    cuts: Sequence[int] | None = None,
    *,
    block_seconds: Sequence[float] | None = None,
    tie: bool = True,
) -> list[Stage]:
    """Split a Hugging Face model into stages, each of which is called with what the one before it returned.

    The stages hold the model's own parameters and modules, so training or moving them trains or moves the model's;
    only the copies of tied weights are new. The model keeps its structure and still works unsplit.

    Args:
        model: of a known architecture; it may have a LoRA adapter, or be a PeftModel.
        num_stages: K, cut where the stages are balanced (see `plan`).
        cuts: instead, the first block of each stage, with or without the number of blocks at the end: [0, 2, 4].
        block_seconds: measured seconds of each block, for the balance.
        tie: False gives up the tie of input and output embeddings.

    Returns:
        K stages, the first one called with a batch's `input_ids` and `attention_mask`, the last one returning logits.

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
    """Stage `index` of a plan, made of the model's own modules; other stages' weights are neither held nor copied."""
    architecture = architecture_of(model.config)
    found = (head_name(architecture, type(model)), block_count(model, architecture))
    if found != (plan.model_class, plan.blocks):
        raise SplitError(
            f"the plan is for {plan.model_class} with {plan.blocks} blocks, the model is {found[0]} with {found[1]}"
        )
    if not 0 <= index < plan.num_stages:
        raise SplitError(f"index: got {index}, allowed: 0 to {plan.num_stages - 1}")
    check_saved(model)
    return Stage(cut(model, architecture, plan, index), plan, index)
