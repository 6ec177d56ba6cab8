"""Where the time of a step goes: what a rank computed, quantized, sent, received, stored and waited for, and when.

A trace is written in Chrome's trace format (open it in a browser's tracing page or in Perfetto), all ranks in one file,
and drawn as a picture. Times are those of each machine's own clock.
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

MOST_EVENTS = 200_000  # of a rank: some 30 MB on their way to the others, and in the file
TRACKS = ("compute", "wait", "quantize", "store", "reduce", "update", "send", "receive")
# The parts that the engine counts its seconds under, and the track that shows them.
TRACK_OF = {
    "forward": "compute",
    "backward": "compute",
    "encode": "quantize",
    "decode": "quantize",
    "wait": "wait",
    "reduce": "reduce",
    "update": "update",
    "commit": "store",
    "load": "store",
    "keep": "store",
    "send": "send",
    "receive": "receive",
}
COLORS = {
    "forward": "#4c72b0",
    "backward": "#2a4d80",
    "encode": "#dd8452",
    "decode": "#e8b07a",
    "wait": "#d9d9d9",
    "reduce": "#8172b3",
    "update": "#937860",
    "commit": "#64b5cd",
    "load": "#64b5cd",
    "keep": "#64b5cd",
    "send": "#55a868",
    "receive": "#9bd0a5",
}


@serializable
class Event(NamedTuple):
    """What ran from `start` to `end` (seconds since 1970). micro_batch, bytes: where they mean something.

    bits: of a value that was quantized or decoded, on average.
    """

    name: str
    start: float
    end: float
    step: int
    micro_batch: int | None = None
    bytes: int | None = None
    bits: float | None = None


class Trace:
    """The events of one rank: always those of the last step, the last `MOST_EVENTS` while `keep` is true."""

    def __init__(self) -> None:
        self.keep = False
        self.step = 0
        self._kept: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._last: list[Event] = []
        self._this: list[Event] = []
        self._offset = time.time() - time.perf_counter()

    def begin_step(self, step: int) -> None:
        """Begin an optimizer step: what comes now belongs to it."""
        self.step, self._this = step, []

    def end_step(self) -> None:
        """End the step."""
        self._last = list(self._this)  # what comes before the next step, as an evaluation does, is of none
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
        """Record an event; times of `time.perf_counter`. May be called by any thread."""
        self._this.append(Event(name, start + self._offset, end + self._offset, self.step, micro_batch, size, bits))

    def events(self) -> list[Event]:
        """All that was kept."""
        return list(self._kept)

    def last_step(self) -> list[Event]:
        """Those of the last step; sends, receives and what stores read and put only once a trace was started."""
        return list(self._last)

    def micro_batches(self) -> list[dict[str, Any]]:
        """Sum up the last step by micro-batch: seconds of each part, in the order in which they were first seen."""
        table: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for event in self._last:
            if event.micro_batch is not None:
                table[event.micro_batch][f"{event.name}_s"] += event.end - event.start
        return [{"micro_batch": number, **table[number]} for number in sorted(table)]


class TracedStore:
    """A message store whose reads and writes are events; everything else is the store's own."""

    def __init__(self, store: MessageStore, trace: Trace) -> None:
        self._store, self._trace = store, trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, samples: Sequence[int]) -> list[CachedActivation | None]:
        """See MessageStore."""
        began = time.perf_counter()
        found = self._store.get(samples)
        self._trace.add("load", began, time.perf_counter())
        return found

    def put_many(self, puts: Sequence[Put], check: PutCheck | None = None) -> None:
        """See MessageStore."""
        began = time.perf_counter()
        self._store.put_many(puts, check)
        self._trace.add("keep", began, time.perf_counter())


def chrome_events(by_rank: dict[int, Iterable[Event]]) -> list[dict[str, Any]]:
    """Events in Chrome's form: a process for each rank, a thread for each track; microseconds from the first event."""
    rows = {rank: list(events) for rank, events in by_rank.items()}
    begin = min((e.start for events in rows.values() for e in events), default=0.0)
    out: list[dict[str, Any]] = []
    for rank, events in rows.items():
        out.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        for number, track in enumerate(TRACKS):
            out.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": track}})
        for e in events:
            details = {"step": e.step, "micro_batch": e.micro_batch, "bytes": e.bytes, "bits": e.bits}
            out.append(
                {
                    "ph": "X",
                    "name": e.name,
                    "pid": rank,
                    "tid": TRACKS.index(TRACK_OF[e.name]),
                    "ts": (e.start - begin) * 1e6,
                    "dur": (e.end - e.start) * 1e6,
                    "args": {k: v for k, v in details.items() if v is not None},
                }
            )
    return out


def write_trace(path: str | Path, by_rank: dict[int, Iterable[Event]]) -> None:
    """Write all ranks' events as one JSON file."""
    atomic_write_text(path, json.dumps({"traceEvents": chrome_events(by_rank), "displayTimeUnit": "ms"}))


def draw_trace(path: str | Path, by_rank: dict[int, list[Event]], *, title: str = "", steps: int = 1) -> None:
    """Draw the last `steps` steps as a PNG: time to the right, a row for each rank and track."""
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
        for track in TRACKS
        if any(TRACK_OF[e.name] == track for e in shown[rank])
    ]
    figure, axes = pyplot.subplots(figsize=(12, 1 + 0.3 * len(rows)))
    for y, (rank, track) in enumerate(rows):
        for e in shown[rank]:
            if TRACK_OF[e.name] == track:
                axes.barh(y, e.end - e.start, left=e.start - begin, height=0.8, color=COLORS[e.name], linewidth=0)
                if e.name in ("forward", "backward") and e.micro_batch is not None and len(shown[rank]) < 400:
                    middle = (e.start + e.end) / 2 - begin
                    axes.text(middle, y, str(e.micro_batch), ha="center", va="center", fontsize=6, color="white")
    axes.set_yticks(range(len(rows)), [f"rank {rank}  {track}" for rank, track in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize=10)
    names = [n for n in COLORS if any(e.name == n for events in shown.values() for e in events)]
    axes.legend(
        handles=[Patch(color=COLORS[n], label=n) for n in names],
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
