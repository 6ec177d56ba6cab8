"""Asynchronous exchange of bytes among the ranks that average gradients.

Bytes are sent over gloo from host memory, in a process group of their own, which keeps other collectives from
interleaving. All ranks make all calls in the same order.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from pipecomp.errors import LinkError, PeerLostError
from pipecomp.utils.sockets import record_sockets, wait_until_sent

_CALLS = 1 << 18  # tags of one group's messages, which are then reused
_CHANNELS = 1 << 12
SLICE = 1 << 16  # bytes per message of a group that yields to packets; at 10 Mbit/s a packet waits 50 ms for them
_SLICE_S = 1.0  # after which the next slice is sent, even if this one has not left


@dataclass(slots=True)
class _GroupConnections:
    """The connections among some ranks, made once; each group on them has tags of its own."""

    process_group: Any
    sockets: frozenset[int]
    channels: int = 0


@dataclass(slots=True)
class _ConnectionCache:
    """All connections of the initialized torch.distributed; `world` is its group of all ranks."""

    world: Any = None
    shared: dict[tuple[tuple[int, ...], float], _GroupConnections] = field(default_factory=dict)
    made: Counter[tuple[int, ...]] = field(default_factory=Counter)


_cache = _ConnectionCache()


def _connect(ranks: list[int], timeout_s: float, *, shared: bool) -> _GroupConnections:
    global _cache
    if _cache.world is not dist.group.WORLD:
        _cache = _ConnectionCache(dist.group.WORLD)
    key = (tuple(ranks), timeout_s)
    connections = _cache.shared.get(key) if shared else None
    if connections is None:
        # Never destroyed: torch would reuse its name, and with it stale addresses.
        connections = _GroupConnections(*record_sockets(partial(_create_process_group, ranks, timeout_s)))
        if shared:
            _cache.shared[key] = connections
    connections.channels = (connections.channels + 1) % _CHANNELS
    return connections


def _create_process_group(ranks: list[int], timeout_s: float) -> Any:
    """Create a process group; only its members call this.

    Note:
        new_group(use_local_synchronization=True) names a group by the number of groups that this rank has created (or
        is in, before torch 2.15), and counts it among the groups of all ranks: ranks in different groups would
        deadlock.
    """
    name = f"pipecomp {ranks} {_cache.made[tuple(ranks)]}"
    _cache.made[tuple(ranks)] += 1
    group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.Backend(host_backend()),
        distributed_c10d._get_default_store(),
        distributed_c10d.GroupName(name),
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def shared_process_groups() -> set[Any]:
    """Return the process groups that all groups of the same ranks share; they stay as long as torch.distributed."""
    return {connections.process_group for connections in _cache.shared.values()}


def host_backend() -> str:
    """Return the backend of groups for host memory: "tls" if the default group is "tls", else "gloo"."""
    return "tls" if dist.get_backend() == "tls" else "gloo"


@dataclass(slots=True)
class Pending:
    """Messages in transit. `received[r]` holds the bytes of rank r of the group; read it after `wait`."""

    received: list[Tensor]
    receives: list[tuple[int, Any]] = field(default_factory=list)
    sends: list[tuple[int, Any]] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)

    def wait(self) -> list[Tensor]:
        """Return the bytes of all ranks, including this one. Raises PeerLostError for a rank that is gone or silent."""
        for rank, work in self.receives:
            _wait(rank, work)
        self.receives.clear()
        return self.received

    def finish(self) -> None:
        """Wait until this rank's bytes are sent."""
        for rank, work in self.sends:
            _wait(rank, work)
        self.sends.clear()
        self.kept.clear()


def _wait(rank: int, work: Any) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise PeerLostError(f"gradients: rank {rank} is gone or silent ({reason})", rank) from error


class Group:
    """Exchanges bytes among n ranks. All ranks of the group must create it at the same point.

    Args:
        group: a process group or a list of global ranks; None for all ranks. Without torch.distributed there is one.
        timeout_s: seconds of silence after which a rank counts as lost.
        shared: share connections with other groups of the same ranks. Messages are matched by tags; torch's collectives
            are not, and need connections of their own if another thread starts them.

    Attributes:
        ranks: global ranks.
        rank: this rank's index in `ranks`.
        process_group: process group of the messages; None for a single rank, if `shared`.
        give_way: called before each `SLICE` bytes are sent, and may wait, so that no more is queued in the system; set
            on all ranks or none.
        bytes_sent: by this rank so far.

    Raises:
        LinkError: if this rank is not one of the group's.
    """

    def __init__(self, group: Any = None, *, timeout_s: float = 120.0, shared: bool = True) -> None:
        self.bytes_sent = 0
        self.give_way: Callable[[], None] | None = None
        self.timeout_s = timeout_s
        self._call = 0
        self._channel = 0
        self.process_group: Any = None
        self._sockets = frozenset[int]()
        self.ranks, self.rank = [0], 0
        if dist.is_available() and dist.is_initialized():
            if isinstance(group, (list, tuple)):
                self.ranks = list(group)
            else:
                self.ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
            if dist.get_rank() not in self.ranks:
                raise LinkError(f"rank {dist.get_rank()} is not one of the group's ranks {self.ranks}")
            self.rank = self.ranks.index(dist.get_rank())
            if len(self.ranks) > 1 or not shared:  # torch's collectives interpret None as all ranks
                connections = _connect(self.ranks, timeout_s, shared=shared)
                self.process_group, self._channel = connections.process_group, connections.channels
                self._sockets = connections.sockets

    def duplicate(self) -> Group:
        """Return a group of the same ranks with separate messages, for concurrent exchanges."""
        other = Group(self.ranks, timeout_s=self.timeout_s)
        other.give_way = self.give_way
        return other

    @property
    def size(self) -> int:
        """Number of ranks, n."""
        return len(self.ranks)

    def exchange(self, outgoing: list[Tensor], incoming: list[int]) -> Pending:
        """Send outgoing[r] (uint8 on the CPU) to each rank r, and receive incoming[r] bytes from it.

        Returns at once, or with `give_way` when the last slice is being sent.
        """
        tag = self._channel * _CALLS + self._call
        self._call = (self._call + 1) % _CALLS
        own = self.rank
        received = [
            outgoing[own] if r == own else torch.empty(count, dtype=torch.uint8) for r, count in enumerate(incoming)
        ]
        pending = Pending(received, kept=outgoing)
        group = self.process_group
        for r in self._others():
            for part in self._slices(received[r]):
                pending.receives.append((self.ranks[r], dist.irecv(part, self.ranks[r], group, tag)))
        for r in self._others():
            for part in self._slices(outgoing[r]):
                if self.give_way is not None:
                    if pending.sends:
                        _wait(*pending.sends.pop())  # gloo allows one wait per send
                        self.wait_until_sent()
                    self.give_way()
                pending.sends.append((self.ranks[r], dist.isend(part, self.ranks[r], group, tag)))
                self.bytes_sent += part.numel()
        return pending

    def wait_until_sent(self) -> None:
        """Wait until the system has sent what was handed to it, for at most a second."""
        wait_until_sent(self._sockets, _SLICE_S)

    def _slices(self, data: Tensor) -> tuple[Tensor, ...]:
        """Split bytes into messages; none for no bytes."""
        if self.give_way is not None:
            return data.split(SLICE) if data.numel() else ()
        return (data,) if data.numel() else ()

    def _others(self) -> list[int]:
        """Return the other ranks, starting with the next one, so that not all send to the same rank."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def gather(self, data: Tensor, counts: list[int] | None = None) -> Pending:
        """Send `data` (uint8) to all ranks. counts: bytes of each rank; as many as this rank's by default."""
        return self.exchange([data] * self.size, counts or [data.numel()] * self.size)

    def gather_numbers(self, values: list[float]) -> list[list[float]]:
        """Gather each rank's values (float64), in rank order, on all ranks."""
        row = torch.tensor(values, dtype=torch.float64)
        if self.size == 1:
            return [values]
        pending = self.gather(row.view(torch.uint8))
        rows = pending.wait()
        out = [r.view(torch.float64).tolist() for r in rows]
        pending.finish()
        return out

    def broadcast(self, data: Tensor) -> Tensor:
        """Return the first rank's bytes, on all ranks; the others pass `data` of the same size."""
        first = self.rank == 0
        empty = torch.empty(0, dtype=torch.uint8)
        outgoing = [data] * self.size if first else [empty] * self.size
        pending = self.exchange(outgoing, [data.numel(), *[0] * (self.size - 1)])
        received = pending.wait()[0]
        pending.finish()
        return received
