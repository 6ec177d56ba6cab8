"""Which ranks share a GPU, or the processor's cores, told by what these are.

Numbers do not tell: under Slurm, with a GPU for each task, every rank of a machine sees its own alone, as number 0.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from pipecomp.errors import ConfigError, LinkError
from pipecomp.utils.cgroups import control_groups

if TYPE_CHECKING:
    from pipecomp.distributed.consistency import AllRanks

_INSTANCE = " MIG "  # in the name of an instance of a GPU


class Gpu(NamedTuple):
    """What a rank computes on. name: unique; instances of a GPU have names of their own. whole: what NCCL knows."""

    name: str
    whole: str


def own_gpu(local_rank: int) -> Gpu | None:
    """Tell which GPU a rank takes, None without one."""
    import torch  # here: launchers start without it

    if not torch.cuda.is_available():
        return None
    number = local_rank % torch.cuda.device_count()
    found = torch.cuda.get_device_properties(number)
    name = str(found.uuid)
    if _INSTANCE not in found.name:
        return Gpu(name, name)
    # CUDA says the instance's name or the whole GPU's, by its version. For NCCL, instances of a GPU are one and the
    # same; so all of a machine count as one, since which are of one GPU is not told.
    visible = [*os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","), *[""] * number][number]
    return Gpu(f"{name} {visible}", f"instances on {machine()}")


def some_share(names: Sequence[str | None]) -> bool:
    """Tell whether a name comes twice. names: by rank; None for ranks that have none."""
    found = [name for name in names if name is not None]
    return len(set(found)) < len(found)


def ranks_on_gpu(all_ranks: AllRanks, gpu: Gpu | None) -> int:
    """Count the ranks that compute on this rank's GPU; every rank must call this. gpu: None without one, which is 0."""
    name = None if gpu is None else gpu.name
    found = all_ranks.all_gather_object(name)
    return 0 if name is None else found.count(name)


def ranks_on_cores(all_ranks: AllRanks) -> int:
    """Count the ranks that may use some of the cores that this one may use; every rank must call this."""
    mine = [machine(), own_cores()]
    found = all_ranks.all_gather_object(mine)
    return sum(place == mine[0] and not set(cores).isdisjoint(mine[1]) for place, cores in found)


def own_cores() -> list[int]:
    """List the cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Count the cores that this process may use, by its affinity and the quotas of its control groups."""
    return max(1, min([len(own_cores()), *map(round, _quotas())]))


def _quotas() -> Iterator[float]:
    """Give the cores that each of the process's control groups may use at a time, where that is limited."""
    for folder, version_2 in control_groups("cpu"):
        try:
            if version_2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            cores = int(quota) / int(period)
        except (OSError, ValueError):  # no such group in this container, or no limit: "max"
            continue
        if cores > 0:  # no limit is -1 in version 1
            yield cores


GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
_PORTS = range(10_000, 32_000)  # Linux takes those of outgoing connections from 32768 on, others from above


class Interface(NamedTuple):
    """addresses: IPv4 first. speed_mbit: 0 where the system does not know it."""

    name: str
    addresses: tuple[str, ...]
    up: bool
    mtu: int
    speed_mbit: int

    @property
    def usable(self) -> bool:
        """Whether another machine could be reached through it."""
        return self.up and any(not is_loopback(a) and not a.startswith("fe80") for a in self.addresses)


class Choice(NamedTuple):
    """What gloo binds to by itself: the first address of the host name that is this machine's, or none."""

    hostname: str
    address: str | None


def list_interfaces() -> dict[str, Interface]:
    """All network interfaces of this machine, by name."""
    stats, found = psutil.net_if_stats(), {}
    for name, addresses in psutil.net_if_addrs().items():
        ip = [a.address for family in (socket.AF_INET, socket.AF_INET6) for a in addresses if a.family == family]
        state = stats.get(name)
        up, mtu, speed = (state.isup, state.mtu, state.speed) if state else (False, 0, 0)
        found[name] = Interface(name, tuple(a.split("%")[0] for a in ip), up, mtu, speed)
    return found


def default_choice() -> Choice:
    """Do as gloo does without GLOO_SOCKET_IFNAME: bind to each address of the host name until one lets it."""
    hostname = socket.gethostname()
    try:
        candidates = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
    except OSError:
        return Choice(hostname, None)
    for family, kind, protocol, _, where in candidates:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(where)
                return Choice(hostname, str(where[0]))
        except OSError:
            continue
    return Choice(hostname, None)


def gloo_address() -> str:
    """Find the address that gloo binds to in this process. ConfigError if GLOO_SOCKET_IFNAME leads nowhere."""
    variable = os.environ.get(GLOO_VARIABLE)
    if not variable:
        return default_choice().address or "127.0.0.1"
    interfaces = list_interfaces()
    for name in variable.split(","):
        interface = interfaces.get(name)
        if interface is None or not interface.up or not interface.addresses:
            allowed = ", ".join(i.name for i in interfaces.values() if i.up and i.addresses)
            raise ConfigError(GLOO_VARIABLE, variable, f"interfaces of this machine that are up: {allowed}")
    return interfaces[variable.split(",")[0]].addresses[0]


def address_towards(host: str) -> str | None:
    """Find the address of this machine that connections to a host come from; None if no way leads there."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)  # of UDP: nothing is sent
            return str(probe.getsockname()[0]).split("%")[0]
    except OSError:
        return None


def interface_towards(host: str) -> str | None:
    """Find the interface that has this address; None if there is none."""
    address = address_towards(host)
    return next((i.name for i in list_interfaces().values() if address in i.addresses), None)


def loopback() -> str:
    """Name the interface that leads to this machine itself."""
    return interface_towards("127.0.0.1") or "lo"


def free_port() -> int:
    """Find a TCP port that nobody listens on just now, of those that systems do not give to outgoing connections.

    One of theirs could be taken before whoever asked listens.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise LinkError(f"100 ports between {_PORTS.start} and {_PORTS.stop} are all in use on this machine")


def is_loopback(address: str) -> bool:
    """Whether an IP address, or the name localhost, stays on this machine."""
    try:
        return ipaddress.ip_address(address.split("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"


def machine() -> str:
    """Name what processes share that share a network: containers and network namespaces are machines of their own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()
