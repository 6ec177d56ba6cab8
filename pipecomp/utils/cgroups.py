"""Control groups that this process is in (Linux): there Docker, Kubernetes, Slurm and systemd set limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_TOP, _OF_PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def control_groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Give the folders of the process's groups that a controller may limit, each followed by those that it is in.

    Not all of them need be there: a container may see its own group as the top, and not where that is.

    Args:
        controller: "memory" or "cpu".

    Yields:
        The folder, and whether its files are those of version 2.
    """
    for line in _OF_PROCESS.read_text().splitlines() if _OF_PROCESS.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = _TOP / controller if controllers else _TOP
        group = top / path.lstrip("/")
        yield from ((folder, not controllers) for folder in (group, *group.parents) if folder.is_relative_to(top))
