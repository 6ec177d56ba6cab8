"""Processes and shared memory that a test's ranks leave on the machine."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import psutil

SHARED_MEMORY = Path("/dev/shm")


class Sessions:
    """Gives each rank a session of its own, so that whatever it starts can be found: `begin` in the rank, `noted` as
    `on_note` of run_ranks, `left` when all have ended."""

    def __init__(self) -> None:
        self._ranks: set[int] = set()

    @staticmethod
    def begin(note: Any) -> None:
        os.setsid()
        note({"session": os.getpid()})

    def noted(self, rank: int, value: Any) -> None:
        if isinstance(value, dict) and "session" in value:
            self._ranks.add(value["session"])

    def left(self) -> list[str]:
        assert self._ranks, "no rank has begun"
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if os.getsid(process.pid) in self._ranks and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"process {process.pid}: {' '.join(process.cmdline())}")
        names = re.compile(
            rf"(?<!\d)({'|'.join(map(str, self._ranks))})(?!\d)"
        )  # torch's and Python's have a process id
        shared = os.listdir(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else []
        return found + [f"shared memory {name}" for name in shared if names.search(name)]
