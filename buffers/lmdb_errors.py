"""What LMDB and the system raise, as StoreErrors that name the folder and say what to do."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from pipecomp.errors import StoreError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENODEV)
_DAMAGED = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.NotFoundError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)


@contextmanager
def explained(path: Path, doing: str) -> Iterator[None]:
    """Turn lmdb.Error and OSError into a StoreError that says what could not be done."""
    try:
        yield
    except (lmdb.Error, OSError) as error:
        raise StoreError(f"{path}: cannot {doing}: {error}{_advice(error, path)}") from error


def of_the_disk(error: StoreError) -> bool:
    """Whether the disk, its permissions or the address space refused a write; what was stored before is unharmed."""
    cause = error.__cause__
    return isinstance(cause, (lmdb.Error, OSError)) and not isinstance(cause, _DAMAGED)


def _advice(error: lmdb.Error | OSError, path: Path) -> str:
    code = error.code if isinstance(error, lmdb.Error) else error.errno
    way_out = "free some space there, set store.max_bytes, or give a store.path on another disk"
    if code in _FULL:
        return f". The disk is full, or a limit on file sizes is reached: {way_out}"
    if code == errno.EIO:  # LMDB's word for a write that was cut short, which a full disk does
        return f". The disk has {_free_mib(path)} MiB free. If it is full: {way_out}"
    if isinstance(error, lmdb.ReadonlyError) or code in _READ_ONLY:
        return ". It must be writable: change its permissions, or give another store.path"
    if isinstance(error, _DAMAGED):
        return f". Damaged, or not a message store: `pipecomp store prune {path} --everything` removes it"
    if code in _NO_LOCKS:
        return ". The file system has no locks, or maps no files: give a store.path on the machine's own disk"
    if code == errno.ENOMEM:
        return ". The process may not map more memory: see `ulimit -v`"
    return ""


def _free_mib(path: Path) -> int | str:
    try:
        return shutil.disk_usage(path).free >> 20
    except OSError:
        return "an unknown number of"
