"""The ranks that average their gradients, and what they exchange: bytes, from everyone to everyone, in the background.

Bytes travel over gloo from host memory, in a process group of their own, so that nothing else's collectives can come
between. Every call here is made by all ranks in the same order.
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

_CALLS = 1 << 18  # tags of one group's messages, then they come round again
_CHANNELS = 1 << 12
SLICE = 1 << 16  # bytes sent at once by a group that gives way; at 10 Mbit/s a packet waits 50 ms for them
_SLICE_S = 1.0  # after which the next one is sent, though this one has not left


@dataclass(slots=True)
class _Mesh:
    """The connections among some ranks, made once; each group on them has tags of its own."""

    process_group: Any
    sockets: frozenset[int]
    channels: int = 0


@dataclass(slots=True)
class _Meshes:
    """All that there are in the torch.distributed that is initialized now; `world` is its group of all ranks."""

    world: Any = None
    shared: dict[tuple[tuple[int, ...], float], _Mesh] = field(default_factory=dict)
    made: Counter[tuple[int, ...]] = field(default_factory=Counter)


_meshes = _Meshes()


def _mesh(ranks: list[int], timeout_s: float, *, shared: bool) -> _Mesh:
    global _meshes
    if _meshes.world is not dist.group.WORLD:
        _meshes = _Meshes(dist.group.WORLD)
    key = (tuple(ranks), timeout_s)
    found = _meshes.shared.get(key) if shared else None
    if found is None:
        # Never destroyed before the end: torch would use its name, and with that its stale addresses, again.
        found = _Mesh(*record_sockets(partial(_made_by_members, ranks, timeout_s)))
        if shared:
            _meshes.shared[key] = found
    found.channels = (found.channels + 1) % _CHANNELS
    return found


def _made_by_members(ranks: list[int], timeout_s: float) -> Any:
    """Make a process group of ranks that alone call this, under a name that the others need not know.

    new_group(use_local_synchronization=True) would name it by how many groups this rank has made or, before torch 2.15,
    is in, and count it among the groups of all ranks: ranks that are in different ones would wait for each other.
    """
    name = f"pipecomp {ranks} {_meshes.made[tuple(ranks)]}"
    _meshes.made[tuple(ranks)] += 1
    made, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.Backend(host_backend()),
        distributed_c10d._get_default_store(),
        distributed_c10d.GroupName(name),
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    distributed_c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made


def host_backend() -> str:
    """What groups for tensors in host memory go over: "tls" where all ranks do, else "gloo"."""
    return "tls" if dist.get_backend() == "tls" else "gloo"


@dataclass(slots=True)
class Pending:
    """Messages under way. `received[r]` is what rank r of the group sends; read it after `wait`."""

    received: list[Tensor]
    receives: list[tuple[int, Any]] = field(default_factory=list)
    sends: list[tuple[int, Any]] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)

    def wait(self) -> list[Tensor]:
        """What all ranks sent, this rank's own included. Raises PeerLostError for a rank that is gone or silent."""
        for rank, work in self.receives:
            _wait(rank, work)
        self.receives.clear()
        return self.received

    def finish(self) -> None:
        """Wait until what was sent from here has left."""
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
    """Exchange bytes among n ranks; `rank` is this one's place among them, `ranks` are their global ranks.

    All ranks of the group must make it at the same point. `process_group` is the one that its messages use, None with
    one rank that is `shared`. `give_way`, which all ranks must set or none, is called before each `SLICE` bytes are
    sent, and may wait; then no more than that waits in the system at a time.

    Args:
        group: a process group or a list of global ranks; None for all ranks. Without torch.distributed there is one.
        timeout_s: seconds of silence after which a rank counts as lost.
        shared: whether the connections may be those of other groups of the same ranks. Messages are told apart by tags;
            torch's collectives are not, and need connections of their own to be started by a thread of their own.

    Raises:
        LinkError: if this rank is none of them.
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
            if len(self.ranks) > 1 or not shared:  # torch's collectives would take None for all ranks
                mesh = _mesh(self.ranks, timeout_s, shared=shared)
                self.process_group, self._channel = mesh.process_group, mesh.channels
                self._sockets = mesh.sockets

    def again(self) -> Group:
        """The same ranks with messages of their own, for somebody else who may exchange at the same time."""
        other = Group(self.ranks, timeout_s=self.timeout_s)
        other.give_way = self.give_way
        return other

    @property
    def size(self) -> int:
        """n."""
        return len(self.ranks)

    def exchange(self, outgoing: list[Tensor], incoming: list[int]) -> Pending:
        """Send outgoing[r] (uint8 on the CPU) to each rank r and receive incoming[r] bytes from it.

        Returns at once, or where the group gives way when the last slice is leaving.
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
                        _wait(*pending.sends.pop())  # gloo waits for a send once
                        wait_until_sent(self._sockets, _SLICE_S)
                    self.give_way()
                pending.sends.append((self.ranks[r], dist.isend(part, self.ranks[r], group, tag)))
                self.bytes_sent += part.numel()
        return pending

    def _slices(self, data: Tensor) -> tuple[Tensor, ...]:
        """What travels as one message; nothing for no bytes."""
        if self.give_way is not None:
            return data.split(SLICE) if data.numel() else ()
        return (data,) if data.numel() else ()

    def _others(self) -> list[int]:
        """The other ranks, the next one first, so that not all send to the same one."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def gather(self, data: Tensor, counts: list[int] | None = None) -> Pending:
        """Send `data` (uint8) to all ranks; counts: how many bytes each rank gives, by default as many as this one."""
        return self.exchange([data] * self.size, counts or [data.numel()] * self.size)

    def gather_numbers(self, values: list[float]) -> list[list[float]]:
        """Each rank's values, as float64; of all ranks, on all ranks."""
        row = torch.tensor(values, dtype=torch.float64)
        if self.size == 1:
            return [values]
        pending = self.gather(row.view(torch.uint8))
        rows = pending.wait()
        out = [r.view(torch.float64).tolist() for r in rows]
        pending.finish()
        return out

    def broadcast(self, data: Tensor) -> Tensor:
        """The first rank's bytes, on all ranks; the others' `data` says how many."""
        first = self.rank == 0
        empty = torch.empty(0, dtype=torch.uint8)
        outgoing = [data] * self.size if first else [empty] * self.size
        pending = self.exchange(outgoing, [data.numel(), *[0] * (self.size - 1)])
        received = pending.wait()[0]
        pending.finish()
        return received
