"""Heartbeats of all ranks, for those who wait in a collective: gloo tells a closed connection, but not silence.

Each rank writes a counter to torch's key-value store at least once a second and reads those of the others, from when it
has joined them. One whose counter stands still for the configured time, over gloo for three quarters of it, is stopped,
dead, or cannot be reached. Whoever waits for it in a link gets an error from the link. Whoever waits in a collective
cannot be woken: torch has no way to end a gloo call from outside. So, after a while for other errors to come first,
such a rank says what happened, finishes its message stores and ends itself. A rank that fails writes why beside its
counter: links end with that at once, also those of ranks that are not its neighbours, or that its own words do not
reach.
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
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from pipecomp.distributed.failure import LINGER_S, bounded, left_behind
from pipecomp.errors import LinkTimeoutError, PeerLostError, PipecompError

LOST_STATUS = 13  # exit status of a rank that had to end itself
DEFAULT_TIMEOUT_S = 120.0
_BEAT_S = 1.0
_SILENCE = 0.75  # share of the timeout after which a rank is lost; links notice by the whole timeout
_SILENCE_HEALING = 1.0  # where a lost connection may be made anew until then
_GRACE_S = LINGER_S + 2.0  # after that, for an error to end the waiting: perhaps for a rank that lingers
_ON_EXIT_S = 10.0
_LINGER_S, _LINGER_POLL_S = 5.0, 0.1
_JOIN_S = 5.0
_LEFT, _STOPPED = "left", "stopped"
_KEY = "pipecomp/alive/{}"
_SIGN = re.compile(rf"\d{{1,18}} \d{{1,18}} (?:{_LEFT}|{_STOPPED} \d{{1,9}} .*)?", re.ASCII | re.DOTALL)

_current: Heartbeat | None = None
_group: Any = None  # that the current one was made for


class _Sign(NamedTuple):
    """What a rank has written last. since: when that was first seen here. engine: how many it has begun to make."""

    text: str
    since: float

    @property
    def engine(self) -> int:
        return int(self.words[1] or 0)

    @property
    def words(self) -> list[str]:
        """Beat, engine, state, rank that is lost, reason."""
        return [*self.text.split(" ", 4), "", "", ""]

    @property
    def stopped(self) -> PeerLostError | None:
        """What it says ended its training."""
        _, _, state, lost, reason, *_ = self.words
        return PeerLostError(reason, int(lost)) if state == _STOPPED else None


class Heartbeat:
    """This process's watch over the other ranks, in threads of its own; `process_heartbeat` makes it.

    timeout_s: the configured time of silence. on_exit: called before this process is ended. on_told: called with
    what another rank says has ended its training. All are of the engine that `begin` announced.
    """

    on_told: Callable[[Exception], None]

    def __init__(self, rank: int, world: int, store: Any, *, heals: bool = False) -> None:
        """store: that all ranks share; a connection of its own is made to it. heals: lost ones are made anew."""
        self._rank = rank
        self._others = [r for r in range(world) if r != rank]
        self._store = store.clone()  # a wait on the shared connection would stop the beats
        self._silence = _SILENCE_HEALING if heals else _SILENCE
        self.timeout_s, self.on_exit, self.on_told = DEFAULT_TIMEOUT_S, lambda: None, _ignore
        self.lost: PipecompError | None = None
        self.engine = 0  # how many this process has begun to make
        self._beats = 0
        self._state = _LEFT
        self._waiting_since: float | None = None  # since when this rank does something together with the others
        self._computing = _always  # whether it still does, asked by the watch
        self._answered, self._problem_of_store = time.monotonic(), "is gone"
        self._seen: dict[int, _Sign] = {}
        self._ended = threading.Event()
        self._writing = threading.Lock()
        self._threads: list[threading.Thread] = []
        if self._others:
            self._beat()
            for target, name in ((self._keep_beating, "pipecomp-beat"), (self._run, "pipecomp-watch")):
                self._threads.append(threading.Thread(target=target, name=name, daemon=True))
                self._threads[-1].start()

    # -- what this rank does

    def begin(self) -> None:
        """Announce an engine that is about to be made; all ranks make theirs in the same order."""
        self.engine += 1
        self.timeout_s, self.on_exit, self.on_told = DEFAULT_TIMEOUT_S, lambda: None, _ignore
        self.lost = None
        self._say("")

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """While an engine is made: what ends that here is told to the others."""
        self.begin()
        self.enter()
        try:
            yield
        except Exception as error:
            self.leave()
            self.stopped(self._rank, f"rank {self._rank} could not start: {type(error).__name__}: {error}")
            self._linger()
            raise
        self.leave()

    def enter(self) -> None:
        """From now on this rank waits for others. Raises what is known to have been lost."""
        if self.lost is not None:
            raise self.lost
        self._waiting_since, self._computing = time.monotonic(), _always

    def missed(self, rank: int) -> PipecompError | None:
        """Tell why a rank will not answer: what is known to be lost, or its silence, with an engine or without."""
        sign = self._seen.get(rank)
        return self.lost or (None if sign is None else self._silent(rank, sign, time.monotonic()))

    def last_sign(self, rank: int) -> float:
        """Tell when a rank has last written, by time.monotonic(); 0 for one that never has."""
        return self._seen[rank].since if rank in self._seen else 0.0

    def leave(self, computing: Callable[[], bool] | None = None) -> None:
        """Note that this rank waits for nobody any more; its GPU may, for as long as `computing` says yes."""
        if computing is None:
            self._waiting_since = None
        else:
            self._computing = computing

    def stopped(self, rank: int, reason: str) -> None:
        """Tell those that wait for this rank that its training is over, because `rank` failed."""
        self._say(f"{_STOPPED} {rank} {reason[:2000]}")

    def _linger(self) -> None:
        """On rank 0, which may serve the store, stay until nobody needs it.

        So until the others have said that they stopped, make another engine already, or are silent.
        """
        deadline = time.monotonic() + _LINGER_S
        while self._rank == 0 and time.monotonic() < deadline:
            now = time.monotonic()
            silence_s = self._silence * self.timeout_s
            seen = dict(self._seen)
            gone = [
                sign.words[2] == _STOPPED or sign.engine > self.engine or now - sign.since > silence_s
                for sign in seen.values()
            ]
            if sum(gone) == len(self._others):
                return
            time.sleep(_LINGER_POLL_S)

    def close(self, engine: int) -> None:
        """Note that this engine has ended in order.

        If it is the last one that was made, nobody needs to wait for a sign of this rank any more.
        """
        if engine == self.engine:
            self.on_exit, self.on_told = lambda: None, _ignore
            if not self._state.startswith(_STOPPED):
                self._say(_LEFT)

    def end(self) -> None:
        """Stop the threads. One that is inside torch when the interpreter ends would abort the process."""
        self._ended.set()
        deadline = time.monotonic() + _JOIN_S
        for thread in (*self._threads, *left_behind()):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _say(self, state: str) -> None:
        self._state = state
        if self._others and not self._ended.is_set():
            with contextlib.suppress(RuntimeError):  # who serves the store may be gone, or stopped
                bounded(self._beat, 1.0)

    def _beat(self) -> None:
        with self._writing:  # words must not be overtaken by a beat from before
            self._beats += 1
            self._store.set(_KEY.format(self._rank), f"{self._beats} {self.engine} {self._state}".encode())

    # -- the threads

    def _keep_beating(self) -> None:
        """Write and read; may be kept without end by a store whose server is stopped."""
        present: list[int] = []
        try:
            while not self._ended.wait(min(_BEAT_S, self.timeout_s / 4)):
                self._beat()
                present += [r for r in self._others if r not in present and self._store.check([_KEY.format(r)])]
                values = self._store.multi_get([_KEY.format(r) for r in present]) if present else []
                now = time.monotonic()
                for rank, value in zip(present, values, strict=True):
                    text = self._read(rank, value)
                    if rank not in self._seen or text != self._seen[rank].text:
                        self._seen[rank] = _Sign(text, now)
                self._answered = now
        except RuntimeError:
            self._answered = -math.inf  # the store is gone
        except Exception as error:
            self._problem_of_store = f"gave an answer that is none ({type(error).__name__}: {error})"
            self._answered = -math.inf

    def _read(self, rank: int, value: bytes) -> str:
        """What a rank has written; if that is no sign of a heartbeat, that the rank has failed."""
        text = value.decode(errors="replace")
        if _SIGN.fullmatch(text):
            return text
        return f"0 {self.engine} {_STOPPED} {rank} rank {rank} wrote a heartbeat that is none: {text[:60]!r}"

    def _run(self) -> None:
        noticed: float | None = None
        while not self._ended.wait(min(_BEAT_S, self.timeout_s / 4)):
            now = time.monotonic()
            engine = self.engine
            problem = self._problem(now)
            if engine != self.engine:  # of the engine before
                continue
            self.lost = problem
            told = self._told() if problem is not None and noticed is None else None
            if told is not None:
                self.on_told(told)
            noticed = None if problem is None else noticed or now
            waiting = self._waiting_since
            if problem is None or noticed is None or waiting is None or not self._computing():
                continue
            if now > max(noticed, waiting) + (1 - self._silence) * self.timeout_s + _GRACE_S:
                self._end_process(problem)

    def _problem(self, now: float) -> PipecompError | None:
        if self._state == _LEFT or self._state.startswith(_STOPPED):
            return None
        told = self._told()
        if told is not None:  # before rank 0 ended, too, which serves the store
            return told
        silence_s = self._silence * self.timeout_s
        if now - self._answered > silence_s:
            why = self._problem_of_store if self._answered == -math.inf else f"has not answered for {silence_s:g} s"
            return PeerLostError(f"lost rank 0: torch.distributed's key-value store, which it serves, {why}", 0)
        for rank, sign in dict(self._seen).items():
            silence = self._silent(rank, sign, now)
            if silence is not None and not (sign.words[2] == _LEFT and sign.engine == self.engine):
                return silence
        return None

    def _told(self) -> PeerLostError | None:
        for rank, sign in dict(self._seen).items():
            stopped = sign.stopped
            if stopped is not None and sign.engine == self.engine:
                return PeerLostError(f"{stopped} (told by rank {rank})", stopped.rank)
        return None

    def _silent(self, rank: int, sign: _Sign, now: float) -> LinkTimeoutError | None:
        silence_s = self._silence * self.timeout_s
        if now - sign.since <= silence_s:
            return None
        return LinkTimeoutError(
            f"no heartbeat from rank {rank} for {silence_s:g} s: it is stopped, or its machine cannot be reached"
        )

    def _end_process(self, problem: PipecompError) -> None:
        print(
            f"pipecomp: rank {self._rank}: {type(problem).__name__}: {problem}. This rank waits for the others in a "
            "collective, which cannot be interrupted: it ends here",
            file=sys.stderr,
            flush=True,
        )
        finishing = threading.Thread(target=self.on_exit, daemon=True)
        finishing.start()
        finishing.join(_ON_EXIT_S)
        sys.stdout.flush()
        os._exit(LOST_STATUS)


def _ignore(error: Exception) -> None:
    """Nobody has to be told."""


def _always() -> bool:
    return True


def process_heartbeat(store: Any = None, rank: int = 0, world: int = 1, *, heals: bool = False) -> Heartbeat:
    """Give this process's watch, made at the first call and again for processes that have joined anew.

    store, rank, world: of processes that torch has not joined yet; its own otherwise. heals: as of `Heartbeat`.
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
    _current, _group = Heartbeat(rank, world, store, heals=heals), joined
    atexit.register(_current.end)
    return _current
