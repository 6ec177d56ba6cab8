"""What a run starts on each node, with the environment that launchers set, and how functions get their work there."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pipecomp.distributed.local_ranks import RankFailedError
from pipecomp.netlab.names import MARK
from pipecomp.netlab.network import Network
from pipecomp.netlab.processes import Job
from pipecomp.netlab.throttle import VARIABLE

_CHILD = Path(__file__).with_name("child.py")
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
        """Make one job for each rank: `words(rank)` is what it runs."""
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
        """Start DeepSpeed's launcher on each node, which starts `script` for the ranks there. Writes `hostfile`."""
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
        # An outer lab's links are not this one's.
        return {k: v for k, v in self._base.items() if k != VARIABLE} | own


class Functions:
    """One function on every rank of a run; `results` has what it returned, by rank."""

    def __init__(
        self, function: Callable[..., Any], args: Sequence[Any], world: int, on_note: Callable[[int, Any], None] | None
    ) -> None:
        self._work = pickle.dumps((function, tuple(args)))
        self._on_note = on_note
        self.results: dict[int, Any] = {}
        pairs = [Pipe() for _ in range(world)]
        self._ours: list[Connection] = [ours for ours, _ in pairs]
        self._theirs: list[Connection] = [theirs for _, theirs in pairs]

    def __enter__(self) -> Functions:
        return self

    def __exit__(self, *exc: object) -> None:
        for line in (*self._ours, *self._theirs):
            line.close()

    def words(self, rank: int) -> tuple[list[str], tuple[int, ...]]:
        """Give the command of a rank's process and the descriptor that it inherits."""
        descriptor = self._theirs[rank].fileno()
        return [sys.executable, str(_CHILD), str(descriptor)], (descriptor,)

    def started(self) -> None:
        """Hand the work to the processes; this process's copies of their ends must be closed for their end to show."""
        for line in self._theirs:
            line.close()
        for line in self._ours:
            try:
                line.send(sys.path)
                line.send_bytes(self._work)
            except BrokenPipeError:  # it died at once; `listen` says so
                continue

    def listen(self, statuses: Sequence[int | None]) -> None:
        """Take what has arrived. RankFailedError if a rank raised, or ended without a result.

        statuses: exit statuses, None for processes that run, looked up before this call.
        """
        for rank, line in enumerate(self._ours):
            while not line.closed and line.poll():
                try:
                    kind, value = line.recv()
                except (EOFError, ConnectionResetError):
                    line.close()
                    break
                if kind == "failed":
                    raise RankFailedError(f"rank {rank} failed:\n{value}")
                if kind == "done":
                    self.results[rank] = value
                elif self._on_note is not None:
                    self._on_note(rank, value)
        for rank, status in enumerate(statuses):
            if status is not None and (status or rank not in self.results):
                raise RankFailedError(f"rank {rank} ended with exit status {status}")
