"""A rank's folder on disk: held by one process at a time, marked while not all of it has reached the disk.

`in-use` is locked by the process that works here; the system frees the lock when the process ends, however it ends.
`unsynced` exists from the first remark or step that is written to the close, and names the boot of the machine. A store
that is opened under another boot with the mark still there may have lost writes: see `lmdb_check`. It is not taken away
by each sync: to set it again costs an fsync, which can take seconds while others write to the same disk.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import lmdb

from pipecomp.errors import StoreError
from pipecomp.utils.files import atomic_write

DATA_FILE = "data.mdb"
LOCK_FILE = "lock.mdb"
IN_USE_FILE = "in-use"
UNSYNCED_FILE = "unsynced"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

# Locks of this kind belong to the process: a second open in the same process would not be refused, and closing it
# would free the first one's lock. So this process also remembers which folders it holds.
_held: set[str] = set()
_held_guard = threading.Lock()


def make_private(path: Path) -> None:
    """Make a folder, and those that it is in, which only their owner can open; what is there stays as it is."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)


def boot_id() -> str:
    """Names the current boot of the machine; empty where the system does not tell."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


class Folder(AbstractContextManager["Folder"]):
    """Holds a rank's folder until `release`. `shared` only looks: several may, but none beside a user that writes.

    Raises StoreError if the folder is in use, cannot be made, or (shared) is not there.
    """

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        self.path = path
        self._real = os.path.realpath(path)
        self._lock_fd = -1
        self._marked = False
        with explained(path, "use it as a message store"):
            if not shared:
                make_private(path)
            elif not (path / DATA_FILE).is_file():
                raise StoreError(f"{path}: no message store here")
            self._acquire(shared)

    def __exit__(self, *exc: object) -> None:
        self.release()

    def restarted(self) -> bool:
        """Whether the machine was started again since the last writes, which never were synced."""
        try:
            marked = (self.path / UNSYNCED_FILE).read_text(errors="replace").strip()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be read: {error}") from error
        return marked != boot_id()

    def mark_unsynced(self) -> None:
        """From now on the file may be ahead of the disk; the mark itself is not. Cheap when marked already."""
        if self._marked:
            return
        with explained(self.path, "write"):
            with open(self.path / UNSYNCED_FILE, "w") as file:
                file.write(boot_id() + "\n")
                file.flush()
                os.fsync(file.fileno())
            self._sync_folder()
        self._marked = True

    def mark_synced(self) -> None:
        """Everything has reached the disk, and nothing more will be written.

        Where the disk does not let the mark go, it stays: that costs a check after the machine was started again.
        """
        with suppress(OSError):
            (self.path / UNSYNCED_FILE).unlink()
            self._sync_folder()
        self._marked = False

    def release(self) -> None:
        """Let others use the folder; safe to call twice."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
        with _held_guard:
            _held.discard(self._real)

    def _acquire(self, shared: bool) -> None:
        with _held_guard:
            if self._real in _held:
                raise StoreError(f"{self.path}: is in use by this process already")
            _held.add(self._real)
        try:
            flags = os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT
            try:
                self._lock_fd = os.open(self.path / IN_USE_FILE, flags | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                return  # only looking, at a store that nobody ever locked
            self._lock(shared)
            if not shared:
                os.ftruncate(self._lock_fd, 0)
                os.write(self._lock_fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        except BaseException:
            self.release()
            raise

    def _lock(self, shared: bool) -> None:
        try:
            fcntl.lockf(self._lock_fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                user = os.read(self._lock_fd, 200).decode(errors="replace").strip() or "another process"
                raise StoreError(f"{self.path}: in use by {user}; each rank needs a folder of its own") from error
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                raise  # a file system without locks cannot tell; all others can

    def _sync_folder(self) -> None:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EBADF):  # of file systems that sync no folders
                raise
        finally:
            os.close(fd)


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


_FICLONE = 0x40049409  # Linux: let two files share their blocks until one changes them (XFS, Btrfs)


def _private(path: Path) -> BinaryIO:
    """Open a file to write, which only its owner can read."""
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")


def copy_file(source: Path, target: Path) -> None:
    """Copy a file that nobody writes meanwhile; the folder of `target` is made. Synced. StoreError if it fails."""
    with explained(target.parent, f"copy {source} there"):
        make_private(target.parent)
        with atomic_write(target) as part, source.open("rb") as old, _private(part) as new:
            if not _shared(old, new):  # outside of what its error handles: a full disk is the only reason to tell
                shutil.copyfileobj(old, new, 16 << 20)


def _shared(old: BinaryIO, new: BinaryIO) -> bool:
    """Let a new file share an old one's blocks; False on another file system, or one that cannot."""
    try:
        fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
    except OSError:
        return False
    return True
