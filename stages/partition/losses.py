"""Losses of Hugging Face models as functions of the last stage's logits, and checks of their labels.

B micro-batch, S tokens, V vocabulary, C classes. The arithmetic is that of transformers 5, operation for operation, so
that a split model reports the loss of the unsplit one bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from pipecomp.errors import DataError

LossFn = Callable[[Tensor, Tensor], Tensor]
"""`loss(logits, labels) -> scalar`; labels may lie on another device than the logits."""


def causal_lm(config: Any) -> LossFn:
    """Make the next-token cross-entropy, mean over labels that are not -100. logits [B, S, V], labels int64 [B, S]."""
    vocabulary = int(config.vocab_size)

    def loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
        _require_places(logits_BSV, labels_BS)
        next_BS = F.pad(labels_BS, (0, 1), value=-100)[..., 1:].contiguous().to(logits_BSV.device)
        return _mean_cross_entropy(logits_BSV.float().view(-1, vocabulary), next_BS.view(-1))

    return loss


def masked_lm(config: Any) -> LossFn:
    """Make the cross-entropy over labels that are not -100. logits [B, S, V], labels int64 [B, S]."""
    vocabulary = int(config.vocab_size)

    def loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
        _require_places(logits_BSV, labels_BS)
        return _mean_cross_entropy(logits_BSV.view(-1, vocabulary), labels_BS.to(logits_BSV.device).view(-1))

    return loss


def classification(config: Any) -> LossFn:
    """Make the loss of a sequence classification head. logits [B, C].

    `config.problem_type` decides; unset, one class means regression (mean squared error, labels float [B]), integer
    labels [B] mean cross-entropy, and float labels [B, C] binary cross-entropy per class.
    """
    classes = int(config.num_labels)

    def loss(logits_BC: Tensor, labels: Tensor) -> Tensor:
        labels = labels.to(logits_BC.device)
        problem = config.problem_type or infer_problem(classes, labels)
        if problem == "regression":
            _require_float(labels)
            if classes == 1:
                _require_count(labels, logits_BC)
                return F.mse_loss(logits_BC.squeeze(), labels.squeeze())
            _require_shape(labels, logits_BC)
            return F.mse_loss(logits_BC, labels)
        if problem == "single_label_classification":
            got = f"got {labels.dtype} {tuple(labels.shape)} for {len(logits_BC)} samples, each of one class"
            _require(labels.numel() == len(logits_BC), f"{got}; for several classes give floating-point labels")
            return _mean_cross_entropy(logits_BC.view(-1, classes), labels.view(-1))
        if problem == "multi_label_classification":
            _require_float(labels, problem)
            _require_shape(labels, logits_BC)
            return F.binary_cross_entropy_with_logits(logits_BC, labels)
        raise DataError(
            f"config.problem_type: got {problem!r}, allowed: 'regression', 'single_label_classification', "
            "'multi_label_classification' or None"
        )

    return loss


def deberta_classification(config: Any) -> LossFn:
    """Make DeBERTa's loss: with `problem_type` unset it ignores labels below 0 and accepts soft labels [B, C]."""
    classes = int(config.num_labels)
    common = classification(config)

    def loss(logits_BC: Tensor, labels: Tensor) -> Tensor:
        if config.problem_type is not None:
            return common(logits_BC, labels)
        labels = labels.to(logits_BC.device)
        if classes == 1:
            _require_float(labels)
            _require_count(labels, logits_BC)
            return F.mse_loss(logits_BC.view(-1).to(labels.dtype), labels.view(-1))
        if labels.dim() == 1 or labels.size(-1) == 1:
            labels = labels.view(-1)
            known = labels >= 0
            if not bool(known.any()):
                return logits_BC.sum() * 0.0  # zero, but connected: backward must still reach the earlier stages
            return F.cross_entropy(logits_BC[known].float(), labels[known].long())
        return -((F.log_softmax(logits_BC, -1) * labels).sum(-1)).mean()

    return loss


def _mean_cross_entropy(logits_NC: Tensor, labels_N: Tensor) -> Tensor:
    """Return the mean over labels that are not -100, and 0 without one, where torch's mean is NaN.

    Its gradient is 0 then, as torch's is. `where` selects on the device: asking a GPU for the count would wait for it.
    """
    mean = F.cross_entropy(logits_NC, labels_N, ignore_index=-100)
    return torch.where((labels_N != -100).any(), mean, torch.zeros_like(mean))


def infer_problem(classes: int, labels: Tensor) -> str:
    """Return the `problem_type` of a classifier whose config has none, by its number of classes and its labels."""
    if classes == 1:
        return "regression"
    return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"


def check_labels(
    make_loss: Callable[[Any], LossFn],
    config: Any,
    model: str,
    ids: Sequence[int],
    labels: Tensor,
    mask_BS: Tensor | None,
) -> None:
    """Check that labels are classes of the model, and that none would be predicted from padding.

    Labels copied from input_ids make an unsplit model predict padding; the last of several stages has no hidden states
    of padding to predict from.

    Args:
        make_loss: the head's, such as `causal_lm`.
        config: configuration of the model.
        model: its class, for errors.
        ids: ids of the samples, for errors.
        labels: [B, S] or [B, ...].
        mask_BS: 0 where links carry no token; None if they carry all.

    Raises:
        DataError: names the sample, the label and its place.
    """
    by_class = make_loss in (classification, deberta_classification)
    if not by_class and make_loss not in (causal_lm, masked_lm):
        return
    shift = int(make_loss is causal_lm)  # places from a label to the token that predicts it
    key, read = ("num_labels", labels) if by_class else ("vocab_size", labels[..., shift:])
    classes, problem = int(getattr(config, key)), "single_label_classification"
    if by_class:
        problem = config.problem_type or infer_problem(classes, labels)
    if problem == "single_label_classification" and not read.is_floating_point() and read.device.type == "cpu":
        wrong = read >= classes  # torch would call it a target out of bounds
        if make_loss is not deberta_classification or config.problem_type:  # which ignores negative labels
            wrong |= (read < 0) & (read != -100)
        if bool(wrong.any()):
            row, *place = wrong.nonzero()[0].tolist()
            at = "" if by_class else f" at place {place[0] + shift}"
            raise DataError(
                f"labels: sample {ids[row]} has {int(read[wrong][0])}{at}; this {model} has {classes} classes "
                f"({key} of its config): from 0 to {classes - 1}, and -100 for no label"
            )
    if mask_BS is None or by_class or labels.shape != mask_BS.shape:
        return
    wrong = (read != -100) & (mask_BS[:, : labels.shape[1] - shift] == 0)
    if bool(wrong.any()):
        row, place = wrong.nonzero()[0].tolist()
        raise DataError(
            f"labels: sample {ids[row]} has {int(read[row, place])} at place {place + shift}, to be predicted from "
            "padding, which links do not carry; allowed: -100 where attention_mask is 0, as "
            "DataCollatorForLanguageModeling makes them"
        )


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise DataError(f"labels: {message}")


def _require_places(logits_BSV: Tensor, labels_BS: Tensor) -> None:
    got, needed = tuple(labels_BS.shape), tuple(logits_BSV.shape[:-1])
    _require(got == needed, f"got shape {got}, the logits need {needed}")


def _require_float(labels: Tensor, problem: str = "regression") -> None:
    _require(labels.is_floating_point(), f"got {labels.dtype}, {problem} needs floating-point labels")


def _require_shape(labels: Tensor, outputs: Tensor) -> None:
    got = f"got {labels.dtype} {tuple(labels.shape)}, the outputs are {tuple(outputs.shape)}"
    _require(labels.shape == outputs.shape, f"{got}: float labels are values of outputs, a class is an integer")


def _require_count(labels: Tensor, outputs: Tensor) -> None:
    _require(labels.numel() == outputs.numel(), f"got {labels.numel()} values for {outputs.numel()} outputs")
