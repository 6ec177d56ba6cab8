"""What one stage does with a micro-batch: load, compute, send and receive, as DeepSpeed's instructions ask for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from pipecomp.data import MicroBatch, as_micro_batch
from pipecomp.errors import DataError, LinkError, require
from pipecomp.stages.link.boundary import Layout, gradient_unit
from pipecomp.stages.link.endpoint import Position
from pipecomp.stages.partition.splitting import known_masks

OnLogits = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(slots=True)
class _Slot:
    """One micro-batch between its forward and its backward: what of it crosses the links from and to this stage."""

    received: Layout
    sent: Layout
    inputs: dict[str, Tensor | None]


class StageWork:
    """The instructions of one stage but for its backward pass, which is DeepSpeed's.

    engine: whose links, stage and buffers. Shapes: B samples, S tokens with padding, H hidden size.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._slots: dict[int, _Slot] = {}
        self._on_logits: OnLogits | None = None

    @contextmanager
    def handing_over(self, on_logits: OnLogits | None) -> Iterator[None]:
        """While inside, the last stage gives its logits and labels to this function in place of the loss's."""
        self._on_logits = on_logits
        try:
            yield
        finally:
            self._on_logits = None

    def _at(self, micro_batch: int) -> Position:
        engine = self._engine
        return Position(engine.global_steps if engine.module.training else engine.progress.evaluations, micro_batch)

    def load(self, buffer_id: int, micro_batch: int) -> None:
        """Take the next batch: inputs on the first stage, labels on the last one."""
        engine = self._engine
        batch = self._next_batch(micro_batch)
        if engine.is_first_stage():
            self._check_size(len(batch.ids), micro_batch)
            layout = engine.stage.layout(batch.ids, batch.inputs)
            inputs: dict[str, Tensor | None] = {k: start_copying(v, engine.device) for k, v in batch.inputs.items()}
            self._slots[buffer_id] = _Slot(layout, layout, inputs)
            self._prefetch_next()
        if engine.is_last_stage():
            layout = self._slots[buffer_id].received
            if layout.ids != batch.ids:
                raise DataError(
                    f"step {engine.global_steps}, micro-batch {micro_batch}: the first stage sent samples "
                    f"{list(layout.ids)}, the labels here are of samples {list(batch.ids)}: give every rank the same "
                    "data in the same order"
                )
            if batch.labels is None and engine._compute_loss:
                raise DataError(f"micro-batch {micro_batch} has no labels: the collate_fn must return 'labels'")
            engine.pipe_buffers["labels"][buffer_id] = None
            if batch.labels is not None:
                labels = engine.stage.trained_labels(layout, batch.labels)
                if not engine.module.has_own_loss:  # what that ignores is not known here
                    engine.stage.check_labels(layout, labels)
                engine.pipe_buffers["labels"][buffer_id] = start_copying(labels, engine.device)

    def _next_batch(self, micro_batch: int) -> MicroBatch:
        engine = self._engine
        try:
            batch = engine._next_batch()
        except StopIteration:
            raise DataError(f"the data ended before micro-batch {micro_batch} of this step") from None
        if batch is None:
            raise DataError("no data: give training_data to initialize, or data_iter to this call")
        config = engine.pipecomp_config
        known = engine.module.training and config.activations.method == "aqsgd" and config.store.clusters is None
        return as_micro_batch(batch, number_from=None if known else micro_batch << 32)

    def _check_size(self, samples: int, micro_batch: int) -> None:
        """DataError for more samples than the next stage takes, which would end the run there."""
        engine = self._engine
        link = engine.links.to_next
        if link is None or link.bounds is None:
            return
        training = engine.module.training
        most = link.bounds.samples if training else link.bounds.most_samples
        if samples > most:
            kind, remedy = "evaluation", f"or call engine.allow_evaluation({samples}) on every rank before"
            if training:
                kind, remedy = "training", "as the configuration's train_micro_batch_size_per_gpu says"
            raise DataError(
                f"micro-batch {micro_batch} of {kind} has {samples} samples, allowed: at most {most}: make it smaller, "
                f"{remedy}"
            )

    def forward(self, buffer_id: int, micro_batch: int) -> None:
        """Run this rank's stage, and on the last one the loss."""
        engine = self._engine
        engine.tput_timer.start()
        slot = self._slots[buffer_id]
        known = known_masks(full=slot.received.full, device=engine.device)
        with engine.run_ahead.counting_memory(slot.received), known:
            outputs = DeepSpeedEngine.forward(engine, slot.inputs)
        if not engine.is_last_stage():
            engine.pipe_buffers["outputs"][buffer_id] = outputs["hidden_states"]
            return
        if self._on_logits is not None:
            engine.loss = self._on_logits(outputs, engine.pipe_buffers["labels"][buffer_id])
        elif engine._compute_loss and engine.module.loss_fn is not None:
            engine.loss = engine.module.loss_fn(outputs, engine.pipe_buffers["labels"][buffer_id])
            allowed = "a function of logits and labels that returns the loss as a tensor"
            require(isinstance(engine.loss, Tensor), "loss_fn", engine.loss, allowed)
        else:
            engine.loss = outputs
        if engine.eval_return_logits:
            engine.outputs = outputs
        engine.fwd_outputs.append(engine.loss.detach())
        loss = engine.loss.detach()
        engine.total_loss = loss.clone() if engine.total_loss is None else engine.total_loss + loss

    def send_activation(self, buffer_id: int, micro_batch: int) -> None:
        """Send the forward's output to the next stage."""
        engine = self._engine
        link = engine.links.to_next
        assert link is not None
        x_BSH, layout = engine.pipe_buffers["outputs"][buffer_id], self._slots[buffer_id].sent
        link.send_activation(x_BSH, layout, self._at(micro_batch), training=engine.module.training)

    def recv_activation(self, buffer_id: int, micro_batch: int) -> None:
        """Take the forward's input from the stage before."""
        engine = self._engine
        link = engine.links.to_previous
        assert link is not None
        training = engine.module.training
        x_BSH, layout = link.recv_activation(self._at(micro_batch), training=training)
        if x_BSH.shape[-1] != engine.stage.hidden_size:
            raise LinkError(
                f"link {link.index}: activations of width {x_BSH.shape[-1]} for a stage of width "
                f"{engine.stage.hidden_size}: the ranks have different models"
            )
        x_BSH.requires_grad_(training)
        inputs = {"hidden_states": x_BSH, "attention_mask": layout.mask_BS(engine.device)}
        self._slots[buffer_id] = _Slot(layout, engine.stage.next_layout(layout), inputs)

    def send_grad(self, buffer_id: int, micro_batch: int) -> None:
        """Send the input's gradient to the stage before."""
        engine = self._engine
        link = engine.links.to_previous
        assert link is not None
        slot = self._slots.pop(buffer_id)
        x_BSH = slot.inputs["hidden_states"]
        assert x_BSH is not None
        assert x_BSH.grad is not None
        link.send_gradient(x_BSH.grad, slot.received, self._at(micro_batch), unit=self._unit(slot.received))

    def recv_grad(self, buffer_id: int, micro_batch: int) -> None:
        """Take the output's gradient from the next stage."""
        engine = self._engine
        link = engine.links.to_next
        assert link is not None
        sent = self._slots[buffer_id].sent
        with engine.run_ahead.waiting(micro_batch, link.stats):
            engine.grad_layer = link.recv_gradient(sent, self._at(micro_batch), unit=self._unit(sent))

    def _unit(self, layout: Layout) -> float:
        """Of gradients that cross a link, see `gradient_unit`."""
        engine = self._engine
        scale = float(getattr(engine.optimizer, "cur_scale", 1.0))
        return gradient_unit(engine.step_samples or len(layout.ids) * engine.micro_batches, scale)

    def _prefetch_next(self) -> None:
        """On the first stage: load the cached activations of the micro-batches that come next."""
        engine = self._engine
        store = None if engine.links.to_next is None else engine.links.to_next.store
        if store is None or engine._loader is None or not engine.module.training:
            return
        for ahead in range(engine.pipecomp_config.store.prefetch):
            store.prefetch(engine._loader.upcoming(ahead))


def start_copying(x: Tensor, device: torch.device) -> Tensor:
    """Give x on the stage's device, to which it is copied behind what was asked for before; nobody waits for it.

    With pageable memory the driver may wait for the GPU, to which the host would no longer run ahead; it does where the
    system gives no more than that, of which `CudaStaging` warns.
    """
    if device.type == "cuda" and x.device.type == "cpu":
        with suppress(RuntimeError):
            x = x.pin_memory()
    return x.to(device, non_blocking=True)
