"""Preemption: after a signal a run ends after its current step, with a checkpoint, and can be resumed.

Schedulers send SIGTERM some time before they reclaim a machine, Slurm SIGUSR1 if asked to; Ctrl-C is SIGINT, a closed
terminal SIGHUP. SIGHUP and SIGUSR1 keep another handler that they have, such as nohup's. A thread receives the signals,
also while the main thread waits in a collective. After each step the ranks agree whether one of them has received one;
then all save, close, and exit with `REQUEUE_STATUS`. A second signal of the same kind ends the process at once.

Under a launcher that starts ranks again, a signal other than Ctrl-C is about one machine: it leaves, its ranks exit
with `LEFT_STATUS`, and the others with `RECUT_STATUS`, so that they start again without it.

A signal that ends a rank outside of such a run, or that has no place to save, is reported to the other ranks first.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

REQUEUE_STATUS = os.EX_TEMPFAIL  # 75: "temporary failure, the user is invited to retry"
LEAVING = "PIPECOMP_LEAVING"  # a file in which the ranks name the machines that leave, of a launcher on each machine
GO_ON_WITHOUT = "the launcher decides whether the others go on"
NEW_CUT = "the launcher starts the ranks again with a new cut of the model"
LOST_STATUS = 13  # of a rank that has lost another one, or its launcher
LEFT_STATUS = 79  # of the ranks of a machine that leaves; the others start again without it
RECUT_STATUS = 80  # and N more: the ranks ask for a new cut of the model, with N more machines
MOST_MORE = 40  # machines at once
LAUNCHER_GONE = 1000  # value of `wanted`, above all signals
_RECUT = 2000  # the same, and N more
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_UNLESS_HANDLED = (signal.SIGHUP, signal.SIGUSR1)
_SAME_S = 1.0  # launchers forward a signal that the process has received itself
_READ_S = 5.0  # for the thread to read a signal on a busy machine
_LEAVE_S = 10.0  # for the interpreter to exit after everything is saved
_REPORT_S = 10.0  # to report a signal to the other ranks

_current: Interruption | None = None
_report: Callable[[str], str] | None = None
_ending = threading.Lock()
_leaving_since: float | None = None


class Interrupted(SystemExit):
    """Everything is saved, and the process exits with `status`. reason: the signal and its rank."""

    def __init__(self, reason: str, status: int = REQUEUE_STATUS) -> None:
        super().__init__(status)
        self.reason = reason


class Interruption:
    """Records signals during a `with` block on the main thread; on other threads it does nothing.

    Args:
        active: Whether the run can save. Otherwise signals keep their handlers.
    """

    def __init__(self, *, active: bool = True) -> None:
        self._active = active and threading.current_thread() is threading.main_thread()
        self._wanted, self._noticed = 0, False
        self._status = REQUEUE_STATUS
        self._since: dict[int, float] = {}  # time of the first of each kind
        self._reader: _SignalReader | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        global _current, _leaving_since
        if not self._active:
            return self
        _leaving_since = None  # another training of a program that has caught the end of the one before
        numbers = stop_signals()
        self._reader = _SignalReader(lambda number: self._received(number) if number in self._before else None)
        self._before = {number: signal.signal(number, _noted) for number in numbers}
        _current = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _current
        if self._reader is None or isinstance(error, Interrupted):
            return  # later signals must not disturb the interpreter's exit
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._reader.close()
        self._reader = _current = None

    @property
    def wanted(self) -> int:
        """First signal that this process has received, or LAUNCHER_GONE; 0 for none."""
        deadline = time.monotonic() + _READ_S
        while self._noticed and not self._wanted and _leaving_since is None and time.monotonic() < deadline:
            time.sleep(0.001)  # Python's handler has run, and the thread has not read the pipe yet
        return self._wanted

    def ask(self, number: int, *, why: str) -> None:
        """Request the end of the run. number: The value for `wanted` if this is the first request."""
        self._since.setdefault(number, time.monotonic())
        if not self._wanted:
            self._wanted = number
            say_here(f"{why}: the ranks end after this step, with a checkpoint")

    def ask_for_new_cut(self, more: int) -> None:
        """Request the end of this start, so that the launcher starts the ranks with `more` machines and a new cut."""
        if not self._wanted:
            self._wanted = _RECUT + min(more, MOST_MORE)

    def decide(self, wanted: Sequence[int]) -> str | None:
        """Return why the run ends, None if it continues. wanted: Values of all ranks, by rank."""
        asked = [(number >= _RECUT, rank, number) for rank, number in enumerate(wanted) if number]
        if not asked:
            return None
        recut, rank, number = min(asked)  # signals first
        if recut:
            self._status = RECUT_STATUS + number - _RECUT
            return NEW_CUT
        reason, left = f"{_name(number)} on rank {rank}", _leaving_machines(wanted)
        if not left:
            return reason
        own = wanted[int(os.environ.get("RANK", "0"))]
        self._status = LEFT_STATUS if 0 < own < LAUNCHER_GONE else RECUT_STATUS
        return f"{reason}; {', '.join(left)} leaves the run, and {GO_ON_WITHOUT}"

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
        begin_exit()
        return Interrupted(reason, self._status)

    def _received(self, number: int) -> None:
        now = time.monotonic()
        if _is_leaving():
            return
        if number == signal.SIGHUP:
            from pipecomp.utils.tables import outlast_readers  # here: rich takes time to import

            outlast_readers()  # the terminal may be gone
        if now - self._since.get(number, now) > _SAME_S and _ending.acquire(blocking=False):
            _end_process(number)
        self.ask(number, why=f"got {_name(number)}")


def _leaving_machines(wanted: Sequence[int]) -> list[str]:
    """Return the machines that leave the run, none if all of it ends, and name them in the file LEAVING.

    wanted: values of all ranks, by rank.
    """
    from pipecomp.distributed.launch_env import machine_names  # here: it imports this module

    names = machine_names(len(wanted))
    left = list(dict.fromkeys(name for name, number in zip(names, wanted, strict=False) if 0 < number < _RECUT))
    if signal.SIGINT in wanted or len(left) == len(set(names)):
        return []
    path = os.environ.get(LEAVING)
    if path and os.environ.get("LOCAL_RANK", "0") == "0":
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(left))
    return left


class _SignalReader:
    """Calls a function on a thread of its own with the number of each signal that has a handler in Python."""

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self._on_signal = on_signal
        read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._read, args=(read,), name="pipecomp-signals", daemon=True).start()

    def _read(self, read: int) -> None:
        while data := os.read(read, 1):
            self._on_signal(data[0])
        os.close(read)

    def close(self) -> None:
        """End the thread, and give the signals back to the one before."""
        signal.set_wakeup_fd(self._before)
        os.close(self._write)


def stop_signals() -> list[signal.Signals]:
    """Return the signals that end a run: SIGTERM, SIGINT, and of SIGHUP and SIGUSR1 those without a handler."""
    free = [number for number in _UNLESS_HANDLED if signal.getsignal(number) in (signal.SIG_DFL, _on_last_signal)]
    return [*_SIGNALS, *free]


# -- the end of a process


def report_signals(report: Callable[[str], str]) -> None:
    """Let a signal that ends this process be reported to the other ranks first; call this on the main thread.

    It concerns SIGTERM, SIGHUP and SIGUSR1, as far as they have no handler; a handler that is set later comes first. On
    another thread signals stay as they are.

    Args:
        report: Takes the reason, reports it, and returns what else is known, "" for nothing.
    """
    global _report
    _report = report
    if threading.current_thread() is not threading.main_thread():
        return
    free = [number for number in (signal.SIGTERM, *_UNLESS_HANDLED) if signal.getsignal(number) is signal.SIG_DFL]
    for number in free:
        signal.signal(number, _on_last_signal)
    if free and _current is None:
        others = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(others)
        if others == -1:  # else the handler alone does it, once the main thread runs Python's code
            _SignalReader(_on_last_signal)


def wait_if_ending() -> None:
    """Wait for the end of this process if a signal ends it; otherwise return at once."""
    if _ending.locked():
        time.sleep(2 * _REPORT_S)


def begin_exit() -> None:
    """Note that everything is saved: for some seconds signals do not keep the process from its exit."""
    global _leaving_since
    _leaving_since = time.monotonic()


def _is_leaving() -> bool:
    return _leaving_since is not None and time.monotonic() - _leaving_since < _LEAVE_S


def _on_last_signal(number: int, frame: FrameType | None = None) -> None:
    """End this process after a report, on a thread: the main thread may hold a lock that the report needs."""
    if signal.getsignal(number) is _on_last_signal and not _is_leaving() and _ending.acquire(blocking=False):
        threading.Thread(target=_end_process, args=(number,), name="pipecomp-end", daemon=True).start()


def _end_process(number: int) -> None:
    name, known = _name(number), [""]
    say_here(f"{f'got {name}' if _current is None else f'{name} again'}: it ends here")
    if _report is not None:
        report = _report
        thread = threading.Thread(target=lambda: known.append(report(f"it got {name}")), daemon=True)
        thread.start()
        thread.join(_REPORT_S)
        if known[-1]:
            say_here(known[-1])
    sys.stdout.flush()
    os._exit(128 + number)


@atexit.register
def _ignore_signals() -> None:
    """Ignore stop signals from here on, if this module handles them; the last function to run at exit.

    Note:
        The interpreter restores the default action before the libraries' own cleanup. A signal of a launcher, which
        ends the other ranks after the first one, would replace the exit status by its number.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (*_SIGNALS, *_UNLESS_HANDLED):
            if signal.getsignal(number) in (_noted, _on_last_signal):
                signal.signal(number, signal.SIG_IGN)


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
    for number in (signal.SIGTERM, *_UNLESS_HANDLED):
        if signal.getsignal(number) is _on_last_signal:
            signal.set_wakeup_fd(-1)
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_in_forked_child)
