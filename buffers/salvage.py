"""Saving what is whole of a store whose pages are damaged.

LMDB believes its file, and a damaged page can crash the process that reads it. So a process of its own does, value by
value; what it has saved when it ends, however it ends, is kept. Every value has a CRC-32, so none is taken that is not
what was stored.

    python -m pipecomp.buffers.salvage FOLDER TARGET
"""

from __future__ import annotations

import resource
import struct
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

import lmdb

from pipecomp.buffers.lmdb_check import read_checked, structure_problems
from pipecomp.buffers.lmdb_file import FORMAT_KEY, ValueFile, read_remarks
from pipecomp.buffers.lmdb_folder import DATA_FILE
from pipecomp.errors import StoreError
from pipecomp.utils.processes import python_module_command

_LIMIT_S = 60.0
_BYTES_PER_S = 20e6
_BATCH = 64
_UNREADABLE = (StoreError, lmdb.Error, ValueError, OverflowError, MemoryError, struct.error)


def salvage(folder: Path, target: Path) -> bool:
    """Copy what is whole of the store in `folder` into a new one in `target`. False if nothing could be.

    Args:
        folder: Held by this process, and used by nobody else.
        target: An empty folder.
    """
    size = (folder / DATA_FILE).stat().st_size
    command = python_module_command("pipecomp.buffers.salvage", str(folder), str(target))
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(command, timeout=_LIMIT_S + size / _BYTES_PER_S, check=False, capture_output=True)
    if not (target / DATA_FILE).is_file() or structure_problems(target):
        return False
    with closing(ValueFile(target, readonly=True)) as found:
        return found.meta(FORMAT_KEY) is not None and bool(found.table_names())


def _copy(folder: Path, target: Path) -> None:
    with closing(ValueFile(folder, readonly=True)) as old, closing(ValueFile(target)) as new:
        remarks = read_remarks(old)
        for key, remark in remarks.whole.items():
            new.set_meta(key, remark)
        for name in remarks.links:
            with suppress(*_UNREADABLE):
                _copy_table(old, new, name)
        new.sync()


def _copy_table(old: ValueFile, new: ValueFile, name: str) -> None:
    source, into = old.table(name, create=False), new.table(name)
    batch: dict[int, bytearray | None] = {}
    for slot in range(old.slots(source)):
        with suppress(*_UNREADABLE):
            sample = old.sample_at(source, slot)
            batch[sample] = read_checked(old, source, slot, sample)
        if len(batch) >= _BATCH:
            new.write({into: batch})
            batch = {}
    new.write({into: batch})


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _copy(Path(sys.argv[1]), Path(sys.argv[2]))
