"""torch.distributed over a mesh: a process group in Python, under the backend name "tls".

Everything that goes through torch's collectives goes through it: DeepSpeed's reductions, DDP's buckets, pipecomp's own.
Collectives of one group run on a thread of its own, in order; messages between two ranks go to the mesh at once.
Tensors that are not in host memory, or not contiguous, are copied.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipecomp.errors import LinkError
from pipecomp.tls.collectives import OPERATIONS, Collectives
from pipecomp.tls.mesh import Mesh
from pipecomp.tls.transfer import Transfer

BACKEND = "tls"
_ProcessGroup: Any = dist.ProcessGroup  # whose stubs have another signature for each way to call a method
_current: Mesh | None = None


def use_mesh(mesh: Mesh) -> None:
    """Let process groups that are made from now on go over `mesh`, and make "tls" known to torch."""
    global _current
    _current = mesh
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu", "cuda"])


def current_mesh() -> Mesh | None:
    """The mesh that process groups go over, if there is one."""
    return _current


def _make(options: Any, _: Any) -> MeshProcessGroup:
    if _current is None:
        raise LinkError(f"the backend {BACKEND!r} needs a mesh: join_processes makes it")
    ranks = list(options.global_ranks_in_group) or list(range(_current.world))
    return MeshProcessGroup(_current, ranks, str(options.group_id), options.timeout)


class _Work(dist.Work):
    """What torch's functions return, or wait for."""

    def __init__(self, result: Sequence[Tensor], default: timedelta) -> None:
        super().__init__()
        self._result, self._default = list(result), default
        self._done = threading.Event()
        self._error: Exception | None = None
        # torch takes a tensor of a GPU as a future's value only where it was told of that GPU.
        devices: list[int | str | torch.device] = [*{t.device for t in result if t.is_cuda}]
        self._future: torch.futures.Future = torch.futures.Future(devices=devices or None)

    def finish(self, error: Exception | None = None) -> None:
        """End it; the error is told as torch's backends tell theirs."""
        if error is not None:
            told = dist.DistBackendError(str(error))
            told.__cause__ = error
            self._error = told
        self._done.set()
        if self._error is not None:
            self._future.set_exception(self._error)
        else:
            self._future.set_result(self._result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit = timeout if timeout is not None and timeout > timedelta(0) else self._default
        if not self._done.wait(limit.total_seconds()):
            raise dist.DistBackendError(
                f"a collective of torch.distributed timed out after {limit.total_seconds():g} s"
            )
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future:
        return self._future


class MeshProcessGroup(_ProcessGroup):
    """torch's interface to `Collectives`; `use_mesh` lets torch make it. ranks: global ones. name: the group's."""

    def __init__(self, mesh: Mesh, ranks: Sequence[int], name: str, timeout: timedelta) -> None:
        super().__init__(list(ranks).index(mesh.rank), len(ranks))
        text = f"{name} {','.join(map(str, ranks))}"
        self._stream = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
        self._together = Collectives(mesh, ranks, self._stream)
        self._timeout = timeout
        self._name, self._description = name, ""
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], _Work] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def getBackendName(self) -> str:
        return BACKEND

    # torch's own looks for names in backends, of which there are none below this

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def shutdown(self) -> None:
        """End the thread, when it has done what was asked of it."""
        self._tasks.put(None)

    abort = shutdown

    # -- collectives, as torch calls them

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        name = _operation(opts)
        return self._run(tensors, lambda t: self._together.all_reduce_(t[0], name))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        name = _operation(opts)

        def work(ts: list[Tensor]) -> None:
            for t in ts:
                self._together.all_reduce_(t, name)

        return self._run(tensors, work)

    def reduce(self, tensors: list[Tensor], opts: Any) -> _Work:
        name = _operation(opts)
        return self._run(tensors, lambda t: self._together.reduce_(t[0], opts.rootRank, name))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Work:
        return self._run(tensors, lambda t: self._together.broadcast(t[0], opts.rootRank))

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> _Work:
        host = _host(tensors[0])
        return self._run(outputs[0], lambda out: self._together.all_gather(out, host))

    def allgather_coalesced(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> _Work:
        hosts = [_host(tensor) for tensor in tensors]

        def work(out: list[Tensor]) -> None:
            for i, host in enumerate(hosts):
                self._together.all_gather([out[r * len(hosts) + i] for r in range(self.size())], host)

        return self._run([tensor for of_rank in outputs for tensor in of_rank], work)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> _Work:
        host = _host(tensor).view(-1)
        return self._run([output], lambda o: self._together.all_gather(list(o[0].view(-1).chunk(self.size())), host))

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> _Work:
        name = _operation(opts)
        blocks = [_host(t) for t in inputs[0]]
        return self._run(outputs, lambda out: self._together.reduce_scatter(out[0], blocks, name))

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> _Work:
        name = _operation(opts)
        blocks = list(_host(tensor).view(-1).chunk(self.size()))
        return self._run([output], lambda out: self._together.reduce_scatter(out[0], blocks, name))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> _Work:
        blocks = [_host(t) for t in inputs]
        return self._run(outputs, lambda out: self._together.all_to_all(out, blocks))

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, out_sizes: list[int], sizes: list[int], opts: Any = None
    ) -> _Work:
        blocks = _split(_host(tensor), sizes, self.size())
        return self._run([output], lambda o: self._together.all_to_all(_split(o[0], out_sizes, self.size()), blocks))

    def gather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> _Work:
        into, host = outputs[0] if outputs else [], _host(tensors[0])
        return self._run(into, lambda out: self._together.gather(out, host, opts.rootRank))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> _Work:
        blocks = [_host(t) for t in inputs[0]] if inputs else []
        return self._run(outputs, lambda out: self._together.scatter(out[0], blocks, opts.rootRank))

    def barrier(self, opts: Any = None) -> _Work:
        return self._run([], lambda _: self._together.barrier())

    # names of torch before 2.13
    _allgather_base, _reduce_scatter_base, alltoall_base = (
        all_gather_single,
        reduce_scatter_single,
        all_to_all_single,
    )

    # -- between two ranks

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> _Work:
        host = _host(tensors[0])
        work = _Work(tensors, self._timeout)
        self._together.send(host, to, tag).then(lambda transfer: work.finish(transfer.error))
        return work

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> _Work:
        host, work = _staging(tensors[0]), _Work(tensors, self._timeout)

        def arrived(transfer: Transfer) -> None:
            if transfer.error is None and host is not tensors[0]:
                with torch.inference_mode():  # as in `_work`
                    tensors[0].copy_(host)
            work.finish(transfer.error)

        self._together.receive(host, source, tag).then(arrived)
        return work

    # -- the thread

    def _run(self, outputs: Sequence[Tensor], work: Callable[[list[Tensor]], Any]) -> _Work:
        """`work` on the group's thread, with tensors in host memory in the place of `outputs`."""
        made = _Work(outputs, self._timeout)
        staged = [_host(tensor) for tensor in outputs]

        def run() -> None:
            work(staged)
            for tensor, host in zip(outputs, staged, strict=True):
                if host is not tensor:
                    tensor.copy_(host)

        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="pipecomp-collectives", daemon=True)
            self._thread.start()
        self._tasks.put((run, made))
        return made

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            run, made = task
            try:
                with torch.inference_mode():  # else autograd would not let it change parameters, or what has that mode
                    run()
            except Exception as error:
                made.finish(error)
            else:
                made.finish()


def _host(tensor: Tensor) -> Tensor:
    """The tensor itself, if it is contiguous and in host memory; else a copy."""
    return tensor.detach().cpu().contiguous() if _needs_copy(tensor) else tensor


def _staging(tensor: Tensor) -> Tensor:
    """The same without its values."""
    return torch.empty(tensor.shape, dtype=tensor.dtype) if _needs_copy(tensor) else tensor


def _needs_copy(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu" or not tensor.is_contiguous()


def _split(tensor: Tensor, sizes: Sequence[int], parts: int) -> list[Tensor]:
    return list(tensor.split(list(sizes)) if sizes else tensor.chunk(parts))


def _operation(opts: Any) -> str:
    """The reduction's name. LinkError for one that there is not."""
    if opts is None:
        return "SUM"
    text = str(opts.reduceOp)
    found = next((name for name in OPERATIONS if opts.reduceOp == getattr(dist.ReduceOp, name)), None)
    if found is None:
        raise LinkError(f"the backend {BACKEND!r} does not reduce with {text}, but with {', '.join(OPERATIONS)}")
    return found
