"""Work of tests in another process, because it would end or spoil the one that tests."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable

BOUND_S = 600  # guards against a hang


def in_child(act: Callable[[], str]) -> str:
    """Return `act`'s result in a forked process, which never comes back to the tests."""
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
