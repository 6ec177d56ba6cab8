"""Atomic file writes and checksums."""

from __future__ import annotations

import contextlib
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


def file_crc(path: str | os.PathLike[str]) -> int:
    """Return the CRC-32 of a file."""
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc
