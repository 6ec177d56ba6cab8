"""`pipecomp.schedule` as DeepSpeed's instructions, and the number of micro-batches in flight during training.

K stages, M micro-batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule as ds

from pipecomp.distributed.rendezvous import ranks_here
from pipecomp.interfaces import StageContext
from pipecomp.schedule import InFlight, SavedTensorBytes, StageAction, forward_actions, train_order
from pipecomp.stages.link.layout import Layout
from pipecomp.stats import LinkStats
from pipecomp.utils.cgroups import free_bytes

_INSTRUCTIONS = {
    "receive activation": ds.RecvActivation,
    "load": ds.LoadMicroBatch,
    "forward": ds.ForwardPass,
    "send activation": ds.SendActivation,
    "receive gradient": ds.RecvGrad,
    "send gradient": ds.SendGrad,
}


class _StageSchedule(ds.PipeSchedule):
    def _instructions(self, actions: Iterable[StageAction]) -> list[ds.PipeInstruction]:
        instructions: list[ds.PipeInstruction] = []
        for kind, micro_batch in actions:
            buffer_id = micro_batch % self.num_pipe_buffers()
            if kind == "backward":  # executed by DeepSpeed, which accepts no other argument
                instructions.append(ds.BackwardPass(buffer_id=buffer_id))
            else:
                instructions.append(_INSTRUCTIONS[kind](buffer_id=buffer_id, micro_batch=micro_batch))
        return instructions


class TrainSchedule(_StageSchedule):
    """One optimizer step: M forwards and backwards, then the reductions and the update.

    in_flight: forwards that run ahead of their backwards. Default: 1F1B's number, stages from here to the end.
    lowest: `SplitPlan.lowest_trained`; the stages before it have no backwards.
    """

    def __init__(
        self, micro_batches: int, stages: int, stage_id: int, in_flight: int | None = None, lowest: int = 0
    ) -> None:
        super().__init__(micro_batches, stages, stage_id)
        self._in_flight, self._lowest = in_flight or stages - stage_id, lowest

    def num_pipe_buffers(self) -> int:
        """Micro-batches whose activations this stage holds at the same time."""
        return max(1, min(self.micro_batches, self._in_flight))

    def steps(self) -> Iterator[list[ds.PipeInstruction]]:
        """Yield the instructions of each forward or backward, then those of the update."""
        in_flight = self.num_pipe_buffers()
        for actions in train_order(self.stage_id, self.stages, self.micro_batches, in_flight, self._lowest):
            yield self._instructions(actions)
        yield [ds.ReduceTiedGrads(), ds.ReduceGrads(), ds.OptimizerStep()]


class EvalSchedule(_StageSchedule):
    """Forwards only."""

    def num_pipe_buffers(self) -> int:
        """Micro-batches whose activations this stage holds at the same time."""
        return 1

    def steps(self) -> Iterator[list[ds.PipeInstruction]]:
        """Yield the instructions of each forward."""
        for micro_batch in range(self.micro_batches):
            yield self._instructions(forward_actions(self.stage_id, self.stages, micro_batch))


class InFlightControl:
    """Adjusts the micro-batches in flight of a stage after every step, by its waits and its free memory.

    Attributes:
        in_flight: The number.
        saved: Bytes that one micro-batch saves for its backward; None before the first forward in training.
        sharing: Ranks that share this rank's GPU, or without a GPU its machine.
    """

    def __init__(self, context: StageContext, setting: int | str, micro_batches: int) -> None:
        self._context = context
        lowest = context.plan.lowest_trained
        self.in_flight = InFlight(setting, context.stage_id, context.num_stages, micro_batches, lowest)
        self.saved: SavedTensorBytes | None = None
        self.sharing = ranks_here() or 1
        self._gradient_wait_s = 0.0  # in this step, for gradients of all micro-batches but the first
        self._idle: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # begin and end of a GPU's idle times

    def begin_step(self) -> None:
        """Reset the waits."""
        self._gradient_wait_s = 0.0
        self._idle.clear()

    @contextlib.contextmanager
    def waiting(self, micro_batch: int, stats: LinkStats) -> Iterator[None]:
        """Count the wait for a gradient in the body. stats: of its link, which count waits of the host.

        Note: [Waits on a GPU] The host only queues work and waits while its GPU computes, so its waits say nothing.
        What counts is the time in which the GPU is idle, between two events around the wait.
        """
        before = stats.wait_seconds
        begin = self._gpu_event()
        yield
        end = self._gpu_event()
        if not micro_batch:  # any number in flight waits for the first round trip
            return
        if begin is not None and end is not None:
            self._idle.append((begin, end))
        else:
            self._gradient_wait_s += stats.wait_seconds - before

    def _gpu_event(self) -> torch.cuda.Event | None:
        """An event after all work queued on the GPU so far; None without a GPU, or if no one observes."""
        device = self._context.device
        if device.type != "cuda" or not self.in_flight.observing:
            return None
        with torch.cuda.device(device):
            event = torch.cuda.Event(enable_timing=True, blocking=True)
            event.record(torch.cuda.current_stream(device))
        return event

    def _waited_s(self) -> float:
        if not self._idle:
            return self._gradient_wait_s
        with torch.cuda.device(self._context.device):
            self._idle[-1][1].synchronize()
            return sum(begin.elapsed_time(end) for begin, end in self._idle) / 1e3

    def end_step(self, step_s: float) -> None:
        """Choose the number for the next step from the longest wait of any stage; every stage must call this."""
        waited_s = 0.0
        if self.in_flight.observing:
            values = [self._waited_s(), step_s, -self.in_flight.limit]
            maxima = torch.tensor(values, device=self._context.device, dtype=torch.float32)
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=self._context.grid.get_pipe_parallel_group())
            waited_s, step_s, limit = maxima.tolist()
            self.in_flight.limit = -int(limit)
        self.in_flight.observe(waited_s, step_s)

    @contextlib.contextmanager
    def measuring_memory(self, layout: Layout) -> Iterator[None]:
        """Around a forward: in the first one in training, limit the number by the memory that the forward takes."""
        stage = self._context.stage
        keeps = self._context.stage_id >= self._context.plan.lowest_trained
        if self.saved is not None or not stage.training or not keeps:
            yield
            return
        self.saved = SavedTensorBytes(stage.parameters())
        with self.saved.counting():
            yield
        # Checkpointed blocks save their inputs where autograd's hooks do not see them.
        values = stage.count_checkpointed_values(layout.batch_size, layout.tokens)
        self.saved.bytes += values * stage.dtype.itemsize
        self.in_flight.limit_by_memory(self.saved.bytes, free_bytes(self._context.device, self.sharing))
