"""Triton kernels of the data-parallel codes, bit streams and top-k: what dithering.py, bitpack.py and topk.py define.

With OCT, a program handles so many rows of eight values of a flat bucket. Launch with enable_fp_fusion=False.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pipecomp.kernels.triton_quantize import (
    load_codes,
    octets,
    random_bits,
    store_codes,
    to_float,
    uniform,
    unit_and_chunk,
)


@triton.jit
def relative(g, divisor):
    """min(|g| / divisor, 1)."""
    return tl.minimum(tl.div_rn(tl.abs(g), divisor), 1.0)


@triton.jit
def linear_encode_kernel(
    g,
    index,
    levels,
    codes,
    keys,
    start,
    d,
    divisor,
    offset,
    size_bytes,
    BITS: tl.constexpr,
    INDEXED: tl.constexpr,
    OCT: tl.constexpr,
):
    """Linear dithering of one chunk."""
    octet, lane, at = octets(tl.program_id(0).to(tl.int64), OCT)
    ok = at < d
    v = to_float(tl.load(g + at, mask=ok, other=0))
    s = tl.load(levels + tl.load(index + at, mask=ok, other=0).to(tl.int32)) if INDEXED else tl.load(levels)
    y = relative(v, divisor) * s
    whole = y.to(tl.int32)
    up = uniform(random_bits(start + tl.where(ok, at, 0), keys)) < y - whole.to(tl.float32)
    level = tl.minimum(whole + up.to(tl.int32), offset)
    c = tl.where(v < 0.0, offset - level, offset + level)
    store_codes(codes, octet, lane, c, ok, size_bytes, BITS)


@triton.jit
def add_codes_kernel(total, codes, d, size_bytes, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """total += code."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < d
    c = load_codes(codes, at, ok, size_bytes, BITS)
    tl.store(total + at, tl.load(total + at, mask=ok, other=0) + c, mask=ok)


@triton.jit
def linear_decode_kernel(
    out,
    codes,
    index,
    factors,
    d,
    offset,
    size_bytes,
    BITS: tl.constexpr,
    INDEXED: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = (code - offset) * factor, or added to it."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < d
    factor = tl.load(factors + tl.load(index + at, mask=ok, other=0).to(tl.int32)) if INDEXED else tl.load(factors)
    values = (load_codes(codes, at, ok, size_bytes, BITS) - offset).to(tl.float32) * factor
    tl.store(out + at, tl.load(out + at, mask=ok, other=0) + values if ADD else values, mask=ok)


@triton.jit
def scale_index_kernel(out, g, levels, d, divisor, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Index of the largest level count with |g| / norm * s <= levels[0]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < d
    y = relative(to_float(tl.load(g + at, mask=ok, other=0)), divisor)
    least = tl.load(levels)
    best = tl.zeros([BLOCK], tl.int32)
    for j in range(1, COUNT):
        best = tl.where(y * tl.load(levels + j) <= least, j, best)
    tl.store(out + at, best.to(tl.uint8), mask=ok)


@triton.jit
def exponential_encode_kernel(
    g, codes, keys, start, d, divisor, smallest, depth, size_bytes, BITS: tl.constexpr, OCT: tl.constexpr
):
    """Exponential dithering of one chunk. smallest: 2**(top - 1 - depth)."""
    octet, lane, at = octets(tl.program_id(0).to(tl.int64), OCT)
    ok = at < d
    top: tl.constexpr = (1 << (BITS - 1)) - 1
    v = to_float(tl.load(g + at, mask=ok, other=0))
    y = relative(v, divisor)
    h = random_bits(start + tl.where(ok, at, 0), keys)
    pattern = y.to(tl.int32, bitcast=True)
    below = 128 + depth - (pattern >> 23)
    up = ((h >> 9).to(tl.int32) < (pattern & 0x7FFFFF)).to(tl.int32)
    last = (uniform(h) < y * smallest).to(tl.int32) * top
    e = tl.where(below > top, last, below - up)
    sign = ((v < 0.0) & (e > 0)).to(tl.int32)
    store_codes(codes, octet, lane, (sign << (BITS - 1)) | e, ok, size_bytes, BITS)


@triton.jit
def exponential_decode_kernel(
    out, codes, d, factor, depth, size_bytes, BITS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    """out = sign * 2**(1 + depth - e) * factor, zero for e = 0; or added to it."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < d
    c = load_codes(codes, at, ok, size_bytes, BITS)
    e = c & ((1 << (BITS - 1)) - 1)
    power = (((128 + depth - e) << 23) | ((c >> (BITS - 1)) << 31)).to(tl.float32, bitcast=True)
    values = tl.where(e == 0, 0.0, power * factor)
    tl.store(out + at, tl.load(out + at, mask=ok, other=0) + values if ADD else values, mask=ok)


@triton.jit
def exponential_reduce_kernel(a, b, keys, extension_keys, d, size_bytes, BITS: tl.constexpr, OCT: tl.constexpr):
    """Add codes, a <- a + b: Algorithm 2 of Global-QSGD on one chunk of codes."""
    octet, lane, at = octets(tl.program_id(0).to(tl.int64), OCT)
    ok = at < d
    mask: tl.constexpr = (1 << (BITS - 1)) - 1
    ca = load_codes(a, at, ok, size_bytes, BITS)
    cb = load_codes(b, at, ok, size_bytes, BITS)
    ea = ca & mask
    eb = cb & mask
    k = tl.abs(ea - eb)
    at = tl.where(ok, at, 0)
    differ = ((ca ^ cb) >> (BITS - 1)).to(tl.int32)
    power = tl.maximum(k - differ, 0)
    byte = (random_bits(at // 4, keys) >> (at % 4 * 8).to(tl.uint32)).to(tl.int32) & 255
    more = (random_bits(at, extension_keys) >> 8).to(tl.int32)
    near = (byte >> tl.maximum(8 - power, 0)) == 0
    far = (byte == 0) & (power <= 32) & ((more >> tl.minimum(tl.maximum(32 - power, 0), 24)) == 0)
    moves = tl.where(power <= 8, near, far).to(tl.int32)
    larger = tl.where(ea <= eb, ca, cb)
    c = tl.where(differ == 0, larger - moves, tl.where(k == 0, 0, larger + moves))
    c = tl.where(ea == 0, tl.where(eb == 0, 0, cb), tl.where(eb == 0, ca, c))
    store_codes(a, octet, lane, c, ok, size_bytes, BITS)


@triton.jit
def pack_kernel(codes, values, n, size_bytes, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """One chunk of the bytes of one row. A byte holds parts of at most eight values."""
    row, chunk = unit_and_chunk(size_bytes, BLOCK)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    first = at * 8 // BITS
    skip = (at * 8 % BITS).to(tl.int64)
    byte = tl.zeros([BLOCK], tl.int64)
    parts: tl.constexpr = (8 + BITS - 2) // BITS + 1
    for j in range(parts):
        ok = (at < size_bytes) & (first + j < n)
        v = tl.load(values + row * n + first + j, mask=ok, other=0).to(tl.int64) & ((1 << BITS) - 1)
        byte = byte | ((v << (j * BITS)) >> skip)
    tl.store(codes + row * size_bytes + at, (byte & 255).to(tl.uint8), mask=at < size_bytes)


@triton.jit
def unpack_kernel(values, codes, n, size_bytes, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """One chunk of the values of one row."""
    row, chunk = unit_and_chunk(n, BLOCK)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    first = at * BITS // 8
    word = tl.zeros([BLOCK], tl.int64)
    for j in range((BITS + 14) // 8):
        ok = (at < n) & (first + j < size_bytes)
        word = word | (tl.load(codes + row * size_bytes + first + j, mask=ok, other=0).to(tl.int64) << (8 * j))
    v = (word >> (at * BITS % 8)) & ((1 << BITS) - 1)
    tl.store(values + row * n + at, v.to(tl.int32), mask=at < n)


@triton.jit
def kmeans_kernel(out, x, bounds, d, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """How many boundaries are not above each value."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = to_float(tl.load(x + at, mask=at < d, other=0))
    below = tl.zeros([BLOCK], tl.int32)
    for j in range(COUNT):
        below += 1 - (tl.load(bounds + j) > v).to(tl.int32)
    tl.store(out + at, below.to(tl.uint8), mask=at < d)


@triton.jit
def select_kernel(values, index, x, x_stride, H, GROUP, GROUPS, K, KEPT, KEPT_LAST, BLOCK: tl.constexpr):
    """Select a group's largest magnitudes: the k-th largest bit pattern by bisection, then one stable compaction."""
    unit = tl.program_id(0).to(tl.int64)
    row = unit // GROUPS
    g = unit % GROUPS
    column = g * GROUP
    n = tl.minimum(H - column, GROUP)
    k = tl.where(g == GROUPS - 1, KEPT_LAST, KEPT)
    at = tl.arange(0, BLOCK)
    ok = at < n
    v = to_float(tl.load(x + row * x_stride + column + at, mask=ok, other=0))
    pattern = tl.where(ok, v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)
    threshold = tl.zeros([], tl.int32)
    for j in range(31):
        candidate = threshold | (1 << (30 - j))
        count = tl.sum((pattern >= candidate).to(tl.int32), 0)
        threshold = tl.where(count >= k, candidate, threshold)
    ties = pattern == threshold
    room = k - tl.sum((pattern > threshold).to(tl.int32), 0)
    kept = (pattern > threshold) | (ties & (tl.cumsum(ties.to(tl.int32), 0) <= room))
    to = row * K + g * KEPT + tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(values + to, v, mask=kept)
    tl.store(index + to, (column + at).to(tl.int32), mask=kept)
