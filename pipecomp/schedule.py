"""The order of a stage's work within one training step or evaluation.

1F1B with eager sends: a stage runs as many forwards ahead as there are stages from it to the end (or more, see
`in_flight`), then one backward and one forward in turn. What is sent leaves as soon as it exists, and a receive waits
only for what arrives: transports take messages in at any time, so no order of the two ends can block.

K stages, M micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator

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


class _StageSchedule(PipeSchedule):
    def _forward(self, micro_batch: int) -> list[PipeInstruction]:
        place = {"buffer_id": self._buffer(micro_batch), "micro_batch": micro_batch}
        work: list[PipeInstruction] = []
        if not self.is_first_stage:
            work.append(RecvActivation(**place))
        if self.is_first_stage or self.is_last_stage:
            work.append(LoadMicroBatch(**place))
        work.append(ForwardPass(**place))
        if not self.is_last_stage:
            work.append(SendActivation(**place))
        return work

    def _backward(self, micro_batch: int) -> list[PipeInstruction]:
        place = {"buffer_id": self._buffer(micro_batch), "micro_batch": micro_batch}
        work: list[PipeInstruction] = []
        if not self.is_last_stage:
            work.append(RecvGrad(**place))
        work.append(BackwardPass(buffer_id=place["buffer_id"]))
        if not self.is_first_stage:
            work.append(SendGrad(**place))
        return work

    def _buffer(self, micro_batch: int) -> int:
        return micro_batch % self.num_pipe_buffers()


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
        """Lists of instructions, one list for each forward or backward."""
        ahead = self.num_pipe_buffers()
        for micro_batch in range(ahead):
            yield self._forward(micro_batch)
        for micro_batch in range(self.micro_batches):
            yield self._backward(micro_batch)
            if micro_batch + ahead < self.micro_batches:
                yield self._forward(micro_batch + ahead)
        yield [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]


class EvalSchedule(_StageSchedule):
    """Forwards only."""

    def num_pipe_buffers(self) -> int:
        """Micro-batches held at once."""
        return 1

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Lists of instructions, one list for each forward."""
        for micro_batch in range(self.micro_batches):
            yield self._forward(micro_batch)
