"""Ranks on this machine that run a function, for the demo, benchmarks and tests.

A server process that has imported the large packages once forks the ranks. They communicate over the loopback
interface and find the environment variables that a launcher sets.
"""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from pipecomp.distributed.placement import free_port, loopback
from pipecomp.distributed.supervisor import RankCalls, RankFailedError, Supervisor, run_call
from pipecomp.errors import ConfigError
from pipecomp.utils.processes import imported_from_working_directory

_LARGE_PACKAGES = [
    "torch.distributed",
    "pipecomp.engine",  # before deepspeed: it chooses the accelerator
    "transformers.models.gpt2.modeling_gpt2",
    "deepspeed.pipe",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.module_inject.auto_ep_layer",
    "pipecomp.initialization",
]
_NVIDIA_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")  # the second under Windows (WSL)


def preload_large_packages(*more: str) -> None:
    """Let the fork server import the packages that training needs, and `more`. Saves each rank some seconds.

    Call it before the first `run_ranks`; packages from earlier calls stay. It does nothing where ranks may use an
    NVIDIA GPU, because CUDA must not be initialized before a fork.
    """
    _LARGE_PACKAGES.extend(name for name in more if name not in _LARGE_PACKAGES)
    if not may_use_gpu():
        multiprocessing.set_forkserver_preload(_LARGE_PACKAGES)


def may_use_gpu() -> bool:
    """Return whether NVIDIA's driver is installed and CUDA_VISIBLE_DEVICES is not empty, without initializing CUDA."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(map(os.path.exists, _NVIDIA_DRIVERS))


def start_fork_server() -> None:
    """Start the server that forks ranks unless it runs. Raises ConfigError if its socket cannot be created."""
    # Note: a terminal sends Ctrl-C to all processes. The server and its ranks ignore it: this process ends them.
    on_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if on_main else None
    # The same search path as `python_module_command`.
    safe = "PYTHONSAFEPATH" not in os.environ and not imported_from_working_directory()
    if safe:
        os.environ["PYTHONSAFEPATH"] = "1"
    try:
        forkserver.ensure_running()
    except OSError as error:
        _check_open_files(error)
        allowed = f"a writable folder with a path of at most 70 bytes ({error})"
        raise ConfigError("TMPDIR", os.environ.get("TMPDIR"), allowed) from error
    finally:
        if safe:
            del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            signal.signal(signal.SIGINT, before)


def _check_open_files(error: OSError) -> None:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise ConfigError("ulimit -n", limit, f"a larger number of open files ({error.strerror})") from error


class _ForkedRank:
    """A forked process as a `ChildProcess`."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.kill = process.kill

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        return self._process.exitcode or 0


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float,
    on_note: Callable[[int, Any], None] | None = None,
    may_die: tuple[int, ...] = (),
) -> dict[int, Any]:
    """Call `function(rank, world, note, *args)` in one process per rank.

    Args:
        world: Number of ranks.
        function: A function at the top level of a module; `note(value)` passes a value to `on_note` at once.
        args: Plain values, no tensors.
        timeout_s: Seconds until all ranks must have ended.
        on_note: Called in this process as `on_note(rank, value)`.
        may_die: Ranks that may end without a result.

    Returns:
        Return values by rank.

    Raises:
        RankFailedError: A rank raised, died or took too long. The other ranks are killed.
        ConfigError: The ranks cannot be started on this machine.
    """
    start_fork_server()
    context = multiprocessing.get_context("forkserver")
    try:
        calls = RankCalls(world, function, args, on_note, may_die)
    except OSError as error:
        _check_open_files(error)
        raise
    port = free_port()
    with calls, Supervisor() as supervisor:
        for rank, pipe in enumerate(calls.rank_pipes):
            # The server's environment is that of its own start, so ranks are given the caller's.
            process = context.Process(target=_run, args=(rank, world, port, dict(os.environ), function, args, pipe))
            process.start()
            supervisor.add(_ForkedRank(process))
        calls.close_rank_pipes()
        for _ in supervisor.watch(grace_s=timeout_s, timeout_s=timeout_s):
            calls.receive(supervisor.statuses)
        late = [r for r, status in enumerate(supervisor.statuses) if status is None and r not in calls.results]
        if late:
            raise RankFailedError(f"ranks {late} took over {timeout_s:g} s")
    return calls.results


def _run(
    rank: int,
    world: int,
    port: int,
    environment: dict[str, str],
    function: Callable[..., Any],
    args: Sequence[Any],
    pipe: Connection,
) -> None:
    gc.freeze()  # DeepSpeed collects garbage often; objects from before the fork are left out
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
    run_call(pipe, rank, world, function, args)
