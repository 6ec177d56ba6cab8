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
import socket
import threading
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from pipecomp.buffers.lmdb_errors import explained
from pipecomp.errors import StoreError

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
