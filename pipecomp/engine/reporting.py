"""Traffic, times and traces of one rank, and the metadata of its run."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipecomp.config import Config
from pipecomp.distributed.collectives import broadcast, gathered
from pipecomp.elastic.second_home import SecondHome
from pipecomp.engine.local_steps import LocalTraining
from pipecomp.engine.reduction import GradientReduction
from pipecomp.engine.schedule import InFlightControl
from pipecomp.engine.trace import MAX_EVENTS, Trace, TracedStore, chrome_events
from pipecomp.errors import OutputError, write_error
from pipecomp.interfaces import StageContext
from pipecomp.stages.link.links import Links
from pipecomp.stages.partition.stage import Stage
from pipecomp.stats import Seconds
from pipecomp.utils.files import atomic_write_text
from pipecomp.utils.serialization import replace_nonfinite

_log = logging.getLogger(__name__)


class Reporting:
    """Counters and trace of one rank.

    Attributes:
        trace: The events.
        links: This rank's links, once they are open.
        network: Links of the network lab that the run trains in, or those that were measured for "auto" bits, with
            "measured": true; None if neither is known.
        second_home: Takes records of this rank's state; None without records.
    """

    def __init__(
        self, context: StageContext, gradients: GradientReduction, control: InFlightControl, local: LocalTraining | None
    ) -> None:
        self._context, self._gradients, self._control, self._local = context, gradients, control, local
        self.trace, self.links = Trace(), Links()
        self.network: dict[str, Any] | None = None
        self.second_home: SecondHome | None = None
        self._seconds = Seconds()
        self._backwards = 0  # in this step

    def begin_step(self, step: int) -> None:
        """Begin optimizer step `step`: later events belong to it."""
        self._backwards = 0
        self.trace.begin_step(step)
        for end in self.links:  # not in a part, which would count the bits of earlier packets
            end.count_sent()

    @contextmanager
    def part(self, part: str, micro_batch: int | None = None) -> Iterator[None]:
        """Count the time of the body as `part`, except for waits for packets, which are counted as "wait".

        micro_batch: None if the part belongs to none, and for "backward", whose instruction has no number: backwards
        run in order.
        """
        links = self.links
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
        """Record the body as an event."""
        began = time.perf_counter()
        yield
        self.trace.add(name, began, time.perf_counter())

    def stats(self, steps: int) -> dict[str, Any]:
        """Return the counters, as described at `PipelineEngine.comm_stats`."""
        environment = self.links.environment
        return {
            "rank": self._context.rank,
            "stage": self._context.stage_id,
            "replica": self._context.replica,
            "steps": steps,
            "links": {f"{end.index}->{end.index + 1}": end.stats.as_dict() for end in self.links.counted()},
            "groups": self._gradients.stats(),
            "seconds": asdict(self._seconds),
            "in_flight": self._control.in_flight.value,
            "micro_batches": self.trace.micro_batches(),
            "streams": {f"{end.index}->{end.index + 1}": end.transport.streams for end in self.links},
            "store_bytes": 0 if environment is None else environment.size_bytes(),
            **({} if self._local is None else {"local_steps": self._local.stats()}),
            **({} if self.second_home is None else {"second_home": self.second_home.stats()}),
        }

    def last_step(self) -> list[dict[str, Any]]:
        """Return all ranks' events of the last step in Chrome's trace format; every rank must call this."""
        return chrome_events(dict(enumerate(gathered(self.trace.last_step()))))

    def start_trace(self) -> None:
        """Keep events from here on, the last `MAX_EVENTS` of them."""
        if not self.trace.keep:
            self.trace.keep = True
            for end in self.links:
                end.transport.on_transfer = self.trace.add
                if end.store is not None:
                    end.replace_store(TracedStore(end.store, self.trace))

    def save_trace(self, path: str | Path) -> None:
        """Write all ranks' events to one file; every rank must call this.

        Raises:
            OutputError: On every rank if rank 0 cannot write the file. No part of it remains.
        """
        by_rank = dict(enumerate(gathered(self.trace.events())))
        problem: str | None = None
        if self._context.rank == 0:
            if any(len(events) >= MAX_EVENTS for events in by_rank.values()):
                _log.warning("%s has only the last steps: each rank keeps its last %d events", path, MAX_EVENTS)
            try:
                trace = {"traceEvents": chrome_events(by_rank), "displayTimeUnit": "ms"}
                atomic_write_text(path, json.dumps(trace))
            except OSError as error:
                problem = f"{path} cannot be written on rank 0: {write_error(error, path)}"
        problem = broadcast(problem)
        if problem is not None:
            raise OutputError(problem)

    def run_metadata(self, settings: Config, micro_batch_size: int, micro_batches: int) -> dict[str, Any]:
        """Describe the run as JSON values. settings: with measured bits in place of "auto".

        "hidden": H, None for plain modules. "network": `plan.simulation.LinkNetwork` with null where there is no limit.
        """
        context, stage = self._context, self._context.stage
        return {
            "model": context.plan.model_class,
            "stages": context.num_stages,
            "replicas": context.replicas,
            "cuts": list(context.plan.cuts),
            "parameters": list(context.plan.parameters),
            "micro_batch": micro_batch_size,
            "micro_batches": micro_batches,
            "dtype": str(stage.dtype).removeprefix("torch."),
            "hidden": int(stage.hidden_size) if isinstance(stage, Stage) else None,
            "settings": replace_nonfinite({**settings.model_dump(), "activations": settings.activations.as_dict()}),
            "network": None if self.network is None else replace_nonfinite(self.network),
        }
