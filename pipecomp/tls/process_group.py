"""torch.distributed over the mesh: collectives on host memory, and a process group for the backend name "tls".

All users of torch's collectives go through it: DeepSpeed's reductions, DDP's buckets, pipecomp's own. Every rank
sends to every other directly. A long sum consists of a reduce-scatter and an all-gather over 1/n of the values each:
every rank sends 2 (n - 1)/n of them, as in a ring, but waits for two messages instead of 2 (n - 1). All ranks add in
the order of ranks, so the result has the same bits everywhere.

# Note: why the process group is Python
A C++ backend would need TLS, and its certificates, in a compiled extension for every torch release; torch's gloo wheels
are built without TLS. torch accepts a registered backend that returns a Python ProcessGroup. The links to be encrypted
carry at most a few Gbit/s, and the threads release the interpreter while they wait, encrypt and copy, so Python's
overhead per call is small beside the transfer.
"""

from __future__ import annotations

import hashlib
import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipecomp.errors import LinkError
from pipecomp.tls.frames import EAGER_BYTES
from pipecomp.tls.mesh import Mesh
from pipecomp.tls.receive_queue import Transfer

BACKEND = "tls"
_PIECE_BYTES = 1 << 22
_P2P_TAG = 1 << 62  # tags from here on: point-to-point messages; below: collectives, counted
_REDUCE: dict[str, Any] = {
    "SUM": torch.Tensor.add_,
    "AVG": torch.Tensor.add_,
    "PRODUCT": torch.Tensor.mul_,
    "BAND": torch.Tensor.bitwise_and_,
    "BOR": torch.Tensor.bitwise_or_,
    "BXOR": torch.Tensor.bitwise_xor_,
    "MIN": lambda total, tensor: torch.minimum(total, tensor, out=total),
    "MAX": lambda total, tensor: torch.maximum(total, tensor, out=total),
}
_ProcessGroup: Any = dist.ProcessGroup  # its stubs have another signature for each overload
_mesh: Mesh | None = None


class Collectives:
    """Collectives of a group; all its ranks must make the same calls in the same order.

    Tensors are contiguous and in host memory. "Rank" below is the rank within the group; blocks are in its order.

    Args:
        mesh: This process's mesh.
        ranks: Global ranks of the group.
        stream: Distinguishes this group's messages from those of other groups.
    """

    def __init__(self, mesh: Mesh, ranks: Sequence[int], stream: int) -> None:
        self.ranks, self.rank = list(ranks), list(ranks).index(mesh.rank)
        self.size = len(self.ranks)
        self._mesh, self._stream = mesh, stream
        self._tags = itertools.count()

    def send(self, tensor: Tensor, to: int, tag: int) -> Transfer:
        """Queue a tensor for rank `to`."""
        return self._send(tensor, to, _P2P_TAG + tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Transfer:
        """Post a receive from rank `source` into `tensor`."""
        return self._receive(tensor, source, _P2P_TAG + tag)

    def all_reduce_(self, tensor: Tensor, operation: str) -> None:
        """Reduce all ranks' tensors into everyone's `tensor`."""
        flat = tensor.view(-1)
        if flat.nbytes <= EAGER_BYTES:
            gathered = [torch.empty_like(flat) for _ in self.ranks]
            self.all_gather(gathered, flat)
            flat.copy_(_reduce(gathered, operation))
            return
        # In pieces: while one is summed and forwarded, the next ones are on their way. The messages of each half share
        # a tag and so keep their order. No rank forwards a slice before this rank's part of it has arrived there.
        reduce_tag, gather_tag = next(self._tags), next(self._tags)
        pieces = [list(piece.tensor_split(self.size)) for piece in flat.split(_PIECE_BYTES // flat.element_size())]
        received = [[torch.empty_like(slices[self.rank]) for _ in self.ranks] for slices in pieces]
        arriving = [[self._receive(parts[r], r, reduce_tag) for r in self._others()] for parts in received]
        moving = [self._receive(slices[r], r, gather_tag) for slices in pieces for r in self._others()]
        moving += [self._send(slices[r], r, reduce_tag) for slices in pieces for r in self._others()]
        for slices, parts, transfers in zip(pieces, received, arriving, strict=True):
            own = parts[self.rank] = slices[self.rank]
            _wait_all(transfers)
            own.copy_(_reduce(parts, operation))
            moving += [self._send(own, r, gather_tag) for r in self._others()]
        _wait_all(moving)

    def reduce_scatter(self, out: Tensor, blocks: Sequence[Tensor], operation: str) -> None:
        """Reduce all ranks' blocks for this rank into `out`."""
        own = blocks[self.rank]
        received = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.size)]
        self.all_to_all(received, blocks)
        out.copy_(_reduce(received, operation).view(out.shape))

    def all_gather(self, out: Sequence[Tensor], tensor: Tensor) -> None:
        """Copy rank r's tensor into out[r]."""
        self.all_to_all(out, [tensor] * self.size)

    def all_to_all(self, out: Sequence[Tensor], blocks: Sequence[Tensor]) -> None:
        """Send block r to rank r, and receive rank r's block into out[r]."""
        tag = next(self._tags)
        transfers = [self._receive(out[rank], rank, tag) for rank in self._others()]
        transfers += [self._send(blocks[rank], rank, tag) for rank in self._others()]
        if out[self.rank].data_ptr() != blocks[self.rank].data_ptr():
            out[self.rank].copy_(blocks[self.rank])
        _wait_all(transfers)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy the root's tensor into everyone's; a long one in slices that all ranks forward."""
        flat = tensor.view(-1)
        if self.size > 2 and flat.nbytes > EAGER_BYTES:
            slices = list(flat.tensor_split(self.size))
            self.scatter(slices[self.rank], slices, root)
            self.all_gather(slices, slices[self.rank])
            return
        tag = next(self._tags)
        if self.rank == root:
            _wait_all([self._send(flat, rank, tag) for rank in self._others()])
        else:
            self._receive(flat, root, tag).wait()

    def gather(self, out: Sequence[Tensor], tensor: Tensor, root: int) -> None:
        """Copy rank r's tensor into the root's out[r]; `out` is empty elsewhere."""
        tag = next(self._tags)
        if self.rank == root:
            arriving = [self._receive(out[rank], rank, tag) for rank in self._others()]
            out[root].copy_(tensor)
            _wait_all(arriving)
        else:
            self._send(tensor, root, tag).wait()

    def scatter(self, out: Tensor, blocks: Sequence[Tensor], root: int) -> None:
        """Copy the root's block for this rank into `out`."""
        tag = next(self._tags)
        if self.rank == root:
            leaving = [self._send(blocks[rank], rank, tag) for rank in self._others()]
            if out.data_ptr() != blocks[root].data_ptr():
                out.copy_(blocks[root])
            _wait_all(leaving)
        else:
            self._receive(out, root, tag).wait()

    def reduce_(self, tensor: Tensor, root: int, operation: str) -> None:
        """Reduce all ranks' tensors into the root's."""
        gathered = [torch.empty_like(tensor) for _ in self.ranks] if self.rank == root else []
        self.gather(gathered, tensor, root)
        if gathered:
            tensor.copy_(_reduce(gathered, operation))

    def barrier(self) -> None:
        """Return once all ranks have called it."""
        byte = torch.zeros(1, dtype=torch.uint8)
        self.all_gather([torch.empty_like(byte) for _ in self.ranks], byte)

    def _others(self) -> list[int]:
        """The other ranks, the next one first, so that not all send to the same one."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def _send(self, tensor: Tensor, to: int, tag: int) -> Transfer:
        return self._mesh.connections[self.ranks[to]].send(self._stream, tag, _bytes_of(tensor))

    def _receive(self, tensor: Tensor, source: int, tag: int) -> Transfer:
        return self._mesh.connections[self.ranks[source]].receive(self._stream, tag, _bytes_of(tensor))


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor in host memory; writable, even if it is empty."""
    flat = tensor.detach().reshape(-1)
    assert flat.numel() == 0 or flat.data_ptr() == tensor.data_ptr(), "contiguous"
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(bytearray())


def _wait_all(transfers: Sequence[Transfer]) -> None:
    """Wait in the order of completion: a lost rank is reported even if another one is merely late."""
    ended: queue.SimpleQueue[Transfer] = queue.SimpleQueue()
    for transfer in transfers:
        transfer.add_done_callback(ended.put)
    for _ in transfers:
        ended.get().wait()


def _reduce(tensors: Sequence[Tensor], operation: str) -> Tensor:
    """Reduce in the order of ranks."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        _REDUCE[operation](total, tensor)
    return total.div_(len(tensors)) if operation == "AVG" else total


# -- torch's interface


def use_mesh(mesh: Mesh) -> None:
    """Make process groups use `mesh` from now on, and register the backend "tls" with torch."""
    global _mesh
    _mesh = mesh
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create_group, extended_api=True, devices=["cpu", "cuda"])


def current_mesh() -> Mesh | None:
    """Return the mesh that process groups use; None without one."""
    return _mesh


def _create_group(options: Any, _: Any) -> MeshProcessGroup:
    if _mesh is None:
        raise LinkError(f"the backend {BACKEND!r} needs a mesh. Join with join_processes first")
    ranks = list(options.global_ranks_in_group) or list(range(_mesh.world))
    return MeshProcessGroup(_mesh, ranks, str(options.group_id), options.timeout)


class _Work(dist.Work):
    """Handle of an operation. default: timeout of `wait`."""

    def __init__(self, result: Sequence[Tensor], default: timedelta) -> None:
        super().__init__()
        self._result, self._default = list(result), default
        self._done = threading.Event()
        self._error: Exception | None = None
        # A future accepts tensors of a GPU as its value only if it was created for that GPU.
        devices: list[int | str | torch.device] = [*{t.device for t in result if t.is_cuda}]
        self._future: torch.futures.Future = torch.futures.Future(devices=devices or None)

    def finish(self, error: Exception | None = None) -> None:
        """End the operation; an error is raised as DistBackendError, as by torch's own backends."""
        if error is not None:
            self._error = dist.DistBackendError(str(error))
            self._error.__cause__ = error
        self._done.set()
        if self._error is not None:
            self._future.set_exception(self._error)
        else:
            self._future.set_result(self._result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit_s = (timeout if timeout is not None and timeout > timedelta(0) else self._default).total_seconds()
        if not self._done.wait(limit_s):
            raise dist.DistBackendError(f"a collective of torch.distributed timed out after {limit_s:g} s")
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
    """torch's interface to `Collectives`.

    Collectives run in order on one thread of the group; point-to-point messages go to the mesh at once. The caller's
    thread, which knows its CUDA stream, copies tensors on a GPU and non-contiguous ones to host memory.

    Args:
        mesh: This process's mesh.
        ranks: Global ranks.
        name: The group's name in torch.
        timeout: Default timeout of operations.
    """

    def __init__(self, mesh: Mesh, ranks: Sequence[int], name: str, timeout: timedelta) -> None:
        super().__init__(list(ranks).index(mesh.rank), len(ranks))
        text = f"{name} {','.join(map(str, ranks))}"
        stream = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
        self._ops = Collectives(mesh, ranks, stream)
        self._timeout = timeout
        self._name, self._description = name, ""
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], _Work] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def getBackendName(self) -> str:
        return BACKEND

    # torch's base class would look up names in C++ backends, which this group does not have.

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
        self._tasks.put(None)  # ends the thread once earlier operations are done

    abort = shutdown

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        return self.allreduce_coalesced(tensors[:1], opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        name = _operation(opts)

        def work(outputs: list[Tensor]) -> None:
            for output in outputs:
                self._ops.all_reduce_(output, name)

        return self._run(tensors, work)

    def reduce(self, tensors: list[Tensor], opts: Any) -> _Work:
        name = _operation(opts)
        return self._run(tensors, lambda out: self._ops.reduce_(out[0], opts.rootRank, name))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Work:
        return self._run(tensors, lambda out: self._ops.broadcast(out[0], opts.rootRank))

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> _Work:
        host = _to_host(tensors[0])
        return self._run(outputs[0], lambda out: self._ops.all_gather(out, host))

    def allgather_coalesced(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> _Work:
        hosts = [_to_host(tensor) for tensor in tensors]

        def work(out: list[Tensor]) -> None:
            for i, host in enumerate(hosts):
                self._ops.all_gather(out[i :: len(hosts)], host)

        return self._run([tensor for of_rank in outputs for tensor in of_rank], work)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> _Work:
        host = _to_host(tensor).view(-1)
        return self._run([output], lambda out: self._ops.all_gather(list(out[0].view(-1).chunk(self.size())), host))

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> _Work:
        name, blocks = _operation(opts), [_to_host(tensor) for tensor in inputs[0]]
        return self._run(outputs, lambda out: self._ops.reduce_scatter(out[0], blocks, name))

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> _Work:
        name, blocks = _operation(opts), list(_to_host(tensor).view(-1).chunk(self.size()))
        return self._run([output], lambda out: self._ops.reduce_scatter(out[0], blocks, name))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> _Work:
        blocks = [_to_host(tensor) for tensor in inputs]
        return self._run(outputs, lambda out: self._ops.all_to_all(out, blocks))

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, out_sizes: list[int], sizes: list[int], opts: Any = None
    ) -> _Work:
        blocks = _split(_to_host(tensor), sizes, self.size())
        return self._run([output], lambda out: self._ops.all_to_all(_split(out[0], out_sizes, self.size()), blocks))

    def gather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> _Work:
        host = _to_host(tensors[0])
        return self._run(outputs[0] if outputs else [], lambda out: self._ops.gather(out, host, opts.rootRank))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> _Work:
        blocks = [_to_host(tensor) for tensor in inputs[0]] if inputs else []
        return self._run(outputs, lambda out: self._ops.scatter(out[0], blocks, opts.rootRank))

    def barrier(self, opts: Any = None) -> _Work:
        return self._run([], lambda _: self._ops.barrier())

    # names before torch 2.13
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> _Work:
        work = _Work(tensors, self._timeout)
        transfer = self._ops.send(_to_host(tensors[0]), to, tag)
        transfer.add_done_callback(lambda transfer: work.finish(transfer.error))
        return work

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> _Work:
        tensor, work = tensors[0], _Work(tensors, self._timeout)
        host = torch.empty(tensor.shape, dtype=tensor.dtype) if _needs_copy(tensor) else tensor

        def on_received(transfer: Transfer) -> None:
            if transfer.error is None and host is not tensor:
                with torch.inference_mode():  # as in `_run_tasks`
                    tensor.copy_(host)
            work.finish(transfer.error)

        self._ops.receive(host, source, tag).add_done_callback(on_received)
        return work

    def _run(self, outputs: Sequence[Tensor], call: Callable[[list[Tensor]], Any]) -> _Work:
        """Run `call` on the group's thread, with host copies of `outputs` where these cannot be used directly."""
        work = _Work(outputs, self._timeout)
        staged = [_to_host(tensor) for tensor in outputs]

        def task() -> None:
            call(staged)
            for tensor, host in zip(outputs, staged, strict=True):
                if host is not tensor:
                    tensor.copy_(host)

        if self._thread is None:
            self._thread = threading.Thread(target=self._run_tasks, name="pipecomp-collectives", daemon=True)
            self._thread.start()
        self._tasks.put((task, work))
        return work

    def _run_tasks(self) -> None:
        while (item := self._tasks.get()) is not None:
            task, work = item
            try:
                # Autograd would refuse in-place changes of parameters, and of inference tensors, on this thread.
                with torch.inference_mode():
                    task()
            except Exception as error:
                work.finish(error)
            else:
                work.finish()


def _needs_copy(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu" or not tensor.is_contiguous()


def _to_host(tensor: Tensor) -> Tensor:
    """The tensor itself if it is contiguous and in host memory; otherwise a copy."""
    return tensor.detach().cpu().contiguous() if _needs_copy(tensor) else tensor


def _split(tensor: Tensor, sizes: Sequence[int], parts: int) -> list[Tensor]:
    return list(tensor.split(list(sizes)) if sizes else tensor.chunk(parts))


def _operation(opts: Any) -> str:
    """The name of the reduction; LinkError if it is not supported."""
    if opts is None:
        return "SUM"
    name = next((name for name in _REDUCE if opts.reduceOp == getattr(dist.ReduceOp, name)), None)
    if name is None:
        raise LinkError(f"backend {BACKEND!r} does not reduce with {opts.reduceOp}; it supports {', '.join(_REDUCE)}")
    return name
