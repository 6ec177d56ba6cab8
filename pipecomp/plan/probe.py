"""Rates and latencies of the links between stages, measured over the links' own transports."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pipecomp.doctor.measure import Measured, follow, lead
from pipecomp.errors import LinkError
from pipecomp.plan.network import Line, Network
from pipecomp.stages.link.transport import Transport


class TransportPeer:
    """The rank at the other end of a transport, as `doctor.measure` wants it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def send(self, tensor: Tensor) -> None:
        """See doctor.measure.Peer."""
        self._transport.send(tensor.contiguous().view(torch.uint8).numpy())

    def receive(self, tensor: Tensor) -> Tensor:
        """See doctor.measure.Peer."""
        data = self._transport.recv()
        if data.size != tensor.numel() * tensor.element_size():
            raise LinkError(f"rank {self._transport.peer} sent {data.size} bytes while the link was measured")
        return torch.from_numpy(np.ascontiguousarray(data)).view(tensor.dtype)


def measure_links(stage: int, to_previous: Transport | None, to_next: Transport | None) -> Measured | None:
    """Measure this stage's links; all stages must call it together. Returns the link to the next stage.

    Every other link at a time, so that a stage measures one link at once: some two seconds for each half. LinkError
    and what the transports raise.
    """
    found = None
    for turn in (0, 1):
        if to_next is not None and stage % 2 == turn:
            found = lead(TransportPeer(to_next))
        elif to_previous is not None and stage % 2 != turn:
            follow(TransportPeer(to_previous))
    return found


def network_of(links: Sequence[Sequence[Measured]]) -> Network:
    """Make the network of what was measured, by link, of one replica or several: the slowest counts.

    One way takes half of the way there and back: without clocks that agree nobody can tell more.
    """

    def lines(way: str) -> tuple[Line, ...]:
        return tuple(
            Line(bits_per_s=min(getattr(m, way) for m in found), latency_s=max(m.round_trip_s for m in found) / 2)
            for found in links
        )

    return Network(forward=lines("out_bit_s"), backward=lines("back_bit_s"))
