"""Bring the records of the newest complete step to every machine, and make a checkpoint of them there."""

from __future__ import annotations

import os
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
from pipecomp.elastic.index import IndexEntry, RecordFolder, find_records
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
    data = np.memmap(entry.path, dtype=np.uint8, mode="r")
    for at in range(0, entry.size, _CHUNK_BYTES):
        chunk = torch.from_numpy(np.array(data[at : at + _CHUNK_BYTES])).to(_device())
        for taker in takers:
            dist.send(chunk, taker)


def _receive(row: Row, source: int, folder: RecordFolder) -> None:
    """Write a record that another machine sends, and list it. Raises WireError unless it is the announced one."""
    session, step, rank, _, size, crc = row
    part = folder.path / f"step-{step}-rank-{rank}.safetensors{UNFINISHED}"
    with part.open("wb") as file:
        for at in range(0, size, _CHUNK_BYTES):
            chunk = torch.empty(min(_CHUNK_BYTES, size - at), dtype=torch.uint8, device=_device())
            dist.recv(chunk, source)
            file.write(chunk.cpu().numpy().data)
    record = Record.open(part)
    if (record.info.session, record.info.step, record.info.rank, record.crc) != (session, step, rank, crc):
        part.unlink()
        raise WireError(f"rank {source} has sent another record than that of rank {rank} after step {step}")
    os.replace(part, folder.path / record.info.file_name)
    folder.add(Record.open(folder.path / record.info.file_name))
