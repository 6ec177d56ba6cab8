"""Ranks that are threads of one process, for tests and for measuring a method's error without a network."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipecomp.allreduce.group import Group, Pending

Mail = dict[tuple[int, int], "queue.SimpleQueue[Tensor]"]


class _Arriving:
    """Something that `Pending` can wait for."""

    def __init__(self, mail: queue.SimpleQueue[Tensor], target: Tensor, timeout_s: float) -> None:
        self._mail, self._target, self._timeout_s = mail, target, timeout_s

    def wait(self) -> None:
        """Fill the target; RuntimeError as torch raises it."""
        try:
            found = self._mail.get(timeout=self._timeout_s)
        except queue.Empty:
            raise RuntimeError(f"nothing arrived within {self._timeout_s:g} s") from None
        if found.numel() != self._target.numel():
            raise RuntimeError(f"{found.numel()} bytes arrived, {self._target.numel()} were expected")
        self._target.copy_(found)


class LoopbackGroup(Group):
    """Rank `rank` of `size` threads that share `mail`."""

    def __init__(self, rank: int, size: int, mail: Mail, *, timeout_s: float = 30.0) -> None:
        self.bytes_sent = 0
        self.ranks, self.rank = list(range(size)), rank
        self._mail, self._timeout_s = mail, timeout_s

    def exchange(self, outgoing: list[Tensor], incoming: list[int]) -> Pending:
        """As Group's: bytes are copied at once and wait in a queue."""
        received = [torch.empty(count, dtype=torch.uint8) for count in incoming]
        received[self.rank] = outgoing[self.rank]
        pending = Pending(received)
        for r in self._others():
            if outgoing[r].numel():
                self._mail[self.rank, r].put(outgoing[r].clone())
                self.bytes_sent += outgoing[r].numel()
            if incoming[r]:
                pending.receives.append((r, _Arriving(self._mail[r, self.rank], received[r], self._timeout_s)))
        return pending


def run_threads(size: int, function: Callable[[LoopbackGroup], Any]) -> list[Any]:
    """What `function(group)` returned on each of `size` threads; the first error is raised."""
    mail: Mail = {(a, b): queue.SimpleQueue() for a in range(size) for b in range(size)}
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(LoopbackGroup(rank, size, mail))
        except BaseException as error:  # raised again below, in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
