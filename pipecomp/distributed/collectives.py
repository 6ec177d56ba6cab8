"""Collectives for plain objects, encoded as JSON (see pipecomp/utils/serialization.py).

Note:
    torch's own object collectives pickle, so that received bytes can run code. They allocate whatever size another rank
    announces, and pad short objects with uninitialized memory. Here sizes are limited, and the padding is zeros.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any, BinaryIO, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from pipecomp.distributed.heartbeat import run_in_thread, waiting_for_others
from pipecomp.errors import WireError
from pipecomp.utils.serialization import decode, encode

MAX_OBJECT_BYTES = 1 << 28
_ROUND_S = 10.0  # well below the timeout of collectives
_Value = TypeVar("_Value")


def open_groups() -> set[dist.ProcessGroup]:
    """Return the process groups of this process that have not been destroyed."""
    return set(distributed_c10d._world.pg_map)


def gathered(value: Any, group: Any = None) -> list[Any]:
    """Return the values of all ranks, by rank; all ranks must call this. Raises WireError above the size limit."""
    with waiting_for_others() if group is None else contextlib.nullcontext():
        return _gathered(value, group)


def _gathered(value: Any, group: Any) -> list[Any]:
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
    """Return the value of rank `src` on every rank; all ranks must call this. Raises WireError above the limit."""
    with waiting_for_others() if group is None else contextlib.nullcontext():
        return _broadcast(value, src, group)


def _broadcast(value: Any, src: int, group: Any) -> Any:
    mine = dist.get_rank() == src
    data, device = _prepared(value if mine else None, group)
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, src, group=group)
    _check(src, int(size))
    content = _tensor(data).to(device) if mine else torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(content, src, group=group)
    return _value(content)


def while_others_wait(act: Callable[[], _Value], group: Any = None) -> _Value:
    """Call `act`, which may take longer than the timeout of collectives; all ranks must call this.

    Short collectives keep the ranks together until every rank has finished. Returns or raises what `act` does.
    """
    _, acting = run_in_thread(act, "pipecomp-acting")
    while not all(gathered(bool(wait([acting], _ROUND_S).done), group)):
        pass
    return acting.result()


def exchange_objects_as_json() -> None:
    """Let torch's own object collectives encode JSON from now on, also in DeepSpeed's calls; all ranks must call this.

    It replaces the pickler and unpickler in torch's module, which every backend uses.
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
    """Encode a value; also return the device that the backend needs."""
    exchange_objects_as_json()
    return encode(value), torch.device(distributed_c10d._get_object_coll_device(group))


def _check(rank: int, count: int) -> None:
    if not 0 <= count <= MAX_OBJECT_BYTES:
        raise WireError(f"rank {rank} sends an object of {count} bytes, allowed: {MAX_OBJECT_BYTES}")


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _value(content: Tensor) -> Any:
    return decode(content.cpu().numpy().tobytes())
