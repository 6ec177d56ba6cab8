"""What crossed a rank's links, where its time went, and the drawing of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipecomp.distributed.collectives import broadcast, gathered
from pipecomp.engine.trace import MOST_EVENTS, Trace, TracedStore, chrome_events, draw_trace, write_trace
from pipecomp.errors import OutputError
from pipecomp.stats import Seconds

_log = logging.getLogger(__name__)


class Reporting:
    """Counters and traces of one rank. engine: whose links, gradients and place in the pipeline are told."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.trace = Trace()
        self._seconds = Seconds()
        self._backwards = 0  # in this step

    def begin_step(self, step: int) -> None:
        """Begin an optimizer step: what comes now belongs to it."""
        self._backwards = 0
        self.trace.begin_step(step)
        for end in self._engine.links:  # outside of all parts, which would take earlier packets' bits for their own
            end.count_sent()

    @contextmanager
    def part(self, part: str, micro_batch: int | None) -> Iterator[None]:
        """Count the time inside to `part`; what it waits for packets is counted apart.

        micro_batch: None for what belongs to none, and for "backward", whose instruction does not say: they come in
        order.
        """
        links = self._engine.links
        (bits, values), waited, began = links.coded(), links.wait_seconds, time.perf_counter()
        with self._seconds.part(part):
            yield
        waited, ended = links.wait_seconds - waited, time.perf_counter()
        if part == "backward":
            micro_batch, self._backwards = self._backwards, self._backwards + 1
        self._seconds.wait += waited
        if part == "decode":
            self._seconds.decode -= waited
            self.trace.add("wait", began, began + waited, micro_batch)
        coded = links.coded()
        mean_bits = (coded[0] - bits) / (coded[1] - values) if coded[1] > values else None
        self.trace.add(part, began + waited, ended, micro_batch, bits=mean_bits)

    @contextmanager
    def event(self, name: str) -> Iterator[None]:
        """Record what runs inside."""
        began = time.perf_counter()
        yield
        self.trace.add(name, began, time.perf_counter())

    def stats(self) -> dict[str, Any]:
        """Tell it as `PipelineEngine.comm_stats` does."""
        engine = self._engine
        environment = engine.links.environment
        return {
            "rank": engine.global_rank,
            "stage": engine.stage_id,
            "replica": engine.grid.data_parallel_id,
            "steps": engine.global_steps,
            "links": {f"{end.index}->{end.index + 1}": end.stats.as_dict() for end in engine.links.counted()},
            "groups": engine.gradients.stats(),
            "seconds": asdict(self._seconds),
            "in_flight": engine.in_flight.value,
            "micro_batches": self.trace.micro_batches(),
            "store_bytes": 0 if environment is None else environment.size_bytes(),
            **({} if engine.local is None else {"local_steps": engine.local.stats()}),
        }

    def last_step(self) -> list[dict[str, Any]]:
        """All ranks' events of the last step, in Chrome's form; every rank calls this."""
        return chrome_events(dict(enumerate(gathered(self.trace.last_step()))))

    def start_trace(self) -> None:
        """Keep events from here on, the last `MOST_EVENTS` of them."""
        if not self.trace.keep:
            self.trace.keep = True
            for end in self._engine.links:
                end.transport.on_moved = self.trace.add
                if end.store is not None:
                    end.store = TracedStore(end.store, self.trace)

    def save_trace(self, path: str | Path, title: str) -> None:
        """Write all ranks' events to one file, and a picture of the last step beside it; every rank calls this.

        Raises OutputError on every rank if one of the files cannot be written; nothing of that one is left.
        """
        if Path(path).suffix == ".png":
            raise OutputError(f"{path}: a trace needs another ending than .png, which its picture has")
        by_rank = dict(enumerate(gathered(self.trace.events())))
        problem: str | None = None
        if self._engine.global_rank == 0:
            picture = Path(path).with_suffix(".png")
            if any(len(events) >= MOST_EVENTS for events in by_rank.values()):
                _log.warning("%s has the last steps only: each rank keeps its last %d events", path, MOST_EVENTS)
            try:
                write_trace(path, by_rank)
                path = picture
                draw_trace(picture, by_rank, title=title)
            except OSError as error:
                problem = f"{path} cannot be written on rank 0: {error.strerror or error}"
        problem = broadcast(problem)
        if problem is not None:
            raise OutputError(problem)
