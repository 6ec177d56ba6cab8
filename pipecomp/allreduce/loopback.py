"""Groups whose ranks are threads of one process, for tests and measurements of a method's error."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipecomp.allreduce.group import Group, Pending

Key = tuple[int, int, int, int]  # from, to, channel, number of the exchange on it
Mail = dict[Key, "queue.SimpleQueue[Tensor]"]


class _MailReceive:
    """A receive that `Pending` waits for."""

    def __init__(self, mail: Mail, key: Key, target: Tensor, timeout_s: float) -> None:
        self._mail, self._key, self._target, self._timeout_s = mail, key, target, timeout_s

    def wait(self) -> None:
        """Fill the target. Raises RuntimeError, as torch does."""
        try:
            message = _box(self._mail, self._key).get(timeout=self._timeout_s)
        except queue.Empty:
            raise RuntimeError(f"nothing arrived within {self._timeout_s:g} s") from None
        del self._mail[self._key]
        if message.numel() != self._target.numel():
            raise RuntimeError(f"{message.numel()} bytes arrived, {self._target.numel()} were expected")
        self._target.copy_(message)


def _box(mail: Mail, key: Key) -> queue.SimpleQueue[Tensor]:
    return mail.setdefault(key, queue.SimpleQueue())


class LoopbackGroup(Group):
    """The group of rank `rank` of `size` threads that share `mail`."""

    def __init__(self, rank: int, size: int, mail: Mail, *, timeout_s: float = 30.0) -> None:
        self.bytes_sent = 0
        self.give_way = None
        self.process_group = None
        self.ranks, self.rank = list(range(size)), rank
        self._mail, self._timeout_s, self._exchanges = mail, timeout_s, 0
        self._own_channel, self._channels = 0, itertools.count(1)

    def duplicate(self) -> LoopbackGroup:
        """Return a group with separate messages."""
        other = LoopbackGroup(self.rank, self.size, self._mail, timeout_s=self._timeout_s)
        other._own_channel, other._channels = next(self._channels), self._channels
        return other

    def exchange(self, outgoing: list[Tensor], incoming: list[int]) -> Pending:
        """Send and receive as `Group.exchange`; bytes are copied at once and queued."""
        place = (self._own_channel, self._exchanges)
        self._exchanges += 1
        received = [torch.empty(count, dtype=torch.uint8) for count in incoming]
        received[self.rank] = outgoing[self.rank]
        pending = Pending(received)
        for r in self._others():
            if outgoing[r].numel():
                _box(self._mail, (self.rank, r, *place)).put(outgoing[r].clone())
                self.bytes_sent += outgoing[r].numel()
            if incoming[r]:
                arriving = _MailReceive(self._mail, (r, self.rank, *place), received[r], self._timeout_s)
                pending.receives.append((r, arriving))
        return pending


def run_threads(size: int, function: Callable[[LoopbackGroup], Any]) -> list[Any]:
    """Run `function(group)` on `size` threads; return their results, or raise the first error."""
    mail: Mail = {}
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
