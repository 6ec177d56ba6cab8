"""The instructions of one stage for one micro-batch: load, forward, send and receive. The backward is DeepSpeed's.

Shapes: B samples, S tokens with padding, H hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import chain

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from pipecomp.codecs.wire import BatchDigest
from pipecomp.data import IGNORED, MicroBatch, as_micro_batch
from pipecomp.engine.schedule import InFlightControl
from pipecomp.errors import DataError, LinkError, require
from pipecomp.interfaces import EngineState, StageContext
from pipecomp.kernels import ops
from pipecomp.stages.link.endpoint import Position
from pipecomp.stages.link.layout import Layout, gradient_unit
from pipecomp.stages.partition.stage import assume_masks
from pipecomp.utils.activity import waiting_for_data

_log = logging.getLogger(__name__)
OnLogits = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(slots=True)
class _InFlightBatch:
    """A micro-batch between its forward and its backward: its layout on both links, and the forward's inputs."""

    received: Layout
    sent: Layout
    inputs: dict[str, Tensor | None]


class StageWork:
    """Executes the instructions of one stage but for the backward.

    Args:
        context: Context of the stage.
        engine: Its links, data and buffers.
        control: Observes waits and memory.
    """

    def __init__(self, context: StageContext, engine: EngineState, control: InFlightControl) -> None:
        self._context, self._engine, self._control = context, engine, control
        self._batches: dict[int, _InFlightBatch] = {}  # by buffer
        self._on_logits: OnLogits | None = None
        a, store = context.settings.activations, context.settings.store
        self._needs_ids = a.method == "aqsgd" and store.clusters is None
        self._labels_of_step, self._warned = 0, False
        lowest = context.plan.lowest_trained
        self._has_backward, self._sends_gradients = context.stage_id >= lowest, context.stage_id > lowest

    @contextmanager
    def using(self, on_logits: OnLogits | None) -> Iterator[None]:
        """In the body, pass the last stage's logits and labels to `on_logits` instead of the loss function."""
        self._on_logits = on_logits
        try:
            yield
        finally:
            self._on_logits = None

    def _position(self, micro_batch: int) -> Position:
        engine = self._engine
        return Position(engine.global_steps if engine.module.training else engine.progress.evaluations, micro_batch)

    def load(self, buffer_id: int, micro_batch: int) -> None:
        """Load the next batch: inputs on the first stage, labels on the last one."""
        engine, stage, device = self._engine, self._context.stage, self._context.device
        batch = self._next_batch(micro_batch)
        if engine.is_first_stage():
            self._check_size(batch, micro_batch)
            layout = replace(stage.layout(batch.ids, batch.inputs, batch.lengths), digest=batch_digest(batch))
            inputs: dict[str, Tensor | None] = {k: copy_async(v, device) for k, v in batch.inputs.items()}
            if layout.packed:
                inputs["cu_seq_lens"] = layout.cu_seq_lens()
            self._batches[buffer_id] = _InFlightBatch(layout, layout, inputs)
            self._prefetch_next()
        if engine.is_last_stage():
            layout = self._batches[buffer_id].received
            if layout.ids != batch.ids:
                raise DataError(
                    f"step {engine.global_steps}, micro-batch {micro_batch}: the first stage sent samples "
                    f"{list(layout.ids)}, the labels here are of samples {list(batch.ids)}: give every rank the same "
                    "data in the same order"
                )
            own = None if batch.lengths is None else tuple(chain.from_iterable(batch.lengths))
            if layout.packed != (own is not None) or (own is not None and layout.counts != own):
                raise DataError(
                    f"step {engine.global_steps}, micro-batch {micro_batch}: the first stage sent "
                    f"{'packed samples' if layout.packed else 'samples'} of {list(layout.counts)} tokens, the labels "
                    f"here are of {'samples in rows of their own' if own is None else list(own)}: give every rank the "
                    "same data and collate_fn"
                )
            self._check_digest(layout, batch, micro_batch)
            if batch.labels is None and engine._compute_loss:
                raise DataError(f"micro-batch {micro_batch} has no labels: the collate_fn must return 'labels'")
            engine.pipe_buffers["labels"][buffer_id] = None
            if batch.labels is not None:
                labels = stage.mask_labels(layout, batch.labels)
                if not engine.module.has_own_loss:  # a custom loss may ignore any label
                    stage.check_labels(layout, labels)
                    self._count_labels(labels, micro_batch)
                engine.pipe_buffers["labels"][buffer_id] = copy_async(labels, device)

    def _check_digest(self, layout: Layout, batch: MicroBatch, micro_batch: int) -> None:
        """Raise DataError if the first stage loaded other tokens or labels of the same samples than this one."""
        for key, sent, own in zip(("tokens", "labels"), layout.digest, batch_digest(batch), strict=True):
            if sent and own and sent != own:
                raise DataError(
                    f"step {self._engine.global_steps}, micro-batch {micro_batch}, samples {list(layout.ids)}: the "
                    f"first stage loaded other {key} than this one (CRC-32 {sent:#010x} there, {own:#010x} here). Let "
                    "dataset and collator draw from the generators of random, numpy.random and torch, which are seeded "
                    "alike on both stages, and not from generators of their own, hash(), the time or os.urandom"
                )

    def _count_labels(self, labels: Tensor, micro_batch: int) -> None:
        """Warn once of a training step without a label on this replica: its loss is 0 and its gradient too."""
        engine = self._engine
        if self._warned or not engine.module.training or labels.device.type != "cpu":  # reading a GPU's waits for it
            return
        if micro_batch == 0:
            self._labels_of_step = 0
        self._labels_of_step += int((labels != IGNORED).sum())
        if micro_batch == engine.micro_batches - 1 and self._labels_of_step == 0:
            self._warned = True
            _log.warning(
                "step %d has no label to learn from: all labels of its %d micro-batches are %d. Its loss is 0. This is "
                "not reported again",
                engine.global_steps + 1,
                engine.micro_batches,
                IGNORED,
            )

    def _next_batch(self, micro_batch: int) -> MicroBatch:
        engine = self._engine
        try:
            with waiting_for_data(engine.data_iterator):
                batch = engine._next_batch()
        except StopIteration:
            raise DataError(f"the data ended before micro-batch {micro_batch} of this step") from None
        if batch is None:
            raise DataError("no data: pass training_data to initialize, or data_iter to this call")
        needs_ids = self._engine.module.training and self._needs_ids
        return as_micro_batch(batch, number_from=None if needs_ids else micro_batch << 32)

    def _check_size(self, batch: MicroBatch, micro_batch: int) -> None:
        """Raise DataError for more samples than the next stage accepts, where they would end the run."""
        link, training = self._engine.links.to_next, self._engine.module.training
        if link is None or link.limits is None:
            return
        packed, samples = batch.lengths is not None, len(batch.ids)
        most = link.limits.allowed_samples(packed=packed, training=training)
        if samples > most:
            kind, remedy = "evaluation", f"or call engine.allow_evaluation({samples}) on every rank before"
            if training:
                kind, remedy = "training", "see the configuration's train_micro_batch_size_per_gpu"
            if packed:
                remedy = f"or call engine.allow_documents({samples}) on every rank before"
            raise DataError(
                f"micro-batch {micro_batch} of {kind} has {samples} {'packed samples' if packed else 'samples'}, "
                f"allowed: at most {most}: make it smaller, {remedy}"
            )

    def forward(self, buffer_id: int, micro_batch: int) -> None:
        """Run this rank's stage, and on the last one the loss."""
        engine = self._engine
        engine.tput_timer.start()
        batch = self._batches[buffer_id]
        layout = batch.received
        masks = assume_masks(full=layout.full, device=self._context.device, packed=layout.packed)
        graph = nullcontext() if self._has_backward else torch.no_grad()
        with self._control.measuring_memory(batch.received), masks, graph:
            outputs = DeepSpeedEngine.forward(engine, batch.inputs)
        if not engine.is_last_stage():
            x_BSH, stage = outputs["hidden_states"], self._context.stage
            # A part that stays in float32 may return it.
            engine.pipe_buffers["outputs"][buffer_id] = x_BSH.to(stage.dtype) if stage.float32_parameters else x_BSH
            return
        labels = engine.pipe_buffers["labels"][buffer_id]
        if self._on_logits is not None:
            engine.loss = self._on_logits(outputs, labels)
        elif engine._compute_loss and engine.module.loss_fn is not None:
            engine.loss = engine.module.loss_fn(outputs, labels)
            allowed = "a function of logits and labels that returns the loss as a tensor"
            require(isinstance(engine.loss, Tensor), "loss_fn", engine.loss, allowed)
        else:
            engine.loss = outputs
        if engine.eval_return_logits:
            engine.outputs = outputs
        loss = engine.loss.detach()
        engine.fwd_outputs.append(loss)
        engine.total_loss = loss.clone() if engine.total_loss is None else engine.total_loss + loss

    def send_activation(self, buffer_id: int, micro_batch: int) -> None:
        """Send the forward's output to the next stage."""
        engine, link = self._engine, self._engine.links.to_next
        assert link is not None
        x_BSH, layout = engine.pipe_buffers["outputs"][buffer_id], self._batches[buffer_id].sent
        link.send_activation(x_BSH, layout, self._position(micro_batch), training=engine.module.training)

    def recv_activation(self, buffer_id: int, micro_batch: int) -> None:
        """Receive the forward's input from the stage before."""
        stage, link = self._context.stage, self._engine.links.to_previous
        assert link is not None
        training = self._engine.module.training
        x_BSH, layout = link.recv_activation(self._position(micro_batch), training=training)
        if x_BSH.shape[-1] != stage.hidden_size:
            raise LinkError(
                f"link {link.index}: activations of width {x_BSH.shape[-1]} for a stage of width {stage.hidden_size}: "
                "the ranks have different models"
            )
        x_BSH.requires_grad_(training and self._sends_gradients)
        device = self._context.device
        inputs = {"hidden_states": x_BSH, "attention_mask": layout.mask_BS(device)}
        if layout.packed:
            inputs |= {"position_ids": layout.position_ids(device), "cu_seq_lens": layout.cu_seq_lens()}
        self._batches[buffer_id] = _InFlightBatch(layout, stage.next_layout(layout), inputs)

    def send_grad(self, buffer_id: int, micro_batch: int) -> None:
        """Send the gradient of the input to the stage before."""
        link = self._engine.links.to_previous
        assert link is not None
        batch = self._batches.pop(buffer_id)
        x_BSH = batch.inputs["hidden_states"]
        assert x_BSH is not None
        assert x_BSH.grad is not None
        unit = self._gradient_unit(batch.received)
        link.send_gradient(x_BSH.grad, batch.received, self._position(micro_batch), unit=unit)

    def recv_grad(self, buffer_id: int, micro_batch: int) -> None:
        """Receive the gradient of the output from the next stage."""
        link = self._engine.links.to_next
        assert link is not None
        layout = self._batches[buffer_id].sent
        with self._control.waiting(micro_batch, link.stats):
            unit = self._gradient_unit(layout)
            self._engine.grad_layer = link.recv_gradient(layout, self._position(micro_batch), unit=unit)

    def _gradient_unit(self, layout: Layout) -> float:
        engine = self._engine
        scale = float(getattr(engine.optimizer, "cur_scale", 1.0))
        return gradient_unit(engine.step_samples or len(layout.ids) * engine.micro_batches, scale)

    def _prefetch_next(self) -> None:
        """On the first stage: load the cached activations of the next micro-batches."""
        engine = self._engine
        store = None if engine.links.to_next is None else engine.links.to_next.store
        if store is not None and engine.loader is not None and engine.module.training:
            for ahead in range(self._context.settings.store.prefetch):
                store.prefetch(engine.loader.upcoming(ahead))


def batch_digest(batch: MicroBatch) -> BatchDigest:
    """Return the CRC-32 of a micro-batch's tokens and labels.

    0 for what there is not, for images, and for tensors on a GPU, where reading waits for all work queued before.
    """

    def crc(x: Tensor | None) -> int:
        if x is None or x.device.type != "cpu":
            return 0
        return ops.crc32(x.detach()) or 1

    return BatchDigest(crc(batch.inputs.get("input_ids")), crc(batch.labels))


def copy_async(x: Tensor, device: torch.device) -> Tensor:
    """Copy x to the stage's device behind the work queued before; the host does not wait.

    From pageable memory the driver may wait for the GPU, and the host could no longer run ahead. That happens if the
    system grants no more pinned memory, of which `CudaStaging` warns.
    """
    if device.type == "cuda" and x.device.type == "cpu":
        with suppress(RuntimeError):
            x = x.pin_memory()
    return x.to(device, non_blocking=True)
