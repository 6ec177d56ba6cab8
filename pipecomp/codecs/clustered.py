"""Rows as changes from cluster centers that both ends of a link hold: which center each builds on, then the changes.

Shapes: T real tokens of a micro-batch, H hidden size, C cluster centers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipecomp.codecs.codecs import Quantized
from pipecomp.codecs.wire import Method
from pipecomp.kernels import ops


@dataclass(frozen=True)
class Clustered:
    """A packet's rows: the numbers of their centers, packed; scales of all changes; their packed codes.

    change: of the changes. clusters: C, a power of two, so that every number of so many bits is a center's.
    """

    change: Quantized
    clusters: int
    method: Method = Method.CLUSTERED

    @property
    def number_bits(self) -> int:
        """Bits of a center's number."""
        return (self.clusters - 1).bit_length()

    def head_bytes(self, tokens: int) -> int:
        """Bytes of the numbers of so many rows."""
        return (tokens * self.number_bits + 7) // 8

    def payload_bytes(self, tokens: int, hidden: int) -> int:
        """Count the bytes of an encoded [tokens, hidden]."""
        return self.head_bytes(tokens) + self.change.payload_bytes(tokens, hidden)

    def may_have(self, bits: int) -> bool:
        """Whether a packet's changes may have so many bits."""
        return self.change.may_have(bits)

    def of_packet(self, bits: int) -> Clustered:
        """Make the codec of one packet, whose changes have so many bits."""
        return replace(self, change=self.change.of_packet(bits))

    def fitted(self, x_TH: Tensor, c_TH: Tensor) -> Clustered:
        """Make the codec of a packet of x, whose rows build on the centers c."""
        return self.of_packet(self.change.fewest([ops.EncodeItem(x_TH, c_TH, self.change.options(), True)]))

    def encode(
        self, x_TH: Tensor, number_T: Tensor, c_TH: Tensor, payload: Tensor, packet: Tensor | None, seed: int
    ) -> ops.FiniteFlag:
        """Write the payload, uint8 [payload_bytes] beside x, and make c what it decodes to.

        Args:
            x_TH: The rows, in any training dtype.
            number_T: Of their centers.
            c_TH: The centers, float32; they become what the other end computes with.
            payload: Where to write.
            packet: As for `ops.encode_batch`.
            seed: Of stochastic rounding.

        Returns:
            What tells whether all could be encoded; if not, the payload and c are undefined.
        """
        head = self.head_bytes(x_TH.shape[0])
        payload[:head] = ops.pack_bits(number_T[None], self.number_bits)[0]
        visit = ops.EncodeItem(x_TH, c_TH, self.change.options(seed), True)
        return ops.encode_batch([visit], payload[head:], packet=packet)

    def numbers(self, payload: Tensor, tokens: int) -> Tensor:
        """Read the numbers of a payload's centers, int64 [tokens], all below C."""
        packed = payload[None, : self.head_bytes(tokens)]
        return ops.unpack_bits(packed, self.number_bits, tokens)[0].to(torch.int64)

    def decode(self, payload: Tensor, c_TH: Tensor) -> None:
        """Add a payload's changes to the centers of its rows, float32 [T, H], in place."""
        arriving = ops.DecodeItem(c_TH, self.change.options(), True)
        ops.decode_batch(payload[self.head_bytes(c_TH.shape[0]) :], [arriving])
