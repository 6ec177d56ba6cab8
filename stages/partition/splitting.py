"""A stage is the Hugging Face model with the other stages' blocks taken out, called through its own forward.

So masks, rotary embeddings and relative positions come from the model's own code, and every parameter keeps Hugging
Face's name. B micro-batch, S tokens, H hidden size, V vocabulary, C classes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from pipecomp.errors import DataError, SplitError
from pipecomp.stages.link.boundary import Crossing, Layout
from pipecomp.stages.partition import losses
from pipecomp.stages.partition.adapters import adapter_of, check_saved, without_peft
from pipecomp.stages.partition.architectures import Architecture, Head, SkippedBlock, architecture_of, head_name
from pipecomp.stages.partition.planning import SplitPlan, TiedGroup, aliases, block_count, modules_read, plan_model


class PipelineStage(nn.Module):
    """One stage of a partitioned model: `Stage` of a Hugging Face model, `ModuleStage` of plain modules.

    Attributes:
        plan: the partition that it is part of.
        index, num_stages: its place.
        lo, hi: its blocks are lo to hi - 1.
    """

    plan: SplitPlan

    def __init__(self, plan: SplitPlan, index: int) -> None:
        super().__init__()
        self.plan, self.index, self.num_stages = plan, index, plan.num_stages
        self.lo, self.hi = plan.cuts[index], plan.cuts[index + 1]

    def trained_labels(self, layout: Layout, labels: Tensor) -> Tensor:
        """Give the labels that the last stage trains on, of those in the batch."""
        return labels

    def check_labels(self, layout: Layout, labels: Tensor) -> None:
        """Raise DataError for a label that the model's own loss cannot take; labels: those of `trained_labels`."""

    @property
    def is_first(self) -> bool:
        """Whether it is called with the batch."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it returns the model's output."""
        return self.index == self.num_stages - 1

    @property
    def tied_groups(self) -> tuple[TiedGroup, ...]:
        """The plan's groups that this stage is part of."""
        return tuple(group for group in self.plan.tied if self.index in group.stages)

    def tied_parameters(self) -> dict[str, nn.Parameter]:
        """Find this stage's copy of each tied weight, by the group's name; none with one stage or `tie=False`."""
        return {
            group.name: self.get_parameter(group.parameters[group.stages.index(self.index)])
            for group in self.tied_groups
        }


class BatchChecks:
    """What one stage can tell of its micro-batches; each method raises DataError.

    Args:
        model: The stage's.
        name: Class of the unsplit model.
        head: Of that class.
        cut: Whether there are several stages.
        is_first: Whether this is the first, which has the embeddings.
    """

    def __init__(self, model: Any, name: str, head: Head, *, cut: bool, is_first: bool) -> None:
        self._config, self._name, self._head, self._cut = model.config, name, head, cut
        self._tokens = self._types = self._positions = None
        if is_first:
            self._tokens = model.get_input_embeddings().weight.shape[0]
            self._types = _rows_of(model, "token_type_embeddings")
            self._positions = _rows_of(model, "wpe", "position_embeddings")

    def length(self, tokens: int) -> None:
        """Check that there is a position for each token of a sample."""
        if self._positions is not None and tokens > self._positions:
            most = self._positions
            raise DataError(f"a sample of {tokens} tokens: {self._name} has {most} positions, so cut it to {most}")

    def tokens(self, ids: Sequence[int], inputs: Mapping[str, Tensor]) -> None:
        """Check that tokens and their types have embeddings: torch calls it an index out of range."""
        for key, what, known in (
            ("input_ids", "token", self._tokens),
            ("token_type_ids", "token type", self._types),
        ):
            given_BS = inputs.get(key)
            if given_BS is None or known is None or given_BS.device.type != "cpu":
                continue
            wrong_BS = (given_BS < 0) | (given_BS >= known)
            if bool(wrong_BS.any()):
                row, place = wrong_BS.nonzero()[0].tolist()
                raise DataError(
                    f"sample {ids[row]} has the {what} {int(given_BS[row, place])} at place {place}; this "
                    f"{self._name} has embeddings of {known} {what}s: from 0 to {known - 1}"
                )

    def padding(self, layout: Layout) -> None:
        """Check that there is a token where a head for classes reads; links carry no padding."""
        reads_one = self._head.reads_first_token or self._head.pools_last_token
        if reads_one and self._cut and not all(layout.counts):
            raise DataError(
                f"sample {layout.ids[layout.counts.index(0)]} has no tokens, its attention_mask is 0 everywhere: "
                f"{self._name} would compute its classes from padding, which links do not carry"
            )
        if self._head.reads_first_token and self._cut and any(layout.starts):
            sample = layout.ids[next(i for i, start in enumerate(layout.starts) if start)]
            raise DataError(
                f"sample {sample} is padded on the left, but {self._name} reads a batch's first place: pad on the "
                "right (padding_side='right')"
            )

    def last_tokens(self, given: Mapping[str, Tensor | None], ids: Sequence[int] | None = None) -> None:
        """Check that the mask, by which the last stage pools, and `pad_token_id`, by which the model does, agree.

        ids: of the samples, where `given` is as it was loaded. Without them tensors of a GPU are not compared.
        """
        ids_BS, pad = given["input_ids"], self._config.pad_token_id
        assert ids_BS is not None, "checked before"
        if pad is None:
            if ids_BS.shape[0] != 1:
                raise DataError(f"{self._name} needs config.pad_token_id for more than one sample at a time")
            return
        if ids is None and ids_BS.device.type != "cpu":
            return
        by_pad_B = last_places(ids_BS != pad)
        mask_BS = given.get("attention_mask")
        by_mask_B = last_places(torch.ones_like(ids_BS) if mask_BS is None else mask_BS.to(ids_BS.device))
        if not torch.equal(by_pad_B, by_mask_B):
            row = int((by_pad_B != by_mask_B).nonzero()[0])
            sample = row if ids is None else ids[row]
            raise DataError(
                f"sample {sample}: by attention_mask its last token is {int(by_mask_B[row])}, by pad_token_id {pad} it "
                f"is {int(by_pad_B[row])}; {self._name} classifies the last token, so give a mask that is 0 exactly on "
                "padding, and a pad_token_id that no sample ends with"
            )

    def labels(self, layout: Layout, labels: Tensor) -> None:
        """Check that labels are classes of the model, none of which would be predicted from padding.

        An unsplit model's loss has terms for padding where input_ids are copied to labels as they are; the last of
        several stages has no hidden states to predict it from. labels: [B, S] or [B, ...].
        """
        following = int(self._head.loss is losses.causal_lm)  # places from a label to the token that predicts it
        by_token = following or self._head.loss is losses.masked_lm
        if by_token:
            self._classes(layout.ids, labels[..., following:], "vocab_size", first=following)
        elif self._head.loss in (losses.classification, losses.deberta_classification):
            self._classes(layout.ids, labels, "num_labels")
        mask_BS = layout.mask_BS(labels.device)
        if mask_BS is None or not self._cut or not by_token or labels.shape != mask_BS.shape:
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

    def _classes(self, ids: Sequence[int], labels: Tensor, number: str, first: int | None = None) -> None:
        """Check classes, of which torch calls one that is too high a target out of bounds.

        number: what of the config is their number. first: place of the first label of a sample that has several.
        """
        config, classes = self._config, int(getattr(self._config, number))
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
                f"labels: sample {ids[row]} has {int(labels[wrong][0])}{at}; this {self._name} has {classes} classes "
                f"({number} of its config): from 0 to {classes - 1}, and -100 for no label"
            )


def last_places(mask_BS: Tensor) -> Tensor:
    """Give the last place of each sample where a mask is not 0, int64 [B]; 0 where it is 0 everywhere."""
    places_S = torch.arange(mask_BS.shape[1], device=mask_BS.device, dtype=torch.int32)
    return (places_S * (mask_BS != 0).to(torch.int32)).argmax(-1)


def _rows_of(model: Any, *endings: str) -> int | None:
    """Count the rows of learned embeddings, by how their names end; None where a model has none.

    Beyond them torch finds no embedding. Those up to the padding's are no positions, as RoBERTa counts.
    """
    for name, module in model.base_model.named_modules():
        if name.endswith(endings) and isinstance(module, nn.Embedding):
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    return None


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


@contextmanager
def known_masks(*, full: bool, device: torch.device) -> Iterator[None]:
    """While inside, models take a mask to leave nothing out if `full`, else something, without a look at its values.

    On a CPU, where looking costs nothing, they look.
    """
    if device.type == "cpu":
        yield
        return
    from transformers import masking_utils

    stock = {name: getattr(masking_utils, name) for name in _ASKING if hasattr(masking_utils, name)}
    for name, ask in stock.items():
        setattr(masking_utils, name, _ASKING[name](ask, full))
    try:
        yield
    finally:
        for name, ask in stock.items():
            setattr(masking_utils, name, ask)


def _needs_no_mask(ask: Callable[..., bool], full: bool) -> Callable[..., bool]:
    def answer(padding_mask: Any, *rest: Any, **more: Any) -> bool:
        return (full or padding_mask is None) and ask(None, *rest, **more)

    return answer


# What takes the place of each function that looks, made of itself and of whether masks leave nothing out.
_ASKING: dict[str, Callable[[Callable[..., Any], bool], Callable[..., Any]]] = {
    "find_packed_sequence_indices": lambda ask, full: lambda positions: None,
    "fast_all": lambda ask, full: lambda mask: full,  # for flash_attention_2
    "_ignore_causal_mask_sdpa": _needs_no_mask,
    "_ignore_bidirectional_mask_sdpa": _needs_no_mask,
}
