"""A network lab: slow links between nodes on this machine, and runs on its nodes."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack, overload

from pipecomp.distributed.supervisor import OutputHandler, ProcessSpec, RankCalls, Supervisor, kill_processes
from pipecomp.errors import require
from pipecomp.netlab import kernel, namespaces
from pipecomp.netlab.namespaces import LAB_VARIABLE, lab_folder, new_lab_name, processes_of_lab, remove_leftovers
from pipecomp.netlab.network import LabNetwork, NetlabError, NodeBytes
from pipecomp.netlab.shape import LabOptions, LabShape, read_shape
from pipecomp.netlab.software import VARIABLE, SoftwareNetwork
from pipecomp.utils.units import parse_rate

LAUNCHERS = ("none", "deepspeed")
_TERM_S = 5.0  # between SIGTERM and SIGKILL


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The result of a command on all nodes.

    Attributes:
        status: 0, or the exit status of the process that failed first; 128 + n after signal n.
        failed: Label of that process, such as node1; None if all succeeded.
        statuses: Exit statuses by label.
        seconds: Seconds until the last process ended.
    """

    status: int
    failed: str | None
    statuses: dict[str, int]
    seconds: float


class Lab:
    """Nodes 0, 1, … joined by links of a given rate and delay; use it in a `with` statement.

    Args:
        options: The following except `software`, by name.
        nodes: Number of nodes, 2 to 64.
        bandwidth: Rate of both directions of every node ("100mbit"); None for no limit.
        asymmetric: Instead of `bandwidth`, "DOWN/UP" once for all nodes or once for each.
        delay: One-way delay ("20ms").
        jitter: Variation of the delay ("2ms").
        cuts: Lost connections, "NODE@TIME" for good or "NODE@TIME+TIME" for a while ("1@30s+5s").
        outages: All connections lost for a while, "TIME@TIME" ("60s@300s": for 60 s, starting at 300 s).
        loss: Share of packets lost at random ("2%").
        nat: Put every node except 0 behind a router of its own that accepts no connection.
        wireguard: Connect the nodes through WireGuard; their addresses are then those inside it.
        software: Do without the kernel, and throttle only pipecomp's own links between stages.

    Raises:
        ConfigError: An option is invalid.
        NetlabError: On entering, if this machine cannot provide the network.

    Example::

        with Lab(nodes=2, bandwidth="100mbit", delay="20ms") as lab:
            lab.run(["python", "train.py"])
            print(lab.bytes())
    """

    def __init__(self, *, software: bool = False, **options: Unpack[LabOptions]) -> None:
        self.shape: LabShape = read_shape(**options)
        only_kernel = [name for name in ("loss", "nat", "wireguard") if getattr(self.shape, name)]
        require(not (software and only_kernel), "software", software, f"a lab without {', '.join(only_kernel)}")
        self._software = software
        self._network: LabNetwork | None = None
        self.name = ""

    def __enter__(self) -> Lab:
        self.name = new_lab_name()
        remove_leftovers()
        if not self._software and (problem := namespaces.missing()):
            raise NetlabError(f"{problem}; {namespaces.SOFTWARE_HINT}")
        problem = kernel.missing_filters() if self.shape.loss or self.shape.nat else None
        problem = problem or (kernel.missing_wireguard() if self.shape.wireguard else None)
        if problem:
            raise NetlabError(problem)
        folder = lab_folder(self.name)
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
        """Kill what still runs and remove the network; safe to call twice."""
        if self._network is not None:
            try:
                kill_processes(self._processes)
                self._network.close()
            finally:
                self._network = None
                shutil.rmtree(lab_folder(self.name), ignore_errors=True)

    @property
    def network(self) -> LabNetwork:
        """The network of the links. Raises NetlabError outside the `with` statement."""
        if self._network is None:
            raise NetlabError("the lab is not open: use it inside `with Lab(...) as lab:`")
        return self._network

    @property
    def notes(self) -> list[str]:
        """Limitations of this lab's links, one sentence each."""
        if self.network.form == "software":
            return ["Only pipecomp's own links between stages are throttled and counted."]
        if self.network.delay_by == "software":
            return ["This kernel has no netem: only pipecomp's own links between stages are delayed."]
        return []

    def bytes(self) -> list[NodeBytes]:
        """Return the bytes that each node has sent and received since the lab was entered."""
        return self.network.bytes()

    def set_bandwidth(self, bandwidth: str) -> None:
        """Change the rate of both directions of every node, as in "100mbit".

        Raises NetlabError in a software lab, and in a lab with an unlimited node.
        """
        rate = parse_rate("bandwidth", bandwidth)
        if None in (*self.shape.up, *self.shape.down):
            raise NetlabError(
                "the rate of an unlimited node cannot be changed: start the lab with a limit, such as 10gbit"
            )
        self.network.set_rate(rate)

    def cut(self, node: int) -> None:
        """Cut a node off, as the option `cuts` does at its time."""
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
        """Run a command `procs_per_node` times on every node, or a function as `run_ranks` does.

        Each process finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR, MASTER_PORT and
        GLOO_SOCKET_IFNAME in its environment. Times of cuts count from the start of the run. Processes that outlive it
        are killed.

        Args:
            work: Program and arguments as separate words; or a function of (rank, world, note, *args).
            args: More arguments for a function.
            options: The following, by name.
            procs_per_node: Processes on each node, 1 to 64.
            launcher: For a command: "deepspeed" runs DeepSpeed's launcher once on each node; `work` is its script.
            timeout_s: Seconds until the run fails; None for no limit.
            grace_s: For a command: seconds that the other processes may continue after the first failure.
            environment: More environment variables for every process.
            on_line: Called with (label, "stdout" or "stderr", line); by default lines are printed behind the label.
            on_note: For a function: called with (rank, value) for each value passed to `note`.
            threads: For a function: OMP_NUM_THREADS, which torch follows.

        Returns:
            Finished for a command, the results by rank for a function.

        Raises:
            ConfigError: An option is invalid.
            NetlabError: The run took longer than `timeout_s`, or the lab failed.
            RankFailedError: A function raised, or its process ended without a result.
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
        on_line: OutputHandler | None = None,
    ) -> Finished:
        run = self._new_run(procs_per_node, environment)
        installed = launcher != "none" or (work and shutil.which(work[0]) is not None)
        require(
            work and not isinstance(work, str) and not args and installed,
            "COMMAND",
            work,
            "an installed program and its arguments, as separate words",
        )
        require(launcher in LAUNCHERS, "launcher", launcher, ", ".join(LAUNCHERS))
        if launcher == "deepspeed":
            specs = run.deepspeed_launchers(work, lab_folder(self.name) / "hostfile")
        else:
            specs = [run.rank(rank, work) for rank in range(run.world)]
        return self._supervise(specs, on_line, timeout_s, grace_s)

    def _run_function(
        self,
        work: Callable[..., Any],
        *args: Any,
        procs_per_node: int = 1,
        timeout_s: float | None = None,
        environment: Mapping[str, str] | None = None,
        on_line: OutputHandler | None = None,
        on_note: Callable[[int, Any], None] | None = None,
        threads: int = 1,
    ) -> dict[int, Any]:
        run = self._new_run(procs_per_node, {**(environment or {}), "OMP_NUM_THREADS": str(threads)})
        with RankCalls(run.world, work, args, on_note) as calls:
            specs = [run.rank(r, calls.command(r), (calls.rank_pipes[r].fileno(),)) for r in range(run.world)]
            self._supervise(specs, on_line, timeout_s, 0.0, calls)
        return calls.results

    def _new_run(self, procs_per_node: int, environment: Mapping[str, str] | None) -> LabRun:
        require(1 <= procs_per_node <= 64, "procs_per_node", procs_per_node, "1 to 64")
        base = {**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})}
        return LabRun(self.network, self.name, self.shape.nodes, procs_per_node, base)

    def _supervise(
        self,
        specs: Sequence[ProcessSpec],
        on_line: OutputHandler | None,
        timeout_s: float | None,
        grace_s: float,
        calls: RankCalls | None = None,
    ) -> Finished:
        began = time.monotonic()
        supervisor = Supervisor(
            _print_line if on_line is None else on_line, term_s=_TERM_S, find_strays=self._processes
        )
        changes = [(cut.at_s, self.cut, cut.node) for cut in self.shape.cuts]
        changes += [(cut.at_s + cut.for_s, self.join, cut.node) for cut in self.shape.cuts if cut.for_s is not None]
        changes.sort(key=lambda change: change[0])
        with supervisor, contextlib.ExitStack() as joined:
            for node in {cut.node for cut in self.shape.cuts}:
                joined.callback(self.join, node)
            for spec in specs:
                supervisor.start(spec)
            if calls is not None:
                calls.close_rank_pipes()
                calls.send()
            for _ in supervisor.watch(grace_s=grace_s, timeout_s=math.inf if timeout_s is None else timeout_s):
                while changes and changes[0][0] <= time.monotonic() - began:
                    _, change, node = changes.pop(0)
                    change(node)
                if calls is not None:
                    calls.receive(supervisor.statuses)
            if None in supervisor.statuses and supervisor.failed is None:
                raise NetlabError(f"the run took more than {timeout_s:g} s")
            seconds = time.monotonic() - began
        statuses = {spec.label: status or 0 for spec, status in zip(specs, supervisor.statuses, strict=True)}
        failed = None if supervisor.failed is None else specs[supervisor.failed].label
        return Finished(status=supervisor.status, failed=failed, statuses=statuses, seconds=seconds)

    def _processes(self) -> set[int]:
        return self.network.processes() | processes_of_lab(self.name)


def _print_line(label: str, stream: str, line: str) -> None:
    print(f"{label} | {line}", file=sys.stderr if stream == "stderr" else sys.stdout, flush=True)


class LabRun:
    """The processes of one run, with the environment variables that a launcher sets.

    Args:
        network: The lab's network.
        name: The lab's name.
        nodes: Number of nodes.
        procs_per_node: Processes on each node.
        environment: More variables for every process.
    """

    def __init__(
        self, network: LabNetwork, name: str, nodes: int, procs_per_node: int, environment: Mapping[str, str]
    ) -> None:
        self.world = nodes * procs_per_node
        self._network, self._nodes, self._procs = network, nodes, procs_per_node
        self._base = {
            **environment,
            LAB_VARIABLE: name,
            "MASTER_ADDR": network.address(0),
            "MASTER_PORT": str(network.port()),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(procs_per_node),
            "GLOO_SOCKET_IFNAME": network.interface,
        }
        self._base.pop(VARIABLE, None)  # the links of an outer lab

    def rank(self, rank: int, command: Sequence[str], inherited_fds: tuple[int, ...] = ()) -> ProcessSpec:
        """Return the process of one rank."""
        node, local = divmod(rank, self._procs)
        return ProcessSpec(
            label=f"node{node}.{local}" if self._procs > 1 else f"node{node}",
            command=self._network.wrap(node, command),
            environment=self._environment(node) | {"RANK": str(rank), "LOCAL_RANK": str(local)},
            inherited_fds=inherited_fds,
        )

    def deepspeed_launchers(self, script: Sequence[str], hostfile: Path) -> list[ProcessSpec]:
        """Return DeepSpeed's launcher on each node, which starts `script` for the ranks there. Writes `hostfile`."""
        hostfile.write_text("".join(f"node{node} slots={self._procs}\n" for node in range(self._nodes)))
        specs = []
        for node in range(self._nodes):
            command = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile), "--no_ssh"]
            command += ["--node_rank", str(node), "--master_addr", self._base["MASTER_ADDR"]]
            command += ["--master_port", self._base["MASTER_PORT"], *script]
            wrapped = self._network.wrap(node, command)
            specs.append(ProcessSpec(label=f"node{node}", command=wrapped, environment=self._environment(node)))
        return specs

    def _environment(self, node: int) -> dict[str, str]:
        settings = self._network.settings(node, self._procs)
        return self._base | {"NODE_RANK": str(node)} | ({} if settings is None else {VARIABLE: settings})
