"""Ranks whose links have several streams."""

from __future__ import annotations

import gc
import threading
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

    from pipecomp.distributed.collectives import gathered
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
    neighbors = open_neighbors([list(range(world))], timeout_s=30.0, streams=streams, gather=gathered)
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
