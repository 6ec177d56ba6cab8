"""Triton kernels of rows and their host side: the quantizer, bit streams, top-k; helpers of all kernels.

The kernels produce the bytes of `reference.rows`. A program of the quantizer handles one chunk of a group, OCT rows of
eight values: eight codes fill `BITS` whole bytes. Launch with enable_fp_fusion=False, or multiply and add contract to
one rounding.

Codes and scales lie dense in GPU memory when a call returns, ready for one asynchronous copy to pinned host memory.
A quantizer call reads back one number (the first row that is not finite), and waits for nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from pipecomp.kernels.reference import layout, reproducible
from pipecomp.kernels.reference import rows as reference
from pipecomp.kernels.reference.batches import ALL_FINITE
from pipecomp.kernels.reference.layout import QuantizerOptions

P = ParamSpec("P")
R = TypeVar("R")

MAX_VALUES = 16384  # of a group that one program holds in registers
BLOCK = 1024  # values of one program
OCT = 128  # rows of eight values of one program
OPERATIONS: dict[str, Callable[..., Any]] = {}  # the backend's operations by name


def operation(function: Callable[P, R]) -> Callable[P, R]:
    """Register the Triton implementation of the reference function of the same name.

    It runs with its first tensor's device as the current one.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.device_of(first_tensor(args)):  # Triton launches kernels on the current device
            return function(*args, **kwargs)

    OPERATIONS[function.__name__] = run
    return run


def first_tensor(values: Any) -> Tensor | None:
    """Find the first tensor in values, or in lists and tuples among them."""
    for value in values:
        tensor = first_tensor(value) if isinstance(value, (list, tuple)) else value
        if isinstance(tensor, Tensor):
            return tensor
    return None


@triton.jit
def random_bits(index, keys):
    """Draw 32 random bits for element `index` (int64), as `reproducible.random_bits`. keys: [index div 2**32, 2]."""
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
    """Turn 32 random bits into uniform [0, 1) with 24 bits, float32."""
    return (h >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def to_float(v):
    """Convert loaded float32, float16 or (int16 bit patterns) bfloat16 values to float32, exactly, also denormals."""
    if v.dtype == tl.int16:
        return (v.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return v.to(tl.float32)


@triton.jit
def unit_and_chunk(COUNT, CHUNK: tl.constexpr):
    """Return this program's unit and chunk within the unit. A unit has COUNT values, a chunk CHUNK."""
    # Note: all programs are in one dimension of the grid. The others end at 65,535, too few for chunks of a long row.
    chunks = (COUNT - 1) // CHUNK + 1
    program = tl.program_id(0)
    return (program // chunks).to(tl.int64), (program % chunks).to(tl.int64)


@triton.jit
def octets(chunk, OCT: tl.constexpr):
    """Return row numbers, positions in a row, and value indices of a chunk (int64) of OCT rows of eight values."""
    octet = chunk * OCT + tl.arange(0, OCT)[:, None]
    lane = tl.arange(0, 8)[None, :]
    return octet, lane, octet * 8 + lane


@triton.jit
def store_codes(codes, octet, lane, c, value_ok, size_bytes, BITS: tl.constexpr):
    """Pack codes c [OCT, 8] (int32; 0 where not value_ok) into a stream of size_bytes, from byte octet * BITS."""
    store_codes_dynamic(codes, octet, lane, c, value_ok, size_bytes, BITS, BITS)


@triton.jit
def store_codes_dynamic(codes, octet, lane, c, value_ok, size_bytes, bits, MAX_BITS: tl.constexpr):
    """Pack codes as `store_codes`, with a number of bits that is no constant, at most MAX_BITS."""
    c = tl.where(value_ok, c, 0)
    if MAX_BITS <= 4:  # eight codes fit into 32 bits, whose sum across threads takes half the time of 64
        word = tl.sum(c << (lane * bits), 1)
        value = (word[:, None] >> tl.minimum(8 * lane, 24)) & 255
    else:
        word = tl.sum(c.to(tl.int64) << (lane * bits).to(tl.int64), 1)
        value = (word[:, None] >> (8 * lane).to(tl.int64)) & 255
    at = octet * bits + lane
    tl.store(codes + at, value.to(tl.uint8), mask=(lane < bits) & (at < size_bytes))


@triton.jit
def load_codes(codes, at, ok, size_bytes, BITS: tl.constexpr):
    """Load the codes, int32, of values `at` (int64 indices in one stream of size_bytes)."""
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
    """Load values x, or with DELTA x - m, as float32; zeros where not ok."""
    v = to_float(tl.load(x + x_at, mask=ok, other=0))
    if DELTA:
        v = v - tl.load(m + m_at, mask=ok, other=0.0)
    return v


@triton.jit
def locate_group(unit, H, GROUP, GROUPS, GROUP_BYTES, ROW_BYTES, BITS: tl.constexpr):
    """Return a group's row, first column, number of values, first code byte and code bytes."""
    row = unit // GROUPS
    column = unit % GROUPS * GROUP
    n = tl.minimum(H - column, GROUP)
    return row, column, n, row * ROW_BYTES + unit % GROUPS * GROUP_BYTES, (n * BITS + 7) // 8


@triton.jit
def measure_kernel(x, m, most, x_stride, m_stride, H, GROUP, GROUPS, DELTA: tl.constexpr, BLOCK: tl.constexpr):
    """Set most[group] (int32, initially zero) to the largest |value| as a bit pattern."""
    unit, chunk = unit_and_chunk(GROUP, BLOCK)
    row, column, n, _, _ = locate_group(unit, H, GROUP, GROUPS, 0, 0, 1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    v = load_values(x, m, row * x_stride + column + at, row * m_stride + column + at, at < n, DELTA)
    pattern = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(most + unit, tl.max(pattern, 0))


@triton.jit
def squares_kernel(x, m, largest, sums, x_stride, m_stride, H, GROUP, GROUPS, DELTA: tl.constexpr, BLOCK: tl.constexpr):
    """Set sums[group] (int64, initially zero) to the sum of (value / largest)**2 in units of 2**-30."""
    unit, chunk = unit_and_chunk(GROUP, BLOCK)
    row, column, n, _, _ = locate_group(unit, H, GROUP, GROUPS, 0, 0, 1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    v = load_values(x, m, row * x_stride + column + at, row * m_stride + column + at, at < n, DELTA)
    t = v * tl.div_rn(1.0, tl.load(largest + unit))
    square = t * t * 1073741824.0
    # Adding and subtracting 2**23 rounds half to even; from 2**23 on every float32 is an integer.
    rounded = tl.where(square < 8388608.0, (square + 8388608.0) - 8388608.0, square)
    tl.atomic_add(sums + unit, tl.sum(rounded.to(tl.int64), 0))


@triton.jit
def along_kernel(
    x,
    m,
    scales,
    sums,
    x_stride,
    m_stride,
    H,
    GROUP,
    GROUPS,
    BITS: tl.constexpr,
    DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Set sums[group] (int64, initially zero) to the sum of values over their scale times their codes' values.

    In units of 2**-14; nearest rounding.
    """
    unit, chunk = unit_and_chunk(GROUP, BLOCK)
    row, column, n, _, _ = locate_group(unit, H, GROUP, GROUPS, 0, 0, 1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    v = load_values(x, m, row * x_stride + column + at, row * m_stride + column + at, at < n, DELTA)
    scale = tl.load(scales + unit)
    t = v * tl.div_rn(1.0, tl.where(scale == 0.0, 1.0, scale))
    half: tl.constexpr = 1 << (BITS - 1)
    c = tl.minimum(tl.maximum((t + 1.0) * half, 0.0), 2 * half - 1).to(tl.int32).to(tl.float32)
    along = tl.abs(t * ((c + (0.5 - half)) * (16384 // half)))  # only rounding makes it negative, and it is tiny then
    # Adding and subtracting 2**23 rounds half to even; from 2**23 on every float32 is an integer.
    rounded = tl.where(along < 8388608.0, (along + 8388608.0) - 8388608.0, along)
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
    """Compute the codes of one chunk of one group.

    MEASURE: the chunk is the whole group; the program computes and stores its scale first. A group that is not finite
    lowers bad[0] to its row. Otherwise the scale is read.
    """
    unit, chunk = unit_and_chunk(GROUP, 8 * OCT)
    row, column, n, byte, size_bytes = locate_group(unit, H, GROUP, GROUPS, GROUP_BYTES, ROW_BYTES, BITS)
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
    channels,
    bad,
    out_stride,
    H,
    GROUP,
    GROUPS,
    GROUP_BYTES,
    ROW_BYTES,
    BITS: tl.constexpr,
    ADD: tl.constexpr,
    CHANNELS: tl.constexpr,
    GUARDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Set out to scale * w[code], or add it, for one chunk of one group.

    CHANNELS: times the scales of the channels. GUARDED: do nothing if bad[0] is a row.
    """
    unit, chunk = unit_and_chunk(GROUP, BLOCK)
    row, column, n, byte, size_bytes = locate_group(unit, H, GROUP, GROUPS, GROUP_BYTES, ROW_BYTES, BITS)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    ok = at < n
    if GUARDED:
        ok = ok & (tl.load(bad + tl.zeros([BLOCK], tl.int32)) == 0x7FFFFFFFFFFFFFFF)
    c = load_codes(codes + byte, at, ok, size_bytes, BITS)
    scale = tl.load(scales + unit)
    v = tl.load(w + c, mask=ok, other=0.0) * scale
    v = tl.where(scale == 0.0, 0.0, v)
    if CHANNELS:
        v = v * tl.load(channels + column + at, mask=ok, other=0.0)
    to = out + row * out_stride + column + at
    if ADD:
        v = tl.load(to, mask=ok, other=0.0) + v
    tl.store(to, v, mask=ok)


@triton.jit
def pack_kernel(codes, values, n, size_bytes, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Pack one chunk of the bytes of one row. A byte holds parts of at most eight values."""
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
    """Unpack one chunk of the values of one row."""
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
def select_kernel(values, index, x, x_stride, H, GROUP, GROUPS, K, KEPT, KEPT_LAST, BLOCK: tl.constexpr):
    """Select a group's largest magnitudes: bisection for the k-th largest bit pattern, then one stable compaction."""
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


def launch(kernel: Any, grid: tuple[int], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel without contraction of multiply and add to one rounding."""
    kernel[grid](*arguments, **constants, enable_fp_fusion=False)


def key_table(seed: int, start: int, count: int, device: torch.device) -> tuple[Tensor, int]:
    """Return the keys of elements start ... start + count - 1, int64 [blocks, 2], and start within the first block."""
    table = [reproducible.keys(seed, block) for block in range(start >> 32, ((start + max(count, 1) - 1) >> 32) + 1)]
    return torch.tensor(table, dtype=torch.int64).to(device, non_blocking=True), start & reproducible.MASK32


def loadable(x: Tensor) -> Tensor:
    """Return x, for bfloat16 its bit patterns as int16."""
    # Note: Triton's interpreter flushes bfloat16 denormals to zero.
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def warps(values: int) -> int:
    """Number of warps of a program that holds this many values: at most 32 values a thread."""
    return min(16, max(1, values // 256))


def grid(units: int, count: int, chunk: int) -> tuple[int]:
    """Make a one-dimensional grid with one program for each chunk of each unit of `count` values."""
    return (units * -(-count // chunk),)


class GroupShape:
    """Sizes of one quantizer call that all its kernels take."""

    def __init__(self, shape: tuple[int, ...], bits: int, group_size: int | None) -> None:
        self.H = shape[-1]
        self.rows = math.prod(shape[:-1])
        self.group = layout.group_length(self.H, group_size)
        self.groups = -(-self.H // self.group)
        self.units = self.rows * self.groups  # groups of all rows
        self.group_bytes = (self.group * bits + 7) // 8
        self.row_bytes = layout.row_bytes(self.H, bits, group_size)
        self.sizes = (self.H, self.group, self.groups, self.group_bytes, self.row_bytes)

    def grid(self, chunk: int) -> tuple[int]:
        """Make a grid with one program for each group and chunk of `chunk` values; see `unit_and_chunk`."""
        return grid(self.units, self.group, chunk)


@operation
def quantize(x: Tensor, options: QuantizerOptions, name: str = "x") -> tuple[Tensor, Tensor]:
    codes, scales, bad = launch_quantize(x, None, options)
    raise_if_bad(bad, name)
    return codes, scales


@operation
def delta_quantize_(a: Tensor, m: Tensor, options: QuantizerOptions, name: str = "a - m") -> tuple[Tensor, Tensor]:
    # The kernel that moves m checks the first kernel's `bad` on the GPU.
    spaced, _ = layout.with_row_stride(m)
    codes, scales, bad = launch_quantize(a, spaced, options)
    launch_dequantize(codes, scales, options, spaced, True, bad)
    raise_if_bad(bad, name)
    if spaced is not m:
        m.copy_(spaced)
    return codes, scales


def raise_if_bad(bad: Tensor, name: str) -> None:
    """Raise NonFiniteError if a kernel found a bad row."""
    row = int(bad)
    if row != ALL_FINITE:
        raise reference.non_finite(name, row)


def launch_quantize(x: Tensor, m: Tensor | None, options: QuantizerOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Compute codes, scales and the first bad row (int64 [1], ALL_FINITE if none)."""
    shape = tuple(x.shape)
    s = GroupShape(shape, options.bits, options.group_size)
    x, x_stride = layout.with_row_stride(x)
    x = loadable(x)
    base = x if m is None else m
    m_stride = s.H if m is None else layout.row_stride(m) or s.H
    codes = torch.empty((*shape[:-1], s.row_bytes), dtype=torch.uint8, device=x.device)
    scales = torch.empty(layout.scale_shape(shape, options.group_size), dtype=torch.float32, device=x.device)
    bad = torch.full((1,), ALL_FINITE, dtype=torch.int64, device=x.device)
    if not x.numel():
        return codes, scales, bad
    keys, _ = key_table(options.seed, 0, x.numel(), x.device)
    fused = options.scale == "max" and s.group <= MAX_VALUES
    if not fused:
        strides = (x_stride, m_stride, s.H, s.group, s.groups)
        largest = torch.zeros(s.units, dtype=torch.int32, device=x.device)
        launch(measure_kernel, s.grid(BLOCK), x, base, largest, *strides, m is not None, BLOCK)
        most = largest.view(torch.float32)
        usable = (most >= layout.SCALE_MIN) & (most <= layout.SCALE_MAX)
        sums = torch.zeros(s.units, dtype=torch.int64, device=x.device)
        if options.scale == "rms":
            safe = torch.where(usable, most, 1.0)
            launch(squares_kernel, s.grid(BLOCK), x, base, safe, sums, *strides, m is not None, BLOCK)
        counts = torch.full((s.groups,), s.group, dtype=torch.int64, device=x.device)
        counts[-1] = s.H - (s.groups - 1) * s.group
        computed = reference.finish_scales(most, sums, counts.repeat(s.rows), options)
        scales.copy_(computed.reshape(scales.shape))
        bad_rows = ~(computed <= layout.SCALE_MAX).reshape(s.rows, s.groups).all(-1)
        row = torch.arange(s.rows, device=x.device)
        bad.copy_(torch.where(bad_rows, row, ALL_FINITE).min().reshape(1))
    octet_rows = triton.next_power_of_2(-(-s.group // 8)) if fused else OCT  # of one program
    kind = {"DELTA": m is not None, "MEASURE": fused, "STOCHASTIC": options.rounding == "stochastic"}
    size = {"OCT": octet_rows, "num_warps": warps(8 * octet_rows)}
    values = (x, base, codes, scales, bad, keys, x_stride, m_stride)
    launch(quantize_kernel, s.grid(8 * octet_rows), *values, *s.sizes, BITS=options.bits, **kind, **size)
    if options.gain == "unbiased":  # with rms scales
        along = torch.zeros_like(sums)
        how = {"BITS": options.bits, "DELTA": m is not None, "BLOCK": BLOCK}
        launch(along_kernel, s.grid(BLOCK), x, base, scales, along, *strides, **how)
        scales.copy_(reference.unbiased_scales(computed, most, sums, along).reshape(scales.shape))
    return codes, scales, bad


def launch_dequantize(
    codes: Tensor,
    scales: Tensor,
    options: QuantizerOptions,
    out: Tensor,
    add: bool,
    bad: Tensor | None = None,
    channels: Tensor | None = None,
) -> None:
    """Decode into `out`, which has evenly spaced rows; with `bad`, only if that is ALL_FINITE.

    channels: None, or float32 [H] that decoded rows are multiplied by.
    """
    if not out.numel():
        return
    bits = options.bits
    s = GroupShape(tuple(out.shape), bits, options.group_size)
    table = torch.tensor(reference.code_values(bits, options.rounding), dtype=torch.float32)
    values = (codes, scales, table.to(out.device, non_blocking=True), out, scales if channels is None else channels)
    checked, stride = codes if bad is None else bad, layout.row_stride(out) or s.H
    constants = {"BITS": bits, "ADD": add, "CHANNELS": channels is not None, "GUARDED": bad is not None}
    constants["BLOCK"] = BLOCK
    launch(dequantize_kernel, s.grid(BLOCK), *values, checked, stride, *s.sizes, **constants)


@operation
def dequantize(
    codes: Tensor, scale: Tensor, options: QuantizerOptions, shape: tuple[int, ...], out: Tensor | None, add: bool
) -> Tensor:
    target = torch.empty(shape, dtype=torch.float32, device=codes.device) if out is None else out
    spaced, _ = layout.with_row_stride(target)
    launch_dequantize(codes.contiguous(), scale.contiguous(), options, spaced, add)
    return target if spaced is target else target.copy_(spaced)


@operation
def pack_bits(values: Tensor, bits: int) -> Tensor:
    values = values.contiguous()
    n = values.shape[-1]
    size = (n * bits + 7) // 8
    codes = torch.empty((*values.shape[:-1], size), dtype=torch.uint8, device=values.device)
    if codes.numel():
        launch(pack_kernel, grid(math.prod(values.shape[:-1]), size, BLOCK), codes, values, n, size, bits, BLOCK)
    return codes


@operation
def unpack_bits(codes: Tensor, bits: int, count: int) -> Tensor:
    codes = codes.contiguous()
    size = codes.shape[-1]
    values = torch.empty((*codes.shape[:-1], count), dtype=torch.int32, device=codes.device)
    if values.numel():
        launch(unpack_kernel, grid(math.prod(codes.shape[:-1]), count, BLOCK), values, codes, count, size, bits, BLOCK)
    return values


@operation
def select(x: Tensor, fraction: float, group_size: int | None) -> tuple[Tensor, Tensor]:
    s = GroupShape(tuple(x.shape), 8, group_size)
    if s.group > MAX_VALUES:  # no program can hold it: torch sorts
        return reference.select(x, fraction, group_size)
    x, stride = layout.with_row_stride(x)
    x = loadable(x)
    K = reference.top_k_kept(s.H, fraction, group_size)
    values = torch.empty((*x.shape[:-1], K), dtype=torch.float32, device=x.device)
    index = torch.empty((*x.shape[:-1], K), dtype=torch.int32, device=x.device)
    if values.numel():
        kept, kept_last = reference.kept(s.group, fraction), reference.kept(s.H % s.group or s.group, fraction)
        block = triton.next_power_of_2(s.group)
        sizes = (stride, s.H, s.group, s.groups, K, kept, kept_last)
        launch(select_kernel, (s.units,), values, index, x, *sizes, BLOCK=block, num_warps=warps(block))
    return values, index
