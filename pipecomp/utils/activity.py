"""Activities of this process that nothing else limits: a data loader, a callback, a tracker, a disk.

`pipecomp/distributed/heartbeat.py` watches them: it reports one that takes long, and interrupts one that takes longer
than its limit. An activity inside another one counts as progress of the outer one.

Note: [Interrupting the main thread]
A real-time signal, whose Python handler raises the error, ends the waits of Python's own functions and of most
libraries: sleep, locks, queues, sockets, pipes. A signal that arrives between the release of the interpreter's lock and
the wait in the kernel ends no wait, and the handler runs after it. That is not rare: the release lets the watching
thread run, which sends the signal. So it is sent again until the error is raised. A read of a dead file system in the
kernel is not interrupted, nor is another thread than the main one.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from pipecomp.utils.units import format_size

DATA_TIMEOUT_S = 600.0
_OTHERS = 3  # times as long for callbacks, disks and models
NOTICE_S = 30.0
_SHARED_MEMORY = Path("/dev/shm")
_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR2) + 7 * hasattr(signal, "SIGRTMIN")
_running: list[Activity] = []
_main_thread = threading.main_thread()


class Limits:
    """Limits of this process's activities in seconds."""

    data_s = DATA_TIMEOUT_S

    def set(self, data_timeout_s: float | None) -> None:
        """Take the configuration's limit; None for none."""
        self.data_s = math.inf if data_timeout_s is None else data_timeout_s

    @property
    def other_s(self) -> float:
        """Limit of what is not data."""
        return _OTHERS * self.data_s


limits = Limits()


class Progress:
    """The latest step of this process, and its part that runs or ran last."""

    step = 0
    part = ""


progress = Progress()


class Activity:
    """An activity during a `with` block; it may be used again for the next one.

    Args:
        text: Words after the rank's name, such as "waits for its data".
        limit_s: Seconds after which it is interrupted; None for one that is not watched, as others watch it.
        end_s: Seconds after which the process ends; by default some more than the limit.
        explain: Describes the cause and the remedy in an error.

    Attributes:
        error: The error to raise in the body; None for none, and once it is raised.
    """

    def __init__(
        self,
        text: str,
        limit_s: float | None = None,
        *,
        end_s: float | None = None,
        explain: Callable[[], str] = lambda: "",
    ) -> None:
        self.text, self.limit_s, self.end_s, self.explain = text, limit_s, end_s, explain
        self.since, self.next_notice_s = time.monotonic(), NOTICE_S
        self.error: Exception | None = None
        self._thread = threading.current_thread()
        on_main = self._thread is _main_thread
        if limit_s is not None and on_main and signal.getsignal(_SIGNAL) is not _raise_error:
            signal.signal(_SIGNAL, _raise_error)

    def __enter__(self) -> Activity:
        self.since, self.next_notice_s, self.error = time.monotonic(), NOTICE_S, None
        _running.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self in _running:
            _running.remove(self)
        for outer in list(_running):
            outer.since, outer.next_notice_s, outer.error = time.monotonic(), NOTICE_S, None

    def interrupt(self) -> None:
        """Raise `error` in the body, if it runs on the main thread. Call this until `error` is None: see the note."""
        if self._thread is _main_thread:
            signal.pthread_kill(_main_thread.ident or 0, _SIGNAL)

    def place(self) -> str:
        """Return the place in the program at which the body is, "" if unknown."""
        frame: FrameType | None = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def current_activity() -> Activity | None:
    """Return the innermost activity that runs."""
    return _running[-1] if _running else None


def waiting_for_data(loader: Any) -> Activity:
    """Return the activity of waiting for a batch of a loader: a DataLoader, its iterator, or any other object."""
    return Activity("waits for its data", limits.data_s, explain=lambda: explain_data(loader))


def local_activity(text: str) -> Activity:
    """Return an activity with the limit of those that are not data."""
    return Activity(text, limits.other_s, explain=lambda: f"The limit is {_OTHERS} times transport.data_timeout_s")


def explain_data(loader: Any) -> str:
    """Describe a loader and, if its workers need it, the shared memory."""
    shown = describe_loader(loader)
    full = full_shared_memory() if workers_of(loader) else None
    remedy = "Look at the dataset, its disk and the loader's workers, or raise transport.data_timeout_s"
    return f"The loader is {shown}. {f'{full}. ' if full else ''}{remedy}"


_SETTINGS = ("num_workers", "prefetch_factor", "batch_size", "pin_memory", "timeout", "persistent_workers")


def _setting(loader: Any, name: str) -> Any:
    options = getattr(loader, "options", None)
    if isinstance(options, dict) and name in options:
        return options[name]
    return getattr(loader, name, getattr(loader, f"_{name}", None))  # an iterator of a DataLoader has the second


def workers_of(loader: Any) -> int:
    """Return the number of a loader's worker processes, as far as it is known."""
    workers = _setting(loader, "num_workers")
    return workers if isinstance(workers, int) else 0


def describe_loader(loader: Any) -> str:
    """Return a loader's class, dataset and settings."""
    data = getattr(loader, "dataset", getattr(loader, "_dataset", None))
    found = [] if data is None else [f"dataset={type(data).__name__}"]
    values = ((name, _setting(loader, name)) for name in _SETTINGS)
    found += [f"{name}={value}" for name, value in values if isinstance(value, (int, float))]
    return f"{type(loader).__name__}({', '.join(found)})"


def full_shared_memory() -> str | None:
    """Return a sentence if /dev/shm, through which workers pass batches, has less than a twentieth of its space."""
    try:
        usage = shutil.disk_usage(_SHARED_MEMORY)
    except OSError:
        return None
    if usage.free * 20 > usage.total:
        return None
    return (
        f"/dev/shm is full ({format_size(usage.free)} of {format_size(usage.total)} free), and workers pass batches "
        "through it: use fewer workers or a smaller prefetch_factor, or enlarge it (docker run --shm-size=2g)"
    )


def _raise_error(number: int, frame: FrameType | None) -> None:
    """Raise the error of the activity that is to end. If the body goes on all the same, its time begins anew."""
    if frame is not None and frame.f_code in (Activity.__enter__.__code__, Activity.__exit__.__code__):
        return  # not in the body; one that goes on is interrupted again
    for activity in reversed(_running):
        if activity.error is not None:
            error, activity.error, activity.since = activity.error, None, time.monotonic()
            raise error


os.register_at_fork(after_in_child=_running.clear)
