"""Choice of an operation's backend: "torch" anywhere, "native" on CPU tensors, "triton" on GPU tensors.

A backend is an object whose attributes are operations, each with the name and signature of its reference function. The
reference itself runs where a backend has no implementation of its own.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from pipecomp.errors import ConfigError, KernelError, ShapeError
from pipecomp.kernels.native import library
from pipecomp.kernels.native.backend import NativeBackend
from pipecomp.kernels.reference import layout, rows
from pipecomp.kernels.reference.layout import QuantizerOptions

BACKENDS = ("auto", "torch", "native", "triton")
Backend = Any
TORCH: Backend = SimpleNamespace()  # empty: the reference runs
Operation = TypeVar("Operation", bound=Callable[..., Any])


class BackendStatus(NamedTuple):
    """The backend that "auto" runs on one kind of device, and the reason as a sentence."""

    device: str  # "cpu" or "cuda"
    backend: str
    reason: str


class SlowKernelsWarning(RuntimeWarning):
    """The torch backend runs because the faster kernels are missing."""


_preferred: dict[str, Backend] = {}  # by device: the backend of "auto" in this process


def implementation(operation: Operation, backend: str, first: Tensor, *others: Tensor | None) -> Operation:
    """Choose the implementation of an operation for these tensors.

    Args:
        operation: The reference function.
        backend: "auto", "torch", "native" or "triton".
        first: A tensor argument of the operation.
        others: Further tensors, on the same device.

    Returns:
        The backend's function of the same name and signature.

    Raises:
        ConfigError, ShapeError, KernelError: As `pick`.
    """
    chosen: Operation = getattr(pick(backend, first, *others), operation.__name__, operation)
    return chosen


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


def prefer(backend: str, device: str) -> None:
    """Make "auto" choose `backend` for tensors on `device` ("cpu" or "cuda") in this process; "auto" restores it.

    Raises ConfigError for an unknown name or a backend that cannot run here.
    """
    if backend not in BACKENDS:
        raise ConfigError("kernels", backend, ", ".join(BACKENDS))
    if backend == "auto":
        _preferred.pop(device, None)
        return
    loaded = load(backend, device)
    if isinstance(loaded, str):
        raise ConfigError("kernels", backend, "'auto', or a backend that runs here", hint=loaded)
    _preferred[device] = loaded


def load(backend: str, device: str) -> Backend | str:
    """Load a named backend other than "auto"; a sentence with the reason if it cannot run on this device."""
    if backend == "torch":
        return TORCH
    if backend == "triton":
        return load_triton(device)
    return load_native() if device == "cpu" else f"takes CPU tensors, got one on {device}"


@cache
def load_native() -> NativeBackend | str:
    """Load the native backend on this CPU's best instruction set; a sentence with the reason if that fails."""
    path = library.library_path()
    if path is None:
        return "native kernels are not built (no C++ compiler at install time, or one that is too old?)"
    try:
        backend = NativeBackend(path)
        self_check(backend, f"native kernels ({backend.isa} code)")
    except KernelError as error:
        return str(error)
    return backend


@cache
def load_triton(device: str) -> Backend | str:
    """Load the Triton backend; a sentence with the reason if it cannot run on this device."""
    try:
        import triton
    except ImportError:
        return "triton is not installed"
    if device != "cuda" and not triton.knobs.runtime.interpret:
        return f"takes GPU tensors, got one on {device}"
    # Note: Triton compiles its driver and each kernel at the first launch, and needs a C compiler for it. Where that is
    # missing the self-check fails here, not in the middle of training.
    try:
        from pipecomp.kernels.triton import BACKEND

        self_check(BACKEND, "triton kernels", device)
    except KernelError as error:
        return str(error)
    except Exception as error:  # of Triton, its compilers or the device
        first = next(iter(str(error).strip().splitlines()), "")
        return f"triton kernels do not run here: {type(error).__name__}: {first}"
    return BACKEND


def self_check(backend: Backend, name: str = "kernels", device: str = "cpu") -> None:
    """Compare a backend's quantizer with the reference on a small sample.

    Catches failures that no build flag rules out, such as a compiler that contracts multiply and add.

    Args:
        backend: The backend to run.
        name: Name of the kernels in the error.
        device: Device of the sample.

    Raises:
        KernelError: The bytes differ from the reference's; also any error of the kernels themselves.
    """
    values = torch.linspace(-3, 3, 210, dtype=torch.float32).sin().reshape(3, 70) ** 3
    for rounding in layout.ROUNDINGS:
        options = QuantizerOptions(bits=3, group_size=None, rounding=rounding, seed=7)
        m, m_reference = (values * 0.3).to(device), values * 0.3
        got = backend.delta_quantize_(values.to(device), m, options)
        want = rows.delta_quantize_(values, m_reference, options)
        if not all(torch.equal(a.cpu(), b) for a, b in zip((*got, m), (*want, m_reference), strict=True)):
            raise KernelError(f"{name} give other bytes than the reference")


@cache
def automatic(device: str) -> Backend:
    """Choose the backend of "auto" on a device; warn once if only torch remains."""
    loaded = load("triton" if device == "cuda" else "native", device)
    if not isinstance(loaded, str):
        return loaded
    warnings.warn(
        f"pipecomp quantizes with plain torch operations on {device}, tens of times slower than its own kernels: "
        f"{loaded}. Run `pipecomp doctor` for advice.",
        SlowKernelsWarning,
        stacklevel=_caller_stacklevel(),
    )
    return TORCH


def _caller_stacklevel() -> int:
    """Find the `stacklevel` with which a warning of the caller names the first line outside kernels and torch."""
    level, frame = 1, inspect.currentframe()
    frame = frame.f_back if frame else None
    while frame and frame.f_globals.get("__name__", "").startswith(("pipecomp.kernels", "torch.")):
        level, frame = level + 1, frame.f_back
    return level


def status() -> list[BackendStatus]:
    """List the backends of "auto" for each kind of device of this machine, with reasons."""
    loaded = load_native()
    on_cpu = (
        ("torch", loaded)
        if isinstance(loaded, str)
        else ("native", f"{loaded.isa} code, {loaded.threads} thread{'s' * (loaded.threads > 1)}")
    )
    lines = [BackendStatus("cpu", *on_cpu)]
    if torch.cuda.is_available():
        on_gpu = load_triton("cuda")
        lines.append(
            BackendStatus("cuda", *(("torch", on_gpu) if isinstance(on_gpu, str) else ("triton", "GPU tensors")))
        )
    return lines
