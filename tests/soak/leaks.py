"""Resources of running processes, sampled from outside: memory, descriptors, threads, processes, shared memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil


class Held(NamedTuple):
    """One process at one time: seconds since the sampler began, resident bytes, descriptors, threads."""

    at_s: float
    rss: int
    fds: int
    threads: int


class Machine(NamedTuple):
    """processes: below this one. shared: entries of /dev/shm. free: bytes of the disk. folder: bytes of the run's."""

    at_s: float
    processes: int
    shared: int
    free: int
    folder: int


class Sampler:
    """Samples in a thread of its own until `stop`.

    processes: what is to be looked at now, name to process id; a name stands for one process all the time.
    """

    def __init__(self, processes: Callable[[], dict[str, int]], folder: Path, *, every_s: float) -> None:
        self._processes, self._folder, self._every_s = processes, folder, every_s
        self._began, self._ended = time.monotonic(), threading.Event()
        self.held: dict[str, list[Held]] = {}
        self.machine: list[Machine] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No more samples."""
        self._ended.set()
        self._thread.join()

    def sample(self) -> None:
        """One of everything."""
        at_s = time.monotonic() - self._began
        for name, pid in self._processes().items():
            try:
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    held = Held(at_s, process.memory_info().rss, process.num_fds(), process.num_threads())
                    self.held.setdefault(name, []).append(held)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        self.machine.append(
            Machine(
                at_s,
                len(psutil.Process().children(recursive=True)),
                len(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else 0,
                psutil.disk_usage(str(self._folder)).free,
                folder_bytes(self._folder),
            )
        )

    def _run(self) -> None:
        while not self._ended.is_set():
            self.sample()
            self._ended.wait(self._every_s)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below."""
    total = 0
    for top, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(top, name)).st_blocks * 512
            except OSError:
                continue  # gone meanwhile
    return total


def slope(points: list[tuple[float, float]]) -> float | None:
    """Return the slope through the points, by least squares; None for fewer than three or for one time only."""
    if len(points) < 3:
        return None
    x_mean = sum(x for x, _ in points) / len(points)
    y_mean = sum(y for _, y in points) / len(points)
    spread = sum((x - x_mean) ** 2 for x, _ in points)
    if spread == 0:
        return None
    return sum((x - x_mean) * (y - y_mean) for x, y in points) / spread
