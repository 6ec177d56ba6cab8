"""The seam between a lab and what makes its network. No implementation here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class NodeBytes(NamedTuple):
    """What a node's interface has carried since the lab began, Ethernet, IP and TCP headers included."""

    node: int
    sent: int
    received: int


class Network(Protocol):
    """Nodes that reach each other over shaped links."""

    form: str  # "kernel" or "software"
    delay_by: str | None  # "netem", "software", or None where there is no delay
    interface: str  # the nodes' own name for theirs

    def address(self, node: int) -> str:
        """Where others reach a node."""
        ...

    def port(self) -> int:
        """A TCP port that is free on node 0."""
        ...

    def wrap(self, node: int, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on a node."""
        ...

    def settings(self, node: int, procs_per_node: int) -> str | None:
        """What the node's own links must know to slow themselves down; None if the kernel does it all."""
        ...

    def bytes(self) -> list[NodeBytes]:
        """Counters of all nodes."""
        ...

    def set_rate(self, rate: int) -> None:
        """All nodes' rate from now on, each way, in bits per second; NetlabError where it cannot be changed."""
        ...

    def cut(self, node: int) -> None:
        """Nothing reaches or leaves the node any more."""
        ...

    def join(self, node: int) -> None:
        """End a cut."""
        ...

    def processes(self) -> set[int]:
        """Ids of processes that run on the nodes, as far as the network itself knows."""
        ...

    def close(self) -> None:
        """Take it down; safe to call twice."""
        ...
