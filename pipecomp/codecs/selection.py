"""The choice of a packet's codec, common to both ends of a link and the planner."""

from __future__ import annotations

import torch

from pipecomp.codecs.codecs import Cast, Clustered, Codec, DeltaCodecs, Quantized, Rotated, TopK
from pipecomp.config import Activations
from pipecomp.config.activations import ConstantError

_PLAIN: dict[str, Codec] = {  # of methods without settings of their own
    "fp16": Cast(torch.float16),
    "bf16": Cast(torch.bfloat16),
}


class LinkCodecs:
    """The codecs of one link.

    Attributes:
        forward: Of activations ("direct"), or of their changes ("aqsgd").
        activations: Of changes and first visits of activations.
        clustered: Of changes from cluster centers, in place of both; None without clusters.
        backward: Of gradients, if they are quantized.
        gradients: Of changes and first visits of gradients; None if gradients are sent without memory.
    """

    def __init__(self, a: Activations, link: int, clusters: int | None = None) -> None:
        self._method, self._eval = a.method, "none" if a.eval == "full" else a.eval
        options = (a.rounding, a.scale, a.group_size)
        forward, backward = (_bits_and_error(bits) for bits in a.bits(link))
        plain_rows = Rotated if a.rotation else Quantized  # of activations themselves
        self.forward = (plain_rows if a.method == "direct" else Quantized)(forward[0], *options, forward[1])
        first = None
        if not isinstance(a.first_visit, str):
            bits, error = _bits_and_error(a.first_visit)
            first = plain_rows(bits, *options, error)
        self.activations = DeltaCodecs(self.forward, first)
        self.clustered = None if clusters is None else Clustered(self.forward, clusters)
        of_gradients = Quantized(backward[0], *options, backward[1])
        self.backward: Codec = of_gradients
        self.gradients: DeltaCodecs | None = None
        if a.backward_method == "delta":
            bits, error = _bits_and_error(a.backward_first_visit)
            self.gradients = DeltaCodecs(of_gradients, Quantized(bits, *options, error), flags=True)
        if a.backward_top_k is not None:
            self.backward = TopK(backward[0], a.backward_top_k, *options)

    def activation(self, dtype: torch.dtype) -> Codec:
        """Return the codec of a training packet forward; with "aqsgd" of a change. dtype: of the stages."""
        return _select(self._method, self.forward, dtype)

    def gradient(self, dtype: torch.dtype) -> Codec:
        """Return the codec of a packet backward."""
        return _select(self._method, self.backward, dtype)

    def evaluation(self, dtype: torch.dtype) -> Codec:
        """Return the codec of a packet in evaluation."""
        return _select(self._eval, self.forward, dtype)


def _bits_and_error(bits: int | ConstantError) -> tuple[int, ConstantError | None]:
    """Return the most bits, and the error that fewer must keep."""
    return (bits.max, bits) if isinstance(bits, ConstantError) else (bits, None)


def _select(method: str, quantized: Codec, dtype: torch.dtype) -> Codec:
    return quantized if method in Activations.QUANTIZED else _PLAIN.get(method) or Cast(dtype)
