"""A rank's store folder: its files, the lock of its user, copies, and file errors as StoreErrors with a remedy.

Note: [Full check]
    The file `unsynced` exists while a process has the store open for writing. An orderly close removes it once all
    commits are on disk, unless that process found damage. An opening that finds it follows a killed process, a power
    failure or such damage: it walks all pages, then reads and verifies every value, which takes about a second per GB
    from memory.

    After an orderly close this could only find bits flipped at rest, and every read of a value verifies its CRC-32.
    Such an opening compares the file's length with its headers, and checks the metadata and, as it loads the index, the
    keys and headers of values. LMDB can crash on a damaged page: the mark is on disk before LMDB opens the file, so the
    next start finds that page.
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

from pipecomp.buffers.base import DamagedStoreError
from pipecomp.errors import StoreError, write_limits
from pipecomp.utils.files import atomic_write, lock_file, unlock_file

DATA_FILE = "data.mdb"
LOCK_FILE = "lock.mdb"
IN_USE_FILE = "in-use"
UNSYNCED_FILE = "unsynced"
DAMAGED_FILE = DATA_FILE + ".damaged"  # a file that was set aside; the next one replaces it

_FICLONE = 0x40049409  # Linux: let two files share their blocks until one changes them (XFS, Btrfs)
_LIMITED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # EIO: LMDB's for a short write
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENODEV)
_DAMAGED = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.NotFoundError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)

# POSIX locks belong to the process: a second open in the same process is not refused, and closing it frees the first
# one's lock. So the process also records which folders it uses.
_used: set[str] = set()
_used_guard = threading.Lock()


@contextmanager
def store_errors(path: Path, action: str) -> Iterator[None]:
    """Turn lmdb.Error and OSError into a StoreError that names the folder, the action and a remedy.

    Raises:
        DamagedStoreError: LMDB finds its file damaged.
        StoreError: any other reason, such as a full disk.
    """
    try:
        yield
    except _DAMAGED as error:
        remedy = f"Damaged, or not a message store: `pipecomp store prune {path} --everything` removes it"
        raise DamagedStoreError(f"{path}: cannot {action}: {error}. {remedy}") from error
    except (lmdb.Error, OSError) as error:
        raise StoreError(f"{path}: cannot {action}: {error}{_remedy(error, path)}") from error


def is_refused_write(error: StoreError) -> bool:
    """Return whether disk, permissions or address space refused a write; earlier data is intact."""
    return not isinstance(error, DamagedStoreError) and isinstance(error.__cause__, (lmdb.Error, OSError))


def _remedy(error: lmdb.Error | OSError, path: Path) -> str:
    code = error.code if isinstance(error, lmdb.Error) else error.errno
    free_space = "free some space there, set store.max_bytes, or give a store.path on another disk"
    if code in _LIMITED:
        return f"{write_limits(code, path)}: {free_space}"
    if isinstance(error, lmdb.ReadonlyError) or code in _READ_ONLY:
        return ". It must be writable: change its permissions, or give another store.path"
    if code in _NO_LOCKS:
        return ". The file system has no locks, or maps no files: give a store.path on the machine's own disk"
    if code == errno.ENOMEM:
        return ". The process may not map more memory: see `ulimit -v`"
    return ""


def make_private_folder(path: Path) -> None:
    """Make a folder, and its missing parents, accessible to the owner only; existing ones stay as they are."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)


class RankFolder(AbstractContextManager["RankFolder"]):
    """Locks a rank's folder until `release`; the system frees the lock if the process dies.

    Args:
        path: the folder; made if it is missing, unless shared.
        shared: for reading only; several processes may, but none beside one that writes.

    Attributes:
        unsynced: the store was not closed in order, or its last user found damage.

    Raises:
        StoreError: the folder is in use, cannot be made, or (shared) has no store.
    """

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        self.path = path
        self._real = os.path.realpath(path)
        self._lock_fd = -1
        with store_errors(path, "use it as a message store"):
            if not shared:
                make_private_folder(path)
            elif not (path / DATA_FILE).is_file():
                raise StoreError(f"{path} holds no message store")
            with _used_guard:
                if self._real in _used:
                    raise StoreError(
                        f"{path}: is in use by this process already. Close the engine that uses it with close(), or "
                        "the trainer with end(), or set another store.path"
                    )
                _used.add(self._real)
            try:
                self._lock(shared)
                self.unsynced = (path / UNSYNCED_FILE).exists()
            except BaseException:
                self.release()
                raise

    def __exit__(self, *exc: object) -> None:
        self.release()

    def set_aside(self) -> Path:
        """Rename the data file, so that a new one can begin, and return its new path."""
        with store_errors(self.path, "set the damaged file aside"):
            (self.path / LOCK_FILE).unlink(missing_ok=True)
            os.replace(self.path / DATA_FILE, self.path / DAMAGED_FILE)
        return self.path / DAMAGED_FILE

    def mark_unsynced(self) -> None:
        """Create the mark of an open store, synced, so that a power failure leaves it."""
        with store_errors(self.path, "mark the message store as open"):
            mark = os.open(self.path / UNSYNCED_FILE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.fsync(mark)
            finally:
                os.close(mark)
            self._sync()

    def mark_synced(self) -> None:
        """Remove the mark: all data is on disk and checked. If the disk refuses, the next opening checks again."""
        with suppress(OSError):
            self._sync()  # the data file's name first
            (self.path / UNSYNCED_FILE).unlink(missing_ok=True)

    def remove_store(self) -> None:
        """Delete the store's files, and the folders if they are empty then. What the disk keeps, stays."""
        with suppress(OSError):
            for name in (DATA_FILE, LOCK_FILE, DAMAGED_FILE, UNSYNCED_FILE, IN_USE_FILE):
                (self.path / name).unlink(missing_ok=True)
            self.path.rmdir()
            self.path.parent.rmdir()

    def release(self) -> None:
        """Unlock the folder; safe to call twice."""
        unlock_file(self._lock_fd)
        self._lock_fd = -1
        with _used_guard:
            _used.discard(self._real)

    def _sync(self) -> None:
        folder = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EBADF):  # those of a file system that syncs no folders
                raise
        finally:
            os.close(folder)

    def _lock(self, shared: bool) -> None:
        flags = os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT
        try:
            self._lock_fd = os.open(self.path / IN_USE_FILE, flags | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            return  # shared access to a store that was never locked
        locked, user = False, ""
        try:
            locked = lock_file(self._lock_fd, shared=shared)
            user = "" if locked else os.read(self._lock_fd, 200).decode(errors="replace").strip()
        finally:
            if not locked:
                os.close(self._lock_fd)
        if not locked:
            user = user or "another process"
            raise StoreError(f"{self.path}: in use by {user}; each rank needs a folder of its own")
        if not shared:
            os.ftruncate(self._lock_fd, 0)
            os.write(self._lock_fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode())


def copy_file(source: Path, target: Path) -> None:
    """Copy a file that has no writer, atomically and synced, sharing blocks where the file system can.

    The folder of `target` is made. StoreError if it fails.
    """

    def private(path: Path) -> BinaryIO:
        return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")

    with store_errors(target.parent, f"copy {source} there"):
        make_private_folder(target.parent)
        with atomic_write(target) as part, source.open("rb") as old, private(part) as new:
            # Outside of the handler, so that an error of the copy does not have this one as its context.
            if not _clone(old, new):
                shutil.copyfileobj(old, new, 16 << 20)


def _clone(old: BinaryIO, new: BinaryIO) -> bool:
    """Let a new file share an old one's blocks; False if the file system cannot."""
    try:
        fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
    except OSError:
        return False
    return True
