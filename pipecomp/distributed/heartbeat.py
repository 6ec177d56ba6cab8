"""Heartbeats and failure reports of all ranks.

Each rank writes one entry to torch's key-value store at least once a second and reads those of the others. A rank whose
entry does not change for the configured time, over gloo for three quarters of it, is stopped, dead, or unreachable. A
rank that fails adds a report of the first failed rank and the reason.

Note:
    A rank that waits in a link gets an error from the link. A rank that waits in a gloo collective cannot be woken:
    gloo notices a closed connection but not silence, and torch cannot cancel a collective. After some time for other
    errors to come first, such a rank prints the reason, finishes its message stores and ends its process.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from pipecomp.errors import LinkTimeoutError, PeerLostError, PipecompError
from pipecomp.tls.process_group import current_mesh

LOST_STATUS = 13  # exit status of a rank that ends its own process
DEFAULT_TIMEOUT_S = 120.0
LINGER_S = 6.0  # for other ranks to read the reports before the store ends; some may wait for this rank alone
_BEAT_S = 1.0
_SILENCE = 0.75  # share of the timeout after which a rank is lost; links notice after the whole timeout
_SILENCE_RESUMABLE = 1.0  # over connections that are resumed within the timeout
_GRACE_S = LINGER_S + 2.0  # more, for an error that ends the waiting: its rank may linger
_ON_EXIT_S = 10.0
_POLL_S = 0.1
_STORE_S = 3.0  # for the store to answer
_JOIN_S = 5.0
_LEFT, _STOPPED = "left", "stopped"
_KEY = "pipecomp/alive/{}"
_ENTRY = re.compile(
    rf"\d{{1,18}} (\d{{1,18}}) (|{_LEFT}|{_STOPPED})(?:(?<={_STOPPED}) (\d{{1,9}}) (.*))?", re.ASCII | re.DOTALL
)
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


@dataclass(frozen=True)
class HeartbeatEntry:
    """The latest entry of a rank.

    Attributes:
        text: The entry: counter of beats, engine, state, and the report's rank and reason.
        engine: Number of engines that the rank has begun to make.
        state: "" while the engine runs, "left" without one, "stopped" after a failure.
        report: The failure, once its cause is known.
        since: Monotonic time in seconds when this process first read the entry.
    """

    text: str
    engine: int
    state: str
    report: FailureReport | None
    since: float

    @classmethod
    def parse(cls, value: bytes, rank: int, engine: int) -> HeartbeatEntry:
        """Parse the entry of `rank`; an invalid one is a failure of that rank in the given engine."""
        text, now = value.decode(errors="replace"), time.monotonic()
        match = _ENTRY.fullmatch(text)
        if match is None:
            reason = f"rank {rank} wrote an invalid heartbeat: {text[:60]!r}"
            return cls(text, engine, _STOPPED, FailureReport(rank, reason), now)
        report = None if match[3] is None else FailureReport(int(match[3]), match[4])
        return cls(text, int(match[1]), match[2], report, now)


class Heartbeat:
    """This process's heartbeat and its view of the other ranks; `process_heartbeat` makes it.

    Args:
        rank: This rank.
        world: Number of ranks.
        store: Key-value store of all ranks; a connection of its own is made to it.
        resumable: Whether lost connections are resumed.

    Attributes:
        timeout_s: Configured time of silence.
        on_exit: Called before this process ends itself.
        on_report: Called with the error that another rank reports.
        lost: The error for a lost rank, None while all are alive.
        engine: Number of engines that this process has begun to make.
    """

    on_report: Callable[[Exception], None]

    def __init__(self, rank: int, world: int, store: Any, *, resumable: bool = False) -> None:
        self._rank = rank
        self._others = [r for r in range(world) if r != rank]
        self._store = store.clone()  # a wait on the shared connection would delay the beats
        self._silence = _SILENCE_RESUMABLE if resumable else _SILENCE
        self._reset_callbacks()
        self.lost: PipecompError | None = None
        self.engine = 0
        self._beats = 0
        self._state = _LEFT
        self._waiting_since: float | None = None  # since when this rank depends on the others
        self._still_waiting: Callable[[], bool] = lambda: True  # whether it still does
        self._answered, self._store_problem = time.monotonic(), "is gone"
        self._entries: dict[int, HeartbeatEntry] = {}
        self._ended = threading.Event()
        self._writing = threading.Lock()
        self._threads: list[threading.Thread] = []
        if self._others:
            self._beat()
            for target, name in ((self._keep_beating, "pipecomp-beat"), (self._watch, "pipecomp-watch")):
                self._threads.append(threading.Thread(target=target, name=name, daemon=True))
                self._threads[-1].start()

    def _reset_callbacks(self) -> None:
        self.timeout_s, self.on_exit, self.on_report = DEFAULT_TIMEOUT_S, lambda: None, lambda error: None

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

    def leave(self, gpu_busy: Callable[[], bool] | None = None) -> None:
        """Stop waiting for other ranks; with `gpu_busy`, once it returns False."""
        if gpu_busy is None:
            self._waiting_since = None
        else:
            self._still_waiting = gpu_busy

    def missed(self, rank: int) -> PipecompError | None:
        """Return why a rank will not answer, None if it may."""
        entry = self._entries.get(rank)
        return self.lost or (None if entry is None else self._silence_error(rank, entry, time.monotonic()))

    def last_sign(self, rank: int) -> float:
        """Return the monotonic time of the last beat that was read from a rank, 0 without one."""
        return self._entries[rank].since if rank in self._entries else 0.0

    def stop(self, report: FailureReport | None = None) -> None:
        """Report to the other ranks that training has ended here; `report` follows once the first cause is known."""
        self._set_state(_STOPPED if report is None else f"{_STOPPED} {report.rank} {report.reason[:2000]}")

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
            self.on_exit, self.on_report = lambda: None, lambda error: None
            if not self._state.startswith(_STOPPED):
                self._set_state(_LEFT)

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
            self._store.set(_KEY.format(self._rank), f"{self._beats} {self.engine} {self._state}".encode())

    def _read(self) -> None:
        present = [r for r in self._others if r in self._entries or self._store.check([_KEY.format(r)])]
        values = self._store.multi_get([_KEY.format(r) for r in present]) if present else []
        for rank, value in zip(present, values, strict=True):
            entry = HeartbeatEntry.parse(value, rank, self.engine)
            if rank not in self._entries or entry.text != self._entries[rank].text:
                self._entries[rank] = entry

    def _reported(self) -> PeerLostError | None:
        for rank, entry in dict(self._entries).items():
            if entry.report is not None and entry.engine == self.engine:
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
        return LinkTimeoutError(
            f"no heartbeat from rank {rank} for {silence_s:g} s: it is stopped, or its machine cannot be reached"
        )

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
                self._end_process(problem)

    def _problem(self, now: float) -> PipecompError | None:
        if self._state == _LEFT or self._state.startswith(f"{_STOPPED} "):
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
            if silence is not None and not (entry.state == _LEFT and entry.engine == self.engine):
                return silence
        return None

    def _end_process(self, problem: PipecompError) -> None:
        print(
            f"pipecomp: rank {self._rank}: {type(problem).__name__}: {problem}. This rank waits for the others in a "
            "collective that cannot be interrupted: its process ends",
            file=sys.stderr,
            flush=True,
        )
        finishing = threading.Thread(target=self.on_exit, daemon=True)
        finishing.start()
        finishing.join(_ON_EXIT_S)
        sys.stdout.flush()
        os._exit(LOST_STATUS)


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
    atexit.register(_current.end)
    return _current
