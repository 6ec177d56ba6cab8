"""Going on in spite of a damaged store: what is damaged goes, and is missing as if it had never been there."""

from __future__ import annotations

import os
from pathlib import Path

from pipecomp.buffers.admin import forget, prune, verify
from pipecomp.buffers.lmdb_check import unsound
from pipecomp.buffers.lmdb_folder import DATA_FILE
from pipecomp.errors import StoreError


def mend(path: str | os.PathLike[str], rank: int, *, copy: Path) -> str | None:
    """Read all that one rank has stored in `path`, and take away what is damaged. Nobody has the store open.

    Args:
        path: `store.path` of the run.
        rank: Whose store to look at.
        copy: Where the checkpoint that the run goes on from has a copy of it, if it has one, which then takes its
            place; unless it is of a store that was damaged already.

    Returns:
        What was done, in words; None if nothing was damaged.

    Raises:
        StoreError: If the store is in use, or cannot be changed.
    """
    folder = Path(path) / f"rank-{rank}"
    if not (folder / DATA_FILE).is_file():
        return None
    report = verify(folder)
    if not report.damaged:
        return None
    first = report.damaged[0]
    damage = f"the message store {folder} was damaged ({first.problem})"
    if (copy / DATA_FILE).is_file() and unsound(copy) is None:
        forget(path, rank)
        return f"{damage}: the checkpoint's copy takes its place"
    try:
        left = prune(folder)
    except StoreError:  # nothing of it can be read
        forget(path, rank)
        return f"{damage}: it starts empty"
    return f"{damage}: {left.kept} values are kept"
