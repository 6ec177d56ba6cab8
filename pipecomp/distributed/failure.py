"""When training fails: find out which rank was lost, and let every other rank know.

A link knows its neighbour. A failed collective only knows that somebody is gone; then every rank that is still there
says so in the key-value store of torch.distributed, and who does not is lost.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from pipecomp.errors import PeerLostError
from pipecomp.tls.process_group import current_mesh

_KEY = "pipecomp/stopped/{}"
_LOST = "pipecomp/lost"
_RANK = re.compile(r"\d{1,9}", re.ASCII)
LINGER_S = 6.0  # for other ranks' heartbeats to learn which is lost; some may wait for this one alone, until it ends
_POLL_S = 0.1
_ASK_S = 3.0  # for the store to answer
_BOUNDED = "pipecomp-store"  # the name of threads that ask it
_Value = TypeVar("_Value")


class StoreSilentError(RuntimeError):
    """The key-value store does not answer: the process that serves it is stopped."""


def start_aside(call: Callable[[], _Value], name: str) -> tuple[threading.Thread, Future[_Value]]:
    """Start a call on a thread for which this process does not wait when it ends; the future has what becomes of it."""
    future: Future[_Value] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread, future


def bounded(call: Callable[[], _Value], limit_s: float) -> _Value:
    """Return or raise what `call` does; StoreSilentError after `limit_s` seconds.

    torch's store waits without end for the answer of a server that is stopped, whatever its timeout; the thread that
    does so is left behind.
    """
    thread, future = start_aside(call, _BOUNDED)
    thread.join(limit_s)
    if not future.done():
        raise StoreSilentError(f"torch.distributed's key-value store has not answered for {limit_s:g} s")
    return future.result()


def left_behind() -> list[threading.Thread]:
    """List the threads of `bounded` that still wait."""
    return [thread for thread in threading.enumerate() if thread.name == _BOUNDED]


def of_a_collective(error: Exception) -> bool:
    """Whether torch.distributed raised it, so that another rank may be its cause; else it is this rank's own."""
    if isinstance(error, dist.DistError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    raised_in = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)][-1:]
    # gloo's errors, which are plain ones, begin with the file of its source.
    return "gloo" in str(error) or any(name.startswith("torch.distributed") for name in raised_in)


def report_stopped(reason: str) -> None:
    """Say that this rank is there and why its training ended."""
    with contextlib.suppress(RuntimeError, ValueError):  # the store may be gone; `find_lost` says so
        store = distributed_c10d._get_default_store()
        bounded(lambda: store.set(_KEY.format(dist.get_rank()), reason), _ASK_S)


def report_lost(rank: int, reason: str) -> None:
    """Say which rank was lost first, for those that only know that somebody is."""
    with contextlib.suppress(RuntimeError, ValueError):
        store = distributed_c10d._get_default_store()
        bounded(lambda: None if store.check([_LOST]) else store.set(_LOST, f"{rank} {reason}"), _ASK_S)


def find_lost(wait_s: float, last_sign: Callable[[int], float] = lambda rank: 0.0) -> PeerLostError | None:
    """Find the rank that was reported lost, or has said nothing when `wait_s` seconds are over.

    None if all have spoken, and no other rank was reported. last_sign: when a rank was last known to be alive; several
    may say nothing, because they wait for ranks that are there.
    Call `report_stopped` first. If the store itself is gone, the rank that serves it (0, with the usual launchers) is.
    """
    deadline = time.monotonic() + wait_s
    try:
        while True:
            missing, told = bounded(_silent, _ASK_S), bounded(_told, _ASK_S)
            if told is not None:
                return told if told.rank != dist.get_rank() else None
            if not missing:
                return None
            if time.monotonic() > deadline:
                lost = min(missing, key=last_sign)
                return PeerLostError(f"lost rank {lost}: it stopped without a word", lost)
            time.sleep(_POLL_S)
    except StoreSilentError as error:
        return PeerLostError(f"lost rank 0: {error}, which it serves", 0)
    except (RuntimeError, ValueError):
        return PeerLostError("lost rank 0: torch.distributed's key-value store is gone, which it serves", 0)


def linger(lost: int) -> None:
    """On rank 0, which serves the store: stay until all ranks but the lost one have said that they stopped.

    Nobody waits for ranks whose connections to this one have ended, if these carry the store.
    """
    deadline = time.monotonic() + LINGER_S
    with contextlib.suppress(RuntimeError, ValueError):
        while dist.get_rank() == 0 and time.monotonic() < deadline:
            if not set(bounded(_silent, _ASK_S)) - {lost} - _unreachable():
                return
            time.sleep(_POLL_S)


def _unreachable() -> set[int]:
    mesh = current_mesh()
    return set() if mesh is None else {rank for rank, there in mesh.connections.items() if there.failure is not None}


def _silent() -> list[int]:
    store = distributed_c10d._get_default_store()
    return [r for r in range(dist.get_world_size()) if r != dist.get_rank() and not store.check([_KEY.format(r)])]


def _told() -> PeerLostError | None:
    store = distributed_c10d._get_default_store()
    text = store.get(_LOST).decode(errors="replace") if store.check([_LOST]) else ""
    rank, _, reason = text.partition(" ")
    return PeerLostError(reason, int(rank)) if _RANK.fullmatch(rank) else None  # else not what a rank would write
