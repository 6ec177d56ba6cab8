"""Bring the records of the newest complete step to every machine, and make a checkpoint of them there."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from pipecomp.distributed.collectives import gathered, while_others_wait
from pipecomp.distributed.heartbeat import waiting_for_others
from pipecomp.distributed.rendezvous import all_ranks
from pipecomp.elastic.assembly import assemble
from pipecomp.elastic.index import IndexEntry, RecordFolder, complete_steps, find_records
from pipecomp.elastic.record import StateRecord, check_place
from pipecomp.errors import CheckpointError, WireError, write_error
from pipecomp.utils.files import UNFINISHED
from pipecomp.utils.units import format_size

_CHUNK_BYTES = 1 << 22
_RECEIVED = "received"  # subfolder for records of machines that are gone

Row = tuple[str, int, int, int, int, int]  # session, step, rank, world, size, CRC-32


def recover(path: str | os.PathLike[str], checkpoints: str | os.PathLike[str], *, after: int = -1) -> int | None:
    """Make a checkpoint of the newest step of which the records of all ranks are on the machines of this start.

    The machines may be other ones than those that wrote the records, and of another number. Each machine gets the
    records that it lacks from the first rank that has them.

    Args:
        path: `elastic.path`, the same on all machines.
        checkpoints: Folder of the checkpoints.
        after: Only steps after this one.

    Returns:
        The step of the checkpoint, which every machine now has; None if there is no such step.

    Raises:
        CheckpointError: On every rank, if the records cannot be read or the checkpoint cannot be written.
    """
    path, rank = Path(path), dist.get_rank()
    first_here = os.environ.get("LOCAL_RANK", "0") == "0"
    machines = [rank for rank, first in enumerate(gathered(first_here)) if first]
    own = {_row(entry): entry for entry in find_records([path])} if first_here else {}
    listed = _gathered_rows(list(own))
    for session, step, world in _candidates(listed, after):
        wanted = [row for row in own if (row[0], row[1], row[3]) == (session, step, world)]
        good = while_others_wait(partial(_good, wanted, own))
        have = [
            {row for row in rows if (row[0], row[1], row[3]) == (session, step, world)} for rows in _gathered_rows(good)
        ]
        rows = {row[2]: row for row in sorted(set().union(*have))}
        if len(rows) < world:
            continue
        with all_ranks().collective_errors():
            _check_room(path, sum(row[4] for row in rows.values() if first_here and row not in have[rank]))
        with all_ranks().collective_errors():
            failures = _FirstError()
            for row in rows.values():
                source = next(r for r in machines if row in have[r])
                takers = [r for r in machines if row not in have[r]]
                with failures:
                    if rank == source and takers:
                        _send_file(own[row].path, row[4], takers)
                    elif rank in takers:
                        _receive(row, source, path / _RECEIVED)
            failures.check()
        with all_ranks().collective_errors():
            make = partial(assemble, [path], checkpoints, step=step, session=session)
            while_others_wait(make if first_here else lambda: None)
        return step
    return None


def find_lost_step(path: str | os.PathLike[str], *, after: int) -> tuple[int, list[int]] | None:
    """Find the newest state after step `after` that was complete, and that the machines of this start do not have.

    Every rank must call this.

    Returns:
        Its step, and the ranks whose records are missing; None if nothing was lost.
    """
    first_here = os.environ.get("LOCAL_RANK", "0") == "0"
    own = [_row(entry) for entry in find_records([Path(path)])] if first_here else []
    rows = [row for rows in _gathered_rows(own) for row in rows]
    complete = {step for steps in gathered(complete_steps([Path(path)]) if first_here else []) for step in steps}
    found = [row for row in rows if row[1] in complete and row[1] > after]
    if not found:
        return None
    session, step, _, world, *_ = max(found, key=lambda row: row[1])
    missing = set(range(world)) - {row[2] for row in rows if row[:2] == (session, step)}
    return (step, sorted(missing)) if missing else None


def _row(entry: IndexEntry) -> Row:
    return (entry.session, entry.step, entry.rank, entry.world, entry.size, entry.crc)


def _gathered_rows(own: list[Row]) -> list[list[Row]]:
    """Return the rows of all ranks; every rank must call this. Raises WireError for a row that no record can have."""
    return [[_checked(row, rank) for row in rows] for rank, rows in enumerate(gathered(own))]


def _checked(row: Any, sender: int) -> Row:
    """Check a row of another rank, whose values become the path and the size of a file here."""
    try:
        session, step, rank, world, size, crc = row
        check_place(session, step, rank, world)
        if type(size) is not int or size < 0 or type(crc) is not int:
            raise ValueError(f"{size!r} bytes")
    except (TypeError, ValueError) as error:
        raise WireError(f"rank {sender} lists a record {repr(row)[:200]}: {error}") from error
    return session, step, rank, world, size, crc


def _check_room(path: Path, size: int) -> None:
    """Raise CheckpointError if the disk has no room for the records that are coming."""
    if not size:
        return
    path.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path).free
    if size > free:
        room = f"{format_size(free)} are free, the records of other machines take {format_size(size)}"
        raise CheckpointError(f"{path} cannot be written: {room}")


def _good(rows: list[Row], entries: dict[Row, IndexEntry]) -> list[Row]:
    return [row for row in rows if entries[row].problem() is None]


def _candidates(listed: Iterable[Iterable[Row]], after: int) -> list[tuple[str, int, int]]:
    """Return (session, step, world) of the steps that may be complete, the newest first."""
    ranks: dict[tuple[int, str, int], set[int]] = {}
    for rows in listed:
        for session, step, rank, world, _, _ in rows:
            if step > after:
                ranks.setdefault((step, session, world), set()).add(rank)
    complete = sorted((key for key, found in ranks.items() if len(found) == key[2]), reverse=True)
    return [(session, step, world) for step, session, world in complete]


def _device() -> torch.device:
    return torch.device(distributed_c10d._get_object_coll_device(None))


class _FirstError:
    """Keeps the first error of the files, so that the other files are sent and received in spite of it."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, (OSError, WireError, CheckpointError)):
            return False
        self._error = self._error or error
        return True

    def check(self) -> None:
        """Raise the error."""
        if self._error is not None:
            raise self._error


def _send_file(path: Path, size: int, takers: list[int]) -> None:
    """Send a file. An error is raised after the last chunk: the takers wait for all of them."""
    problem: OSError | None = None
    with contextlib.ExitStack() as opened:
        try:
            file = opened.enter_context(path.open("rb"))
        except OSError as error:
            problem = error
        for at in range(0, size, _CHUNK_BYTES):
            data = bytearray(min(_CHUNK_BYTES, size - at))
            try:
                if problem is None and file.readinto(data) < len(data):
                    problem = OSError(errno.EIO, "it has become shorter", str(path))
            except OSError as error:
                problem = error
            chunk = torch.frombuffer(data, dtype=torch.uint8).to(_device())
            with waiting_for_others():
                for taker in takers:
                    dist.send(chunk, taker)
    if problem is not None:
        raise problem


def _receive(row: Row, source: int, path: Path) -> None:
    """Write a record that another machine sends, and list it. Raises WireError unless it is the announced one."""
    session, step, rank, world, size, crc = row
    part = path / f"step-{step}-rank-{rank}.safetensors{UNFINISHED}"
    _receive_file(part, size, source)
    try:
        record = StateRecord.open(part)
        info = record.info
        if (info.session, info.step, info.rank, info.world, record.crc) != (session, step, rank, world, crc):
            raise WireError(f"rank {source} has sent another record than that of rank {rank} after step {step}")
    except WireError:
        part.unlink()
        raise
    os.replace(part, path / record.info.file_name)
    RecordFolder(path).add(StateRecord.open(path / record.info.file_name))


def _receive_file(path: Path, size: int, source: int) -> None:
    """Write a file that another rank sends. An error is raised after the last chunk: the sender cannot be stopped."""
    problem: OSError | None = None
    with contextlib.ExitStack() as opened:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = opened.enter_context(path.open("wb", buffering=0))
        except OSError as error:
            problem = error
        for at in range(0, size, _CHUNK_BYTES):
            chunk = torch.empty(min(_CHUNK_BYTES, size - at), dtype=torch.uint8, device=_device())
            with waiting_for_others():
                dist.recv(chunk, source)
            data = chunk.cpu().numpy().data
            try:
                while problem is None and data.nbytes:
                    data = data[file.write(data) :]
            except OSError as error:
                problem = error
    if problem is not None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise CheckpointError(f"{path} cannot be written: {write_error(problem, path)}") from problem
