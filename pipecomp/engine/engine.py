"""A DeepSpeed PipelineEngine whose sends and receives go through compressed links.

DeepSpeed keeps what it is good at (optimizers, precision, data-parallel reduction, checkpoints); this subclass replaces
its instructions for loading, sending and receiving, its schedule, the reduction of tied weights and the global norm.

Shapes: B samples, S tokens with padding, H hidden size.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import engine as deepspeed_pipe
from deepspeed.runtime.pipe import schedule as ds_schedule
from torch import Tensor

from pipecomp.checkpoint.run_id import Run
from pipecomp.cluster.heartbeat import Heartbeat
from pipecomp.config import Config
from pipecomp.data import MicroBatch, TrainLoader, as_micro_batch
from pipecomp.engine.checkpointing import CheckpointingEngine
from pipecomp.engine.export import save_pretrained
from pipecomp.engine.gradient_exchange import GradientExchange
from pipecomp.engine.reduction import ReducingEngine
from pipecomp.engine.schedule import EvalSchedule, TrainSchedule
from pipecomp.errors import DataError, LinkError, SplitError
from pipecomp.schedule.in_flight import InFlight, KeptBytes, free_bytes
from pipecomp.stages.link.boundary import Layout
from pipecomp.stages.link.endpoint import Position
from pipecomp.stages.link.links import Links
from pipecomp.stages.partition.modules import ModuleStage
from pipecomp.stages.partition.planning import SplitPlan


@dataclass(slots=True)
class _Slot:
    """One micro-batch between its forward and its backward: what of it crosses the links from and to this stage."""

    received: Layout
    sent: Layout
    inputs: dict[str, Tensor | None]


def _counting(part: str, instruction: Callable[..., None]) -> Callable[..., None]:
    """The instruction, its time in training counted to `part`; what it waited for messages is counted apart."""

    @functools.wraps(instruction)
    def run(self: PipelineEngine, **place: int) -> None:
        if not self.module.training:
            instruction(self, **place)
            return
        waited, began = self.links.wait_seconds, time.perf_counter()
        with self._seconds.part(part):
            instruction(self, **place)
        waited, ended = self.links.wait_seconds - waited, time.perf_counter()
        number = place.get("micro_batch")
        if part == "backward":  # DeepSpeed's instruction does not say; they come in order
            number, self._backwards = self._backwards, self._backwards + 1
        self._seconds.wait += waited
        if part == "decode":
            self._seconds.decode -= waited
            self.trace.add("wait", began, began + waited, number)
        self.trace.add(part, began + waited, ended, number)

    return run


class PipelineEngine(CheckpointingEngine):
    """Train with `train_batch`, evaluate with `eval_batch`; made by `pipecomp.initialize`.

    DeepSpeed's own signatures hold: see `deepspeed.runtime.pipe.engine.PipelineEngine`.
    """

    def __init__(
        self,
        *,
        pipecomp_config: Config,
        plan: SplitPlan,
        tied_groups: dict[str, Any],
        exchange: GradientExchange | None = None,
        **ds: Any,
    ) -> None:
        """tied_groups: process group of each tied weight that this stage holds, by the name in `plan`.

        exchange: averages gradients where they are compressed; otherwise DeepSpeed does.
        """
        self.pipecomp_config, self.plan = pipecomp_config, plan
        self._slots: dict[int, _Slot] = {}
        self._step_number = 0
        self._on_logits: Callable[[Tensor, Tensor | None], Tensor] | None = None
        self._backwards = 0  # in this step
        self._gradient_wait = 0.0  # in this step, for gradients of all micro-batches but the first
        self._kept: KeptBytes | None = None
        super().__init__(tied_groups=tied_groups, exchange=exchange, **ds)
        self.in_flight = InFlight(pipecomp_config.in_flight, self.stage_id, self.num_stages, self.micro_batches)

    def open_links(self, links: Links, run: Run | None, watch: Heartbeat) -> None:
        """Use these links, for this run where they keep messages; called once by `initialize`.

        watch: over the other ranks.
        """
        self.links, self.run, self.watch, self._watched = links, run, watch, watch.engine
        watch.on_exit = links.close
        prefetching = self.pipecomp_config.store.prefetch > 0
        if links.to_previous is not None and links.environment is not None and prefetching:
            links.to_previous.transport.on_arrival(links.prefetch_arrived)

    def set_loader(self, loader: TrainLoader) -> None:
        """Train on this loader's micro-batches."""
        self._loader = loader
        self.set_dataloader(loader)

    # -- the calls of DeepSpeed's engine

    def train_batch(self, data_iter: Any = None) -> Tensor:
        """One optimizer step over `gradient_accumulation_steps` micro-batches of each replica; the mean loss.

        data_iter: batches for the first and the last stage, with "sample_ids"; the training data otherwise. Raises
        PeerLostError if another rank is gone, and this project's other errors; after any of them the run is over.
        """
        self._step_number = self.global_steps
        with self.propagate_failure():
            if self.run is not None:
                self.run.begin_step()
            began, self._gradient_wait, self._backwards = time.perf_counter(), 0.0, 0
            self.trace.begin_step(self._step_number)
            loss = super().train_batch(data_iter)
            self._adjust_in_flight(time.perf_counter() - began)
            if data_iter is None:
                self._batches_taken += self.micro_batches
            every = self.pipecomp_config.store.drift_check
            if self.run is not None and every is not None and self.global_steps % every == 0:
                self.links.check_drift(self._step_number)
            if self.links.environment is not None:
                committing = time.perf_counter()
                self.links.environment.commit()
                self.trace.add("commit", committing, time.perf_counter())
            self.trace.end_step()
        return loss

    def eval_batch(
        self,
        data_iter: Any,
        *args: Any,
        on_logits: Callable[[Tensor, Tensor | None], Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Mean loss over batches, without touching the message stores; arguments and result as DeepSpeed's.

        on_logits(logits, labels): called on the last stage for every micro-batch in place of the loss function; labels
        may be missing then. The result is the list of what it returned (tensors), on the last stage only.
        """
        if on_logits is not None:
            kwargs.update(compute_loss=False, reduce_output=None)
        self._on_logits = on_logits
        with self.propagate_failure():
            result = super().eval_batch(data_iter, *args, **kwargs)
        self._on_logits = None
        self._evaluations += 1
        return result

    def _adjust_in_flight(self, step_s: float) -> None:
        """All stages of a pipeline look at the longest wait of any of them, and so come to the same."""
        waited_s = self._gradient_wait
        if self.in_flight.observing:
            seen = torch.tensor([waited_s, step_s, -self.in_flight.limit], device=self.device)
            dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=self.grid.get_pipe_parallel_group())
            waited_s, step_s, limit = seen.tolist()
            self.in_flight.limit = -int(limit)
        self.in_flight.observe(waited_s, step_s)

    def _train_schedule(self) -> TrainSchedule:
        return TrainSchedule(self.micro_batches, self.num_stages, self.stage_id, self.in_flight.value)

    def _inference_schedule(self, micro_batches: int) -> EvalSchedule:
        return EvalSchedule(micro_batches=micro_batches, stages=self.num_stages, stage_id=self.stage_id)

    # -- instructions

    def _at(self, micro_batch: int) -> Position:
        return Position(self._step_number if self.module.training else self._evaluations, micro_batch)

    def _exec_load(self, buffer_id: int, micro_batch: int) -> None:
        batch = self._load(micro_batch)
        if self.is_first_stage():
            layout = self.stage.layout(batch.ids, batch.inputs)
            inputs: dict[str, Tensor | None] = {k: v.to(self.device) for k, v in batch.inputs.items()}
            self._slots[buffer_id] = _Slot(layout, layout, inputs)
            self._prefetch_next()
        if self.is_last_stage():
            layout = self._slots[buffer_id].received
            if layout.ids != batch.ids:
                raise DataError(
                    f"step {self._step_number}, micro-batch {micro_batch}: the first stage sent samples "
                    f"{list(layout.ids)}, the labels here are of samples {list(batch.ids)}: give every rank the same "
                    "data in the same order"
                )
            if batch.labels is None and self._compute_loss:
                raise DataError(f"micro-batch {micro_batch} has no labels: the collate_fn must return 'labels'")
            self.pipe_buffers["labels"][buffer_id] = None if batch.labels is None else batch.labels.to(self.device)

    def _load(self, micro_batch: int) -> MicroBatch:
        try:
            batch = self._next_batch()
        except StopIteration:
            raise DataError(f"the data ended before micro-batch {micro_batch} of this step") from None
        if batch is None:
            raise DataError("no data: give training_data to initialize, or data_iter to this call")
        known = self.module.training and self.pipecomp_config.activations.method == "aqsgd"
        return as_micro_batch(batch, number_from=None if known else micro_batch << 32)

    def _exec_forward_pass(self, buffer_id: int, micro_batch: int) -> None:
        self.tput_timer.start()
        slot = self._slots[buffer_id]
        with self._counting_memory(slot.received):
            outputs = DeepSpeedEngine.forward(self, slot.inputs)
        if not self.is_last_stage():
            self.pipe_buffers["outputs"][buffer_id] = outputs["hidden_states"]
            return
        if self._on_logits is not None:
            self.loss = self._on_logits(outputs, self.pipe_buffers["labels"][buffer_id])
        elif self._compute_loss and self.module.loss_fn is not None:
            self.loss = self.module.loss_fn(outputs, self.pipe_buffers["labels"][buffer_id])
        else:
            self.loss = outputs
        if self.eval_return_logits:
            self.outputs = outputs
        self.fwd_outputs.append(self.loss.detach())
        loss = self.loss.detach()
        self.total_loss: Tensor | None = loss.clone() if self.total_loss is None else self.total_loss + loss

    @contextlib.contextmanager
    def _counting_memory(self, layout: Layout) -> Iterator[None]:
        """The first forward in training shows what one more micro-batch in flight would keep."""
        if self._kept is not None or not self.module.training:
            yield
            return
        self._kept = KeptBytes()
        with self._kept.counting():
            yield
        # Checkpointed blocks keep their inputs where autograd does not show them.
        values = self.stage.kept_to_recompute(len(layout.ids), layout.tokens)
        self._kept.bytes += values * next(self.stage.parameters()).element_size()
        self.in_flight.allow(self._kept.bytes, free_bytes(self.device))

    def _exec_send_activation(self, buffer_id: int, micro_batch: int) -> None:
        assert self.links.to_next is not None
        training = self.module.training
        layout = self._slots[buffer_id].sent
        x_BSH = self.pipe_buffers["outputs"][buffer_id]
        self.links.to_next.send_activation(x_BSH, layout, self._at(micro_batch), training=training)

    def _exec_recv_activation(self, buffer_id: int, micro_batch: int) -> None:
        assert self.links.to_previous is not None
        training = self.module.training
        x_BSH, layout = self.links.to_previous.recv_activation(self._at(micro_batch), training=training)
        if x_BSH.shape[-1] != self.stage.hidden_size:
            raise LinkError(
                f"link {self.links.to_previous.index}: activations of width {x_BSH.shape[-1]} for a stage of width "
                f"{self.stage.hidden_size}: the ranks have different models"
            )
        x_BSH.requires_grad_(training)
        inputs = {"hidden_states": x_BSH, "attention_mask": layout.mask_BS(self.device)}
        self._slots[buffer_id] = _Slot(layout, self.stage.next_layout(layout), inputs)

    def _exec_send_grad(self, buffer_id: int, micro_batch: int) -> None:
        assert self.links.to_previous is not None
        slot = self._slots.pop(buffer_id)
        x_BSH = slot.inputs["hidden_states"]
        assert x_BSH is not None
        assert x_BSH.grad is not None
        self.links.to_previous.send_gradient(x_BSH.grad, slot.received, self._at(micro_batch))

    def _exec_recv_grad(self, buffer_id: int, micro_batch: int) -> None:
        assert self.links.to_next is not None
        waited = self.links.to_next.stats.wait_seconds
        self.grad_layer = self.links.to_next.recv_gradient(self._slots[buffer_id].sent, self._at(micro_batch))
        if micro_batch:  # the first one's way there and back is waited for at any number in flight
            self._gradient_wait += self.links.to_next.stats.wait_seconds - waited

    _STOCK = deepspeed_pipe.PipelineEngine._INSTRUCTION_MAP
    _INSTRUCTION_MAP = {  # noqa: RUF012 (DeepSpeed's name and form)
        ds_schedule.LoadMicroBatch: _exec_load,
        ds_schedule.ForwardPass: _counting("forward", _exec_forward_pass),
        ds_schedule.BackwardPass: _counting("backward", _STOCK[ds_schedule.BackwardPass]),
        ds_schedule.SendActivation: _counting("encode", _exec_send_activation),
        ds_schedule.RecvActivation: _counting("decode", _exec_recv_activation),
        ds_schedule.SendGrad: _counting("encode", _exec_send_grad),
        ds_schedule.RecvGrad: _counting("decode", _exec_recv_grad),
        ds_schedule.ReduceTiedGrads: _counting("reduce", ReducingEngine._exec_reduce_tied_grads),
        ds_schedule.ReduceGrads: _counting("reduce", ReducingEngine._exec_reduce_grads),
        ds_schedule.OptimizerStep: _counting("update", _STOCK[ds_schedule.OptimizerStep]),
    }

    # -- message stores

    def _prefetch_next(self) -> None:
        """On the first stage: load the messages of the micro-batches that come next."""
        store = self.links.to_next.store if self.links.to_next is not None else None
        if store is None or self._loader is None or not self.module.training:
            return
        for ahead in range(self.pipecomp_config.store.prefetch):
            store.prefetch(self._loader.upcoming(ahead))

    # -- saving

    def save_pretrained(self, folder: str) -> None:
        """Write the model as a Hugging Face folder that `from_pretrained` reads; every rank must call this.

        The folder is complete on the machine of rank 0, whether or not the machines share a disk.
        """
        if isinstance(self.stage, ModuleStage):
            raise SplitError("a model of plain modules has no Hugging Face folder: save each stage's state_dict()")
        owners = [self.grid._topo.get_rank(pipe=stage, data=0) for stage in range(self.num_stages)]
        with self.propagate_failure():
            save_pretrained(self.stage, folder, owners=owners)
