"""A network without root: all nodes on the loopback interface, pipecomp's own links slowed down by `Throttle`."""

from __future__ import annotations

import fcntl
import json
import os
import random
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO

from pipecomp.distributed.placement import free_port, loopback
from pipecomp.errors import LinkError, require
from pipecomp.netlab.network import NetlabError, NodeBytes
from pipecomp.netlab.shape import Shape, burst_bytes
from pipecomp.utils.units import SEGMENT, wire_bytes


class SoftwareNetwork:
    """Nodes are only names here: every process runs on this machine's own network."""

    form = "software"

    def __init__(self, shape: Shape, folder: Path) -> None:
        self._shape, self._path = shape, folder / "state"
        self._state = SharedState.create(self._path, shape.nodes)
        self.delay_by = "software" if shape.delay_s else None
        self.interface = loopback()

    def address(self, node: int) -> str:
        """See Network."""
        return "127.0.0.1"

    def port(self) -> int:
        """See Network."""
        return free_port()

    def wrap(self, node: int, command: Sequence[str]) -> list[str]:
        """See Network."""
        return list(command)

    def settings(self, node: int, procs_per_node: int) -> str | None:
        """See Network."""
        return ThrottleSettings.of(self._shape, self._path, node, procs_per_node).text()

    def bytes(self) -> list[NodeBytes]:
        """See Network."""
        states = [self._state.read(node) for node in range(self._shape.nodes)]
        return [NodeBytes(node, int(state.sent), int(state.received)) for node, state in enumerate(states)]

    def set_rate(self, rate: int) -> None:
        """See Network."""
        raise NetlabError("a software lab keeps the rate that it started with")

    def cut(self, node: int) -> None:
        """See Network."""
        with self._state.change(node) as (state,):
            state.cut = True

    def join(self, node: int) -> None:
        """See Network."""
        with self._state.change(node) as (state,):
            now = time.monotonic()
            state.cut, state.up_free, state.down_free = False, max(state.up_free, now), max(state.down_free, now)

    def processes(self) -> set[int]:
        """See Network."""
        return set()

    def close(self) -> None:
        """Do nothing: the lab removes its folder."""


VARIABLE = "PIPECOMP_NETLAB"
_BEHIND_S = 0.05  # how far a sender may lag behind what it could have sent: what a socket's buffer would have held
_POLL_S = 0.01
_TURN_S = 0.02  # what one sender may put on a link before others have their turn, as TCP connections share one
_NODE = struct.Struct("<dddd?7x")


@dataclass(slots=True)
class NodeState:
    """A node's link. up_free, down_free: monotonic seconds when it has sent and received what it has accepted."""

    up_free: float = 0.0
    down_free: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    cut: bool = False


class SharedState:
    """The file that all processes of a lab share; locked while one of them changes it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path

    @classmethod
    def create(cls, path: str | os.PathLike[str], nodes: int) -> SharedState:
        """Make the file; no node has sent anything."""
        Path(path).write_bytes(bytes(_NODE.size * nodes))
        return cls(path)

    def read(self, node: int) -> NodeState:
        """Read what is known of a node."""
        with self._open() as file:
            return _read(file, node)

    @contextmanager
    def change(self, *nodes: int) -> Iterator[list[NodeState]]:
        """Yield the nodes' states; what the caller changes in them is kept."""
        with self._open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # closing the file unlocks it
            states = [_read(file, node) for node in nodes]
            yield states
            for node, state in zip(nodes, states, strict=True):
                packed = _NODE.pack(state.up_free, state.down_free, state.sent, state.received, state.cut)
                os.pwrite(file.fileno(), packed, _NODE.size * node)

    def _open(self) -> BinaryIO:
        try:
            return open(self._path, "r+b", buffering=0)
        except OSError as error:
            raise LinkError(f"{VARIABLE}: this process's network lab is gone ({error})") from error


def _read(file: BinaryIO, node: int) -> NodeState:
    return NodeState(*_NODE.unpack(os.pread(file.fileno(), _NODE.size, _NODE.size * node)))


@dataclass(frozen=True, kw_only=True)
class ThrottleSettings:
    """What `PIPECOMP_NETLAB` says, as JSON. Rates in bits per second or None, for each node; times in seconds."""

    state: str
    node: int
    procs_per_node: int
    up: list[int | None]
    down: list[int | None]
    delay_s: float
    jitter_s: float

    @classmethod
    def of(cls, shape: Shape, state: Path, node: int, procs_per_node: int) -> ThrottleSettings:
        """Take what a lab's links are like; state: the file of its `SharedState`."""
        return cls(
            state=str(state),
            node=node,
            procs_per_node=procs_per_node,
            up=list(shape.up),
            down=list(shape.down),
            delay_s=shape.delay_s,
            jitter_s=shape.jitter_s,
        )

    def text(self) -> str:
        """Write the variable's value."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> ThrottleSettings:
        """ConfigError if it is not what a lab sets."""
        names = {field.name for field in fields(cls)}
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        require(
            isinstance(found, dict) and set(found) == names,
            VARIABLE,
            text,
            f"what pipecomp netlab sets: a JSON object of {', '.join(sorted(names))}",
        )
        return cls(**found)


class Throttle:
    """What goes from one node to another, held back until it would have arrived.

    A frame leaves `source` when that node's token bucket lets it, passes the bucket of `destination`, and is delayed.
    What several senders send at once takes turns, in pieces of 20 ms.
    One thread at a time may use it, and so frames keep their order. now, sleep: the clock, in seconds.
    """

    def __init__(
        self,
        settings: ThrottleSettings,
        destination: int,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._now, self._sleep = now, sleep
        self._source, self._destination = settings.node, destination
        self._up, self._down = settings.up[settings.node], settings.down[destination]
        self._delay_s, self._jitter_s = settings.delay_s, settings.jitter_s
        self._state = SharedState(settings.state)
        self._random = random.Random(f"{settings.node} to {destination}")
        rate = min((r for r in (self._up, self._down) if r is not None), default=None)
        self._piece = None if rate is None else SEGMENT * max(8, round(rate / 8 * _TURN_S / SEGMENT))

    def hold(self, size: int, ready: float) -> None:
        """Return when `size` bytes that were ready to leave at the monotonic time `ready` would have arrived.

        `ready` may lie in the past: a sender that waited here for one frame asks late for the next, which a real link
        would have carried behind the first.
        """
        while self._piece is not None and size > self._piece:
            self._wait_until(self._reserve(self._piece, ready))
            size -= self._piece
        arrival = self._reserve(size, ready) + self._delay_s
        if self._jitter_s:
            arrival += self._random.uniform(-self._jitter_s, self._jitter_s)
        self._wait_until(arrival)
        while any(self._state.read(node).cut for node in (self._source, self._destination)):
            self._sleep(_POLL_S)

    def _wait_until(self, at: float) -> None:
        while (left := at - self._now()) > 0:
            self._sleep(left)

    def _reserve(self, size: int, ready: float) -> float:
        """Take the frame's place on both nodes' links; the monotonic time when its last byte has passed them."""
        wire = wire_bytes(size)
        with self._state.change(self._source, self._destination) as (source, destination):
            ready = max(ready, self._now() - self._delay_s - self._jitter_s - _BEHIND_S)
            first = last = ready
            if self._up is not None:
                seconds = 8 * wire / self._up
                last = max(source.up_free, ready - 8 * burst_bytes(self._up) / self._up) + seconds
                first = max(ready, last - seconds)
                source.up_free = last
            if self._down is not None:
                free = max(destination.down_free, first - 8 * burst_bytes(self._down) / self._down)
                last = max(last, free + 8 * wire / self._down)
                destination.down_free = last
            source.sent += wire
            destination.received += wire
        return last


def throttle_to(rank: int, environment: Mapping[str, str] = os.environ) -> Throttle | None:
    """Make the throttle of this process's link to another rank; None outside a lab and within a node."""
    text = environment.get(VARIABLE)
    if text is None:
        return None
    settings = ThrottleSettings.read(text)
    node = rank // settings.procs_per_node
    return None if node == settings.node else Throttle(settings, node)
