"""A rank on a GPU's double, tests/pretend_gpu.py: what DeepSpeed, torch and Trainer ask of a driver is answered here.

CudaStaging is the real one, over pinned memory that is told from other memory of the host.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipecomp.kernels import staging as staging_module
from tests.pretend_gpu import DEVICE, Mode, OnGpu, Stream, each_tensor, from_file, have_the_double, loading


def be_on_a_gpu() -> None:
    """From here on this process, a rank of a test, has the double, a GPU that it shares with its machine's others."""
    patched = pytest.MonkeyPatch()  # for as long as the process lives
    patched.delenv("DS_ACCELERATOR", raising=False)
    have_the_double(patched)
    _have_its_driver(patched)
    _pin_memory(patched)
    _load_files(patched)
    _move_modules(patched)
    Mode().__enter__()
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    set_accelerator(CUDA_Accelerator())


def _have_its_driver(patched: pytest.MonkeyPatch) -> None:
    """Replace a driver's answers to torch."""
    properties = SimpleNamespace(
        name="pretended", uuid="GPU-pretended", total_memory=1 << 34, major=8, minor=0, multi_processor_count=1
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_name": properties.name,
        "get_device_capability": (8, 0),
        "is_bf16_supported": True,
        "mem_get_info": (1 << 30, 1 << 34),
        "default_stream": Stream(),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),  # dropout draws from the host's
        "is_current_stream_capturing": False,
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0),
        **dict.fromkeys(("set_device", "set_rng_state", "synchronize", "manual_seed", "manual_seed_all"), None),
        **dict.fromkeys(("empty_cache", "reset_peak_memory_stats"), None),
    }
    for name in ("range_push", "range_pop"):
        patched.setattr(torch.cuda.nvtx, name, lambda *said: 0)
    for name, answer in answers.items():
        patched.setattr(torch.cuda, name, lambda *args, _answer=answer, **options: _answer)
    patched.setattr(torch, "Stream", Stream)
    patched.setattr(torch.accelerator, "device_index", nullcontext)
    of_any = {"is_available": True, "device_count": 1, "current_accelerator": torch.device("cuda")}
    of_any |= {"current_stream": Stream(), "current_device_index": 0, "synchronize": None, "empty_host_cache": None}
    for name, answer in of_any.items():
        patched.setattr(torch.accelerator, name, lambda *args, _answer=answer, **options: _answer)


def _pin_memory(patched: pytest.MonkeyPatch) -> None:
    """Know pinned memory from other memory of the host, as CudaStaging asks."""
    pinned: list[np.ndarray] = []

    def pin(size: int) -> np.ndarray:
        pinned.append(np.full(size, 0xAB, dtype=np.uint8))
        return pinned[-1]

    def is_pinned(x: Tensor, *device: Any) -> bool:
        return any(one.ctypes.data <= x.data_ptr() < one.ctypes.data + max(one.size, 1) for one in pinned)

    def pin_memory(x: Tensor, *device: Any) -> Tensor:
        assert not isinstance(x, OnGpu), "of the host alone"
        target = torch.from_numpy(pin(x.numel() * x.element_size())).view(x.dtype).view(x.shape)
        return target.copy_(x)

    patched.setattr(staging_module, "pinned", pin)
    patched.setattr(Tensor, "is_pinned", is_pinned)
    patched.setattr(Tensor, "pin_memory", pin_memory)


def _load_files(patched: pytest.MonkeyPatch) -> None:
    """Heed what torch.load is told of devices."""
    load = torch.load

    def loaded(file: Any, map_location: Any = None, **options: Any) -> Any:
        loading.there = map_location is None or "cuda" in str(map_location)
        with torch.serialization.safe_globals([from_file]):
            found = load(file, map_location=None if loading.there else map_location, **options)
        return found if map_location is None or not loading.there else each_tensor(lambda x: x.to(DEVICE), found)

    patched.setattr(torch, "load", loaded)


def _move_modules(patched: pytest.MonkeyPatch) -> None:
    """Moved to a GPU, a parameter is the one that it was: tied ones stay tied, also with a model's other stages."""
    apply = torch.nn.Module._apply

    def applied(self: torch.nn.Module, how: Any, *options: Any) -> torch.nn.Module:
        for parameter in self.parameters():
            with torch.no_grad():
                moved = how(parameter)
            if isinstance(moved, OnGpu) != isinstance(parameter, OnGpu):
                _become(parameter, moved)
        return apply(self, how, *options)

    patched.setattr(torch.nn.Module, "_apply", applied)


def _become(parameter: Any, moved: Tensor) -> None:
    needs = parameter.requires_grad
    torch._C._swap_tensor_impl(parameter, moved)
    parameter.__class__ = OnGpu if isinstance(moved, OnGpu) else torch.nn.Parameter
    if isinstance(moved, OnGpu):
        parameter.values, parameter._is_param = moved.values, True
    parameter.requires_grad_(needs)
