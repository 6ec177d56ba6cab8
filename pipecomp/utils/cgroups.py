"""Limits of the Linux control groups of this process, and the memory that they leave free.

Docker, Kubernetes, Slurm and systemd set limits in control groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

_TOP, _OF_PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Files with a group's memory limit and usage, and the line of `memory.stat` with the cache that is reclaimed first.
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")


def control_groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of the process's groups with a controller, each followed by its parents.

    Not all of them need to exist: a container may see its own group as the root, without knowing its full path.

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


def free_bytes(device: torch.device, ranks: int = 1) -> int:
    """Return a rank's share of the free memory.

    Args:
        device: a GPU, or the CPU for the memory of the host within the limits of its control groups.
        ranks: ranks that share the GPU, or the host.
    """
    if device.type == "cuda":
        import torch  # here: the command line starts without it

        return int(torch.cuda.mem_get_info(device)[0]) // ranks
    return max(0, min([psutil.virtual_memory().available, *free_within_limits()])) // ranks


def free_within_limits() -> Iterator[int]:
    """Yield the free bytes within each memory limit on this process's control groups."""
    for folder, version_2 in control_groups("memory"):
        limit, use, cache = _VERSION_2 if version_2 else _VERSION_1
        try:
            most, used = (int((folder / name).read_text()) for name in (limit, use))
            stat = dict(entry.split() for entry in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # the container lacks this group, or there is no limit: "max"
            continue
        yield most - used + int(stat.get(cache, 0))


def count_oom_kills() -> int:
    """Return how many processes of this process's control group the kernel has killed for lack of memory so far."""
    for folder, version_2 in control_groups("memory"):
        try:
            text = (folder / ("memory.events" if version_2 else "memory.oom_control")).read_text()
        except OSError:
            continue
        counts = dict(line.split() for line in text.splitlines())
        if "oom_kill" in counts:
            return int(counts["oom_kill"])
    return 0
