"""Signs of life of all ranks, for those who wait in a collective: gloo tells a closed connection, but not silence.

Each rank writes a counter to torch's key-value store every few seconds and reads those of the others. One whose counter
stands still for the configured time is stopped, or its machine cannot be reached. Whoever waits for it in a link gets
an error from the link. Whoever waits in a collective cannot be woken: torch has no way to end a gloo call from outside.
So, after the others have been told, this rank says what happened, finishes its message stores and ends itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from pipecomp.errors import LinkTimeoutError, PeerLostError, PipecompError

LOST_STATUS = 13  # exit status of a rank that had to end itself
_BEAT_S = 2.0
_SILENCE, _GRACE = 0.75, 0.25  # shares of the timeout: until a rank is lost, then for an error to end the waiting
_LAST_WORDS_S = 10.0
_LEFT = b"left"
_STOPPED = b"stopped "
_KEY = "pipecomp/alive/{}/{}"


class Watch:
    """Watches the other ranks in a thread of its own; made on all ranks in the same order, closed in order.

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
        self._store.set_timeout(timedelta(seconds=_SILENCE * timeout_s))
        self._thread = threading.Thread(target=self._run, name="pipecomp-watch", daemon=True)
        if self._others:
            self._beat()
            self._thread.start()

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
        if self._thread.is_alive():
            self._thread.join(_BEAT_S)
        if self._others:
            with contextlib.suppress(RuntimeError):  # who serves the store may be gone
                self._store.set(self._key(self._rank), word)

    # -- the thread

    def _key(self, rank: int) -> str:
        return _KEY.format(self._number, rank)

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(self._key(self._rank), str(self._beats).encode())

    def _run(self) -> None:
        seen: dict[int, tuple[bytes, float]] = {}
        present: list[int] = []
        period_s = min(_BEAT_S, self._timeout_s / 4)
        while not self._ended.wait(period_s):
            try:
                self._beat()
                present += [r for r in self._others if r not in present and self._store.check([self._key(r)])]
                values = self._store.multi_get([self._key(r) for r in present]) if present else []
            except RuntimeError as error:
                if not self._ended.is_set():
                    silent = "imed out" in str(error) or "imeout" in str(error)
                    why = f"said nothing for {_SILENCE * self._timeout_s:g} s" if silent else "is gone"
                    self._give_up(PeerLostError(f"lost rank 0: torch's key-value store, which it serves, {why}", 0))
                return
            now = time.monotonic()
            for rank in self._others:
                seen.setdefault(rank, (b"", now))
            for rank, value in zip(present, values, strict=True):
                if value != seen[rank][0]:
                    seen[rank] = (value, now)
            problem = self._problem(seen, now)
            if problem is not None:
                self._give_up(problem)
                return

    def _problem(self, seen: dict[int, tuple[bytes, float]], now: float) -> PipecompError | None:
        for rank, (value, _) in seen.items():
            if value.startswith(_STOPPED):
                lost, _, reason = value[len(_STOPPED) :].decode(errors="replace").partition(" ")
                return PeerLostError(f"{reason} (told by rank {rank})", int(lost))
        for rank, (value, since) in seen.items():
            silence_s = _SILENCE * self._timeout_s
            if value != _LEFT and now - since > silence_s:
                return LinkTimeoutError(
                    f"no sign of life from rank {rank} for {silence_s:g} s: it is stopped, or its machine cannot be "
                    "reached"
                )
        return None

    def _give_up(self, problem: PipecompError) -> None:
        """Let the training raise the problem by itself, if it can; otherwise end this process."""
        self.lost = problem
        noticed, grace_s = time.monotonic(), _GRACE * self._timeout_s
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
