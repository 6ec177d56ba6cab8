"""A network shaped by the kernel: a namespace for each node, a bridge between them, tbf in each direction.

    node 0: eth0 ── port0 ┐
                          ├ bridge (a namespace of its own; the machine's network is not touched)
    node 1: eth0 ── port1 ┘

The queue of eth0 shapes what a node sends, the queue of its port what it receives. If the kernel has netem, eth0 also
delays packets; otherwise pipecomp's own links do. With `nat`, every node except 0 has a router between eth0 and its
port.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pipecomp.distributed.supervisor import ProcessSpec, Supervisor
from pipecomp.netlab.namespaces import (
    CONFIGURATION,
    RunCommand,
    delete_namespaces,
    has_netem,
    processes_in,
    run_command,
)
from pipecomp.netlab.network import NetlabError, NodeBytes
from pipecomp.netlab.shape import LabShape, burst_bytes, queue_bytes
from pipecomp.netlab.software import SharedState, ThrottleSettings

# RFC 2544 reserves 198.18.0.0/15 for network tests: 198.18 for the bridge, 198.19 for networks behind routers.
_PREFIX_BITS = 16
_PRIVATE_BITS = 24
_START_S = 20.0
_TABLE = "pipecomp"  # of nftables
_LOSS_STEPS = 10**6  # resolution of the share of lost packets
WIREGUARD_INTERFACE, WIREGUARD_MTU, _WIREGUARD_BITS = "wg0", 1420, 24
_WIREGUARD_PORT, _KEEPALIVE_S = 51820, 25
_WIREGUARD_SOCKETS = Path("/var/run/wireguard")


def missing_filters() -> str | None:
    """Return what this machine lacks for routers and lost packets, None if nothing."""
    return _missing("packet filter", nft="nftables", sysctl="procps")


def missing_wireguard() -> str | None:
    """Return what this machine lacks for WireGuard, None if nothing."""
    if problem := _missing("WireGuard", **{"wireguard-go": "wireguard-go", "wg": "wireguard-tools"}):
        return problem
    return None if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "no /dev/net/tun here, and WireGuard needs it"


def _missing(what: str, **packages: str) -> str | None:
    """packages: Debian's package by program."""
    lacking = [package for program, package in packages.items() if shutil.which(program) is None]
    return f"no {what} here: install {' and '.join(lacking)}" if lacking else None


class KernelNetwork:
    """The namespaces `<name>-n0`, `<name>-n1`, … and `<name>-hub`.

    Args:
        shape: Shape of the links.
        folder: The lab's folder, for keys and for the state of software delays.
        name: The lab's name.
        run: Runs ip, tc and nft.
        netem: Whether the kernel has netem; by default it is probed.

    Raises:
        NetlabError: The kernel refuses a command.
    """

    form = "kernel"

    def __init__(
        self, shape: LabShape, folder: Path, name: str, *, run: RunCommand = run_command, netem: bool | None = None
    ) -> None:
        self._shape, self._run, self._last_port = shape, run, 29500
        self._hub = f"{name}-hub"
        self._nodes = [f"{name}-n{node}" for node in range(shape.nodes)]
        self._routers = {node: f"{name}-r{node}" for node in range(1, shape.nodes) if shape.nat}
        self._helpers = Supervisor(lambda *_: None)
        # wireguard-go's sockets are shared by all namespaces of the machine.
        self._wireguard = [f"wg{os.getpid()}n{node}" for node in range(shape.nodes)] if shape.wireguard else []
        self.interface = WIREGUARD_INTERFACE if shape.wireguard else "eth0"
        self.delay_by: str | None = None
        self._state = folder / "state"
        if shape.delay_s:
            self.delay_by = "netem" if (has_netem() if netem is None else netem) else "software"
            SharedState.create(self._state, shape.nodes)
        try:
            self._build()
            if shape.wireguard:
                self._build_wireguard(folder)
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        run, hub, shape = self._run, self._hub, self._shape
        run(f"ip netns add {hub}")
        run(f"ip -n {hub} link add bridge type bridge mcast_snooping 0")
        self._without_ipv6(hub, "bridge")
        run(f"ip -n {hub} link set bridge up")
        for node, name in enumerate(self._nodes):
            port, router = f"port{node}", self._routers.get(node)
            run(f"ip netns add {name}")
            if router is None:
                run(f"ip link add eth0 netns {name} type veth peer name {port} netns {hub}")
            else:
                self._build_router(node, router)
            self._without_ipv6(name, "eth0")
            self._without_ipv6(hub, port)
            self._set_queues("add", node, shape.up[node], shape.down[node])
            self.join(node)
            run(f"ip -n {hub} link set {port} up")
            bits = _PREFIX_BITS if router is None else _PRIVATE_BITS
            run(f"ip -n {name} addr add {self._outside(node)}/{bits} dev eth0")
            run(f"ip -n {name} link set eth0 up")
            run(f"ip -n {name} link set lo up")
            if router is not None:
                run(f"ip -n {name} route add default via {_lan(node)}")
            if shape.loss:
                lose_packets(name, "eth0", shape.loss, run)
            self._name_nodes(name)

    def _build_router(self, node: int, router: str) -> None:
        """Create eth0 of a node, both interfaces of its router, and the port of the bridge."""
        run = self._run
        run(f"ip netns add {router}")
        run(f"ip link add eth0 netns {self._nodes[node]} type veth peer name lan netns {router}")
        run(f"ip link add wan netns {router} type veth peer name port{node} netns {self._hub}")
        for side, own, bits in (("lan", _lan(node), _PRIVATE_BITS), ("wan", _on_bridge(node), _PREFIX_BITS)):
            self._without_ipv6(router, side)
            run(f"ip -n {router} addr add {own}/{bits} dev {side}")
            run(f"ip -n {router} link set {side} up")
        masquerade(router, "wan", run)

    def _name_nodes(self, namespace: str) -> None:
        # Note: `ip netns exec` mounts this as /etc/hosts. Without names torch logs a warning for each connection, whose
        # IPv4-mapped IPv6 address it cannot resolve.
        hosts = Path("/etc/hosts").read_text().rstrip("\n") if Path("/etc/hosts").exists() else "127.0.0.1 localhost"
        for node in range(self._shape.nodes):
            hosts += f"\n{self.address(node)} node{node}\n::ffff:{self.address(node)} node{node}"
        folder = CONFIGURATION / namespace
        folder.mkdir(parents=True)
        (folder / "hosts").write_text(f"{hosts}\n")

    def _without_ipv6(self, namespace: str, interface: str) -> None:
        # Note: interfaces announce IPv6 addresses, and those packets would be counted as the nodes' own.
        if Path("/proc/sys/net/ipv6").exists():
            self._run(f"ip -n {namespace} link set {interface} addrgenmode none")

    def address(self, node: int) -> str:
        return wireguard_address(node) if self._shape.wireguard else self._outside(node)

    def _outside(self, node: int) -> str:
        return f"198.19.{node}.2" if node in self._routers else _on_bridge(node)

    def port(self) -> int:
        self._last_port += 1  # the namespace is new: only earlier runs of this lab have used any
        return self._last_port

    def wrap(self, node: int, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self._nodes[node], *command]

    def settings(self, node: int, procs_per_node: int) -> str | None:
        if self.delay_by != "software":
            return None
        unlimited = (None,) * self._shape.nodes  # the kernel limits the rates
        only_delay = replace(self._shape, up=unlimited, down=unlimited)
        return ThrottleSettings.of(only_delay, self._state, node, procs_per_node).text()

    def bytes(self) -> list[NodeBytes]:
        return [
            NodeBytes(node, self._count(name, "eth0"), self._count(self._hub, f"port{node}"))
            for node, name in enumerate(self._nodes)
        ]

    def _count(self, namespace: str, interface: str) -> int:
        # Note: the counter of the queue. That of the interface omits headers of segments that are split further down.
        queues = json.loads(self._run(f"tc -n {namespace} -s -j qdisc show dev {interface}"))
        return next(int(queue["bytes"]) for queue in queues if queue.get("root"))

    def set_rate(self, rate: int) -> None:
        for node in range(self._shape.nodes):
            self._set_queues("change", node, rate, rate)

    def _set_queues(self, verb: str, node: int, up: int | None, down: int | None) -> None:
        """verb: "add" or "change"."""
        delay, delay_s = self._shape if self.delay_by == "netem" else None, self._shape.delay_s
        for text in queue_commands(verb, self._nodes[node], "eth0", up, delay_s, delay):
            self._run(text)
        for text in queue_commands(verb, self._hub, f"port{node}", down, delay_s, None):
            self._run(text)

    def cut(self, node: int) -> None:
        # Note: detached from the bridge, but up. As with a distant line that breaks, the node itself notices nothing.
        self._run(f"ip -n {self._hub} link set port{node} nomaster")

    def join(self, node: int) -> None:
        self._run(f"ip -n {self._hub} link set port{node} master bridge")

    def processes(self) -> set[int]:
        return processes_in(self._namespaces, self._run) - self._helpers.pids

    def close(self) -> None:
        self._helpers.close()
        for name in self._wireguard:
            (_WIREGUARD_SOCKETS / f"{name}.sock").unlink(missing_ok=True)
        delete_namespaces(self._namespaces, self._run)

    @property
    def _namespaces(self) -> list[str]:
        return [*self._nodes, *self._routers.values(), self._hub]

    def _build_wireguard(self, folder: Path) -> None:
        """Give each node an interface by wireguard-go, in user space.

        With routers all nodes connect to node 0 only, which forwards between them.
        """
        run, nodes, star = self._run, range(self._shape.nodes), self._shape.nat
        keys = [_wg("genkey") for _ in nodes]
        public = [_wg("pubkey", key) for key in keys]
        for node, (namespace, name) in enumerate(zip(self._nodes, self._wireguard, strict=True)):
            self._start_helper(namespace, ["wireguard-go", "-f", name], (_WIREGUARD_SOCKETS / f"{name}.sock").exists)
            private = folder / f"wg-{node}"
            private.touch(mode=0o600)
            private.write_text(keys[node])
            text = f"ip netns exec {namespace} wg set {name} listen-port {_WIREGUARD_PORT} private-key {private}"
            for peer in [0] if star and node else [other for other in nodes if other != node]:
                text += f" peer {public[peer]} allowed-ips "
                text += (
                    f"{wireguard_address(0)}/{_WIREGUARD_BITS}" if star and node else f"{wireguard_address(peer)}/32"
                )
                if not star or node:
                    endpoint = f"{self._outside(peer)}:{_WIREGUARD_PORT}"
                    text += f" endpoint {endpoint} persistent-keepalive {_KEEPALIVE_S}"
            run(text)
            run(f"ip -n {namespace} link set {name} name {WIREGUARD_INTERFACE} mtu {WIREGUARD_MTU}")
            run(f"ip -n {namespace} addr add {wireguard_address(node)}/{_WIREGUARD_BITS} dev {WIREGUARD_INTERFACE}")
            run(f"ip -n {namespace} link set {WIREGUARD_INTERFACE} up")
        if star:
            enable_forwarding(self._nodes[0], run)

    def _start_helper(self, namespace: str, command: Sequence[str], ready: Callable[[], bool]) -> None:
        """Start a process that serves the network itself, and wait until it is ready."""
        wrapped = ["ip", "netns", "exec", namespace, *command]
        environment = {**os.environ, "LOG_LEVEL": "silent"}  # of wireguard-go
        self._helpers.start(ProcessSpec(label=command[0], command=wrapped, environment=environment))
        for _ in self._helpers.watch(grace_s=0.0, timeout_s=_START_S):
            if ready():
                return
        raise NetlabError(f"{' '.join(command)} did not start (exit status {self._helpers.status})")


def _on_bridge(node: int) -> str:
    return f"198.18.0.{node + 1}"


def _lan(node: int) -> str:
    """Address of a router towards its node."""
    return f"198.19.{node}.1"


def queue_commands(
    verb: str, namespace: str, interface: str, rate: int | None, delay_s: float, delay: LabShape | None
) -> list[str]:
    """Return the tc commands that "add" or "change" an interface's queue.

    Args:
        verb: "add" or "change".
        namespace: Namespace of the interface.
        interface: Its name.
        rate: Bits per second for tbf, None for no limit.
        delay_s: One-way delay in seconds, for the length of the queue.
        delay: Shape of the delay by netem, None for none.
    """
    add = f"tc -n {namespace} qdisc {verb} dev {interface}"
    place, commands = "root", []
    if delay is not None:
        netem = f"delay {round(delay.delay_s * 1e6)}us"
        if delay.jitter_s:
            # Without a rate, netem reorders packets.
            netem += f" {round(delay.jitter_s * 1e6)}us rate 100gbit"
        commands.append(f"{add} root handle 1: netem limit 1000000 {netem}")
        place = "parent 1: handle 10:"
    if rate is not None:
        size = f"burst {burst_bytes(rate)} limit {queue_bytes(rate, delay_s)}"
        commands.append(f"{add} {place} tbf rate {rate}bit {size}")
    elif not commands:
        commands.append(f"{add} root pfifo limit 100000")  # for its counter
    return commands


def wireguard_address(node: int) -> str:
    """Return a node's address inside WireGuard."""
    return f"198.19.255.{node + 1}"


def _wg(subcommand: str, text: str = "") -> str:
    return subprocess.run(["wg", subcommand], input=text, capture_output=True, text=True, check=True).stdout.strip()


def lose_packets(namespace: str, interface: str, share: float, run: RunCommand) -> None:
    """Drop this share of an interface's incoming packets at random."""
    # Note: without segmentation offload, because the kernel otherwise hands over up to 64 KiB as one packet.
    run(f"ip -n {namespace} link set {interface} gso_max_segs 1")
    nft = f"ip netns exec {namespace} nft add"
    run(f"{nft} table inet {_TABLE}")
    run(f"{nft} chain inet {_TABLE} loss {{ type filter hook prerouting priority -300 ; }}")
    random = f"numgen random mod {_LOSS_STEPS} < {round(share * _LOSS_STEPS)}"
    run(f"{nft} rule inet {_TABLE} loss iifname {interface} {random} counter drop")


def masquerade(router: str, outside: str, run: RunCommand) -> None:
    """Let a namespace forward packets from inside under its own address, and reject connections from outside."""
    enable_forwarding(router, run)
    nft = f"ip netns exec {router} nft add"
    run(f"{nft} table ip {_TABLE}")
    run(f"{nft} chain ip {_TABLE} out {{ type nat hook postrouting priority 100 ; }}")
    run(f"{nft} rule ip {_TABLE} out oifname {outside} masquerade")
    for hook in ("input", "forward"):
        run(f"{nft} chain ip {_TABLE} {hook} {{ type filter hook {hook} priority 0 ; }}")
        run(f"{nft} rule ip {_TABLE} {hook} iifname {outside} ct state new drop")


def enable_forwarding(namespace: str, run: RunCommand) -> None:
    """Let a namespace forward packets."""
    run(f"ip netns exec {namespace} sysctl -q -w net.ipv4.ip_forward=1")
