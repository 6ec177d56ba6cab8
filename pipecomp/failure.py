"""When training fails: find out which rank was lost, and let every other rank know.

A link knows its neighbour. A failed collective only knows that somebody is gone; then every rank that is still there
says so in the key-value store of torch.distributed, and who does not is lost.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from pipecomp.errors import PeerLostError

_KEY = "pipecomp/stopped/{}"
_LOST = "pipecomp/lost"
_POLL_S = 0.1


def report_stopped(reason: str) -> None:
    """Say that this rank is there and why its training ended."""
    with contextlib.suppress(RuntimeError, ValueError):  # the store may be gone; `find_lost` says so
        distributed_c10d._get_default_store().set(_KEY.format(dist.get_rank()), reason)


def report_lost(rank: int, reason: str) -> None:
    """Say which rank was lost first, for those that only know that somebody is."""
    with contextlib.suppress(RuntimeError, ValueError):
        store = distributed_c10d._get_default_store()
        if not store.check([_LOST]):
            store.set(_LOST, f"{rank} {reason}")


def find_lost(wait_s: float) -> PeerLostError | None:
    """The rank that was reported lost, or has said nothing when `wait_s` seconds are over; None if all have spoken.

    Call `report_stopped` first. If the store itself is gone, the rank that serves it (0, with the usual launchers) is.
    """
    deadline = time.monotonic() + wait_s
    try:
        store = distributed_c10d._get_default_store()
        while missing := _silent(store):
            if store.check([_LOST]):
                rank, _, reason = store.get(_LOST).decode(errors="replace").partition(" ")
                return PeerLostError(reason, int(rank))
            if time.monotonic() > deadline:
                return PeerLostError(f"lost rank {missing[0]}: it stopped without a word", missing[0])
            time.sleep(_POLL_S)
    except (RuntimeError, ValueError):
        return PeerLostError("lost rank 0: torch.distributed's key-value store is gone, which it serves", 0)
    return None


def linger(lost: int, wait_s: float) -> None:
    """On rank 0, which serves the store: stay until all ranks but the lost one have said that they stopped."""
    deadline = time.monotonic() + wait_s
    with contextlib.suppress(RuntimeError, ValueError):
        store = distributed_c10d._get_default_store()
        while dist.get_rank() == 0 and set(_silent(store)) - {lost} and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def _silent(store: Any) -> list[int]:
    return [r for r in range(dist.get_world_size()) if r != dist.get_rank() and not store.check([_KEY.format(r)])]
