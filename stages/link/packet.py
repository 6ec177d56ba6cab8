"""A packet between the kernels that write it and the thread that sends it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from torch import Tensor

from pipecomp.errors import NonFiniteError
from pipecomp.kernels.ops import Verdict
from pipecomp.kernels.staging import Copy, Staging
from pipecomp.messages.wire import Header, seal

# Writes a payload, and seals the packet around it if that is given and can be done on the way.
Encode = Callable[[Tensor, Tensor | None], list[Verdict]]
# Writes a payload; the packet's header, which follows from it, the payload's length, and the verdicts.
Fit = Callable[[Tensor], tuple[Header, int, list[Verdict]]]


class Packet:
    """A packet on its way to the host: Unfinished, until its bytes are there and all values turn out to be encoded.

    what: is encoded, for the error. settle: waits until it is known whether all values could be encoded, and raises
    NonFiniteError if not; stores keep it until they know, and it keeps nothing of the packet.
    """

    def __init__(
        self,
        header: Header,
        buffer: np.ndarray,
        verdicts: list[Verdict],
        payload: Copy,
        staging: Staging,
        what: str,
    ) -> None:
        self.header, self.buffer, self._payload = header, buffer, payload
        self._sealed = any(verdict.sealed for verdict in verdicts)
        self.settle = partial(_settle, [(verdict, staging.to_host(verdict.flag)) for verdict in verdicts], what)

    @property
    def size(self) -> int:
        """See Unfinished."""
        return self.buffer.size

    def finish(self) -> np.ndarray:
        """See Unfinished."""
        self.settle()
        self._payload.wait()
        if not self._sealed:
            seal(self.buffer)
        return self.buffer


def _settle(verdicts: list[tuple[Verdict, Copy]], what: str) -> None:
    for verdict, flag in verdicts:
        try:
            verdict.check(flag.wait())
        except NonFiniteError as error:
            raise NonFiniteError(f"{what}: {error}") from error
