"""The operations on a micro-batch's samples of different lengths: arguments are checked, then a backend runs one call.

All backends give the bytes that sample by sample `ops.quantize` and `ops.delta_quantize_` give. Errors as in `ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from pipecomp.errors import ShapeError
from pipecomp.kernels import dispatch, layout
from pipecomp.kernels.ragged import Arriving, Verdict, Visit, bad_visit, payload_bytes


@torch.no_grad()
def encode_batch(
    visits: Sequence[Visit], payload: Tensor, *, packet: Tensor | None = None, backend: str = "auto"
) -> Verdict:
    """Encode a micro-batch into one payload: of each sample scales and codes, or its values.

    visits: the samples; see `Visit`. payload: uint8 [bytes], contiguous, just long enough, on the samples' device, at
    any address. packet: uint8, contiguous, in which the payload lies; its last four bytes become the CRC-32 of all
    before them. Returns whether all could be encoded, which the caller has to check: if not, the payload and every m
    are undefined.
    """
    for v in visits:
        layout.check_input(v.x, "x")
        if v.x.dim() != 2 or not v.x.is_contiguous():
            raise ShapeError(f"x: {tuple(v.x.shape)}, allowed: contiguous [n, H]")
        if v.m is not None:
            layout.check_float32(v.m, tuple(v.x.shape), "m", contiguous=True)
    check_payload(payload, sum(payload_bytes(v.x.shape[0], v.x.shape[1], v.options, v.x.dtype) for v in visits))
    others = [tensor for v in visits for tensor in (v.x, v.m)]
    flag = dispatch.pick(backend, payload, packet, *others).encode_batch(visits, payload, packet)
    return Verdict(flag, partial(bad_visit, visits), sealed=packet is not None)


@torch.no_grad()
def decode_batch(payload: Tensor, samples: Sequence[Arriving], *, backend: str = "auto") -> None:
    """Undo `encode_batch`: every sample's m, float32 [n, H], contiguous, moves by its change or is set.

    payload: uint8 [bytes], contiguous, on the samples' device, at any address. ShapeError if it is not just as long.
    """
    for s in samples:
        layout.check_float32(s.m, tuple(s.m.shape), "m", contiguous=True)
    check_payload(payload, sum(payload_bytes(s.m.shape[0], s.m.shape[1], s.options, s.dtype) for s in samples))
    dispatch.pick(backend, payload, *(s.m for s in samples)).decode_batch(payload, samples)


def check_payload(payload: Tensor, size: int) -> None:
    """Raise ShapeError unless the payload is uint8 [size], contiguous."""
    if payload.dtype != torch.uint8 or tuple(payload.shape) != (size,) or not payload.is_contiguous():
        raise ShapeError(
            f"payload: {payload.dtype} {tuple(payload.shape)}, allowed: torch.uint8 [{size}] for these samples"
        )
