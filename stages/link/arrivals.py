"""Packets that have come and wait for their turn: their bytes are on the way to the device before it is there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pipecomp.kernels.staging import Copy, Staging
from pipecomp.messages.wire import Kind, peek
from pipecomp.stages.link.transport import Transport


class Arrivals:
    """Starts copying each packet of a transport to the device that the stage computes on, as it comes.

    then: called with every packet after that, on the thread that receives it; None for nothing.
    """

    def __init__(self, transport: Transport, staging: Staging) -> None:
        self.then: Callable[[np.ndarray], None] | None = None
        self._staging = staging
        self._copies: dict[int, tuple[np.ndarray, Copy]] = {}  # by the packet's identity, which lasts while it is here
        transport.on_arrival = self._arrived

    def _arrived(self, packet: np.ndarray) -> None:
        if not self._staging.immediate and peek(packet).kind is not Kind.INVENTORY:  # those are read on the host
            self._copies[id(packet)] = packet, self._staging.to_device(_tensor(packet))
        if self.then is not None:
            self.then(packet)

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
