"""What computes: cores, instruction set, threads of each rank, quantization kernels, GPUs."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from pipecomp.distributed.launch_env import Launch
from pipecomp.distributed.placement import usable_cores
from pipecomp.distributed.start import computes_on_cpu
from pipecomp.doctor.finding import OK, PROBLEM, WARNING, Finding, judge, mib
from pipecomp.kernels import dispatch
from pipecomp.kernels.build import find_compiler
from pipecomp.utils.tables import counted

GPU_SHARING = "GPU sharing"
_BUILD = "python -m pipecomp.kernels.build"
_COMPILERS = "apt install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora) or xcode-select --install (macOS)"
_FOR_TRITON = "a C compiler and Python's headers: apt install gcc python3-dev, or dnf install gcc python3-devel"


class Gpu(NamedTuple):
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
        f"{counted(cores, 'core')} of {machine}, {'no vector extensions' if old else capability}",
        (old and machine in ("x86_64", "AMD64"), WARNING, "without AVX2 a model computes several times slower", advice),
    )


def check_threads(cores: int, local_ranks: int | None, omp_num_threads: str | None, *, shared: bool) -> Finding:
    """Check the threads of each rank.

    local_ranks: how many ranks share this machine, None where no launcher said. shared: whether a run shares out the
    cores itself where OMP_NUM_THREADS is not set, as one does that computes on them.
    """
    ranks = local_ranks or 1
    advice = f"export OMP_NUM_THREADS={max(1, cores // ranks)}"
    several = f"{counted(ranks, 'rank')} {'share' if ranks > 1 else 'has'} {counted(cores, 'core')}"
    turns = (ranks > cores, WARNING, "ranks take turns", f"Start at most {counted(cores, 'rank')} on this machine.")
    if omp_num_threads is None:
        if ranks > 1 and cores == 1:
            return judge("threads", f"OMP_NUM_THREADS is not set, and {several}", turns)
        if ranks > 1 and shared:
            each = counted(max(1, cores // ranks), "thread")
            return judge("threads", f"OMP_NUM_THREADS is not set, and {several}: each computes with {each}", turns)
        if ranks > 1:
            found = f"OMP_NUM_THREADS is not set and {several}: each starts {cores} threads, which slow each other down"
            return Finding("threads", WARNING, found, advice)
        hint = "" if local_ranks else "With R ranks on this machine, set it to the number of cores divided by R."
        return Finding(
            "threads", OK, f"OMP_NUM_THREADS is not set: a rank alone here uses {counted(cores, 'core')}", hint
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


def check_kernels(status: dispatch.Status, compiler: str | None) -> Finding:
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


def check_gpus(gpus: Sequence[Gpu], built_for: str | None, local_ranks: int | None, driver: bool) -> list[Finding]:
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


def list_gpus() -> list[Gpu]:
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
        found.append(Gpu(index, properties.name, properties.total_memory, free, capability, error))
    return found


def has_driver() -> bool:
    """Say whether an NVIDIA driver is loaded with a GPU."""
    gpus = Path("/proc/driver/nvidia/gpus")
    return gpus.is_dir() and any(gpus.iterdir())
