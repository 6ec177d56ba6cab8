"""Memory that a rank may still take: of its GPU, or of its machine and the container or batch job that it runs in."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import torch

from pipecomp.utils.cgroups import control_groups

# Files with a control group's limit and use, and the line of `memory.stat` with what the system gives up first.
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")


def free_bytes(device: torch.device, ranks: int = 1) -> int:
    """Give a rank's part of what is free. ranks: how many share the GPU, or without one the machine."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // ranks
    return max(0, min([psutil.virtual_memory().available, *left_by_limits()])) // ranks


def left_by_limits() -> Iterator[int]:
    """Give what is left of each memory limit on this process's control groups."""
    for folder, version_2 in control_groups("memory"):
        limit, use, cache = _VERSION_2 if version_2 else _VERSION_1
        try:
            most, used = (int((folder / name).read_text()) for name in (limit, use))
            stat = dict(entry.split() for entry in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such group in this container, or no limit: "max"
            continue
        yield most - used + int(stat.get(cache, 0))
