"""Which codec a packet goes through: the one choice that both ends of a link, and the planner, go by."""

from __future__ import annotations

import torch
from torch import Tensor

from pipecomp.config import Activations
from pipecomp.kernels import ops
from pipecomp.messages.codecs import Cast, Codec, Quantized, TopK
from pipecomp.messages.rotation import Rotated

_PLAIN: dict[str, Codec] = {  # of methods without settings of their own
    "fp16": Cast(torch.float16),
    "bf16": Cast(torch.bfloat16),
}


class LinkCodecs:
    """The codecs of one link.

    forward: of activations themselves with "direct", of their changes with "aqsgd". first: of first visits; None where
    they are uncompressed, as first_bits of 0 says too. backward: of gradients, where they are quantized.
    """

    def __init__(self, a: Activations, link: int) -> None:
        self._method, self._eval = a.method, "none" if a.eval == "full" else a.eval
        how = (a.rounding, a.scale, a.group_size)
        forward_bits, backward_bits = a.bits(link)
        of_themselves = Rotated if a.rotation else Quantized
        self.forward = (of_themselves if a.method == "direct" else Quantized)(forward_bits, *how)
        self.first = None if a.first_visit == "full" else of_themselves(int(a.first_visit), *how)
        self.first_bits = 0 if self.first is None else self.first.bits
        self.backward: Codec = Quantized(backward_bits, *how)
        if a.backward_top_k is not None:
            self.backward = TopK(backward_bits, a.backward_top_k, *how)

    def activation(self, dtype: torch.dtype) -> Codec:
        """Of a training packet forward; with "aqsgd" of a delta. dtype: the stages' own."""
        return _chosen(self._method, self.forward, dtype)

    def visit_bytes(self, n: int, hidden: int, delta: bool, dtype: torch.dtype) -> int:
        """Bytes of a sample's part of a training packet of "aqsgd"."""
        return (self.forward if delta else self.first_visit(dtype)).payload_bytes(n, hidden)

    def first_visit(self, dtype: torch.dtype) -> Codec:
        """Of a sample's first visit with "aqsgd"."""
        return self.first or Cast(dtype)

    def visit(self, x_nH: Tensor, m_nH: Tensor, delta: bool, seed: int) -> ops.Visit:
        """A sample of a training packet of "aqsgd": its change, which moves m, or a first visit, which sets it."""
        if delta:
            return ops.Visit(x_nH, m_nH, self.forward.options(seed), True)
        if self.first is None:
            return ops.Visit(x_nH, m_nH, None)
        return ops.Visit(self.first.before(x_nH), m_nH, self.first.options(seed))

    def arriving(self, m_nH: Tensor, delta: bool, dtype: torch.dtype) -> ops.Arriving:
        """The same at the other end. dtype: the stages' own."""
        codec = self.forward if delta else self.first
        return ops.Arriving(m_nH, None if codec is None else codec.options(), delta, dtype)

    def first_m(self, decoded_nH: Tensor) -> Tensor:
        """m after a first visit, from what its values decode to."""
        return decoded_nH if self.first is None else self.first.after(decoded_nH)

    def gradient(self, dtype: torch.dtype) -> Codec:
        """Of a packet backward."""
        return _chosen(self._method, self.backward, dtype)

    def evaluation(self, dtype: torch.dtype) -> Codec:
        """Of a packet in evaluation."""
        return _chosen(self._eval, self.forward, dtype)


def _chosen(method: str, quantized: Codec, dtype: torch.dtype) -> Codec:
    return quantized if method in Activations.QUANTIZED else _PLAIN.get(method) or Cast(dtype)
