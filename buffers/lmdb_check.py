"""Finding out whether a store on disk is sound, without trusting it.

LMDB itself believes its file: a damaged page can crash the process. So the structure is checked first by a walker
that never hands the file to LMDB (`lmdb.verify`), and then every value by its CRC-32.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from lmdb.verify import VerifyError
from lmdb.verify import verify as verify_structure

from pipecomp.buffers.lmdb_file import Table, ValueFile, read_remarks
from pipecomp.buffers.lmdb_folder import DATA_FILE
from pipecomp.buffers.value import verify_value
from pipecomp.errors import StoreError


class Checked(NamedTuple):
    """One stored value: `problem` is None if it is intact."""

    sample: int
    value: bytearray | None
    problem: str | None


def structure_problems(path: Path) -> list[str]:
    """List what is wrong with the pages of the LMDB file in folder `path`, and with the keys in them."""
    try:
        problems = list(verify_structure(str(path / DATA_FILE), subdir=False))
        if not problems:
            with closing(ValueFile(path, readonly=True)) as file:
                for name in file.table_names():
                    file.scan(file.table(name, create=False))
    except (VerifyError, OSError, StoreError) as error:
        return [str(error)]
    return problems


def read_checked(file: ValueFile, table: Table, slot: int, sample: int) -> bytearray:
    """Read the value in a slot and compare it with its header, its key's sample and its CRC-32, or StoreError."""
    where = table.where(sample)
    value = file.read_at(table, slot, sample)
    named = verify_value(value, where).sample
    if named != sample:
        raise StoreError(f"{where}: holds a value of sample {named}")
    return value


def check_values(file: ValueFile, table: Table) -> Iterator[Checked]:
    """Read and check every value of a link."""
    for row in file.scan(table):
        try:
            yield Checked(row.sample, read_checked(file, table, row.slot, row.sample), None)
        except StoreError as error:
            yield Checked(row.sample, None, str(error))


def unsound(path: Path) -> str | None:
    """Find the first thing that is wrong with the store in folder `path`, None if all of it can be trusted."""
    problems = structure_problems(path)
    if problems:
        return f"its pages are damaged: {problems[0]}"
    with closing(ValueFile(path, readonly=True)) as file:
        tables = (file.table(name, create=False) for name in file.table_names())
        damaged = (c.problem for table in tables for c in check_values(file, table) if c.problem is not None)
        return next(itertools.chain(read_remarks(file).problems.values(), damaged), None)
