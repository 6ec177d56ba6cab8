"""How this program starts itself again, in processes of its own."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path


def python_module(module: str, *arguments: str) -> list[str]:
    """Give the command that runs a module of this package with this Python.

    It does not look in the working directory, which may hold another state of this package, as a checkout does whose
    kernels are not compiled, or a file named like a module: unless this package itself was found there.
    """
    found_here = False
    with contextlib.suppress(OSError):  # a folder that was deleted
        found_here = Path(__file__).resolve().parents[1] == Path.cwd().resolve()
    return [sys.executable, *([] if found_here else ["-P"]), "-m", module, *arguments]
