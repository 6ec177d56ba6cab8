"""A network of the kernel's own: a namespace for each node, a bridge between them, tbf in each direction.

    node 0: eth0 ── port0 ┐
                          ├ bridge (a namespace of its own; the machine's network is not touched)
    node 1: eth0 ── port1 ┘

eth0's queue shapes what a node sends, its port's queue what it receives. Where the kernel has netem, eth0 delays too;
where not, pipecomp's own links do, or, if the delay varies, a process that carries packets between port and bridge.
With `nat`, every node but 0 has a router between eth0 and its port, which hides it.
Nodes at several `sites` have a bridge for each, joined to a bridge in the middle by lines with such queues.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipecomp.netlab.namespaces import CONFIGURATION, Run, command, delete_namespaces, has_netem, processes_in
from pipecomp.netlab.network import NetlabError, NodeBytes
from pipecomp.netlab.processes import end
from pipecomp.netlab.shape import Shape, burst_bytes, queue_bytes
from pipecomp.netlab.software import SharedState, ThrottleSettings

_PREFIX_BITS = 16  # of 198.18.0.0/15, which RFC 2544 sets aside for tests of networks; its other half is behind routers
_PRIVATE_BITS = 24
_DELAYER = Path(__file__).with_name("delayer.py")


class KernelNetwork:
    """Namespaces `<name>-n0`, `<name>-n1`, … and `<name>-hub`. NetlabError if the kernel refuses.

    folder: where the state of software delays is kept. run, netem: how ip and tc are run and whether netem is there,
    for tests.
    """

    form = "kernel"

    def __init__(self, shape: Shape, folder: Path, name: str, *, run: Run = command, netem: bool | None = None) -> None:
        self._shape, self._run, self._ports = shape, run, 29500
        self._hub = f"{name}-hub"
        self._nodes = [f"{name}-n{node}" for node in range(shape.nodes)]
        self._routers = {node: f"{name}-r{node}" for node in range(1, shape.nodes) if shape.nat}
        self._wireguard: WireGuard | None = None
        self._delayer: subprocess.Popen | None = None
        self.interface = INTERFACE if shape.wireguard else "eth0"
        self.delay_by: str | None = None
        self._state = folder / "state"
        if shape.delay_s:
            without = "process" if shape.jitter_s else "software"
            self.delay_by = "netem" if (has_netem() if netem is None else netem) else without
            SharedState.create(self._state, shape.nodes)
        try:
            self._build()
            if self.delay_by == "process":
                self._delayer = _start_delayer(self._hub, shape)
            if shape.wireguard:
                outside = [self._outside(node) for node in range(shape.nodes)]
                self._wireguard = WireGuard(self._nodes, outside, folder, run, star=shape.nat)
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        run, hub, shape = self._run, self._hub, self._shape
        run(f"ip netns add {hub}")
        self._build_bridges()
        for node, name in enumerate(self._nodes):
            port, router = f"port{node}", self._routers.get(node)
            run(f"ip netns add {name}")
            if router is None:
                run(f"ip link add eth0 netns {name} type veth peer name {port} netns {hub}")
            else:
                self._build_router(node, router)
            self._without_ipv6(name, "eth0")
            self._without_ipv6(hub, port)
            delay = shape if self.delay_by == "netem" else None
            for text in queue_commands("add", name, "eth0", shape.up[node], shape.delay_s, delay):
                run(text)
            for text in queue_commands("add", hub, port, shape.down[node], shape.delay_s, None):
                run(text)
            if self.delay_by == "process":
                run(f"ip -n {hub} link add mid{node} type veth peer name {self._member(node)}")
                for end in (f"mid{node}", self._member(node)):
                    self._without_ipv6(hub, end)
                    run(f"ip -n {hub} link set {end} up")
            run(f"ip -n {hub} link set {self._member(node)} master {self._bridge(node)}")
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

    def _build_bridges(self) -> None:
        """A bridge for each site, and one in the middle where there are several."""
        run, hub, shape = self._run, self._hub, self._shape
        sites = sorted(set(shape.site))
        for bridge in [*(f"br{site}" for site in sites), *(["core"] if len(sites) > 1 else [])]:
            run(f"ip -n {hub} link add {bridge} type bridge mcast_snooping 0")
            self._without_ipv6(hub, bridge)
            run(f"ip -n {hub} link set {bridge} up")
        for site in sites if len(sites) > 1 else []:
            run(f"ip -n {hub} link add out{site} type veth peer name in{site}")
            for port, bridge in ((f"out{site}", f"br{site}"), (f"in{site}", "core")):
                self._without_ipv6(hub, port)
                for text in queue_commands("add", hub, port, shape.between, shape.delay_s, None):
                    run(text)
                run(f"ip -n {hub} link set {port} master {bridge}")
                run(f"ip -n {hub} link set {port} up")

    def _bridge(self, node: int) -> str:
        return f"br{self._shape.site[node]}"

    def _member(self, node: int) -> str:
        """What of a node is the bridge's."""
        return f"line{node}" if self.delay_by == "process" else f"port{node}"

    def _build_router(self, node: int, router: str) -> None:
        """eth0 of a node, a router's two sides, and a port of the bridge."""
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
        # `ip netns exec` shows this as /etc/hosts. Without names, torch warns of every connection, which it looks up as
        # an IPv4 address within IPv6.
        hosts = Path("/etc/hosts").read_text().rstrip("\n") if Path("/etc/hosts").exists() else "127.0.0.1 localhost"
        for node in range(self._shape.nodes):
            hosts += f"\n{self.address(node)} node{node}\n::ffff:{self.address(node)} node{node}"
        folder = CONFIGURATION / namespace
        folder.mkdir(parents=True)
        (folder / "hosts").write_text(f"{hosts}\n")

    def _without_ipv6(self, namespace: str, interface: str) -> None:
        # An IPv6 address announces itself: only the nodes' own bytes are to be counted.
        if Path("/proc/sys/net/ipv6").exists():
            self._run(f"ip -n {namespace} link set {interface} addrgenmode none")

    def address(self, node: int) -> str:
        """See Network."""
        return wireguard_address(node) if self._shape.wireguard else self._outside(node)

    def _outside(self, node: int) -> str:
        return f"198.19.{node}.2" if node in self._routers else _on_bridge(node)

    def port(self) -> int:
        """See Network."""
        self._ports += 1  # the namespace is new: only earlier runs of this lab have used any
        return self._ports

    def wrap(self, node: int, command: Sequence[str]) -> list[str]:
        """See Network."""
        return ["ip", "netns", "exec", self._nodes[node], *command]

    def settings(self, node: int, procs_per_node: int) -> str | None:
        """See Network."""
        if self.delay_by != "software":
            return None
        unlimited = (None,) * self._shape.nodes  # the kernel keeps the rates
        only_delay = replace(self._shape, up=unlimited, down=unlimited)
        return ThrottleSettings.of(only_delay, self._state, node, procs_per_node).text()

    def bytes(self) -> list[NodeBytes]:
        """See Network."""
        return [
            NodeBytes(node, self._count(name, "eth0"), self._count(self._hub, f"port{node}"))
            for node, name in enumerate(self._nodes)
        ]

    def _count(self, namespace: str, interface: str) -> int:
        # The queue's own counter: the interface's leaves out the headers of segments that are cut further down.
        queues = json.loads(self._run(f"tc -n {namespace} -s -j qdisc show dev {interface}"))
        return next(int(queue["bytes"]) for queue in queues if queue.get("root"))

    def set_rate(self, rate: int) -> None:
        """See Network."""
        delay = self._shape if self.delay_by == "netem" else None
        for node, name in enumerate(self._nodes):
            for text in (
                *queue_commands("change", name, "eth0", rate, self._shape.delay_s, delay),
                *queue_commands("change", self._hub, f"port{node}", rate, self._shape.delay_s, None),
            ):
                self._run(text)

    def cut(self, node: int) -> None:
        """See Network."""
        # Off the bridge, not down: as with a line that breaks far away, the node itself notices nothing.
        self._run(f"ip -n {self._hub} link set {self._member(node)} nomaster")

    def join(self, node: int) -> None:
        """See Network."""
        self._run(f"ip -n {self._hub} link set {self._member(node)} master {self._bridge(node)}")

    def processes(self) -> set[int]:
        """See Network."""
        own = set() if self._wireguard is None else self._wireguard.processes
        own |= set() if self._delayer is None else {self._delayer.pid}
        return processes_in(self._namespaces, self._run) - own

    def close(self) -> None:
        """See Network."""
        if self._wireguard is not None:
            self._wireguard.close()
        if self._delayer is not None:
            end(self._delayer)
        delete_namespaces(self._namespaces, self._run)

    @property
    def _namespaces(self) -> list[str]:
        return [*self._nodes, *self._routers.values(), self._hub]


def _start_delayer(hub: str, shape: Shape) -> subprocess.Popen:
    words = [sys.executable, str(_DELAYER), str(shape.delay_s), str(shape.jitter_s), str(shape.nodes)]
    started = subprocess.Popen(
        ["ip", "netns", "exec", hub, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert started.stdout is not None
    if not started.stdout.readline():
        end(started)
        raise NetlabError(f"what delays packets did not start (exit status {started.returncode})")
    return started


def _on_bridge(node: int) -> str:
    return f"198.18.0.{node + 1}"


def _lan(node: int) -> str:
    """A router's address towards its node."""
    return f"198.19.{node}.1"


def queue_commands(
    verb: str, namespace: str, interface: str, rate: int | None, delay_s: float, delay: Shape | None
) -> list[str]:
    """Make the tc commands that "add" or "change" an interface's queue: netem for `delay`, tbf at `rate` bits/s.

    delay_s: seconds one way that the queue must be long enough for.
    """
    add = f"tc -n {namespace} qdisc {verb} dev {interface}"
    place, commands = "root", []
    if delay is not None:
        netem = f"delay {round(delay.delay_s * 1e6)}us"
        if delay.jitter_s:
            # Without a rate, netem would let packets overtake each other.
            netem += f" {round(delay.jitter_s * 1e6)}us rate 100gbit"
        commands.append(f"{add} root handle 1: netem limit 1000000 {netem}")
        place = "parent 1: handle 10:"
    if rate is not None:
        size = f"burst {burst_bytes(rate)} limit {queue_bytes(rate, delay_s)}"
        commands.append(f"{add} {place} tbf rate {rate}bit {size}")
    elif not commands:
        commands.append(f"{add} root pfifo limit 100000")  # for its counter
    return commands


_TABLE = "pipecomp"
_FILTER_PROGRAMS = {"nft": "nftables", "sysctl": "procps"}  # program -> Debian's package
_DRAWN = 10**6  # a packet is lost if a number below this is below the share


def missing_filters() -> str | None:
    """Say what this machine lacks for it, None if nothing."""
    lacking = [package for program, package in _FILTER_PROGRAMS.items() if shutil.which(program) is None]
    return f"no packet filter here: install {' and '.join(lacking)}" if lacking else None


def lose_packets(namespace: str, interface: str, share: float, run: Run) -> None:
    """Lose this share of the packets that come in at an interface, each for itself.

    Each packet then has to be one on the wire: the kernel hands over up to 64 KiB as one otherwise.
    """
    run(f"ip -n {namespace} link set {interface} gso_max_segs 1")
    nft = f"ip netns exec {namespace} nft add"
    run(f"{nft} table inet {_TABLE}")
    run(f"{nft} chain inet {_TABLE} loss {{ type filter hook prerouting priority -300 ; }}")
    random = f"numgen random mod {_DRAWN} < {round(share * _DRAWN)}"
    run(f"{nft} rule inet {_TABLE} loss iifname {interface} {random} counter drop")


def masquerade(router: str, outside: str, run: Run) -> None:
    """Let a namespace pass on what comes from within under its own address, and take no connection from outside."""
    pass_on(router, run)
    nft = f"ip netns exec {router} nft add"
    run(f"{nft} table ip {_TABLE}")
    run(f"{nft} chain ip {_TABLE} out {{ type nat hook postrouting priority 100 ; }}")
    run(f"{nft} rule ip {_TABLE} out oifname {outside} masquerade")
    for hook in ("input", "forward"):
        run(f"{nft} chain ip {_TABLE} {hook} {{ type filter hook {hook} priority 0 ; }}")
        run(f"{nft} rule ip {_TABLE} {hook} iifname {outside} ct state new drop")


def pass_on(namespace: str, run: Run) -> None:
    """Let a namespace forward packets."""
    run(f"ip netns exec {namespace} sysctl -q -w net.ipv4.ip_forward=1")


INTERFACE = "wg0"
MTU = 1420
PREFIX_BITS = 24
_PORT = 51820
_KEEPALIVE_S = 25
_SOCKETS = Path("/var/run/wireguard")
_START_S = 20.0
_WIREGUARD_PROGRAMS = {"wireguard-go": "wireguard-go", "wg": "wireguard-tools"}  # program -> Debian's package


def missing_wireguard() -> str | None:
    """Say what this machine lacks for it, None if nothing."""
    if lacking := [package for program, package in _WIREGUARD_PROGRAMS.items() if shutil.which(program) is None]:
        return f"no WireGuard here: install {' and '.join(lacking)}"
    return None if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "no /dev/net/tun here, which WireGuard needs"


def wireguard_address(node: int) -> str:
    """A node's address inside WireGuard."""
    return f"198.19.255.{node + 1}"


class WireGuard:
    """The interfaces of all nodes. `processes` serve them, and end with `close`.

    namespaces: of the nodes. outside: their addresses without WireGuard. star: whether all go through node 0.
    """

    def __init__(
        self, namespaces: Sequence[str], outside: Sequence[str], folder: Path, run: Run, *, star: bool
    ) -> None:
        self._processes: list[subprocess.Popen] = []
        # wireguard-go's sockets are the machine's, whatever the namespace.
        self._names = [f"wg{os.getpid()}n{node}" for node in range(len(namespaces))]
        keys = [_wg("genkey") for _ in namespaces]
        public = [_wg("pubkey", key) for key in keys]
        try:
            for node, namespace in enumerate(namespaces):
                self._serve(namespace, node)
                private = folder / f"wg-{node}"
                private.touch(mode=0o600)
                private.write_text(keys[node])
                peers = [0] if star and node else [other for other in range(len(namespaces)) if other != node]
                text = f"ip netns exec {namespace} wg set {self._names[node]} listen-port {_PORT} private-key {private}"
                for peer in peers:
                    text += f" peer {public[peer]} allowed-ips "
                    text += (
                        f"{wireguard_address(0)}/{PREFIX_BITS}" if star and node else f"{wireguard_address(peer)}/32"
                    )
                    if not star or node:
                        text += f" endpoint {outside[peer]}:{_PORT} persistent-keepalive {_KEEPALIVE_S}"
                run(text)
                run(f"ip -n {namespace} link set {self._names[node]} name {INTERFACE} mtu {MTU}")
                run(f"ip -n {namespace} addr add {wireguard_address(node)}/{PREFIX_BITS} dev {INTERFACE}")
                run(f"ip -n {namespace} link set {INTERFACE} up")
            if star:
                pass_on(namespaces[0], run)
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> set[int]:
        """Their ids."""
        return {process.pid for process in self._processes}

    def _serve(self, namespace: str, node: int) -> None:
        socket = _SOCKETS / f"{self._names[node]}.sock"
        process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, "wireguard-go", "-f", self._names[node]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "LOG_LEVEL": "silent"},
            start_new_session=True,
        )
        self._processes.append(process)
        deadline = time.monotonic() + _START_S
        while not socket.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise NetlabError(f"wireguard-go made no interface on node {node} (exit status {process.returncode})")
            time.sleep(0.02)

    def close(self) -> None:
        """End the processes; the interfaces end with them."""
        for process in self._processes:
            end(process)
        for name in self._names:
            (_SOCKETS / f"{name}.sock").unlink(missing_ok=True)


def _wg(what: str, text: str = "") -> str:
    return subprocess.run(["wg", what], input=text, capture_output=True, text=True, check=True).stdout.strip()
