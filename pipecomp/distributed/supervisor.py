"""Processes of a run: started together, watched, and ended without leaving any behind.

The launchers use it for ranks on this machine, over ssh and for `pipecomp up`, and the network lab for its nodes.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import FrameType
from typing import IO, Any, NamedTuple, Protocol

from pipecomp.distributed.launch_env import BEGIN_AFTER, MOST_STARTS
from pipecomp.distributed.preemption import (
    LEFT_STATUS,
    LOST_STATUS,
    MOST_MORE,
    RECUT_STATUS,
    REQUEUE_STATUS,
    stop_signals,
)
from pipecomp.errors import ConfigError, PipecompError
from pipecomp.utils.processes import exit_status, handle_signals

OutputHandler = Callable[[str, str, str], None]  # label of the process, "stdout" or "stderr", line
GO_ON = "Run the same command again: with checkpoints it goes on from the last one"
SSH_FAILED = 255  # ssh's exit status for its own errors
_POLL_S = 0.02
_KILL_S = 10.0


class RankFailedError(PipecompError, RuntimeError):
    """A rank raised or died; the message has its traceback or exit status."""


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """A process to start.

    Attributes:
        label: Name of the process in messages and in front of its output lines.
        command: Program and arguments.
        environment: All of its environment variables.
        input: Bytes for its standard input, which then stays open: forwarded signals follow as bytes, and its end is
            the end of this process. None for an empty input.
        inherited_fds: File descriptors that it inherits.
    """

    label: str
    command: Sequence[str]
    environment: Mapping[str, str]
    input: bytes | None = None
    inherited_fds: tuple[int, ...] = ()


class Ended(NamedTuple):
    """The end of supervised processes.

    Attributes:
        status: 0, or the exit status of the process that failed first.
        statuses: Exit statuses of all processes in the order of starting; None for those that had to be killed.
        stopped: True if a signal has asked this launcher to end.
        remote: Numbers of processes that are connections to other machines.
        interrupted: True if that signal was Ctrl-C.
    """

    status: int
    statuses: tuple[int | None, ...]
    stopped: bool = False
    remote: frozenset[int] = frozenset()
    interrupted: bool = False

    @property
    def is_whole(self) -> bool:
        """True if all ranks have finished, or saved for the same command to go on, as after Ctrl-C."""
        return all(status in (0, REQUEUE_STATUS) for status in self.statuses)

    @property
    def is_loss(self) -> bool:
        """True if ranks or machines were lost, and no rank has ended by an error of its own."""
        failed = [(number, status) for number, status in enumerate(self.statuses) if status]
        return bool(failed) and not self.stopped and all(self._is_lost(number, status) for number, status in failed)

    @property
    def lost(self) -> bool:
        """True if a rank was lost, or is on a machine that has left."""
        return any(status and self._is_lost(number, status) for number, status in enumerate(self.statuses))

    @property
    def left(self) -> frozenset[int]:
        """Numbers of the processes on machines that were told to end."""
        told = (LEFT_STATUS, 128 + signal.SIGTERM)
        return frozenset(number for number, status in enumerate(self.statuses) if status in told)

    @property
    def more(self) -> int | None:
        """Further machines that the ranks ask for with a new cut, 0 for a new cut alone; None if they do not ask."""
        failed = [(number, status) for number, status in enumerate(self.statuses) if status]
        asked = [status - RECUT_STATUS for _, status in failed if 0 <= status - RECUT_STATUS <= MOST_MORE]
        others = [(number, status) for number, status in failed if not 0 <= status - RECUT_STATUS <= MOST_MORE]
        asks = asked and not self.stopped and all(self._is_lost(number, status) for number, status in others)
        return asked[0] if asks else None

    def _is_lost(self, number: int, status: int) -> bool:
        lost = (128 < status < SSH_FAILED) or status in (LOST_STATUS, LEFT_STATUS)
        return lost or (status == SSH_FAILED and number in self.remote)


def final_status(status: int) -> int:
    """Return a launcher's status if it starts no ranks again: one that asks for a start becomes REQUEUE_STATUS."""
    asks = status == LEFT_STATUS or RECUT_STATUS <= status <= RECUT_STATUS + MOST_MORE
    return REQUEUE_STATUS if asks else status


class StartCount:
    """Counts the starts of a run in a row that were lost and reach no newer step.

    The ranks note the step that a start begins at (`launch_env.STARTS`), once they have found it. How far such a start
    comes is known when the next one begins: at a newer step, or not. That is when the ranks end a run without progress
    (`launch_env.check_progress`): a start that is lost later may have trained for long.
    """

    def __init__(self) -> None:
        self._step = -1  # that the latest start has noted
        self._before = 0  # fruitless starts in a row before that one, which count if it is fruitless too
        self._after = 0  # starts after it: they have noted nothing

    def add(self, step: int | None) -> str | None:
        """Count a start; return why the run ends, None if it may start again. step: None if it has noted none."""
        if step is None:
            self._after += 1
        else:
            self._before = 0 if step > self._step else self._before + 1 + self._after
            self._step, self._after = step, 0
        if max(self._before, self._after) < MOST_STARTS:
            return None
        return f"{MOST_STARTS} starts in a row have reached no newer step: the log says why each ended"

    def variables(self) -> dict[str, str]:
        """Return variables for the ranks of the next start."""
        last = self._step >= 0 and self._before + 1 + self._after >= MOST_STARTS
        return {BEGIN_AFTER: str(self._step)} if last else {}

    def ends_at(self, step: int | None) -> bool:
        """Return whether the ranks of a start with these variables end the run if they note this step."""
        return step is not None and bool(self.variables()) and step <= self._step


class ChildProcess(Protocol):
    """The part of `subprocess.Popen` that a supervisor needs."""

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""

    def kill(self) -> None:
        """Send SIGKILL."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end, and return its exit code."""


class Supervisor:
    """Starts processes, watches them, and ends them on leaving a `with` block.

    Args:
        on_line: Called for each output line, from a thread. By default processes inherit this process's output.
        term_s: Seconds between SIGTERM and SIGKILL for processes that still run at the end; 0 to kill at once.
        find_strays: Returns the ids of processes that the supervised ones have started and that still live; they are
            killed at the end.

    Attributes:
        statuses: Exit status of each process in the order of starting, None while it runs; 128 + n after signal n.
        failed: Index of the process that failed first, None if none has.
    """

    def __init__(
        self,
        on_line: OutputHandler | None = None,
        *,
        term_s: float = 0.0,
        find_strays: Callable[[], Iterable[int]] = lambda: (),
    ) -> None:
        self.statuses: list[int | None] = []
        self.failed: int | None = None
        self._on_line, self._term_s, self._find_strays = on_line, term_s, find_strays
        self._children: list[ChildProcess] = []
        self._readers: list[threading.Thread] = []
        self._reading = threading.Lock()
        self._reader_error: Exception | None = None
        self._signals: set[int] = set()
        self._delivered: dict[tuple[int, int], object] = {}

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pids(self) -> set[int]:
        """Ids of the started programs."""
        return {child.pid for child in self._children if isinstance(child, subprocess.Popen)}

    @property
    def status(self) -> int:
        """The exit status of the process that failed first, 0 if none has."""
        return 0 if self.failed is None else self.statuses[self.failed] or 0

    @property
    def stopped(self) -> bool:
        """True if `forward_signals` has passed a signal on."""
        return bool(self._signals)

    def ended(self, remote: Iterable[int] = ()) -> Ended:
        """Return how the processes have ended. remote: see `Ended`."""
        interrupted = signal.SIGINT in self._signals
        return Ended(self.status, tuple(self.statuses), self.stopped, frozenset(remote), interrupted)

    def start(self, spec: ProcessSpec) -> None:
        """Start a program in a session of its own. Raises ConfigError if it cannot be started."""
        output = None if self._on_line is None else subprocess.PIPE
        try:
            # Note: a new session, because Ctrl-C in a terminal signals the whole foreground process group. Ranks get
            # the signal once, from here.
            child = subprocess.Popen(
                spec.command,
                env=dict(spec.environment),
                stdin=subprocess.DEVNULL if spec.input is None else subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=spec.inherited_fds,
                start_new_session=True,
            )
        except OSError as error:
            allowed = f"a program that can be started ({error.strerror})"
            raise ConfigError("command", spec.command[0], allowed) from error
        self.add(child)
        if spec.input:
            _write(child, spec.input)
        for name, stream in (("stdout", child.stdout), ("stderr", child.stderr)):
            if stream is not None:
                reader = threading.Thread(target=self._read, args=(spec.label, name, stream), daemon=True)
                reader.start()
                self._readers.append(reader)
        for number in list(self._signals):
            self._deliver(len(self._children) - 1, number)

    def add(self, child: ChildProcess) -> None:
        """Supervise a process that has been started elsewhere."""
        self._children.append(child)
        self.statuses.append(None)

    def _read(self, label: str, name: str, stream: IO[bytes]) -> None:
        # Universal newlines: progress bars end their lines with carriage returns.
        with io.TextIOWrapper(stream, errors="replace") as lines:
            for line in lines:
                with self._reading:
                    try:
                        if self._reader_error is None and self._on_line is not None:
                            self._on_line(label, name, line.rstrip("\n"))
                    except Exception as error:  # e.g. standard output is closed; the process must not block on its own
                        self._reader_error = error

    @contextlib.contextmanager
    def forward_signals(self) -> Iterator[None]:
        """Pass signals that end a run on to every process during the body; main thread only.

        A second signal of the same kind goes to local programs, ssh among them, which closes the connections.
        """

        def forward(number: int, _: FrameType | None) -> None:
            again = number in self._signals
            self._signals.add(number)
            for index, child in enumerate(self._children):
                if again and isinstance(child, subprocess.Popen):
                    child.send_signal(number)
                else:
                    self._deliver(index, number)

        with handle_signals(forward, *stop_signals()):
            yield

    def _deliver(self, index: int, number: int) -> None:
        # A signal may arrive while a process is started: whoever comes first delivers it, once.
        if self._delivered.setdefault((index, number), mark := object()) is not mark:
            return
        child = self._children[index]
        if isinstance(child, subprocess.Popen):
            if child.stdin is None:
                child.send_signal(number)
            else:
                _write(child, bytes([number]))

    def watch(self, *, grace_s: float, timeout_s: float = math.inf) -> Iterator[float]:
        """Wait until all processes have ended, for `grace_s` after the first failure, or for `timeout_s` in all.

        Yields:
            Seconds since the first failure, 0.0 without one; every 20 ms, and once more after the last process ended.

        Raises:
            Exception: The error that `on_line` raised.
        """
        deadline = time.monotonic() + timeout_s
        failed_at: float | None = None
        while True:
            if self._reader_error is not None:
                raise self._reader_error
            self._poll()
            now = time.monotonic()
            if failed_at is None and self.failed is not None:
                failed_at, deadline = now, min(deadline, now + grace_s)
            yield 0.0 if failed_at is None else now - failed_at
            if None not in self.statuses or time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)

    def _poll(self) -> None:
        for index, child in enumerate(self._children):
            if self.statuses[index] is None and (code := child.poll()) is not None:
                self.statuses[index] = exit_status(code)
                if code and self.failed is None:
                    self.failed = index

    def close(self) -> None:
        """End what still runs, strays included, and wait for the last output lines; safe to call twice."""
        running = [child for child in self._children if child.poll() is None]
        if self._term_s and running:
            for child in running:
                if isinstance(child, subprocess.Popen):
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(child.pid, signal.SIGTERM)
            deadline = time.monotonic() + self._term_s
            while any(child.poll() is None for child in running) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        for child in running:
            if child.poll() is None:
                child.kill()
            child.wait(_KILL_S)
        kill_processes(self._find_strays)
        self._poll()
        for reader in self._readers:
            reader.join(_KILL_S)
        for child in self._children:
            if isinstance(child, subprocess.Popen) and child.stdin is not None:
                child.stdin.close()


def describe_status(status: int, oom_kills: int | None = None) -> str:
    """Describe the exit status of a failed process.

    Args:
        status: 128 + n after signal n.
        oom_kills: Processes of its control group that the kernel has killed for lack of memory meanwhile; None if
            unknown, as on another machine.
    """
    if not 128 < status <= 128 + signal.NSIG:
        return f"failed with exit status {status}"
    try:
        name = signal.Signals(status - 128).name
    except ValueError:
        name = f"signal {status - 128}"
    killed = f"was killed by {name} (exit status {status})"
    if status != 128 + signal.SIGKILL:
        return killed
    if oom_kills:
        return f"{killed}: out of memory, as the kernel's count for this control group tells"
    return f"{killed}; most often that is the kernel's answer to a lack of memory (dmesg shows it)"


def _write(child: subprocess.Popen, data: bytes) -> None:
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended; its status shows why
        os.write(child.stdin.fileno(), data)


def kill_processes(find: Callable[[], Iterable[int]]) -> None:
    """Kill the processes with the ids that `find` returns until it returns none. Raises RankFailedError after 10 s."""
    deadline = time.monotonic() + _KILL_S
    while pids := set(find()):
        if time.monotonic() > deadline:
            raise RankFailedError(f"processes {sorted(pids)} still run {_KILL_S:g} s after SIGKILL")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


# The search path comes first: it may be needed to find this package.
_SERVE = """import sys
from multiprocessing.connection import Connection

pipe = Connection(int(sys.argv[1]))
sys.path[:] = pipe.recv()
from pipecomp.distributed.supervisor import serve_call

serve_call(pipe)
"""


class RankCalls:
    """A call of `function(rank, world, note, *args)` on every rank, each over a pipe to the rank's process.

    Args:
        world: Number of ranks.
        function: A function at the top level of a module.
        args: Its further arguments.
        on_note: Called as `on_note(rank, value)` for each value that a rank passes to `note`.
        may_die: Ranks that may end without a result.

    Attributes:
        results: Return values by rank.
    """

    def __init__(
        self,
        world: int,
        function: Callable[..., Any],
        args: Sequence[Any],
        on_note: Callable[[int, Any], None] | None = None,
        may_die: Sequence[int] = (),
    ) -> None:
        self.results: dict[int, Any] = {}
        self._call, self._on_note, self._may_die = (function, tuple(args)), on_note, may_die
        pairs = [Pipe() for _ in range(world)]
        self.pipes: list[Connection] = [ours for ours, _ in pairs]
        self.rank_pipes: list[Connection] = [theirs for _, theirs in pairs]

    def __enter__(self) -> RankCalls:
        return self

    def __exit__(self, *exc: object) -> None:
        for pipe in (*self.pipes, *self.rank_pipes):
            pipe.close()

    def command(self, rank: int) -> list[str]:
        """Return the command of a process that inherits the rank's end and waits for `send`."""
        return [sys.executable, "-c", _SERVE, str(self.rank_pipes[rank].fileno())]

    def close_rank_pipes(self) -> None:
        """Close the ranks' ends in this process once all ranks run, so that the end of a rank closes its pipe."""
        for pipe in self.rank_pipes:
            pipe.close()

    def send(self) -> None:
        """Send the call to ranks that wait for it."""
        work = pickle.dumps(self._call)
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):  # it has ended; `receive` raises
                pipe.send(sys.path)
                pipe.send_bytes(work)

    def receive(self, statuses: Sequence[int | None]) -> None:
        """Take what has arrived.

        Args:
            statuses: Exit statuses by rank from before this call, None for ranks that run.

        Raises:
            RankFailedError: A rank raised, or ended without a result or with an error.
        """
        for rank, pipe in enumerate(self.pipes):
            while not pipe.closed and pipe.poll():
                try:
                    kind, value = pipe.recv()
                except (EOFError, ConnectionResetError):
                    pipe.close()
                    break
                if kind == "failed":
                    raise RankFailedError(f"rank {rank} failed:\n{value}")
                if kind == "done":
                    self.results[rank] = value
                elif self._on_note is not None:
                    self._on_note(rank, value)
        for rank, status in enumerate(statuses):
            if status is not None and (status or rank not in self.results) and rank not in self._may_die:
                how = describe_status(status) if status else "ended with exit status 0 and without a result"
                raise RankFailedError(f"rank {rank} {how}")


def serve_call(pipe: Connection) -> None:
    """Run the call that a parent process sends with `RankCalls.send`."""
    os.set_inheritable(pipe.fileno(), False)
    function, args = pickle.loads(pipe.recv_bytes())
    run_call(pipe, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), function, args)


def run_call(pipe: Connection, rank: int, world: int, function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Call `function(rank, world, note, *args)` and send its notes and its result or traceback."""
    sending = threading.Lock()

    def send(kind: str, value: Any) -> None:
        with sending:
            pipe.send((kind, value))

    try:
        send("done", function(rank, world, lambda value: send("note", value), *args))
    except Exception:
        send("failed", traceback.format_exc())
        pipe.close()
        sys.stderr.flush()
        os._exit(1)  # threads that wait for the network must not delay the end
    pipe.close()
