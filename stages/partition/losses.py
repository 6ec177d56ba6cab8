"""What a Hugging Face model computes for its labels, as functions of the last stage's logits.

B micro-batch, S tokens, V vocabulary, C classes. The arithmetic is that of transformers 5, operation for operation, so
that a split model reports the loss of the unsplit one bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from pipecomp.errors import DataError

LossFn = Callable[[Tensor, Tensor], Tensor]
"""`loss(logits, labels) -> scalar`; labels may lie on another device than the logits."""


def causal_lm(config: Any) -> LossFn:
    """Next-token cross-entropy, mean over all labels that are not -100. logits [B, S, V], labels int64 [B, S]."""
    vocabulary = int(config.vocab_size)

    def loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
        _same_leading_shape(logits_BSV, labels_BS)
        next_BS = F.pad(labels_BS, (0, 1), value=-100)[..., 1:].contiguous().to(logits_BSV.device)
        return F.cross_entropy(logits_BSV.float().view(-1, vocabulary), next_BS.view(-1), ignore_index=-100)

    return loss


def masked_lm(config: Any) -> LossFn:
    """Cross-entropy over the labels that are not -100. logits [B, S, V], labels int64 [B, S]."""
    vocabulary = int(config.vocab_size)

    def loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
        _same_leading_shape(logits_BSV, labels_BS)
        return F.cross_entropy(logits_BSV.view(-1, vocabulary), labels_BS.to(logits_BSV.device).view(-1))

    return loss


def classification(config: Any) -> LossFn:
    """Loss of a sequence classification head. logits [B, C].

    `config.problem_type` decides; unset, one class means regression (mean squared error, labels float [B]), integer
    labels [B] mean cross-entropy, and float labels [B, C] binary cross-entropy per class.
    """
    classes = int(config.num_labels)

    def loss(logits_BC: Tensor, labels: Tensor) -> Tensor:
        labels = labels.to(logits_BC.device)
        problem = config.problem_type or guess_problem(classes, labels)
        if problem == "regression":
            _require_float(labels)
            if classes == 1:
                _same_count(logits_BC, labels)
                return F.mse_loss(logits_BC.squeeze(), labels.squeeze())
            _same_shape(logits_BC, labels)
            return F.mse_loss(logits_BC, labels)
        if problem == "single_label_classification":
            _one_each(logits_BC, labels)
            return F.cross_entropy(logits_BC.view(-1, classes), labels.view(-1))
        if problem == "multi_label_classification":
            _require_float(labels, problem)
            _same_shape(logits_BC, labels)
            return F.binary_cross_entropy_with_logits(logits_BC, labels)
        raise DataError(
            f"config.problem_type: got {problem!r}, allowed: 'regression', 'single_label_classification', "
            "'multi_label_classification' or None"
        )

    return loss


def deberta_classification(config: Any) -> LossFn:
    """Do the same for DeBERTa, which with `problem_type` unset ignores labels below 0 and takes soft labels [B, C]."""
    classes = int(config.num_labels)
    common = classification(config)

    def loss(logits_BC: Tensor, labels: Tensor) -> Tensor:
        if config.problem_type is not None:
            return common(logits_BC, labels)
        labels = labels.to(logits_BC.device)
        if classes == 1:
            _require_float(labels)
            _same_count(logits_BC, labels)
            return F.mse_loss(logits_BC.view(-1).to(labels.dtype), labels.view(-1))
        if labels.dim() == 1 or labels.size(-1) == 1:
            labels = labels.view(-1)
            kept = labels >= 0
            if not bool(kept.any()):
                return logits_BC.sum() * 0.0  # zero, but connected: backward must still reach the earlier stages
            return F.cross_entropy(logits_BC[kept].float(), labels[kept].long())
        return -((F.log_softmax(logits_BC, -1) * labels).sum(-1)).mean()

    return loss


def guess_problem(classes: int, labels: Tensor) -> str:
    """Name the problem of a classifier whose configuration names none, by its number of classes and its labels."""
    if classes == 1:
        return "regression"
    return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"


def _same_leading_shape(logits: Tensor, labels: Tensor) -> None:
    if logits.shape[:-1] != labels.shape:
        raise DataError(f"labels: got shape {tuple(labels.shape)}, the logits need {tuple(logits.shape[:-1])}")


def _same_count(logits: Tensor, labels: Tensor) -> None:
    if logits.numel() != labels.numel():
        raise DataError(f"labels: got {labels.numel()} values for {logits.numel()} outputs")


def _same_shape(logits: Tensor, labels: Tensor) -> None:
    if logits.shape != labels.shape:
        raise DataError(
            f"labels: got {labels.dtype} {tuple(labels.shape)}, the outputs are {tuple(logits.shape)}: floating-point "
            "labels are values of outputs, a class is a whole number"
        )


def _one_each(logits_BC: Tensor, labels: Tensor) -> None:
    if labels.numel() != len(logits_BC):
        raise DataError(
            f"labels: got {labels.dtype} {tuple(labels.shape)} for {len(logits_BC)} samples, each of one class; for "
            "several classes of a sample (multi_label_classification) labels are floating-point"
        )


def _require_float(labels: Tensor, problem: str = "regression") -> None:
    if not labels.is_floating_point():
        raise DataError(f"labels: got {labels.dtype}, {problem} needs floating-point labels")
