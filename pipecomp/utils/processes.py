"""Commands, exit statuses, signal handlers and memory allocation of processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

_M_MMAP_THRESHOLD = -3  # of malloc.h
LARGE_BLOCK = 8 << 20
"""Bytes from which on a freed block goes back to the system."""


def imported_from_working_directory() -> bool:
    """Return whether this package was imported from the working directory."""
    with contextlib.suppress(OSError):  # a deleted folder
        return Path(__file__).resolve().parents[2] == Path.cwd().resolve()
    return False


def python_module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this package with this Python interpreter.

    Note:
        `-P` keeps Python from searching the working directory, which may hold another copy of this package, such as a
        checkout without compiled kernels, or a file named like a module. It is left out if this package itself was
        imported from there.
    """
    return [sys.executable, *([] if imported_from_working_directory() else ["-P"]), "-m", module, *arguments]


def exit_status(code: int) -> int:
    """Convert a return code of `Popen` to a shell's exit status: -n, for a process killed by signal n, to 128 + n."""
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def handle_signals(handler: signal._HANDLER, *numbers: int) -> Iterator[None]:
    """Install a handler for these signals during the body; main thread only."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def return_large_blocks() -> None:
    """Let glibc return freed blocks from LARGE_BLOCK on to the system; other C libraries stay as they are.

    Variables of glibc that set this (MALLOC_MMAP_THRESHOLD_, GLIBC_TUNABLES) come first.

    Note:
        By default the first large block that is freed raises the limit, up to 32 MiB. Later weights, logits and
        gradients then come from the heap, which keeps what is freed between other blocks: a stage takes up to twice
        the memory that it uses. A small limit costs time, as the system clears each block; with 8 MiB none was seen.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK)
