"""The loss of an optimizer step, with equal weight for every label of all micro-batches and replicas.

The engine averages the mean losses of micro-batches. If these have different numbers of labels (padding, an incomplete
last one), that differs from the mean over the step's labels, which Trainer computes. So each micro-batch is weighted by
its share of the labels. S tokens, V vocabulary, C classes.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_pt_utils import LabelSmoother
from transformers.utils import ModelOutput

from pipecomp.data import MicroBatch
from pipecomp.errors import PipecompError, require
from pipecomp.stages import default_loss
from pipecomp.stages.partition.adapters import without_peft
from pipecomp.stages.partition.architectures import architecture_of, head_name
from pipecomp.stages.partition.losses import LossFn, causal_lm, classification, infer_problem, masked_lm


@dataclass
class LogitsOutput(ModelOutput):
    """The part of a model's output that the last stage computes, with the loss if there are labels."""

    loss: Tensor | None = None
    logits: Tensor | None = None


class LastStageModel:
    """The model that a subclass's `compute_loss` gets: a call returns the logits of the micro-batch.

    The pipeline has computed them. Other attributes are those of the last stage.

    Args:
        stage: The last stage.
        loss: The model's loss.
        logits: Logits of the micro-batch.
        inputs: Inputs of the micro-batch, with its labels.
    """

    def __init__(self, stage: Any, loss: StepLoss, logits: Tensor, inputs: Mapping[str, Any]) -> None:
        self._stage, self._loss, self._logits, self._inputs, self._called = stage, loss, logits, inputs, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def __call__(self, *positional: Any, **given: Any) -> LogitsOutput:
        """Return the logits, and the model's loss if labels are given.

        Raises:
            PipecompError: For a second call, other inputs, or outputs other than logits.
        """
        name = "compute_loss"
        if self._called:
            raise PipecompError(f"{name} calls the model again: the stages have run the micro-batch once")
        self._called = True
        given |= dict(zip(("input_ids",), positional, strict=False))
        labels, items = given.pop("labels", None), given.pop("num_items_in_batch", None)
        for key, value in given.items():
            if isinstance(value, Tensor) and value is not self._inputs.get(key):
                raise PipecompError(
                    f"{name} calls the model with other {key} than the micro-batch's: the stages have run that before. "
                    "Change inputs in data_collator"
                )
            if key in ("output_hidden_states", "output_attentions") and value:
                raise PipecompError(f"{name}: {key} is not available: the last stage returns only logits")
        loss = None if labels is None else self._loss.model_loss(self._logits, labels, items)
        return LogitsOutput(loss=loss, logits=self._logits)


def count_labels(labels: Tensor, *, causal: bool, own: bool = False) -> int:
    """Count the labels that contribute to the loss, without the first token of a causal model.

    own: The loss is the user's. Then only -100 is ignored, as Trainer counts.
    """
    counted = labels[..., 1:] if causal else labels
    if own:
        return int(counted.ne(-100).sum())
    return labels.numel() if labels.is_floating_point() else int(counted.ge(0).sum())


def _check_loss(name: str, model_class: Any, model: Any) -> None:
    """Check that a model uses the loss of its head, which the pipeline computes from the last stage's logits."""
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
            f"{name}'s, or also compute_loss_func: a pipeline computes the loss from the last stage's logits",
        )


class StepLoss:
    """The loss function of a training engine: the model's mean loss, weighted by the micro-batch's number of labels.

    Args:
        config: The model's configuration; its `architectures` name the class.
        label_smoothing: `TrainingArguments.label_smoothing_factor`.
        own: Trainer's compute_loss_func. Its output argument has only logits; its num_items_in_batch is the number of
            labels of the step in training, and of the micro-batch in evaluation.

    Attributes:
        share: (micro-batches, labels) of the step, over all replicas; set before every step.
        method: A subclass's `compute_loss`, bound, or None.
        stage: The last stage, for `method`.
        is_scaled: Returns whether `method` divides by the labels of the whole step; else it returns a mean.

    Raises:
        ConfigError: If the model's loss does not support label smoothing.
    """

    def __init__(self, config: Any, label_smoothing: float = 0.0, own: Callable[..., Tensor] | None = None) -> None:
        kind = architecture_of(config).heads[config.architectures[0]].loss
        self.causal = kind is causal_lm
        self.share: tuple[int, int] = (1, 1)  # a fraction, so that equal micro-batches weigh exactly 1
        self._counts: deque[int] = deque()  # labels of the step's remaining micro-batches
        self._loss: LossFn = default_loss(config)
        self._smoother = LabelSmoother(epsilon=label_smoothing) if label_smoothing else None
        require(
            self._smoother is None or getattr(config, "problem_type", None) != "multi_label_classification",
            "label_smoothing_factor",
            label_smoothing,
            "0 for multi-label classification",
        )
        self._own = own
        self._notes = kind is classification and own is None and not label_smoothing
        self._counts_items = kind in (causal_lm, masked_lm)
        self._set_method()

    def _set_method(self) -> None:
        self.method: Callable[..., Any] | None = None
        self.stage: Any = None
        self.is_scaled: Callable[[], bool] = lambda: False
        self._inputs: deque[MicroBatch] = deque()  # the step's remaining micro-batches, for `method`
        self._columns: frozenset[str] = frozenset()
        self._micro_batches = 1  # of the step and this replica

    def use_method(self, method: Callable[..., Any], model_class: Any, is_scaled: Callable[[], bool]) -> None:
        """Compute losses by a subclass's `compute_loss`. model_class: its forward takes the inputs of the stages."""
        self.method, self.is_scaled, self._notes = method, is_scaled, False
        self._columns = frozenset(inspect.signature(model_class.forward).parameters)

    def model_inputs(self, batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch without the inputs that only `method` uses."""
        if self.method is None or batch.inputs.keys() <= self._columns:
            return batch
        return replace(batch, inputs={key: value for key, value in batch.inputs.items() if key in self._columns})

    @classmethod
    def of_function(cls, loss: LossFn) -> StepLoss:
        """Make the loss of plain modules from a function of outputs and labels that returns their mean loss."""
        made = cls.__new__(cls)
        made.causal, made._loss, made._smoother, made._own, made._notes = False, loss, None, None, False
        made.share, made._counts, made._counts_items = (1, 1), deque(), False
        made._set_method()
        return made

    @classmethod
    def of(
        cls, config: Any, model_class: Any, model: Any, smoothing: float, own: Callable[..., Tensor] | None
    ) -> StepLoss:
        """Make the loss of a model class, independent of the class that its configuration names.

        model: A model in memory or a source of one. Raises ConfigError if the model overrides its head's loss.
        """
        name = head_name(architecture_of(config), model_class)
        if own is None and not smoothing:
            _check_loss(name, model_class, model)
        config = copy.deepcopy(config)
        config.architectures = [name]
        return cls(config, smoothing, own)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss for back-propagation. logits: [B, S, V] or [B, C]. labels: as for the model."""
        # Counted on the CPU before the step: counting on the GPU would wait for it.
        count = self._counts.popleft() if self._counts else self._count_labels(labels)
        batch = self._inputs.popleft() if self._inputs else None
        micro_batches, total = self.share
        if count == 0:
            return logits.float().sum() * 0.0  # the mean would be NaN; zero still gives the other stages a gradient
        if self.method is not None:
            loss = self._call_method(logits, labels, batch, total)
            return loss * self._micro_batches if self.is_scaled() else loss
        if self._own is not None:
            return self._own_loss(logits, labels, total) * micro_batches
        return self._mean(logits, labels) * (count * micro_batches / total)

    def plain(self, logits: Tensor, labels: Tensor, batch: MicroBatch | None = None) -> Tensor:
        """Return the unweighted mean over a micro-batch's labels, for evaluation. batch: the micro-batch."""
        if self.method is not None:
            return self._call_method(logits, labels, batch, self._count_labels(labels), return_outputs=True)[0]
        return self._mean(logits, labels)

    def _call_method(self, logits: Tensor, labels: Tensor, batch: MicroBatch | None, count: int, **options: Any) -> Any:
        """Call the subclass's `compute_loss` with the micro-batch's inputs on the device of the logits."""
        assert self.method is not None
        given = {} if batch is None else batch.inputs
        inputs = {key: value.to(logits.device, non_blocking=True) for key, value in given.items()}
        inputs["labels"] = labels
        items = torch.full((), count, device=logits.device)
        return self.method(LastStageModel(self.stage, self, logits, dict(inputs)), inputs, items, **options)

    def model_loss(self, logits: Tensor, labels: Tensor, items: Any) -> Tensor:
        """Return the loss as the model's own forward does, normalized by `items` if they are given and it uses them."""
        if items is None or not self._counts_items:
            return self._loss(logits, labels)
        return self._loss(logits, labels) * self._count_labels(labels) / items

    def total_loss(self, logits: Tensor, labels: Tensor, items: Any) -> Tensor:
        """Return the trainer's loss (the user's function, smoothed, or the model's) normalized by `items`."""
        if self._own is not None:
            return self._own(LogitsOutput(logits=logits), labels, num_items_in_batch=items)
        if self._smoother is None:
            return self.model_loss(logits, labels, items)
        mean = self._mean(logits, labels)
        return mean if items is None else mean * self._count_labels(labels) / items

    @property
    def has_function(self) -> bool:
        """True if the user has passed a compute_loss_func."""
        return self._own is not None

    def _mean(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self._own is not None:
            return self._own_loss(logits, labels, self._count_labels(labels))
        if self._smoother is None:
            return self._loss(logits, labels)
        allowed = "0 with floating-point labels, for regression or multi-label classification"
        require(not labels.is_floating_point(), "label_smoothing_factor", self._smoother.epsilon, allowed)
        smoothed: Tensor = self._smoother({"logits": logits}, labels.to(logits.device), shift_labels=self.causal)
        return smoothed

    def set_problem_type(self, config: Any, labels: Tensor | None) -> None:
        """Set `problem_type` of a classifier's configuration, as the model's own loss does; the saved model needs it.

        Args:
            config: Configuration of the model to save; modified unless it has a `problem_type`.
            labels: Labels of a micro-batch.
        """
        if self._notes and config.problem_type is None and labels is not None:
            config.problem_type = infer_problem(config.num_labels, labels)

    def masked_labels(self, stage: Any, batches: Iterable[MicroBatch]) -> list[Tensor]:
        """Return the labels of micro-batches as the loss receives them.

        The first token after left padding is ignored, because a causal model would predict it from padding. No other
        label may be predicted from padding; the user's own loss is not checked, because its ignored labels are unknown.

        Args:
            stage: The last stage.
            batches: Complete micro-batches, with the inputs of the first stage. Those without labels are skipped.

        Raises:
            DataError: If a label is predicted from padding; the error names the sample and the position.
        """
        out = []
        for batch in batches:
            if batch.labels is None:
                continue
            layout = stage.layout(batch.ids, batch.inputs, batch.lengths)
            labels = stage.mask_labels(layout, batch.labels)
            if self._own is None and self.method is None:
                stage.check_labels(layout, labels)
            out.append(labels)
        return out

    def _count_labels(self, labels: Tensor) -> int:
        own = self._own is not None or self.method is not None
        return count_labels(labels, causal=self.causal, own=own)

    def _own_loss(self, logits: Tensor, labels: Tensor, count: int) -> Tensor:
        """Call the user's loss with num_items_in_batch as a tensor, as Trainer does."""
        assert self._own is not None
        # Made on the device, because a copy to a GPU would wait for it.
        return self._own(
            LogitsOutput(logits=logits), labels, num_items_in_batch=torch.full((), count, device=logits.device)
        )

    def hold_inputs(self, batches: list[MicroBatch]) -> None:
        """Keep a step's micro-batches for `method`, if there is one."""
        if self.method is not None:
            self._inputs = deque(batches)

    def set_share(self, labels: list[Tensor], replicas: int, group: Any, device: torch.device) -> None:
        """Set `share` for the next step.

        Args:
            labels: Labels of each micro-batch in order, from `masked_labels`.
            replicas: Number of pipeline replicas.
            group: The last stages of all replicas, each of which must call this; None to count this replica alone.
            device: For the reduction.
        """
        self._counts = deque(self._count_labels(x) for x in labels)
        total = torch.tensor([sum(self._counts)], device=device)
        self._micro_batches = micro_batches = len(labels)
        if group is not None:
            torch.distributed.all_reduce(total, group=group)
            micro_batches *= replicas
        self.share = (micro_batches, max(1, int(total)))
