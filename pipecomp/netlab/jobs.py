"""What a run starts on each node, with the environment that launchers set."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pipecomp.netlab.names import MARK
from pipecomp.netlab.network import Network
from pipecomp.netlab.processes import Job
from pipecomp.netlab.throttle import VARIABLE

Words = tuple[Sequence[str], tuple[int, ...]]  # a command, and descriptors that it inherits


class Starter:
    """Makes the jobs of one run. environment: what every process gets besides. name: the lab's."""

    def __init__(
        self, network: Network, name: str, nodes: int, procs_per_node: int, environment: Mapping[str, str]
    ) -> None:
        self._network, self._nodes, self._procs = network, nodes, procs_per_node
        self._base = {
            **environment,
            MARK: name,
            "MASTER_ADDR": network.address(0),
            "MASTER_PORT": str(network.port()),
            "WORLD_SIZE": str(nodes * procs_per_node),
            "LOCAL_WORLD_SIZE": str(procs_per_node),
            "GLOO_SOCKET_IFNAME": network.interface,
        }

    def ranks(self, words: Callable[[int], Words]) -> list[Job]:
        """One job for each rank: `words(rank)` is what it runs."""
        jobs = []
        for rank in range(self._nodes * self._procs):
            node, local = divmod(rank, self._procs)
            command, keep_fds = words(rank)
            label = f"node{node}.{local}" if self._procs > 1 else f"node{node}"
            environment = self._environment(node) | {"RANK": str(rank), "LOCAL_RANK": str(local)}
            wrapped = self._network.wrap(node, command)
            jobs.append(Job(label=label, node=node, command=wrapped, environment=environment, keep_fds=keep_fds))
        return jobs

    def deepspeed(self, script: Sequence[str], hostfile: Path) -> list[Job]:
        """DeepSpeed's launcher on each node, which starts `script` for the ranks there. Writes `hostfile`."""
        hostfile.write_text("".join(f"node{node} slots={self._procs}\n" for node in range(self._nodes)))
        jobs = []
        for node in range(self._nodes):
            command = [
                sys.executable,
                "-m",
                "deepspeed.launcher.runner",
                "--hostfile",
                str(hostfile),
                "--no_ssh",
                "--node_rank",
                str(node),
                "--master_addr",
                self._base["MASTER_ADDR"],
                "--master_port",
                self._base["MASTER_PORT"],
                *script,
            ]
            wrapped = self._network.wrap(node, command)
            jobs.append(Job(label=f"node{node}", node=node, command=wrapped, environment=self._environment(node)))
        return jobs

    def _environment(self, node: int) -> dict[str, str]:
        settings = self._network.settings(node, self._procs)
        own = {"NODE_RANK": str(node)} | ({} if settings is None else {VARIABLE: settings})
        inherited = {k: v for k, v in self._base.items() if k != VARIABLE}  # an outer lab's links are not this one's
        return inherited | own
