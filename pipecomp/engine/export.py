"""Write a Hugging Face folder from stages whose machines may share no disk.

Every stage writes its shard into the folder on its own machine. Shards that rank 0 does not see are sent to it.

Note: [File names] Names of files follow from the stages alone. A name that another rank sends is compared and never
opened; otherwise a compromised machine could read and write files outside the folder.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pipecomp.allreduce.group import host_backend
from pipecomp.checkpoint.writing import CollectiveModelWrite
from pipecomp.distributed.collectives import broadcast, gathered
from pipecomp.errors import OutputError, WireError
from pipecomp.stages.partition.saving import shard_name, write_index, write_shard
from pipecomp.stages.partition.stage import Stage
from pipecomp.utils.files import UNFINISHED, file_crc
from pipecomp.utils.serialization import serializable

_CHUNK = 1 << 24  # bytes a send
# Shards are sent one after the other, 100 GB over 10 Mbit/s; the heartbeat detects a rank that is lost meanwhile.
_TIMEOUT = timedelta(days=1)


@serializable
class _ShardFile(NamedTuple):
    stage: int
    name: str
    size_bytes: int
    check: int  # CRC-32 of the file


def save_pretrained(stage: Stage, folder: str | Path, *, owners: list[int]) -> None:
    """Write the model to `folder` on the machine of rank `owners[0]`; every rank must call this.

    Args:
        stage: This rank's.
        folder: The model's folder, on every machine.
        owners: The rank that writes each stage.

    Raises:
        SplitError: A tensor is missing.
        OutputError: On every rank, if one of them cannot write.
        WireError: Another rank describes a file that is not its own.
    """
    folder, rank = Path(folder), dist.get_rank()
    files = [folder / _file_name(index, len(owners)) for index in range(len(owners))]
    write = CollectiveModelWrite(folder)
    group, file = None, None
    if rank in owners:
        path = folder / shard_name(stage.index, stage.num_stages)
        file = write.attempt(lambda: write_shard(stage, folder), path)
    try:
        write.raise_problems()
        # After the check: ranks that create a group notice a missing rank only by its silence.
        group = dist.new_group(backend=host_backend(), timeout=_TIMEOUT)
        own = None if file is None else _ShardFile(stage.index, file.name, file.stat().st_size, file_crc(file))
        shards = _checked_shards(gathered(own, group), owners)
        missing = [i for i, shard in enumerate(shards) if not _exists(files[i], shard)] if rank == owners[0] else []
        for index in _checked_stages(broadcast(missing, owners[0], group), len(owners)):
            if rank == owners[index]:
                _send(files[index], shards[index].size_bytes, owners[0], group)
            elif rank == owners[0]:
                _receive(files[index], shards[index].size_bytes, owners[index], group, write)
        if rank == owners[0]:
            write.attempt(lambda: write_index(stage, folder))
        write.raise_problems(group)
    except OutputError:
        for unfinished in folder.glob(f"*{UNFINISHED}"):
            unfinished.unlink(missing_ok=True)
        if group is not None:
            dist.destroy_process_group(group)
        raise
    dist.destroy_process_group(group)
    if rank in owners[1:] and file is not None:
        file.unlink(missing_ok=True)  # rank 0 has its own copy, or has renamed this one


def _file_name(index: int, num_stages: int) -> str:
    """Name of the file that a stage's `write_shard` writes, also for an adapter."""
    return shard_name(index, num_stages) + UNFINISHED


def _checked_shards(answers: list[Any], owners: list[int]) -> list[_ShardFile]:
    """The shard of each stage as its owner describes it. Raises WireError for any other description."""
    shards: list[_ShardFile] = []
    for index, owner in enumerate(owners):
        shard, name = answers[owner], _file_name(index, len(owners))
        if not isinstance(shard, _ShardFile) or shard[:2] != (index, name):
            raise WireError(f"rank {owner} describes {_shown(shard)}, allowed: the shard of stage {index}, {name}")
        if type(shard.size_bytes) is not int or shard.size_bytes < 0:
            raise WireError(f"rank {owner} gives {name} a size of {_shown(shard.size_bytes)} bytes, allowed: 0 or more")
        shards.append(shard)
    for rank, shard in enumerate(answers):
        if shard is not None and rank not in owners:
            raise WireError(f"rank {rank} describes {_shown(shard)}, and writes no shard")
    return shards


def _checked_stages(answer: Any, num_stages: int) -> list[int]:
    """The stages whose shards rank 0 requests. Raises WireError for anything but stages other than its own."""
    if not isinstance(answer, list) or any(type(index) is not int or not 0 < index < num_stages for index in answer):
        raise WireError(f"rank 0 requests the shards of {_shown(answer)}, allowed: stages from 1 to {num_stages - 1}")
    return answer


def _shown(value: object) -> str:
    return repr(value)[:200]


def _exists(file: Path, shard: _ShardFile) -> bool:
    return file.is_file() and file.stat().st_size == shard.size_bytes and file_crc(file) == shard.check


def _send(file: Path, size_bytes: int, to: int, group: dist.ProcessGroup) -> None:
    with file.open("rb") as source:
        for start in range(0, size_bytes, _CHUNK):
            chunk = bytearray(source.read(min(_CHUNK, size_bytes - start)))
            dist.send(torch.frombuffer(chunk, dtype=torch.uint8), to, group=group)


def _receive(file: Path, size_bytes: int, source: int, group: dist.ProcessGroup, write: CollectiveModelWrite) -> None:
    """Receive a file and write it. After a failed write the rest is received and dropped: the sender continues."""

    def append(chunk: torch.Tensor) -> None:
        with file.open("ab") as target:
            target.write(memoryview(chunk.numpy()))

    write.attempt(lambda: file.write_bytes(b""))
    for start in range(0, size_bytes, _CHUNK):
        chunk = torch.empty(min(_CHUNK, size_bytes - start), dtype=torch.uint8)
        dist.recv(chunk, source, group=group)
        write.attempt(partial(append, chunk))
