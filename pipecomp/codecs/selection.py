"""The choice of a packet's codec, common to both ends of a link and the planner."""

from __future__ import annotations

import torch

from pipecomp.codecs.codecs import Cast, Clustered, Codec, DeltaCodecs, Quantized, Rotated, TopK
from pipecomp.config import Activations
from pipecomp.config.activations import ConstantError
from pipecomp.errors import require

_PLAIN: dict[str, Codec] = {  # of methods without settings of their own
    "fp16": Cast(torch.float16),
    "bf16": Cast(torch.bfloat16),
}


class LinkCodecs:
    """The codecs of one link.

    Attributes:
        forward: Codec of activations ("direct"), or of their changes ("aqsgd").
        activations: Codecs of changes and first visits of activations.
        clustered: Codec of changes from cluster centers, in place of both; None without clusters.
        backward: Codec of gradients, if they are quantized.
        gradients: Codecs of changes and first visits of gradients; None if gradients are sent without memory.
    """

    def __init__(self, a: Activations, link: int, clusters: int | None = None) -> None:
        self._method, self._eval = a.method, "none" if a.eval == "full" else a.eval
        forward_bits, backward_bits = a.bits(link)
        plain_rows = Rotated if a.rotation else Quantized  # of activations themselves
        self._link = link
        self.forward = self._quantized(plain_rows if a.method == "direct" else Quantized, a, "forward", forward_bits)
        first = None
        if not isinstance(a.first_visit, str):
            first = self._quantized(plain_rows, a, "forward", a.first_visit)
        self.activations = DeltaCodecs(self.forward, first)
        self.clustered = None if clusters is None else Clustered(self.forward, clusters)
        of_gradients = self._quantized(Quantized, a, "backward", backward_bits)
        self.backward: Codec = of_gradients
        self.gradients: DeltaCodecs | None = None
        if a.backward_method == "delta":
            first = self._quantized(Quantized, a, "backward", a.backward_first_visit)
            self.gradients = DeltaCodecs(of_gradients, first, flags=True)
        if a.backward_top_k is not None:
            of = of_gradients
            self.backward = TopK(of.bits, a.backward_top_k, of.rounding, of.scale, of.group_size)

    def activation(self, dtype: torch.dtype) -> Codec:
        """Return the codec of a training packet forward; with "aqsgd" of a change. dtype: of the stages."""
        return _select(self._method, self.forward, dtype)

    def gradient(self, dtype: torch.dtype) -> Codec:
        """Return the codec of a packet backward."""
        return _select(self._method, self.backward, dtype)

    def evaluation(self, dtype: torch.dtype) -> Codec:
        """Return the codec of a packet in evaluation."""
        return _select(self._eval, self.forward, dtype)

    def _quantized(self, kind: type[Quantized], a: Activations, direction: str, bits: int | ConstantError) -> Quantized:
        """Make a quantizing codec of one direction, with these bits or this error."""
        most, error = (bits.max, bits) if isinstance(bits, ConstantError) else (bits, None)
        scale = a.scale_of(direction)
        hint = "Only pipecomp.initialize settles 'auto'."
        require(scale != "auto", "activations.scale", scale, "'max', 'rms', 'channels' or 'cached_channels'", hint)
        return kind(most, a.rounding, scale, a.group_size, error, a.gain_of(direction, self._link))


def _select(method: str, quantized: Codec, dtype: torch.dtype) -> Codec:
    return quantized if method in Activations.QUANTIZED else _PLAIN.get(method) or Cast(dtype)
