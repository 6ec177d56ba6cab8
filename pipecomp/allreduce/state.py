"""The state of a DDP communication hook: method, ranks, residuals, counters, and the thread that averages.

A state is saved with `torch.save(state.state_dict(), …)`, or to a file without pickle: tensors as safetensors, the rest
as JSON in its header.

state.number_parameters(model.parameters())    # before the first average, also in the run that saves
state.save("memories-0.safetensors")           # between steps; each rank its own file
state.load("memories-0.safetensors", device)   # same method, rank and number of ranks
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import math
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pipecomp.allreduce.adaptive import AdaptiveAverage
from pipecomp.allreduce.buckets import pack
from pipecomp.allreduce.call import Call, Counters, Name, Slices
from pipecomp.allreduce.error_feedback import Residuals
from pipecomp.allreduce.group import Group
from pipecomp.allreduce.method import Average, Stateful
from pipecomp.allreduce.methods import create_method
from pipecomp.allreduce.methods.baselines import SingleTensorBucket
from pipecomp.config.gradients import Gradients
from pipecomp.errors import ConfigError, ShapeError
from pipecomp.kernels.staging import Staging, staging_for
from pipecomp.stats import ring_bytes
from pipecomp.utils.files import atomic_write
from pipecomp.utils.serialization import decode_tree, encode_tree

_log = logging.getLogger(__name__)
FORMAT = "pipecomp gradient memories 1"
_FAILED_S = 10.0  # wait for running averages when other ranks may be gone, and when the interpreter exits
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(slots=True)
class _AverageJob:
    x_d: Tensor
    out_d: Tensor
    key: str
    slices: Slices | None
    number: int
    loss_scale: float
    future: torch.futures.Future[Tensor]
    may_drop: bool = False
    ready: Any = None  # CUDA event after which x_d may be read and out_d written


_LOOKED = 4096  # values of a gradient
_CALM, _CLOSE = 0.3, 0.2  # spread before a jump, and distance from a power of two, in powers of two


class ScaleWatch:
    """Warns once if gradients jump by a power of two and stay there, as where a GradScaler changes its scale.

    Residuals of the scale before would then be added to gradients of another one.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, deque[float]] = {}  # log2 of norms, by key
        self._warned = False

    def look(self, key: str, x_d: Tensor) -> None:
        """Compare the size of a gradient with those of the calls before. x_d: on a GPU this waits for it."""
        if self._warned:
            return
        norm = float(x_d[:: max(1, x_d.numel() // _LOOKED)].float().norm())
        if not 0 < norm < math.inf:
            return
        sizes = self._sizes.setdefault(key, deque(maxlen=5))
        sizes.append(math.log2(norm))
        if len(sizes) < 5:
            return
        *before, first, second = sizes
        if max(before) - min(before) > _CALM:
            return
        jumps = [after - sum(before) / len(before) for after in (first, second)]
        power = round(jumps[0])
        if power != 0 and all(abs(jump - power) < _CLOSE for jump in jumps):
            self._warned = True
            _log.warning(
                "gradients %s are %g times as large as before, a power of two: if a loss scale (GradScaler) has "
                "changed, set state.loss_scale = scaler.get_scale() before each step's backward, else error feedback "
                "adds residuals of another scale; if there is none, set state.loss_scale = 1",
                key,
                2.0**power,
            )


def _feeds_back(options: Gradients) -> bool:
    """Return whether the method adds to a gradient what earlier calls left out."""
    method = options.method_options
    return options.method in ("double_squeeze", "powersgd") or bool(getattr(method, "error_feedback", False))


class State:
    """Compressed averages over a group's ranks; with `ddp_hook` the state of a DDP communication hook.

    All ranks must create states, and average with them, in the same order.

    Args:
        method: a gradient method's name, see `pipecomp.gradient_config.Gradients`.
        group: a process group or a list of global ranks; None for all ranks. Without torch.distributed there is one
            rank, and an average has the method's error alone.
        seed: seed of all random draws, the same on all ranks.
        timeout_s: seconds of silence after which a rank counts as lost; "fp16" and "powersgd" use the timeout of a
            given process group.
        **options: the method's options.

    Attributes:
        options: the validated method and options.
        loss_scale: factor of the gradients (FP16), the same on all ranks. Residuals and other memory are unscaled, so
            it may change between calls.
        staging: copies codes between the tensors' device and the host; set it before the first call, or leave None for
            a new one. All tensors must be on one device.

    Raises:
        ConfigError: for an unknown method, and options that are not allowed.

    Example:
        >>> state = State(method="global_qsgd", levels="exponential", bits=8)
        >>> ddp.register_comm_hook(state, ddp_hook)
    """

    def __init__(
        self, method: str, *, group: Any = None, seed: int = 0, timeout_s: float = 120.0, **options: Any
    ) -> None:
        self.options = Gradients(method=method, **options)
        if self.options.exchanges_in_optimizer:
            hint = "Its optimizer is pipecomp.optim.QuantizedAdam."
            raise ConfigError("method", method, "a method that averages gradients", hint)
        if self.options.local is not None:
            hint = "A State averages in every call; local steps are run by `pipecomp.initialize`."
            raise ConfigError("local_steps", self.options.local_steps, "null", hint)
        self.seed, self._loss_scale = seed, 1.0
        self._scale_watch: ScaleWatch | None = ScaleWatch() if _feeds_back(self.options) else None
        self.staging: Staging | None = None
        self._method = create_method(self.options)
        shared = not (self._method.by_hook and isinstance(group, (list, tuple)))
        self.group = group.duplicate() if isinstance(group, Group) else Group(group, timeout_s=timeout_s, shared=shared)
        self._hooks_group = self.group.process_group if isinstance(group, (list, tuple, Group)) else group
        self._counters = Counters()
        self._numbers = WeakIdKeyDictionary()  # weakref.WeakKeyDictionary compares tensors element-wise
        self._next_number = itertools.count()  # never reused, even after a parameter is freed
        self.forget()
        self._jobs: queue.SimpleQueue[_AverageJob | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stream: Any = None

    @property
    def loss_scale(self) -> float:
        """Factor of the gradients, 1 until it is set."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self._loss_scale, self._scale_watch = scale, None

    def forget(self) -> None:
        """Discard residuals and other memory, but not counters; call it between steps, on all ranks."""
        self._calls, self.memory = 0, Residuals(self.group.rank, self.group.size)
        method, adaptive = self._method, self.options.adaptive_options
        self._hook = method.hook(self._hooks_group, adaptive)  # torch's hooks use the caller's own process group
        self._average: Average | None = None
        if self._hook is None:
            self._average = AdaptiveAverage(method, adaptive, self.memory) if adaptive else method.average(self.memory)

    # -- averaging

    def submit(
        self,
        tensor: Tensor,
        key: str,
        *,
        slices: Slices | None = None,
        out: Tensor | None = None,
        may_drop: bool = False,
    ) -> torch.futures.Future[Tensor]:
        """Start to average a tensor, which must not change before the future is done.

        Args:
            tensor: values of any float dtype and shape.
            key: names its error-feedback residual.
            slices: (name, number of values) of each parameter in a bucket; residuals then belong to the parameters, and
                each is a layer for `adaptive`.
            out: contiguous output, which may be `tensor` itself; None for a new tensor.
            may_drop: whether the caller drops the means of parameters without gradient on any rank, as DDP does; the
                same on all ranks. Their residuals are kept for later then.

        Returns:
            A future of the mean, in the tensor's dtype and shape.

        Raises:
            ShapeError: for a dtype that is not a float, and an `out` of another shape or dtype.
        """
        if tensor.dtype not in DTYPES:
            raise ShapeError(f"gradient {key}: dtype {tensor.dtype}, allowed: {', '.join(map(str, DTYPES))}")
        if out is not None and (out.shape != tensor.shape or out.dtype != tensor.dtype or not out.is_contiguous()):
            raise ShapeError(f"gradient {key}: out must be contiguous, of its shape {tuple(tensor.shape)} and dtype")
        self._count_call()
        out = torch.empty_like(tensor, memory_format=torch.contiguous_format) if out is None else out
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[tensor.device] if tensor.is_cuda else None)
        if not tensor.numel():
            future.set_result(out.detach())
            return future
        if self._hook is not None and self.group.give_way is None:
            return self._run_hook_on_tensor(tensor.detach(), out, key, self.loss_scale)
        x_d = tensor.detach().reshape(-1)
        if x_d.dtype == torch.float64 and self._hook is None:
            x_d = x_d.to(torch.float32)
        job = _AverageJob(x_d, out.detach(), key, slices, self._calls, self.loss_scale, future, may_drop)
        if tensor.is_cuda:
            job.ready = torch.cuda.Event()
            job.ready.record(torch.cuda.current_stream(tensor.device))
        self._start_thread()
        self._jobs.put(job)
        return future

    def submit_named(self, tensors: Mapping[str, Tensor], *, label: str = "") -> Callable[[], None]:
        """Start to replace tensors, by name, in place by their means over the ranks.

        While one bucket is copied, the one before it is on the link.

        Args:
            tensors: values of float dtypes, by name; they must not change until the averages are done.
            label: identifies this subset of the tensors, if they are not always averaged together.

        Returns:
            A function that waits for the averages, and raises their errors.
        """
        rest = dict(tensors)
        waiting: list[tuple[torch.futures.Future[Tensor], list[Tensor]]] = []
        if self.options.method_options.by_matrix:  # needs the shapes of matrices
            for name in [name for name, x in rest.items() if x.dim() > 1]:
                x = rest.pop(name)
                waiting.append((self.submit(x, name), [x]))
        kinds = sorted(((name, x.numel(), str(x.dtype)) for name, x in rest.items()), key=lambda kind: kind[2])
        for i, bucket in enumerate(pack(kinds, whole=True)):
            parts = [rest[piece.owner] for piece in bucket]
            flat = torch.cat([x.reshape(-1) for x in parts])
            slices = tuple((piece.owner, piece.end) for piece in bucket)
            waiting.append((self.submit(flat, f"{label}bucket-{i}", slices=slices, out=flat), parts))

        def finish() -> None:
            for future, targets in waiting:
                mean = future.wait().view(-1)
                for target, part in zip(targets, mean.split([x.numel() for x in targets]), strict=True):
                    target.copy_(part.view_as(target))

        return finish

    def run_bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Start to average one of DDP's buckets in place, and return a future of its buffer."""
        if self._hook is None:
            buffer, slices = bucket.buffer(), self._slices(bucket)
            return self.submit(buffer, str(bucket.index()), slices=slices, out=buffer, may_drop=True)
        buffer, layers = bucket.buffer(), [number for number, _ in self._slices(bucket)]
        scale = self._hook_scale(self.loss_scale)
        if self._scale_watch is not None and buffer.device.type == "cpu":  # a GPU's would wait in this thread
            self._scale_watch.look("ddp", buffer)
        self._count_call()
        if scale == 1:
            return self._run_hook(bucket, "ddp", buffer, layers)
        buffer.div_(scale)
        return self._run_hook(bucket, "ddp", buffer, layers).then(lambda f: f.value().mul_(scale))

    def _hook_scale(self, loss_scale: float) -> float:
        """Return the divisor of a hook's values: the loss scale if the hook has memory. Half precision needs it."""
        return 1.0 if self._stateful() is None else loss_scale

    def _run_hook_on_tensor(self, x: Tensor, out: Tensor, key: str, loss_scale: float) -> torch.futures.Future[Tensor]:
        """Average a tensor into `out` by torch's hook."""
        scale = self._hook_scale(loss_scale)
        bucket = SingleTensorBucket(out.copy_(x) if scale == 1 else x.to(torch.float32) / scale, 0)
        future = self._run_hook(bucket, key, x, [key])
        return future if scale == 1 else future.then(lambda f: out.copy_(f.value() * scale))

    def _run_hook(
        self, bucket: Any, key: str, shape_of: Tensor, layers: Sequence[Name]
    ) -> torch.futures.Future[Tensor]:
        assert self._hook is not None
        future = self._hook.run(bucket, key, self._counters, layers)
        self._count_raw(shape_of)
        return future.then(lambda f: f.value().view(shape_of.shape))

    def _count_call(self) -> None:
        self._calls += 1
        self._counters.calls += 1

    def _count_raw(self, tensor: Tensor) -> None:
        """Count a tensor once it is sent: an average may run for many steps."""
        self._counters.bytes_raw += ring_bytes(tensor.numel() * tensor.element_size(), self.group.size)

    def _slices(self, bucket: Any) -> Slices:
        return tuple((self._number(parameter), parameter.numel()) for parameter in bucket.parameters())

    def _number(self, parameter: Tensor) -> int:
        """Number parameters in the order of their first use. A restart repeats that order."""
        if parameter not in self._numbers:
            self._numbers[parameter] = next(self._next_number)
        number: int = self._numbers[parameter]
        return number

    # -- the thread

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(weakref.ref(self), self._jobs), name="pipecomp-allreduce", daemon=True
            )
            self._thread.start()
            atexit.register(_stop, self._jobs, self._thread)

    def _run(self, job: _AverageJob) -> None:
        if job.ready is None:
            self._mean(job)
            job.future.set_result(job.out_d)
            return
        # Note: a separate stream runs beside the backward pass; the future makes its waiter wait for the stream's end.
        # The device is set first, because events and streams would otherwise create a context on GPU 0.
        device = job.x_d.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            self._stream.wait_event(job.ready)
            for tensor in (job.x_d, job.out_d):
                tensor.record_stream(self._stream)
            self._mean(job)
            job.future.set_result(job.out_d)

    def _mean(self, job: _AverageJob) -> None:
        """Compute a job's mean."""
        if self._hook is not None:
            assert self.group.give_way is not None, "hooks run in the calling thread otherwise"
            self.group.give_way()
            mean = self._run_hook_on_tensor(job.x_d.view_as(job.out_d), job.out_d, job.key, job.loss_scale).wait()
            if mean.data_ptr() != job.out_d.data_ptr():
                job.out_d.copy_(mean)
            return
        assert self._average is not None
        if self.staging is None:
            self.staging = staging_for(job.x_d.device)
        place = (job.number, job.key, job.slices)
        call = Call(self.group, self._counters, self.seed, *place, staging=self.staging, may_drop=job.may_drop)
        out_d = job.out_d.view(-1)
        before = self.group.bytes_sent
        mean_d = out_d if out_d.dtype == torch.float32 else torch.empty_like(out_d, dtype=torch.float32)
        if self._scale_watch is not None:
            self._scale_watch.look(job.key, job.x_d)
        x_d = job.x_d if job.loss_scale == 1 else job.x_d.to(torch.float32) / job.loss_scale
        self._average.mean(x_d, mean_d, call)
        if job.loss_scale != 1:
            mean_d.mul_(job.loss_scale)
        if mean_d is not out_d:
            out_d.copy_(mean_d)
        self._counters.bytes_sent += self.group.bytes_sent - before
        self._count_raw(job.out_d)

    # -- statistics

    def stats(self) -> dict[str, Any]:
        """Return this rank's totals.

        Returns:
            `calls`; `bytes_raw`, of ring all-reduces without compression; `bytes_sent`; `relative_error`, the mean over
            calls of ‖x − sent‖ / ‖x‖ for the leading values of each bucket (None with "none" and torch's hooks);
            `seconds` by part: quantize, wait, reduce, decode.
        """
        return self._counters.as_dict()

    def layer_values(self) -> dict[Any, Any]:
        """Return each layer's value of the adaptive option, by parameter number or key; empty before the first plan."""
        worker = self._average if self._hook is None else self._hook
        return dict(getattr(worker, "values", {}))

    def _stateful(self) -> Stateful | None:
        """Return the average or hook, if it has memory beside residuals."""
        worker = self._average if self._hook is None else self._hook
        return worker if isinstance(worker, Stateful) else None

    # -- checkpoints

    def number_parameters(self, parameters: Iterable[Tensor]) -> None:
        """Number parameters in the model's order, before the first average.

        Otherwise numbers follow DDP's first buckets, whose order differs once a model has trained.

        Args:
            parameters: all that have gradients.
        """
        for parameter in parameters:
            self._number(parameter)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals, number of calls and other memory; call it between steps.

        Returns:
            Plain containers and tensors on the CPU.
        """
        state = {
            "options": self.options.as_dict(),
            "rank": self.group.rank,
            "ranks": self.group.size,
            "calls": self._calls,
            "memory": self.memory.state_dict(),
        }
        if (stateful := self._stateful()) is not None:
            state[stateful.saved_as] = stateful.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any], device: torch.device | str = "cpu") -> None:
        """Restore the return value of `state_dict`.

        Args:
            state: dict of a state with the same options, rank and number of ranks.
            device: device of the gradients.

        Raises:
            ConfigError: for the dict of another state.
        """
        own = {"options": self.options.as_dict(), "rank": self.group.rank, "ranks": self.group.size}
        for key, value in own.items():
            if state.get(key) != value:
                raise ConfigError(f"state.{key}", state.get(key), f"{value}, as this state has")
        self.forget()
        self._calls = state["calls"]
        self.memory.load_state_dict(state["memory"], torch.device(device))
        if (stateful := self._stateful()) is not None and stateful.saved_as in state:
            stateful.load_state_dict(state[stateful.saved_as], torch.device(device))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `state_dict` atomically to a file of this rank's own; call it between steps."""
        save_state_dict(self.state_dict(), path)

    def load(self, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> None:
        """Restore a file of `save`.

        PowerSGD without `adaptive` sends two uncompressed steps, as at its start, before it uses its memory.

        Args:
            path: file of a state with the same options, rank and number of ranks.
            device: device of the gradients.

        Raises:
            ConfigError: for an incomplete file, and the file of another state.
        """
        try:
            with safe_open(os.fspath(path), framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (SafetensorError, OSError) as error:
            raise ConfigError("gradient memories", os.fspath(path), f"a file that was saved whole ({error})") from error
        if metadata.get("format") != FORMAT:
            raise ConfigError("gradient memories", metadata.get("format"), f"{FORMAT!r}, in {Path(path).name}")
        self.load_state_dict(decode_tree(json.loads(metadata["state"]), lambda _, name: tensors[name]), device)

    def close(self, *, failed: bool = False) -> None:
        """Finish running averages and end the thread; safe to call twice.

        Note:
            A thread inside torch when the interpreter exits would abort the process, so this waits until it is done, or
            until a rank has been silent for `timeout_s`.

        Args:
            failed: other ranks may be gone; wait a few seconds only.
        """
        if self._thread is not None:
            _stop(self._jobs, self._thread, _FAILED_S if failed else None)
            self._thread = None


def save_state_dict(state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write the return value of `State.state_dict` atomically to a file that `State.load` reads."""
    tensors: dict[str, Tensor] = {}

    def encode_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        name = str(len(tensors))
        tensors[name] = leaf.detach().cpu().contiguous()
        return {"tensor": name}

    tree = json.dumps(encode_tree(state, encode_leaf))
    with atomic_write(path) as part:
        save_file(tensors, part, metadata={"format": FORMAT, "state": tree})


def _work(reference: weakref.ref[State], jobs: queue.SimpleQueue[_AverageJob | None]) -> None:
    """Run the jobs of a state in their order, until it ends."""
    torch.set_grad_enabled(False)
    while (job := jobs.get()) is not None:
        state = reference()
        if state is None:
            return
        try:
            state._run(job)
        except Exception as error:  # raised by the future's waiter
            job.future.set_exception(error)  # type: ignore[arg-type]
        del state, job


def _stop(
    jobs: queue.SimpleQueue[_AverageJob | None], thread: threading.Thread, wait_s: float | None = _FAILED_S
) -> None:
    if thread.is_alive():
        jobs.put(None)
        thread.join(wait_s)


def ddp_hook(state: State, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average one of DDP's buckets, overlapped with the backward pass.

    Args:
        state: averages.
        bucket: a `torch.distributed.GradBucket`; the mean replaces its buffer.

    Returns:
        A future of the buffer.

    Example:
        >>> ddp.register_comm_hook(State("double_squeeze"), ddp_hook)
    """
    return state.run_bucket(bucket)


ddp_hook.__annotations__.clear()  # DDP checks annotations, and refuses the strings of this file


def allreduce_mean(state: State, tensor: Tensor, key: str = "tensor") -> Tensor:
    """Average a tensor over all ranks of a state, without DDP.

    Args:
        state: averages.
        tensor: values of any float dtype and shape, the same on every rank.
        key: names the error-feedback residual; use one for each tensor.

    Returns:
        The mean as a new tensor, the same bits on every rank. NaN or Inf on any rank gives NaN on every rank and leaves
        residuals unchanged; with "none", "fp16" and "powersgd" they propagate as in torch's sums.

    Raises:
        ShapeError: for a dtype that is not a float, and a size that differs from earlier ones of `key`.
        PeerLostError: for a rank that is gone or silent. torch's hooks, "fp16" and "powersgd", raise RuntimeError after
            their process group's timeout.

    Example:
        >>> mean = allreduce_mean(state, layer.weight.grad, key="weight")
    """
    return state.submit(tensor, key).wait()
