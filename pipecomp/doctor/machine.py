"""What computes: cores, instruction set, threads of each rank, quantization kernels, GPUs."""

from __future__ import annotations

import math
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from pipecomp.distributed.launch_env import Launch
from pipecomp.distributed.placement import GLOO_VARIABLE as VARIABLE
from pipecomp.distributed.placement import (
    Choice,
    Interface,
    default_choice,
    interface_towards,
    is_loopback,
    list_interfaces,
    usable_cores,
)
from pipecomp.distributed.rendezvous import ADDRESS, computes_on_cpu, wanted_keys
from pipecomp.doctor.finding import OK, PROBLEM, WARNING, Finding, judge, mib
from pipecomp.kernels import dispatch
from pipecomp.kernels.build import find_compiler
from pipecomp.utils.units import format_count

GPU_SHARING = "GPU sharing"
_BUILD = "python -m pipecomp.kernels.build"
_COMPILERS = "apt install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora) or xcode-select --install (macOS)"
_FOR_TRITON = "a C compiler and Python's headers: apt install gcc python3-dev, or dnf install gcc python3-devel"


class GpuStatus(NamedTuple):
    """One GPU that torch sees; sizes in bytes. error: why it computes nothing, empty where it does."""

    number: int
    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]
    error: str = ""


def compute_findings(launch: Launch) -> list[Finding]:
    """Make all checks of this module on this machine."""
    cores, threads = usable_cores(), os.environ.get("OMP_NUM_THREADS")
    status, built_for = dispatch.status(), torch.version.cuda or torch.version.hip
    ranks = 0 if os.environ.get("DS_ACCELERATOR") == "cpu" else launch.local_world
    return [
        check_cpu(cores, torch.backends.cpu.get_cpu_capability(), platform.machine()),
        check_threads(cores, launch.local_world, threads, shared=computes_on_cpu()),
        *(check_kernels(line, find_compiler()) for line in status),
        *check_gpus(list_gpus(), built_for, ranks, has_driver()),
    ]


def check_cpu(cores: int, capability: str, machine: str) -> Finding:
    """Check the instruction set.

    capability: torch's word for the instructions that it uses, "DEFAULT" for the architecture's oldest.
    """
    advice = "Unset ATEN_CPU_CAPABILITY if it is set; in a virtual machine pass the host's CPU through."
    old = capability == "DEFAULT"
    return judge(
        "processor",
        f"{format_count(cores, 'core')} of {machine}, {'no vector extensions' if old else capability}",
        (old and machine in ("x86_64", "AMD64"), WARNING, "without AVX2 a model computes several times slower", advice),
    )


def check_threads(cores: int, local_ranks: int | None, omp_num_threads: str | None, *, shared: bool) -> Finding:
    """Check the threads of each rank.

    local_ranks: how many ranks share this machine, None where no launcher said. shared: whether a run shares out the
    cores itself where OMP_NUM_THREADS is not set, as one does that computes on them.
    """
    ranks = local_ranks or 1
    advice = f"export OMP_NUM_THREADS={max(1, cores // ranks)}"
    several = f"{format_count(ranks, 'rank')} {'share' if ranks > 1 else 'has'} {format_count(cores, 'core')}"
    turns = (
        ranks > cores,
        WARNING,
        "ranks take turns",
        f"Start at most {format_count(cores, 'rank')} on this machine.",
    )
    if omp_num_threads is None:
        if ranks > 1 and cores == 1:
            return judge("threads", f"OMP_NUM_THREADS is not set, and {several}", turns)
        if ranks > 1 and shared:
            each = format_count(max(1, cores // ranks), "thread")
            return judge("threads", f"OMP_NUM_THREADS is not set, and {several}: each computes with {each}", turns)
        if ranks > 1:
            found = f"OMP_NUM_THREADS is not set and {several}: each starts {cores} threads, which slow each other down"
            return Finding("threads", WARNING, found, advice)
        hint = "" if local_ranks else "With R ranks on this machine, set it to the number of cores divided by R."
        return Finding(
            "threads", OK, f"OMP_NUM_THREADS is not set: a rank alone here uses {format_count(cores, 'core')}", hint
        )
    first = omp_num_threads.split(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        found = f"OMP_NUM_THREADS={omp_num_threads} is not a number of threads and has no effect"
        return Finding("threads", WARNING, found, advice)
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
    """Check which backend quantizes tensors of one kind of device. compiler: path of a C++ compiler, if any."""
    check = f"kernels on {status.device}"
    if status.backend != "torch":
        return Finding(check, OK, f"{status.backend} ({status.reason})")
    found = f"plain torch operations, dozens of times slower: {status.reason}"
    if status.device != "cpu":
        missing = "not installed" in status.reason
        return Finding(check, WARNING, found, "pip install triton" if missing else f"Triton needs {_FOR_TRITON}")
    if compiler is None:
        return Finding(check, WARNING, found, f"Install a C++ compiler: {_COMPILERS}; then run {_BUILD}")
    return Finding(check, WARNING, found, f"A compiler is here ({compiler}): run {_BUILD}")


def check_gpus(
    gpus: Sequence[GpuStatus], built_for: str | None, local_ranks: int | None, driver: bool
) -> list[Finding]:
    """Check the GPUs that torch sees.

    built_for: the CUDA or ROCm version of this torch, None for its CPU build. local_ranks: of this machine that would
    compute on them, None where no launcher said. driver: whether NVIDIA's is loaded.
    """
    used = 1 if local_ranks is None else local_ranks
    if not gpus and not driver:
        return [Finding("GPU", OK, "none: everything runs on the CPU")]
    if not gpus:
        found, advice = (
            f"torch (for CUDA {built_for}) cannot use it",
            "Check nvidia-smi and CUDA_VISIBLE_DEVICES; update the driver, or install torch for an older CUDA.",
        )
        if built_for is None:
            found, advice = (
                "the installed torch is the CPU build",
                "Install the CUDA build of torch: see PyTorch's installation page.",
            )
        return [Finding("GPU", WARNING, f"there is an NVIDIA GPU, but {found}", advice)]
    advice = "nvidia-smi shows what uses it; CUDA_VISIBLE_DEVICES selects another GPU."
    unusable = f"{advice} One too old for this torch needs torch for an older CUDA. DS_ACCELERATOR=cpu does without."
    findings = [
        judge(
            f"GPU {gpu.number}",
            f"{gpu.name}, {mib(gpu.free_bytes)} of {mib(gpu.total_bytes)} free, "
            f"compute capability {gpu.capability[0]}.{gpu.capability[1]}, torch for {built_for}",
            (
                bool(gpu.error),
                PROBLEM if gpu.number < used else WARNING,
                f"torch cannot compute on it: {gpu.error}",
                unusable,
            ),
            (gpu.free_bytes < gpu.total_bytes / 2, WARNING, "something else uses it", advice),
        )
        for gpu in gpus
    ]
    if local_ranks and local_ranks > len(gpus):
        findings.append(shared_gpu(f"{local_ranks} ranks for {len(gpus)} GPUs on this machine"))
    return findings


def shared_gpu(found: str) -> Finding:
    """Make the finding for two ranks on one GPU."""
    advice = "Start at most one rank per GPU, or accept that all data travels over gloo, through host memory."
    return Finding(GPU_SHARING, WARNING, f"{found}: they share its memory and time, and NCCL refuses to run", advice)


def check_shared_gpus(users: Iterable[tuple[int, str]]) -> list[Finding]:
    """Check that no two ranks have one GPU. users: (rank, the GPU's unique name) of every rank that has one."""
    by_gpu: dict[str, list[int]] = {}
    for rank, gpu in users:
        by_gpu.setdefault(gpu, []).append(rank)
    return [
        shared_gpu(f"ranks {', '.join(map(str, ranks))} use the same GPU")
        for ranks in by_gpu.values()
        if len(ranks) > 1
    ]


def list_gpus() -> list[GpuStatus]:
    """List the GPUs that torch sees, and try each: one that is full, taken or too old is seen, too."""
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        free, error = 0, ""
        try:
            free = torch.cuda.mem_get_info(index)[0]
            torch.ones(1, device=f"cuda:{index}").add(1).item()
        except RuntimeError as failed:
            error = str(failed).strip().partition("\n")[0]
        capability = (properties.major, properties.minor)
        found.append(GpuStatus(index, properties.name, properties.total_memory, free, capability, error))
    return found


def has_driver() -> bool:
    """Say whether an NVIDIA driver is loaded with a GPU."""
    gpus = Path("/proc/driver/nvidia/gpus")
    return gpus.is_dir() and any(gpus.iterdir())


# -- Network interfaces, the one that gloo takes, and the address where ranks meet."""

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


# -- Limits of the system: open files, locked memory, address space, shared memory."""

MOUNT_SHM = "mkdir -p /dev/shm && mount -t tmpfs tmpfs /dev/shm; in a container: --shm-size=2g"
_SHM = Path("/dev/shm")
# A rank opens some 200 files and libraries, and a socket to each other rank for each group of ranks.
_OPEN_FILES = 1024
_ADDRESS_SPACE = 64 << 30  # torch alone maps several GiB, CUDA reserves tens, a message store doubles its map
_ADDRESS_SPACE_LEAST = 8 << 30
_LOCKED = 64 << 20
_SHM_BYTES = 512 << 20


def limit_findings(*, gpu: bool) -> list[Finding]:
    """Make all checks of this module on this machine."""
    return [
        check_open_files(_soft(resource.RLIMIT_NOFILE)),
        check_address_space(_soft(resource.RLIMIT_AS)),
        check_locked_memory(_soft(resource.RLIMIT_MEMLOCK), gpu=gpu),
        check_shared_memory(shutil.disk_usage(_SHM).free if _SHM.is_dir() else None),
    ]


def check_open_files(limit: int | None) -> Finding:
    """Check how many files a process may open. limit: None for any number."""
    few = limit is not None and limit < _OPEN_FILES
    meaning = "too few for the sockets of many ranks and for data workers"
    advice = f"ulimit -n {4 * _OPEN_FILES}, before starting the launcher"
    found = f"{'no limit' if limit is None else limit} per process"
    return judge("open files", found, (few, WARNING, meaning, advice))


def check_address_space(limit_bytes: int | None) -> Finding:
    """Check how much a process may map. limit_bytes: None for any amount."""
    limit = math.inf if limit_bytes is None else limit_bytes
    fault = ("torch and the message store map files, which may fail", "ulimit -v unlimited")
    return judge(
        "address space",
        f"{_size(limit_bytes)} per process",
        (limit < _ADDRESS_SPACE_LEAST, PROBLEM, *fault),
        (limit < _ADDRESS_SPACE, WARNING, *fault),
    )


def check_locked_memory(limit_bytes: int | None, *, gpu: bool) -> Finding:
    """Check how much a process may keep from being swapped out; only GPU transfers need it.

    limit_bytes: None for any amount.
    """
    small = gpu and limit_bytes is not None and limit_bytes < _LOCKED
    advice = "ulimit -l unlimited; in a container: --ulimit memlock=-1"
    found = _size(limit_bytes) + ("" if gpu else " (matters only with GPUs)")
    return judge("locked memory", found, (small, WARNING, "NCCL may fail where the network has RDMA", advice))


def check_shared_memory(free_bytes: int | None) -> Finding:
    """Check what is free in /dev/shm. free_bytes: None where there is none."""
    if free_bytes is None and sys.platform == "linux":
        meaning = "the demo's ranks cannot start without it, nor data workers share memory"
        return Finding("shared memory", WARNING, f"no /dev/shm here: {meaning}", MOUNT_SHM)
    if free_bytes is None:
        return Finding("shared memory", OK, "no /dev/shm here")
    meaning = "data workers and NCCL use it, and crash when it is full"
    advice = "In a container: --shm-size=2g or --ipc=host; elsewhere remove old files there."
    small = free_bytes < _SHM_BYTES
    return judge("shared memory", f"{mib(free_bytes)} free in /dev/shm", (small, WARNING, meaning, advice))


def _size(limit_bytes: int | None) -> str:
    return "no limit" if limit_bytes is None else mib(limit_bytes)


def _soft(number: int) -> int | None:
    limit = resource.getrlimit(number)[0]
    return None if limit == resource.RLIM_INFINITY else limit
