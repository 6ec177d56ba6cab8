"""A GPU's double: tensors that say they are on cuda:0, and as there do not mix with the host's.

Their values lie on the host, where the same operations compute the same bits. When copies are done is not doubled here;
for that see lazy_staging.py and fake_cuda.py. Whole engines run on it in processes of their own: pretend_gpu_rank.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipecomp.kernels import dispatch
from pipecomp.kernels.staging import FinishedCopy

DEVICE = torch.device("cuda", 0)
COPIES = (torch.ops.aten.copy_, torch.ops.aten._to_copy)
INDEXED = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_, torch.ops.aten._index_put_impl_)


class OnGpu(Tensor):
    """A tensor of the double. values: on the host."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> OnGpu:
        """To C++ it is a meta tensor, for which no driver is asked."""
        made: OnGpu = Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device="meta",
        )
        made.values = values
        return made

    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = is_meta = property(lambda self: False)
    __torch_function__ = torch._C._disabled_torch_function_impl

    def _take(self, other: OnGpu) -> None:
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.values = other.values

    data = property(lambda self: self.detach(), _take)  # type: ignore[assignment]

    def get_device(self) -> int:
        """Its number."""
        return 0

    def data_ptr(self) -> int:
        """Return the address of the values."""
        return self.values.data_ptr()

    def untyped_storage(self) -> Any:
        """Return the storage of the values."""
        return self.values.untyped_storage()

    def tolist(self) -> Any:
        """Wait for the values."""
        return self.values.tolist()

    def numpy(self, **options: Any) -> Any:
        """Refused, as there."""
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def type(self, dtype: Any = None, non_blocking: bool = False) -> Any:
        """torch.cuda.FloatTensor and its like."""
        if dtype is not None:
            return self.to(dtype)
        return self.values.type().replace("torch.", "torch.cuda.")

    def record_stream(self, stream: Any) -> None:
        """Nothing is done later."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """In a file it is known as the GPU's."""
        return from_file, (self.values,)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute on the host."""
        return _run(func, args, kwargs or {})


def from_file(values: Tensor) -> Tensor:
    """Return a saved double on the device that `torch.load` chooses."""
    return OnGpu(values) if loading.there else values


class Loading(threading.local):
    """Device of a file's tensors in this thread."""

    there = True  # whether what was on the GPU goes there again


loading = Loading()


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute on the host what either device was asked for. RuntimeError for what a GPU refuses."""
    on_gpu: list[OnGpu] = []
    on_host: list[Tensor] = []
    each_tensor(lambda x: (on_gpu if isinstance(x, OnGpu) else on_host).append(x), (args, kwargs))
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return func(*args, **kwargs)  # shapes alone
    there = bool(on_gpu)
    if kwargs.get("device") is not None:
        there = torch.device(kwargs["device"]).type != "cpu"
        kwargs = {**kwargs, "device": "cpu", **({"pin_memory": False} if "pin_memory" in kwargs else {})}
    if there and kwargs.get("generator") is not None:
        raise RuntimeError(f"{func}: a generator of the host on {DEVICE}")
    if on_gpu:
        _refuse(func, args, on_host)
    known = {id(x.values): x for x in on_gpu}
    values = each_tensor(lambda x: x.values if isinstance(x, OnGpu) else x, (args, kwargs))
    out = func(*values[0], **values[1])
    if func.overloadpacket is torch.ops.aten.copy_:
        return args[0]
    if not there:  # a copy to the host, also where nothing had to change for it
        return each_tensor(lambda x: x.clone() if id(x) in known else x, out)
    return each_tensor(lambda x: known[id(x)] if id(x) in known else OnGpu(x), out)


def each_tensor(change: Any, x: Any) -> Any:
    """x with each tensor in it changed."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, (list, tuple)):
        return type(x)([each_tensor(change, y) for y in x])
    return {key: each_tensor(change, y) for key, y in x.items()} if isinstance(x, dict) else x


def _refuse(func: Any, args: Any, on_host: list[Tensor]) -> None:
    """RuntimeError for tensors of both devices, and for what gloo does not send from a GPU."""
    packet = func.overloadpacket
    if func.namespace == "c10d" and str(packet).split(".")[-1] in ("send", "recv_", "recv_any_source_"):
        raise RuntimeError(f"{func}: gloo cannot, on {DEVICE}")
    if packet in COPIES:
        return
    if packet in INDEXED and isinstance(args[0], OnGpu):  # positions may be the host's
        on_host = [x for x in args[2:3] if not isinstance(x, OnGpu)]
    if any(x.dim() for x in on_host):
        raise RuntimeError(f"{func}: tensors on {DEVICE} and cpu")


class Mode(TorchDispatchMode):
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

    def to_host(self, x: Tensor, target: Tensor | None = None) -> FinishedCopy:
        """See Staging. Refuses what is on the host."""
        assert isinstance(x, OnGpu)
        return FinishedCopy(x.cpu() if target is None else target.copy_(x))

    def to_device(self, x: Tensor) -> FinishedCopy:
        """See Staging. Refuses what is on the double."""
        assert not isinstance(x, OnGpu)
        return FinishedCopy(x.to(DEVICE))


class Event:
    """torch.cuda.Event: what was asked for is done."""

    def __init__(self, **options: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Nothing is under way."""

    synchronize = record

    def elapsed_time(self, end: Event) -> float:
        """Nothing takes time."""
        return 0.0

    def query(self) -> bool:
        """It has come."""
        return True


class Stream(nullcontext):
    """torch.cuda.Stream."""

    device = DEVICE

    def __init__(self, *place: Any, **options: Any) -> None:
        pass

    def wait_event(self, event: Any = None) -> None:
        """It has come."""

    synchronize = wait_stream = wait_event

    def is_capturing(self) -> bool:
        """As torch's optimizers ask."""
        return False


@contextmanager
def pretend_gpu() -> Iterator[None]:
    """Let torch have the double inside, also in threads that begin there; kernels are torch's."""
    with pytest.MonkeyPatch.context() as patched, Mode():
        have_the_double(patched)
        yield


def have_the_double(patched: pytest.MonkeyPatch) -> None:
    """Let torch make and move tensors of the double; inside a Mode."""
    future, run, tensor, automatic = torch.futures.Future, threading.Thread.run, torch.tensor, dispatch.automatic

    def run_there(self: threading.Thread) -> None:
        with Mode():
            run(self)

    def made(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        """torch.tensor, which C++ makes without a word to the mode."""
        x = tensor(data, **options)
        return x if device is None else x.to(device)

    patched.setattr(torch.cuda, "_lazy_init", lambda: None)
    patched.setattr(torch.cuda, "Event", Event)
    patched.setattr(torch.cuda, "Stream", Stream)
    patched.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    patched.setattr(torch.cuda, "device", nullcontext)
    patched.setattr(torch.cuda, "stream", nullcontext)
    patched.setattr(torch.futures, "Future", lambda *, devices=None: future())
    patched.setattr(threading.Thread, "run", run_there)
    patched.setattr(torch, "tensor", made)
    patched.setattr(dispatch, "automatic", lambda device: dispatch.TORCH if device == "cuda" else automatic(device))
