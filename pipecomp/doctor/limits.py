"""Limits of the system: open files, locked memory, address space, shared memory."""

from __future__ import annotations

import math
import resource
import shutil
import sys
from pathlib import Path

from pipecomp.doctor.finding import OK, PROBLEM, WARNING, Finding, judge, mib

MOUNT_SHM = "mkdir -p /dev/shm && mount -t tmpfs tmpfs /dev/shm; in a container: --shm-size=2g"
_SHM = Path("/dev/shm")
# A rank opens some 200 files and libraries, and a socket to each other rank for each group of ranks.
_OPEN_FILES = 1024
_ADDRESS_SPACE = 64 << 30  # torch alone maps several GiB, CUDA reserves tens, a message store doubles its map
_ADDRESS_SPACE_LEAST = 8 << 30
_LOCKED = 64 << 20
_SHM_BYTES = 512 << 20


def limit_findings(*, gpu: bool) -> list[Finding]:
    """Make all checks of this module on this machine."""
    return [
        check_open_files(_soft(resource.RLIMIT_NOFILE)),
        check_address_space(_soft(resource.RLIMIT_AS)),
        check_locked_memory(_soft(resource.RLIMIT_MEMLOCK), gpu=gpu),
        check_shared_memory(shutil.disk_usage(_SHM).free if _SHM.is_dir() else None),
    ]


def check_open_files(limit: int | None) -> Finding:
    """Check how many files a process may open. limit: None for any number."""
    few = limit is not None and limit < _OPEN_FILES
    meaning = "too few for the sockets of many ranks and for data workers"
    advice = f"ulimit -n {4 * _OPEN_FILES}, before starting the launcher"
    found = f"{'no limit' if limit is None else limit} per process"
    return judge("open files", found, (few, WARNING, meaning, advice))


def check_address_space(limit_bytes: int | None) -> Finding:
    """Check how much a process may map. limit_bytes: None for any amount."""
    limit = math.inf if limit_bytes is None else limit_bytes
    fault = ("torch and the message store map files, which may fail", "ulimit -v unlimited")
    return judge(
        "address space",
        f"{_size(limit_bytes)} per process",
        (limit < _ADDRESS_SPACE_LEAST, PROBLEM, *fault),
        (limit < _ADDRESS_SPACE, WARNING, *fault),
    )


def check_locked_memory(limit_bytes: int | None, *, gpu: bool) -> Finding:
    """Check how much a process may keep from being swapped out; only GPU transfers need it.

    limit_bytes: None for any amount.
    """
    small = gpu and limit_bytes is not None and limit_bytes < _LOCKED
    advice = "ulimit -l unlimited; in a container: --ulimit memlock=-1"
    found = _size(limit_bytes) + ("" if gpu else " (matters only with GPUs)")
    return judge("locked memory", found, (small, WARNING, "NCCL may fail where the network has RDMA", advice))


def check_shared_memory(free_bytes: int | None) -> Finding:
    """Check what is free in /dev/shm. free_bytes: None where there is none."""
    if free_bytes is None and sys.platform == "linux":
        meaning = "the demo's ranks cannot start without it, nor data workers share memory"
        return Finding("shared memory", WARNING, f"no /dev/shm here: {meaning}", MOUNT_SHM)
    if free_bytes is None:
        return Finding("shared memory", OK, "no /dev/shm here")
    meaning = "data workers and NCCL use it, and crash when it is full"
    advice = "In a container: --shm-size=2g or --ipc=host; elsewhere remove old files there."
    small = free_bytes < _SHM_BYTES
    return judge("shared memory", f"{mib(free_bytes)} free in /dev/shm", (small, WARNING, meaning, advice))


def _size(limit_bytes: int | None) -> str:
    return "no limit" if limit_bytes is None else mib(limit_bytes)


def _soft(number: int) -> int | None:
    limit = resource.getrlimit(number)[0]
    return None if limit == resource.RLIM_INFINITY else limit
