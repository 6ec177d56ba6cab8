"""How far a stage runs ahead, adjusted after every step to what it waited for and to the memory that is free."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from pipecomp.cluster.rendezvous import ranks_here
from pipecomp.schedule.free_memory import free_bytes
from pipecomp.schedule.in_flight import InFlight, KeptBytes
from pipecomp.stages.link.boundary import Layout


class RunAhead:
    """The micro-batches in flight of one stage. engine: its place in the pipeline, its stage and device."""

    def __init__(self, engine: Any, setting: int | str) -> None:
        self._engine = engine
        self.in_flight = InFlight(setting, engine.stage_id, engine.num_stages, engine.micro_batches)
        self.kept: KeptBytes | None = None  # of one micro-batch, from the first forward on
        self.sharing = ranks_here() or 1  # how many ranks share this one's GPU, or without one its machine
        self._gradient_wait = 0.0  # in this step, for gradients of all micro-batches but the first

    def begin_step(self) -> None:
        """Nothing has been waited for yet."""
        self._gradient_wait = 0.0

    def waited(self, micro_batch: int, seconds: float) -> None:
        """Note that a gradient was waited for."""
        if micro_batch:  # the first one's way there and back is waited for at any number in flight
            self._gradient_wait += seconds

    def end_step(self, step_s: float) -> None:
        """All stages of a pipeline look at the longest wait of any of them, and so come to the same."""
        waited_s = self._gradient_wait
        if self.in_flight.observing:
            seen = torch.tensor([waited_s, step_s, -self.in_flight.limit], device=self._engine.device)
            dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=self._engine.grid.get_pipe_parallel_group())
            waited_s, step_s, limit = seen.tolist()
            self.in_flight.limit = -int(limit)
        self.in_flight.observe(waited_s, step_s)

    @contextlib.contextmanager
    def counting_memory(self, layout: Layout) -> Iterator[None]:
        """Count, in the first forward in training, what one more micro-batch in flight would keep."""
        engine = self._engine
        if self.kept is not None or not engine.module.training:
            yield
            return
        self.kept = KeptBytes(engine.stage.parameters())
        with self.kept.counting():
            yield
        # Checkpointed blocks keep their inputs where autograd does not show them.
        values = engine.stage.kept_to_recompute(len(layout.ids), layout.tokens)
        self.kept.bytes += values * next(engine.stage.parameters()).element_size()
        self.in_flight.allow(self.kept.bytes, free_bytes(engine.device, self.sharing))
