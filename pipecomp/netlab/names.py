"""Names of labs, by which what a killed lab left behind is found: they say which process made it."""

from __future__ import annotations

import itertools
import os
import re
import tempfile
from pathlib import Path

MARK = "PIPECOMP_NETLAB_NAME"  # in the environment of every process that a lab starts
_NAME = re.compile(r"pclab-([0-9]+)-([0-9]+)-[0-9]+")
_numbers = itertools.count()


def new_name() -> str:
    """Make a lab's name: this process's id and start, and a number."""
    return f"pclab-{os.getpid()}-{_started(os.getpid())}-{next(_numbers)}"


def abandoned(name: str) -> str | None:
    """Give the lab's name if `name` begins with one whose process is gone, else None."""
    found = _NAME.match(name)
    if found is None or _started(int(found[1])) == int(found[2]):
        return None
    return found[0]


def folder_of(name: str) -> Path:
    """Where a lab keeps its files."""
    return Path(tempfile.gettempdir()) / name


def marked(name: str) -> set[int]:
    """Ids of the processes that the lab `name` started, and of what those started."""
    entry = f"{MARK}={name}".encode()
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if entry in (process / "environ").read_bytes().split(b"\0"):
                    found.add(int(process.name))
            except OSError:  # gone, or another user's
                continue
    return found


def _started(pid: int) -> int:
    """When a process began, in clock ticks since the machine's start; -1 if there is none. A later one differs."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    # The command's name stands in brackets and may hold anything; the start is field 22.
    return int(stat.rpartition(")")[2].split()[19])
