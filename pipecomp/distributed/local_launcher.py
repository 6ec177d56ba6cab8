"""Run a function as several ranks on this machine, for the demo, benchmarks and tests.

Each rank is a process of its own with what a launcher would set; gloo stays on the loopback interface. Ranks send
notes to the caller while they work. If one fails, the others are ended and its traceback is the error; no process is
left behind.
"""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import queue
import resource
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from typing import Any

from pipecomp.distributed.placement import free_port, loopback
from pipecomp.errors import ConfigError, PipecompError
from pipecomp.utils.processes import imported_from_working_directory

_LARGE_PACKAGES = [
    "torch.distributed",
    "pipecomp.engine",  # before deepspeed: says which accelerator it has
    "transformers.models.gpt2.modeling_gpt2",
    "deepspeed.pipe",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.module_inject.auto_ep_layer",
    "pipecomp.initialization",
]
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")  # NVIDIA's, and what takes its place under Windows (WSL)


class RankFailedError(PipecompError, RuntimeError):
    """A rank raised or died; the message has its traceback or exit code."""


def preload_large_packages(*more: str) -> None:
    """Let the server that forks ranks import what ranks that train need, and `more`: seconds less for each of them.

    To be called before the first `run_ranks`; what earlier calls named stays. It does nothing where ranks may use an
    NVIDIA GPU, whose driver must not be touched before a fork.
    """
    _LARGE_PACKAGES.extend(name for name in more if name not in _LARGE_PACKAGES)
    if not may_use_gpu():
        multiprocessing.set_forkserver_preload(_LARGE_PACKAGES)


def may_use_gpu() -> bool:
    """Say whether this machine has NVIDIA's driver, and CUDA_VISIBLE_DEVICES is not empty. The driver is not asked."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(map(os.path.exists, _DRIVERS))


def start_server() -> None:
    """Start the server that forks ranks, if it does not run. Raises ConfigError where its socket finds no place.

    Ctrl-C, which a terminal sends to all processes, is for the one alone that calls this, and ends the others.
    """
    on_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if on_main else None
    safe = (
        "PYTHONSAFEPATH" not in os.environ and not imported_from_working_directory()
    )  # see `processes.python_module_command`
    if safe:
        os.environ["PYTHONSAFEPATH"] = "1"
    try:
        forkserver.ensure_running()
    except OSError as error:  # of a path too long for a socket, or no folder at all
        _check_open_files(error)
        allowed = f"a folder with a short path (of at most 70 bytes), which can be written ({error})"
        raise ConfigError("TMPDIR", os.environ.get("TMPDIR"), allowed) from error
    finally:
        if safe:
            del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            signal.signal(signal.SIGINT, before)


def _check_open_files(error: OSError) -> None:
    """Raise ConfigError if the error is that this process, or the system, has too many files open."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise ConfigError("ulimit -n", limit, f"a larger number of open files ({error.strerror})") from error


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float,
    on_note: Callable[[int, Any], None] | None = None,
    may_die: tuple[int, ...] = (),
) -> dict[int, Any]:
    """Return what `function(rank, world, note, *args)` returned on each rank; plain values, no tensors.

    note(value): hands a value to `on_note(rank, value)` in this process. timeout_s: for all of it. may_die: ranks that
    may end without a result. Raises RankFailedError, and ConfigError where processes have nothing to share.
    """
    start_server()
    # A server that has imported torch once forks the ranks. Its environment is that of its own start, so the ranks are
    # given the caller's.
    context = multiprocessing.get_context("forkserver")
    try:
        results = context.Queue()
    except OSError as error:
        _check_open_files(error)
        allowed = f"a file system in memory, mounted there, in which processes share semaphores ({error.strerror})"
        raise ConfigError("/dev/shm", "/dev/shm", allowed) from error
    port = free_port()
    workers = [
        context.Process(target=_main, args=(rank, world, port, dict(os.environ), function, args, results))
        for rank in range(world)
    ]
    found: dict[int, Any] = {}
    try:
        for worker in workers:
            worker.start()
        deadline = time.monotonic() + timeout_s
        while True:
            gone = [r for r in may_die if r not in found and not workers[r].is_alive()]
            if len(found) + len(gone) == world:
                break
            if time.monotonic() > deadline:
                raise RankFailedError(f"ranks {sorted(set(range(world)) - set(found))} took over {timeout_s:g} s")
            try:
                kind, rank, value = results.get(timeout=0.2)
            except queue.Empty:
                _check_alive(workers, found, may_die)
                continue
            if kind == "failed":
                raise RankFailedError(f"rank {rank} failed:\n{value}")
            if kind == "note" and on_note is not None:
                on_note(rank, value)
            if kind == "done":
                found[rank] = value
        for worker in workers:
            worker.join(max(0.1, deadline - time.monotonic()))
        _check_alive(workers, {}, may_die)
    finally:
        for worker in workers:
            if worker.pid is None:  # Ctrl-C came before it was started
                continue
            if worker.is_alive():
                worker.kill()
            worker.join()
    return found


def _check_alive(workers: list, found: dict, may_die: tuple[int, ...]) -> None:
    for rank, worker in enumerate(workers):
        if worker.exitcode not in (None, 0) and rank not in found and rank not in may_die:
            raise RankFailedError(f"rank {rank} ended with exit code {worker.exitcode}")


def _main(rank: int, world: int, port: int, environment: dict, function: Callable, args: tuple, results: Any) -> None:
    gc.freeze()  # DeepSpeed collects garbage often: not among what was imported before the fork
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME=loopback(),
        OMP_NUM_THREADS="1",
    )
    import torch

    torch.set_num_threads(1)

    def note(value: Any) -> None:
        results.put(("note", rank, value))

    try:
        results.put(("done", rank, function(rank, world, note, *args)))
        failed = False
    except Exception:
        results.put(("failed", rank, traceback.format_exc()))
        failed = True
    results.close()
    results.join_thread()
    if failed:
        os._exit(1)
