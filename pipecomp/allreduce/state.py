"""What averages gradients: a method, its ranks, error-feedback residuals, counters, and the thread that works."""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import queue
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pipecomp.allreduce.adaptive import AdaptiveAverage
from pipecomp.allreduce.call import Call, Counters, Name, Slices
from pipecomp.allreduce.error_feedback import Residuals
from pipecomp.allreduce.group import Group
from pipecomp.allreduce.method import Average, Stateful
from pipecomp.allreduce.methods.torch_hooks import LoneBucket
from pipecomp.allreduce.options import Gradients
from pipecomp.errors import ConfigError, ShapeError
from pipecomp.kernels.staging import Staging, staging_for
from pipecomp.stats import ring_bytes

_FAILED_S = 10.0  # for what is under way when other ranks may be gone, and when the interpreter ends
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(slots=True)
class _Job:
    x_d: Tensor
    out_d: Tensor
    key: str
    slices: Slices | None
    number: int
    loss_scale: float
    future: torch.futures.Future[Tensor]
    ready: Any = None  # CUDA event after which x_d may be read and out_d be written


class State:
    """Average tensors over a group's ranks, compressed; with `ddp_hook` the state of a DDP communication hook.

    All ranks must make states, and average with them, in the same order.

    Args:
        method: a gradient method's name, see `pipecomp.gradient_config.Gradients`.
        group: a process group or a list of global ranks, None for all ranks; without torch.distributed there is one
            rank, and only the method's own error is seen.
        seed: of all random draws, the same on all ranks.
        timeout_s: seconds of silence after which a rank counts as lost; "fp16" and "powersgd" go by that of a process
            group that is given.
        **options: the method's options.

    Attributes:
        loss_scale: what the gradients given from here on were multiplied by (FP16), the same on all ranks. Residuals
            and all else that is kept are without, so that the scale may change.
        staging: what copies codes between the tensors' device and the host, to be set before the first call; None
            until then for one of its own. Tensors of one device are averaged only.

    Raises:
        ConfigError: for a method, or an option of it, that is not allowed.

    Example:
        >>> state = State(method="global_qsgd", levels="exponential", bits=8)
        >>> ddp.register_comm_hook(state, ddp_hook)
    """

    def __init__(
        self, method: str, *, group: Any = None, seed: int = 0, timeout_s: float = 120.0, **options: Any
    ) -> None:
        try:
            self.options = Gradients(method=method, **options)
        except TypeError as error:
            known = [f.name for f in dataclasses.fields(Gradients)]
            unknown = sorted(set(options) - set(known))
            raise ConfigError(unknown[0] if unknown else "options", options, ", ".join(known)) from error
        if self.options.exchanges_in_optimizer:
            raise ConfigError("method", method, "a method for gradients: this is an optimizer, optim.QuantizedAdam")
        if self.options.local is not None:
            hint = "A State averages in every call; local steps are run by `pipecomp.initialize`."
            raise ConfigError("local_steps", self.options.local_steps, "null", hint)
        self.seed, self.loss_scale = seed, 1.0
        self.staging: Staging | None = None
        chosen = self.options.chosen
        shared = not (chosen.by_hook and isinstance(group, (list, tuple)))
        self.group = group.again() if isinstance(group, Group) else Group(group, timeout_s=timeout_s, shared=shared)
        self._hooks_group = self.group.process_group if isinstance(group, (list, tuple, Group)) else group
        self._counters = Counters()
        self._numbers = WeakIdKeyDictionary()  # weakref's own compares tensors element-wise
        self._next_number = itertools.count()  # no number comes again, though parameters go
        self.forget()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stream: Any = None

    def forget(self) -> None:
        """Begin anew, without residuals; call it between steps, on all ranks. What was counted so far stays."""
        self._calls, self.memory = 0, Residuals(self.group.rank, self.group.size)
        chosen, layers = self.options.chosen, self.options.layerwise
        self._hook = chosen.hook(self._hooks_group, layers)  # torch's take the caller's own process group
        self._average: Average | None = None
        if self._hook is None:
            self._average = AdaptiveAverage(chosen, layers, self.memory) if layers else chosen.average(self.memory)

    # -- averaging

    def submit(
        self, tensor: Tensor, key: str, *, slices: Slices | None = None, out: Tensor | None = None
    ) -> torch.futures.Future[Tensor]:
        """Start averaging a tensor, which must not change before the future is done.

        Args:
            tensor: of any float dtype and shape.
            key: names its error-feedback residual.
            slices: (number, values) of the parameters that it is made of, where residuals belong to these, as they do
                with DDP, whose buckets change; each is a layer of its own for `adaptive`.
            out: where the mean goes, contiguous, may be `tensor` itself; None for a new tensor.

        Returns:
            A future of the mean, in the tensor's dtype and shape.

        Raises:
            ShapeError: for a dtype that is no float, and an `out` of another shape or dtype.
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
            return self._run_lone(tensor.detach(), out, key, self.loss_scale)
        x_d = tensor.detach().reshape(-1)
        if x_d.dtype == torch.float64 and self._hook is None:
            x_d = x_d.to(torch.float32)
        job = _Job(x_d, out.detach(), key, slices, self._calls, self.loss_scale, future)
        if tensor.is_cuda:
            job.ready = torch.cuda.Event()
            job.ready.record(torch.cuda.current_stream(tensor.device))
        self._start_thread()
        self._jobs.put(job)
        return future

    def run_bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Average one of DDP's buckets in place and return a future of its buffer."""
        if self._hook is None:
            return self.submit(bucket.buffer(), str(bucket.index()), slices=self._slices(bucket), out=bucket.buffer())
        buffer, layers = bucket.buffer(), [number for number, _ in self._slices(bucket)]
        scale = self._hooks_scale(self.loss_scale)
        self._count_call()
        if scale == 1:
            return self._run_hook(bucket, "ddp", buffer, layers)
        buffer.div_(scale)
        return self._run_hook(bucket, "ddp", buffer, layers).then(lambda f: f.value().mul_(scale))

    def _hooks_scale(self, loss_scale: float) -> float:
        """What a hook gets values divided by: the loss scale if it keeps something of them; half precision needs it."""
        return 1.0 if self._kept() is None else loss_scale

    def _run_lone(self, x: Tensor, out: Tensor, key: str, loss_scale: float) -> torch.futures.Future[Tensor]:
        """Average a tensor by torch's hook, into `out`."""
        scale = self._hooks_scale(loss_scale)
        lone = LoneBucket(out.copy_(x) if scale == 1 else x.to(torch.float32) / scale, 0)
        future = self._run_hook(lone, key, x, [key])
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
        """Count together with what was sent for it: an average may be under way for many steps."""
        self._counters.bytes_raw += ring_bytes(tensor.numel() * tensor.element_size(), self.group.size)

    def _slices(self, bucket: Any) -> Slices:
        return tuple((self._number(parameter), parameter.numel()) for parameter in bucket.parameters())

    def _number(self, parameter: Tensor) -> int:
        """By the order in which parameters were first seen, which is the same after a restart."""
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

    def _run(self, job: _Job) -> None:
        if job.ready is None:
            self._mean(job)
            job.future.set_result(job.out_d)
            return
        # Beside the backward pass, not behind it: on a stream of its own, whose end the future's waiter waits for. The
        # device comes first: without, what this thread does to events and streams would make a context on GPU 0.
        device = job.x_d.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            self._stream.wait_event(job.ready)
            for tensor in (job.x_d, job.out_d):
                tensor.record_stream(self._stream)
            self._mean(job)
            job.future.set_result(job.out_d)

    def _mean(self, job: _Job) -> None:
        """Compute a job's mean."""
        if self._hook is not None:
            assert self.group.give_way is not None, "otherwise hooks run where they are called"
            self.group.give_way()
            mean = self._run_lone(job.x_d.view_as(job.out_d), job.out_d, job.key, job.loss_scale).wait()
            if mean.data_ptr() != job.out_d.data_ptr():
                job.out_d.copy_(mean)
            return
        assert self._average is not None
        if self.staging is None:
            self.staging = staging_for(job.x_d.device)
        call = Call(self.group, self._counters, self.seed, job.number, job.key, slices=job.slices, staging=self.staging)
        out_d = job.out_d.view(-1)
        before = self.group.bytes_sent
        mean_d = out_d if out_d.dtype == torch.float32 else torch.empty_like(out_d, dtype=torch.float32)
        x_d = job.x_d if job.loss_scale == 1 else job.x_d.to(torch.float32) / job.loss_scale
        self._average.mean(x_d, mean_d, call)
        if job.loss_scale != 1:
            mean_d.mul_(job.loss_scale)
        if mean_d is not out_d:
            out_d.copy_(mean_d)
        self._counters.bytes_sent += self.group.bytes_sent - before
        self._count_raw(job.out_d)

    # -- what is known

    def stats(self) -> dict[str, Any]:
        """Tell what was averaged so far, on this rank.

        Returns:
            `calls`; `bytes_raw`, of a ring all-reduce without compression; `bytes_sent`, what this rank put on its
            links; `relative_error`, the mean over calls of ‖x − sent‖ / ‖x‖ for the beginning of each bucket (None
            with "none", and where torch compresses); `seconds` by part: quantize, wait, reduce, decode.
        """
        return self._counters.as_dict()

    def layer_values(self) -> dict[Any, Any]:
        """Tell what each layer has of the option that is adaptive, by parameter number or key; empty before a plan."""
        worker = self._average if self._hook is None else self._hook
        return dict(getattr(worker, "values", {}))

    def _kept(self) -> Stateful | None:
        """What keeps more than residuals."""
        worker = self._average if self._hook is None else self._hook
        return worker if isinstance(worker, Stateful) else None

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals, place in the random numbers and what its method keeps; call it between steps.

        Returns:
            Plain containers and tensors on the CPU, for `torch.save` and `load_state_dict`.
        """
        state = {
            "options": self.options.as_dict(),
            "rank": self.group.rank,
            "ranks": self.group.size,
            "calls": self._calls,
            "memory": self.memory.state_dict(),
        }
        if (kept := self._kept()) is not None:
            state[kept.saved_as] = kept.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any], device: torch.device | str = "cpu") -> None:
        """Go on with what `state_dict` returned on the same rank, and with nothing else.

        Args:
            state: of a state with the same options, rank and number of ranks.
            device: where the gradients are.

        Raises:
            ConfigError: if it is of another one.
        """
        mine = {"options": self.options.as_dict(), "rank": self.group.rank, "ranks": self.group.size}
        for key, value in mine.items():
            if state.get(key) != value:
                raise ConfigError(f"state.{key}", state.get(key), f"{value}, as this state has")
        self.forget()
        self._calls = state["calls"]
        self.memory.load_state_dict(state["memory"], torch.device(device))
        if (kept := self._kept()) is not None and kept.saved_as in state:
            kept.load_state_dict(state[kept.saved_as], torch.device(device))

    def close(self, *, failed: bool = False) -> None:
        """Finish what is under way and end the thread; safe to call twice.

        Args:
            failed: whether other ranks may not take part any more: then it is waited for a few seconds only. Without,
                for as long as it takes, or until a rank has been silent for `timeout_s`: a thread that is left within
                torch when the interpreter ends would abort the process.
        """
        if self._thread is not None:
            _stop(self._jobs, self._thread, _FAILED_S if failed else None)
            self._thread = None


def _work(reference: weakref.ref[State], jobs: queue.SimpleQueue[_Job | None]) -> None:
    """Average one bucket after the other, in the order in which they came."""
    torch.set_grad_enabled(False)
    while (job := jobs.get()) is not None:
        state = reference()
        if state is None:
            return
        try:
            state._run(job)
        except Exception as error:  # whoever waits for the mean gets it
            job.future.set_exception(error)  # type: ignore[arg-type]
        del state, job


def _stop(jobs: queue.SimpleQueue[_Job | None], thread: threading.Thread, wait_s: float | None = _FAILED_S) -> None:
    if thread.is_alive():
        jobs.put(None)
        thread.join(wait_s)


def ddp_hook(state: State, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average one of DDP's buckets; the future keeps DDP's overlap with the backward pass.

    Args:
        state: what averages.
        bucket: a `torch.distributed.GradBucket`; its buffer gets the mean.

    Returns:
        A future of the buffer.

    Example:
        >>> ddp.register_comm_hook(State("double_squeeze"), ddp_hook)
    """
    return state.run_bucket(bucket)


ddp_hook.__annotations__.clear()  # DDP reads them, and refuses strings, which they are in this file


def allreduce_mean(state: State, tensor: Tensor, key: str = "tensor") -> Tensor:
    """Average a tensor over all ranks of a state, without DDP.

    Args:
        state: what averages.
        tensor: of any float dtype and shape, the same on every rank.
        key: names its error-feedback residual: one for each tensor that is averaged again and again.

    Returns:
        The mean as a new tensor, the same bits on every rank. NaN or Inf on any rank gives NaN on every rank and leaves
        the residuals as they were; with "none", "fp16" and "powersgd" it gives what torch's own sums make of it.

    Raises:
        ShapeError: for a dtype that is no float, and another size than `key` had before.
        PeerLostError: for a rank that is gone or silent. With "fp16" and "powersgd", which are torch's, RuntimeError
            after their process group's own timeout.

    Example:
        >>> mean = allreduce_mean(state, layer.weight.grad, key="weight")
    """
    return state.submit(tensor, key).wait()
