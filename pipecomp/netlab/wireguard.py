"""WireGuard among the nodes of a lab, in user space: wireguard-go makes each node's interface, wg sets its keys.

Without routers every node talks to every other one; behind routers all talk to node 0, which passes on.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from pipecomp.netlab.filters import pass_on
from pipecomp.netlab.namespaces import Run
from pipecomp.netlab.network import NetlabError
from pipecomp.netlab.processes import end

INTERFACE = "wg0"
MTU = 1420
PREFIX_BITS = 24
_PORT = 51820
_KEEPALIVE_S = 25
_SOCKETS = Path("/var/run/wireguard")
_START_S = 20.0
_NEEDED = {"wireguard-go": "wireguard-go", "wg": "wireguard-tools"}  # program -> Debian's package


def missing() -> str | None:
    """Say what this machine lacks for it, None if nothing."""
    if lacking := [package for program, package in _NEEDED.items() if shutil.which(program) is None]:
        return f"no WireGuard here: install {' and '.join(lacking)}"
    return None if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "no /dev/net/tun here, which WireGuard needs"


def address(node: int) -> str:
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
                    text += f"{address(0)}/{PREFIX_BITS}" if star and node else f"{address(peer)}/32"
                    if not star or node:
                        text += f" endpoint {outside[peer]}:{_PORT} persistent-keepalive {_KEEPALIVE_S}"
                run(text)
                run(f"ip -n {namespace} link set {self._names[node]} name {INTERFACE} mtu {MTU}")
                run(f"ip -n {namespace} addr add {address(node)}/{PREFIX_BITS} dev {INTERFACE}")
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
