"""Processes: how this program starts itself again, how one has ended, and signals that are caught for a while."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path


def found_in_working_directory() -> bool:
    """Say whether this package is the one that Python finds in the working directory."""
    with contextlib.suppress(OSError):  # a folder that was deleted
        return Path(__file__).resolve().parents[1] == Path.cwd().resolve()
    return False


def python_module(module: str, *arguments: str) -> list[str]:
    """Give the command that runs a module of this package with this Python.

    It does not look in the working directory, which may hold another state of this package, as a checkout does whose
    kernels are not compiled, or a file named like a module: unless this package itself was found there.
    """
    return [sys.executable, *([] if found_in_working_directory() else ["-P"]), "-m", module, *arguments]


def exit_status(code: int) -> int:
    """Give the status of a process as shells do: 128 + n for one that signal n has ended, which `Popen` says as -n."""
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def handled(handler: signal._HANDLER, *numbers: int) -> Iterator[None]:
    """Handle these signals so until it is left; only on the main thread."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
