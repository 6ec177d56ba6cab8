"""Links between stages of an `InProcessPipeline`: the product's own, or another method that is compared with it.

A method plugs in as `Coders`. Each end of a link has its own, and nothing but bytes passes between them, so that what
is counted is what would be sent, and what an end remembers it has from these bytes.

Shapes: B samples, S tokens with padding, H hidden size, T real tokens of all samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pipecomp.codecs.wire import packet_bytes
from pipecomp.stages.link.endpoint import LinkReceiver, LinkSender, Position
from pipecomp.stages.link.layout import Layout, gather, scatter
from pipecomp.stats import LinkStats


class Boundary(Protocol):
    """A link between two stages, both ends of it. stats: of its traffic."""

    stats: LinkStats

    def forward(self, x_BSH: Tensor, layout: Layout, at: Position, *, training: bool) -> tuple[Tensor, Layout]:
        """Return the later stage's input, a tensor of its own, and its layout."""

    def backward(self, g_BSH: Tensor, layout: Layout, at: Position) -> Tensor:
        """Return the gradient that the earlier stage receives for `forward`'s result."""

    def end_step(self) -> None:
        """Keep what a step has changed."""

    def same_messages(self) -> bool:
        """Return True if both ends have the same state."""

    def held_bytes(self) -> int:
        """Return the bytes of both ends' state beside message stores."""


class Packets:
    """The product's own link."""

    def __init__(self, sender: LinkSender, receiver: LinkReceiver) -> None:
        self.sender, self.receiver = sender, receiver
        self.stats = sender.stats

    def forward(self, x_BSH: Tensor, layout: Layout, at: Position, *, training: bool) -> tuple[Tensor, Layout]:
        """See Boundary."""
        self.sender.send_activation(x_BSH, layout, at, training=training)
        return self.receiver.recv_activation(at, training=training)

    def backward(self, g_BSH: Tensor, layout: Layout, at: Position) -> Tensor:
        """See Boundary."""
        self.receiver.send_gradient(g_BSH, layout, at)
        return self.sender.recv_gradient(layout, at)

    def end_step(self) -> None:
        """See Boundary."""
        self.sender.end_step()
        self.receiver.end_step()

    def same_messages(self) -> bool:
        """See Boundary."""
        near, far = self.sender.store, self.receiver.store
        return near is None or far is None or near.inventory() == far.inventory()

    def held_bytes(self) -> int:
        """See Boundary: all is in the stores."""
        return 0


class Coder(Protocol):
    """One direction of a link at one end of it: the sending end encodes, the other one decodes.

    held: what this end remembers, by sample.
    """

    @property
    def held(self) -> Mapping[int, Tensor]:
        """[n, H] of each sample that is remembered."""

    def encode(self, x_TH: Tensor, layout: Layout) -> Tensor:
        """All that is sent of x, uint8 [n], beside the samples' ids and lengths; remember what the other end will."""

    def decode(self, payload: Tensor, layout: Layout, hidden: int) -> Tensor:
        """Return this end's input, float32 [T, H], and update the method's state."""


class Coders(NamedTuple):
    """One end of a link."""

    activations: Coder
    gradients: Coder


class Coded:
    """A link whose ends are two of what `make` returns. Evaluation is not compressed, nor counted."""

    def __init__(self, make: Callable[[], Coders]) -> None:
        self.stats = LinkStats()
        self._near, self._far = make(), make()

    def forward(self, x_BSH: Tensor, layout: Layout, at: Position, *, training: bool) -> tuple[Tensor, Layout]:
        """See Boundary."""
        if not training:
            return x_BSH.detach(), layout
        x_TH = gather(x_BSH.detach(), layout).contiguous()
        payload = self._near.activations.encode(x_TH, layout)
        self.stats.forward.add(x_TH.numel() * x_TH.element_size(), packet_bytes(len(layout.ids), payload.numel()))
        return scatter(self._far.activations.decode(payload, layout, x_TH.shape[1]).to(x_TH.dtype), layout), layout

    def backward(self, g_BSH: Tensor, layout: Layout, at: Position) -> Tensor:
        """See Boundary."""
        g_TH = gather(g_BSH.detach(), layout).contiguous()
        payload = self._far.gradients.encode(g_TH, layout)
        self.stats.backward.add(g_TH.numel() * g_TH.element_size(), packet_bytes(len(layout.ids), payload.numel()))
        return scatter(self._near.gradients.decode(payload, layout, g_TH.shape[1]).to(g_TH.dtype), layout)

    def end_step(self) -> None:
        """See Boundary: it is kept already."""

    def same_messages(self) -> bool:
        """See Boundary."""
        pairs = [(near.held, far.held) for near, far in zip(self._near, self._far, strict=True)]
        return all(
            near.keys() == far.keys() and all(torch.equal(near[sample], far[sample]) for sample in near)
            for near, far in pairs
        )

    def held_bytes(self) -> int:
        """See Boundary."""
        return sum(x_nH.nbytes for end in (*self._near, *self._far) for x_nH in end.held.values())
