"""Files that appear whole or not at all, and how to know them again."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

UNFINISHED = ".part"  # ends the name of a file that is being written
_CHUNK = 16 << 20


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], *, synced: bool = True, part: Path | None = None) -> Iterator[Path]:
    """Yield a path to write to; what is there in the end takes the place of `path`, all at once.

    part: that path, beside `path`, where several may write at the same time; None for one that is always the same.
    synced: on the disk before it does, so that a power failure leaves the old file or the new one. If the body raises,
    `path` stays as it was, and nothing is left beside it. What is no file, as a pipe or /dev/stdout, is written to, and
    a link stays one.
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


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file (UTF-8) that appears with all of its text, or not at all."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def file_crc(path: str | os.PathLike[str]) -> int:
    """CRC-32 of a file's bytes."""
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc
