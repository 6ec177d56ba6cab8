"""What tests let another process do, because it would end or spoil the one that tests."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

BOUND_S = 600  # guards against a hang
LARGE_PACKAGES = [
    "torch.distributed",
    "transformers.models.gpt2.modeling_gpt2",
    "deepspeed.pipe",
    "pipecomp.engine.engine",
]


def preload_large_packages() -> None:
    """Let the server that forks ranks import what ranks that train need: seconds less for each of them.

    To be called before the first `run_ranks`. It does nothing on a machine with an NVIDIA GPU, whose driver must not be
    touched before a fork.
    """
    if not Path("/dev/nvidiactl").exists():
        multiprocessing.set_forkserver_preload(LARGE_PACKAGES)


def in_child(act: Callable[[], str]) -> str:
    """What `act` returns in a forked process, which never comes back to the tests."""
    return child_of(act)[0]


def child_of(act: Callable[[], str]) -> tuple[str, int]:
    """That, empty if it raises, and the exit code of the process; −n if signal n ended it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(BOUND_S)
            os.write(write, act().encode())
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    return text, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
