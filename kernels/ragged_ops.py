"""The operations on a micro-batch's samples of different lengths: arguments are checked, then a backend runs one call.

All backends give the bytes that sample by sample `ops.quantize` and `ops.delta_quantize_` give. Errors as in `ops`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipecomp.errors import ShapeError
from pipecomp.kernels import dispatch, layout
from pipecomp.kernels.ragged import Arriving, Verdict, Visit, bad_visit, payload_bytes


def encode_batch(
    visits: Sequence[Visit], payload: Tensor, *, packet: Tensor | None = None, backend: str = "auto"
) -> Verdict:
    """Encode a micro-batch into one payload: of each sample scales and codes, or its values.

    visits: the samples; see `Visit`. payload: uint8 [bytes], contiguous, just long enough, on the samples' device, at
    any address. packet: uint8, contiguous, in which the payload lies; its last four bytes become the CRC-32 of all
    before them. Returns whether all could be encoded, which the caller has to check: if not, the payload and every m
    are undefined.
    """
    size, others = 0, [packet]
    for x, m, options, delta in visits:
        layout.check_input(x, "x")
        shape = x.shape
        if len(shape) != 2 or not x.is_contiguous():
            raise ShapeError(f"x: {tuple(shape)}, allowed: contiguous [n, H]")
        if m is not None:
            layout.check_float32(m, shape, "m", contiguous=True)
        elif delta:
            raise ShapeError("m: None, allowed: contiguous [n, H] for a change")
        size += payload_bytes(shape[0], shape[1], options, x.dtype)
        others += (x, m)
    check_payload(payload, size)
    flag = dispatch.pick(backend, payload, *others).encode_batch(visits, payload, packet)
    return Verdict(flag, bad_visit(visits), sealed=packet is not None)


def decode_batch(payload: Tensor, samples: Sequence[Arriving], *, backend: str = "auto") -> None:
    """Undo `encode_batch`: every sample's m, float32 [n, H], contiguous, moves by its change or is set.

    payload: uint8 [bytes], contiguous, on the samples' device, at any address. ShapeError if it is not just as long.
    """
    for s in samples:
        layout.check_float32(s.m, s.m.shape, "m", contiguous=True)
    check_payload(payload, sum(payload_bytes(s.m.shape[0], s.m.shape[1], s.options, s.dtype) for s in samples))
    dispatch.pick(backend, payload, *(s.m for s in samples)).decode_batch(payload, samples)


def check_payload(payload: Tensor, size: int) -> None:
    """Raise ShapeError unless the payload is uint8 [size], contiguous."""
    if payload.dtype != torch.uint8 or payload.shape != (size,) or not payload.is_contiguous():
        raise ShapeError(
            f"payload: {payload.dtype} {tuple(payload.shape)}, allowed: torch.uint8 [{size}] for these samples"
        )
