"""Copies of a store's file: one that appears whole or not at all, and takes no space where blocks can be shared."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path

from pipecomp.buffers.lmdb_errors import explained
from pipecomp.files import replacing

_FICLONE = 0x40049409  # Linux: let two files share their blocks until one changes them (XFS, Btrfs)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file that nobody writes meanwhile; the folder of `target` is made. Synced. StoreError if it fails."""
    with explained(target.parent, f"copy {source} there"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as part, source.open("rb") as old, part.open("wb") as new:
            try:
                fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
            except OSError:  # another file system, or one that cannot
                shutil.copyfileobj(old, new, 16 << 20)
