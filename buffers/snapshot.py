"""Copies of a store's file: one that appears whole or not at all, and takes no space where blocks can be shared."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import BinaryIO

from pipecomp.buffers.lmdb_errors import explained
from pipecomp.buffers.lmdb_folder import make_private
from pipecomp.utils.files import replacing

_FICLONE = 0x40049409  # Linux: let two files share their blocks until one changes them (XFS, Btrfs)


def _private(path: Path) -> BinaryIO:
    """Open a file to write, which only its owner can read."""
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")


def copy_file(source: Path, target: Path) -> None:
    """Copy a file that nobody writes meanwhile; the folder of `target` is made. Synced. StoreError if it fails."""
    with explained(target.parent, f"copy {source} there"):
        make_private(target.parent)
        with replacing(target) as part, source.open("rb") as old, _private(part) as new:
            if not _shared(old, new):  # outside of what its error handles: a full disk is the only reason to tell
                shutil.copyfileobj(old, new, 16 << 20)


def _shared(old: BinaryIO, new: BinaryIO) -> bool:
    """Let a new file share an old one's blocks; False on another file system, or one that cannot."""
    try:
        fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
    except OSError:
        return False
    return True
