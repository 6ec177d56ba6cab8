"""Work on the nodes of the tests' labs. Quick to import: each process does it."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.limits import until

TIMEOUT_S = 30.0


def place(rank: int, world: int, note: Any, factor: int) -> tuple[Any, ...]:
    """Return a process's rank and addresses, its rank also as a note."""
    note({"rank": rank})
    return rank * factor, world, os.environ["MASTER_ADDR"], "PIPECOMP_NETLAB" in os.environ


def fails_on_rank_1(rank: int, world: int, note: Any, how: str) -> None:
    """Rank 1 raises or leaves; the others wait for a minute."""
    if rank == 1 and how == "raise":
        raise ValueError("as the test wants")
    if rank == 1 and how == "leave":
        os._exit(0)
    time.sleep(60)


def transfer(
    rank: int,
    world: int,
    note: Any,
    sizes: list[int],
    gap_s: float = 0.0,
    tell: bool = False,
    silence_s: float = TIMEOUT_S,
) -> list[float]:
    """Messages of `sizes` bytes from rank 0 to rank 1, `gap_s` seconds apart.

    Monotonic seconds when sending began and when the last had left (rank 0), or when each arrived (rank 1). tell: a
    note when sending begins. silence_s: after which rank 1 counts the peer as lost (rank 0: twice that, so that rank 1
    is the first); that is a note too, and the rank stays a while, so that the other finds out for itself.
    """
    import torch.distributed as dist

    from pipecomp.errors import LinkTimeoutError
    from pipecomp.netlab.software import throttle_to
    from pipecomp.stages.link.gloo import GlooTransport, neighbour_groups

    dist.init_process_group("gloo")
    group = neighbour_groups([[0, 1]], TIMEOUT_S)[0, 1][0].group
    transport = GlooTransport(group, timeout_s=silence_s * (2 - rank), pacer=throttle_to(1 - rank))
    dist.barrier()
    try:
        times = _transfer(transport, rank, sizes, gap_s, note if tell else None)
    except LinkTimeoutError:
        note("silence")
        time.sleep(2 * silence_s)
        raise
    transport.close()
    dist.destroy_process_group()
    return times


def _transfer(transport: Any, rank: int, sizes: list[int], gap_s: float, note: Any) -> list[float]:
    import numpy as np

    times = []
    if rank == 0:
        times.append(time.monotonic())
        if note is not None:
            note("sending")
        for size in sizes:
            transport.send(np.zeros(size, dtype=np.uint8))
            time.sleep(gap_s)
        transport._outbox.join()
        times.append(time.monotonic())
        transport.recv()
    else:
        for size in sizes:
            assert transport.recv().size == size
            times.append(time.monotonic())
        transport.send(np.zeros(1, dtype=np.uint8))
    return times


def trains(rank: int, world: int, note: Any, config: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return the first link's traffic after a small GPT-2 was trained over all ranks."""

    import pipecomp
    from tests.models import gpt2, samples

    engine = pipecomp.initialize(gpt2(), num_stages=world, config=config, training_data=samples())
    for _ in range(steps):
        engine.train_batch()
    stats = engine.comm_stats()["links"]["0->1"]
    engine.close()
    return stats


def plain_tcp(rank: int, world: int, note: Any, size: int, address: str) -> tuple[int, float]:
    """A plain TCP stream of `size` bytes from rank 1 to rank 0: (bytes, seconds) after the first that arrived."""
    if rank == 0:
        with socket.create_server(("", 5001)) as server:
            server.settimeout(TIMEOUT_S)
            connection, _ = server.accept()
        buffer = bytearray(1 << 20)
        with connection:
            connection.settimeout(TIMEOUT_S)
            first = connection.recv_into(buffer)
            began = last = time.monotonic()
            total = 0
            while got := connection.recv_into(buffer):
                total, last = total + got, time.monotonic()
        assert first + total == size
        return total, last - began
    if rank > 1:
        return 0, 0.0
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            connection = socket.create_connection((address, 5001), timeout=TIMEOUT_S)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    with connection:
        left = size
        while left:
            left -= connection.send(bytes(min(left, 1 << 16)))
    return size, 0.0


def reached(rank: int, world: int, note: Any, addresses: list[str], folder: str) -> list[bool]:
    """Return the nodes' addresses that take a connection of this node. All listen before the first tries, and until the
    last has tried. folder: an empty one that all nodes see.
    """

    def all_have(what: str) -> None:
        Path(folder, f"{what}-{rank}").touch()
        until(lambda: len(list(Path(folder).glob(f"{what}-*"))) == world)

    def takes(address: str) -> bool:
        deadline = time.monotonic() + 8.0  # WireGuard repeats a handshake that was lost after five seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                socket.create_connection((address, 5002), timeout=1.0).close()
                return True
            time.sleep(0.1)
        return False

    with socket.create_server(("", 5002)), ThreadPoolExecutor(world) as pool:
        all_have("listened")
        found = list(pool.map(takes, addresses))
        all_have("tried")
    return found


def round_trips(rank: int, world: int, note: Any, address: str) -> list[float]:
    """Seconds of ten round trips of a byte from rank 1 to rank 0."""
    if rank == 0:
        with socket.create_server(("", 5003)) as server:
            server.settimeout(TIMEOUT_S)
            connection, _ = server.accept()
        with connection:
            while byte := connection.recv(1):
                connection.sendall(byte)
        return []
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            connection = socket.create_connection((address, 5003), timeout=TIMEOUT_S)
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    found = []
    with connection:
        for _ in range(10):
            began = time.perf_counter()
            connection.sendall(b"x")
            assert connection.recv(1) == b"x"
            found.append(time.perf_counter() - began)
    return found


def within_machines(rank: int, world: int, note: Any, size: int) -> None:
    """Send bytes from each even rank to the next one."""
    import torch
    import torch.distributed as dist

    from pipecomp.distributed.rendezvous import start_processes

    start_processes()
    data = torch.zeros(size, dtype=torch.uint8)
    if rank % 2 == 0:
        dist.send(data, rank + 1)
    else:
        dist.recv(data, rank - 1)
    dist.barrier()
