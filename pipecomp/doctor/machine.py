"""Checks of this machine: processor, threads, kernels and GPUs, network interfaces, limits of the system."""

from __future__ import annotations

import math
import os
import platform
import resource
import shlex
import shutil
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from pipecomp.distributed.launch_env import Launch
from pipecomp.distributed.placement import (
    GLOO_VARIABLE,
    GlooDefault,
    Interface,
    default_choice,
    interface_of_user,
    interface_outwards,
    interface_towards_master,
    is_loopback,
    list_interfaces,
    usable_cores,
)
from pipecomp.distributed.rendezvous import ADDRESS, computes_on_cpu, wanted_keys
from pipecomp.doctor.finding import OK, PROBLEM, WARNING, Finding, format_bytes, judge
from pipecomp.kernels import dispatch
from pipecomp.kernels.build import find_compiler
from pipecomp.utils.units import format_count

GPU_SHARING = "GPU sharing"
MOUNT_SHM = "mkdir -p /dev/shm && mount -t tmpfs tmpfs /dev/shm; in a container: --shm-size=2g"

# -- processor, threads, kernels, GPUs

_COMPILERS = "apt install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora) or xcode-select --install (macOS)"
_FOR_TRITON = "a C compiler and Python's headers: apt install gcc python3-dev, or dnf install gcc python3-devel"


def _build_command() -> str:
    same = shutil.which("python") == sys.executable  # not where pipecomp is installed as a tool
    return f"{'python' if same else shlex.quote(sys.executable)} -m pipecomp.kernels.build"


class GpuStatus(NamedTuple):
    """A GPU that torch sees; error: the reason why it cannot compute, empty if it can."""

    number: int
    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]
    error: str = ""


def compute_findings(launch: Launch) -> list[Finding]:
    """Check processor, threads, kernels and GPUs."""
    cores = usable_cores()
    ranks = 0 if os.environ.get("DS_ACCELERATOR") == "cpu" else launch.local_world
    return [
        check_cpu(cores, torch.backends.cpu.get_cpu_capability(), platform.machine()),
        check_threads(cores, launch.local_world, os.environ.get("OMP_NUM_THREADS"), shared=computes_on_cpu()),
        *(check_kernels(status, find_compiler()) for status in dispatch.status()),
        *check_gpus(list_gpus(), torch.version.cuda or torch.version.hip, ranks, has_driver()),
    ]


def check_cpu(cores: int, capability: str, machine: str) -> Finding:
    """Check the instruction set. capability: torch's name for it, "DEFAULT" for the architecture's oldest."""
    advice = "Unset ATEN_CPU_CAPABILITY if it is set; in a virtual machine pass the host's CPU through."
    old = capability == "DEFAULT"
    return judge(
        "processor",
        f"{format_count(cores, 'core')} of {machine}, {'no vector extensions' if old else capability}",
        (old and machine in ("x86_64", "AMD64"), WARNING, "without AVX2 a model computes several times slower", advice),
    )


def check_threads(cores: int, local_ranks: int | None, omp_num_threads: str | None, *, shared: bool) -> Finding:
    """Check the threads of each rank.

    Args:
        cores: Usable cores of this machine.
        local_ranks: Ranks on this machine; None if unknown.
        omp_num_threads: Value of OMP_NUM_THREADS.
        shared: True if a run divides the cores among its ranks if OMP_NUM_THREADS is not set, as runs on the CPU do.
    """
    ranks = local_ranks or 1
    advice = f"export OMP_NUM_THREADS={max(1, cores // ranks)}"
    several = f"{format_count(ranks, 'rank')} {'share' if ranks > 1 else 'has'} {format_count(cores, 'core')}"
    at_most = f"Start at most {format_count(cores, 'rank')} on this machine."
    turns = (ranks > cores, WARNING, "ranks take turns", at_most)
    if omp_num_threads is None:
        unset = "OMP_NUM_THREADS is not set"
        if ranks > 1 and (shared or cores == 1):
            each = f": each computes with {format_count(max(1, cores // ranks), 'thread')}" if cores > 1 else ""
            return judge("threads", f"{unset}, and {several}{each}", turns)
        if ranks > 1:
            fact = f"{unset} and {several}: each starts {cores} threads, which slow each other down"
            return Finding("threads", WARNING, fact, advice)
        hint = "" if local_ranks else "With R ranks on this machine, set it to the number of cores divided by R."
        return Finding("threads", OK, f"{unset}: a single rank uses {format_count(cores, 'core')}", hint)
    first = omp_num_threads.split(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        fact = f"OMP_NUM_THREADS={omp_num_threads} is not a number of threads and has no effect"
        return Finding("threads", WARNING, fact, advice)
    busy = int(first) * ranks
    idle = f"{cores - busy} of them idle (torchrun sets 1 by default)"
    return judge(
        "threads",
        f"OMP_NUM_THREADS={int(first)}, and {several}",
        turns,
        (busy > cores, WARNING, "more threads than cores", advice),
        (bool(local_ranks) and 2 * busy < cores, WARNING, idle, f"{advice} before the launcher"),
    )


def check_kernels(status: dispatch.BackendStatus, compiler: str | None) -> Finding:
    """Check the backend that quantizes tensors on one kind of device. compiler: path of a C++ compiler."""
    check = f"kernels on {status.device}"
    if status.backend != "torch":
        return Finding(check, OK, f"{status.backend} ({status.reason})")
    if status.device != "cpu":
        missing = "not installed" in status.reason
        advice = "pip install triton" if missing else f"Triton needs {_FOR_TRITON}"
    elif compiler is None:
        advice = f"Install a C++ compiler: {_COMPILERS}; then run {_build_command()}"
    else:
        advice = f"A compiler is here ({compiler}): run {_build_command()}"
    return Finding(check, WARNING, f"plain torch operations, dozens of times slower: {status.reason}", advice)


def check_gpus(
    gpus: Sequence[GpuStatus], built_for: str | None, local_ranks: int | None, driver: bool
) -> list[Finding]:
    """Check the GPUs.

    Args:
        gpus: Those that torch sees.
        built_for: CUDA or ROCm version of this torch, None for its CPU build.
        local_ranks: Ranks on this machine that would compute on GPUs; None if unknown.
        driver: True if NVIDIA's driver is loaded.
    """
    used = 1 if local_ranks is None else local_ranks
    if not gpus and not driver:
        return [Finding("GPU", OK, "none: everything runs on the CPU")]
    if not gpus and built_for is None:
        advice = "Install the CUDA build of torch: see PyTorch's installation page."
        return [Finding("GPU", WARNING, "there is an NVIDIA GPU, but the installed torch is the CPU build", advice)]
    if not gpus:
        advice = "Check nvidia-smi and CUDA_VISIBLE_DEVICES; update the driver, or install torch for an older CUDA."
        fact = f"there is an NVIDIA GPU, but torch (for CUDA {built_for}) cannot use it"
        return [Finding("GPU", WARNING, fact, advice)]
    advice = "nvidia-smi lists the processes on it; CUDA_VISIBLE_DEVICES selects another GPU."
    unusable = f"{advice} One too old for this torch needs torch for an older CUDA. DS_ACCELERATOR=cpu avoids GPUs."
    findings = []
    for gpu in gpus:
        broken = PROBLEM if gpu.number < used else WARNING
        fact = (
            f"{gpu.name}, {format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} free, "
            f"compute capability {gpu.capability[0]}.{gpu.capability[1]}, torch for {built_for}"
        )
        faults = (
            (bool(gpu.error), broken, f"torch cannot compute on it: {gpu.error}", unusable),
            (gpu.free_bytes < gpu.total_bytes / 2, WARNING, "another process uses it", advice),
        )
        findings.append(judge(f"GPU {gpu.number}", fact, *faults))
    if local_ranks and local_ranks > len(gpus):
        findings.append(_shared_gpu(f"{local_ranks} ranks for {len(gpus)} GPUs on this machine"))
    return findings


def _shared_gpu(fact: str) -> Finding:
    advice = "Start at most one rank per GPU, or accept that all data travels over gloo, through host memory."
    return Finding(GPU_SHARING, WARNING, f"{fact}: they share its memory and time, and NCCL refuses to run", advice)


def check_shared_gpus(users: Iterable[tuple[int, str]]) -> list[Finding]:
    """Check that no two ranks use one GPU. users: (rank, the GPU's unique name) of every rank that has one."""
    by_gpu: dict[str, list[int]] = {}
    for rank, gpu in users:
        by_gpu.setdefault(gpu, []).append(rank)
    return [
        _shared_gpu(f"ranks {', '.join(map(str, ranks))} use the same GPU")
        for ranks in by_gpu.values()
        if len(ranks) > 1
    ]


def list_gpus() -> list[GpuStatus]:
    """List the GPUs that torch sees, and try each; full and unsupported ones are listed, too."""
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        free, error = 0, ""
        try:
            free = torch.cuda.mem_get_info(index)[0]
            torch.ones(1, device=f"cuda:{index}").add(1).item()
        except RuntimeError as failed:
            error = str(failed).strip().partition("\n")[0]
        capability = (properties.major, properties.minor)
        gpus.append(GpuStatus(index, properties.name, properties.total_memory, free, capability, error))
    return gpus


def has_driver() -> bool:
    """Return whether NVIDIA's driver is loaded with a GPU."""
    gpus = Path("/proc/driver/nvidia/gpus")
    return gpus.is_dir() and any(gpus.iterdir())


# -- network interfaces

_GLOO = "gloo interface"
_ENCAPSULATION = 60  # bytes that WireGuard adds to a packet over IPv4; 80 over IPv6, other tunnels similar
_ARPHRD_NONE = 65534  # type of WireGuard's and tun interfaces


def network_findings(launch: Launch) -> list[Finding]:
    """Check interfaces, the one that gloo uses, tunnels and MASTER_ADDR."""
    interfaces = list_interfaces()
    findings = [check_interfaces(interfaces, launch)]
    tls = wanted_keys() is not None
    if not tls:  # over TLS, gloo opens no connections
        towards = interface_towards_master(launch)
        findings.append(check_gloo(interfaces, interface_of_user(), towards, default_choice(), launch))
    findings += check_tunnels(interfaces, list_tunnels(interfaces), interface_outwards())
    if launch.started and launch.master is not None and not (tls and os.environ.get(ADDRESS)):
        findings.append(check_master(launch.master, resolve(launch.master), launch))
    return findings


def check_interfaces(interfaces: Mapping[str, Interface], launch: Launch) -> Finding:
    """Check whether any interface leads to other machines."""
    shown = []
    for interface in interfaces.values():
        if interface.up and interface.addresses:
            speed = f", {interface.speed_mbit} Mbit/s" if interface.speed_mbit else ""
            shown.append(f"{interface.name} {interface.addresses[0]} (MTU {interface.mtu}{speed})")
    fact = ", ".join(shown) or "none is up"
    if any(interface.usable for interface in interfaces.values()):
        return Finding("interfaces", OK, fact)
    if launch.several_machines is not False and launch.started:
        advice = "Bring a network interface up; give a container a network (docker run --network=host)."
        return Finding("interfaces", WARNING, f"{fact}: no way to another machine", advice)
    return Finding("interfaces", OK, f"{fact}: enough for ranks on this machine, no way to another")


def check_gloo(
    interfaces: Mapping[str, Interface],
    variable: str | None,
    towards: str | None,
    choice: GlooDefault,
    launch: Launch,
) -> Finding:
    """Check whether gloo's interface leads to other machines.

    Args:
        interfaces: All interfaces by name.
        variable: Value of GLOO_SOCKET_IFNAME, None unless the user has set it.
        towards: Name of the interface that leads to rank 0, which a run uses without the variable; None if none does.
        choice: Host name and address that gloo takes without either.
        launch: The launcher's ranks.
    """
    usable = next((i.name for i in interfaces.values() if i.usable), None)
    export = f"export {GLOO_VARIABLE}={usable or 'NAME'}"
    if variable:
        names = variable.split(",")
        for name in names:
            interface = interfaces.get(name)
            if interface is None or not interface.addresses or not interface.up:
                what = "there is no such interface" if interface is None else "it is down or has no address"
                fact = f"{GLOO_VARIABLE}={variable}, but {name}: {what}. Every run will fail"
                return Finding(_GLOO, PROBLEM, fact, export)
        addresses = [interfaces[name].addresses[0] for name in names]
        pairs = ", ".join(f"{name} ({address})" for name, address in zip(names, addresses, strict=True))
        fact = f"uses {pairs}, set by {GLOO_VARIABLE}"
    elif launch.master is None:
        return Finding(_GLOO, OK, "a run uses the interface that leads to rank 0's machine (MASTER_ADDR)")
    elif towards is not None:
        addresses = list(interfaces[towards].addresses[:1])
        fact = f"uses {towards} ({addresses[0]}), which leads to rank 0 at {launch.master}"
    elif choice.address is None:
        addresses = ["127.0.0.1"]
        fact = f"uses the loopback interface: the host name {choice.hostname} has no address of this machine"
    else:
        addresses = [choice.address]
        holder = next((i.name for i in interfaces.values() if choice.address in i.addresses), None)
        name = holder or ("the loopback interface" if is_loopback(choice.address) else "an unknown interface")
        fact = f"uses {name}: the host name {choice.hostname} is {choice.address}"
    if not all(is_loopback(address) for address in addresses):
        return Finding(_GLOO, OK, fact)
    if not variable and towards is None and choice.address is not None:
        export += f" (or give {choice.hostname} its own address in /etc/hosts, where it is {choice.address})"
    if launch.several_machines:
        if towards is not None and not variable:
            export = f"Give all ranks an address of rank 0's machine as MASTER_ADDR, or {export}"
        advice = f"{export}, on every machine with the name of the interface that leads to the others"
        cost = "Other machines cannot be reached there: a run with several fails at the start"
        return Finding(_GLOO, WARNING, f"{fact}. {cost}", advice)
    advice = f"With several machines: {export}, with the name of the interface that leads to the others"
    one_machine = launch.several_machines is False
    return Finding(_GLOO, OK, f"{fact}. Enough for ranks on this machine", "" if one_machine else advice)


def check_master(master: str, address: str | None, launch: Launch) -> Finding:
    """Check MASTER_ADDR. address: the one that it resolves to here, if any."""
    if address is None:
        advice = "Set MASTER_ADDR to an IP address of rank 0's machine, or add the name to /etc/hosts."
        fact = f"MASTER_ADDR={master} does not resolve here: ranks cannot connect"
        return Finding("rank 0's address", PROBLEM, fact, advice)
    fact = f"MASTER_ADDR={master}" + ("" if address == master else f" is {address}")
    advice = "Set MASTER_ADDR to an address of rank 0's machine that the others can reach."
    # Note: on rank 0's own machine its name may be 127.0.1.1, as on Debian; others need not resolve it so.
    own_name = launch.rank == launch.local_rank and not is_loopback(master)
    unreachable = is_loopback(address) and bool(launch.several_machines) and not own_name
    return judge("rank 0's address", fact, (unreachable, WARNING, "other machines cannot reach that", advice))


def check_tunnels(interfaces: Mapping[str, Interface], tunnels: Sequence[str], outer: str | None) -> list[Finding]:
    """Check whether a tunnel's largest packets, encapsulated, fit the interface that they leave by.

    Args:
        interfaces: All interfaces by name.
        tunnels: Names of tunnels.
        outer: Name of the interface that leads to the internet, if any.
    """
    below = interfaces.get(outer or "")
    if below is None or outer in tunnels:
        return []
    consequence = "every full packet leaves in two pieces, and where a router drops pieces, large packets are lost"
    findings = []
    for name in tunnels:
        mtu, room = interfaces[name].mtu, below.mtu - _ENCAPSULATION
        advice = f"ip link set dev {name} mtu {room - 20} (or MTU = {room - 20} in its configuration), on both machines"
        fact = f"MTU {mtu} inside, {below.mtu} on {below.name} around it, {_ENCAPSULATION} bytes or more between"
        findings.append(judge(f"tunnel {name}", fact, (mtu > room, WARNING, consequence, advice)))
    return findings


def list_tunnels(interfaces: Mapping[str, Interface]) -> list[str]:
    """List the tunnels that are up, such as WireGuard's, Tailscale's and OpenVPN's; Linux only."""
    kinds = {i.name: Path("/sys/class/net", i.name, "type") for i in interfaces.values() if i.usable}
    return [name for name, kind in kinds.items() if kind.is_file() and int(kind.read_text()) == _ARPHRD_NONE]


def resolve(name: str) -> str | None:
    """Return an IP address of a host name, None if it has none."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


# -- limits of the system

_SHM = Path("/dev/shm")
_OPEN_FILES = 1024  # a rank opens some 200 files and libraries, and a socket per other rank and group
_ADDRESS_SPACE = 64 << 30  # torch maps several GiB, CUDA reserves tens, a message store doubles its map
_MIN_ADDRESS_SPACE = 8 << 30
_SHM_BYTES = 512 << 20
_PREFETCHED = 2  # batches of a worker, DataLoader's default


class LoaderSize(NamedTuple):
    """Worker processes of a rank's DataLoader, and the tokens of one of its micro-batches."""

    workers: int
    tokens: int

    def shared_bytes(self, ranks: int) -> int:
        """Return the shared memory of a machine's ranks: input_ids, attention_mask and labels, int64, prefetched."""
        return ranks * self.workers * _PREFETCHED * self.tokens * 3 * 8


def limit_findings(loader_bytes: int = 0) -> list[Finding]:
    """Check limits of open files, memory and shared memory. loader_bytes: that data workers need of the last."""

    def soft(number: int) -> int | None:
        limit = resource.getrlimit(number)[0]
        return None if limit == resource.RLIM_INFINITY else limit

    return [
        check_open_files(soft(resource.RLIMIT_NOFILE)),
        check_address_space(soft(resource.RLIMIT_AS)),
        check_shared_memory(shutil.disk_usage(_SHM).free if _SHM.is_dir() else None, loader_bytes),
    ]


def check_open_files(limit: int | None) -> Finding:
    """Check the limit of open files per process; None for no limit."""
    few = limit is not None and limit < _OPEN_FILES
    advice = f"ulimit -n {4 * _OPEN_FILES}, before starting the launcher"
    fact = f"{'no limit' if limit is None else limit} per process"
    return judge("open files", fact, (few, WARNING, "too few for the sockets of many ranks and data workers", advice))


def check_address_space(limit_bytes: int | None) -> Finding:
    """Check the limit of a process's address space; None for no limit."""
    limit = math.inf if limit_bytes is None else limit_bytes
    fault = ("torch and the message store map files, which may fail", "ulimit -v unlimited")
    return judge(
        "address space",
        f"{'no limit' if limit_bytes is None else format_bytes(limit_bytes)} per process",
        (limit < _MIN_ADDRESS_SPACE, PROBLEM, *fault),
        (limit < _ADDRESS_SPACE, WARNING, *fault),
    )


def check_shared_memory(free_bytes: int | None, loader_bytes: int = 0) -> Finding:
    """Check the free space in /dev/shm.

    Args:
        free_bytes: None if there is none.
        loader_bytes: That the workers of the data loaders need; 0 if unknown.
    """
    if free_bytes is None:
        linux = sys.platform == "linux"
        consequence = ": the demo's ranks cannot start without it, nor data workers share memory" if linux else ""
        verdict = WARNING if linux else OK
        return Finding("shared memory", verdict, f"no /dev/shm here{consequence}", MOUNT_SHM if linux else "")
    consequence = "data workers and NCCL use it, and crash when it is full"
    advice = "In a container: --shm-size=2g or --ipc=host; elsewhere remove old files there."
    small = free_bytes < _SHM_BYTES
    fact = f"{format_bytes(free_bytes)} free in /dev/shm"
    if loader_bytes:
        fact += f", {format_bytes(loader_bytes)} needed for the batches of the data workers"
        few = "Use fewer workers or a smaller prefetch_factor, or enlarge it: in a container --shm-size or --ipc=host."
        too_much = (loader_bytes > free_bytes, PROBLEM, "workers are killed, or wait for ever for room", few)
        return judge("shared memory", fact, too_much)
    return judge("shared memory", fact, (small, WARNING, consequence, advice))
