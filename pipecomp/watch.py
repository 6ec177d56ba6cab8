"""Signs of life of all ranks, for those who wait in a collective: gloo tells a closed connection, but not silence.

Each rank writes a counter to torch's key-value store every few seconds and reads those of the others. One whose counter
stands still for the configured time is stopped, or its machine cannot be reached. Whoever waits for it in a link gets
an error from the link. Whoever waits in a collective cannot be woken: torch has no way to end a gloo call from outside.
So, after the others have been told, this rank says what happened, finishes its message stores and ends itself.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from pipecomp.errors import LinkTimeoutError, PeerLostError, PipecompError
from pipecomp.failure import bounded

LOST_STATUS = 13  # exit status of a rank that had to end itself
_BEAT_S = 2.0
_SILENCE = 0.75  # share of the timeout after which a rank is lost; links notice by the whole timeout
_GRACE_S = 5.0  # after that, for an error to end the waiting
_LAST_WORDS_S = 10.0
_LEFT = b"left"
_STOPPED = b"stopped "
_KEY = "pipecomp/alive/{}/{}"


class Watch:
    """Watches the other ranks in threads of its own; made on all ranks in the same order, closed in order.

    timeout_s: silence after which a rank is lost. last_words: called before this process is ended.
    """

    _made = 0  # in this process; the same on all ranks

    def __init__(self, timeout_s: float, last_words: Callable[[], None]) -> None:
        self._rank, self._timeout_s, self._last_words = dist.get_rank(), timeout_s, last_words
        self._number = Watch._made
        Watch._made += 1
        self._others = [r for r in range(dist.get_world_size()) if r != self._rank]
        self.lost: PipecompError | None = None
        self._beats = 0
        self._waiting_since: float | None = None  # since when this rank does something together with the others
        self._ended = threading.Event()
        # Its own connection: a wait on the shared one would stop the beats.
        shared: Any = distributed_c10d._get_default_store()
        self._store = shared.clone()
        self._period_s = min(_BEAT_S, timeout_s / 4)
        self._answered = time.monotonic()
        self._seen = {rank: (b"", self._answered) for rank in self._others}  # counter, since when it stands there
        self._threads: list[threading.Thread] = []
        if self._others:
            self._beat()
            for target, name in ((self._keep_beating, "pipecomp-beat"), (self._run, "pipecomp-watch")):
                self._threads.append(threading.Thread(target=target, name=name, daemon=True))
                self._threads[-1].start()

    def enter(self) -> None:
        """From now on this rank waits for others. Raises what is known to have been lost."""
        if self.lost is not None:
            raise self.lost
        self._waiting_since = time.monotonic()

    def leave(self) -> None:
        """This rank waits for nobody any more."""
        self._waiting_since = None

    def stopped(self, rank: int, reason: str) -> None:
        """This rank's training is over, because `rank` failed: tell those that watch it."""
        self._say(_STOPPED + f"{rank} {reason}".encode()[:2000])

    def close(self) -> None:
        """Nobody needs to watch this rank any more; safe to call twice."""
        if not self._ended.is_set():
            self._say(_LEFT)

    def _say(self, word: bytes) -> None:
        self._ended.set()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(1.0)  # a beat must not follow the word
        if self._others:
            with contextlib.suppress(RuntimeError):  # who serves the store may be gone
                bounded(lambda: self._store.set(self._key(self._rank), word), 1.0)

    # -- the threads

    def _key(self, rank: int) -> str:
        return _KEY.format(self._number, rank)

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(self._key(self._rank), str(self._beats).encode())

    def _keep_beating(self) -> None:
        """Write and read; may be kept without end by a store whose server is stopped."""
        present: list[int] = []
        try:
            while not self._ended.wait(self._period_s):
                self._beat()
                present += [r for r in self._others if r not in present and self._store.check([self._key(r)])]
                values = self._store.multi_get([self._key(r) for r in present]) if present else []
                now = time.monotonic()
                for rank, value in zip(present, values, strict=True):
                    if value != self._seen[rank][0]:
                        self._seen[rank] = (value, now)
                self._answered = now
        except RuntimeError:
            self._answered = -math.inf  # the store is gone

    def _run(self) -> None:
        while not self._ended.wait(self._period_s):
            problem = self._problem(time.monotonic())
            if problem is not None:
                self._give_up(problem)
                return

    def _problem(self, now: float) -> PipecompError | None:
        silence_s = _SILENCE * self._timeout_s
        if now - self._answered > silence_s:
            why = "is gone" if self._answered == -math.inf else f"has not answered for {silence_s:g} s"
            return PeerLostError(f"lost rank 0: torch.distributed's key-value store, which it serves, {why}", 0)
        seen = dict(self._seen)
        for rank, (value, _) in seen.items():
            if value.startswith(_STOPPED):
                lost, _, reason = value[len(_STOPPED) :].decode(errors="replace").partition(" ")
                return PeerLostError(f"{reason} (told by rank {rank})", int(lost))
        for rank, (value, since) in seen.items():
            if value != _LEFT and now - since > silence_s:
                return LinkTimeoutError(
                    f"no sign of life from rank {rank} for {silence_s:g} s: it is stopped, or its machine cannot be "
                    "reached"
                )
        return None

    def _give_up(self, problem: PipecompError) -> None:
        """Let the training raise the problem by itself, if it can; otherwise end this process."""
        self.lost = problem
        noticed, grace_s = time.monotonic(), (1 - _SILENCE) * self._timeout_s + _GRACE_S
        while not self._ended.wait(0.05):
            since = self._waiting_since
            if since is not None and time.monotonic() > max(noticed, since) + grace_s:
                break
        else:
            return
        print(
            f"pipecomp: rank {self._rank}: {type(problem).__name__}: {problem}. This rank waits for the others in a "
            "collective, which cannot be interrupted: it ends here",
            file=sys.stderr,
            flush=True,
        )
        finishing = threading.Thread(target=self._last_words, daemon=True)
        finishing.start()
        finishing.join(_LAST_WORDS_S)
        sys.stdout.flush()
        os._exit(LOST_STATUS)
