"""Preemption: after a signal a run ends after its current step, with a checkpoint, and can be resumed.

Schedulers send SIGTERM some time before they reclaim a machine, Slurm SIGUSR1 if asked to; Ctrl-C is SIGINT, a closed
terminal SIGHUP. SIGHUP and SIGUSR1 keep another handler that they have, such as nohup's. A thread receives the signals,
also while the main thread waits in a collective. After each step the ranks agree whether one of them has received one;
then all save, close, and exit with `REQUEUE_STATUS`. A second signal of the same kind ends the process at once.
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
LOST_STATUS = 13  # of a rank that has lost another one, or its launcher
LAUNCHER_GONE = 1000  # value of `wanted`, above all signals
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_UNLESS_HANDLED = (signal.SIGHUP, signal.SIGUSR1)
_SAME_S = 1.0  # launchers forward a signal that the process has received itself
_READ_S = 5.0  # for the thread to read a signal on a busy machine
_LEAVE_S = 10.0  # for the interpreter to exit after everything is saved

_current: Interruption | None = None


class Interrupted(SystemExit):
    """Everything is saved, and the process exits with `REQUEUE_STATUS`. reason: the signal and its rank."""

    def __init__(self, reason: str) -> None:
        super().__init__(REQUEUE_STATUS)
        self.reason = reason


class Interruption:
    """Records signals during a `with` block on the main thread; on other threads it does nothing.

    Args:
        active: Whether the run can save. Otherwise signals keep their handlers.
    """

    def __init__(self, *, active: bool = True) -> None:
        self._active = active and threading.current_thread() is threading.main_thread()
        self._wanted, self._noticed = 0, False
        self._since: dict[int, float] = {}  # time of the first of each kind
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
        self._before = {number: signal.signal(number, _noted) for number in stop_signals()}
        self._fd_before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(read,), name="pipecomp-signals", daemon=True).start()
        _current = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _current
        if self._pipe is None or isinstance(error, Interrupted):
            return  # later signals must not disturb the interpreter's exit
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._pipe[1])  # which ends the thread
        self._pipe = _current = None

    @property
    def wanted(self) -> int:
        """First signal that this process has received, or LAUNCHER_GONE; 0 for none."""
        deadline = time.monotonic() + _READ_S
        while self._noticed and not self._wanted and self._leaving is None and time.monotonic() < deadline:
            time.sleep(0.001)  # Python's handler has run, and the thread has not read the pipe yet
        return self._wanted

    def ask(self, number: int, *, why: str) -> None:
        """Request the end of the run. number: The value for `wanted` if this is the first request."""
        self._since.setdefault(number, time.monotonic())
        if not self._wanted:
            self._wanted = number
            say_here(f"{why}: the run ends after this step, with a checkpoint")

    def decide(self, wanted: Sequence[int]) -> str | None:
        """Return why the run ends, None if it continues. wanted: Values of all ranks, by rank."""
        return next((f"{_name(number)} on rank {rank}" for rank, number in enumerate(wanted) if number), None)

    def agree(self, group: Any) -> str | None:
        """Decide together with all other ranks, which must all call this. group: All ranks, for CPU tensors."""
        if not self._active:
            return None
        import torch  # here, so that recipes can install handlers before the slow import
        import torch.distributed as dist

        wanted = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
        wanted[dist.get_rank(group)] = self.wanted
        dist.all_reduce(wanted, group=group)
        return self.decide(wanted.tolist())

    def leave(self, reason: str) -> Interrupted:
        """Wait until every rank has saved and closed; returns the exception to raise. Ignores signals for a while."""
        import torch.distributed as dist

        dist.barrier()  # a launcher may kill all ranks once the first one has exited
        self._leaving = time.monotonic()
        return Interrupted(reason)

    def _watch(self, read: int) -> None:
        while data := os.read(read, 1):
            if data[0] in self._before:
                self._received(data[0])
        os.close(read)

    def _received(self, number: int) -> None:
        now = time.monotonic()
        if self._leaving is not None and now - self._leaving < _LEAVE_S:
            return
        if number == signal.SIGHUP:
            from pipecomp.utils.tables import outlast_readers  # here: rich takes time to import

            outlast_readers()  # the terminal may be gone
        if now - self._since.get(number, now) > _SAME_S:
            say_here(f"{_name(number)} again: it ends here")
            os._exit(128 + number)
        self.ask(number, why=f"got {_name(number)}")


def stop_signals() -> list[signal.Signals]:
    """Return the signals that end a run: SIGTERM, SIGINT, and of SIGHUP and SIGUSR1 those without a handler."""
    free = [number for number in _UNLESS_HANDLED if signal.getsignal(number) is signal.SIG_DFL]
    return [*_SIGNALS, *free]


def current_interruption() -> Interruption | None:
    """Return the active instance, None outside of its `with` block."""
    return _current


def end_quietly() -> None:
    """Let Ctrl-C end this process without a traceback, unless SIGINT is ignored."""
    _replace_handler(signal.default_int_handler, signal.SIG_DFL)


def end_with_exception() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, Python's default."""
    _replace_handler(signal.SIG_DFL, signal.default_int_handler)


def _replace_handler(before: Any, after: Any) -> None:
    if signal.getsignal(signal.SIGINT) is before:
        signal.signal(signal.SIGINT, after)


def _noted(number: int, frame: FrameType | None) -> None:
    """Note a signal, which the thread reads from the wakeup pipe."""
    if _current is not None:
        _current._noticed = True


def _name(number: int) -> str:
    return "the launcher ended" if number == LAUNCHER_GONE else signal.Signals(number).name


def say_here(text: str) -> None:
    """Print a line with this rank's number to standard error, on each rank that calls this."""
    rank = os.environ.get("RANK", "0")
    sys.stderr.write(f"pipecomp: rank {rank}: {text}\n")  # one write, so that lines of other threads do not mix in
    sys.stderr.flush()


def _in_forked_child() -> None:
    """Restore the handlers: signals to a forked child, such as a data loader's worker, do not concern the run."""
    global _current
    if _current is not None:
        signal.set_wakeup_fd(-1)
        for number, handler in _current._before.items():
            signal.signal(number, handler)
        _current = None


os.register_at_fork(after_in_child=_in_forked_child)
