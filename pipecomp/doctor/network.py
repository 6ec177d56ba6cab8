"""Network interfaces, the one that gloo takes, and the address where ranks meet."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipecomp.distributed.launch_env import Launch
from pipecomp.distributed.network_interfaces import GLOO_VARIABLE as VARIABLE
from pipecomp.distributed.network_interfaces import (
    Choice,
    Interface,
    default_choice,
    interface_towards,
    is_loopback,
    list_interfaces,
)
from pipecomp.distributed.tls_join import ADDRESS, wanted_keys
from pipecomp.doctor.finding import OK, PROBLEM, WARNING, Finding, judge

GLOO = "gloo interface"
_FAR = "198.51.100.1"  # of nobody: reserved for documentation
_ENCAPSULATION = 60  # bytes that WireGuard puts around a packet over IPv4; 80 over IPv6, other tunnels take similar
_NO_CABLE = 65534  # ARPHRD_NONE: the kind of WireGuard's and tun interfaces


def network_findings(launch: Launch) -> list[Finding]:
    """Make all checks of this module on this machine."""
    interfaces = list_interfaces()
    findings = [check_interfaces(interfaces, launch)]
    closed = wanted_keys() is not None
    if not closed:  # over TLS, gloo connects nothing
        findings.append(check_gloo(interfaces, os.environ.get(VARIABLE), default_choice(), launch))
    findings += check_tunnels(interfaces, list_tunnels(interfaces), interface_towards(_FAR))
    if launch.started and launch.master is not None and not (closed and os.environ.get(ADDRESS)):
        findings.append(check_master(launch.master, resolve(launch.master), launch))
    return findings


def check_interfaces(interfaces: Mapping[str, Interface], launch: Launch) -> Finding:
    """Check whether any interface leads to other machines."""
    shown = []
    for interface in interfaces.values():
        if interface.up and interface.addresses:
            speed = f", {interface.speed_mbit} Mbit/s" if interface.speed_mbit else ""
            shown.append(f"{interface.name} {interface.addresses[0]} (MTU {interface.mtu}{speed})")
    found = ", ".join(shown) or "none is up"
    if any(interface.usable for interface in interfaces.values()):
        return Finding("interfaces", OK, found)
    if launch.several_machines is not False and launch.started:
        advice = "Bring a network interface up; give a container a network (docker run --network=host)."
        return Finding("interfaces", WARNING, f"{found}: no way to another machine", advice)
    return Finding("interfaces", OK, f"{found}: enough for ranks on this machine, no way to another")


def check_gloo(interfaces: Mapping[str, Interface], variable: str | None, choice: Choice, launch: Launch) -> Finding:
    """Check which interface gloo takes and whether it leads to other machines. variable: of GLOO_SOCKET_IFNAME."""
    usable = next((i.name for i in interfaces.values() if i.usable), None)
    export = f"export {VARIABLE}={usable or 'NAME'}"
    if variable:
        names = variable.split(",")
        for name in names:
            interface = interfaces.get(name)
            if interface is None or not interface.addresses or not interface.up:
                what = "there is no such interface" if interface is None else "it is down or has no address"
                return Finding(GLOO, PROBLEM, f"{VARIABLE}={variable}, but {name}: {what}. Every run will fail", export)
        addresses = [interfaces[name].addresses[0] for name in names]
        found = f"takes {', '.join(f'{n} ({a})' for n, a in zip(names, addresses, strict=True))}, as {VARIABLE} says"
    elif choice.address is None:
        addresses = ["127.0.0.1"]
        found = f"takes the loopback interface: the host name {choice.hostname} has no address of this machine"
    else:
        addresses = [choice.address]
        holder = next((i.name for i in interfaces.values() if choice.address in i.addresses), None)
        name = holder or ("the loopback interface" if is_loopback(choice.address) else "an unknown interface")
        found = f"takes {name}: the host name {choice.hostname} is {choice.address}"
    if not all(is_loopback(address) for address in addresses):
        return Finding(GLOO, OK, found)
    if not variable and choice.address is not None:
        export += f" (or give {choice.hostname} its own address in /etc/hosts, where it is {choice.address})"
    if launch.several_machines:
        advice = f"{export}, on every machine naming the interface that leads to the others"
        cost = "Other machines cannot be reached there: a run over several ends at its start"
        return Finding(GLOO, WARNING, f"{found}. {cost}", advice)
    found = f"{found}. Enough for ranks on this machine"
    if launch.several_machines is False:
        return Finding(GLOO, OK, found)
    return Finding(GLOO, OK, found, f"With several machines: {export}, naming the interface that leads to the others")


def check_master(master: str, address: str | None, launch: Launch) -> Finding:
    """Check where ranks meet. address: what MASTER_ADDR resolves to here, None for nothing."""
    if address is None:
        advice = "Set MASTER_ADDR to an IP address of rank 0's machine, or add the name to /etc/hosts."
        return Finding(
            "meeting point", PROBLEM, f"MASTER_ADDR={master} does not resolve here: ranks cannot meet", advice
        )
    found = f"MASTER_ADDR={master}" + ("" if address == master else f" is {address}")
    advice = "Set MASTER_ADDR to an address of rank 0's machine that the others can reach."
    unreachable = is_loopback(address) and bool(launch.several_machines)
    return judge("meeting point", found, (unreachable, WARNING, "other machines cannot reach that", advice))


def check_tunnels(interfaces: Mapping[str, Interface], tunnels: Sequence[str], outer: str | None) -> list[Finding]:
    """Check whether what a tunnel puts around its largest packets fits the interface that it leaves by.

    tunnels: names of interfaces. outer: the interface that leads to the rest of the world; None where there is none.
    """
    findings = []
    for name in tunnels:
        tunnel = interfaces[name]
        below = interfaces.get(outer or "")
        if below is None or outer in tunnels:
            continue
        room = below.mtu - _ENCAPSULATION
        meaning = (
            "every full packet leaves in two pieces, each with its own chance to be lost, and a router that drops "
            "pieces drops all large packets"
        )
        advice = f"ip link set dev {name} mtu {room - 20} (or MTU = {room - 20} in its configuration), on both machines"
        found = (
            f"MTU {tunnel.mtu} inside, {below.mtu} on {below.name} around it, {_ENCAPSULATION} bytes or more between"
        )
        findings.append(judge(f"tunnel {name}", found, (tunnel.mtu > room, WARNING, meaning, advice)))
    return findings


def list_tunnels(interfaces: Mapping[str, Interface]) -> list[str]:
    """List the interfaces that are up and have no cable: WireGuard's, Tailscale's, OpenVPN's; Linux only."""
    found = []
    for interface in interfaces.values():
        kind = Path("/sys/class/net", interface.name, "type")
        if interface.usable and kind.is_file() and int(kind.read_text()) == _NO_CABLE:
            found.append(interface.name)
    return found


def resolve(name: str) -> str | None:
    """Look up an IP address of a host name, None if it has none."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None
