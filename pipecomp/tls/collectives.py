"""Collectives on host memory over a mesh: every rank talks to every other one, and no byte is sent twice.

A long sum goes in two halves, as a reduce-scatter and an all-gather of 1/n of the values each, so that every rank sends
2 (n - 1)/n of them, as in a ring, but waits for two messages rather than 2 (n - 1). All ranks add in the order of their
ranks, so that all have the same bits.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipecomp.tls.frames import EAGER_BYTES
from pipecomp.tls.mesh import Mesh
from pipecomp.tls.transfer import Transfer

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
