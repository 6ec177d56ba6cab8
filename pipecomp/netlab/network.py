"""The interface between a lab and the implementations of its network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pipecomp.errors import PipecompError


class NetlabError(PipecompError, RuntimeError):
    """The lab cannot be provided on this machine; the message has the reason and the alternative."""


class NodeBytes(NamedTuple):
    """Bytes through a node's interface since the lab was entered, Ethernet, IP and TCP headers included."""

    node: int
    sent: int
    received: int


class LabNetwork(Protocol):
    """Nodes that reach each other over shaped links."""

    form: str  # "kernel" or "software"
    delay_by: str | None  # "netem", "software" (pipecomp's own links), or None without a delay
    interface: str  # the nodes' own name of their network interface

    def address(self, node: int) -> str:
        """Return the address where other nodes reach a node."""

    def port(self) -> int:
        """Return a free TCP port of node 0."""

    def wrap(self, node: int, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` on a node."""

    def settings(self, node: int, procs_per_node: int) -> str | None:
        """Return the settings for throttling the node's own links in software, None if the kernel shapes all."""

    def bytes(self) -> list[NodeBytes]:
        """Read the counters of all nodes."""

    def set_rate(self, rate: int) -> None:
        """Change the rate of all nodes, each way, in bits per second. Raises NetlabError where it cannot change."""

    def cut(self, node: int) -> None:
        """Disconnect a node."""

    def join(self, node: int) -> None:
        """Reconnect a node."""

    def processes(self) -> set[int]:
        """List the ids of the processes on the nodes that the network knows of."""

    def close(self) -> None:
        """Remove the network; safe to call twice."""
