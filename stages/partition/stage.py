"""Stages of a Hugging Face model: the model without the other stages' blocks, called through its own forward.

Masks, rotary embeddings and relative positions come from the model's own code, and every parameter keeps Hugging Face's
name. B micro-batch, S tokens, H hidden size, V vocabulary, C classes.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipecomp.errors import DataError, SplitError
from pipecomp.stages.link.layout import Boundary, Layout
from pipecomp.stages.partition import losses, precision, quantization
from pipecomp.stages.partition.adapters import Adapter, adapter_of, is_method_of_peft
from pipecomp.stages.partition.architectures import is_built_in
from pipecomp.stages.partition.discovery import text_config
from pipecomp.stages.partition.planning import SplitPlan, TiedGroup
from pipecomp.stages.partition.structure import (
    Architecture,
    GeneratorStates,
    SkippedBlock,
    replace_module,
    shallow_copy,
)


class PipelineStage(nn.Module):
    """One stage of a partitioned model: `Stage` of a Hugging Face model, `ModuleStage` of plain modules.

    Attributes:
        plan: the partition.
        index, num_stages: its position, and the number of stages.
        lo, hi: its blocks are lo to hi - 1.
        adapter: a Hugging Face model's LoRA adapter, or None.
        quantized: whether some of its weights have 4 or 8 bits.
        float32_parameters: those that stay in float32 in half-precision training, see `use_half`.
    """

    plan: SplitPlan
    adapter: Adapter | None = None
    quantized = False
    _half: torch.dtype | None = None
    float32_parameters: tuple[nn.Parameter, ...] = ()

    def __init__(self, plan: SplitPlan, index: int) -> None:
        super().__init__()
        self.plan, self.index, self.num_stages = plan, index, plan.num_stages
        self.lo, self.hi = plan.cuts[index], plan.cuts[index + 1]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its hidden states."""
        return self._half or self._own_dtype()

    def _own_dtype(self) -> torch.dtype:
        return next(self.parameters(), torch.empty(0)).dtype

    def use_half(self, dtype: torch.dtype, names: str | Sequence[str] = "auto") -> None:
        """Prepare for weights that are cast to half precision, all but `float32_parameters`.

        Args:
            dtype: bfloat16 or float16.
            names: parts of the names of parameters and buffers that stay in float32; "auto" for those that the model's
                class names.
        """
        named = precision.named_by_class(getattr(self, "_model", self), dtype, names)
        for name, buffer in self.named_buffers():
            if name in named:
                buffer.data = buffer.data.float()
        self._half, self.float32_parameters = dtype, tuple(precision.float32_parameters(self, named))
        precision.cast_around(self, self.float32_parameters, dtype)

    def mask_labels(self, layout: Layout, labels: Tensor) -> Tensor:
        """Mask the labels that the last stage does not train on, and return the batch's labels."""
        return labels

    def check_labels(self, layout: Layout, labels: Tensor) -> None:
        """Raise DataError for a label that the model's loss does not accept; labels: from `mask_labels`."""

    def check_packing(self) -> None:
        """Raise SplitError unless the stage keeps packed samples apart."""
        raise SplitError(f"packing: {self.plan.model_class} has no documents of tokens: train it without packing")

    @property
    def is_first(self) -> bool:
        """True if its input is the batch."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True if it returns the model's output."""
        return self.index == self.num_stages - 1

    @property
    def tied_groups(self) -> tuple[TiedGroup, ...]:
        """The plan's groups that have a copy on this stage."""
        return tuple(group for group in self.plan.tied if self.index in group.stages)

    def tied_parameters(self) -> dict[str, nn.Parameter]:
        """Return this stage's copy of each tied weight, by the group's name; empty with one stage or `tie=False`.

        Note: [Tied weights]
            A weight that several stages use (GPT-2's `wte` and `lm_head`) exists once on each of them. All copies start
            with equal values. Each stage computes the gradient of its own use only, so the engine sums the gradients
            over the group's stages before the optimizer's step: then all copies take the same step and stay equal, as
            if they were one parameter. The first stage of the group saves it.
        """
        return {
            group.name: self.get_parameter(group.parameters[group.stages.index(self.index)])
            for group in self.tied_groups
        }


class Stage(PipelineStage):
    """One stage of a split model, made by `split` or `build_stage`.

    Its parameters, buffers and state_dict have Hugging Face's names, without a prefix.

    Attributes, in addition to PipelineStage's:
        hidden_size: H, the width of what crosses links.
        config: a copy of the unsplit model's config.
        newly_initialized: parameters that its checkpoint lacked (a new classification head).
        carries_left_padding: False if the model's values would differ after padding on the left.
    """

    _model: Any
    config: Any

    def __init__(self, model: Any, plan: SplitPlan, index: int, architecture: Architecture) -> None:
        """model: cut to this stage; the stage takes over its children."""
        super().__init__(plan, index)
        # The same dictionaries, so that both see a parameter that .to() or an optimizer wrapper replaces. The model is
        # not a child, whose name would prefix every parameter's.
        for shared in ("_modules", "_parameters", "_buffers"):
            object.__setattr__(self, shared, getattr(model, shared))
        object.__setattr__(self, "_model", model)
        self.training = model.training
        self.config = model.config
        self.generation_config = getattr(model, "generation_config", None)
        self.adapter = adapter_of(model)
        self.newly_initialized: tuple[str, ...] = ()
        self._packs = False  # whether `check_packing` has passed
        self._own_mask = False  # whether the model makes no mask of packed samples' positions
        self.quantized = bool(quantization.quantized_modules(self))
        quantization.prepare_training(self)
        self.carries_left_padding = True
        self._architecture = architecture
        self._head = self._architecture.heads[plan.model_class]
        self.hidden_size = int(text_config(model.config).hidden_size) * self._architecture.lanes
        # Numbers of embeddings, None if unlimited or on another stage.
        self._max_token = self._max_type = self._max_length = None
        self._first_position = 0  # of a sample
        if self.is_first:
            self._max_token = model.get_input_embeddings().weight.shape[0]
            self._max_type = _embedding_rows(model, "token_type_embeddings")
            self._max_length = _embedding_rows(model, "wpe", "position_embeddings")
            if self._max_length is not None:
                rows = _embedding_rows(model, "wpe", "position_embeddings", padding=True)
                self._first_position = (rows or 0) - self._max_length
        blocks: Any = model.base_model.get_submodule(self._architecture.blocks)
        # In a tuple, as they are no children of the stage: the place of the first block, and after its own ones.
        self._ends: tuple[SkippedBlock | None, SkippedBlock | None] = (
            blocks[0] if self.lo > 0 else None,
            blocks[self.hi] if self.hi < len(blocks) else None,
        )

    def _own_dtype(self) -> torch.dtype:
        return quantization.compute_dtype(self, torch.float32)

    @property
    def device(self) -> torch.device:
        """Device of its parameters."""
        return next(self.parameters()).device

    @property
    def blocks(self) -> list[nn.Module]:
        """The stage's own blocks."""
        everything: Any = self._model.base_model.get_submodule(self._architecture.blocks)
        return [everything[i] for i in range(self.lo, self.hi)]

    def get_input_embeddings(self) -> nn.Module | None:
        """Return the model's module that embeds tokens; only the first stage uses it."""
        embedding: nn.Module | None = self._model.get_input_embeddings()
        return embedding

    def compact_model(self) -> Any:
        """Return a model of the stage's blocks alone, with new modules in the places of those that other stages have.

        For code that patches the modules of a whole model: its own modules are the stage's.
        """
        top, base = shallow_copy(self._model), self._model.base_model_prefix
        replace_module(top, f"{base}.{self._architecture.blocks}", nn.ModuleList(self.blocks))
        if not self.is_last:
            for path in [name for name in top._modules if name != base]:
                replace_module(top, path, nn.Identity())
            for path in self._architecture.after:
                replace_module(top, f"{base}.{path}", nn.Identity())
        return top

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_model")
            if name.startswith("_") or not (hasattr(type(model), name) or is_method_of_peft(name)):
                raise
            raise AttributeError(f"{name}: {self._is_a_part()}") from None

    def _is_a_part(self) -> str:
        return (
            f"a stage is a part of {type(self._model).__name__}; write the whole model with trainer.save_model or "
            "engine.save_pretrained and load it with from_pretrained"
        )

    def train(self, mode: bool = True) -> Stage:
        self.training = mode
        self._model.train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Stage:
        """Move or cast (`.to`, `.bfloat16`), but cast neither quantized weights nor buffers that no checkpoint holds.

        Rotary frequencies rounded to bfloat16 would be wrong by up to 0.4 %, at every position.
        """
        fixed = [
            (module, name, buffer)
            for module in self.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name in module._non_persistent_buffers_set
        ]
        with quantization.without_quantized(self, fn):
            super()._apply(fn, recurse)
        for module, name, buffer in fixed:
            moved = module._buffers[name]
            if moved is not None and moved.dtype != buffer.dtype:
                module._buffers[name] = buffer.to(moved.device)
        return self

    def layout(
        self, ids: tuple[int, ...], inputs: Mapping[str, Tensor], lengths: Sequence[Sequence[int]] | None = None
    ) -> Layout:
        """Return the real tokens of a micro-batch by its attention mask, or its packed samples; on the first stage.

        Args:
            ids: sample ids.
            inputs: the batch's inputs, before they are moved to a GPU.
            lengths: for a packed batch, tokens of each sample in each row, in the order of the ids.

        Raises:
            DataError: a token, a token type or a position has no embedding; there is padding where the head reads,
                since links carry none; or the mask and `pad_token_id` disagree about the last token.
            SplitError: samples are packed, and this model cannot tell them apart.
        """
        tokens = inputs["input_ids"].shape[1]
        if lengths is None:
            layout = Layout.of_mask(ids, inputs.get("attention_mask"), tokens)
        else:
            self.check_packing()
            layout = Layout.of_lengths(ids, lengths, tokens)
            if len(inputs["input_ids"]) != layout.batch_size:
                raise DataError(f"{len(inputs['input_ids'])} packed rows have samples for {layout.batch_size}")
        self._check_numbers(layout, inputs)
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
        if not self.carries_left_padding and any(layout.starts):
            sample = ids[next(i for i, start in enumerate(layout.starts) if start)]
            raise DataError(
                f"sample {sample} is padded on the left, whose hidden states {self.plan.model_class} uses and links do "
                "not carry: pad on the right (padding_side='right')"
            )
        if self._head.pools_last_token and self.is_first and not self.is_last:
            self._check_last_tokens(inputs, ids)
        return layout

    def _check_numbers(self, layout: Layout, inputs: Mapping[str, Tensor]) -> None:
        """Raise DataError for a token or token type without an embedding, or a packed sample of too many tokens."""
        for key, what, known in (
            ("input_ids", "token", self._max_token),
            ("token_type_ids", "token type", self._max_type),
        ):
            given_BS = inputs.get(key)
            if given_BS is None or known is None or given_BS.device.type != "cpu":  # reading a GPU's waits for it
                continue
            given_BS = layout.unpack(given_BS, 0) if layout.packed else given_BS
            wrong_BS = (given_BS < 0) | (given_BS >= known)
            if bool(wrong_BS.any()):
                row, place = wrong_BS.nonzero()[0].tolist()
                raise DataError(
                    f"sample {layout.ids[row]} has the {what} {int(given_BS[row, place])} at place {place}; this "
                    f"{self.plan.model_class} has embeddings of {known} {what}s: from 0 to {known - 1}"
                )
        longest = max(layout.counts, default=0)
        if layout.packed and self._max_length is not None and longest > self._max_length:
            raise DataError(
                f"sample {layout.ids[layout.counts.index(longest)]} has {longest} tokens: {self.plan.model_class} has "
                f"{self._max_length} positions, so cut it to {self._max_length}"
            )

    def mask_labels(self, layout: Layout, labels: Tensor) -> Tensor:
        """Mask labels that a causal model would predict from padding or from another sample.

        These are the first real tokens of left-padded and of packed samples. Links carry no padding, so the last stage
        has no hidden states of it. labels: [B, S].
        """
        starts = [(i, start) for i, start in enumerate(layout.starts) if start]
        if layout.packed:
            rows = itertools.accumulate((start == 0 for start in layout.starts), initial=-1)
            starts = list(zip(itertools.islice(rows, 1, None), layout.starts, strict=True))
        alone = self.num_stages == 1 and not layout.packed
        if alone or self._head.loss is not losses.causal_lm or not starts or labels.dim() != 2:
            return labels
        labels = labels.clone()
        row_N, start_N = torch.tensor(starts).unbind(1)
        labels[row_N, start_N] = -100
        return labels

    def check_labels(self, layout: Layout, labels: Tensor) -> None:
        """Raise DataError, with the sample, for an unknown class or a label to be predicted from padding.

        labels: those of `mask_labels`, [B, S] or [B, ...].
        """
        mask_BS = layout.real_BS(labels.device) if self.num_stages > 1 else None
        if layout.packed:
            if labels.dim() != 2 or tuple(labels.shape) != (layout.batch_size, layout.tokens):
                expected = (layout.batch_size, layout.tokens)
                raise DataError(f"labels have shape {tuple(labels.shape)}, expected {expected}: one for each token")
            if mask_BS is not None and bool(((mask_BS == 0) & (labels != -100)).any()):
                raise DataError(f"a packed batch with sample {layout.ids[0]} has labels at padding; allowed: -100")
            labels, mask_BS = layout.unpack(labels, -100), None
        losses.check_labels(self._head.loss, self.config, self.plan.model_class, layout.ids, labels, mask_BS)

    def check_packing(self) -> None:
        """Check that this stage's blocks keep packed samples apart, by their values and gradients of a few tokens.

        Raises:
            SplitError: The head or the attention needs samples of their own, or state passes from one to the next.
        """
        if self._packs:
            return
        name, base, config = self.plan.model_class, self._model.base_model, text_config(self.config)
        remedy = f"train {name} without packing"
        kinds = sorted(set(getattr(config, "layer_types", None) or ()))
        if self._head.loss not in (losses.causal_lm, losses.masked_lm):
            raise SplitError(f"packing: {name} computes one result for each row, not for each token: {remedy}")
        if "position_ids" not in inspect.signature(type(base).forward).parameters:
            raise SplitError(f"packing: {name} takes no position_ids, so it cannot tell samples apart: {remedy}")
        # Transformers makes the mask of a decoder by the positions, if the model passes them on. Else it gets a mask by
        # query and key, unless windows would be lost.
        windows = any("sliding" in kind or "chunked" in kind for kind in kinds) or getattr(
            config, "sliding_window", None
        )
        apart, error = self._keeps_apart()
        if not apart and not (windows or self._flash_attention or self._head.loss is losses.masked_lm):
            self._own_mask = True
            apart, error = self._keeps_apart()
        if error is not None:
            raise SplitError(f"packing: {name} fails with {type(error).__name__}: {error}; {remedy}") from error
        if not apart:
            what = f" (layer types {', '.join(kinds)})" if kinds else ""
            raise SplitError(
                f"packing: blocks {self.lo} to {self.hi - 1} of {name}{what} pass state from one sample of a row to "
                f"the next: {remedy}"
            )
        self._packs = True

    def _keeps_apart(self) -> tuple[bool, Exception | None]:
        """Compare two packed samples of 3 and 2 tokens with each by itself. Returns a result and the model's error."""
        like = next(self._model.parameters())
        cut, total, following = 3, 5, self._ends[1]
        width = self.hidden_size // (self._architecture.lanes if self.is_first else 1)
        x_1SH = torch.sin(torch.arange(total * width, device=like.device) * 0.7).to(self.dtype)
        x_1SH = x_1SH.view(1, total, width).requires_grad_()

        def run(x: Tensor, packed: dict[str, Any]) -> Tensor:
            call = {"inputs_embeds": x, **packed, **self._architecture.forward_options}
            with self._receiving(call):
                output = self._model.base_model(**call)
                hidden: Any = output.last_hidden_state if following is None else following.kept
            assert isinstance(hidden, Tensor)
            return hidden

        training = self._model.training
        self._model.eval()
        try:
            with torch.enable_grad():
                place_S = torch.cat([torch.arange(n, device=like.device) for n in (cut, total - cut)])
                both_1SH = run(x_1SH, self._packing_call(place_S[None] + self._first_position, None))
                with torch.no_grad():
                    apart_1SH = torch.cat([run(part, {}) for part in x_1SH.split([cut, total - cut], 1)], 1)
                weight_1SH = torch.sin(torch.arange(both_1SH.numel(), device=like.device)).view_as(both_1SH)
                # What one sample's result depends on: exactly nothing of the other one.
                for own, other in ((slice(cut, None), slice(None, cut)), (slice(None, cut), slice(cut, None))):
                    result = (both_1SH * weight_1SH)[:, own].float().sum()
                    (gradient_1SH,) = torch.autograd.grad(result, x_1SH, retain_graph=True)
                    if bool((gradient_1SH[:, other] != 0).any()):
                        return False, None
        except Exception as error:  # raised by the model's code
            return False, error
        finally:
            self._model.train(training)
        tolerance = 16 * torch.finfo(both_1SH.dtype).eps * float(apart_1SH.abs().max()) * (self.hi - self.lo + 1)
        return torch.allclose(both_1SH, apart_1SH, rtol=0, atol=max(tolerance, 1e-5)), None

    def next_layout(self, layout: Layout) -> Layout:
        """Return the layout of the stage's output, from that of its input: the same tokens."""
        return layout

    def crossing(self, link: int) -> Boundary:
        """Describe the tensor that crosses a link; links are counted from the first stage."""
        return Boundary(width=self.hidden_size, settings={"cut": self.plan.cuts[link + 1]})

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Recompute each block's activations in the backward pass instead of keeping them.

        gradient_checkpointing_kwargs: for `torch.utils.checkpoint.checkpoint`; default `{"use_reentrant": False}`.
        """
        options = gradient_checkpointing_kwargs or {"use_reentrant": False}
        if options.get("use_reentrant", True) and self.is_first:
            # Reentrant checkpointing gives no gradients to weights of a block without an input that needs one.
            self._model.enable_input_require_grads()
        if hasattr(self._model, "activation_checkpointing_enable"):  # the older name warns since transformers 5.2x
            self._model.activation_checkpointing_enable(options)
        else:
            self._model.gradient_checkpointing_enable(options)

    def count_checkpointed_values(self, samples: int, tokens: int) -> int:
        """Return the number of values that checkpointed blocks keep for the backward: their inputs [B, S, H]."""
        blocks = self._model.base_model.get_submodule(self._architecture.blocks)
        checkpointed = sum(bool(getattr(block, "gradient_checkpointing", False)) for block in blocks)
        return checkpointed * samples * tokens * self.hidden_size

    def forward(
        self, inputs: Mapping[str, Tensor | None] | None = None, **of_whole_model: Any
    ) -> dict[str, Tensor | None] | Tensor:
        """Run this stage's part of the model.

        Args:
            inputs: on the first stage `input_ids` int64 [B, S], optionally `attention_mask` [B, S] (1 for real tokens,
                0 for padding) and inputs that only the embeddings use (`token_type_ids`); on later stages the output of
                the stage before. If samples are packed, `position_ids` int64 [B, S] on every stage, which restart at
                each sample, and optionally `cu_seq_lens`, see `Layout.cu_seq_lens`.
            of_whole_model: nothing; keywords as of the whole model's forward are an error that names the way.

        Returns:
            `{"hidden_states": [B, S, H], "attention_mask": the mask or None}`, with the `position_ids` of packed
            samples; on the last stage the logits, [B, S, V] or [B, C].

        Raises:
            DataError: other inputs.
            SplitError: samples are packed, and this model cannot tell them apart.
        """
        if inputs is None or of_whole_model:
            raise DataError(f"{', '.join(of_whole_model) or 'no inputs'}: {self._is_a_part()}, or call trainer.predict")
        given = self._check_inputs(inputs)
        mask_BS, positions_BS, bounds = (given.pop(k, None) for k in ("attention_mask", "position_ids", "cu_seq_lens"))
        pools = self._head.pools_last_token
        if self.is_first:
            call: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
            if pools and not self.is_last:
                self._check_last_tokens({**given, "attention_mask": mask_BS})
        else:
            call = {"inputs_embeds": given["hidden_states"]}
        shape: tuple[int, ...] | None = None
        if positions_BS is None:
            call["attention_mask"] = mask_BS
        else:
            self.check_packing()
            if self._first_position:  # RoBERTa counts from behind the padding's
                positions_BS = positions_BS - positions_BS[:1, :1] + self._first_position
            if self._flash_attention and len(positions_BS) > 1:  # which takes packed samples in one row only
                shape = tuple(positions_BS.shape)
                call = {key: value.reshape(1, -1, *value.shape[2:]) for key, value in call.items()}
                positions_BS = positions_BS.reshape(1, -1)
            call |= self._packing_call(positions_BS, bounds)
        call |= self._architecture.forward_options
        with self._receiving(call):
            if self.is_last and not (pools and not self.is_first):
                logits: Tensor = self._model(**call).logits
                return logits if shape is None else logits.view(*shape, -1)
            output, following = self._model.base_model(**call), self._ends[1]
            hidden_BSH: Any = output.last_hidden_state if following is None else following.kept
        if not self.is_last:
            passed = {} if positions_BS is None else {"position_ids": inputs["position_ids"]}
            return {
                "hidden_states": hidden_BSH if shape is None else hidden_BSH.view(*shape, -1),
                "attention_mask": mask_BS,
                **passed,
            }
        # The model would look for padding in input_ids, which only the first stage has.
        logits_BSC = self._model.score(hidden_BSH)
        if mask_BS is None or self.config.pad_token_id is None:
            return logits_BSC[:, -1]
        rows_B = torch.arange(logits_BSC.shape[0], device=logits_BSC.device)
        return logits_BSC[rows_B, _last_places(mask_BS.to(logits_BSC.device))]

    @property
    def _flash_attention(self) -> bool:
        return "flash" in str(self.config._attn_implementation)

    def _packing_call(self, positions_BS: Tensor, bounds: Tensor | None) -> dict[str, Any]:
        """Return the model's arguments that keep packed samples apart. bounds: `Layout.cu_seq_lens`."""
        if self._flash_attention:
            if bounds is None:
                starts = sample_numbers(positions_BS.reshape(1, -1))[0].diff(prepend=positions_BS.new_full((1,), -1))
                ends = torch.tensor([positions_BS.numel()], device=positions_BS.device)
                bounds = torch.cat([starts.nonzero()[:, 0], ends]).to(torch.int32).cpu()
            longest, moved = int(bounds.diff().max()), bounds.to(positions_BS.device, non_blocking=True)
            varying = {"cu_seq_lens_q": moved, "cu_seq_lens_k": moved, "max_length_q": longest, "max_length_k": longest}
            return {"attention_mask": None, "position_ids": positions_BS, **varying}
        encoder = self._head.loss is losses.masked_lm
        if not (encoder or self._own_mask):
            return {"attention_mask": None, "position_ids": positions_BS}
        number_BS = sample_numbers(positions_BS)
        same_B1SS = (number_BS[:, :, None] == number_BS[:, None, :])[:, None]
        if not encoder:
            same_B1SS = same_B1SS.tril()
        if self.config._attn_implementation == "eager":  # which adds the mask
            least = torch.finfo(self.dtype).min
            same_B1SS = torch.zeros_like(same_B1SS, dtype=self.dtype).masked_fill_(~same_B1SS, least)
        return {"attention_mask": same_B1SS, "position_ids": positions_BS}

    @contextmanager
    def _receiving(self, call: dict[str, Any]) -> Iterator[None]:
        """Pass the received hidden states to the first block's place, and restore generators after the own blocks.

        call: the arguments of the model's forward; it gets a copy of `inputs_embeds`, which code before the blocks may
        change in place.
        """
        first, following = self._ends
        if first is not None:
            first.received = received = call["inputs_embeds"]
            if not is_built_in(self._architecture):
                width = received.shape[-1] // self._architecture.lanes
                call["inputs_embeds"] = received.detach().clone()[..., :width]
            if self._architecture.draws_outside and self.training:
                first.generators = GeneratorStates(received.device)
        try:
            yield
            if following is not None and following.generators is not None:
                following.generators.restore()
        finally:
            for block in (first, following):
                if block is not None:
                    block.received = block.kept = block.generators = None

    def _check_inputs(self, inputs: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        main = "input_ids" if self.is_first else "hidden_states"
        allowed = (
            main,
            "attention_mask",
            "position_ids",
            "cu_seq_lens",
            *(self._architecture.extra_inputs if self.is_first else ()),
        )
        if not isinstance(inputs, Mapping):
            raise DataError(f"stage {self.index}: got {type(inputs).__name__}, needs a dict with {main}")
        for key in inputs:
            if key not in allowed:
                raise DataError(f"stage {self.index}: input {key!r} is not supported, allowed: {', '.join(allowed)}")
        tensor, dims = inputs.get(main), 2 if self.is_first else 3
        if tensor is None or tensor.dim() != dims:
            got = "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise DataError(f"stage {self.index}: {main} needs {dims} dimensions, got {got}")
        positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
        if positions is not None and mask is not None:
            raise DataError(f"stage {self.index}: position_ids with an attention_mask; allowed: one of them")
        if positions is None and self._max_length is not None and tensor.shape[1] > self._max_length:
            raise DataError(
                f"a sample of {tensor.shape[1]} tokens: {self.plan.model_class} has {self._max_length} positions, so "
                f"cut it to {self._max_length}"
            )
        for key, value in inputs.items():
            if key not in (main, "cu_seq_lens") and value is not None and value.shape != tensor.shape[:2]:
                raise DataError(
                    f"stage {self.index}: {key} has shape {tuple(value.shape)}, {main} needs {tuple(tensor.shape[:2])}"
                )
        return dict(inputs)

    def _check_last_tokens(self, given: Mapping[str, Tensor | None], ids: Sequence[int] | None = None) -> None:
        """Raise DataError if the last tokens differ by the mask (used by the last stage) and by `pad_token_id` (model).

        ids: sample ids, for a batch as loaded. Without them tensors of a GPU are not compared.
        """
        ids_BS, pad, name = given["input_ids"], self.config.pad_token_id, self.plan.model_class
        assert ids_BS is not None, "checked before"
        if pad is None:
            if ids_BS.shape[0] != 1:
                raise DataError(f"{name} needs config.pad_token_id for more than one sample at a time")
            return
        if ids is None and ids_BS.device.type != "cpu":
            return
        by_pad_B = _last_places(ids_BS != pad)
        mask_BS = given.get("attention_mask")
        by_mask_B = _last_places(torch.ones_like(ids_BS) if mask_BS is None else mask_BS.to(ids_BS.device))
        if not torch.equal(by_pad_B, by_mask_B):
            row = int((by_pad_B != by_mask_B).nonzero()[0])
            raise DataError(
                f"sample {row if ids is None else ids[row]}: its last token is {int(by_mask_B[row])} by attention_mask "
                f"and {int(by_pad_B[row])} by pad_token_id {pad}; {name} classifies the last token, so give a mask "
                "that is 0 exactly on padding, and a pad_token_id that no sample ends with"
            )


def _last_places(mask_BS: Tensor) -> Tensor:
    """Return the last place of each sample where a mask is not 0, int64 [B]; 0 if it is 0 everywhere."""
    places_S = torch.arange(mask_BS.shape[1], device=mask_BS.device, dtype=torch.int32)
    return (places_S * (mask_BS != 0).to(torch.int32)).argmax(-1)


def _embedding_rows(model: Any, *endings: str, padding: bool = False) -> int | None:
    """Count the rows of learned embeddings, found by the end of their name; None if a model has none.

    Rows up to the padding's are no positions, as RoBERTa counts; with `padding` they count.
    """
    for name, module in model.base_model.named_modules():
        if name.endswith(endings) and isinstance(module, nn.Embedding):
            return module.num_embeddings - (0 if module.padding_idx is None or padding else module.padding_idx + 1)
    return None


def sample_numbers(positions_BS: Tensor) -> Tensor:
    """Number the packed samples of each row from 0, by positions that restart at each; int64 [B, S]."""
    return (positions_BS.diff(prepend=positions_BS[:, :1] - 1) != 1).cumsum(-1)


@contextmanager
def assume_masks(*, full: bool, device: torch.device, packed: bool = False) -> Iterator[None]:
    """Replace transformers' checks of attention masks, which read a mask on the GPU and wait for it.

    At the beginning of a stage's forward, transformers checks if a mask masks anything and, without one, if positions
    restart within a row. The layout has both answers.

    Args:
        full: True if no mask masks anything, False if each does.
        device: device of the masks; on a CPU, where reading is cheap, nothing is replaced.
        packed: True if positions restart.
    """
    from transformers import masking_utils

    if device.type == "cpu":
        yield
        return

    def needs_no_mask(ask: Callable[..., bool]) -> Callable[..., bool]:
        return lambda mask, *rest, **more: (full or mask is None) and ask(None, *rest, **more)

    answers: dict[str, Callable[[Any], Any]] = {
        "find_packed_sequence_indices": lambda ask: lambda positions: sample_numbers(positions) if packed else None,
        "fast_all": lambda ask: lambda mask: full,  # for flash_attention_2
        "_ignore_causal_mask_sdpa": needs_no_mask,
        "_ignore_bidirectional_mask_sdpa": needs_no_mask,
    }
    stock = {name: getattr(masking_utils, name) for name in answers if hasattr(masking_utils, name)}
    for name, ask in stock.items():
        setattr(masking_utils, name, answers[name](ask))
    try:
        yield
    finally:
        for name, ask in stock.items():
            setattr(masking_utils, name, ask)
