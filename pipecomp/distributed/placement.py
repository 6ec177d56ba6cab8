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
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from pipecomp.distributed.launch_env import Launch, master_address, read_launch
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
_LOOKUP_S, _LOOK_AGAIN_S = 10.0, 1.0
_FAR_ADDRESSES = ("198.51.100.1", "2001:db8::1")  # reserved for documentation
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
    """Find the address as gloo does without an interface: bind to each one of the host name until one works."""
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
        candidates = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, where in candidates:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(where)  # of UDP: nothing is sent
            return str(probe.getsockname()[0]).split("%")[0]
    return None


def interface_towards(host: str) -> str | None:
    """Return the name of the interface with this source address, None without one."""
    address = address_towards(host)
    return next((i.name for i in list_interfaces().values() if address in i.addresses), None)


def interface_outwards() -> str | None:
    """Return the name of the interface of the default route, None without one."""
    return next(filter(None, map(interface_towards, _FAR_ADDRESSES)), None)


def loopback() -> str:
    """Return the name of the loopback interface."""
    return interface_towards("127.0.0.1") or "lo"


def interface_towards_master(launch: Launch) -> str | None:
    """Return the name of the interface that gloo should use, None without a route to rank 0's machine.

    It leads to MASTER_ADDR. On rank 0's own machine a name may resolve to 127.0.1.1, as on Debian; with several
    machines, the interface of the default route is taken there.
    """
    if launch.master is None:
        return None
    name = interface_towards(launch.master)
    if name != loopback() or is_loopback(launch.master) or launch.several_machines is False:
        return name
    usable = [interface.name for interface in list_interfaces().values() if interface.usable]
    return interface_outwards() or (usable[0] if len(usable) == 1 else name)


_chosen: str | None = None  # by this process, not by the user


def interface_of_user() -> str | None:
    """Return GLOO_SOCKET_IFNAME, None if it is unset or was set by `prepare_network`."""
    variable = os.environ.get(GLOO_VARIABLE) or None
    return None if variable == _chosen else variable


def prepare_network() -> None:
    """Let torch.distributed find rank 0, and gloo use the interface towards it; call it before a process group is made.

    MASTER_ADDR loses the brackets of an IPv6 address. GLOO_SOCKET_IFNAME is set unless the user has set it.

    Raises:
        ConfigError: MASTER_ADDR does not resolve on this machine.
    """
    global _chosen
    host = master_address(os.environ)
    if not host:
        return
    os.environ["MASTER_ADDR"] = host
    check_resolves("MASTER_ADDR", host)
    if interface_of_user() is not None:
        return
    _chosen = interface_towards_master(read_launch(os.environ))
    if _chosen is None:
        os.environ.pop(GLOO_VARIABLE, None)
    else:
        os.environ[GLOO_VARIABLE] = _chosen


def check_resolves(key: str, host: str) -> None:
    """Raise ConfigError for `key` if a host name or address does not resolve within 10 s."""
    until = time.monotonic() + _LOOKUP_S
    answers: list[str] = []  # "" if the name resolves, else why not
    why = f"no answer of the name servers in {_LOOKUP_S:g} s"

    def look_up() -> None:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            answers.append("")
        except (OSError, UnicodeError) as error:
            answers.append(getattr(error, "strerror", None) or str(error))

    # Note: a thread, because the resolver has no time limit. A name may appear a moment after its machine has started.
    while (left_s := until - time.monotonic()) > 0:
        thread = threading.Thread(target=look_up, name="pipecomp-lookup", daemon=True)
        thread.start()
        thread.join(left_s)
        if thread.is_alive():
            break
        why = answers.pop()
        if not why:
            return
        time.sleep(min(_LOOK_AGAIN_S, max(0.0, until - time.monotonic())))
    raise ConfigError(
        key,
        host,
        f"a name or address that {socket.gethostname()} resolves ({why})",
        "Give all ranks the IP address of rank 0's machine (torchrun --master-addr ADDRESS, or --local-addr ADDRESS on "
        "the first machine with --rdzv-endpoint), or add the name to /etc/hosts here",
    )


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


def computer() -> str:
    """Return a name of the computer whose cores this process uses: containers and network namespaces share it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def machine() -> str:
    """Return a name of this machine; containers and network namespaces count as machines of their own."""
    try:
        return f"{computer()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()
