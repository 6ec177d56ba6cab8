"""A micro-batch's samples of different lengths in plain torch: encoded into one payload, decoded, measured.

A payload holds the samples one after the other: of a quantized one the float32 scales, then the packed codes; of one in
full precision the values themselves. Before them are the scales of channels, if any: a block for all changes, then a
block for all other values. All lie dense, at any address.

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

from pipecomp.errors import NonFiniteError, ShapeError
from pipecomp.kernels.reference import channels, layout, rows
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
    """Count the bytes of one sample's part of a payload, without scales of channels."""
    if options is None:
        return n * H * dtype.itemsize
    return n * layout.quantized_row_bytes(H, options.bits, options.group_size)


def batch_bytes(items: Sequence[EncodeItem | DecodeItem]) -> int:
    """Count the bytes of a payload."""
    size = head_bytes(items)
    for item in items:
        shape, dtype = (item.x.shape, item.x.dtype) if isinstance(item, EncodeItem) else (item.m.shape, item.dtype)
        size += payload_bytes(shape[0], shape[1], item.options, dtype)
    return size


def head_bytes(items: Sequence[EncodeItem | DecodeItem]) -> int:
    """Count the bytes of the scales of channels at the beginning of a payload."""
    return sum(
        channels.block_bytes(items[members[0]][0].shape[1])
        for delta, members in channels.channel_groups(items).items()
        if channels.is_sent(scale_kind(items, members), delta)
    )


def scale_kind(items: Sequence[EncodeItem | DecodeItem], members: Sequence[int]) -> str:
    """Return the kind of scale of samples that share scales of channels; ShapeError if they cannot share them."""
    kinds = {(item.options.scale if item.options else "", item[0].shape[1]) for item in (items[i] for i in members)}
    if len(kinds) > 1:
        raise ShapeError(f"samples with scales of channels: {sorted(kinds)}, allowed: one kind and one width")
    return kinds.pop()[0]


def split_payload(payload: Tensor, items: Sequence[EncodeItem | DecodeItem]) -> Iterator[Tensor]:
    """Cut a payload, uint8 [bytes], into the samples' parts."""
    start = head_bytes(items)
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


def values_of(item: EncodeItem) -> Tensor:
    """Compute the values that are quantized, float32 [n, H]."""
    x = item.x.float()
    return x - item.m if item.delta and item.m is not None else x


def channel_sums(items: Sequence[EncodeItem]) -> Tensor:
    """Sum the squares of each channel of the samples' values: float64 [H]; see `channels.sum_squares`."""
    return channels.sum_squares([values_of(item) for item in items])


def measure_channels(
    items: Sequence[EncodeItem],
    payload: Tensor | None = None,
    sums: Callable[[Sequence[EncodeItem]], Tensor] = channel_sums,
) -> list[Tensor | None]:
    """Compute the scales of channels of samples, float32 [H] each, and write their blocks into the payload, if any.

    sums: `channel_sums`, or the same of a backend. Returns None for samples without scales of channels.
    """
    scales: list[Tensor | None] = [None] * len(items)
    start = 0
    for delta, members in channels.channel_groups(items).items():
        kind = scale_kind(items, members)
        sent = channels.is_sent(kind, delta)
        chosen = [items[i] for i in members]
        if not sent:
            chosen = [EncodeItem(item.m, None, None) for item in chosen if item.m is not None]
        block = channels.encode_block(sums(chosen), channels.SENT if sent else kind)
        if sent and payload is not None:
            payload[start : start + len(block)] = block
            start += len(block)
        c_H = channels.decode_block(block)
        for i in members:
            scales[i] = c_H
    return scales


def read_channels(
    items: Sequence[DecodeItem], payload: Tensor, sums: Callable[[Sequence[EncodeItem]], Tensor] = channel_sums
) -> list[Tensor | None]:
    """Compute the scales of channels of samples that are decoded, float32 [H] each; None without.

    sums: As for `measure_channels`.
    """
    scales: list[Tensor | None] = [None] * len(items)
    start = 0
    for delta, members in channels.channel_groups(items).items():
        kind = scale_kind(items, members)
        if channels.is_sent(kind, delta):
            size = channels.block_bytes(items[members[0]].m.shape[1])
            block = payload[start : start + size]
            start += size
        else:
            block = channels.encode_block(sums([EncodeItem(items[i].m, None, None) for i in members]), kind)
        c_H = channels.decode_block(block)
        for i in members:
            scales[i] = c_H
    return scales


def _encode_all(items: Sequence[EncodeItem], payload: Tensor) -> int:
    scales = measure_channels(items, payload)
    for i, (item, part) in enumerate(zip(items, split_payload(payload, items), strict=True)):
        bad = (~torch.isfinite(item.x)).any(1) if item.options is None else _encode_quantized(item, part, scales[i])
        if bool(bad.any()):
            return i << 32 | (int(bad.int().argmax()) if item.options else 0)
        if item.options is None:
            part.copy_(item.x.reshape(-1).view(torch.uint8))
            if item.m is not None:
                item.m.copy_(item.x)
    return ALL_FINITE


def _encode_quantized(item: EncodeItem, part: Tensor, c_H: Tensor | None) -> Tensor:
    """Write one sample's part and change its m, unless a row cannot be encoded. Returns the bad rows, bool [n]."""
    m, o = item.m, item.options
    assert o is not None
    y = values_of(item)
    bad = ~(y.abs() <= layout.SCALE_MAX).all(1)
    if c_H is not None:
        y, o = y * torch.reciprocal(c_H), o.in_channels
        bad |= ~(y.abs() <= layout.SCALE_MAX).all(1)
    if not bool(bad.any()):
        codes, scale = rows.quantize(y, o)
        part.copy_(torch.cat([scale.reshape(-1).view(torch.uint8), codes.reshape(-1)]))
        if m is not None:
            _move(m, codes, scale, o, item.delta, c_H)
    return bad


def _move(m: Tensor, codes: Tensor, scale: Tensor, options: QuantizerOptions, delta: bool, c_H: Tensor | None) -> None:
    """Add decoded values to m, or set m to them."""
    if c_H is None:
        rows.dequantize(codes, scale, options, tuple(m.shape), m, delta)
        return
    y = rows.dequantize(codes, scale, options, tuple(m.shape), None, False).mul_(c_H)
    m.add_(y) if delta else m.copy_(y)


@torch.no_grad()
def decode_batch(payload: Tensor, items: Sequence[DecodeItem]) -> None:
    """Move or set every sample's m."""
    scales = read_channels(items, payload)
    for (m, o, delta, dtype), part, c_H in zip(items, split_payload(payload, items), scales, strict=True):
        if o is None:
            m.copy_(part.clone().view(dtype).view(m.shape))
        elif m.numel():
            cut = 4 * m.shape[0] * layout.groups(m.shape[1], o.group_size)
            scale = part[:cut].clone().view(torch.float32)
            codes = part[cut:].view(m.shape[0], -1)
            _move(m, codes, scale, o, delta, c_H)


def distortion(items: Sequence[EncodeItem], bits: Sequence[int]) -> Tensor:
    """Compute the squared norm of every row of x, then, for each number of bits, of the row's quantization error.

    Of a sample with `delta` the change x - m is quantized. With stochastic rounding it is the expected squared error.
    Returns float64 [1 + len(bits), R] with the rows of all samples; NaN where a row cannot be quantized.
    """
    scales = measure_channels(items)
    return torch.cat([_item_distortion(item, bits, c_H) for item, c_H in zip(items, scales, strict=True)], 1)


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


def _item_distortion(item: EncodeItem, bits: Sequence[int], c_H: Tensor | None) -> Tensor:
    assert item.options is not None
    x_RH, v_RH = item.x.float(), values_of(item)
    power_R = halved_sum(x_RH * x_RH).double()
    if c_H is None and item.options.gain == "least_error":
        return torch.stack([power_R, *_row_errors(v_RH, item.options, bits)])
    return torch.stack([power_R, *(_decoded_errors(v_RH, item.options._replace(bits=b), c_H) for b in bits)])


def _decoded_errors(v_RH: Tensor, options: QuantizerOptions, c_H: Tensor | None) -> Tensor:
    """Squared norm of what each row differs from its decoded values, float64 [R]."""
    bad_R = ~(v_RH.abs() <= layout.SCALE_MAX).all(1)
    z_RH, o = (v_RH, options) if c_H is None else (v_RH * torch.reciprocal(c_H), options.in_channels)
    bad_R |= ~(z_RH.abs() <= layout.SCALE_MAX).all(1)
    codes, scale = rows.quantize(torch.where(bad_R[:, None], 0.0, z_RH), o)
    y_RH = rows.dequantize(codes, scale, o, tuple(v_RH.shape), None, False)
    off_RH = v_RH - (y_RH if c_H is None else y_RH * c_H)
    return torch.where(bad_R, torch.nan, halved_sum(off_RH * off_RH).double())


def _row_errors(v_RH: Tensor, options: QuantizerOptions, bits: Sequence[int]) -> list[Tensor]:
    """For each number of bits the squared norm of each row's quantization error, float64 [R]."""
    parts: list[list[Tensor]] = [[] for _ in bits]
    for run in layout.segments(v_RH.shape[1], layout.MAX_PACK_BITS, options.group_size):
        v_RGn = rows.segment_values(v_RH, run)
        for i, b in enumerate(bits):
            o = options._replace(bits=b)
            if i == 0 or o.scale == "rms":  # a max scale is the same for all bits
                scale_RG, _ = rows.group_scales(v_RGn, o)
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
