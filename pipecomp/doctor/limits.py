"""Limits of the system: open files, locked memory, address space, shared memory."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

from pipecomp.doctor.finding import OK, PROBLEM, WARNING, Finding, mib

_SHM = Path("/dev/shm")
# A rank opens some 200 files and libraries, and a socket to each other rank for each group of ranks.
_OPEN_FILES = 1024
_ADDRESS_SPACE = 64 << 30  # torch alone maps several GiB, CUDA reserves tens, a message store doubles its map
_ADDRESS_SPACE_LEAST = 8 << 30
_LOCKED = 64 << 20
_SHM_BYTES = 512 << 20


def limit_findings(*, gpu: bool) -> list[Finding]:
    """All checks of this module on this machine."""
    return [
        check_open_files(_soft(resource.RLIMIT_NOFILE)),
        check_address_space(_soft(resource.RLIMIT_AS)),
        check_locked_memory(_soft(resource.RLIMIT_MEMLOCK), gpu=gpu),
        check_shared_memory(shutil.disk_usage(_SHM).free if _SHM.is_dir() else None),
    ]


def check_open_files(limit: int | None) -> Finding:
    """limit: files that a process may open, None for any number."""
    if limit is None or limit >= _OPEN_FILES:
        return Finding("open files", OK, f"{'no limit' if limit is None else limit} per process")
    found = f"{limit} per process: too few for the sockets of many ranks and for data workers"
    return Finding("open files", WARNING, found, f"ulimit -n {4 * _OPEN_FILES}, before starting the launcher")


def check_address_space(limit_bytes: int | None) -> Finding:
    """limit_bytes: what a process may map, None for any amount."""
    if limit_bytes is None or limit_bytes >= _ADDRESS_SPACE:
        size = "no limit" if limit_bytes is None else mib(limit_bytes)
        return Finding("address space", OK, f"{size} per process")
    verdict = PROBLEM if limit_bytes < _ADDRESS_SPACE_LEAST else WARNING
    found = f"{mib(limit_bytes)} per process: torch and the message store map files, which may fail"
    return Finding("address space", verdict, found, "ulimit -v unlimited")


def check_locked_memory(limit_bytes: int | None, *, gpu: bool) -> Finding:
    """limit_bytes: what a process may keep from being swapped out, None for any amount; only GPU transfers need it."""
    size = "no limit" if limit_bytes is None else mib(limit_bytes)
    if not gpu or limit_bytes is None or limit_bytes >= _LOCKED:
        return Finding("locked memory", OK, size if gpu else f"{size} (matters only with GPUs)")
    found = f"{size}: NCCL may fail where the network has RDMA"
    return Finding("locked memory", WARNING, found, "ulimit -l unlimited; in a container: --ulimit memlock=-1")


def check_shared_memory(free_bytes: int | None) -> Finding:
    """free_bytes: free in /dev/shm, None where there is none."""
    if free_bytes is None:
        return Finding("shared memory", OK, "no /dev/shm here")
    if free_bytes >= _SHM_BYTES:
        return Finding("shared memory", OK, f"{mib(free_bytes)} free in /dev/shm")
    found = f"{mib(free_bytes)} free in /dev/shm: data workers and NCCL use it, and crash when it is full"
    advice = "In a container: --shm-size=2g or --ipc=host; elsewhere remove old files there."
    return Finding("shared memory", WARNING, found, advice)


def _soft(number: int) -> int | None:
    limit = resource.getrlimit(number)[0]
    return None if limit == resource.RLIM_INFINITY else limit
