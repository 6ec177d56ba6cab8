"""The resources of this machine: GPUs and CPU cores that ranks share, network interfaces, addresses and ports.

GPUs are identified by their UUIDs, not their numbers: under Slurm, with one GPU for each task, every rank sees its own
GPU as number 0.
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

_MIG = " MIG "  # in the name of an instance of a GPU


class RankGpu(NamedTuple):
    """The GPU of a rank. name: Unique, also for MIG instances. whole: Name of the physical GPU, as NCCL sees it."""

    name: str
    whole: str


def own_gpu(local_rank: int) -> RankGpu | None:
    """Return the GPU that a rank uses, None without one."""
    import torch  # here: launchers start without it

    if not torch.cuda.is_available():
        return None
    number = local_rank % torch.cuda.device_count()
    found = torch.cuda.get_device_properties(number)
    name = str(found.uuid)
    if _MIG not in found.name:
        return RankGpu(name, name)
    # Note: depending on its version, CUDA returns the UUID of the instance or of the GPU. NCCL treats instances of one
    # GPU as the same device. It is unknown which belong together, so all of a machine count as one.
    visible = [*os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","), *[""] * number][number]
    return RankGpu(f"{name} {visible}", f"instances on {machine()}")


def some_share(names: Sequence[str | None]) -> bool:
    """Return whether a name occurs twice. names: By rank, None for ranks without one."""
    found = [name for name in names if name is not None]
    return len(set(found)) < len(found)


def ranks_on_gpu(all_ranks: AllRanks, gpu: RankGpu | None) -> int:
    """Count the ranks that use this rank's GPU, 0 without a GPU; every rank must call this."""
    name = None if gpu is None else gpu.name
    found = all_ranks.all_gather_object(name)
    return 0 if name is None else found.count(name)


def ranks_on_cores(all_ranks: AllRanks) -> int:
    """Count the ranks whose CPU cores overlap with this rank's; every rank must call this."""
    mine = [machine(), own_cores()]
    found = all_ranks.all_gather_object(mine)
    return sum(place == mine[0] and not set(cores).isdisjoint(mine[1]) for place, cores in found)


def own_cores() -> list[int]:
    """List the CPU cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Count the CPU cores that this process may use, by its affinity and the quotas of its control groups."""
    return max(1, min([len(own_cores()), *map(round, _quotas())]))


def _quotas() -> Iterator[float]:
    """Core quotas of the process's control groups, where they are limited."""
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
_PORTS = range(10_000, 32_000)  # below the ephemeral ports: 32768 and up on Linux, higher elsewhere


class Interface(NamedTuple):
    """A network interface. addresses: IPv4 first. speed_mbit: 0 if unknown."""

    name: str
    addresses: tuple[str, ...]
    up: bool
    mtu: int
    speed_mbit: int

    @property
    def usable(self) -> bool:
        """True if another machine may be reachable through it."""
        return self.up and any(not is_loopback(a) and not a.startswith("fe80") for a in self.addresses)


class GlooDefault(NamedTuple):
    """The address that gloo binds to by default: the first local one of the host name, or None."""

    hostname: str
    address: str | None


def list_interfaces() -> dict[str, Interface]:
    """Return all network interfaces of this machine, by name."""
    stats, found = psutil.net_if_stats(), {}
    for name, addresses in psutil.net_if_addrs().items():
        ip = [a.address for family in (socket.AF_INET, socket.AF_INET6) for a in addresses if a.family == family]
        state = stats.get(name)
        up, mtu, speed = (state.isup, state.mtu, state.speed) if state else (False, 0, 0)
        found[name] = Interface(name, tuple(a.split("%")[0] for a in ip), up, mtu, speed)
    return found


def default_choice() -> GlooDefault:
    """Find the address as gloo does without GLOO_SOCKET_IFNAME: bind to each one of the host name until one works."""
    hostname = socket.gethostname()
    try:
        candidates = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
    except OSError:
        return GlooDefault(hostname, None)
    for family, kind, protocol, _, where in candidates:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(where)
                return GlooDefault(hostname, str(where[0]))
        except OSError:
            continue
    return GlooDefault(hostname, None)


def gloo_address() -> str:
    """Return the address that gloo binds to in this process. Raises ConfigError for an invalid GLOO_SOCKET_IFNAME."""
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
    """Return the source address of connections to a host, None without a route."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)  # of UDP: nothing is sent
            return str(probe.getsockname()[0]).split("%")[0]
    except OSError:
        return None


def interface_towards(host: str) -> str | None:
    """Return the name of the interface with this source address, None without one."""
    address = address_towards(host)
    return next((i.name for i in list_interfaces().values() if address in i.addresses), None)


def loopback() -> str:
    """Return the name of the loopback interface."""
    return interface_towards("127.0.0.1") or "lo"


def free_port() -> int:
    """Find a free TCP port outside the ephemeral range.

    An outgoing connection could take an ephemeral port before the caller listens.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise LinkError(f"100 ports between {_PORTS.start} and {_PORTS.stop} are all in use on this machine")


def is_loopback(address: str) -> bool:
    """Return whether an IP address, or the name localhost, is on the loopback interface."""
    try:
        return ipaddress.ip_address(address.split("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"


def machine() -> str:
    """Return a name of this machine; containers and network namespaces count as machines of their own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()
