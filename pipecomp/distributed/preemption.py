"""Being asked to stop: a run ends after its current step, with a checkpoint, and can be started again.

Schedulers send SIGTERM some time before they take a machine away, and Ctrl-C is SIGINT. Both are noted by a thread,
so also while the main one waits for another rank in a collective. After each step the ranks agree whether one of them
was asked; then all save, close, and exit with `REQUEUE_STATUS`. The same signal again ends the process at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

REQUEUE_STATUS = os.EX_TEMPFAIL  # 75: "temporary failure, the user is invited to retry"
LAUNCHER_GONE = 1000  # what `wanted` is then; signals are below that
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SAME_S = 1.0  # launchers pass on what the process has got itself
_LEAVE_S = 10.0  # for the interpreter to end once everything is saved

_current: Interruption | None = None


class Interrupted(SystemExit):
    """Everything is saved, and the process ends with `REQUEUE_STATUS`. reason: who was asked, and how."""

    def __init__(self, reason: str) -> None:
        super().__init__(REQUEUE_STATUS)
        self.reason = reason


class Interruption:
    """Notes SIGTERM and SIGINT while it is entered on the main thread; elsewhere, or if not `active`, does nothing.

    active: whether there is a place to save to. Without it, signals do what they did before.
    """

    def __init__(self, *, active: bool = True) -> None:
        self._active = active and threading.current_thread() is threading.main_thread()
        self.wanted = 0  # the signal that this process has got, or LAUNCHER_GONE
        self._since: dict[int, float] = {}  # when each was first seen
        self._leaving: float | None = None
        self._pipe: tuple[int, int] | None = None
        self._before: dict[int, Any] = {}
        self._fd_before = -1

    def __enter__(self) -> Interruption:
        global _current
        if not self._active:
            return self
        self._pipe = read, write = os.pipe()
        os.set_blocking(write, False)
        self._before = {number: signal.signal(number, _noted) for number in _SIGNALS}
        self._fd_before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(read,), name="pipecomp-signals", daemon=True).start()
        _current = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _current
        if self._pipe is None or isinstance(error, Interrupted):
            return  # what comes while the interpreter ends must not spoil it
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._pipe[1])  # which ends the thread
        self._pipe = _current = None

    def ask(self, number: int, *, why: str) -> None:
        """Note that this process is to stop. number: what `wanted` becomes if it is the first reason."""
        self._since.setdefault(number, time.monotonic())
        if not self.wanted:
            self.wanted = number
            say_here(f"{why}: the run ends after this step, with a checkpoint")

    def decide(self, wanted: Sequence[int]) -> str | None:
        """Tell whether the run ends, and why. wanted: of all ranks, by rank, the same on each."""
        return next((f"{_name(number)} on rank {rank}" for rank, number in enumerate(wanted) if number), None)

    def agree(self, group: Any) -> str | None:
        """Decide with all other ranks, which must all call this. group: of all ranks, for tensors in memory."""
        if not self._active:
            return None
        import torch  # here: a process that only watches for signals starts without it
        import torch.distributed as dist

        wanted = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
        wanted[dist.get_rank(group)] = self.wanted
        dist.all_reduce(wanted, group=group)
        return self.decide(wanted.tolist())

    def leave(self, reason: str) -> Interrupted:
        """Wait until every rank has saved and closed; give what to raise. Signals do nothing any more for a while."""
        import torch.distributed as dist

        dist.barrier()  # a launcher ends all ranks when the first one has ended
        self._leaving = time.monotonic()
        return Interrupted(reason)

    def _watch(self, read: int) -> None:
        while data := os.read(read, 1):
            if data[0] in _SIGNALS:
                self._received(data[0])
        os.close(read)

    def _received(self, number: int) -> None:
        now = time.monotonic()
        if self._leaving is not None and now - self._leaving < _LEAVE_S:
            return
        if now - self._since.get(number, now) > _SAME_S:
            say_here(f"{_name(number)} again: it ends here")
            os._exit(128 + number)
        self.ask(number, why=f"got {_name(number)}")


def current_interruption() -> Interruption | None:
    """Give the one that is entered, None if none is."""
    return _current


def end_quietly() -> None:
    """Let Ctrl-C end this process without a traceback, unless its caller has it ignored."""
    _replace_handler(signal.default_int_handler, signal.SIG_DFL)


def end_with_exception() -> None:
    """Let it raise KeyboardInterrupt again, as Python begins with."""
    _replace_handler(signal.SIG_DFL, signal.default_int_handler)


def _replace_handler(before: Any, after: Any) -> None:
    if signal.getsignal(signal.SIGINT) is before:
        signal.signal(signal.SIGINT, after)


def _noted(number: int, frame: FrameType | None) -> None:
    """Do nothing: the thread has it from the system."""


def _name(number: int) -> str:
    return "the launcher ended" if number == LAUNCHER_GONE else signal.Signals(number).name


def say_here(text: str) -> None:
    """Tell it on standard error of each rank that calls this: people at its machine may see no other's."""
    rank = os.environ.get("RANK", "0")
    sys.stderr.write(f"pipecomp: rank {rank}: {text}\n")  # in one piece, whatever other threads write
    sys.stderr.flush()


def _in_forked_child() -> None:
    """Forget it all: signals to a child, as to workers that load data, are no signals to this process."""
    global _current
    if _current is not None:
        signal.set_wakeup_fd(-1)
        for number, handler in _current._before.items():
            signal.signal(number, handler)
        _current = None


os.register_at_fork(after_in_child=_in_forked_child)
