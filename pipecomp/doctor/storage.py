"""Checks of the message store's disk: space, file system, speed, and whether LMDB works there."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from pipecomp.doctor.finding import OK, PROBLEM, WARNING, Finding, format_bytes, judge
from pipecomp.errors import StoreError

_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "beegfs", "ceph", "fuse.ceph", "fuse.glusterfs"),
    *("fuse.sshfs", "gfs2", "glusterfs", "gpfs", "lustre", "ocfs2", "virtiofs"),
}
_IN_MEMORY = {"tmpfs", "ramfs"}
_MIN_FREE, _ENOUGH_FREE = 256 << 20, 4 << 30
_SLOW_BYTES_S = 30e6
_CHUNK, _CHUNKS, _SECONDS = 4 << 20, 8, 2.0
_ANOTHER_PATH = "Set store.path to a folder on a local disk."


class DiskSpeed(NamedTuple):
    """Bytes per second: writes with fsync, reads past the page cache where the system allows it."""

    write: float
    read: float


def storage_findings(path: Path) -> list[Finding]:
    """Check the disk for a store in `path`, which need not exist; nothing is left behind."""
    folder = existing_parent(path)
    if folder != path.absolute() and os.path.lexists(path):
        return [check_writable(path, NotADirectoryError(errno.ENOTDIR, "it is not a folder"))]
    free = shutil.disk_usage(folder).free
    mounts = [(part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=True)]
    findings = [check_space(path, free), check_file_system(path, file_system(folder, mounts))]
    if free < _MIN_FREE:
        return findings
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".pipecomp-doctor-") as top:
            findings += [check_speed(measure_disk(Path(top))), check_lmdb(try_lmdb(Path(top)))]
    except OSError as error:
        findings.append(check_writable(folder, error))
    return findings


def check_space(path: Path, free_bytes: int) -> Finding:
    """Check the free space."""
    advice = "Free some space, set store.max_bytes, or set store.path to a folder on another disk."
    many = "4 bytes per token and hidden unit of every sample, 8 with deltas both ways, may not fit"
    return judge(
        "disk space",
        f"{format_bytes(free_bytes)} free for {path}",
        (free_bytes < _MIN_FREE, PROBLEM, "a message store does not fit", advice),
        (free_bytes < _ENOUGH_FREE, WARNING, many, advice),
    )


def check_file_system(path: Path, kind: str | None) -> Finding:
    """Check the file system. kind: its name in the system's table of mounts, None if unknown."""
    if kind in _NETWORK:
        fact = f"{path} is on a network file system ({kind}): LMDB's locks and memory maps cannot be trusted there"
        return Finding("file system", WARNING, fact, _ANOTHER_PATH)
    if kind in _IN_MEMORY:
        fact = f"{path} is on {kind}, in memory: the store takes memory, and restarting the machine empties it"
        return Finding("file system", WARNING, fact, _ANOTHER_PATH)
    return Finding("file system", OK, kind or "unknown")


def check_speed(speed: DiskSpeed) -> Finding:
    """Check the disk's speed, without the system's cache."""
    consequence = "training waits if activations arrive faster than that"
    advice = "Use another disk, or store.bits 8 for a quarter of the bytes."
    fact = f"writes {speed.write / 1e6:.0f} MB/s with fsync, reads {speed.read / 1e6:.0f} MB/s"
    return judge("disk speed", fact, (min(speed) < _SLOW_BYTES_S, WARNING, consequence, advice))


def check_lmdb(problem: str | None) -> Finding:
    """Check whether a message store works in the folder. problem: from `try_lmdb`."""
    if problem is not None:
        return Finding("LMDB", PROBLEM, problem, _ANOTHER_PATH)
    return Finding("LMDB", OK, "a message store was written, closed and read again; locks work")


def check_writable(folder: Path, error: OSError) -> Finding:
    """Make the finding for a folder that cannot be written."""
    fact = f"cannot write in {folder}: {error.strerror or error}"
    advice = f"Change its permissions (chmod, chown), or choose another store.path; you are user {os.getuid()}."
    return Finding("store folder", PROBLEM, fact, advice)


def existing_parent(path: Path) -> Path:
    """Return the folder `path`, or its first parent that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if os.path.isdir(folder))


def file_system(folder: Path, mounts: Iterable[tuple[str, str]]) -> str | None:
    """Return the kind of a folder's file system. mounts: (folder, kind) in the order of mounting."""
    result, depth = None, -1
    real = folder.resolve()
    for where, kind in mounts:
        mount = Path(where)
        if real.is_relative_to(mount) and len(mount.parts) >= depth:
            result, depth = kind, len(mount.parts)
    return result


def measure_disk(folder: Path, share: int = 1) -> DiskSpeed:
    """Write up to 32 MiB in at most two seconds, and read them. share: Divides bytes and seconds."""
    most, seconds = _CHUNK * max(1, _CHUNKS // share), _SECONDS / share
    block = os.urandom(_CHUNK)  # some disks compress
    file, written = folder / "speed", 0
    began = time.perf_counter()
    with open(file, "wb", buffering=0) as handle:
        while written < most and (not written or time.perf_counter() - began < seconds):
            written += handle.write(block)
            os.fsync(handle.fileno())
        write = written / (time.perf_counter() - began)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began, got = time.perf_counter(), 0
    with open(file, "rb", buffering=0) as handle:
        while (not got or time.perf_counter() - began < seconds) and (data := handle.read(_CHUNK)):
            got += len(data)
        read = got / (time.perf_counter() - began)
    file.unlink()
    return DiskSpeed(write, read)


def try_lmdb(folder: Path) -> str | None:
    """Try locks between processes, and a message store that is opened twice; return the first failure."""
    for attempt, message in (
        (_lock, "file locks do not work here: {}"),
        (_store, "a message store does not work here: {}"),
    ):
        try:
            problem = attempt(folder)
        except OSError as error:
            problem = error.strerror or str(error)
        except subprocess.TimeoutExpired:
            problem = "no answer within a minute"
        if problem is not None:
            return message.format(problem)
    return None


_LOCK_SCRIPT = """
import fcntl, sys
with open(sys.argv[1], "r+b") as handle:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        sys.exit(3)
"""


def _lock(folder: Path) -> str | None:
    with open(folder / "lock", "w+b") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return f"{errno.errorcode.get(error.errno or 0, '')} {error.strerror}"
        command = [sys.executable, "-S", "-c", _LOCK_SCRIPT, str(folder / "lock")]
        status = subprocess.run(command, capture_output=True, timeout=60, check=False).returncode
    if status == 0:
        return "two processes got the same lock, so two ranks could write to one store"
    return None if status == 3 else f"another process could not try one (exit status {status})"


def _store(folder: Path) -> str | None:
    try:
        from pipecomp.buffers import open_environment
    except ImportError as error:
        return str(error)

    m_nH = torch.arange(64 * 48, dtype=torch.float32).view(64, 48)
    try:
        for visit in range(2):
            environment = open_environment("lmdb", folder / "store", 0)
            store = environment.link("link-0", {})
            if visit == 0:
                store.put_many([(7, 1, m_nH.clone())])
                environment.commit()
                environment.flush()
            (value,) = store.get([7])
            environment.close()
            if value is None or not torch.equal(value.m_nH, m_nH):
                return "the values read are not the values stored"
    except StoreError as error:
        return str(error).replace(str(folder), "…")
    return None
