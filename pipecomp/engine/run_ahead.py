"""How far a stage runs ahead, adjusted after every step to what it waited for and to the memory that is free."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from pipecomp.distributed.rendezvous import ranks_here
from pipecomp.schedule.in_flight import InFlight, KeptBytes
from pipecomp.stages.link.boundary import Layout
from pipecomp.stats import LinkStats
from pipecomp.utils.cgroups import free_bytes


class RunAhead:
    """The micro-batches in flight of one stage. engine: its place in the pipeline, its stage and device."""

    def __init__(self, engine: Any, setting: int | str) -> None:
        self._engine = engine
        self.in_flight = InFlight(setting, engine.stage_id, engine.num_stages, engine.micro_batches)
        self.kept: KeptBytes | None = None  # of one micro-batch, from the first forward on
        self.sharing = ranks_here() or 1  # how many ranks share this one's GPU, or without one its machine
        self._gradient_wait = 0.0  # in this step, for gradients of all micro-batches but the first
        self._idle: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # of a GPU: when it had nothing to do, and had

    def begin_step(self) -> None:
        """Nothing has been waited for yet."""
        self._gradient_wait = 0.0
        self._idle.clear()

    @contextlib.contextmanager
    def waiting(self, micro_batch: int, stats: LinkStats) -> Iterator[None]:
        """Count what is waited for a gradient inside; stats: of the link, which count it on the host.

        On a GPU it is the time in which that has nothing to do: the host only asks for work, and waits for as long as
        its GPU computes.
        """
        before = stats.wait_seconds
        begin = self._now()
        yield
        end = self._now()
        if not micro_batch:  # the first one's way there and back is waited for at any number in flight
            return
        if begin is not None and end is not None:
            self._idle.append((begin, end))
        else:
            self._gradient_wait += stats.wait_seconds - before

    def _now(self) -> torch.cuda.Event | None:
        """What comes when the GPU has done all that it was asked for so far; None without one, or without need."""
        device = self._engine.device
        if device.type != "cuda" or not self.in_flight.observing:
            return None
        with torch.cuda.device(device):
            event = torch.cuda.Event(enable_timing=True, blocking=True)
            event.record(torch.cuda.current_stream(device))
        return event

    def _waited_s(self) -> float:
        """Seconds of this step, once the GPU has done what they are between."""
        if not self._idle:
            return self._gradient_wait
        with torch.cuda.device(self._engine.device):
            self._idle[-1][1].synchronize()
            return sum(begin.elapsed_time(end) for begin, end in self._idle) / 1e3

    def end_step(self, step_s: float) -> None:
        """All stages of a pipeline look at the longest wait of any of them, and so come to the same."""
        waited_s = 0.0
        if self.in_flight.observing:
            waited_s = self._waited_s()
            values = [waited_s, step_s, -self.in_flight.limit]
            seen = torch.tensor(values, device=self._engine.device, dtype=torch.float32)
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
