"""A lab: a network of slow links on this machine, and what runs on its nodes."""

from __future__ import annotations

import math
import os
import pickle
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Unpack, overload

from pipecomp.distributed.local_launcher import RankFailedError
from pipecomp.errors import require
from pipecomp.netlab import kernel, namespaces
from pipecomp.netlab.namespaces import MARK, folder_of, marked, new_name, remove_leftovers
from pipecomp.netlab.network import NetlabError, Network, NodeBytes
from pipecomp.netlab.processes import Job, OnLine, Processes, kill
from pipecomp.netlab.shape import Options, Shape, read_shape
from pipecomp.netlab.software import VARIABLE, SoftwareNetwork
from pipecomp.utils.units import parse_rate

LAUNCHERS = ("none", "deepspeed")
_TICK_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A command that has run on all nodes.

    status: 0, or the exit status of the process that failed first; 128 + n where signal n ended it. failed: that
    process's label, such as node1. statuses: by label. seconds: until the last process ended.
    """

    status: int
    failed: str | None
    statuses: dict[str, int]
    seconds: float


def missing_for(shape: Shape) -> str | None:
    """Say what this machine lacks for a shape beside what every lab of the kernel's needs, None if nothing."""
    problem = kernel.missing_filters() if shape.loss or shape.nat else None
    return problem or (kernel.missing_wireguard() if shape.wireguard else None)


class Lab:
    """Join nodes 0, 1, … by links of a stated rate and delay; use it in a `with` statement.

    Args:
        options: the following but `software`, by name.
        nodes: 2 to 64.
        bandwidth: rate of both directions of every node ("100mbit"); None for as fast as it goes.
        asymmetric: instead, "DOWN/UP" once for all nodes or once for each.
        delay: time one way ("20ms").
        jitter: how far the delay varies ("2ms").
        cuts: lost connections, "NODE@TIME" for good or "NODE@TIME+TIME" for a while ("1@30s+5s").
        outages: all connections lost for a while, "TIME@TIME" ("60s@300s": for 60 s, from 300 s on).
        loss: share of the packets that are lost ("2%"), each for itself.
        nat: put every node but 0 behind a router of its own, which lets no connection in.
        sites: which nodes are at which site, and the rate, each way, of the line that joins each site to the others
            ("0,2/1,3@10mbit"); by default all are at one.
        wireguard: let the nodes talk through WireGuard; their addresses are then those inside it.
        software: do without the kernel and slow down only pipecomp's own links between stages.

    Raises:
        ConfigError: an option.
        NetlabError: on entering, where the machine cannot do it.

    Example::

        with Lab(nodes=2, bandwidth="100mbit", delay="20ms") as lab:
            lab.run(["python", "train.py"])
            print(lab.bytes())
    """

    def __init__(self, *, software: bool = False, **options: Unpack[Options]) -> None:
        self.shape: Shape = read_shape(**options)
        needs_kernel = {"loss": "loss", "nat": "nat", "wireguard": "wireguard", "between": "sites"}
        only_kernel = [name for key, name in needs_kernel.items() if getattr(self.shape, key)]
        require(not (software and only_kernel), "software", software, f"a lab without {', '.join(only_kernel)}")
        self._software = software
        self._network: Network | None = None
        self.name = ""

    def __enter__(self) -> Lab:
        self.name = new_name()
        remove_leftovers()
        if not self._software and (problem := namespaces.missing()):
            raise NetlabError(f"{problem}; {namespaces.WITHOUT}")
        if problem := missing_for(self.shape):
            raise NetlabError(problem)
        folder = folder_of(self.name)
        folder.mkdir(mode=0o700)
        try:
            if self._software:
                self._network = SoftwareNetwork(self.shape, folder)
            else:
                self._network = kernel.KernelNetwork(self.shape, folder, self.name)
        except BaseException:
            shutil.rmtree(folder)
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End what still runs and take the network down; safe to call twice."""
        if self._network is not None:
            try:
                kill(self._processes)
                self._network.close()
            finally:
                self._network = None
                shutil.rmtree(folder_of(self.name), ignore_errors=True)

    @property
    def network(self) -> Network:
        """The network of the links. NetlabError outside the `with` statement."""
        if self._network is None:
            raise NetlabError("the lab is not open: use it inside `with Lab(...) as lab:`")
        return self._network

    @property
    def notes(self) -> list[str]:
        """What people should know about this lab's links, a sentence each."""
        if self.network.form == "software":
            return ["Only pipecomp's own links between stages are throttled and counted."]
        if self.network.delay_by == "software":
            return ["This kernel has no netem: only pipecomp's own links between stages are delayed."]
        return []

    def bytes(self) -> list[NodeBytes]:
        """Count what each node has sent and received since the lab began."""
        return self.network.bytes()

    def set_bandwidth(self, bandwidth: str) -> None:
        """Let every node send and receive at this rate from now on, as in "100mbit".

        Raises NetlabError in a software lab, and in one that began without a limit on every node.
        """
        rate = parse_rate("bandwidth", bandwidth)
        if None in (*self.shape.up, *self.shape.down):
            raise NetlabError("a lab that starts without a limit cannot get one later; start with, say, 10gbit")
        self.network.set_rate(rate)

    def cut(self, node: int) -> None:
        """Cut a node off, as the option `cuts` does on time."""
        self.network.cut(self._node(node))

    def join(self, node: int) -> None:
        """End a cut."""
        self.network.join(self._node(node))

    def _node(self, node: int) -> int:
        require(0 <= node < self.shape.nodes, "node", node, f"0 to {self.shape.nodes - 1}")
        return node

    @overload
    def run(self, work: Sequence[str], **options: Any) -> Finished: ...

    @overload
    def run(self, work: Callable[..., Any], *args: Any, **options: Any) -> dict[int, Any]: ...

    def run(self, work: Sequence[str] | Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run a command `procs_per_node` times on every node, or a function as `local_launcher.run_ranks` does.

        Each process finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR, MASTER_PORT and
        GLOO_SOCKET_IFNAME in its environment. Cuts count from the start of the run; processes that outlive it are
        ended.

        Args:
            work: program and arguments as separate words; or a function of (rank, world, note, *args).
            args: what a function gets besides.
            options: the following, by name.
            procs_per_node: processes on each node, 1 to 64.
            launcher: of a command: "deepspeed" runs DeepSpeed's launcher once on each node; `work` is its script.
            timeout_s: seconds after which a run is ended as failed; None for any time.
            grace_s: of a command: seconds that the others may go on after a process has failed.
            environment: variables that every process gets besides.
            on_line: called with (label, "stdout" or "stderr", line); by default lines are printed behind the label.
            on_note: of a function: called with (rank, value) for what it passes to `note`.
            threads: of a function: OMP_NUM_THREADS, which torch follows.

        Returns:
            Finished for a command, the results by rank for a function.

        Raises:
            ConfigError: an option.
            NetlabError: the run took longer than `timeout_s`, or the lab failed.
            RankFailedError: a function raised, or its process ended without a result.
        """
        if callable(work):
            return self._run_function(work, *args, **options)
        return self._run_command(work, *args, **options)

    def _run_command(
        self,
        work: Sequence[str],
        *args: Any,
        procs_per_node: int = 1,
        launcher: str = "none",
        timeout_s: float | None = None,
        grace_s: float = 10.0,
        environment: Mapping[str, str] | None = None,
        on_line: OnLine | None = None,
    ) -> Finished:
        starter = self._starter(procs_per_node, environment)
        require(
            work
            and not isinstance(work, str)
            and not args
            and (launcher != "none" or shutil.which(work[0]) is not None),
            "COMMAND",
            work,
            "a program that can be found here and its arguments, as separate words",
        )
        require(launcher in LAUNCHERS, "launcher", launcher, ", ".join(LAUNCHERS))
        if launcher == "deepspeed":
            jobs = starter.deepspeed(work, folder_of(self.name) / "hostfile")
        else:
            jobs = starter.ranks(lambda rank: (work, ()))
        return self._watch(jobs, on_line, timeout_s, grace_s, None)

    def _run_function(
        self,
        work: Callable[..., Any],
        *args: Any,
        procs_per_node: int = 1,
        timeout_s: float | None = None,
        environment: Mapping[str, str] | None = None,
        on_line: OnLine | None = None,
        on_note: Callable[[int, Any], None] | None = None,
        threads: int = 1,
    ) -> dict[int, Any]:
        starter = self._starter(procs_per_node, {**(environment or {}), "OMP_NUM_THREADS": str(threads)})
        with Functions(work, args, self.shape.nodes * procs_per_node, on_note) as functions:
            self._watch(starter.ranks(functions.words), on_line, timeout_s, 0.0, functions)
        return functions.results

    def _starter(self, procs_per_node: int, environment: Mapping[str, str] | None) -> Starter:
        require(1 <= procs_per_node <= 64, "procs_per_node", procs_per_node, "1 to 64")
        base = {**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})}
        return Starter(self.network, self.name, self.shape.nodes, procs_per_node, base)

    # -- while it runs

    def _watch(
        self,
        jobs: list[Job],
        on_line: OnLine | None,
        timeout_s: float | None,
        grace_s: float,
        functions: Functions | None,
    ) -> Finished:
        failed: str | None = None
        began = time.monotonic()
        deadline = math.inf if timeout_s is None else began + timeout_s
        processes = Processes(jobs, _print if on_line is None else on_line, self._processes)
        with closing(processes), self._cutting() as cut_what_is_due:
            if functions is not None:
                functions.started()
            while None in processes.statuses:
                cut_what_is_due(time.monotonic() - began)
                for index in processes.poll():
                    if processes.statuses[index] and failed is None:
                        failed = jobs[index].label
                        deadline = min(deadline, time.monotonic() + grace_s)
                if functions is not None:
                    functions.listen(processes.statuses)
                if time.monotonic() > deadline:
                    if failed is None:
                        raise NetlabError(f"the run took more than {timeout_s:g} s")
                    break
                time.sleep(_TICK_S)
            seconds = time.monotonic() - began
        statuses = {job.label: status or 0 for job, status in zip(jobs, processes.statuses, strict=True)}
        return Finished(status=statuses[failed] if failed else 0, failed=failed, statuses=statuses, seconds=seconds)

    @contextmanager
    def _cutting(self) -> Iterator[Callable[[float], None]]:
        changes = [(cut.at_s, self.cut, cut.node) for cut in self.shape.cuts]
        changes += [(cut.at_s + cut.for_s, self.join, cut.node) for cut in self.shape.cuts if cut.for_s is not None]
        changes.sort(key=lambda change: change[0])

        def due(seconds: float) -> None:
            while changes and changes[0][0] <= seconds:
                _, change, node = changes.pop(0)
                change(node)

        try:
            yield due
        finally:
            for node in {cut.node for cut in self.shape.cuts}:
                self.join(node)

    def _processes(self) -> set[int]:
        return self.network.processes() | marked(self.name)


def _print(label: str, stream: str, line: str) -> None:
    print(f"{label} | {line}", file=sys.stderr if stream == "stderr" else sys.stdout, flush=True)


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
