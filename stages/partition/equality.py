"""Equality of a model's small copy with its stages: logits, loss and gradients, bit for bit, at every cut.

It is checked once for an architecture without an entry of pipecomp's own, before the first step, on the CPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipecomp.errors import PipecompError, SplitError
from pipecomp.stages.partition import losses
from pipecomp.stages.partition.discovery import SmallCopy, text_config
from pipecomp.stages.partition.structure import Architecture

_log = logging.getLogger(__name__)
Cut = Callable[[Any, Sequence[int], Architecture], Sequence[Any]]
_SUMMED = 1e-5
"""Largest relative difference where sums are added in another order: weights of several stages, and with padding."""


def check_small_copy(config: Any, model_class: type, architecture: Architecture, cut: Cut) -> bool:
    """Compare a small copy of a model with its stages, once for a configuration, class and version of transformers.

    Args:
        config: configuration of the model.
        model_class: its class.
        architecture: its entry, or the structure that was found.
        cut: makes the stages of a model from the cuts and its structure.

    Returns:
        Whether stages are also equal with padding on the left.

    Raises:
        SplitError: they differ; names the block, the logits or a parameter.
    """
    try:
        small = SmallCopy(config, model_class)
    except Exception as error:  # raised by the model's code; only for a registered entry
        _log.warning("%s: not compared with the unsplit model, no small copy can be made: %s", model_class, error)
        return True
    began, ran = time.monotonic(), False

    def compare() -> dict[str, Any]:
        nonlocal ran
        ran = True
        return _compare(small, architecture, cut)

    verdict = small.cached("equality", compare, _describe(architecture))
    if "error" in verdict:
        raise SplitError(f"{architecture.model_type}: {verdict['error']}")
    if ran:
        text = "%s: a copy of %d small blocks equals its stages at every cut, bit for bit (%.1f s; remembered)"
        seconds = time.monotonic() - began
        _log.warning(text, model_class.__name__, verdict["blocks"], seconds)  # Python shows this level by default
    return bool(verdict["left_padding"])


def _describe(architecture: Architecture) -> str:
    """Describe an entry for the cache, the same in every process."""
    parts = {**vars(architecture), "heads": sorted(architecture.heads)}
    parts["before"] = {path: None if kind is None else kind.__qualname__ for path, kind in architecture.before.items()}
    return repr(sorted(parts.items()))


def _compare(small: SmallCopy, architecture: Architecture, cut: Cut) -> dict[str, Any]:
    name = small.model_class.__name__
    model = small.build()
    blocks = len(model.base_model.get_submodule(architecture.blocks))
    head = next(iter(architecture.heads.values()))
    for base in type(model).__mro__:
        head = architecture.heads.get(base.__name__, head)
    by_class = head.loss not in (losses.causal_lm, losses.masked_lm)
    pad = getattr(text_config(small.config), "pad_token_id", None)
    trial = _Trial(model, head.loss(model.config), blocks, architecture, seed=1)
    one = by_class and head.pools_last_token and pad is None
    inputs, labels = _batch(small, by_class, one)
    if "token_type_ids" in architecture.extra_inputs and _types(small.config) > 1:
        inputs["token_type_ids"] = torch.randint(0, 2, inputs["input_ids"].shape)
    try:
        trial.run_whole(inputs, labels)
    except Exception as error:  # raised by the model's code
        return {"error": f"{name} does not run unsplit: {type(error).__name__}: {error}"}
    # A stage for each block is cut at every place at once: what does not travel is missing in all later blocks.
    for cuts in (list(range(blocks)), [0, blocks // 2]):
        try:
            different = trial.compare(cut, cuts, inputs, labels, exact=True)
        except PipecompError as error:
            return {"error": str(error)}
        except Exception as error:  # raised by the model's code, on a stage
            different = f"past the first stage {name} fails with {type(error).__name__}: {error}"
        if different is not None:
            return {"error": f"stages cut at {cuts[1:]} differ from the unsplit {name}: {different}"}
    padded: dict[str, str | None] = {"right": None, "left": None}
    for side in padded if not one else ():
        inputs, labels = _batch(small, by_class, False, side, pad or 0)
        if side == "left" and head.reads_first_token:
            continue
        try:
            trial.run_whole(inputs, labels)
            padded[side] = trial.compare(cut, [0, blocks // 2], inputs, labels, exact=False)
        except Exception as error:  # raised by the model's code
            padded[side] = f"{type(error).__name__}: {error}"
    if padded["right"] is not None:
        return {"error": f"stages differ from the unsplit {name} where samples are padded: {padded['right']}"}
    return {"blocks": blocks, "left_padding": padded["left"] is None}


def _types(config: Any) -> int:
    return int(getattr(text_config(config), "type_vocab_size", 0) or 0)


def _batch(
    small: SmallCopy, by_class: bool, one: bool, side: str | None = None, pad: int = 0
) -> tuple[dict[str, Tensor], Tensor]:
    """Make inputs and labels; padded on one side, the second sample is shorter."""
    ids_BS = small.tokens()[: 1 if one else 2]
    inputs = {"input_ids": ids_BS}
    labels = _class_labels(small.config, len(ids_BS)) if by_class else ids_BS.clone()
    if side is not None:
        mask_BS = torch.ones_like(ids_BS)
        mask_BS[1, slice(7, None) if side == "right" else slice(0, 5)] = 0
        inputs = {"input_ids": ids_BS.masked_fill(mask_BS == 0, pad), "attention_mask": mask_BS}
        if not by_class:
            labels = labels.masked_fill(mask_BS == 0, -100)
            if side == "left":
                labels[1, 5] = -100  # would be predicted from padding
    return inputs, labels


def _class_labels(config: Any, samples: int) -> Tensor:
    """Make labels of a classifier, by its problem type or, without one, by its number of classes."""
    classes = int(config.num_labels)
    problem = config.problem_type or ("regression" if classes == 1 else "single_label_classification")
    if problem == "single_label_classification":
        return torch.arange(samples) % classes
    return torch.rand(samples) if classes == 1 else torch.rand(samples, classes).round()


class _Trial:
    """One training step of a model whole, and the same step of its stages."""

    def __init__(self, model: Any, loss: losses.LossFn, blocks: int, architecture: Architecture, seed: int) -> None:
        self._model, self._loss, self._architecture, self._seed = model, loss, architecture, seed
        self._blocks: Any = model.base_model.get_submodule(architecture.blocks)
        self._inputs: list[Tensor] = []  # of each block
        self._gradients: dict[str, Tensor] = {}
        self._logits = self._value = torch.empty(0)

    def run_whole(self, inputs: dict[str, Tensor], labels: Tensor) -> None:
        """Run the unsplit model's step, and keep its results."""
        self._inputs = []
        hooks = [block.register_forward_pre_hook(self._keep_input, with_kwargs=True) for block in self._blocks]
        self._model.zero_grad(set_to_none=True)
        torch.manual_seed(self._seed)
        try:
            output = self._model(**inputs, labels=labels, **self._architecture.forward_options)
        finally:
            for hook in hooks:
                hook.remove()
        output.loss.backward()
        self._logits, self._value = output.logits.detach(), output.loss.detach()
        if not bool(torch.isfinite(self._value)):
            raise SplitError(f"its loss is {float(self._value)}")
        self._gradients = {name: p.grad.clone() for name, p in self._model.named_parameters() if p.grad is not None}

    def _keep_input(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden = given[0] if given else named.get("hidden_states")
        self._inputs.append(hidden.detach().clone() if isinstance(hidden, Tensor) else torch.empty(0))

    def compare(
        self, cut: Cut, cuts: Sequence[int], inputs: dict[str, Tensor], labels: Tensor, *, exact: bool
    ) -> str | None:
        """Run the stages' step as links do: without gradients across and without padding. Returns the difference."""
        self._model.zero_grad(set_to_none=True)
        stages = cut(self._model, cuts, self._architecture)
        mask_BS = inputs.get("attention_mask")
        torch.manual_seed(self._seed)
        message: Any = inputs
        ends: list[tuple[Tensor, Tensor]] = []  # what a stage sends, and what the next receives
        for stage in stages[:-1]:
            sent = stage(message)["hidden_states"]
            received = sent.detach().clone()
            if mask_BS is not None:
                received *= mask_BS[..., None]
            ends.append((sent, received.requires_grad_()))
            message = {"hidden_states": received, "attention_mask": mask_BS}
            whole = self._inputs[stage.hi] if self._architecture.lanes == 1 else self._inputs[stage.hi].flatten(2)
            if not _equal(received.detach(), _without_padding(whole, mask_BS), exact):
                return f"they part before block {stage.hi}, {_distance(received.detach(), whole)}"
        logits = stages[-1](message)
        shown, expected = logits.detach(), self._logits
        if mask_BS is not None and logits.dim() == 3:
            shown, expected = _without_padding(shown, mask_BS), _without_padding(expected, mask_BS)
        if not _equal(shown, expected, exact):
            block = stages[-1].lo
            return f"they part at block {block} or after it: logits {_distance(shown, expected)}"
        value = self._loss(logits, labels)
        if not _equal(value.detach(), self._value, exact):
            return f"the loss is {float(value)} and not {float(self._value)}"
        value.backward()
        for sent, received in reversed(ends):
            gradient = received.grad if received.grad is not None else torch.zeros_like(received)
            sent.backward(gradient if mask_BS is None else gradient * mask_BS[..., None])
        return self._compare_gradients(stages, exact)

    def _compare_gradients(self, stages: Sequence[Any], exact: bool) -> str | None:
        found: dict[str, Tensor] = {}
        summed: set[str] = set()
        for stage in stages:
            groups = {id(p): name for name, p in stage.tied_parameters().items()}
            for name, parameter in stage.named_parameters():
                if parameter.grad is None:
                    continue
                key = groups.get(id(parameter), name)
                if key in found:
                    summed.add(key)
                found[key] = found[key] + parameter.grad if key in found else parameter.grad.clone()
        for name in sorted({*found, *self._gradients}):
            mine, expected = found.get(name), self._gradients.get(name)
            like = mine if mine is not None else expected
            assert like is not None, "a name of one of both"
            mine = torch.zeros_like(like) if mine is None else mine
            expected = torch.zeros_like(like) if expected is None else expected
            if not _equal(mine, expected, exact and name not in summed):
                return f"the gradients of {name} differ, {_distance(mine, expected)}"
        return None


def _without_padding(x_BSH: Tensor, mask_BS: Tensor | None) -> Tensor:
    return x_BSH if mask_BS is None else x_BSH.masked_fill(mask_BS[..., None] == 0, 0.0)


def _equal(a: Tensor, b: Tensor, exact: bool) -> bool:
    if a.shape != b.shape:
        return False
    return torch.equal(a, b) if exact else bool((a - b).abs().max() <= _SUMMED * (b.abs().max() + 1e-6))


def _distance(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape:
        return f"of shape {tuple(a.shape)} and not {tuple(b.shape)}"
    return f"by {float((a - b).abs().max()):.2g} of {float(b.abs().max()):.2g}"
