"""Gather a Hugging Face folder from stages whose machines share no disk.

Every stage writes its shard into the folder on its own machine; what the first rank cannot see there is sent to it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from pipecomp.allreduce.group import host_backend
from pipecomp.checkpoint.writing import ModelAttempts
from pipecomp.cluster.collectives import broadcast, gathered
from pipecomp.errors import OutputError
from pipecomp.files import UNFINISHED, file_crc
from pipecomp.plain_objects import exchanged
from pipecomp.stages.partition.saving import shard_name, write_index, write_shard
from pipecomp.stages.partition.splitting import Stage

_PIECE = 1 << 24  # bytes a send


@exchanged
class _Shard(NamedTuple):
    stage: int
    name: str
    size_bytes: int
    check: int  # CRC-32 of the file


def save_pretrained(stage: Stage, folder: str | Path, *, owners: list[int]) -> None:
    """Write the model to `folder` on the machine of rank `owners[0]`; every rank must call this.

    owners: for each stage the rank that writes it. Raises SplitError where a tensor is missing, OutputError on every
    rank if one of them cannot write.
    """
    folder, rank = Path(folder), dist.get_rank()
    attempts = ModelAttempts(folder)
    group = dist.new_group(backend=host_backend())
    file = None
    if rank in owners:
        place = folder / shard_name(stage.index, stage.num_stages)
        file = attempts.attempt(lambda: write_shard(stage, folder), place)
    try:
        attempts.agree()
        mine = None if file is None else _Shard(stage.index, file.name, file.stat().st_size, file_crc(file))
        shards = [shard for shard in gathered(mine, group) if shard is not None]
        lacking = [shard for shard in shards if not _is_here(folder, shard)] if rank == owners[0] else []
        for shard in broadcast(lacking, owners[0], group):
            if rank == owners[shard.stage]:
                _send(folder / shard.name, shard.size_bytes, owners[0], group)
            elif rank == owners[0]:
                _receive(folder / shard.name, shard.size_bytes, owners[shard.stage], group, attempts)
        if rank == owners[0]:
            attempts.attempt(lambda: write_index(stage, folder))
        attempts.agree()
    except OutputError:
        for unfinished in folder.glob(f"*{UNFINISHED}"):
            unfinished.unlink(missing_ok=True)
        dist.destroy_process_group(group)
        raise
    dist.destroy_process_group(group)
    if rank in owners[1:] and file is not None:
        file.unlink(missing_ok=True)  # the first rank has its own copy, or has renamed this one


def _is_here(folder: Path, shard: _Shard) -> bool:
    file = folder / shard.name
    return file.is_file() and file.stat().st_size == shard.size_bytes and file_crc(file) == shard.check


def _send(file: Path, size_bytes: int, to: int, group: dist.ProcessGroup) -> None:
    with file.open("rb") as source:
        for start in range(0, size_bytes, _PIECE):
            piece = bytearray(source.read(min(_PIECE, size_bytes - start)))
            dist.send(torch.frombuffer(piece, dtype=torch.uint8), to, group=group)


def _receive(file: Path, size_bytes: int, source: int, group: dist.ProcessGroup, attempts: ModelAttempts) -> None:
    """Take a file and write it; what the disk refuses is taken and dropped, for who sends does not know."""
    attempts.attempt(lambda: file.write_bytes(b""))
    for start in range(0, size_bytes, _PIECE):
        piece = torch.empty(min(_PIECE, size_bytes - start), dtype=torch.uint8)
        dist.recv(piece, source, group=group)
        attempts.attempt(functools.partial(_append, file, piece))


def _append(file: Path, piece: torch.Tensor) -> None:
    with file.open("ab") as target:
        target.write(memoryview(piece.numpy()))
