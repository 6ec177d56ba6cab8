"""How this program starts itself again, in processes of its own."""

from __future__ import annotations

import contextlib
import sys
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
