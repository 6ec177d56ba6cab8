"""The loss of an optimizer step: every label counts alike, in whichever micro-batch or replica it is.

The engine takes the mean over micro-batches, each of which has a mean over its labels. Where micro-batches hold
different numbers of labels (padding, a short last one) that is not the mean over the step's labels, which Trainer
computes; so each micro-batch is weighed by its share. S tokens, V vocabulary, C classes.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_pt_utils import LabelSmoother
from transformers.utils import ModelOutput

from pipecomp.data import MicroBatch
from pipecomp.errors import require
from pipecomp.stages import default_loss
from pipecomp.stages.partition.adapters import without_peft
from pipecomp.stages.partition.architectures import architecture_of, head_name
from pipecomp.stages.partition.losses import LossFn, causal_lm, classification, infer_problem


@dataclass
class Output(ModelOutput):
    """What the last stage gives of a model's output."""

    logits: Tensor | None = None


def labels_in(labels: Tensor, *, causal: bool, own: bool = False) -> int:
    """How many labels the loss has terms for: those that are not ignored, without the first token of a causal model.

    own: For a loss of the user's own, count as Trainer does: only -100 is no label.
    """
    counted = labels[..., 1:] if causal else labels
    if own:
        return int(counted.ne(-100).sum())
    return labels.numel() if labels.is_floating_point() else int(counted.ge(0).sum())


def _check_loss(name: str, model_class: Any, model: Any) -> None:
    """Check that a model's loss is that of its head, which is computed here: its own forward gives only the logits."""
    (head,) = [kind for kind in model_class.__mro__ if kind.__name__ == name][:1]
    table = getattr(without_peft(model), "__dict__", {})
    for own, what in (
        ("forward" in table or model_class.forward is not head.forward, "forward"),
        ("_loss_function" in table, "loss_function"),
    ):
        require(
            not own,
            "model",
            f"{model_class.__name__} with its own {what}",
            f"{name}'s, or compute_loss_func beside it: a pipeline computes the loss from the last stage's logits",
        )


class StepLoss:
    """The loss function of a training engine: the model's own mean, weighed by `share`.

    Args:
        config: The model's; its `architectures` name the class.
        label_smoothing: `TrainingArguments.label_smoothing_factor`.
        own: Trainer's compute_loss_func, which is given an output that has logits only, and the number of labels, of
            the step in training and of the micro-batch in evaluation, by which it divides a sum.

    Attributes:
        share: Micro-batches of the step, of all replicas together, for each of its labels: a fraction, set before
            every step.

    Raises:
        ConfigError: For smoothing that the model's loss does not have.
    """

    def __init__(self, config: Any, label_smoothing: float = 0.0, own: Callable[..., Tensor] | None = None) -> None:
        kind = architecture_of(config).heads[config.architectures[0]].loss
        self.causal = kind is causal_lm
        self.share: tuple[int, int] = (1, 1)  # a fraction: equal micro-batches then weigh exactly 1
        self._counts: deque[int] = deque()  # labels of the step's micro-batches to come
        self._loss: LossFn = default_loss(config)
        self._smoother = LabelSmoother(epsilon=label_smoothing) if label_smoothing else None
        require(
            self._smoother is None or getattr(config, "problem_type", None) != "multi_label_classification",
            "label_smoothing_factor",
            label_smoothing,
            "0 for a multi-label classification",
        )
        self._own = own
        self._notes = kind is classification and own is None and not label_smoothing

    @classmethod
    def of(
        cls, config: Any, model_class: Any, model: Any, smoothing: float, own: Callable[..., Tensor] | None
    ) -> StepLoss:
        """Make the loss of a model of this class, whatever class its configuration names.

        model: In memory, or anything else. Raises ConfigError for a model that computes another loss than its head's.
        """
        name = head_name(architecture_of(config), model_class)
        if own is None and not smoothing:
            _check_loss(name, model_class, model)
        config = copy.deepcopy(config)
        config.architectures = [name]
        return cls(config, smoothing, own)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute what the engine back-propagates. logits: [B, S, V] or [B, C]; labels as the model takes them."""
        # Counted before they went to the GPU, which the number would have to be waited for.
        count = self._counts.popleft() if self._counts else self._count(labels)
        micro_batches, total = self.share
        if count == 0:
            return logits.float().sum() * 0.0  # its mean would be NaN; this is zero and still reaches the other stages
        if self._own is not None:
            return self._own_loss(logits, labels, total) * micro_batches
        return self.plain(logits, labels) * (count * micro_batches / total)

    def plain(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean over a micro-batch's labels, as for evaluation."""
        if self._own is not None:
            return self._own_loss(logits, labels, self._count(labels))
        if self._smoother is None:
            return self._loss(logits, labels)
        allowed = "0 with floating-point labels, which are values or several classes of a sample"
        require(not labels.is_floating_point(), "label_smoothing_factor", self._smoother.epsilon, allowed)
        smoothed: Tensor = self._smoother({"logits": logits}, labels.to(logits.device), shift_labels=self.causal)
        return smoothed

    def note_problem(self, config: Any, labels: Tensor | None) -> None:
        """Let a classifier's configuration name its problem as the model's own loss does: who loads it goes by that.

        Args:
            config: Of the model that is saved; one that names its problem keeps it.
            labels: Of a micro-batch.
        """
        if self._notes and config.problem_type is None and labels is not None:
            config.problem_type = infer_problem(config.num_labels, labels)

    def labels_of(self, stage: Any, batches: Iterable[MicroBatch]) -> list[Tensor]:
        """List the labels of micro-batches as the engine gives them to the loss.

        What a causal model would have to predict from padding is left out, and nothing else may be predicted from it,
        except by a loss of the user's own: what that ignores is not known here.

        Args:
            stage: The last one, which leaves out the first token of a sample that is padded left.
            batches: Complete ones, with the inputs of the first stage; without labels they are passed over.

        Raises:
            DataError: Naming the sample and the place.
        """
        found = []
        for batch in batches:
            if batch.labels is None:
                continue
            layout = stage.layout(batch.ids, batch.inputs)
            labels = stage.mask_labels(layout, batch.labels)
            if self._own is None:
                stage.check_labels(layout, labels)
            found.append(labels)
        return found

    def _count(self, labels: Tensor) -> int:
        return labels_in(labels, causal=self.causal, own=self._own is not None)

    def _own_loss(self, logits: Tensor, labels: Tensor, count: int) -> Tensor:
        """The user's loss, told that it is one of `count` labels: a tensor, as Trainer gives it."""
        assert self._own is not None
        # Made on the device: a copy to a GPU would wait for what it computes.
        return self._own(Output(logits=logits), labels, num_items_in_batch=torch.full((), count, device=logits.device))

    def weigh(self, labels: list[Tensor], replicas: int, group: Any, device: torch.device) -> None:
        """Set `share` for a step, whose micro-batches the loss is given next.

        Args:
            labels: Of each micro-batch in their order, as the loss is given them: see `labels_of`.
            replicas: Of the pipeline.
            group: The last stages of all replicas, each of which must call this; None to count this replica alone.
            device: For the reduction.
        """
        self._counts = deque(self._count(x) for x in labels)
        total = torch.tensor([sum(self._counts)], device=device)
        micro_batches = len(labels)
        if group is not None:
            torch.distributed.all_reduce(total, group=group)
            micro_batches *= replicas
        self.share = (micro_batches, max(1, int(total)))
