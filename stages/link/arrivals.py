"""Packets that have come and wait for their turn: their bytes are on the way to the device before it is there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pipecomp.codecs.wire import MAX_SAMPLES, Header, Kind, peek
from pipecomp.kernels.staging import Copy, Staging
from pipecomp.stages.link.transport import Transport


class Arrivals:
    """Starts copying each packet of a transport to the device that the stage computes on, as it comes.

    most_samples: of a packet; one that claims more is a WireError before its samples are read. then: called with every
    packet's header after that, on the thread that receives it; None for nothing.
    """

    def __init__(self, transport: Transport, staging: Staging) -> None:
        self.most_samples = MAX_SAMPLES
        self.then: Callable[[Header], None] | None = None
        self._staging = staging
        self._copies: dict[int, tuple[np.ndarray, Copy]] = {}  # by the packet's identity, which lasts while it is here
        transport.on_arrival = self._arrived

    def _arrived(self, packet: np.ndarray) -> None:
        if self._staging.immediate and self.then is None:
            return
        header = peek(packet, most_samples=self.most_samples)
        if not self._staging.immediate and header.kind is not Kind.INVENTORY:  # those are read on the host
            self._copies[id(packet)] = packet, self._staging.to_device(_tensor(packet))
        if self.then is not None:
            self.then(header)

    def payload(self, packet: np.ndarray, payload: np.ndarray) -> Tensor:
        """Give the payload, a view into `packet`, on the device: uint8 [bytes], at any address.

        What is computed there from here on waits for its copy; this thread does not.
        """
        _, copy = self._copies.pop(id(packet), (None, None))
        if copy is None:  # it came before anybody looked
            return self._staging.to_device(_tensor(payload)).wait()
        start = payload.ctypes.data - packet.ctypes.data
        return copy.wait()[start : start + payload.size]


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())
