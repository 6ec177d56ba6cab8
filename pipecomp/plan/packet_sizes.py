"""Bytes of the packets between two stages, from the codecs and the wire format that send them.

Packets of constant error count with their maximum of bits, unless their mean is known. Scales "auto" are those that a
run with packets of these tokens settles.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipecomp.codecs.codecs import Codec, Quantized
from pipecomp.codecs.selection import LinkCodecs
from pipecomp.codecs.wire import packet_bytes
from pipecomp.config import Config
from pipecomp.config.activations import Bits


def activation_bytes(
    config: Config,
    link: int,
    counts: Sequence[int],
    hidden: int,
    dtype: torch.dtype,
    *,
    first_visit: bool = False,
    mean_bits: float | None = None,
) -> int:
    """Return the bytes of a micro-batch's activations on a link.

    Args:
        config: Method and bits.
        link: Number of the link.
        counts: Real tokens of each sample.
        hidden: Values per token.
        dtype: Training precision.
        first_visit: True if all samples are new to the link; this changes packets of "aqsgd" only.
        mean_bits: Mean bits per value of packets of constant error; None for their maximum.
    """
    codecs = LinkCodecs(config.activations.with_scales(sum(counts)), link, config.store.clusters)
    if codecs.clustered is not None:
        head = codecs.clustered.head_bytes(sum(counts))
        return _size(codecs.clustered.change, counts, hidden, mean_bits, changes=True) + head
    cached = config.activations.method == "aqsgd"
    codec = codecs.activations.first_visit(dtype) if first_visit and cached else codecs.activation(dtype)
    return _size(codec, counts, hidden, mean_bits, changes=cached and not first_visit)


def gradient_bytes(
    config: Config,
    link: int,
    counts: Sequence[int],
    hidden: int,
    dtype: torch.dtype,
    *,
    first_visit: bool = False,
    mean_bits: float | None = None,
) -> int:
    """Return the bytes of a micro-batch's gradients on a link. The arguments are those of `activation_bytes`."""
    codecs = LinkCodecs(config.activations.with_scales(sum(counts)), link)
    if codecs.gradients is None:
        return _size(codecs.gradient(dtype), counts, hidden, mean_bits)
    codec = codecs.gradients.first_visit(dtype) if first_visit else codecs.gradients.change
    head = codecs.gradients.head_bytes(sum(counts))
    return _size(codec, counts, hidden, mean_bits, changes=not first_visit) + head


def with_bits(config: Config, forward: Bits, backward: Bits) -> Config:
    """Return the configuration with other bits."""
    return config.replace(activations=config.activations.replace(forward_bits=forward, backward_bits=backward))


def _size(
    codec: Codec, counts: Sequence[int], hidden: int, mean_bits: float | None = None, *, changes: bool = False
) -> int:
    if not isinstance(codec, Quantized):
        return packet_bytes(len(counts), codec.payload_bytes(sum(counts), hidden))
    if mean_bits is not None and codec.error is not None:
        low = min(int(mean_bits), codec.bits - 1)  # bytes are interpolated between two whole numbers of bits
        fewer, more = (_size(codec.with_bits(bits), counts, hidden, changes=changes) for bits in (low, low + 1))
        return round(fewer + (mean_bits - low) * (more - fewer))
    return packet_bytes(len(counts), codec.payload_bytes(sum(counts), hidden, changes=changes))
