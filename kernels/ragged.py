"""A micro-batch's samples of different lengths, encoded into one payload and decoded from it; in plain torch.

A payload has the samples one after the other: of a quantized one the float32 scales, then the packed codes; of one in
full precision the values themselves. All lie dense, at any address. n: rows of a sample, H: values in a row.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipecomp.errors import NonFiniteError
from pipecomp.kernels import layout, reference
from pipecomp.kernels.layout import Options
from pipecomp.kernels.rng import MASK32

FINE = 2**63 - 1  # of a call's flag: every value could be encoded
FINE_FLAG = torch.tensor([FINE])  # for who knows already; nobody changes it


class Verdict(NamedTuple):
    """Whether all values could be encoded: a flag, int64 [1] on their device, and the error for what it says.

    sealed: whether the packet has its check already. Whoever encodes calls `check`, at the latest before the bytes are
    used; `flag` itself may travel to the host first, so that nobody has to wait for the device.
    """

    flag: Tensor
    error: Callable[[int], Exception]
    sealed: bool = False

    def check(self, flag: Tensor | None = None) -> None:
        """Raise the error if there is one. flag: the same on the host, where that is known."""
        found = int(self.flag if flag is None else flag)
        if found != FINE:
            raise self.error(found)


class Visit(NamedTuple):
    """One sample.

    x: float32, float16 or bfloat16 [n, H], contiguous, to be encoded; decoding, m has its shape. m: float32 [n, H],
    contiguous, changed in place: with `delta` x - m is quantized, and m moves by what that decodes to; else m becomes
    what x itself decodes to. options: of the quantizer; None for values in x's own dtype.
    """

    x: Tensor
    m: Tensor | None
    options: Options | None
    delta: bool = False


class Arriving(NamedTuple):
    """One sample to be decoded: m and options as in Visit. dtype: of values in full precision."""

    m: Tensor
    options: Options | None
    delta: bool = False
    dtype: torch.dtype = torch.float32


def payload_bytes(n: int, H: int, options: Options | None, dtype: torch.dtype) -> int:
    """Count the bytes of one sample's part."""
    if options is None:
        return n * H * dtype.itemsize
    return n * layout.quantized_row_bytes(H, options.bits, options.group_size)


def parts(payload: Tensor, samples: Sequence[Visit] | Sequence[Arriving]) -> Iterator[Tensor]:
    """Cut a payload, uint8 [bytes], into the samples' parts."""
    start = 0
    for s in samples:
        shape, dtype = (s.x.shape, s.x.dtype) if isinstance(s, Visit) else (s.m.shape, s.dtype)
        size = payload_bytes(shape[0], shape[1], s.options, dtype)
        yield payload[start : start + size]
        start += size


def bad_visit(visits: Sequence[Visit]) -> Callable[[int], NonFiniteError]:
    """Give what makes the error for the sample and row that a call of `encode_batch` noted.

    It keeps no tensor of the samples: it is with their packet, which may wait for a slow link.
    """
    kinds = [(v.options is None, v.delta) for v in visits]

    def error(flag: int) -> NonFiniteError:
        plain, delta = kinds[flag >> 32]
        found = (
            NonFiniteError("NaN or Inf") if plain else reference.non_finite("a - m" if delta else "x", flag & MASK32)
        )
        return found if len(kinds) == 1 else NonFiniteError(f"{found}, of the packet's sample {flag >> 32}")

    return error


def seal(packet: Tensor) -> None:
    """Make a packet's last four bytes the CRC-32 of those before them."""
    check = zlib.crc32(packet[:-4].cpu().numpy())
    packet[-4:] = torch.tensor(list(check.to_bytes(4, "little")), dtype=torch.uint8)


@torch.no_grad()
def encode_batch(visits: Sequence[Visit], payload: Tensor, packet: Tensor | None) -> Tensor:
    """Write all samples' parts, then the check of the packet that they are in.

    Returns int64 [1], beside the payload: FINE, or sample << 32 | row of one that cannot be encoded; then nothing else
    counts.
    """
    found = _encode_all(visits, payload)
    if packet is not None and found == FINE:
        seal(packet)
    return torch.full((1,), found, dtype=torch.int64, device=payload.device)


def _encode_all(visits: Sequence[Visit], payload: Tensor) -> int:
    """See `encode_batch`."""
    for i, (visit, part) in enumerate(zip(visits, parts(payload, visits), strict=True)):
        bad = (~torch.isfinite(visit.x)).any(1) if visit.options is None else _encode_quantized(visit, part)
        if bool(bad.any()):
            return i << 32 | (int(bad.int().argmax()) if visit.options else 0)
        if visit.options is None:
            part.copy_(visit.x.reshape(-1).view(torch.uint8))
            if visit.m is not None:
                visit.m.copy_(visit.x)
    return FINE


def _encode_quantized(visit: Visit, part: Tensor) -> Tensor:
    """Write one sample's part and change its m; returns which rows cannot be encoded, then all is as before."""
    x, m, o = visit.x, visit.m, visit.options
    assert o is not None
    y = x.float() - m if visit.delta and m is not None else x.float()
    bad = ~(y.abs() <= layout.SCALE_MAX).all(1)
    if not bool(bad.any()):
        codes, scale = reference.quantize(y, o)
        part.copy_(torch.cat([scale.reshape(-1).view(torch.uint8), codes.reshape(-1)]))
        if m is not None:
            reference.dequantize(codes, scale, o.bits, tuple(x.shape), o.group_size, o.rounding, m, visit.delta)
    return bad


@torch.no_grad()
def decode_batch(payload: Tensor, samples: Sequence[Arriving]) -> None:
    """Move or set every sample's m."""
    for (m, o, delta, dtype), part in zip(samples, parts(payload, samples), strict=True):
        if o is None:
            m.copy_(part.clone().view(dtype).view(m.shape))
        elif m.numel():
            cut = 4 * m.shape[0] * layout.groups(m.shape[1], o.group_size)
            scale = part[:cut].clone().view(torch.float32)
            codes = part[cut:].view(m.shape[0], -1)
            reference.dequantize(codes, scale, o.bits, tuple(m.shape), o.group_size, o.rounding, m, delta)
