"""The order of a stage's work (`order`) as DeepSpeed's instructions.

K stages, M micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)

from pipecomp.schedule.order import Work, forward_work, train_order

_INSTRUCTIONS = {
    "receive activation": RecvActivation,
    "load": LoadMicroBatch,
    "forward": ForwardPass,
    "send activation": SendActivation,
    "receive gradient": RecvGrad,
    "send gradient": SendGrad,
}


class _StageSchedule(PipeSchedule):
    def _instructions(self, work: Iterable[Work]) -> list[PipeInstruction]:
        found: list[PipeInstruction] = []
        for what, micro_batch in work:
            buffer_id = micro_batch % self.num_pipe_buffers()
            if what == "backward":  # DeepSpeed's own, which takes nothing else
                found.append(BackwardPass(buffer_id=buffer_id))
            else:
                found.append(_INSTRUCTIONS[what](buffer_id=buffer_id, micro_batch=micro_batch))
        return found


class TrainSchedule(_StageSchedule):
    """One optimizer step: M forwards and backwards, then the reductions and the update.

    in_flight: forwards that run ahead of their backwards; 1F1B's number (stages from here to the end) if None.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int, in_flight: int | None = None) -> None:
        super().__init__(micro_batches, stages, stage_id)
        self._in_flight = in_flight or stages - stage_id

    def num_pipe_buffers(self) -> int:
        """Micro-batches whose activations this stage holds at once."""
        return max(1, min(self.micro_batches, self._in_flight))

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield lists of instructions, one for each forward or backward."""
        for work in train_order(self.stage_id, self.stages, self.micro_batches, self.num_pipe_buffers()):
            yield self._instructions(work)
        yield [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]


class EvalSchedule(_StageSchedule):
    """Forwards only."""

    def num_pipe_buffers(self) -> int:
        """Micro-batches held at once."""
        return 1

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield lists of instructions, one for each forward."""
        for micro_batch in range(self.micro_batches):
            yield self._instructions(forward_work(self.stage_id, self.stages, micro_batch))
