"""Time limits of tests for events that come by themselves.

No test may fail because a machine is slow, so these guard against hangs alone: they are ten times and more what the
slowest test takes on a quiet machine with two cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

HANG_S = 1200.0  # for one command, or one function on several ranks; a test's own limit is pyproject.toml's `timeout`
TOLD_S = 900.0  # for ranks to hear that one is lost; torch by itself would let them wait for half an hour


def until(condition: Callable[[], Any]) -> Any:
    """Wait for it to hold; what it returned."""
    deadline = time.monotonic() + HANG_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "not so after a long time"
        time.sleep(0.01)
    return found
