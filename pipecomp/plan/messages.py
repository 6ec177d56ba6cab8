"""Bytes of the messages between two stages, from the codecs and the wire format that send them.

T real tokens of a micro-batch, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from pipecomp.config import Bits, Config
from pipecomp.messages.codecs import Cast, Codec, Quantized, TopK
from pipecomp.messages.rotation import Rotated
from pipecomp.messages.wire import packet_bytes

_CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16}


def activation_bytes(
    config: Config, link: int, counts: Sequence[int], hidden: int, dtype: torch.dtype, *, first_visit: bool = False
) -> int:
    """Of one micro-batch's activations on a link. counts: real tokens of each sample. dtype: the training dtype.

    first_visit: whether all of its samples are new to the link ("aqsgd" only; the others send the same every time).
    """
    a = config.activations
    how = (a.rounding, a.scale, a.group_size)
    whole = Rotated if a.rotation else Quantized
    codec: Codec = Cast(_CASTS.get(a.method, dtype))
    if a.method == "direct":
        codec = whole(a.bits(link)[0], *how)
    elif a.method == "aqsgd" and not first_visit:
        codec = Quantized(a.bits(link)[0], *how)
    elif a.method == "aqsgd" and a.first_visit != "full":
        codec = whole(int(a.first_visit), *how)
    return _size(codec, counts, hidden)


def gradient_bytes(config: Config, link: int, counts: Sequence[int], hidden: int, dtype: torch.dtype) -> int:
    """Of one micro-batch's gradients, on their way back."""
    a = config.activations
    codec: Codec = Cast(_CASTS.get(a.method, dtype))
    if a.method in a.QUANTIZED:
        codec = Quantized(a.bits(link)[1], a.rounding, a.scale, a.group_size)
        if a.backward_top_k is not None:
            codec = TopK(codec.bits, a.backward_top_k, a.rounding, a.scale, a.group_size)
    return _size(codec, counts, hidden)


def with_bits(config: Config, forward: Bits, backward: Bits) -> Config:
    """The same configuration with other bits."""
    return replace(config, activations=replace(config.activations, forward_bits=forward, backward_bits=backward))


def _size(codec: Codec, counts: Sequence[int], hidden: int) -> int:
    return packet_bytes(len(counts), sum(codec.payload_bytes(count, hidden) for count in counts))
