"""Atomic file writes, locks and checksums."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

UNFINISHED = ".part"  # suffix of a file that is being written
_CHUNK = 16 << 20


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], *, synced: bool = True, part: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path; the file written there replaces `path` when the body ends.

    If the body raises, `path` is unchanged and the temporary file is removed. Pipes and character devices, such as
    /dev/stdout, are written directly; a symbolic link is followed and stays a link.

    Args:
        path: the file to replace.
        synced: flush the file to disk before it replaces `path`, so that a power failure leaves the old or the new
            file.
        part: the temporary path, in the same folder, if several processes may write at the same time; None derives it
            from `path`.
    """
    path = Path(path)
    if path.is_fifo() or path.is_char_device():
        yield path
        return
    if part is None:
        path = Path(os.path.realpath(path))
    part = part or path.with_name(path.name + UNFINISHED)
    try:
        yield part
        if synced:
            with part.open("rb+") as file:
                os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def atomic_write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 text file with `atomic_write`."""
    with atomic_write(path) as part:
        part.write_text(text, encoding="utf-8")


_locked: set[int] = set()  # descriptors of this process


def lock_file(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file or folder until `unlock_file`, or the end of the process. It never waits.

    Note:
        The lock belongs to the open file. A POSIX record lock belongs to the process, which loses it when it opens and
        closes the same file once more, as a copy of the folder does. A forked child gives its part of the lock up.

    Returns:
        False if somebody else has locked it. True also on a file system without locks.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    _locked.add(descriptor)
    return True


def unlock_file(descriptor: int) -> None:
    """Unlock and close a descriptor that this process has locked."""
    if descriptor in _locked:
        _locked.discard(descriptor)
        os.close(descriptor)


def _unlock_in_child() -> None:
    while _locked:
        os.close(_locked.pop())


os.register_at_fork(after_in_child=_unlock_in_child)  # a child that outlives the process would keep its locks


def file_crc(path: str | os.PathLike[str]) -> int:
    """Return the CRC-32 of a file."""
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
