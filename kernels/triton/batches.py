"""Triton kernels of batches: all samples with the same options in one launch, whatever their lengths.

The kernels produce the bytes of `reference.batches`. Samples lie anywhere in GPU memory; a table holds their positions,
in values from the first one's. Launch with enable_fp_fusion=False. Nothing here waits for the GPU, except the checksum
of a packet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pipecomp.kernels.reference import batches as reference
from pipecomp.kernels.reference import reproducible
from pipecomp.kernels.reference.batches import ALL_FINITE, DecodeItem, EncodeItem
from pipecomp.kernels.reference.layout import QuantizerOptions, group_length
from pipecomp.kernels.reference.rows import code_values
from pipecomp.kernels.triton.rows import (
    BLOCK,
    MOST_VALUES,
    GroupShape,
    launch_dequantize,
    launch_quantize,
    load_codes,
    loadable,
    octets,
    operation,
    random_bits,
    store_codes_of,
    to_float,
    uniform,
    unit_and_chunk,
    warps,
)

FIELDS = 8  # of a sample: x, m, scales, codes (each as if row 0 were the batch's), first row, number, two keys


TableRow = tuple[
    int, Tensor, Tensor | None, int, int, int
]  # of a sample: number, x, m, scales and codes of FIELDS, seed


class SampleTable(NamedTuple):
    """What kernels are told of samples: fields and what codes stand for (w), on the device.

    shape: of all rows together. aligned: whether all x and m begin at multiples of four.
    """

    shape: GroupShape
    samples: int
    fields: Tensor
    w: Tensor
    aligned: bool


@triton.jit
def find_sample(row, table, SAMPLES, FIELDS: tl.constexpr):
    """Where the fields are of the sample that a row of the batch belongs to."""
    sample, end = 0, SAMPLES
    while end - sample > 1:
        middle = (sample + end) // 2
        before = tl.load(table + middle * FIELDS + 4) <= row
        sample, end = tl.where(before, middle, sample), tl.where(before, end, middle)
    return table + sample * FIELDS


@triton.jit
def place_of(unit, table, SAMPLES, GROUP, GROUPS, H, FIELDS: tl.constexpr):
    """Of a group: the row in the batch, its sample's fields, the group's number, its first column, its values."""
    row = unit // GROUPS
    column = unit % GROUPS * GROUP
    return row, find_sample(row, table, SAMPLES, FIELDS), unit % GROUPS, column, tl.minimum(H - column, GROUP)


@triton.jit
def start_of(field, ALIGNED: tl.constexpr):
    """Where a sample's values begin. ALIGNED: at a multiple of four, of which the GPU moves four at a time."""
    start = tl.load(field)
    if ALIGNED:
        start = tl.multiple_of(start, 4)
    return start


@triton.jit
def sizes_of(bits, H, GROUP, GROUPS):
    """The bits, and how many bytes the codes of a group and of a row then have."""
    group_bytes = (GROUP * bits + 7) // 8
    return bits, group_bytes, (GROUPS - 1) * group_bytes + ((H - (GROUPS - 1) * GROUP) * bits + 7) // 8


@triton.jit
def codes_of(u, bits, index, keys, STOCHASTIC: tl.constexpr):
    """Codes of values over their scale, plus 1. index: theirs in the sample, for the keys' random bits."""
    levels = (1 << bits) * 1.0
    if STOCHASTIC:
        steps = u * ((levels - 1.0) * 0.5) + uniform(random_bits(index, keys))
    else:
        steps = u * (levels * 0.5)
    return tl.minimum(tl.maximum(steps, 0.0), levels - 1.0).to(tl.int32)


@triton.jit
def encode_kernel(
    x,
    m,
    payload,
    w,
    table,
    bad,
    chosen,
    SAMPLES,
    H,
    GROUP,
    GROUPS,
    GROUP_BYTES,
    ROW_BYTES,
    BITS: tl.constexpr,
    FITTED: tl.constexpr,
    DELTA: tl.constexpr,
    KEEP: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    OCT: tl.constexpr,
    ALIGNED: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """One group's scale and codes, and m (KEEP): moved with DELTA, else set. A bad group lowers bad[0] to its row.

    FITTED: chosen[0] has the bits, of which BITS are the most; w has what 1 bit, 2 and so on stand for, one after the
    other; of a sample's scales and codes the table says only what does not hang on the bits.
    """
    unit, chunk = unit_and_chunk(GROUP, 8 * OCT)
    row, fields, group, column, n = place_of(unit, table, SAMPLES, GROUP, GROUPS, H, FIELDS)
    octet, lane, at = octets(chunk, OCT)
    ok = at < n
    v = to_float(tl.load(x + start_of(fields, ALIGNED) + row * H + column + at, mask=ok, other=0))
    m_at = m + start_of(fields + 1, ALIGNED) + row * H + column + at
    if DELTA:
        before = tl.load(m_at, mask=ok, other=0.0)
        v = v - before
    most = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    first = tl.load(fields + 4)
    inside = row - first
    tl.atomic_min(bad, (tl.load(fields + 5) << 32) | inside, mask=most > 0x71800000)  # 2**100
    most = tl.where(most < 0x0D800000, 0, most)  # 2**-100
    if FITTED:
        bits, group_bytes, row_bytes = sizes_of(tl.load(chosen).to(tl.int32), H, GROUP, GROUPS)
        scales = first * row_bytes
        w += (1 << bits) - 2
    else:
        bits, group_bytes, row_bytes, scales = BITS, GROUP_BYTES, ROW_BYTES, tl.load(fields + 2)
    byte = tl.arange(0, 4)
    scale_at = payload + scales + 4 * (row * GROUPS + group)
    tl.store(scale_at + byte, ((most >> (8 * byte)) & 255).to(tl.uint8))
    scale = most.to(tl.float32, bitcast=True)
    u = v * tl.div_rn(1.0, tl.where(scale == 0.0, 1.0, scale)) + 1.0
    c = codes_of(u, bits, tl.where(ok, inside * H + column + at, 0), fields + 6, STOCHASTIC)
    c = tl.where(scale == 0.0, 0, c)
    codes = payload + tl.load(fields + 3) + row * row_bytes + group * group_bytes
    store_codes_of(codes, octet, lane, c, ok, (n * bits + 7) // 8, bits, BITS)
    if KEEP:
        moved = tl.where(scale == 0.0, 0.0, tl.load(w + c, mask=ok, other=0.0) * scale)
        if DELTA:
            moved = before + moved
        tl.store(m_at, moved, mask=ok)


@triton.jit
def decode_kernel(
    m,
    payload,
    w,
    table,
    SAMPLES,
    H,
    GROUP,
    GROUPS,
    GROUP_BYTES,
    ROW_BYTES,
    BITS: tl.constexpr,
    DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """m moved by, or set to, what one chunk of a group decodes to."""
    unit, chunk = unit_and_chunk(GROUP, BLOCK)
    row, fields, group, column, n = place_of(unit, table, SAMPLES, GROUP, GROUPS, H, FIELDS)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    ok = at < n
    byte = tl.arange(0, 4)
    scale_at = payload + tl.load(fields + 2) + 4 * (row * GROUPS + group)
    scale = tl.sum(tl.load(scale_at + byte).to(tl.int32) << (8 * byte), 0).to(tl.float32, bitcast=True)
    codes = payload + tl.load(fields + 3) + row * ROW_BYTES + group * GROUP_BYTES
    c = load_codes(codes, at, ok, (n * BITS + 7) // 8, BITS)
    v = tl.where(scale == 0.0, 0.0, tl.load(w + c, mask=ok, other=0.0) * scale)
    to = m + start_of(fields + 1, ALIGNED) + row * H + column + at
    if DELTA:
        v = tl.load(to, mask=ok, other=0.0) + v
    tl.store(to, v, mask=ok)


@operation
@torch.no_grad()
def encode_batch(visits: Sequence[EncodeItem], payload: Tensor, packet: Tensor | None) -> Tensor:
    """As `ragged.encode_batch`: a launch for all samples of the same options, mostly one."""
    bad = torch.full((1,), ALL_FINITE, dtype=torch.int64, device=payload.device)
    batches: dict[object, list[tuple[int, EncodeItem, Tensor]]] = {}
    for i, (v, part) in enumerate(zip(visits, reference.split_payload(payload, visits), strict=True)):
        if not v.x.numel():
            continue
        o = v.options
        if o is None:
            part.copy_(v.x.view(-1).view(torch.uint8))
            if v.m is not None:
                v.m.copy_(v.x)
            wrong = torch.where(torch.isfinite(v.x).all(), ALL_FINITE, i << 32)
            torch.minimum(bad, wrong, out=bad)
        elif o.scale != "max" or group_length(v.x.shape[1], o.group_size) > MOST_VALUES or v.x.numel() >> 32:
            _encode_alone(i, v, part, bad)
        else:
            key = (o._replace(seed=0), v.delta, v.m is None, v.x.dtype, v.x.shape[1])
            batches.setdefault(key, []).append((i, v, part))
    for same in batches.values():
        _launch_encode(same, payload, bad)
    if packet is not None:
        reference.write_checksum(packet)
    return bad


def _encode_alone(i: int, v: EncodeItem, part: Tensor, bad: Tensor) -> None:
    """A sample whose groups no program can hold."""
    assert v.options is not None
    codes, scales, row = launch_quantize(v.x, v.m if v.delta else None, v.options)
    if v.m is not None:
        o = v.options
        launch_dequantize(codes, scales, o.bits, v.m, o.group_size, o.rounding, v.delta, row)
    torch.minimum(bad, torch.where(row == ALL_FINITE, ALL_FINITE, row | i << 32), out=bad)
    part.copy_(torch.cat([scales.view(-1).view(torch.uint8), codes.view(-1)]))


def _launch_encode(batch: list[tuple[int, EncodeItem, Tensor]], payload: Tensor, bad: Tensor) -> None:
    _, first, _ = batch[0]
    o, x = first.options, loadable(first.x)
    assert o is not None
    m = x if first.m is None else first.m
    rows = [(i, v.x, v.m, part, v.options.seed if v.options else 0) for i, v, part in batch]
    launch_encode(first, x, m, payload, _table(rows, x, m, payload, o), bad)


def launch_encode(
    first: EncodeItem, x: Tensor, m: Tensor, payload: Tensor, t: SampleTable, bad: Tensor, chosen: Tensor | None = None
) -> None:
    """Encode samples like `first` with the bits of its options, or with those in `chosen`, at most that many."""
    o, s = first.options, t.shape
    assert o is not None
    octet = triton.next_power_of_2(-(-s.group // 8))
    encode_kernel[s.grid(8 * octet)](
        x,
        m,
        payload,
        t.w,
        t.fields,
        bad,
        bad if chosen is None else chosen,
        t.samples,
        *s.sizes,
        BITS=o.bits,
        FITTED=chosen is not None,
        DELTA=first.delta,
        KEEP=first.m is not None,
        STOCHASTIC=o.rounding == "stochastic",
        OCT=octet,
        ALIGNED=t.aligned,
        FIELDS=FIELDS,
        num_warps=warps(8 * octet),
        enable_fp_fusion=False,
    )


@operation
@torch.no_grad()
def decode_batch(payload: Tensor, samples: Sequence[DecodeItem]) -> None:
    """As `ragged.decode_batch`: a launch for all samples of the same options, mostly one."""
    batches: dict[tuple[QuantizerOptions, bool, int], list[tuple[int, Tensor, Tensor, Tensor, int]]] = {}
    for i, (s, part) in enumerate(zip(samples, reference.split_payload(payload, samples), strict=True)):
        if s.options is None:
            s.m.copy_(part.clone().view(s.dtype).view(s.m.shape))
        elif s.m.numel():
            key = (s.options._replace(seed=0), s.delta, s.m.shape[1])
            batches.setdefault(key, []).append((i, s.m, s.m, part, 0))
    for (o, delta, _), rows in batches.items():
        m = rows[0][1]
        t = _table(rows, m, m, payload, o)
        decode_kernel[t.shape.grid(BLOCK)](
            m,
            payload,
            t.w,
            t.fields,
            t.samples,
            *t.shape.sizes,
            BITS=o.bits,
            DELTA=delta,
            BLOCK=BLOCK,
            ALIGNED=t.aligned,
            FIELDS=FIELDS,
            enable_fp_fusion=False,
        )


def _table(
    batch: Sequence[tuple[int, Tensor, Tensor | None, Tensor, int]],
    x: Tensor,
    m: Tensor,
    payload: Tensor,
    o: QuantizerOptions,
) -> SampleTable:
    """Make the table of samples: number, x, m, part of the payload, seed."""
    s = GroupShape((sum(len(each) for _, each, _, _, _ in batch), x.shape[1]), o.bits, o.group_size)
    rows: list[TableRow] = []
    row = 0
    for i, each, held, part, seed in batch:
        n, byte = len(each), part.data_ptr() - payload.data_ptr()
        rows.append((i, each, held, byte - 4 * row * s.groups, byte + 4 * n * s.groups - row * s.row_bytes, seed))
        row += n
    w = torch.tensor(code_values(o.bits, o.rounding), dtype=torch.float32)
    return make_table(s, rows, x, m, w)


def make_table(s: GroupShape, samples: Sequence[TableRow], x: Tensor, m: Tensor, w: Tensor) -> SampleTable:
    """Make the table of samples, and copy it to x's device. w: what codes stand for, an even number of float32."""
    fields, row, aligned = [], 0, True
    for i, each, held, scales, codes, seed in samples:
        x_at = (each.data_ptr() - x.data_ptr()) // each.element_size() - row * s.H
        m_at = 0 if held is None else (held.data_ptr() - m.data_ptr()) // 4 - row * s.H
        aligned = aligned and x_at % 4 == m_at % 4 == 0
        fields += [x_at, m_at, scales, codes, row, i, *reproducible.keys(seed, 0)]
        row += len(each)
    # One copy. Of pageable memory the driver takes 64 KiB at most, and waits for more: rows have no numbers here.
    both = torch.cat([torch.tensor(fields), w.view(torch.int64)]).to(x.device, non_blocking=True)
    return SampleTable(s, len(samples), both[: len(fields)], both[len(fields) :].view(torch.float32), aligned)
