"""A network in software, without root: all nodes on the loopback interface, pipecomp's own links throttled.

Each node and direction has a token bucket; then frames are delayed. All processes of a lab run on one machine and share
its clock, and a file with the state of each node's link. `PIPECOMP_NETLAB` names the file and describes the links.
"""

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
from pipecomp.netlab.shape import LabShape, burst_bytes
from pipecomp.utils.units import SEGMENT, wire_bytes

VARIABLE = "PIPECOMP_NETLAB"
_MAX_LAG_S = 0.05  # how far a sender may lag behind its rate and catch up: what a socket's buffer would hold
_POLL_S = 0.01
_TURN_S = 0.02  # time on a link before other senders have their turn, as TCP connections share one
_NODE = struct.Struct("<dddd?7x")


class SoftwareNetwork:
    """Nodes in name only: every process runs on this machine's own network.

    Args:
        shape: Shape of the links.
        folder: The lab's folder, for the state of the links.
    """

    form = "software"

    def __init__(self, shape: LabShape, folder: Path) -> None:
        self._shape, self._path = shape, folder / "state"
        self._state = SharedState.create(self._path, shape.nodes)
        self.delay_by = "software" if shape.delay_s else None
        self.interface = loopback()

    def address(self, node: int) -> str:
        return "127.0.0.1"

    def port(self) -> int:
        return free_port()

    def wrap(self, node: int, command: Sequence[str]) -> list[str]:
        return list(command)

    def settings(self, node: int, procs_per_node: int) -> str | None:
        return ThrottleSettings.of(self._shape, self._path, node, procs_per_node).text()

    def bytes(self) -> list[NodeBytes]:
        states = [self._state.read(node) for node in range(self._shape.nodes)]
        return [NodeBytes(node, int(state.sent), int(state.received)) for node, state in enumerate(states)]

    def set_rate(self, rate: int) -> None:
        raise NetlabError("the rates of a software lab cannot be changed")

    def cut(self, node: int) -> None:
        with self._state.change(node) as (state,):
            state.cut = True

    def join(self, node: int) -> None:
        with self._state.change(node) as (state,):
            now = time.monotonic()
            state.cut, state.up_free, state.down_free = False, max(state.up_free, now), max(state.down_free, now)

    def processes(self) -> set[int]:
        return set()

    def close(self) -> None:
        """Do nothing: the lab removes its folder."""


@dataclass(slots=True)
class NodeState:
    """State of a node's link.

    Attributes:
        up_free, down_free: Monotonic time in seconds when the link has sent and received all accepted bytes.
        sent, received: Bytes on the wire.
        cut: Whether the node is disconnected.
    """

    up_free: float = 0.0
    down_free: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    cut: bool = False


class SharedState:
    """The state file that the processes of a lab share, locked during changes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path

    @classmethod
    def create(cls, path: str | os.PathLike[str], nodes: int) -> SharedState:
        """Create the file for idle links."""
        Path(path).write_bytes(bytes(_NODE.size * nodes))
        return cls(path)

    def read(self, node: int) -> NodeState:
        """Read the state of a node's link."""
        with self._open() as file:
            return _read(file, node)

    @contextmanager
    def change(self, *nodes: int) -> Iterator[list[NodeState]]:
        """Yield the states of the nodes' links, and write them back after the body."""
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
            raise LinkError(f"{VARIABLE}: the network lab of this process has ended ({error})") from error


def _read(file: BinaryIO, node: int) -> NodeState:
    return NodeState(*_NODE.unpack(os.pread(file.fileno(), _NODE.size, _NODE.size * node)))


@dataclass(frozen=True, kw_only=True)
class ThrottleSettings:
    """The value of `PIPECOMP_NETLAB`, in JSON.

    Attributes:
        state: Path of the state file.
        node: Node of this process.
        procs_per_node: Ranks on each node.
        up, down: Rates of each node in bits per second, None for no limit.
        delay_s, jitter_s: One-way delay and its variation in seconds.
    """

    state: str
    node: int
    procs_per_node: int
    up: list[int | None]
    down: list[int | None]
    delay_s: float
    jitter_s: float

    @classmethod
    def of(cls, shape: LabShape, state: Path, node: int, procs_per_node: int) -> ThrottleSettings:
        """Make the settings of one node from a lab's shape."""
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
        """Return the variable's value."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> ThrottleSettings:
        """Parse the variable's value. Raises ConfigError for a value that no lab sets."""
        names = {field.name for field in fields(cls)}
        try:
            values = json.loads(text)
        except ValueError:
            values = None
        require(
            isinstance(values, dict) and set(values) == names,
            VARIABLE,
            text,
            f"the value that pipecomp netlab sets, a JSON object with {', '.join(sorted(names))}",
        )
        return cls(**values)


class Throttle:
    """Delays the frames from one node to another until they would have arrived.

    A frame passes the token bucket of the source node, then that of the destination, and is delayed. Several senders
    share a link in turns of 20 ms. One thread at a time may use a throttle, so that frames keep their order.

    Args:
        settings: Settings of the source node.
        destination: The other node.
        now: Clock in seconds.
        sleep: Sleeps for some seconds.
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
        """Wait until `size` bytes that were ready to leave at the monotonic time `ready` would have arrived.

        `ready` may lie in the past: after waiting here for one frame, a sender comes late with the next, which a real
        link would have carried behind the first.
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
        """Reserve both links for a frame; returns the monotonic time when its last byte has passed them."""
        wire = wire_bytes(size)
        with self._state.change(self._source, self._destination) as (source, destination):
            ready = max(ready, self._now() - self._delay_s - self._jitter_s - _MAX_LAG_S)
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
    """Return the throttle of this process's link to another rank, None outside a lab and within a node."""
    text = environment.get(VARIABLE)
    if text is None:
        return None
    settings = ThrottleSettings.read(text)
    node = rank // settings.procs_per_node
    return None if node == settings.node else Throttle(settings, node)
