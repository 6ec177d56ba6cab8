"""Who goes first on a machine's link: the pipeline's packets, which stages wait for, before what replicas exchange."""

from __future__ import annotations

import time
from collections.abc import Collection

from pipecomp.stages.link.transport import Transport

MOST_S = 0.125  # for which one slice of an exchange waits: it comes to its end on a link that is never free, too
_POLL_S = 0.002


class Precedence:
    """Of some transports over all else that this process sends.

    It is known only here what waits to leave this machine, and only here something can be done about it; so what
    replicas exchange in the background asks before every message, on its own thread.

    Attributes:
        waited_s: For which messages were held back, together.

    Example:
        >>> exchange.give_way(Precedence(transports).wait)
    """

    def __init__(self, transports: Collection[Transport]) -> None:
        self._transports = list(transports)
        self.waited_s = 0.0

    def wait(self) -> None:
        """Return when no packet of the transports waits or is leaving, or after `MOST_S`."""
        began = now = time.monotonic()
        while now - began < MOST_S and any(transport.sending() for transport in self._transports):
            time.sleep(_POLL_S)
            now = time.monotonic()
        self.waited_s += now - began
