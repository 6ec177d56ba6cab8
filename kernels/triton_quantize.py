"""Triton kernels of the quantizer: what reference.py defines, bit for bit, on GPU tensors.

A program handles one chunk of a group, OCT rows of eight values: eight codes fill `BITS` whole bytes. Launch with
enable_fp_fusion=False, or multiply and add contract to one rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def random_bits(index, keys):
    """32 random bits for element `index` (int64): rng.random_bits. keys: int64 [blocks, 2], one pair per 2**32."""
    pair = keys + 2 * (index >> 32)
    h = (index & 0xFFFFFFFF).to(tl.uint32) + tl.load(pair).to(tl.uint32)
    h = h ^ (h >> 16)
    h = h * tl.full([], 0x7FEB352D, tl.uint32)
    h = h ^ (h >> 15)
    h = h ^ tl.load(pair + 1).to(tl.uint32)
    h = h * tl.full([], 0x846CA68B, tl.uint32)
    return h ^ (h >> 16)


@triton.jit
def uniform(h):
    """Uniform [0, 1) with 24 bits, float32, from 32 random bits."""
    return (h >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def to_float(v):
    """float32 of loaded float32, float16 or, as int16 bit patterns, bfloat16 values: exact, also for denormals."""
    if v.dtype == tl.int16:
        return (v.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return v.to(tl.float32)


@triton.jit
def unit_and_chunk(COUNT, CHUNK: tl.constexpr):
    """Of this program: the unit, and which of its chunks. A unit has COUNT values, all programs are in one dimension.

    A grid's other dimensions end at 65,535, which chunks of a long row would pass.
    """
    chunks = (COUNT - 1) // CHUNK + 1
    program = tl.program_id(0)
    return (program // chunks).to(tl.int64), (program % chunks).to(tl.int64)


@triton.jit
def octets(chunk, OCT: tl.constexpr):
    """Of a chunk (int64) of OCT rows of eight values: the rows' numbers, the places in a row, the values' numbers."""
    octet = chunk * OCT + tl.arange(0, OCT)[:, None]
    lane = tl.arange(0, 8)[None, :]
    return octet, lane, octet * 8 + lane


@triton.jit
def store_codes(codes, octet, lane, c, value_ok, size_bytes, BITS: tl.constexpr):
    """Packs codes c [OCT, 8] (int32), zero where not value_ok, into a stream of size_bytes, from byte octet * BITS."""
    store_codes_of(codes, octet, lane, c, value_ok, size_bytes, BITS, BITS)


@triton.jit
def store_codes_of(codes, octet, lane, c, value_ok, size_bytes, bits, MOST_BITS: tl.constexpr):
    """The same where the bits are no constant: at most MOST_BITS."""
    c = tl.where(value_ok, c, 0)
    if MOST_BITS <= 4:  # eight codes fill 32 bits at most: half of what 64 take to be added across threads
        word = tl.sum(c << (lane * bits), 1)
        value = (word[:, None] >> tl.minimum(8 * lane, 24)) & 255
    else:
        word = tl.sum(c.to(tl.int64) << (lane * bits).to(tl.int64), 1)
        value = (word[:, None] >> (8 * lane).to(tl.int64)) & 255
    at = octet * bits + lane
    tl.store(codes + at, value.to(tl.uint8), mask=(lane < bits) & (at < size_bytes))


@triton.jit
def load_codes(codes, at, ok, size_bytes, BITS: tl.constexpr):
    """Codes of values `at` (int64 offsets in one stream of size_bytes), int32."""
    first = at * BITS // 8
    low = tl.load(codes + first, mask=ok, other=0).to(tl.int32)
    high = tl.load(codes + first + 1, mask=ok & (first + 1 < size_bytes), other=0).to(tl.int32)
    word = low | (high << 8)
    if BITS > 8:
        third = tl.load(codes + first + 2, mask=ok & (first + 2 < size_bytes), other=0).to(tl.int32)
        fourth = tl.load(codes + first + 3, mask=ok & (first + 3 < size_bytes), other=0).to(tl.int32)
        word = word | (third << 16) | (fourth << 24)
    return (word >> (at * BITS % 8).to(tl.int32)) & ((1 << BITS) - 1)


@triton.jit
def load_values(x, m, x_at, m_at, ok, DELTA: tl.constexpr):
    """Values x, or x - m, as float32; zeros where not ok."""
    v = to_float(tl.load(x + x_at, mask=ok, other=0))
    if DELTA:
        v = v - tl.load(m + m_at, mask=ok, other=0.0)
    return v


@triton.jit
def place(unit, H, GROUP, GROUPS, GROUP_BYTES, ROW_BYTES, BITS: tl.constexpr):
    """Of a group: row, first column, values, first code byte, code bytes."""
    row = unit // GROUPS
    column = unit % GROUPS * GROUP
    n = tl.minimum(H - column, GROUP)
    return row, column, n, row * ROW_BYTES + unit % GROUPS * GROUP_BYTES, (n * BITS + 7) // 8


@triton.jit
def measure_kernel(
    x,
    m,
    most,
    x_stride,
    m_stride,
    H,
    GROUP,
    GROUPS,
    DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """most[group] (int32, zero before) becomes the largest |value| as a bit pattern."""
    unit, chunk = unit_and_chunk(GROUP, BLOCK)
    row, column, n, _, _ = place(unit, H, GROUP, GROUPS, 0, 0, 1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    v = load_values(x, m, row * x_stride + column + at, row * m_stride + column + at, at < n, DELTA)
    pattern = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(most + unit, tl.max(pattern, 0))


@triton.jit
def squares_kernel(
    x,
    m,
    largest,
    sums,
    x_stride,
    m_stride,
    H,
    GROUP,
    GROUPS,
    DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """sums[group] (int64, zero before) becomes the sum of (value / largest)**2 in units of 2**-30."""
    unit, chunk = unit_and_chunk(GROUP, BLOCK)
    row, column, n, _, _ = place(unit, H, GROUP, GROUPS, 0, 0, 1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    v = load_values(x, m, row * x_stride + column + at, row * m_stride + column + at, at < n, DELTA)
    t = v * tl.div_rn(1.0, tl.load(largest + unit))
    square = t * t * 1073741824.0
    # Adding and taking away 2**23 rounds half to even; from 2**23 on every float32 is an integer.
    rounded = tl.where(square < 8388608.0, (square + 8388608.0) - 8388608.0, square)
    tl.atomic_add(sums + unit, tl.sum(rounded.to(tl.int64), 0))


@triton.jit
def quantize_kernel(
    x,
    m,
    codes,
    scales,
    bad,
    keys,
    x_stride,
    m_stride,
    H,
    GROUP,
    GROUPS,
    GROUP_BYTES,
    ROW_BYTES,
    BITS: tl.constexpr,
    DELTA: tl.constexpr,
    MEASURE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    OCT: tl.constexpr,
):
    """Codes of one chunk of one group.

    MEASURE: the chunk is the whole group, whose scale it finds and stores first; a group that is not finite lowers
    bad[0] to its row. Otherwise the scale is read.
    """
    unit, chunk = unit_and_chunk(GROUP, 8 * OCT)
    row, column, n, byte, size_bytes = place(unit, H, GROUP, GROUPS, GROUP_BYTES, ROW_BYTES, BITS)
    octet, lane, at = octets(chunk, OCT)
    ok = at < n
    v = load_values(x, m, row * x_stride + column + at, row * m_stride + column + at, ok, DELTA)
    if MEASURE:
        pattern = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        most = tl.max(pattern)
        tl.atomic_min(bad, row, mask=most > 0x71800000)  # 2**100; Inf and NaN are above it
        most = tl.where(most < 0x0D800000, 0, most)  # 2**-100
        scale = most.to(tl.float32, bitcast=True)
        tl.store(scales + unit, scale)
    else:
        scale = tl.load(scales + unit)
    inverse = tl.div_rn(1.0, tl.where(scale == 0.0, 1.0, scale))
    u = v * inverse + 1.0
    top: tl.constexpr = (1 << BITS) - 1
    if STOCHASTIC:
        steps = u * (top / 2) + uniform(random_bits(tl.where(ok, row * H + column + at, 0), keys))
    else:
        steps = u * (1 << (BITS - 1))
    c = tl.minimum(tl.maximum(steps, 0.0), top).to(tl.int32)
    store_codes(codes + byte, octet, lane, tl.where(scale == 0.0, 0, c), ok, size_bytes, BITS)


@triton.jit
def dequantize_kernel(
    codes,
    scales,
    w,
    out,
    bad,
    out_stride,
    H,
    GROUP,
    GROUPS,
    GROUP_BYTES,
    ROW_BYTES,
    BITS: tl.constexpr,
    ADD: tl.constexpr,
    GUARDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = scale * w[code], or out + that, one chunk of one group. GUARDED: nothing happens if bad[0] names a row."""
    unit, chunk = unit_and_chunk(GROUP, BLOCK)
    row, column, n, byte, size_bytes = place(unit, H, GROUP, GROUPS, GROUP_BYTES, ROW_BYTES, BITS)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    ok = at < n
    if GUARDED:
        ok = ok & (tl.load(bad + tl.zeros([BLOCK], tl.int32)) == 0x7FFFFFFFFFFFFFFF)
    c = load_codes(codes + byte, at, ok, size_bytes, BITS)
    scale = tl.load(scales + unit)
    v = tl.load(w + c, mask=ok, other=0.0) * scale
    v = tl.where(scale == 0.0, 0.0, v)
    to = out + row * out_stride + column + at
    if ADD:
        v = tl.load(to, mask=ok, other=0.0) + v
    tl.store(to, v, mask=ok)
