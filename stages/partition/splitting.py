"""A stage is the Hugging Face model with the other stages' blocks taken out, called through its own forward.

So masks, rotary embeddings and relative positions come from the model's own code, and every parameter keeps Hugging
Face's name. B micro-batch, S tokens, H hidden size, V vocabulary, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipecomp.errors import DataError, SplitError
from pipecomp.stages.link.boundary import Crossing, Layout
from pipecomp.stages.partition import losses
from pipecomp.stages.partition.adapters import adapter_of, without_peft
from pipecomp.stages.partition.architectures import architecture_of, head_name
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
        self._most_tokens = _learned_positions(model) if self.is_first else None
        self._token_types = _token_types(model) if self.is_first else None
        if not any(p.is_meta for p in self.parameters()):
            self.check_what_it_receives()

    def check_what_it_receives(self) -> None:
        """Raise SplitError for a model that changes hidden states outside its blocks; its weights must be there."""
        if not self.is_first and changed_on_the_way(self._model, self._architecture):
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
        self._check_tokens(ids, inputs)
        layout = Layout.of_mask(ids, inputs.get("attention_mask"), inputs["input_ids"].shape[1])
        reads_one = self._head.reads_first_token or self._head.pools_last_token
        if reads_one and self.num_stages > 1 and not all(layout.counts):
            raise DataError(
                f"sample {ids[layout.counts.index(0)]} has no tokens, its attention_mask is 0 everywhere: "
                f"{self.plan.model_class} would compute its classes from padding, which links do not carry"
            )
        if self._head.reads_first_token and self.num_stages > 1 and any(layout.starts):
            sample = ids[next(i for i, start in enumerate(layout.starts) if start)]
            raise DataError(
                f"sample {sample} is padded on the left, but {self.plan.model_class} reads a batch's first place: pad "
                "on the right (padding_side='right')"
            )
        if self._pools_elsewhere:
            self._check_last_tokens(inputs, ids)
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

        An unsplit model's loss has terms for padding where input_ids are copied to labels as they are; the last of
        several stages has no hidden states to predict it from. labels: those of `trained_labels`, [B, S] or [B, ...].
        """
        following = int(self._head.loss is losses.causal_lm)  # places from a label to the token that predicts it
        by_token = following or self._head.loss is losses.masked_lm
        if by_token:
            self._check_classes(layout.ids, labels[..., following:], "vocab_size", first=following)
        elif self._head.loss in (losses.classification, losses.deberta_classification):
            self._check_classes(layout.ids, labels, "num_labels")
        mask_BS = layout.mask_BS(labels.device)
        if mask_BS is None or self.num_stages == 1 or not by_token or labels.shape != mask_BS.shape:
            return
        wanted, read = labels[:, following:], mask_BS[:, : labels.shape[1] - following]
        wrong = (wanted != -100) & (read == 0)
        if bool(wrong.any()):
            row, place = wrong.nonzero()[0].tolist()
            raise DataError(
                f"labels: sample {layout.ids[row]} has {int(wanted[row, place])} at place {place + following}, to be "
                "predicted from padding, which links do not carry; allowed: -100 where attention_mask is 0, as "
                "DataCollatorForLanguageModeling makes them"
            )

    def _check_classes(self, ids: Sequence[int], labels: Tensor, number: str, first: int | None = None) -> None:
        """DataError for a class that torch calls a target out of bounds, of nobody knows which sample.

        Tensors of a GPU are not looked at, which would have to wait for it.

        number: what of the config is their number. first: place of the first label of a sample that has several.
        """
        config, classes = self.config, int(getattr(self.config, number))
        if labels.is_floating_point() or labels.device.type != "cpu":
            return
        problem = "" if first is not None else config.problem_type or losses.guess_problem(classes, labels)
        if problem not in ("", "single_label_classification"):
            return
        wrong = labels >= classes
        if self._head.loss is not losses.deberta_classification or config.problem_type:  # it ignores them
            wrong |= (labels < 0) & (labels != -100)
        if bool(wrong.any()):
            row, *place = wrong.nonzero()[0].tolist()
            at = "" if first is None else f" at place {place[0] + first}"
            raise DataError(
                f"labels: sample {ids[row]} has {int(labels[wrong][0])}{at}; this {self.plan.model_class} has "
                f"{classes} classes ({number} of its config): from 0 to {classes - 1}, and -100 for no label"
            )

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
                self._check_last_tokens(given)
        else:
            call = {"inputs_embeds": given["hidden_states"], "attention_mask": mask_BS}

        if not self.is_last:
            hidden_BSH = self._model.base_model(**call, **self._architecture.forward_options).last_hidden_state
            return {"hidden_states": hidden_BSH, "attention_mask": mask_BS}
        if self._head.pools_last_token and not self.is_first:
            hidden_BSH = self._model.base_model(**call, **self._architecture.forward_options).last_hidden_state
            logits_BSC = self._model.score(hidden_BSH)
            rows_B = torch.arange(logits_BSC.shape[0], device=logits_BSC.device)
            return logits_BSC[rows_B, self._last_token(logits_BSC, mask_BS)]
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
        tokens, most = tensor.shape[1], self._most_tokens
        if most is not None and tokens > most:
            name = self.plan.model_class
            raise DataError(f"a sample of {tokens} tokens: {name} has {most} positions, so cut it to {most}")
        for key, value in inputs.items():
            if key != main and value is not None and value.shape != tensor.shape[:2]:
                raise DataError(
                    f"stage {self.index}: {key} has shape {tuple(value.shape)}, {main} needs {tuple(tensor.shape[:2])}"
                )
        return dict(inputs)

    def _last_token(self, like_BS: Tensor, mask_BS: Tensor | None) -> Tensor | int:
        """Index of each sample's last real token [B]; -1, the last token, where nothing tells more."""
        if mask_BS is None or self.config.pad_token_id is None:
            return -1
        places_S = torch.arange(mask_BS.shape[1], device=like_BS.device, dtype=torch.int32)
        return (places_S * (mask_BS != 0).to(like_BS.device, torch.int32)).argmax(-1)

    def _check_tokens(self, ids: Sequence[int], inputs: Mapping[str, Tensor]) -> None:
        """DataError for a token, or its type, that torch calls an index out of range, of nobody knows which sample.

        Tensors of a GPU are not looked at, which would have to wait for it.
        """
        if not self.is_first:
            return
        for key, what, known in (
            ("input_ids", "token", self._model.get_input_embeddings().weight.shape[0]),
            ("token_type_ids", "token type", self._token_types),
        ):
            given_BS = inputs.get(key)
            if given_BS is None or known is None or given_BS.device.type != "cpu":
                continue
            wrong_BS = (given_BS < 0) | (given_BS >= known)
            if bool(wrong_BS.any()):
                row, place = wrong_BS.nonzero()[0].tolist()
                raise DataError(
                    f"sample {ids[row]} has the {what} {int(given_BS[row, place])} at place {place}; this "
                    f"{self.plan.model_class} has embeddings of {known} {what}s: from 0 to {known - 1}"
                )

    @property
    def _pools_elsewhere(self) -> bool:
        """Whether this stage has the input_ids by which the model pools, and another one does it."""
        return self._head.pools_last_token and self.is_first and not self.is_last

    def _check_last_tokens(self, given: Mapping[str, Tensor | None], ids: Sequence[int] | None = None) -> None:
        """Check that the mask, by which the last stage pools, and `pad_token_id`, by which the model does, agree.

        ids: of the samples, where `given` is as it was loaded. Without them tensors of a GPU are not compared, which
        would have to wait for it.
        """
        ids_BS, pad = given["input_ids"], self.config.pad_token_id
        assert ids_BS is not None, "checked before"
        if pad is None:
            if ids_BS.shape[0] != 1:
                raise DataError(f"{self.plan.model_class} needs config.pad_token_id for more than one sample at a time")
            return
        if ids is None and ids_BS.device.type != "cpu":
            return
        places_S = torch.arange(ids_BS.shape[1], device=ids_BS.device, dtype=torch.int32)
        by_pad_B = (places_S * (ids_BS != pad).to(torch.int32)).argmax(-1)
        by_mask = self._last_token(ids_BS, given.get("attention_mask"))
        by_mask_B = by_mask if isinstance(by_mask, Tensor) else torch.full_like(by_pad_B, ids_BS.shape[1] - 1)
        if not torch.equal(by_pad_B, by_mask_B.to(by_pad_B.dtype)):
            row = int((by_pad_B != by_mask_B).nonzero()[0])
            sample = row if ids is None else ids[row]
            raise DataError(
                f"sample {sample}: by attention_mask its last token is {int(by_mask_B[row])}, by pad_token_id {pad} it "
                f"is {int(by_pad_B[row])}; {self.plan.model_class} classifies the last token, so give a mask that is 0 "
                "exactly on padding, and a pad_token_id that no sample ends with"
            )


def _learned_positions(model: Any) -> int | None:
    """Count the positions that a model has learned, beyond which torch finds no embedding; None where it needs none."""
    for name, module in model.base_model.named_modules():
        if name.endswith(("wpe", "position_embeddings")) and isinstance(module, nn.Embedding):
            first = 0 if module.padding_idx is None else module.padding_idx + 1  # as RoBERTa counts
            return module.num_embeddings - first
    return None


def _token_types(model: Any) -> int | None:
    """Count the types of tokens that a model tells apart; None where it has no embeddings of them."""
    for name, module in model.base_model.named_modules():
        if name.endswith("token_type_embeddings") and isinstance(module, nn.Embedding):
            return module.num_embeddings
    return None


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
    return Stage(cut(model, architecture, plan, index), plan, index)
