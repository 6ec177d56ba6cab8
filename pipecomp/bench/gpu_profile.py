"""A GPU's activity in a step: compute and copies as intervals and a picture, and the code that waits for the GPU."""

from __future__ import annotations

import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pipecomp.utils.files import atomic_write

ROWS = {"compute": "#4c72b0", "to host": "#dd8452", "to device": "#55a868"}
_COPIES = {"Memcpy DtoH": "to host", "Memcpy HtoD": "to device"}


class Interval(NamedTuple):
    """An interval in a row of the picture. start, end: seconds of the machine's clock."""

    row: str
    start: float
    end: float


def device_activity(work: Callable[[], Any]) -> list[Interval]:
    """Run `work` and return the activity of this process's GPU by start; nothing on a machine without a GPU."""
    if not torch.cuda.is_available():
        work()
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    return intervals(profile.profiler.kineto_results.events())


def intervals(events: Iterable[Any]) -> list[Interval]:
    """Select the GPU's kernels and copies from the events of torch's profiler."""
    found = []
    for event in events:
        if event.device_type() != torch.autograd.DeviceType.CUDA:
            continue
        row = next((row for name, row in _COPIES.items() if event.name().startswith(name)), "compute")
        start = event.start_ns() / 1e9
        found.append(Interval(row, start, start + event.duration_ns() / 1e9))
    return sorted(found, key=lambda i: i.start)


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Join intervals that touch, in order of their starts."""
    out: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def copied_beside_compute(by_rank: Mapping[int, Sequence[Interval]]) -> float | None:
    """Return the fraction of the copies' time in which the GPU also computed, for any rank; None without copies."""
    every = [i for found in by_rank.values() for i in found]
    busy = merged((i.start, i.end) for i in every if i.row == "compute")
    copies = merged((i.start, i.end) for i in every if i.row != "compute")
    total = sum(end - start for start, end in copies)
    both = sum(max(0.0, min(end, e) - max(start, s)) for start, end in copies for s, e in busy)
    return both / total if total else None


def draw(path: Path, by_rank: Mapping[int, Sequence[Interval]], title: str) -> None:
    """Draw a PNG: time to the right, for each rank a row of computing and one for copies in each direction."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    begin = min((i.start for found in by_rank.values() for i in found), default=0.0)
    rows = [(rank, row) for rank in sorted(by_rank) for row in ROWS]
    figure, axes = pyplot.subplots(figsize=(12, 1 + 0.4 * len(rows)))
    for y, (rank, row) in enumerate(rows):
        spans = [(1e3 * (i.start - begin), 1e3 * (i.end - i.start)) for i in by_rank[rank] if i.row == row]
        axes.broken_barh(spans, (y - 0.4, 0.8), facecolors=ROWS[row], linewidth=0)
    axes.set_yticks(range(len(rows)), [f"rank {rank}  {row}" for rank, row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.set_title(title, fontsize=10)
    try:
        with atomic_write(path, synced=False) as part:
            figure.savefig(part, format="png", dpi=120, bbox_inches="tight")
    finally:
        pyplot.close(figure)


# -- waits for the GPU

MAIN = "MainThread"
_SAID = "called a synchronizing CUDA operation"
_ROOT = Path(__file__).parents[2]


class Place(NamedTuple):
    """Code that waited. owner: "pipecomp", or the package that is not torch and called it. line: "file:number name"."""

    thread: str
    owner: str
    line: str


@contextmanager
def synchronizing_calls() -> Iterator[Counter[Place]]:
    """Count the calls of all threads of this process that wait for the GPU, by place, while inside.

    Waiting for an event is none: that is how the sending thread and the store's writer wait, and torch does not count
    it. It does not count `torch.cuda.synchronize` either, nor copies of pageable memory that are asked not to wait,
    though the driver may. A backward pass says what has waited when it ends: that is whose called it. Threads that
    Python does not know, such as gloo's, are not counted. On a machine without a GPU nothing is found.
    """
    found: Counter[Place] = Counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=f".*{_SAID}")
        others = warnings.showwarning

        def note(message: Any, *rest: Any, **more: Any) -> None:
            if _SAID in str(message):
                found[_place(traceback.extract_stack())] += 1
            else:
                others(message, *rest, **more)

        warnings.showwarning = note
        with sync_debug_mode("warn"):
            yield found


@contextmanager
def sync_debug_mode(mode: str) -> Iterator[None]:
    """Let torch do this about calls that wait for the GPU, of any thread: "default", "warn" or "error".

    Nothing without a GPU.
    """
    if not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _place(stack: list[traceback.FrameSummary]) -> Place:
    """Return the innermost frame outside torch."""
    name = threading.current_thread().name
    for frame in reversed(stack):
        path = Path(frame.filename)
        if path == Path(__file__):
            continue
        if path.is_relative_to(_ROOT) and path.relative_to(_ROOT).parts[0] == "pipecomp":
            where, owner = path.relative_to(_ROOT), "pipecomp"
        else:
            parts = path.parts
            if "site-packages" not in parts:
                continue
            where = Path(*parts[parts.index("site-packages") + 1 :])
            owner = where.parts[0]
        if owner != "torch":
            return Place(name, owner, f"{where}:{frame.lineno} {frame.name}")
    return Place(name, "torch", "")
