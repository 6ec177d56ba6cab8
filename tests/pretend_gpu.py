"""A GPU's double: tensors that say they are on cuda:0, and as there do not mix with the host's.

Their values lie on the host. When copies are done is not doubled here; for that see lazy_staging.py and fake_cuda.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from pipecomp.kernels import dispatch, torch_backend
from pipecomp.kernels.staging import Done

DEVICE = torch.device("cuda", 0)


class OnGpu(Tensor):
    """A tensor of the double. values: on the host."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> OnGpu:
        """To C++ it is a meta tensor, for which no driver is asked."""
        made: OnGpu = Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), dtype=values.dtype, device="meta"
        )
        made.values = values
        return made

    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    __torch_function__ = torch._C._disabled_torch_function_impl

    def data_ptr(self) -> int:
        """Where the values are."""
        return self.values.data_ptr()

    def tolist(self) -> Any:
        """Wait for the values."""
        return self.values.tolist()

    def record_stream(self, stream: Any) -> None:
        """Nothing is done later."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute on the host."""
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute on the host what either device was asked for. RuntimeError for tensors of both."""
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    on_gpu = [x for x in tensors if isinstance(x, OnGpu)]
    copies = func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._to_copy)
    if on_gpu and not copies and any(x.dim() for x in tensors if not isinstance(x, OnGpu)):
        raise RuntimeError(f"{func}: tensors on {DEVICE} and cpu")
    there = bool(on_gpu)
    if kwargs.get("device") is not None:
        there = torch.device(kwargs["device"]).type != "cpu"
        kwargs = {**kwargs, "device": "cpu"}
    values = tree_map(lambda x: x.values if isinstance(x, OnGpu) else x, (args, kwargs))
    known = {id(x.values): x for x in on_gpu}
    out = func(*values[0], **values[1])
    if func.overloadpacket is torch.ops.aten.copy_:
        return args[0]

    def placed(x: Any) -> Any:
        return (known[id(x)] if id(x) in known else OnGpu(x)) if there and isinstance(x, Tensor) else x

    return tree_map(placed, out)


class _Mode(TorchDispatchMode):
    """For what makes tensors on the double."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class PretendStaging:
    """Copies between the double and the host, done when they are asked for."""

    device, immediate = DEVICE, False

    def buffer(self, size: int) -> np.ndarray:
        """See Staging."""
        return np.empty(size, dtype=np.uint8)

    def place(self, target: Tensor) -> Tensor:
        """See Staging."""
        return torch.empty_like(target, device=DEVICE)

    def to_host(self, x: Tensor, target: Tensor | None = None) -> Done:
        """See Staging. Refuses what is on the host."""
        assert isinstance(x, OnGpu)
        return Done(x.cpu() if target is None else target.copy_(x))

    def to_device(self, x: Tensor) -> Done:
        """See Staging. Refuses what is on the double."""
        assert not isinstance(x, OnGpu)
        return Done(x.to(DEVICE))


@contextmanager
def pretend_gpu() -> Iterator[None]:
    """Let torch have the double inside, also in threads that begin there; kernels are torch's."""
    event = SimpleNamespace(record=lambda stream: None)
    stream = SimpleNamespace(wait_event=lambda event: None)
    future, run, tensor = torch.futures.Future, threading.Thread.run, torch.tensor

    def run_there(self: threading.Thread) -> None:
        with _Mode():
            run(self)

    def made(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        """torch.tensor, which C++ makes without a word to the mode."""
        x = tensor(data, **options)
        return x if device is None else x.to(device)

    with pytest.MonkeyPatch.context() as patched, _Mode():
        patched.setattr(torch.cuda, "_lazy_init", lambda: None)
        patched.setattr(torch.cuda, "Event", lambda: event)
        patched.setattr(torch.cuda, "Stream", lambda device: stream)
        patched.setattr(torch.cuda, "current_stream", lambda device: stream)
        patched.setattr(torch.cuda, "device", nullcontext)
        patched.setattr(torch.cuda, "stream", nullcontext)
        patched.setattr(torch.futures, "Future", lambda devices: future())
        patched.setattr(threading.Thread, "run", run_there)
        patched.setattr(torch, "tensor", made)
        patched.setitem(dispatch._preferred, "cuda", torch_backend)
        yield
