"""Which ranks share a GPU, or the processor's cores, told by what these are.

Numbers do not tell: under Slurm, with a GPU for each task, every rank of a machine sees its own alone, as number 0.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from pipecomp.distributed.consistency import AllRanks
from pipecomp.distributed.network_interfaces import machine
from pipecomp.utils.cgroups import control_groups

_INSTANCE = " MIG "  # in the name of an instance of a GPU


class Gpu(NamedTuple):
    """What a rank computes on. name: unique; instances of a GPU have names of their own. whole: what NCCL knows."""

    name: str
    whole: str


def own_gpu(local_rank: int) -> Gpu | None:
    """Tell which GPU a rank takes, None without one."""
    if not torch.cuda.is_available():
        return None
    number = local_rank % torch.cuda.device_count()
    found = torch.cuda.get_device_properties(number)
    name = str(found.uuid)
    if _INSTANCE not in found.name:
        return Gpu(name, name)
    # CUDA says the instance's name or the whole GPU's, by its version. For NCCL, instances of a GPU are one and the
    # same; so all of a machine count as one, since which are of one GPU is not told.
    visible = [*os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","), *[""] * number][number]
    return Gpu(f"{name} {visible}", f"instances on {machine()}")


def some_share(names: Sequence[str | None]) -> bool:
    """Tell whether a name comes twice. names: by rank; None for ranks that have none."""
    found = [name for name in names if name is not None]
    return len(set(found)) < len(found)


def ranks_on_gpu(all_ranks: AllRanks, gpu: Gpu | None) -> int:
    """Count the ranks that compute on this rank's GPU; every rank must call this. gpu: None without one, which is 0."""
    name = None if gpu is None else gpu.name
    found = all_ranks.all_gather_object(name)
    return 0 if name is None else found.count(name)


def ranks_on_cores(all_ranks: AllRanks) -> int:
    """Count the ranks that may use some of the cores that this one may use; every rank must call this."""
    mine = [machine(), own_cores()]
    found = all_ranks.all_gather_object(mine)
    return sum(place == mine[0] and not set(cores).isdisjoint(mine[1]) for place, cores in found)


def own_cores() -> list[int]:
    """List the cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Count the cores that this process may use, by its affinity and the quotas of its control groups."""
    return max(1, min([len(own_cores()), *map(round, _quotas())]))


def _quotas() -> Iterator[float]:
    """Give the cores that each of the process's control groups may use at a time, where that is limited."""
    for folder, version_2 in control_groups("cpu"):
        try:
            if version_2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            cores = int(quota) / int(period)
        except (OSError, ValueError):  # no such group in this container, or no limit: "max"
            continue
        if cores > 0:  # no limit is -1 in version 1
            yield cores
