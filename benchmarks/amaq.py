"""AMAQ (arXiv:2510.05468): bits of each hidden channel that training learns, as ends of an `InProcessPipeline`'s link.

The paper's rule for bits, b = least + (most − least) · σ(q), has a gate q for each channel, trained by the gradient of
the task's loss and of a term that pulls the mean of b to a target. What the paper leaves open is chosen here: uniform
levels between a channel's smallest and largest value of a packet; Adam for the gates; gradients of a micro-batch with
the bits of its activations.

Shapes: T real tokens of all samples, H hidden size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks.boundaries import Coders
from benchmarks.rival_rows import Reader, packed
from pipecomp.codecs.codecs import as_bytes
from pipecomp.stages.link.layout import Layout

LEAST, MOST = 1, 8  # bits
START = 2.0  # of the gates: 7.2 bits; the paper begins with 6 to 8
RATE = 0.05  # Adam's, a step for each micro-batch: the target is reached within the first epoch
PULL = 1.0  # weight of the mean's distance to its target, beside a gradient scaled to norm 1
_HEAD_BITS = 4  # of a channel's number of bits, less one


def channel_bits(gates_H: Tensor) -> Tensor:
    """Bits before rounding, float32 [H]."""
    return LEAST + (MOST - LEAST) * torch.sigmoid(gates_H)


def encode(x_TH: Tensor, bits_H: Tensor) -> Tensor:
    """Smallest values and steps of the channels in float16, then the codes, channels with equal bits together."""
    low_H = x_TH.amin(0).half().float()
    step_H = ((x_TH.amax(0) - low_H) / (2.0**bits_H - 1)).half().float()
    codes_TH = torch.where(step_H > 0, (x_TH - low_H) / step_H, 0.0).round().clamp_min(0).minimum(2.0**bits_H - 1).int()
    parts = [as_bytes(low_H.half()), as_bytes(step_H.half())]
    parts += [packed(codes_TH[:, bits_H == b].reshape(-1).contiguous(), b) for b in range(LEAST, MOST + 1)]
    return torch.cat(parts)


def decode(reader: Reader, bits_H: Tensor, rows: int) -> Tensor:
    """Undo `encode`, about: float32 [T, H]."""
    low_H, step_H = reader.halves(len(bits_H)), reader.halves(len(bits_H))
    codes_TH = torch.zeros(rows, len(bits_H))
    for b in range(LEAST, MOST + 1):
        count = int((bits_H == b).sum())
        codes_TH[:, bits_H == b] = reader.integers(rows * count, b).reshape(rows, count).float()
    reader.end()
    return low_H + step_H * codes_TH


class _Gates:
    """The gates of one end that sends activations, and what its micro-batches in flight need for their gradient."""

    def __init__(self, target: float) -> None:
        self.target = target
        self.q_H: Tensor | None = None
        self.in_flight: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}  # by samples: bits, and ∂x/∂bits

    def bits(self, hidden: int) -> Tensor:
        """Bits of each channel, float32 [H], whole numbers."""
        if self.q_H is None:
            self.q_H = torch.full((hidden,), START, requires_grad=True)
            self._adam = torch.optim.Adam([self.q_H], RATE)
        return channel_bits(self.q_H.detach()).round()

    def learn(self, g_TH: Tensor, slope_TH: Tensor) -> None:
        """Move the gates by a micro-batch's gradient and its slopes."""
        assert self.q_H is not None, "activations go before gradients"
        self._adam.zero_grad()
        bits_H = channel_bits(self.q_H)
        task_H = (g_TH * slope_TH).sum(0)
        task_H = task_H / task_H.norm().clamp_min(1e-30)
        ((task_H * bits_H).sum() + PULL * len(bits_H) ** 0.5 * (bits_H.mean() - self.target).abs()).backward()
        self._adam.step()


class Activations:
    """The direction whose bits are learned; payload: each channel's bits, then `encode`'s."""

    def __init__(self, gates: _Gates) -> None:
        self._gates = gates
        self.held: dict[int, Tensor] = {}

    def encode(self, x_TH: Tensor, layout: Layout) -> Tensor:
        """See Coder."""
        x_TH = x_TH.float()
        bits_H = self._gates.bits(x_TH.shape[1])
        payload = encode(x_TH, bits_H)
        # x decoded = low + step · round(u), u = (x − low) / step: by the step alone it changes by round(u) − u.
        decoded_TH = decode(Reader(payload), bits_H, len(x_TH))
        slope_TH = (x_TH - decoded_TH) * (math.log(2) * 2.0**bits_H / (2.0**bits_H - 1))
        self._gates.in_flight[layout.ids] = bits_H, slope_TH
        return torch.cat([packed((bits_H - 1).int(), _HEAD_BITS), payload])

    def decode(self, payload: Tensor, layout: Layout, hidden: int) -> Tensor:
        """See Coder."""
        reader = Reader(payload)
        bits_H = reader.integers(hidden, _HEAD_BITS).float() + 1
        self._gates.in_flight[layout.ids] = bits_H, torch.empty(0)
        return decode(reader, bits_H, layout.total)


class Gradients:
    """The way back, with the bits of the same samples' activations."""

    def __init__(self, gates: _Gates) -> None:
        self._gates = gates
        self.held: dict[int, Tensor] = {}

    def encode(self, x_TH: Tensor, layout: Layout) -> Tensor:
        """See Coder."""
        return encode(x_TH.float(), self._gates.in_flight.pop(layout.ids)[0])

    def decode(self, payload: Tensor, layout: Layout, hidden: int) -> Tensor:
        """See Coder."""
        bits_H, slope_TH = self._gates.in_flight.pop(layout.ids)
        g_TH = decode(Reader(payload), bits_H, layout.total)
        self._gates.learn(g_TH, slope_TH)
        return g_TH


def ends(target: float) -> Coders:
    """One end of a link. target: mean bits of a value."""
    gates = _Gates(target)
    return Coders(Activations(gates), Gradients(gates))
