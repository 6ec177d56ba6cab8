"""Which backend runs an operation, and why.

What a backend is: `pipecomp.kernels.backend`.
"""

from __future__ import annotations

import inspect
import warnings
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from pipecomp.errors import ConfigError, KernelError, ShapeError
from pipecomp.kernels import native, torch_backend
from pipecomp.kernels.backend import Backend
from pipecomp.kernels.self_check import self_check

BACKENDS = ("auto", "torch", "native", "triton")


class Status(NamedTuple):
    """What backend="auto" runs on one kind of device, for people."""

    device: str  # "cpu" or "cuda"
    backend: str
    reason: str


class SlowKernelsWarning(RuntimeWarning):
    """The torch path runs because faster kernels are not there."""


_preferred: dict[str, Backend] = {}  # by device: what "auto" runs in this process, where something else was asked for


def prefer(backend: str, device: str) -> None:
    """From now on "auto" means `backend` for tensors on `device` ("cpu" or "cuda"), in this process.

    ConfigError for an unknown name or one that cannot run here; "auto" takes a preference back.
    """
    if backend not in BACKENDS:
        raise ConfigError("kernels", backend, ", ".join(BACKENDS))
    if backend == "auto":
        _preferred.pop(device, None)
        return
    loaded = load(backend, device)
    if isinstance(loaded, str):
        raise ConfigError("kernels", backend, f"'auto', or what runs here: {loaded}")
    _preferred[device] = loaded


def pick(backend: str, first: Tensor, *others: Tensor | None) -> Backend:
    """Choose the backend for these tensors, which must share a device.

    ConfigError for an unknown name, ShapeError for mixed devices, KernelError for a backend that cannot run here.
    """
    if backend not in BACKENDS:
        raise ConfigError("backend", backend, ", ".join(BACKENDS))
    device = first.device
    for tensor in others:
        if tensor is not None and tensor.device != device:
            raise ShapeError(f"tensors on {device} and {tensor.device}, allowed: one device")
    if backend == "auto":
        return _preferred.get(device.type) or automatic(device.type)
    loaded = load(backend, device.type)
    if isinstance(loaded, str):
        raise KernelError(f"backend {backend!r}: {loaded}")
    return loaded


def load(backend: str, device: str) -> Backend | str:
    """Load the backend of that name, which is not "auto"; a sentence saying why where it cannot run on this device."""
    if backend == "torch":
        return torch_backend
    if backend == "triton":
        return load_triton(device)
    return native.load() if device == "cpu" else f"takes CPU tensors, got one on {device}"


@cache
def load_triton(device: str) -> Backend | str:
    """Load the Triton backend; a sentence saying why where it cannot run on this device."""
    try:
        import triton
    except ImportError:
        return "triton is not installed"
    if device != "cuda" and not triton.knobs.runtime.interpret:
        return f"takes GPU tensors, got one on {device}"
    try:  # Triton compiles its driver and each kernel when they are first used, and needs a C compiler for it
        from pipecomp.kernels import triton_backend

        self_check(triton_backend, "triton kernels", device)
    except KernelError as error:
        return str(error)
    except Exception as error:  # of Triton, its compilers or the device
        first = next(iter(str(error).strip().splitlines()), "")
        return f"triton kernels do not run here: {type(error).__name__}: {first}"
    return triton_backend


@cache
def automatic(device: str) -> Backend:
    """Choose what "auto" means on a device; warn once where that is the torch path."""
    loaded = load("triton" if device == "cuda" else "native", device)
    if not isinstance(loaded, str):
        return loaded
    warnings.warn(
        f"pipecomp quantizes with plain torch operations on {device}, tens of times slower than its own kernels: "
        f"{loaded}. `pipecomp doctor` says more.",
        SlowKernelsWarning,
        stacklevel=frames_to_caller(),
    )
    return torch_backend


def frames_to_caller() -> int:
    """Find the `stacklevel` with which a warning of the caller names the first line outside kernels and torch."""
    level, frame = 1, inspect.currentframe()
    frame = frame.f_back if frame else None
    while frame and frame.f_globals.get("__name__", "").startswith(("pipecomp.kernels", "torch.")):
        level, frame = level + 1, frame.f_back
    return level


def status() -> list[Status]:
    """Say what "auto" runs on each kind of device of this machine, and why."""
    loaded = native.load()
    on_cpu = (
        ("torch", loaded)
        if isinstance(loaded, str)
        else ("native", f"{loaded.isa} code, {loaded.threads} thread{'s' * (loaded.threads > 1)}")
    )
    lines = [Status("cpu", *on_cpu)]
    if torch.cuda.is_available():
        on_gpu = load_triton("cuda")
        lines.append(Status("cuda", *(("torch", on_gpu) if isinstance(on_gpu, str) else ("triton", "GPU tensors"))))
    return lines
