"""Where a step makes its thread wait for the GPU, as torch notices it.

torch warns of every call that waits (`torch.cuda.set_sync_debug_mode`), but not of where Python was, and a mode that
raises ends the step at the first one. Here every call is noted with its thread and the code that made it.
"""

from __future__ import annotations

import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

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
    """The innermost code outside torch."""
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
