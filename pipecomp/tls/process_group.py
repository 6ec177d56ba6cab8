"""Collectives on host memory over a mesh: every rank talks to every other one, and no byte is sent twice.

A long sum goes in two halves, as a reduce-scatter and an all-gather of 1/n of the values each, so that every rank sends
2 (n - 1)/n of them, as in a ring, but waits for two messages rather than 2 (n - 1). All ranks add in the order of their
ranks, so that all have the same bits.
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
from pipecomp.tls.queues import Transfer

_PIECE_BYTES = 1 << 22
_P2P = 1 << 62  # tags of messages between two ranks; below, collectives count theirs
_REDUCE: dict[str, Any] = {
    "SUM": torch.Tensor.add_,
    "AVG": torch.Tensor.add_,
    "PRODUCT": torch.Tensor.mul_,
    "BAND": torch.Tensor.bitwise_and_,
    "BOR": torch.Tensor.bitwise_or_,
    "BXOR": torch.Tensor.bitwise_xor_,
}
OPERATIONS = (*_REDUCE, "MIN", "MAX")


def buffer(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory; they may be written, even if there are none."""
    flat = tensor.detach().reshape(-1)
    assert flat.numel() == 0 or flat.data_ptr() == tensor.data_ptr(), "contiguous"
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(bytearray())


class Collectives:
    """Of some ranks of a mesh; all of them must make the same calls in the same order.

    ranks: global ones; places below are among them. stream: tells these messages from those of other groups.
    """

    def __init__(self, mesh: Mesh, ranks: Sequence[int], stream: int) -> None:
        self.ranks, self.place = list(ranks), list(ranks).index(mesh.rank)
        self.size = len(self.ranks)
        self._mesh, self._stream = mesh, stream
        self._tags = itertools.count()

    # -- between two

    def send(self, tensor: Tensor, to: int, tag: int) -> Transfer:
        """Queue a contiguous tensor for place `to`."""
        return self._send(buffer(tensor), to, _P2P + tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Transfer:
        """Be ready for a tensor of the same size from place `source`."""
        return self._receive(buffer(tensor), source, _P2P + tag)

    # -- among all; tensors are contiguous, and blocks are in the order of places

    def all_reduce_(self, tensor: Tensor, operation: str) -> None:
        """Put the sum of all, or what else `operation` says, into `tensor`."""
        flat = tensor.view(-1)
        if buffer(flat).nbytes <= EAGER_BYTES:
            everyone = [torch.empty_like(flat) for _ in self.ranks]
            self.all_gather(everyone, flat)
            flat.copy_(_reduced(everyone, operation))
            return
        # In pieces: while one is added up and passed on, the next are on their way. The messages of each half have one
        # tag, and so keep their order. Nobody passes on a slice before this rank's part of it has arrived there.
        adding, passing = next(self._tags), next(self._tags)
        pieces = [list(piece.tensor_split(self.size)) for piece in flat.split(_PIECE_BYTES // flat.element_size())]
        received = [[torch.empty_like(slices[self.place]) for _ in self.ranks] for slices in pieces]
        arriving = [[self._receive(buffer(r[p]), p, adding) for p in self._others()] for r in received]
        moving = [self._receive(buffer(slices[p]), p, passing) for slices in pieces for p in self._others()]
        moving += [self._send(buffer(slices[p]), p, adding) for slices in pieces for p in self._others()]
        for slices, parts, transfers in zip(pieces, received, arriving, strict=True):
            mine = slices[self.place]
            parts[self.place] = mine
            _finish(transfers)
            mine.copy_(_reduced(parts, operation))
            moving += [self._send(buffer(mine), p, passing) for p in self._others()]
        _finish(moving)

    def reduce_scatter(self, out: Tensor, blocks: Sequence[Tensor], operation: str) -> None:
        """Put the sum of everyone's blocks for this place into `out`."""
        own = blocks[self.place]
        received = [own if place == self.place else torch.empty_like(own) for place in range(self.size)]
        self.all_to_all(received, blocks)
        out.copy_(_reduced(received, operation).view(out.shape))

    def all_gather(self, out: Sequence[Tensor], tensor: Tensor) -> None:
        """Put everyone's tensor into `out`."""
        self.all_to_all(out, [tensor] * self.size)

    def all_to_all(self, out: Sequence[Tensor], blocks: Sequence[Tensor]) -> None:
        """Send block p to place p, and put what place p sends into out[p]."""
        tag = next(self._tags)
        arriving = [self._receive(buffer(out[place]), place, tag) for place in self._others()]
        leaving = [self._send(buffer(blocks[place]), place, tag) for place in self._others()]
        if out[self.place].data_ptr() != blocks[self.place].data_ptr():
            out[self.place].copy_(blocks[self.place])
        _finish(arriving + leaving)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Put the root's tensor into everyone's: in slices that all pass on, where it is long."""
        flat = tensor.view(-1)
        if self.size > 2 and buffer(flat).nbytes > EAGER_BYTES:
            slices = list(flat.tensor_split(self.size))
            self.scatter(slices[self.place], slices, root)
            self.all_gather(slices, slices[self.place])
            return
        tag = next(self._tags)
        if self.place == root:
            _finish([self._send(buffer(flat), place, tag) for place in self._others()])
        else:
            self._receive(buffer(flat), root, tag).wait()

    def gather(self, out: Sequence[Tensor], tensor: Tensor, root: int) -> None:
        """Put everyone's tensor into the root's `out`, which is empty elsewhere."""
        tag = next(self._tags)
        if self.place == root:
            arriving = [self._receive(buffer(out[place]), place, tag) for place in self._others()]
            out[root].copy_(tensor)
            _finish(arriving)
        else:
            self._send(buffer(tensor), root, tag).wait()

    def scatter(self, out: Tensor, blocks: Sequence[Tensor], root: int) -> None:
        """Put the root's block for this place into `out`."""
        tag = next(self._tags)
        if self.place == root:
            leaving = [self._send(buffer(blocks[place]), place, tag) for place in self._others()]
            if out.data_ptr() != blocks[root].data_ptr():
                out.copy_(blocks[root])
            _finish(leaving)
        else:
            self._receive(buffer(out), root, tag).wait()

    def reduce_(self, tensor: Tensor, root: int, operation: str) -> None:
        """Put the sum of all into the root's tensor."""
        everyone = [torch.empty_like(tensor) for _ in self.ranks] if self.place == root else []
        self.gather(everyone, tensor, root)
        if everyone:
            tensor.copy_(_reduced(everyone, operation))

    def barrier(self) -> None:
        """Return when all have called it."""
        byte = torch.zeros(1, dtype=torch.uint8)
        self.all_gather([torch.empty_like(byte) for _ in self.ranks], byte)

    # -- messages

    def _others(self) -> list[int]:
        """The other places, the next one first, so that not all send to the same one."""
        return [(self.place + i) % self.size for i in range(1, self.size)]

    def _send(self, view: memoryview, to: int, tag: int) -> Transfer:
        return self._mesh.connections[self.ranks[to]].send(self._stream, tag, view)

    def _receive(self, view: memoryview, source: int, tag: int) -> Transfer:
        return self._mesh.connections[self.ranks[source]].receive(self._stream, tag, view)


def _finish(transfers: Sequence[Transfer]) -> None:
    """Wait for all in the order in which they end: a rank that is lost is told though another one comes much later."""
    ended: queue.SimpleQueue[Transfer] = queue.SimpleQueue()
    for transfer in transfers:
        transfer.then(ended.put)
    for _ in transfers:
        ended.get().wait()


def _reduced(tensors: Sequence[Tensor], operation: str) -> Tensor:
    """In the order of places."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        if operation in ("MIN", "MAX"):
            combine = torch.minimum if operation == "MIN" else torch.maximum
            combine(total, tensor, out=total)
        else:
            _REDUCE[operation](total, tensor)
    return total.div_(len(tensors)) if operation == "AVG" else total


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
