"""A network without root: all nodes on the loopback interface, pipecomp's own links slowed down by `Throttle`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from pipecomp.distributed.network_interfaces import free_port, loopback
from pipecomp.netlab.network import NetlabError, NodeBytes
from pipecomp.netlab.shape import Shape
from pipecomp.netlab.throttle import SharedState, ThrottleSettings


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
