"""Plain objects that all ranks exchange through torch's collectives, as JSON (see pipecomp/utils/serialization.py).

torch's own functions for objects pickle them, so that what is received can run code. They take memory for whatever size
another rank announces, and fill what a short object leaves of it with what happened to be there, which others then get.
Here sizes are limited, and the rest is zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from typing import Any, BinaryIO, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from pipecomp.distributed.heartbeat import run_in_thread
from pipecomp.errors import WireError
from pipecomp.utils.serialization import decode, encode

MOST_BYTES = 1 << 28  # of a rank's object
_MEET_S = 10.0  # well within the time that a collective waits
_Value = TypeVar("_Value")


def gathered(value: Any, group: Any = None) -> list[Any]:
    """Give each rank's value, by rank, on every rank; all ranks must call this. WireError for one that is too large."""
    data, device = _prepared(value, group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device), group=group)
    counts = [int(size) for size in sizes]
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    for rank, count in zip(ranks, counts, strict=True):
        _check(rank, count)
    own = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    own[: len(data)] = _tensor(data).to(device)
    rows = [torch.empty_like(own) for _ in counts]
    dist.all_gather(rows, own, group=group)
    return [_value(row[:count]) for row, count in zip(rows, counts, strict=True)]


def broadcast(value: Any, src: int = 0, group: Any = None) -> Any:
    """Give rank `src`'s value on every rank; all ranks must call this, and the others' values do not matter.

    WireError for one that is too large.
    """
    mine = dist.get_rank() == src
    data, device = _prepared(value if mine else None, group)
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, src, group=group)
    _check(src, int(size))
    content = _tensor(data).to(device) if mine else torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(content, src, group=group)
    return _value(content)


def while_others_wait(act: Callable[[], _Value], group: Any = None) -> _Value:
    """Return or raise what `act` does, which may take longer than a collective waits: all ranks must call this.

    They meet meanwhile, until all have done theirs.
    """
    _, acting = run_in_thread(act, "pipecomp-acting")
    while not all(gathered(bool(wait([acting], _MEET_S).done), group)):
        pass
    return acting.result()


def exchange_objects_as_json() -> None:
    """Let torch's own object collectives send JSON from now on, whoever calls them; all ranks must.

    They turn objects into bytes through two names of torch's module, on every backend.
    """
    distributed_c10d._pickler = _Writer  # type: ignore[assignment]
    distributed_c10d._unpickler = _Reader  # type: ignore[assignment]


class _Writer:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def dump(self, value: Any) -> None:
        self._file.write(encode(value))


class _Reader:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def load(self) -> Any:
        return decode(self._file.read())


def _prepared(value: Any, group: Any) -> tuple[bytes, torch.device]:
    """What is sent, and where a backend takes it. Who else exchanges objects, as DeepSpeed does, does so as JSON."""
    exchange_objects_as_json()
    return encode(value), torch.device(distributed_c10d._get_object_coll_device(group))


def _check(rank: int, count: int) -> None:
    if not 0 <= count <= MOST_BYTES:
        raise WireError(f"rank {rank} sends an object of {count} bytes, allowed: {MOST_BYTES}")


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _value(content: Tensor) -> Any:
    return decode(content.cpu().numpy().tobytes())
