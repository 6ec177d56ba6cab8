"""Triton kernels of batches: all samples with the same options in one launch, whatever their lengths.

The kernels produce the bytes of `reference.batches`. Samples lie anywhere in GPU memory; a table holds their positions,
in values from the first one's. Launch with enable_fp_fusion=False. Nothing here waits for the GPU, except the checksum
of a packet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pipecomp.kernels.reference import batches as reference
from pipecomp.kernels.reference import reproducible
from pipecomp.kernels.reference.batches import ALL_FINITE, DecodeItem, EncodeItem
from pipecomp.kernels.reference.channels import PARTS, sampled_stride
from pipecomp.kernels.reference.layout import RMS_LOADING, SCALE_MAX, QuantizerOptions, group_length
from pipecomp.kernels.reference.rows import code_values
from pipecomp.kernels.triton.rows import (
    BLOCK,
    MAX_VALUES,
    GroupShape,
    launch,
    launch_dequantize,
    launch_quantize,
    load_codes,
    load_values,
    loadable,
    octets,
    operation,
    random_bits,
    store_codes_dynamic,
    to_float,
    uniform,
    unit_and_chunk,
    warps,
)

# Of a sample in a table: x, m, scales, codes (positions as if row 0 were the batch's), first row, number, two keys.
FIELDS = 8
SUMMED = 32  # channels of one program


class TableRow(NamedTuple):
    """One sample of a table. scales, codes: positions in the payload; see FIELDS."""

    number: int
    x: Tensor
    m: Tensor | None
    scales: int
    codes: int
    seed: int


class SampleTable(NamedTuple):
    """A table of samples on the device.

    shape: shape of all rows together. w: decoded values of codes. aligned: whether all x and m begin at multiples of
    four.
    """

    shape: GroupShape
    samples: int
    fields: Tensor
    w: Tensor
    aligned: bool


@triton.jit
def find_sample(row, table, SAMPLES, FIELDS: tl.constexpr):
    """Find the sample of a row of the batch: the address of its fields."""
    sample, end = 0, SAMPLES
    while end - sample > 1:
        middle = (sample + end) // 2
        before = tl.load(table + middle * FIELDS + 4) <= row
        sample, end = tl.where(before, middle, sample), tl.where(before, end, middle)
    return table + sample * FIELDS


@triton.jit
def locate_sample_group(unit, table, SAMPLES, GROUP, GROUPS, H, FIELDS: tl.constexpr):
    """Return a group's row in the batch, the fields and number of its sample, its first column and its length."""
    row = unit // GROUPS
    column = unit % GROUPS * GROUP
    return row, find_sample(row, table, SAMPLES, FIELDS), unit % GROUPS, column, tl.minimum(H - column, GROUP)


@triton.jit
def sample_start(field, ALIGNED: tl.constexpr):
    """Load the position of a sample's values. ALIGNED: a multiple of four, so that the GPU moves four at a time."""
    start = tl.load(field)
    if ALIGNED:
        start = tl.multiple_of(start, 4)
    return start


@triton.jit
def code_sizes(bits, H, GROUP, GROUPS):
    """Return the bits, and the bytes of the codes of a group and of a row."""
    group_bytes = (GROUP * bits + 7) // 8
    return bits, group_bytes, (GROUPS - 1) * group_bytes + ((H - (GROUPS - 1) * GROUP) * bits + 7) // 8


@triton.jit
def quantize_values(u, bits, index, keys, STOCHASTIC: tl.constexpr):
    """Compute the codes of u, values over their scale plus 1. index: of the values in the sample, for random bits."""
    levels = (1 << bits) * 1.0
    if STOCHASTIC:
        steps = u * ((levels - 1.0) * 0.5) + uniform(random_bits(index, keys))
    else:
        steps = u * (levels * 0.5)
    return tl.minimum(tl.maximum(steps, 0.0), levels - 1.0).to(tl.int32)


@triton.jit
def whole(v):
    """Round values from 0 to 2**31 half to even, int64."""
    # Adding and subtracting 2**23 does that; from 2**23 on every float32 is an integer.
    return tl.where(v < 8388608.0, (v + 8388608.0) - 8388608.0, v).to(tl.int64)


@triton.jit
def rms_scale(z, most, n, LOADING: tl.constexpr, LEVELS: tl.constexpr):
    """Compute the rms scale of n values z, as `rows.finish_scales`, and their sum of squares over the largest.

    most: bit pattern of the largest |z|. The sum is int64, in units of 2**-30. LOADING: factor of the scale.
    LEVELS: 2**bits.
    """
    largest = most.to(tl.float32, bitcast=True)
    t = z * tl.div_rn(1.0, tl.where(most < 0x0D800000, 1.0, largest))
    squares = tl.sum(whole(t * t * 1073741824.0))
    root = tl.sqrt(squares.to(tl.float64) / (n.to(tl.float64) * 1073741824.0))
    loaded = (largest.to(tl.float64) * tl.full([], LOADING, tl.float64) * root).to(tl.float32)
    share = tl.full([], LOADING, tl.float64) * root
    finest = 3 * LEVELS * LEVELS  # layout.finest_group
    clips = (n.to(tl.float64) * (share + 1.0) > (1.0 - share) * finest) | (root * LEVELS < 1.0)
    scale = tl.where(clips, tl.minimum(largest, loaded), largest)
    return tl.where((most < 0x0D800000) | (scale < 7.888609052210118e-31), 0.0, scale), squares  # 2**-100


@triton.jit
def unbiased_scale(scale, most, squares, t, c, bits):
    """Compute the scale that is sent with an unbiased gain, as `rows.unbiased_scales`.

    t: values over the scale, 0 beyond the group. c: their codes. most, squares: of `rms_scale`.
    """
    half = (1 << (bits - 1)) * 1.0
    w = (c.to(tl.float32) + (0.5 - half)) * (16384.0 / half)
    along = tl.sum(whole(tl.abs(t * w))).to(tl.float64)  # only rounding makes it negative, and it is tiny then
    largest, scale64 = most.to(tl.float32, bitcast=True).to(tl.float64), scale.to(tl.float64)
    share = (squares.to(tl.float64) / 1073741824.0) / tl.where(along > 0, along / 16384.0, 1.0)
    sent = largest * largest * share / tl.where(scale64 > 0, scale64, 1.0)
    sent = tl.minimum(tl.maximum(sent, scale64 / 4.0), scale64 * 4.0)
    return tl.minimum(sent, 1.2676506002282294e30).to(tl.float32)  # 2**100


@triton.jit
def channel_sums_kernel(x, m, at, sums, ROWS, PART_ROWS, H, DELTA: tl.constexpr, BLOCK: tl.constexpr):
    """Set sums[channel] to the sum of squares of ROWS rows, float64, added as `channels.sum_squares` does.

    at: position in x of each row, then position in m of each row. One program for each BLOCK channels.
    """
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    part = tl.arange(0, 8)[:, None]
    total = tl.zeros([8, BLOCK], tl.float64)
    for i in range(PART_ROWS):
        row = part * PART_ROWS + i
        ok = (row < ROWS) & (channel < H)
        x_at = tl.load(at + row, mask=row < ROWS, other=0) + channel
        m_at = tl.load(at + ROWS + row, mask=row < ROWS, other=0) + channel
        v = load_values(x, m, x_at, m_at, ok, DELTA).to(tl.float64)
        total += v * v
    total = tl.sum(total.reshape(2, 4, BLOCK), 0)
    total = tl.sum(total.reshape(2, 2, BLOCK), 0)
    total = tl.sum(total, 0)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums + column, total, mask=column < H)


@triton.jit
def encode_kernel(
    x,
    m,
    payload,
    w,
    table,
    channels,
    bad,
    chosen,
    SAMPLES,
    H,
    GROUP,
    GROUPS,
    GROUP_BYTES,
    ROW_BYTES,
    BITS: tl.constexpr,
    CHOSEN: tl.constexpr,
    DELTA: tl.constexpr,
    UPDATE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    CHANNELS: tl.constexpr,
    LOADING: tl.constexpr,
    UNBIASED: tl.constexpr,
    OCT: tl.constexpr,
    ALIGNED: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Compute one group's scale and codes; with UPDATE move (DELTA) or set m. A bad group lowers bad[0] to its row.

    CHOSEN: chosen[0] holds the bits, at most BITS; w holds the decoded values for 1 bit, 2 bits and so on, one after
    the other; the table's positions of scales and codes leave out the part that depends on the bits.
    CHANNELS: channels holds the scales of the channels, then their inverses. LOADING: of an rms scale; 0 for the
    largest value. UNBIASED: of the gain.
    """
    unit, chunk = unit_and_chunk(GROUP, 8 * OCT)
    row, fields, group, column, n = locate_sample_group(unit, table, SAMPLES, GROUP, GROUPS, H, FIELDS)
    octet, lane, at = octets(chunk, OCT)
    ok = at < n
    v = to_float(tl.load(x + sample_start(fields, ALIGNED) + row * H + column + at, mask=ok, other=0))
    m_at = m + sample_start(fields + 1, ALIGNED) + row * H + column + at
    if DELTA:
        before = tl.load(m_at, mask=ok, other=0.0)
        v = v - before
    most = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    first = tl.load(fields + 4)
    inside = row - first
    bad_row = (tl.load(fields + 5) << 32) | inside
    tl.atomic_min(bad, bad_row, mask=most > 0x71800000)  # 2**100
    if CHANNELS:
        v = v * tl.load(channels + H + column + at, mask=ok, other=0.0)
        most = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        tl.atomic_min(bad, bad_row, mask=most > 0x71800000)
    if CHOSEN:
        bits, group_bytes, row_bytes = code_sizes(tl.load(chosen).to(tl.int32), H, GROUP, GROUPS)
        scales = first * row_bytes
        w += (1 << bits) - 2
    else:
        bits, group_bytes, row_bytes, scales = BITS, GROUP_BYTES, ROW_BYTES, tl.load(fields + 2)
    if LOADING > 0:
        scale, squares = rms_scale(v, most, n, LOADING, 1 << BITS)
    else:
        scale = tl.where(most < 0x0D800000, 0, most).to(tl.float32, bitcast=True)  # 2**-100
    t = v * tl.div_rn(1.0, tl.where(scale == 0.0, 1.0, scale))
    c = quantize_values(t + 1.0, bits, tl.where(ok, inside * H + column + at, 0), fields + 6, STOCHASTIC)
    c = tl.where(scale == 0.0, 0, c)
    codes = payload + tl.load(fields + 3) + row * row_bytes + group * group_bytes
    store_codes_dynamic(codes, octet, lane, c, ok, (n * bits + 7) // 8, bits, BITS)
    sent = scale
    if UNBIASED:
        sent = unbiased_scale(scale, most, squares, t, c, bits)
    byte = tl.arange(0, 4)
    scale_at = payload + scales + 4 * (row * GROUPS + group)
    tl.store(scale_at + byte, ((sent.to(tl.int32, bitcast=True) >> (8 * byte)) & 255).to(tl.uint8))
    if UPDATE:
        moved = tl.where(sent == 0.0, 0.0, tl.load(w + c, mask=ok, other=0.0) * sent)
        if CHANNELS:
            moved = moved * tl.load(channels + column + at, mask=ok, other=0.0)
        if DELTA:
            moved = before + moved
        tl.store(m_at, moved, mask=ok)


@triton.jit
def decode_kernel(
    m,
    payload,
    w,
    table,
    channels,
    SAMPLES,
    H,
    GROUP,
    GROUPS,
    GROUP_BYTES,
    ROW_BYTES,
    BITS: tl.constexpr,
    DELTA: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Decode one chunk of a group, times the scales in `channels` if CHANNELS, and move m by the values or set it."""
    unit, chunk = unit_and_chunk(GROUP, BLOCK)
    row, fields, group, column, n = locate_sample_group(unit, table, SAMPLES, GROUP, GROUPS, H, FIELDS)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    ok = at < n
    byte = tl.arange(0, 4)
    scale_at = payload + tl.load(fields + 2) + 4 * (row * GROUPS + group)
    scale = tl.sum(tl.load(scale_at + byte).to(tl.int32) << (8 * byte), 0).to(tl.float32, bitcast=True)
    codes = payload + tl.load(fields + 3) + row * ROW_BYTES + group * GROUP_BYTES
    c = load_codes(codes, at, ok, (n * BITS + 7) // 8, BITS)
    v = tl.where(scale == 0.0, 0.0, tl.load(w + c, mask=ok, other=0.0) * scale)
    if CHANNELS:
        v = v * tl.load(channels + column + at, mask=ok, other=0.0)
    to = m + sample_start(fields + 1, ALIGNED) + row * H + column + at
    if DELTA:
        v = tl.load(to, mask=ok, other=0.0) + v
    tl.store(to, v, mask=ok)


@operation
@torch.no_grad()
def encode_batch(items: Sequence[EncodeItem], payload: Tensor, packet: Tensor | None) -> Tensor:
    # One launch for all samples with the same options.
    scales = reference.measure_channels(items, payload, channel_sums)
    bad = torch.full((1,), ALL_FINITE, dtype=torch.int64, device=payload.device)
    batches: dict[object, list[tuple[int, EncodeItem, Tensor]]] = {}
    for i, (item, part) in enumerate(zip(items, reference.split_payload(payload, items), strict=True)):
        x, o = item.x, item.options
        if not x.numel():
            continue
        if o is None:
            part.copy_(x.view(-1).view(torch.uint8))
            if item.m is not None:
                item.m.copy_(x)
            flag = torch.where(torch.isfinite(x).all(), ALL_FINITE, i << 32)
            torch.minimum(bad, flag, out=bad)
        elif group_length(x.shape[1], o.group_size) > MAX_VALUES or x.numel() >> 32:
            _encode_alone(i, item, part, bad, scales[i])
        else:
            key = (o._replace(seed=0), item.delta, item.m is None, x.dtype, x.shape[1])
            batches.setdefault(key, []).append((i, item, part))
    for batch in batches.values():
        i, first, _ = batch[0]
        assert first.options is not None
        x = loadable(first.x)
        m = x if first.m is None else first.m
        parts = [(i, item.x, item.m, part, item.options.seed if item.options else 0) for i, item, part in batch]
        table = _payload_table(parts, x, m, payload, first.options)
        launch_encode(first, x, m, payload, table, bad, c_H=scales[i])
    if packet is not None:
        reference.write_checksum(packet)
    return bad


def _encode_alone(i: int, item: EncodeItem, part: Tensor, bad: Tensor, c_H: Tensor | None) -> None:
    """Encode a sample whose groups no program can hold."""
    x, m, o = item.x, item.m, item.options
    assert o is not None
    if c_H is None:
        codes, scales, row = launch_quantize(x, m if item.delta else None, o)
    else:
        v_nH, o = reference.values_of(item), o.in_channels
        codes, scales, row = launch_quantize(v_nH * torch.reciprocal(c_H), None, o)
        large_n = ~(v_nH.abs() <= SCALE_MAX).all(1)
        first = torch.where(large_n, torch.arange(len(v_nH), device=row.device), ALL_FINITE).min()
        row = torch.minimum(row, first)
    if m is not None:
        launch_dequantize(codes, scales, o, m, item.delta, row, c_H)
    torch.minimum(bad, torch.where(row == ALL_FINITE, ALL_FINITE, row | i << 32), out=bad)
    part.copy_(torch.cat([scales.view(-1).view(torch.uint8), codes.view(-1)]))


def launch_encode(
    first: EncodeItem,
    x: Tensor,
    m: Tensor,
    payload: Tensor,
    t: SampleTable,
    bad: Tensor,
    chosen: Tensor | None = None,
    c_H: Tensor | None = None,
) -> None:
    """Encode samples like `first` with the bits of its options, or with those in `chosen`, at most that many.

    c_H: scales of channels, float32.
    """
    o, s = first.options, t.shape
    assert o is not None
    octet = triton.next_power_of_2(-(-s.group // 8))
    channels = t.w if c_H is None else torch.cat([c_H, torch.reciprocal(c_H)])
    values = (x, m, payload, t.w, t.fields, channels, bad, bad if chosen is None else chosen, t.samples, *s.sizes)
    kind: dict[str, Any] = {
        "BITS": o.bits,
        "CHOSEN": chosen is not None,
        "DELTA": first.delta,
        "UPDATE": first.m is not None,
    }
    kind |= {"STOCHASTIC": o.rounding == "stochastic", "OCT": octet, "ALIGNED": t.aligned, "FIELDS": FIELDS}
    loading = 0.0 if o.scale == "max" else RMS_LOADING[o.bits]
    kind |= {"CHANNELS": c_H is not None, "LOADING": loading, "UNBIASED": o.gain == "unbiased"}
    launch(encode_kernel, s.grid(8 * octet), *values, **kind, num_warps=warps(8 * octet))


def channel_sums(items: Sequence[EncodeItem]) -> Tensor:
    """Sum the squares of each channel of samples that are not empty, float64 [H], as `channels.sum_squares`.

    One launch for consecutive samples of the same dtype.
    """
    H, rows = items[0].x.shape[1], sum(len(item.x) for item in items)
    if len({(item.x.dtype, item.delta) for item in items}) > 1:
        return reference.channel_sums(items)
    x, m = loadable(items[0].x), items[0].m if items[0].delta else None
    stride, first, positions = sampled_stride(rows), 0, list[Tensor]()
    for item in items:
        row = torch.arange(-first % stride, len(item.x), stride)
        x_at = (item.x.data_ptr() - x.data_ptr()) // x.element_size()
        m_at = 0 if m is None or item.m is None else (item.m.data_ptr() - m.data_ptr()) // 4
        positions.append(torch.stack([x_at + H * row, m_at + H * row]))
        first += len(item.x)
    at = torch.cat(positions, 1).to(x.device, non_blocking=True)
    sampled = at.shape[1]
    sums = torch.empty(H, dtype=torch.float64, device=x.device)
    sizes = (sampled, -(-sampled // PARTS), H)
    launch(channel_sums_kernel, (-(-H // SUMMED),), x, x if m is None else m, at, sums, *sizes, m is not None, SUMMED)
    return sums


@operation
@torch.no_grad()
def decode_batch(payload: Tensor, items: Sequence[DecodeItem]) -> None:
    # One launch for all samples with the same options.
    scales = reference.read_channels(items, payload, channel_sums)
    batches: dict[tuple[QuantizerOptions, bool, int], list[tuple[int, Tensor, Tensor, Tensor, int]]] = {}
    for i, (item, part) in enumerate(zip(items, reference.split_payload(payload, items), strict=True)):
        if item.options is None:
            item.m.copy_(part.clone().view(item.dtype).view(item.m.shape))
        elif item.m.numel():
            key = (item.options._replace(seed=0), item.delta, item.m.shape[1])
            batches.setdefault(key, []).append((i, item.m, item.m, part, 0))
    for (o, delta, _), parts in batches.items():
        i, m = parts[0][:2]
        t, c_H = _payload_table(parts, m, m, payload, o), scales[i]
        values = (m, payload, t.w, t.fields, t.w if c_H is None else c_H, t.samples, *t.shape.sizes)
        kind = {"BITS": o.bits, "DELTA": delta, "CHANNELS": c_H is not None}
        kind |= {"BLOCK": BLOCK, "ALIGNED": t.aligned, "FIELDS": FIELDS}
        launch(decode_kernel, t.shape.grid(BLOCK), *values, **kind)


def _payload_table(
    parts: Sequence[tuple[int, Tensor, Tensor | None, Tensor, int]],
    x: Tensor,
    m: Tensor,
    payload: Tensor,
    o: QuantizerOptions,
) -> SampleTable:
    """Make the table of samples from their number, x, m, part of the payload, and seed."""
    s = GroupShape((sum(len(each) for _, each, _, _, _ in parts), x.shape[1]), o.bits, o.group_size)
    rows, first = list[TableRow](), 0
    for i, x_nH, m_nH, part, seed in parts:
        n, byte = len(x_nH), part.data_ptr() - payload.data_ptr()
        scales, codes = byte - 4 * first * s.groups, byte + 4 * n * s.groups - first * s.row_bytes
        rows.append(TableRow(i, x_nH, m_nH, scales, codes, seed))
        first += n
    w = torch.tensor(code_values(o.bits, o.rounding), dtype=torch.float32)
    return make_table(s, rows, x, m, w)


def make_table(s: GroupShape, rows: Sequence[TableRow], x: Tensor, m: Tensor, w: Tensor) -> SampleTable:
    """Make the table of samples, and copy it to x's device. w: decoded values of codes, an even number of float32."""
    fields, first, aligned = [], 0, True
    for row in rows:
        x_at = (row.x.data_ptr() - x.data_ptr()) // row.x.element_size() - first * s.H
        m_at = 0 if row.m is None else (row.m.data_ptr() - m.data_ptr()) // 4 - first * s.H
        aligned = aligned and x_at % 4 == m_at % 4 == 0
        fields += [x_at, m_at, row.scales, row.codes, first, row.number, *reproducible.keys(row.seed, 0)]
        first += len(row.x)
    # Note: one copy, of numbers for each sample and none for each row. Of pageable memory the driver takes 64 KiB
    # without waiting for the device.
    both = torch.cat([torch.tensor(fields), w.view(torch.int64)]).to(x.device, non_blocking=True)
    return SampleTable(s, len(rows), both[: len(fields)], both[len(fields) :].view(torch.float32), aligned)
