"""A packet between the kernels that write it and the thread that sends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from torch import Tensor

from pipecomp.codecs.wire import Header, Kind, Sample, begin, packet_bytes, seal
from pipecomp.errors import NonFiniteError
from pipecomp.kernels.ops import FiniteFlag
from pipecomp.kernels.staging import Copy, Staging

# Writes a payload, and seals the packet around it if that is given and can be done on the way. The verdicts, and where
# the bits follow from the values, these bits: int64 [1] beside the payload.
Encode = Callable[[Tensor, Tensor | None], tuple[list[FiniteFlag], Tensor | None]]


class Fitted(NamedTuple):
    """A packet whose bits follow from its values. describe: what they make of its header and its payload's length."""

    kind: Kind
    samples: Sequence[Sample]
    describe: Callable[[int], tuple[Header, int]]


class Contents:
    """A packet's header and length, which may follow from bits, int64 [1], that are on their way to the host.

    size: of the packet, where its header is known.
    """

    def __init__(self, header: Header | Fitted, size: int, bits: Copy | None) -> None:
        self._header, self._bits = header, bits
        self._found = (header, size) if isinstance(header, Header) else None

    @property
    def known(self) -> bool:
        """Whether `found` does not wait."""
        return self._found is not None

    def found(self) -> tuple[Header, int]:
        """Give the header, and the bytes of the packet, once they are known. Any thread may ask."""
        if self._found is None:
            assert isinstance(self._header, Fitted)
            assert self._bits is not None
            header, payload_bytes = self._header.describe(int(self._bits.wait()))
            self._found = header, packet_bytes(len(header.samples), payload_bytes)
        return self._found


class Packet:
    """A packet on its way to the host: Unfinished, until its bytes are there and all values turn out to be encoded.

    buffer: has room for it, and its beginning where the contents were known. what: is encoded, for the error. settle:
    waits until it is known whether all values could be encoded, and raises NonFiniteError if not; stores keep it until
    they know, and it keeps nothing of the packet.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        contents: Contents,
        buffer: np.ndarray,
        verdicts: list[FiniteFlag],
        payload: Copy,
        staging: Staging,
        what: str,
        *,
        checksum: bool,
    ) -> None:
        self.samples, self.contents, self.buffer, self._payload = samples, contents, buffer, payload
        self._begun, self._checksum = contents.known, checksum
        self._sealed = any(verdict.has_checksum for verdict in verdicts)
        self.settle = partial(_settle, [(verdict, staging.to_host(verdict.flag)) for verdict in verdicts], what)

    @property
    def size(self) -> int:
        """See Unfinished."""
        return self.buffer.size

    def finish(self) -> np.ndarray:
        """See Unfinished."""
        self.settle()
        self._payload.wait()
        if not self._begun:
            header, size = self.contents.found()
            self.buffer = self.buffer[:size]
            begin(self.buffer, header, checksum=self._checksum)
            self._begun = True
        if not self._sealed:
            seal(self.buffer)
        return self.buffer


def _settle(verdicts: list[tuple[FiniteFlag, Copy]], what: str) -> None:
    for verdict, flag in verdicts:
        try:
            verdict.check(flag.wait())
        except NonFiniteError as error:
            raise NonFiniteError(f"{what}: {error}") from error
