"""Ranks whose links have several streams."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from typing import Any

import numpy as np

SIZES = (0, 1, (1 << 19) - 20, (1 << 19) - 19, 1 << 20, (1 << 22) + 7)


def sent_over_streams(
    rank: int, world: int, note: Any, streams: int | str, long: bool
) -> tuple[dict[str, int], int, int, int, bool]:
    """Exchange packets with both neighbors over gloo.

    long: measure rates as on a long line. Returns streams by link, TCP connections of the links, and threads and
    further TCP connections after the end (fewer if a rank has ended already), and whether rates were measured.
    """
    import torch.distributed as dist

    from pipecomp.distributed.consistency import AllRanks
    from pipecomp.stages.link import streams as measuring
    from pipecomp.stages.link.neighbors import open_neighbors
    from pipecomp.utils.sockets import tcp_sockets

    if long:
        measuring.MIN_ROUND_TRIP_S, measuring._FIXED_S = 0.0, 0.1
    else:
        measuring.MIN_ROUND_TRIP_S = 60.0
    dist.init_process_group("gloo")
    dist.barrier()
    before = len(tcp_sockets())
    neighbors = open_neighbors([list(range(world))], timeout_s=30.0, streams=streams, all_ranks=AllRanks())
    connected = len(tcp_sockets()) - before
    draw = np.random.default_rng(0)
    packets = [draw.integers(0, 256, size, dtype=np.uint8) for size in (*SIZES, *draw.integers(0, 900_000, 20))]
    for packet in packets:
        for end in neighbors.transports.values():
            end.send(packet)
    for packet in packets:
        for end in neighbors.transports.values():
            assert np.array_equal(end.recv(), packet)
    chosen = {name: choice.streams for name, choice in neighbors.streams.items()}
    assert chosen == {name: end.streams for name, end in neighbors.transports.items()}
    measured = any(choice.rates for choice in neighbors.streams.values())
    dist.barrier()
    for end in neighbors.transports.values():
        end.close()
    dist.barrier()
    for group in neighbors.groups:
        dist.destroy_process_group(group)
    del neighbors, end, group
    gc.collect()  # an error that ended a transport refers to it
    left = len(tcp_sockets()) - before
    dist.destroy_process_group()
    return chosen, connected, threading.active_count(), left, measured


def differing_streams(rank: int, world: int, note: Any) -> str:
    """Return the error of a rank whose neighbor uses another number of streams."""
    import torch.distributed as dist

    from pipecomp.errors import PipecompError
    from pipecomp.stages.link import gloo
    from pipecomp.stages.link.gloo import GlooTransport, neighbour_groups

    gloo._AGREE_S = 0.2
    dist.init_process_group("gloo")
    first, *further = neighbour_groups([[0, 1]], 30.0, {(0, 1): 3})[0, 1]
    end = GlooTransport(first.group, timeout_s=30.0, sockets=first.sockets, further=further)
    try:
        end.use_streams(2 + rank)
    except PipecompError as error:
        return str(error)
    finally:
        dist.barrier()
        end.close()
        dist.destroy_process_group()
    return ""


def silent_neighbor(rank: int, world: int, note: Any) -> tuple[str, int | None] | None:
    """Return the error of a rank whose neighbor does not answer, and the rank that it names."""
    import torch.distributed as dist

    from pipecomp.errors import LinkTimeoutError
    from pipecomp.stages.link.gloo import GlooTransport, neighbour_groups

    dist.init_process_group("gloo")
    first, *further = neighbour_groups([[0, 1]], 1.0, {(0, 1): 2})[0, 1]
    end = GlooTransport(first.group, timeout_s=1.0, sockets=first.sockets, further=further)
    try:
        if rank == 0:
            end.use_streams(2)
    except LinkTimeoutError as error:
        return str(error), error.rank
    finally:
        dist.barrier()
        with contextlib.suppress(Exception):
            end.close()
        dist.destroy_process_group()
    return None


def opened_with_a_failure(rank: int, world: int, note: Any, phase: str, keys: str | None) -> tuple[str, float]:
    """Open the links of four ranks while one fails; return its error and the seconds until then.

    phase: "pings" or "rates": what rank 1 cannot do with its link to rank 2; "killed": it dies then.
    """
    from pipecomp.distributed import rendezvous
    from pipecomp.errors import PipecompError, WireError
    from pipecomp.stages.link import streams as measuring
    from pipecomp.stages.link.neighbors import open_neighbors

    if keys is not None:
        os.environ["PIPECOMP_KEYS"] = f"{keys}/rank-{rank}"
    measuring.MIN_ROUND_TRIP_S, measuring._FIXED_S = (0.0 if phase == "rates" else 60.0), 0.1

    def fails(*given: Any) -> Any:
        if phase == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise WireError("no packet")

    if rank == 1:
        setattr(measuring, "_follow_rates" if phase == "rates" else "_follow_pings", fails)
    rendezvous.start_processes()
    began = time.monotonic()
    try:
        open_neighbors([[0, 1, 2, 3]], timeout_s=60.0, streams="auto", all_ranks=rendezvous.all_ranks())
    except PipecompError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "", time.monotonic() - began
