"""Gather a Hugging Face folder from stages whose machines share no disk.

Every stage writes its shard into the folder on its own machine; what the first rank cannot see there is sent to it.
Names of files follow from the stages alone: one that another rank says is compared and never opened, or a machine that
was taken over could read and write files beside the folder.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pipecomp.allreduce.group import host_backend
from pipecomp.checkpoint.writing import ModelAttempts
from pipecomp.distributed.collectives import broadcast, gathered
from pipecomp.errors import OutputError, WireError
from pipecomp.stages.partition.saving import shard_name, write_index, write_shard
from pipecomp.stages.partition.splitting import Stage
from pipecomp.utils.files import UNFINISHED, file_crc
from pipecomp.utils.serialization import serializable

_PIECE = 1 << 24  # bytes a send
# Shards go one after the other, so that ranks wait for those before them: 100 GB over 10 Mbit/s. Of one that is lost
# meanwhile the heartbeat tells.
_PATIENCE = timedelta(days=1)


@serializable
class _Shard(NamedTuple):
    stage: int
    name: str
    size_bytes: int
    check: int  # CRC-32 of the file


def save_pretrained(stage: Stage, folder: str | Path, *, owners: list[int]) -> None:
    """Write the model to `folder` on the machine of rank `owners[0]`; every rank must call this.

    Args:
        stage: This rank's.
        folder: Where the model goes, on every machine.
        owners: For each stage the rank that writes it.

    Raises:
        SplitError: Where a tensor is missing.
        OutputError: On every rank if one of them cannot write.
        WireError: If another rank says what is not its to say.
    """
    folder, rank = Path(folder), dist.get_rank()
    files = [folder / _file_name(index, len(owners)) for index in range(len(owners))]
    attempts = ModelAttempts(folder)
    group, file = None, None
    if rank in owners:
        place = folder / shard_name(stage.index, stage.num_stages)
        file = attempts.attempt(lambda: write_shard(stage, folder), place)
    try:
        attempts.agree()
        # Not before: ranks that make a group notice by its silence alone that one is gone which has not come for that.
        group = dist.new_group(backend=host_backend(), timeout=_PATIENCE)
        mine = None if file is None else _Shard(stage.index, file.name, file.stat().st_size, file_crc(file))
        shards = _checked(gathered(mine, group), owners)
        lacking = [i for i, shard in enumerate(shards) if not _is_here(files[i], shard)] if rank == owners[0] else []
        for index in _stages_in(broadcast(lacking, owners[0], group), len(owners)):
            if rank == owners[index]:
                _send(files[index], shards[index].size_bytes, owners[0], group)
            elif rank == owners[0]:
                _receive(files[index], shards[index].size_bytes, owners[index], group, attempts)
        if rank == owners[0]:
            attempts.attempt(lambda: write_index(stage, folder))
        attempts.agree(group)
    except OutputError:
        for unfinished in folder.glob(f"*{UNFINISHED}"):
            unfinished.unlink(missing_ok=True)
        if group is not None:
            dist.destroy_process_group(group)
        raise
    dist.destroy_process_group(group)
    if rank in owners[1:] and file is not None:
        file.unlink(missing_ok=True)  # the first rank has its own copy, or has renamed this one


def _file_name(index: int, num_stages: int) -> str:
    """Name the file that a stage's `write_shard` makes, an adapter's too."""
    return shard_name(index, num_stages) + UNFINISHED


def _checked(said: list[Any], owners: list[int]) -> list[_Shard]:
    """Give each stage's shard, as its owner describes it. WireError if a rank describes anything else."""
    found: list[_Shard] = []
    for index, owner in enumerate(owners):
        shard, name = said[owner], _file_name(index, len(owners))
        if not isinstance(shard, _Shard) or shard[:2] != (index, name):
            raise WireError(
                f"rank {owner} describes {_shown(shard)} where the shard of stage {index}, {name}, is its own"
            )
        if type(shard.size_bytes) is not int or shard.size_bytes < 0:
            raise WireError(f"rank {owner} says that {name} has {_shown(shard.size_bytes)} bytes, allowed: from 0 on")
        found.append(shard)
    strangers = [rank for rank, shard in enumerate(said) if shard is not None and rank not in owners]
    if strangers:
        raise WireError(f"rank {strangers[0]} describes {_shown(said[strangers[0]])}, and writes no shard")
    return found


def _stages_in(said: Any, num_stages: int) -> list[int]:
    """Check which shards the first rank wants. WireError if it names anything but stages other than its own."""
    if not isinstance(said, list) or any(type(index) is not int or not 0 < index < num_stages for index in said):
        raise WireError(
            f"the first rank wants the shards of {_shown(said)}, allowed: stages from 1 to {num_stages - 1}"
        )
    return said


def _shown(value: object) -> str:
    return repr(value)[:200]


def _is_here(file: Path, shard: _Shard) -> bool:
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
