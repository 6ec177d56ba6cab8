"""Which codec a packet goes through: the one choice that both ends of a link, and the planner, go by."""

from __future__ import annotations

import torch
from torch import Tensor

from pipecomp.codecs.clustered import Clustered
from pipecomp.codecs.codecs import Cast, Codec, Quantized, TopK
from pipecomp.codecs.rotation import Rotated
from pipecomp.config import Activations
from pipecomp.config.activations import ConstantError
from pipecomp.kernels import ops

_PLAIN: dict[str, Codec] = {  # of methods without settings of their own
    "fp16": Cast(torch.float16),
    "bf16": Cast(torch.bfloat16),
}


class VisitCodecs:
    """The codecs of one direction whose samples are sent as changes.

    change: of a change. first: of a first visit; None where that is uncompressed, as first_bits of 0 says too. flags:
    whether a packet says of each token whether its change is sent, or it itself.
    """

    def __init__(self, change: Quantized, first: Quantized | None, *, flags: bool = False) -> None:
        self.change, self.first, self._flags = change, first, flags
        self.first_bits = 0 if first is None else first.bits

    @property
    def fixed(self) -> bool:
        """Whether all packets have the same bits."""
        return self.change.error is None and (self.first is None or self.first.error is None)

    def fitted(self, changes: list[ops.EncodeItem], firsts: list[ops.EncodeItem]) -> VisitCodecs:
        """Make the codecs of a packet with these samples; the fewest bits allowed of what it has none of."""
        return self.of_packet(self.change.fewest(changes), 0 if self.first is None else self.first.fewest(firsts))

    def fitting(self, delta: bool) -> Quantized | None:
        """Find what encodes changes (delta) or first visits with the fewest bits that keep an error, if so they are."""
        codec = self.change if delta else self.first
        return None if codec is None or codec.error is None else codec

    def of_fitted(self, bits: int, delta: bool) -> VisitCodecs:
        """Make the codecs of a packet of changes alone, or first visits, which took so many bits."""
        if delta:
            return self.of_packet(bits, 0 if self.first is None else self.first.fewest([]))
        return self.of_packet(self.change.fewest([]), bits)

    def may_have_first(self, bits: int) -> bool:
        """Whether a packet may have first visits of so many bits."""
        return bits == 0 if self.first is None else self.first.may_have(bits)

    def of_packet(self, bits: int, first_bits: int) -> VisitCodecs:
        """Make the codecs of one packet, which has so many bits."""
        first = None if self.first is None else self.first.of_packet(first_bits)
        return VisitCodecs(self.change.of_packet(bits), first, flags=self._flags)

    def before(self, x_nH: Tensor, delta: bool) -> Tensor:
        """Make what is quantized of a sample's rows, or of the change of them; see Quantized."""
        return x_nH if delta or self.first is None else self.first.before(x_nH)

    def head_bytes(self, tokens: int) -> int:
        """Bytes of a payload before its samples: a bit for each token."""
        return (tokens + 7) // 8 if self._flags else 0

    def first_visit(self, dtype: torch.dtype) -> Codec:
        """Of a sample's first visit. dtype: the stages' own."""
        return self.first or Cast(dtype)

    def visit(self, x_nH: Tensor, m_nH: Tensor | None, delta: bool, seed: int = 0) -> ops.EncodeItem:
        """A sample of a packet, after `before`: its change, which moves m, or a first visit, which sets it."""
        codec = self.change if delta else self.first
        return ops.EncodeItem(x_nH, m_nH, None if codec is None else codec.options(seed), delta)

    def arriving(self, m_nH: Tensor, delta: bool, dtype: torch.dtype) -> ops.DecodeItem:
        """The same at the other end. dtype: the stages' own."""
        codec = self.change if delta else self.first
        return ops.DecodeItem(m_nH, None if codec is None else codec.options(), delta, dtype)

    def first_m(self, decoded_nH: Tensor) -> Tensor:
        """m after a first visit, from what its values decode to."""
        return decoded_nH if self.first is None else self.first.after(decoded_nH)

    def smaller(self, change_nH: Tensor, x_nH: Tensor) -> Tensor:
        """Which rows lose less as changes than as they are, bool [n]."""
        return self.squared_scales(change_nH) < self.squared_scales(x_nH)

    def squared_scales(self, x_nH: Tensor) -> Tensor:
        """Sum up the squared scales of each row's groups, times their values: float64 [n].

        That is what the error of a number of bits is proportional to (docs/algorithms.md, 1.2).
        """
        if self.change.scale != "max":
            return x_nH.double().square().sum(1)
        n, hidden = x_nH.shape
        size = self.change.group_size or hidden
        groups, short = -(-hidden // size), -hidden % size  # groups, and what the last one lacks
        padded = torch.nn.functional.pad(x_nH.abs(), (0, short)) if short else x_nH.abs()
        widths = torch.full((groups,), size, dtype=torch.float64, device=x_nH.device)
        widths[-1] -= short
        return (padded.view(n, groups, size).amax(2).double().square() * widths).sum(1)


class LinkCodecs:
    """The codecs of one link.

    forward: of activations themselves with "direct", of their changes with "aqsgd". activations: of changes and first
    visits. clustered: of changes from cluster centers, in the place of both; None where there are none. backward: of
    gradients themselves, where they are quantized. gradients: of their changes and first visits, None where gradients
    are sent as they are.
    """

    def __init__(self, a: Activations, link: int, clusters: int | None = None) -> None:
        self._method, self._eval = a.method, "none" if a.eval == "full" else a.eval
        how = (a.rounding, a.scale, a.group_size)
        forward, backward = (_bits_and_error(bits) for bits in a.bits(link))
        of_themselves = Rotated if a.rotation else Quantized
        self.forward = (of_themselves if a.method == "direct" else Quantized)(forward[0], *how, forward[1])
        first = None
        if not isinstance(a.first_visit, str):
            bits, error = _bits_and_error(a.first_visit)
            first = of_themselves(bits, *how, error)
        self.activations = VisitCodecs(self.forward, first)
        self.clustered = None if clusters is None else Clustered(self.forward, clusters)
        of_gradients = Quantized(backward[0], *how, backward[1])
        self.backward: Codec = of_gradients
        self.gradients: VisitCodecs | None = None
        if a.backward_method == "delta":
            bits, error = _bits_and_error(a.backward_first_visit)
            self.gradients = VisitCodecs(of_gradients, Quantized(bits, *how, error), flags=True)
        if a.backward_top_k is not None:
            self.backward = TopK(backward[0], a.backward_top_k, *how)

    def activation(self, dtype: torch.dtype) -> Codec:
        """Of a training packet forward; with "aqsgd" of a delta. dtype: the stages' own."""
        return _chosen(self._method, self.forward, dtype)

    def gradient(self, dtype: torch.dtype) -> Codec:
        """Of a packet backward."""
        return _chosen(self._method, self.backward, dtype)

    def evaluation(self, dtype: torch.dtype) -> Codec:
        """Of a packet in evaluation."""
        return _chosen(self._eval, self.forward, dtype)


def _bits_and_error(bits: int | ConstantError) -> tuple[int, ConstantError | None]:
    """The most bits, and what the fewest keep."""
    return (bits.max, bits) if isinstance(bits, ConstantError) else (bits, None)


def _chosen(method: str, quantized: Codec, dtype: torch.dtype) -> Codec:
    return quantized if method in Activations.QUANTIZED else _PLAIN.get(method) or Cast(dtype)
