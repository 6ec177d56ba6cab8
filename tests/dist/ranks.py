"""Run a function on several ranks of this machine: free port, time limit, the first traceback, nothing left behind."""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _main(rank: int, world: int, port: int, function: Callable, args: tuple, results: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        DS_ACCELERATOR="cpu",
        OMP_NUM_THREADS="1",
    )
    import torch

    torch.set_num_threads(1)
    try:
        results.put((rank, True, function(rank, world, *args)))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
        results.close()
        results.join_thread()
        os._exit(1)
    results.close()
    results.join_thread()


def run_ranks(
    world: int, function: Callable, *args: Any, timeout_s: float = 90, may_die: tuple[int, ...] = ()
) -> dict[int, Any]:
    """What `function(rank, world, *args)` returned on each rank; plain picklable values only.

    A failing rank ends the others and is shown with its traceback. Ranks in `may_die` may end without a result.
    """
    context = mp.get_context("spawn")
    results = context.Queue()
    port = free_port()
    workers = [
        context.Process(target=_main, args=(rank, world, port, function, args, results), daemon=False)
        for rank in range(world)
    ]
    for worker in workers:
        worker.start()
    found: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    try:
        while len(found) < world - len([r for r in may_die if r not in found and not workers[r].is_alive()]):
            if time.monotonic() > deadline:
                missing = sorted(set(range(world)) - set(found))
                raise AssertionError(f"ranks {missing} gave no result within {timeout_s:g} s")
            try:
                rank, ok, value = results.get(timeout=0.2)
            except Exception:
                for rank, worker in enumerate(workers):
                    if worker.exitcode not in (None, 0) and rank not in found and rank not in may_die:
                        raise AssertionError(f"rank {rank} ended with exit code {worker.exitcode}") from None
                continue
            if not ok:
                raise AssertionError(f"rank {rank} failed:\n{value}")
            found[rank] = value
        for worker in workers:
            worker.join(max(0.1, deadline - time.monotonic()))
        codes = {rank: worker.exitcode for rank, worker in enumerate(workers) if rank not in may_die}
        assert all(code == 0 for code in codes.values()), f"exit codes {codes}"
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()
                worker.join()
    return found
