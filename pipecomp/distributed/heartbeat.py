"""Heartbeats and failure reports of all ranks.

Each rank writes one entry to torch's key-value store at least once a second and reads those of the others: its step,
and what it does. A rank whose entry does not change for the configured time, over gloo for three quarters of it, is
stopped, dead, or unreachable. A rank that fails adds a report of the first failed rank and the reason.

The heartbeat also watches this process's own activities (`pipecomp/utils/activity.py`): it prints those that take long,
and interrupts those that take longer than their limit.

Note:
    A rank that waits in a link gets an error from the link. A rank that waits in a gloo collective cannot be woken:
    gloo notices a closed connection but not silence, and torch cannot cancel a collective. After some time for other
    errors to come first, such a rank prints the reason, finishes its message stores and ends its process.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import math
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from pipecomp.distributed.launch_env import JOIN_TIMEOUT_S
from pipecomp.distributed.placement import machine
from pipecomp.distributed.preemption import LOST_STATUS, report_signals, say_here
from pipecomp.distributed.supervisor import GO_ON
from pipecomp.errors import LinkTimeoutError, PeerLostError, PipecompError, StalledError, foreign_text
from pipecomp.tls.process_group import current_mesh
from pipecomp.utils.activity import NOTICE_S, Activity, current_activity, progress
from pipecomp.utils.cgroups import count_oom_kills

DEFAULT_TIMEOUT_S = 120.0
LINGER_S = 6.0  # for other ranks to read the reports before the store ends; some may wait for this rank alone
_BEAT_S = 1.0
_SILENCE = 0.75  # share of the timeout after which a rank is lost; links notice after the whole timeout
_SILENCE_RESUMABLE = 1.0  # over connections that are resumed within the timeout
_GRACE_S = LINGER_S + 2.0  # more, for an error that ends the waiting: its rank may linger
_ON_EXIT_S = 10.0
_POLL_S = 0.1
_REPORT_S = 0.5  # for the report of a rank whose connection is closed
_STORE_S = 3.0  # for the store to answer
_JOIN_S = 5.0
_LEFT, _STOPPED = "left", "stopped"
_KEY = "pipecomp/alive/{}"
_ENTRY = re.compile(
    r"\d{1,18} (?P<engine>\d{1,18}) (?P<step>\d{1,18}) (?P<seconds>\d{1,9}) (?P<doing>[^|]{0,80})\|"
    rf"(?P<state>|{_LEFT}|{_STOPPED})(?:(?<={_STOPPED}) (?P<rank>\d{{1,9}}) (?P<reason>.*))?",
    re.DOTALL,
)
_FRESH_S = 5.0  # age of a heartbeat that still arrives
_INTERRUPT_S = 8.0  # for an interrupted activity to end; DataLoader looks for its workers every 5 s
_STORE_THREAD = "pipecomp-store"
_T = TypeVar("_T")

_current: Heartbeat | None = None
_group: Any = None  # process group of the current heartbeat


class StoreSilentError(RuntimeError):
    """The key-value store does not answer: the process that serves it is stopped."""


def run_in_thread(call: Callable[[], _T], name: str) -> tuple[threading.Thread, Future[_T]]:
    """Start a call on a daemon thread, and return the thread and the future of the result."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread, future


def call_store(call: Callable[[], _T], timeout_s: float) -> _T:
    """Call a method of torch's key-value store. Raises StoreSilentError after `timeout_s` seconds.

    Note:
        If the server's process is stopped, torch's client waits for ever, whatever its timeout. The waiting thread is
        abandoned (`abandoned_store_threads`).
    """
    thread, future = run_in_thread(call, _STORE_THREAD)
    thread.join(timeout_s)
    if not future.done():
        raise StoreSilentError(f"torch.distributed's key-value store has not answered for {timeout_s:g} s")
    return future.result()


@contextlib.contextmanager
def lost_store(known: Callable[[], Exception | None] = lambda: None) -> Iterator[None]:
    """Raise PeerLostError where the body, at the start, finds that the key-value store is gone or silent.

    known: Returns a better error, None without one.
    """
    try:
        yield
    except (dist.DistNetworkError, StoreSilentError) as error:
        what = "does not answer" if isinstance(error, StoreSilentError) else "is gone"
        text = f"lost rank 0 at the start: torch.distributed's key-value store, which it serves, {what}"
        raise known() or PeerLostError(text, 0) from error


def abandoned_store_threads() -> list[threading.Thread]:
    """List the threads of `call_store` that still wait."""
    return [thread for thread in threading.enumerate() if thread.name == _STORE_THREAD]


def is_collective_error(error: Exception) -> bool:
    """Return whether torch.distributed raised the error, so that another rank may be the cause."""
    if isinstance(error, dist.DistError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    raised_in = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)][-1:]
    # gloo raises plain RuntimeErrors, whose messages start with the path of its source file.
    return "gloo" in str(error) or any(name.startswith("torch.distributed") for name in raised_in)


@dataclass(frozen=True)
class FailureReport:
    """The first rank that failed, as far as the reporting rank knows, and the reason."""

    rank: int
    reason: str


class RankPlace(NamedTuple):
    """Place of a rank.

    Attributes:
        host: Name of its host, for messages: several machines may have the same.
        stage: Its stage.
        log: The file that its output goes to, "" if there is none.
        machine: See `placement.machine`.
    """

    host: str
    stage: int
    log: str
    machine: str

    @classmethod
    def here(cls, stage: int) -> RankPlace:
        """Return this process's place."""
        return cls(socket.gethostname(), stage, log_file(), machine())


def uncaught_error() -> BaseException | None:
    """Return the exception that ends this process, once its traceback is printed; None in a notebook or a shell."""
    interactive = hasattr(sys, "ps1") or hasattr(builtins, "get_ipython")
    return None if interactive else getattr(sys, "last_value", None)


def log_file() -> str:
    """Return the regular file that standard error goes to, "" if it is a terminal, a pipe or a deleted file."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return ""
    return path if os.path.isfile(path) else ""


@dataclass(frozen=True)
class HeartbeatEntry:
    """The latest entry of a rank.

    Attributes:
        text: The entry: counter of beats, engine, state, and the report's rank and reason.
        engine: Number of engines that the rank has begun to make.
        state: "" while the engine runs, "left" without one, "stopped" after a failure.
        report: The failure, once its cause is known.
        since: Monotonic time in seconds when this process first read the entry.
        step: Optimizer steps that the rank has begun.
        doing: Its activity, such as "waits for its data"; "" for none.
        seconds: Since when, before `since`.
    """

    text: str
    engine: int
    state: str
    report: FailureReport | None
    since: float
    step: int = 0
    doing: str = ""
    seconds: int = 0

    @classmethod
    def parse(cls, value: bytes, rank: int, engine: int) -> HeartbeatEntry:
        """Parse the entry of `rank`; an invalid one is a failure of that rank in the given engine."""
        text, now = value.decode(errors="replace"), time.monotonic()
        match = _ENTRY.fullmatch(text)
        if match is None:
            reason = f"rank {rank} wrote an invalid heartbeat: {text[:60]!r}"
            return cls(text, engine, _STOPPED, FailureReport(rank, reason), now)
        report = (
            None if match["rank"] is None else FailureReport(int(match["rank"]), foreign_text(match["reason"], 2000))
        )
        doing = match["step"], match["doing"], match["seconds"]
        return cls(text, int(match["engine"]), match["state"], report, now, int(doing[0]), doing[1], int(doing[2]))


class Heartbeat:
    """This process's heartbeat and its view of the other ranks; `process_heartbeat` makes it.

    Args:
        rank: This rank.
        world: Number of ranks.
        store: Key-value store of all ranks; a connection of its own is made to it.
        resumable: Whether lost connections are resumed.

    Attributes:
        timeout_s: Configured time of silence.
        on_exit: Called with the reason before this process ends itself.
        on_report: Called with the error that another rank reports.
        find_failure: Returns the error that ended a link, None while all are open.
        lost: The error for a lost rank, None while all are alive.
        engine: Number of engines that this process has begun to make.
        places: Places of all ranks, by rank, once an engine is made.
    """

    on_exit: Callable[[FailureReport], None]
    on_report: Callable[[Exception], None]
    find_failure: Callable[[], Exception | None]

    def __init__(self, rank: int, world: int, store: Any, *, resumable: bool = False) -> None:
        self._rank = rank
        self._others = [r for r in range(world) if r != rank]
        self._store = store.clone()  # a wait on the shared connection would delay the beats
        self._silence = _SILENCE_RESUMABLE if resumable else _SILENCE
        self._reset_callbacks()
        self.lost: PipecompError | None = None
        self.engine = 0
        self.places: Sequence[RankPlace] = ()
        self._oom_kills = count_oom_kills()
        self._cut_since: dict[int, float] = {}  # by rank: when its closed connection was noticed
        self._notices: dict[int, float] = {}  # of another rank's activity: seconds until the next
        self._beats = 0
        self._state = _LEFT
        self._waiting_since: float | None = None  # since when this rank depends on the others
        self._still_waiting: Callable[[], bool] = lambda: True  # whether it still does
        self._began = self._answered = time.monotonic()
        self._store_problem = "is gone"
        self._entries: dict[int, HeartbeatEntry] = {}
        self._ended = threading.Event()
        self._writing = threading.Lock()
        self._threads: list[threading.Thread] = []
        threads = [(self._watch, "pipecomp-watch")]
        if self._others:
            self._beat()
            threads.append((self._keep_beating, "pipecomp-beat"))
        for target, name in threads:
            self._threads.append(threading.Thread(target=target, name=name, daemon=True))
            self._threads[-1].start()

    def _reset_callbacks(self) -> None:
        self.timeout_s, self.on_exit, self.on_report = DEFAULT_TIMEOUT_S, lambda report: None, lambda error: None
        self.find_failure = lambda: None

    # -- calls of this rank

    def begin(self) -> None:
        """Announce an engine that is about to be made; all ranks make theirs in the same order."""
        self.engine += 1
        self._reset_callbacks()
        self.lost = None
        self._set_state("")

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Announce an engine, and report an error of the body to the other ranks."""
        self.begin()
        self.enter()
        try:
            yield
        except Exception as error:
            self.leave()
            reason = f"rank {self._rank} could not start: {type(error).__name__}: {error}"
            self.stop(FailureReport(self._rank, reason))
            self.linger()
            raise
        self.leave()

    def enter(self) -> None:
        """Begin to wait for other ranks. Raises the error for a rank that is already lost."""
        if self.lost is not None:
            raise self.lost
        self._waiting_since, self._still_waiting = time.monotonic(), lambda: True

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the body as waiting for all other ranks if there is no engine, which counts its own collectives."""
        if self._state != _LEFT or self._waiting_since is not None:
            yield
            return
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def leave(self, gpu_busy: Callable[[], bool] | None = None) -> None:
        """Stop waiting for other ranks; with `gpu_busy`, once it returns False."""
        if gpu_busy is None:
            self._waiting_since = None
        else:
            self._still_waiting = gpu_busy

    def missed(self, rank: int) -> PipecompError | None:
        """Return why a rank will not answer, None if it may."""
        entry, now = self._entries.get(rank), time.monotonic()
        current = self.engine if self._state == "" else self.engine + 1  # reports on earlier engines are over
        if entry is not None and entry.report is not None and entry.engine == current:
            return self.lost or PeerLostError(f"{entry.report.reason} (reported by rank {rank})", entry.report.rank)
        if self.lost is not None:
            return self.lost
        cut = self._cut_connection(rank, now)
        if cut is not None:
            return cut
        if entry is None:
            late = f"rank {rank} did not reach the start of the run within {JOIN_TIMEOUT_S:g} s: see its output"
            return LinkTimeoutError(late, rank) if now - self._began > JOIN_TIMEOUT_S else None
        return self._silence_error(rank, entry, now)

    def _cut_connection(self, rank: int, now: float) -> PipecompError | None:
        """Return the error for a rank whose connection over TLS has ended, after some time for its own report."""
        mesh = current_mesh()
        connection = None if mesh is None else mesh.connections.get(rank)
        failure = None if connection is None else connection.failure
        if failure is None or now - self._cut_since.setdefault(rank, now) <= _GRACE_S:
            return None
        if isinstance(failure, (PeerLostError, LinkTimeoutError)):
            return failure
        return PeerLostError(f"lost rank {rank}: {failure}", rank)

    def last_sign(self, rank: int) -> float:
        """Return the monotonic time of the last beat that was read from a rank, 0 without one."""
        return self._entries[rank].since if rank in self._entries else 0.0

    def explain_silence(self, rank: int) -> str:
        """Return the end of an error about a silent link to a rank whose heartbeats still arrive, else ""."""
        if time.monotonic() - self.last_sign(rank) > _FRESH_S or rank >= len(self.places):
            return ""
        return (
            f". Its heartbeats still arrive: between {self.places[self._rank].host} and {self.places[rank].host} small "
            "packets pass and large ones do not (MTU), or something stops this connection alone; see pipecomp doctor"
        )

    def stop(self, report: FailureReport | None = None) -> None:
        """Report to the other ranks that training has ended here; `report` follows once the first cause is known.

        The first report of an engine stays.
        """
        if not self._state.startswith(f"{_STOPPED} "):
            self._set_state(_STOPPED if report is None else f"{_STOPPED} {report.rank} {report.reason[:2000]}")

    def give_up(self, lost: int, reason: str) -> None:
        """Report to the other ranks why this process ends, and finish its stores."""
        report = FailureReport(lost, reason)
        self.stop(report)
        self.on_exit(report)

    def find_lost(self, wait_s: float) -> PeerLostError | None:
        """Find the rank that another one reports, or that has not stopped after `wait_s` seconds. Call `stop` before.

        Returns:
            Its error; None if all ranks have stopped, and none or this one is reported. Of several silent ranks, which
            may wait for ranks that are alive, the one with the oldest beat is named.
        """
        deadline = time.monotonic() + wait_s
        try:
            while True:
                call_store(self._read, _STORE_S)
                reported = self._reported()
                if reported is not None:
                    return reported if reported.rank != self._rank else None
                running = [rank for rank in self._others if not self._has_stopped(rank)]
                if not running:
                    return None
                if time.monotonic() > deadline:
                    lost = min(running, key=self.last_sign)
                    return PeerLostError(f"lost rank {lost}: it stopped without a report", lost)
                time.sleep(_POLL_S)
        except StoreSilentError as error:
            return PeerLostError(f"lost rank 0, which serves the key-value store: {error}", 0)
        except (RuntimeError, ValueError):
            return PeerLostError("lost rank 0: torch.distributed's key-value store, which it serves, is gone", 0)

    def find_report(self, rank: int, wait_s: float) -> PeerLostError | None:
        """Find the failure that ranks report, once the connection to `rank` is closed.

        A rank that fails says so before it closes its connections; a killed one cannot.

        Args:
            rank: The rank at the other end.
            wait_s: For the reason of a rank that has stopped.

        Returns:
            The first report on another rank than this one; None without any.
        """
        began = time.monotonic()
        with contextlib.suppress(RuntimeError, ValueError):  # the store may be gone with its rank
            while True:
                call_store(self._read, _STORE_S)
                reported = self._reported()
                if reported is not None:
                    return reported if reported.rank != self._rank else None
                if time.monotonic() - began > (wait_s if self._has_stopped(rank) else _REPORT_S):
                    return None
                time.sleep(_POLL_S)
        return None

    def linger(self, lost: int | None = None) -> None:
        """On rank 0, which serves the store, wait until no other rank needs it any more, for 6 s at most.

        A rank needs it until it has stopped, makes another engine, is silent or lost, or its connection has ended.
        """
        deadline = time.monotonic() + LINGER_S
        mesh = current_mesh()
        gone = (
            {lost} if mesh is None else {lost, *(r for r, end in mesh.connections.items() if end.failure is not None)}
        )
        with contextlib.suppress(RuntimeError, ValueError):
            while self._rank == 0 and (now := time.monotonic()) < deadline:
                call_store(self._read, _STORE_S)
                oldest = now - self._silence * self.timeout_s
                if all(self._has_stopped(r) or 0 < self.last_sign(r) < oldest for r in set(self._others) - gone):
                    return
                time.sleep(_POLL_S)

    def close(self, engine: int) -> None:
        """Note the regular end of an engine. After the last one, nobody has to wait for this rank any more."""
        if engine == self.engine:
            self.on_exit, self.on_report = lambda report: None, lambda error: None
            self.find_failure = lambda: None
            if not self._state.startswith(_STOPPED):
                self._set_state(_LEFT)

    def report_end(self, reason: str) -> str:
        """Report to the other ranks that this process ends, and finish its stores.

        Returns:
            What is known of a rank that was lost before, "" for nothing.
        """
        if not self._others or self._ended.is_set():
            return ""
        if self._state.startswith(_STOPPED):
            time.sleep(_ON_EXIT_S)  # an error ends this process, and is being reported
            return ""
        known = None
        if self._state == _LEFT:
            self.engine += 1  # the engine that the others make, or wait to make
        else:
            known = self.lost or self.find_failure()
        lost, text = self._rank, f"rank {self._rank} stopped: {reason}"
        if isinstance(known, (PeerLostError, LinkTimeoutError)) and known.rank is not None and reason not in str(known):
            lost, text = known.rank, str(known)  # not if a launcher ends all ranks
        self.give_up(lost, text)
        self.linger(lost)
        return "" if lost == self._rank else ". ".join(filter(None, (text, self.describe(lost))))

    def exit(self) -> None:
        """Report the exception that ends this process, if it has not been reported, and stop the threads."""
        error = uncaught_error()
        if error is not None and self._state == _LEFT:
            self.report_end(f"{type(error).__name__}: {error}")
        self.end()

    def end(self) -> None:
        """Stop the threads. A thread inside torch at the interpreter's exit would abort the process."""
        self._ended.set()
        deadline = time.monotonic() + _JOIN_S
        for thread in (*self._threads, *abandoned_store_threads()):
            thread.join(max(0.0, deadline - time.monotonic()))

    # -- entries in the store

    def _set_state(self, state: str) -> None:
        self._state = state
        if self._others and not self._ended.is_set():
            with contextlib.suppress(RuntimeError):  # the store may be gone or silent
                call_store(self._beat, 1.0)

    def _beat(self) -> None:
        with self._writing:  # an earlier beat must not overwrite a new state
            self._beats += 1
            doing = _doing()
            entry = f"{self._beats} {self.engine} {progress.step} {doing[1]} {doing[0]}|{self._state}"
            self._store.set(_KEY.format(self._rank), entry.encode())

    def _read(self) -> None:
        present = [r for r in self._others if r in self._entries or self._store.check([_KEY.format(r)])]
        values = self._store.multi_get([_KEY.format(r) for r in present]) if present else []
        for rank, value in zip(present, values, strict=True):
            entry = HeartbeatEntry.parse(value, rank, self.engine)
            if rank not in self._entries or entry.text != self._entries[rank].text:
                self._entries[rank] = entry

    def _reported(self) -> PeerLostError | None:
        current = self.engine + (self._state == _LEFT)  # before an engine: of the one that follows
        for rank, entry in dict(self._entries).items():
            if entry.report is not None and entry.engine == current:
                return PeerLostError(f"{entry.report.reason} (reported by rank {rank})", entry.report.rank)
        return None

    def _has_stopped(self, rank: int) -> bool:
        entry = self._entries.get(rank)
        return entry is not None and (
            entry.engine > self.engine or (entry.engine == self.engine and entry.state == _STOPPED)
        )

    def _silence_error(self, rank: int, entry: HeartbeatEntry, now: float) -> LinkTimeoutError | None:
        silence_s = self._silence * self.timeout_s
        if now - entry.since <= silence_s:
            return None
        silent = f"no heartbeat from rank {rank} for {silence_s:g} s: it is stopped, or its machine cannot be reached"
        return LinkTimeoutError(silent, rank)

    # -- threads

    def _keep_beating(self) -> None:
        """Write and read entries. A silent store may block this thread for ever; `_watch` notices."""
        try:
            while not self._ended.wait(min(_BEAT_S, self.timeout_s / 4)):
                self._beat()
                self._read()
                self._answered = time.monotonic()
        except RuntimeError:
            self._answered = -math.inf  # the store is gone
        except Exception as error:
            self._store_problem = f"gave an invalid answer ({type(error).__name__}: {error})"
            self._answered = -math.inf

    def _watch(self) -> None:
        noticed: float | None = None
        while not self._ended.wait(min(_BEAT_S, self.timeout_s / 4)):
            now = time.monotonic()
            self._watch_activity(now)
            if not self._others:
                continue
            self._report_others()
            engine = self.engine
            problem = self._problem(now)
            if engine != self.engine:  # the problem is the previous engine's
                continue
            self.lost = problem
            reported = self._reported() if problem is not None and noticed is None else None
            if reported is not None:
                self.on_report(reported)
            noticed = None if problem is None else noticed or now
            waiting = self._waiting_since
            if problem is None or noticed is None or waiting is None or not self._still_waiting():
                continue
            if now > max(noticed, waiting) + (1 - self._silence) * self.timeout_s + _GRACE_S:
                text = self.describe(getattr(problem, "rank", None) or 0)
                why = "This rank waits for the others in a collective that cannot be interrupted"
                self._end_process(problem, f"{text}. {why}" if text else why)

    def _watch_activity(self, now: float) -> None:
        """Report this process's activity if it takes long; interrupt it after its limit, and then end the process."""
        activity = current_activity()
        if activity is None or activity.limit_s is None:
            return
        passed_s = now - activity.since
        if passed_s >= activity.next_notice_s:
            activity.next_notice_s *= 2
            say_here(f"{activity.text} since {passed_s:.0f} s, on {socket.gethostname()}")
        if passed_s > activity.limit_s:
            if activity.error is None:
                activity.error = self._stalled(activity, activity.limit_s)
            activity.interrupt()
        end_s = activity.limit_s + _INTERRUPT_S if activity.end_s is None else activity.end_s
        if passed_s > end_s and current_activity() is activity:
            self._end_process(self._stalled(activity, passed_s), "It cannot be interrupted")

    def _stalled(self, activity: Activity, limit_s: float) -> StalledError:
        place = activity.place()
        where = f" at {place}" if place else ""
        explained = activity.explain()
        return StalledError(
            f"rank {self._rank} on {socket.gethostname()} {activity.text} since {limit_s:.0f} s{where}, step "
            f"{progress.step}" + (f". {explained}" if explained else "")
        )

    def _report_others(self) -> None:
        """Print what ranks on other machines do if it takes long: here nothing else tells why this one waits."""
        for rank, entry in dict(self._entries).items():
            if rank >= len(self.places) or self._is_here(rank):
                continue
            if not entry.doing or entry.seconds < NOTICE_S:
                self._notices.pop(rank, None)
            elif entry.seconds >= self._notices.setdefault(rank, NOTICE_S):
                self._notices[rank] = 2.0 * entry.seconds
                say_here(f"rank {rank} on {self.places[rank].host} {entry.doing} since {entry.seconds} s")

    def _is_here(self, rank: int) -> bool:
        """Return whether a rank is on this rank's machine."""
        return self.places[rank].machine == self.places[self._rank].machine

    def describe(self, rank: int) -> str:
        """Describe a rank for an error: host, stage, step, latest activity, log; "" if nothing is known."""
        if rank >= len(self.places):
            return ""
        place, entry = self.places[rank], self._entries.get(rank)
        step, doing = (progress.step, _doing()) if rank == self._rank else (0, ("", 0))
        if entry is not None:
            step, doing = entry.step, (entry.doing, entry.seconds)
        text = f"Last report of rank {rank} on {place.host}, stage {place.stage}: step {step}"
        if doing[0]:
            text += f", {doing[0]}" + (f" since {doing[1]} s" if doing[1] >= 1 else "")
        text += f". Its output is in {place.log}" if place.log else ". Its own output may say more"
        if rank != self._rank and self._is_here(rank):
            killed = count_oom_kills() - self._oom_kills
            if killed > 0:
                text += (
                    f". Out of memory: the kernel has killed {killed} process(es) of this control group since the start"
                )
        return f"{text}. {GO_ON}"

    def _problem(self, now: float) -> PipecompError | None:
        idle = self._state == _LEFT
        if (idle and self._waiting_since is None) or self._state.startswith(f"{_STOPPED} "):
            return None
        reported = self._reported()
        if reported is not None:  # it may precede the end of rank 0, which serves the store
            return reported
        silence_s = self._silence * self.timeout_s
        if now - self._answered > silence_s:
            reason = self._store_problem if self._answered == -math.inf else f"has not answered for {silence_s:g} s"
            return PeerLostError(f"lost rank 0: torch.distributed's key-value store, which it serves, {reason}", 0)
        for rank, entry in dict(self._entries).items():
            silence = self._silence_error(rank, entry, now)
            if silence is not None and (idle or entry.state != _LEFT or entry.engine != self.engine):
                return silence
        return None

    def _end_process(self, problem: PipecompError, why: str) -> None:
        """Print the problem, report it to the other ranks, finish the stores and end the process.

        A rank that stalls before an engine is made ends by an error of its own, as one that can be interrupted does: it
        would stall again, and a launcher may go on without its machine.
        """
        say_here(f"{type(problem).__name__}: {problem}. {why}: its process ends")
        lost, reason = self._rank, f"rank {self._rank} stopped: {type(problem).__name__}: {problem}"
        status = LOST_STATUS
        if self._state == _LEFT:
            self.engine += 1  # the engine that the others make, or wait to make
            status = 1 if isinstance(problem, StalledError) else LOST_STATUS
        if isinstance(problem, PeerLostError):
            lost, reason = problem.rank, str(problem)
        finishing = threading.Thread(target=self.give_up, args=(lost, reason), daemon=True)
        finishing.start()
        finishing.join(_ON_EXIT_S)
        sys.stdout.flush()
        os._exit(status)


def _doing() -> tuple[str, int]:
    """Return this process's activity and its seconds so far; without one the part of the step."""
    activity = current_activity()
    if activity is None or activity.limit_s is None:
        return progress.part, 0
    return activity.text.replace("|", " ")[:80], int(time.monotonic() - activity.since)


def process_heartbeat(store: Any = None, rank: int = 0, world: int = 1, *, resumable: bool = False) -> Heartbeat:
    """Return this process's heartbeat, made at the first call and again for a new process group.

    Args:
        store: Key-value store, before torch has initialized the process group; by default torch's own.
        rank: This rank, with `store`.
        world: Number of ranks, with `store`.
        resumable: Whether lost connections are resumed.
    """
    global _current, _group
    joined = dist.group.WORLD if dist.is_initialized() else None
    if _current is not None and joined is not None and _group in (None, joined):
        _group = joined
        return _current
    if _current is not None:
        _current.end()
    if store is None:
        rank, world = dist.get_rank(), dist.get_world_size()
        store = distributed_c10d._get_default_store()
    _current, _group = Heartbeat(rank, world, store, resumable=resumable), joined
    atexit.register(_current.exit)
    report_signals(_current.report_end)
    return _current


@contextlib.contextmanager
def waiting_for_others() -> Iterator[None]:
    """Notice in the body, a collective of all ranks, that another rank is silent; without a heartbeat do nothing."""
    joined = dist.group.WORLD if dist.is_initialized() else None
    with contextlib.nullcontext() if _current is None or _group not in (None, joined) else _current.waiting():
        yield
