"""Traces: when a rank computes, quantizes, sends, receives, stores and waits.

All ranks write one file in Chrome's trace format, for a browser's tracing page or Perfetto. Times are of each machine's
own clock.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pipecomp.buffers.base import CachedActivation, MessageStore, Put, PutCheck
from pipecomp.utils.serialization import serializable

MAX_EVENTS = 200_000  # of a rank: about 30 MB to gather, and in the file
_TRACKS = {  # track -> names of its events
    "compute": ("forward", "backward"),
    "wait": ("wait",),
    "quantize": ("encode", "decode"),
    "store": ("commit", "load", "keep"),
    "reduce": ("reduce",),
    "update": ("update",),
    "send": ("send",),
    "receive": ("receive",),
}
_TRACK_NUMBERS = {name: number for number, names in enumerate(_TRACKS.values()) for name in names}


@serializable
class TraceEvent(NamedTuple):
    """A span of time. start, end: seconds since 1970. micro_batch, bytes: None if they do not apply.

    bits: mean bits of a quantized or decoded value.
    """

    name: str
    start: float
    end: float
    step: int
    micro_batch: int | None = None
    bytes: int | None = None
    bits: float | None = None


class Trace:
    """The events of one rank: those of the last step, and while `keep` is true the last `MAX_EVENTS`."""

    def __init__(self) -> None:
        self.keep = False
        self.step = 0
        self._kept: deque[TraceEvent] = deque(maxlen=MAX_EVENTS)
        self._last: list[TraceEvent] = []
        self._this: list[TraceEvent] = []
        self._offset = time.time() - time.perf_counter()

    def begin_step(self, step: int) -> None:
        """Begin optimizer step `step`: later events belong to it."""
        self.step, self._this = step, []

    def end_step(self) -> None:
        """End the step."""
        self._last = list(self._this)  # an evaluation before the next step belongs to none
        if self.keep:
            self._kept += self._this

    def add(
        self,
        name: str,
        start: float,
        end: float,
        micro_batch: int | None = None,
        size: int | None = None,
        bits: float | None = None,
    ) -> None:
        """Record an event, with times of `time.perf_counter`. Any thread may call this."""
        self._this.append(
            TraceEvent(name, start + self._offset, end + self._offset, self.step, micro_batch, size, bits)
        )

    def events(self) -> list[TraceEvent]:
        """All kept events."""
        return list(self._kept)

    def last_step(self) -> list[TraceEvent]:
        """Events of the last step. Transfers and store accesses are among them only after `start_trace`."""
        return list(self._last)

    def micro_batches(self) -> list[dict[str, Any]]:
        """Seconds of each part in the last step, by micro-batch."""
        table: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for event in self._last:
            if event.micro_batch is not None:
                table[event.micro_batch][f"{event.name}_s"] += event.end - event.start
        return [{"micro_batch": number, **table[number]} for number in sorted(table)]


class TracedStore:
    """Records the reads and writes of a message store as events."""

    def __init__(self, store: MessageStore, trace: Trace) -> None:
        self._store, self._trace = store, trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, samples: Sequence[int]) -> list[CachedActivation | None]:
        began = time.perf_counter()
        found = self._store.get(samples)
        self._trace.add("load", began, time.perf_counter())
        return found

    def put_many(self, puts: Sequence[Put], check: PutCheck | None = None) -> None:
        began = time.perf_counter()
        self._store.put_many(puts, check)
        self._trace.add("keep", began, time.perf_counter())


def chrome_events(by_rank: dict[int, Iterable[TraceEvent]]) -> list[dict[str, Any]]:
    """Events in Chrome's format: a process per rank, a thread per track, microseconds since the first event."""
    rows = {rank: list(events) for rank, events in by_rank.items()}
    begin = min((e.start for events in rows.values() for e in events), default=0.0)
    out: list[dict[str, Any]] = []
    for rank, events in rows.items():
        out.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        for number, track in enumerate(_TRACKS):
            out.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": track}})
        for e in events:
            details = {"step": e.step, "micro_batch": e.micro_batch, "bytes": e.bytes, "bits": e.bits}
            place = {"ph": "X", "name": e.name, "pid": rank, "tid": _TRACK_NUMBERS[e.name]}
            span = {"ts": (e.start - begin) * 1e6, "dur": (e.end - e.start) * 1e6}
            out.append({**place, **span, "args": {k: v for k, v in details.items() if v is not None}})
    return out
