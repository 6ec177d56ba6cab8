"""Traces: when a rank computes, quantizes, sends, receives, stores and waits.

All ranks write one file in Chrome's trace format, for a browser's tracing page or Perfetto, and a picture. Times are of
each machine's own clock.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipecomp.buffers.base import CachedActivation, MessageStore, Put, PutCheck
from pipecomp.utils.files import atomic_write, atomic_write_text
from pipecomp.utils.serialization import serializable

MAX_EVENTS = 200_000  # of a rank: about 30 MB to gather, and in the file
_TRACKS = ("compute", "wait", "quantize", "store", "reduce", "update", "send", "receive")
_STYLE = {  # name of an event -> its track and color
    "forward": ("compute", "#4c72b0"),
    "backward": ("compute", "#2a4d80"),
    "encode": ("quantize", "#dd8452"),
    "decode": ("quantize", "#e8b07a"),
    "wait": ("wait", "#d9d9d9"),
    "reduce": ("reduce", "#8172b3"),
    "update": ("update", "#937860"),
    "commit": ("store", "#64b5cd"),
    "load": ("store", "#64b5cd"),
    "keep": ("store", "#64b5cd"),
    "send": ("send", "#55a868"),
    "receive": ("receive", "#9bd0a5"),
}


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
            out.append(
                {
                    "ph": "X",
                    "name": e.name,
                    "pid": rank,
                    "tid": _TRACKS.index(_STYLE[e.name][0]),
                    "ts": (e.start - begin) * 1e6,
                    "dur": (e.end - e.start) * 1e6,
                    "args": {k: v for k, v in details.items() if v is not None},
                }
            )
    return out


def write_trace(path: str | Path, by_rank: dict[int, Iterable[TraceEvent]]) -> None:
    """Write the events of all ranks as one JSON file."""
    atomic_write_text(path, json.dumps({"traceEvents": chrome_events(by_rank), "displayTimeUnit": "ms"}))


def draw_trace(path: str | Path, by_rank: dict[int, list[TraceEvent]], *, title: str = "", steps: int = 1) -> None:
    """Draw the last `steps` steps as a PNG: time to the right, a row per rank and track."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    last = max((e.step for events in by_rank.values() for e in events), default=0)
    shown = {rank: [e for e in events if e.step > last - steps] for rank, events in by_rank.items()}
    begin = min((e.start for events in shown.values() for e in events), default=0.0)
    rows = [
        (rank, track)
        for rank in sorted(shown)
        for track in _TRACKS
        if any(_STYLE[e.name][0] == track for e in shown[rank])
    ]
    figure, axes = pyplot.subplots(figsize=(12, 1 + 0.3 * len(rows)))
    for y, (rank, track) in enumerate(rows):
        for e in shown[rank]:
            if _STYLE[e.name][0] == track:
                axes.barh(y, e.end - e.start, left=e.start - begin, height=0.8, color=_STYLE[e.name][1], linewidth=0)
                if e.name in ("forward", "backward") and e.micro_batch is not None and len(shown[rank]) < 400:
                    middle = (e.start + e.end) / 2 - begin
                    axes.text(middle, y, str(e.micro_batch), ha="center", va="center", fontsize=6, color="white")
    axes.set_yticks(range(len(rows)), [f"rank {rank}  {track}" for rank, track in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize=10)
    names = [n for n in _STYLE if any(e.name == n for events in shown.values() for e in events)]
    axes.legend(
        handles=[Patch(color=_STYLE[n][1], label=n) for n in names],
        ncols=len(names),
        fontsize=7,
        loc="upper center",
        bbox_to_anchor=(0.5, -1.1 / (1 + 0.3 * len(rows))),
    )
    try:
        with atomic_write(path, synced=False) as part:
            figure.savefig(part, format="png", dpi=120, bbox_inches="tight")
    finally:
        pyplot.close(figure)
