"""The part of the engine that tells what crossed the links, where the time went, and draws it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipecomp.engine.failure_guard import GuardedEngine
from pipecomp.engine.trace import Trace, TracedStore, draw_trace, write_trace
from pipecomp.schedule.in_flight import InFlight
from pipecomp.stats import Seconds


class ReportingEngine(GuardedEngine):
    """Counters and traces of one rank. Its subclass counts into them."""

    in_flight: InFlight

    def __init__(self, **more: Any) -> None:
        self.trace = Trace()
        self._seconds = Seconds()
        super().__init__(**more)

    def comm_stats(self) -> dict[str, Any]:
        """This rank's traffic and time so far.

        "links": by "k->k+1", bytes raw and sent per direction, seconds waited, error, store hit rate. "groups": by
        name, bytes raw and sent, seconds. "seconds": by part, see `stats.Seconds`. "steps". "store_bytes": on disk.
        "in_flight": micro-batches that may be under way. "micro_batches": the last step's seconds by micro-batch.
        """
        links = {f"{end.index}->{end.index + 1}": end.stats.as_dict() for end in self.links}
        environment = self.links.environment
        return {
            "rank": self.global_rank,
            "stage": self.stage_id,
            "replica": self.grid.data_parallel_id,
            "steps": self.global_steps,
            "links": links,
            "groups": self.group_stats(),
            "seconds": asdict(self._seconds),
            "in_flight": self.in_flight.value,
            "micro_batches": self.trace.micro_batches(),
            "store_bytes": 0 if environment is None else environment.size_bytes(),
        }

    def start_trace(self) -> None:
        """Keep every event of the training steps from here on, for `save_trace`."""
        if not self.trace.keep:
            self.trace.keep = True
            for end in self.links:
                end.transport.on_moved(self.trace.add)
                if end.store is not None:
                    end.store = TracedStore(end.store, self.trace)

    def save_trace(self, path: str | Path, *, title: str = "") -> None:
        """Write all ranks' events since `start_trace` to one file, and a picture of the last step beside it (.png).

        Chrome's trace format. Every rank must call this; rank 0 writes.
        """
        out: list[Any] = [None] * dist.get_world_size()
        with self.propagate_failure():
            dist.all_gather_object(out, self.trace.events())
        if self.global_rank == 0:
            by_rank = dict(enumerate(out))
            write_trace(path, by_rank)
            draw_trace(Path(path).with_suffix(".png"), by_rank, title=title)

    def gather_comm_stats(self) -> list[dict[str, Any]]:
        """`comm_stats` of all ranks, on every rank; all ranks must call this."""
        out: list[Any] = [None] * dist.get_world_size()
        with self.propagate_failure():
            dist.all_gather_object(out, self.comm_stats())
        return out
