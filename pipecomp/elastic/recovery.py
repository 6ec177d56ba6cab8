"""Bring the records of the newest complete step to every machine, and make a checkpoint of them there.

The checkpoint of a single machine, which has no second home, is brought to the others as it is.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from pipecomp.distributed.collectives import gathered, while_others_wait
from pipecomp.distributed.rendezvous import all_ranks
from pipecomp.elastic.assembly import assemble
from pipecomp.elastic.index import IndexEntry, RecordFolder, complete_steps, find_records
from pipecomp.elastic.record import Record
from pipecomp.errors import WireError
from pipecomp.utils.files import UNFINISHED

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
    listed = [[tuple(row) for row in rows] for rows in gathered(list(own))]
    for session, step, world in _candidates(listed, after):
        wanted = [row for row in own if row[:2] == (session, step)]
        good = while_others_wait(partial(_good, wanted, own))
        have = [{tuple(row) for row in rows} for rows in gathered(good)]
        rows = {row[2]: row for row in sorted(set().union(*have))}
        if len(rows) < world:
            continue
        with all_ranks().collective_errors():
            received = None
            for row in rows.values():
                source = next(r for r in machines if row in have[r])
                takers = [r for r in machines if row not in have[r]]
                if rank == source and takers:
                    _send(own[row], takers)
                elif rank in takers:
                    received = received or RecordFolder(path / _RECEIVED)
                    _receive(row, source, received)
        with all_ranks().collective_errors():
            while_others_wait(partial(assemble, [path], checkpoints, step=step) if first_here else lambda: None)
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
    rows = [tuple(row) for rows in gathered(own) for row in rows]
    complete = {step for steps in gathered(complete_steps([Path(path)]) if first_here else []) for step in steps}
    found = [row for row in rows if row[1] in complete and row[1] > after]
    if not found:
        return None
    session, step, _, world, *_ = max(found, key=lambda row: row[1])
    missing = set(range(world)) - {row[2] for row in rows if row[:2] == (session, step)}
    return (step, sorted(missing)) if missing else None


def share_checkpoint(folder: str | os.PathLike[str], holder: int, takers: list[int]) -> None:
    """Bring the folder of a checkpoint from one machine to others; every rank must call this.

    Args:
        folder: The checkpoint, under the same name on all machines. On the others it is replaced.
        holder: The first rank of the machine that has it.
        takers: The first ranks of the machines that do not.

    Raises:
        WireError: On every rank, if its files cannot be below the folder.
        OutputError, OSError: On every rank, if a machine cannot write it.
    """
    target, rank = Path(folder), dist.get_rank()
    part = target.with_name(f"{target.name}.{secrets.token_hex(4)}{UNFINISHED}")
    files = []
    if rank == holder:
        paths = sorted(path for path in target.rglob("*") if path.is_file())
        files = [(str(path.relative_to(target)), path.stat().st_size) for path in paths]
    listed = gathered(files)[holder]
    with all_ranks().collective_errors():
        for name, size in listed:
            path = Path(name)
            if path.is_absolute() or ".." in path.parts or type(size) is not int or size < 0:
                raise WireError(f"rank {holder} sent a checkpoint with a file {name!r}")
    for name, size in listed:
        if rank == holder and size:
            _send_file(target / name, size, takers)
        elif rank in takers:
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            _receive_file(part / name, size, holder)
    with all_ranks().collective_errors():
        if rank in takers:
            shutil.rmtree(target, ignore_errors=True)
            os.replace(part, target)


def _row(entry: IndexEntry) -> Row:
    return (entry.session, entry.step, entry.rank, entry.world, entry.size, entry.crc)


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


def _send(entry: IndexEntry, takers: list[int]) -> None:
    _send_file(entry.path, entry.size, takers)


def _send_file(path: Path, size: int, takers: list[int]) -> None:
    data = np.memmap(path, dtype=np.uint8, mode="r")
    for at in range(0, size, _CHUNK_BYTES):
        chunk = torch.from_numpy(np.array(data[at : at + _CHUNK_BYTES])).to(_device())
        for taker in takers:
            dist.send(chunk, taker)


def _receive(row: Row, source: int, folder: RecordFolder) -> None:
    """Write a record that another machine sends, and list it. Raises WireError unless it is the announced one."""
    session, step, rank, _, size, crc = row
    part = folder.path / f"step-{step}-rank-{rank}.safetensors{UNFINISHED}"
    _receive_file(part, size, source)
    record = Record.open(part)
    if (record.info.session, record.info.step, record.info.rank, record.crc) != (session, step, rank, crc):
        part.unlink()
        raise WireError(f"rank {source} has sent another record than that of rank {rank} after step {step}")
    os.replace(part, folder.path / record.info.file_name)
    folder.add(Record.open(folder.path / record.info.file_name))


def _receive_file(path: Path, size: int, source: int) -> None:
    with path.open("wb") as file:
        for at in range(0, size, _CHUNK_BYTES):
            chunk = torch.empty(min(_CHUNK_BYTES, size - at), dtype=torch.uint8, device=_device())
            dist.recv(chunk, source)
            file.write(chunk.cpu().numpy().data)
