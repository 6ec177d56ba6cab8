"""A micro-batch's samples of different lengths in plain torch: encoded into one payload, decoded, measured.

A payload holds the samples one after the other: of a quantized one the float32 scales, then the packed codes; of one in
full precision the values themselves. All lie dense, at any address.

Squared errors are summed by halves (`reproducible.halved_sum`), so that the order of the additions, and with it the
result, is the same in every backend.

n: rows of a sample, H: values in a row, R: rows, G: groups in a run of equal groups; n in [R, G, n]: values in a group.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipecomp.errors import NonFiniteError
from pipecomp.kernels.reference import layout, rows
from pipecomp.kernels.reference.layout import QuantizerOptions
from pipecomp.kernels.reference.reproducible import MASK32, halved_sum

ALL_FINITE = 2**63 - 1  # value of a call's flag if every value could be encoded
ALL_FINITE_FLAG = torch.tensor([ALL_FINITE])  # shared constant; never modified
FIRST_TRY = 4  # bits that the search for the fewest bits measures first; beyond, each bit halves the error


class FiniteFlag(NamedTuple):
    """A flag for values of a call that could not be encoded, and their error.

    flag: int64 [1] on the values' device, ALL_FINITE or the position of a bad value. error: makes the exception for a
    position. has_checksum: the packet ends with its checksum already.
    The caller of an encoder calls `check`, at the latest before the bytes are used; `flag` itself may travel to the
    host first, so that nobody waits for the device.
    """

    flag: Tensor
    error: Callable[[int], Exception]
    has_checksum: bool = False

    def check(self, flag: Tensor | None = None) -> None:
        """Raise the error if there is one. flag: a copy of the flag on the host, if available."""
        position = int(self.flag if flag is None else flag)
        if position != ALL_FINITE:
            raise self.error(position)


class EncodeItem(NamedTuple):
    """One sample to be encoded.

    x: float32, float16 or bfloat16 [n, H], contiguous. m: None, or float32 [n, H], contiguous, changed in place: with
    `delta` x - m is quantized, and m moves by what that decodes to; else m becomes what x itself decodes to. options:
    of the quantizer; None for values in x's own dtype.
    """

    x: Tensor
    m: Tensor | None
    options: QuantizerOptions | None
    delta: bool = False


class DecodeItem(NamedTuple):
    """One sample to be decoded: m (the result), options and delta as in EncodeItem. dtype: of full-precision values."""

    m: Tensor
    options: QuantizerOptions | None
    delta: bool = False
    dtype: torch.dtype = torch.float32


def payload_bytes(n: int, H: int, options: QuantizerOptions | None, dtype: torch.dtype) -> int:
    """Count the bytes of one sample's part of a payload."""
    if options is None:
        return n * H * dtype.itemsize
    return n * layout.quantized_row_bytes(H, options.bits, options.group_size)


def split_payload(payload: Tensor, items: Sequence[EncodeItem] | Sequence[DecodeItem]) -> Iterator[Tensor]:
    """Cut a payload, uint8 [bytes], into the samples' parts."""
    start = 0
    for item in items:
        shape, dtype = (item.x.shape, item.x.dtype) if isinstance(item, EncodeItem) else (item.m.shape, item.dtype)
        size = payload_bytes(shape[0], shape[1], item.options, dtype)
        yield payload[start : start + size]
        start += size


def non_finite_error(items: Sequence[EncodeItem]) -> Callable[[int], NonFiniteError]:
    """Return a function that makes the error for the sample and row in a flag of `encode_batch`."""
    # Note: it keeps no tensor of the samples, because it lives as long as their packet, which may wait for a slow link.
    kinds = [(item.options is None, item.delta) for item in items]

    def error(flag: int) -> NonFiniteError:
        plain, delta = kinds[flag >> 32]
        failure = NonFiniteError("NaN or Inf") if plain else rows.non_finite("a - m" if delta else "x", flag & MASK32)
        return failure if len(kinds) == 1 else NonFiniteError(f"{failure}, of the packet's sample {flag >> 32}")

    return error


def write_checksum(packet: Tensor) -> None:
    """Set a packet's last four bytes to the CRC-32 of those before them."""
    check = zlib.crc32(packet[:-4].cpu().numpy())
    packet[-4:] = torch.tensor(list(check.to_bytes(4, "little")), dtype=torch.uint8)


@torch.no_grad()
def encode_batch(items: Sequence[EncodeItem], payload: Tensor, packet: Tensor | None) -> Tensor:
    """Write all samples' parts, then the checksum of the packet around them.

    Returns int64 [1], beside the payload: ALL_FINITE, or sample << 32 | row of one that cannot be encoded; then the
    payload and every m are undefined.
    """
    flag = _encode_all(items, payload)
    if packet is not None and flag == ALL_FINITE:
        write_checksum(packet)
    return torch.full((1,), flag, dtype=torch.int64, device=payload.device)


def _encode_all(items: Sequence[EncodeItem], payload: Tensor) -> int:
    for i, (item, part) in enumerate(zip(items, split_payload(payload, items), strict=True)):
        bad = (~torch.isfinite(item.x)).any(1) if item.options is None else _encode_quantized(item, part)
        if bool(bad.any()):
            return i << 32 | (int(bad.int().argmax()) if item.options else 0)
        if item.options is None:
            part.copy_(item.x.reshape(-1).view(torch.uint8))
            if item.m is not None:
                item.m.copy_(item.x)
    return ALL_FINITE


def _encode_quantized(item: EncodeItem, part: Tensor) -> Tensor:
    """Write one sample's part and change its m, unless a row cannot be encoded. Returns the bad rows, bool [n]."""
    x, m, o = item.x, item.m, item.options
    assert o is not None
    y = x.float() - m if item.delta and m is not None else x.float()
    bad = ~(y.abs() <= layout.SCALE_MAX).all(1)
    if not bool(bad.any()):
        codes, scale = rows.quantize(y, o)
        part.copy_(torch.cat([scale.reshape(-1).view(torch.uint8), codes.reshape(-1)]))
        if m is not None:
            rows.dequantize(codes, scale, o, tuple(x.shape), m, item.delta)
    return bad


@torch.no_grad()
def decode_batch(payload: Tensor, items: Sequence[DecodeItem]) -> None:
    """Move or set every sample's m."""
    for (m, o, delta, dtype), part in zip(items, split_payload(payload, items), strict=True):
        if o is None:
            m.copy_(part.clone().view(dtype).view(m.shape))
        elif m.numel():
            cut = 4 * m.shape[0] * layout.groups(m.shape[1], o.group_size)
            scale = part[:cut].clone().view(torch.float32)
            codes = part[cut:].view(m.shape[0], -1)
            rows.dequantize(codes, scale, o, tuple(m.shape), m, delta)


def distortion(items: Sequence[EncodeItem], bits: Sequence[int]) -> Tensor:
    """Compute the squared norm of every row of x, then, for each number of bits, of the row's quantization error.

    Of a sample with `delta` the change x - m is quantized. With stochastic rounding it is the expected squared error.
    Returns float64 [1 + len(bits), R] with the rows of all samples; NaN where a row cannot be quantized.
    """
    return torch.cat([_item_distortion(item, bits) for item in items], 1)


def fit(items: Sequence[EncodeItem], error: float, low: int, high: int, payload: Tensor | None) -> int:
    """Find the fewest bits that keep an error in one search, if the backend supports it.

    payload: None, or uint8 [bytes] with room for all samples at `high` bits. It then begins with what `encode_batch`
    writes for them with the bits found, and every m has changed. Returns 0 if nothing was found: the caller searches
    with `distortion`, and no m has changed.
    """
    return 0


def encode_fewest(
    items: Sequence[EncodeItem], error: float, low: int, high: int, payload: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Encode with the fewest bits, chosen on the device without a copy to the host, if the backend supports it.

    payload: as for `fit`. Returns the bits, int64 [1] on the samples' device, and the flag of `encode_batch`; None,
    with nothing changed, if the backend cannot, or need not because the host is the device.
    """
    return None


def step(options: QuantizerOptions) -> float:
    """Distance of neighboring values that a group of scale 1 decodes to."""
    return 2.0 / ((1 << options.bits) - (options.rounding == "stochastic"))


def _item_distortion(item: EncodeItem, bits: Sequence[int]) -> Tensor:
    assert item.options is not None
    x_RH = item.x.float()
    v_RH = x_RH - item.m if item.delta and item.m is not None else x_RH
    power_R = halved_sum(x_RH * x_RH).double()
    return torch.stack([power_R, *_row_errors(v_RH, item.options, bits)])


def _row_errors(v_RH: Tensor, options: QuantizerOptions, bits: Sequence[int]) -> list[Tensor]:
    """For each number of bits the squared norm of each row's quantization error, float64 [R]."""
    parts: list[list[Tensor]] = [[] for _ in bits]
    for run in layout.segments(v_RH.shape[1], layout.MAX_PACK_BITS, options.group_size):
        v_RGn = rows.segment_values(v_RH, run)
        for i, b in enumerate(bits):
            o = options._replace(bits=b)
            if i == 0 or o.scale == "rms":  # a max scale is the same for all bits
                scale_RG = rows.group_scales(v_RGn, o)
                zero_RG = scale_RG == 0
                inverse_RG1 = torch.reciprocal(torch.where(zero_RG, 1.0, scale_RG)).unsqueeze(-1)
                u_RGn = (v_RGn * inverse_RG1).add_(1.0)
            step_RG = scale_RG.double() * step(o)
            squares_RG = halved_sum(_squared_steps(u_RGn, o)).double() * (step_RG * step_RG)
            squares_RG = torch.where(zero_RG, 0.0, squares_RG)
            parts[i].append(torch.where(scale_RG <= layout.SCALE_MAX, squares_RG, torch.nan))
    return [halved_sum(torch.cat(each, 1)) for each in parts]


def _squared_steps(u_RGn: Tensor, options: QuantizerOptions) -> Tensor:
    """Squared error of each value, in steps, float32. u: the value over its scale, plus 1."""
    top = float((1 << options.bits) - 1)
    if options.rounding == "stochastic":
        steps = u_RGn * (top / 2)
        above = steps - steps.trunc()
        return above * (1.0 - above)
    steps = u_RGn * float(1 << options.bits - 1)
    off = steps.floor().clamp_(0.0, top).sub_(steps).add_(0.5)
    return off.mul_(off)
