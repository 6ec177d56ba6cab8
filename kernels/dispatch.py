"""Which backend runs an operation, and why.

A backend is a module with the functions of `reference`, `bitpack` and `topk` that `ops` calls.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from pipecomp.errors import ConfigError, KernelError, ShapeError
from pipecomp.kernels import torch_backend

BACKENDS = ("auto", "torch", "native", "triton")


def pick(backend: str, *tensors: Tensor) -> Any:
    """The backend module for these tensors, which must share a device.

    ConfigError for an unknown name, ShapeError for mixed devices, KernelError for a backend that cannot run here.
    """
    if backend not in BACKENDS:
        raise ConfigError("backend", backend, ", ".join(BACKENDS))
    device = tensors[0].device
    for tensor in tensors[1:]:
        if tensor.device != device:
            raise ShapeError(f"tensors on {device} and {tensor.device}, allowed: one device")
    if backend in ("native", "triton"):
        raise KernelError(f"backend {backend!r}: not in this build, allowed: torch")
    module: ModuleType = torch_backend
    return module
