"""The seam between a lab and what makes its network, and what can go wrong there. No implementation here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pipecomp.errors import PipecompError


class NetlabError(PipecompError, RuntimeError):
    """The lab cannot be made or used on this machine; the message says what is missing and what works without it."""


class NodeBytes(NamedTuple):
    """What a node's interface has carried since the lab began, Ethernet, IP and TCP headers included."""

    node: int
    sent: int
    received: int


class Network(Protocol):
    """Nodes that reach each other over shaped links."""

    form: str  # "kernel" or "software"
    delay_by: str | None  # "netem", "process", "software" (pipecomp's own links), or None where there is no delay
    interface: str  # the nodes' own name for theirs

    def address(self, node: int) -> str:
        """Tell where others reach a node."""

    def port(self) -> int:
        """Name a TCP port that is free on node 0."""

    def wrap(self, node: int, command: Sequence[str]) -> list[str]:
        """Make the command that runs `command` on a node."""

    def settings(self, node: int, procs_per_node: int) -> str | None:
        """Tell what the node's own links must know to slow themselves down; None if the kernel does it all."""

    def bytes(self) -> list[NodeBytes]:
        """Read the counters of all nodes."""

    def set_rate(self, rate: int) -> None:
        """Set all nodes' rate from now on, each way, in bits per second; NetlabError where it cannot be changed."""

    def cut(self, node: int) -> None:
        """Let nothing reach or leave the node any more."""

    def join(self, node: int) -> None:
        """End a cut."""

    def processes(self) -> set[int]:
        """List the ids of processes that run on the nodes, as far as the network itself knows."""

    def close(self) -> None:
        """Take it down; safe to call twice."""
