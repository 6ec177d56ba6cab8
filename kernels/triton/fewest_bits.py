"""Triton kernels that find the fewest bits of a packet and encode with them, without a copy to the host.

Three launches: every row's error for each number of bits; the sums and the choice; codes of that many bits. Sums are
made by halves, as by `reproducible.halved_sum`. Launch with enable_fp_fusion=False. Only `fit` waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from pipecomp.kernels.reference.batches import ALL_FINITE, FIRST_TRY, EncodeItem
from pipecomp.kernels.reference.rows import code_values
from pipecomp.kernels.triton.batches import FIELDS, SampleTable, TableRow, find_sample, launch_encode, make_table
from pipecomp.kernels.triton.rows import MAX_VALUES, GroupShape, launch, loadable, operation, to_float, warps

MAX_ODD = 64  # largest odd factor of a length that a program sums by halves in registers
SUM_BLOCK = 1024  # values that the one program of choose_kernel adds at once


@triton.jit
def tile_of(N: tl.constexpr):
    """Lay out N values in a tile [T, M], T the largest power of two in N, M >= N / T: indices, and which are valid."""
    T: tl.constexpr = N & -N
    M: tl.constexpr = triton.next_power_of_2(N // T)
    column = tl.arange(0, M)[None, :]
    at = tl.arange(0, T)[:, None] * (N // T) + column
    return at, (column < N // T) & (at < N)


@triton.jit
def halved(y, N: tl.constexpr):
    """Sum the N values of a tile by halves: a scalar."""
    T: tl.constexpr = N & -N
    M: tl.constexpr = triton.next_power_of_2(N // T)
    return fold(tl.reshape(halve(y, T, M), [M]), N // T, M)


@triton.jit
def halve(y, T: tl.constexpr, M: tl.constexpr):
    """Add the second half of the rows of y [T, M] to the first until there is one."""
    if T > 1:
        y = halve(tl.sum(tl.reshape(y, [2, T // 2, M]), 0), T // 2, M)
    return y


@triton.jit
def fold(y, N: tl.constexpr, M: tl.constexpr):
    """Sum N values in y [M] by halves, N odd at first: a scalar."""
    i = tl.arange(0, M)
    if N > 1:
        second = tl.sum(tl.where(i[None, :] == i[:, None] + N // 2, y[None, :], 0.0), 1)
        z = tl.where(i < N // 2, y + second, 0.0)
        if N % 2 == 1:
            z = tl.where(i == 0, z + tl.sum(tl.where(i == N - 1, y, 0.0), 0), z)
        total = fold(z, N // 2, M)
    else:
        total = tl.sum(tl.where(i == 0, y, 0.0), 0)
    return total


@triton.jit
def truncate(steps):
    """Round towards zero; tl.floor would take denormals for zero."""
    return steps.to(tl.int32).to(tl.float32)


@triton.jit
def load_group(x, m, delta, N: tl.constexpr):
    """Load values to be quantized, float32: x, or x - m if delta is 1."""
    at, ok = tile_of(N)
    base = tl.load(m + at, mask=ok & (at < delta * N), other=0.0)
    return to_float(tl.load(x + at, mask=ok, other=0)) - base


@triton.jit
def measure_group(v, to, LOW, COUNT, STRIDE, N: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Set to[b * STRIDE] to the squared norm of the error of N values at LOW + b bits, float64."""
    _, ok = tile_of(N)
    most = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    wrong = most > 0x71800000  # 2**100; Inf and NaN are above it
    scale = tl.where(most < 0x0D800000, 0, most).to(tl.float32, bitcast=True)  # 2**-100
    zero = scale == 0.0
    v = tl.where(wrong, 0.0, v)
    u = v * tl.div_rn(1.0, tl.where(zero, 1.0, scale)) + 1.0
    for b in range(COUNT):
        levels = (1 << (LOW + b)).to(tl.int32)
        top = (levels - 1).to(tl.float32)
        if STOCHASTIC:
            steps = u * (top * 0.5)
            above = steps - truncate(steps)
            squares = above * (1.0 - above)
            step = scale.to(tl.float64) * (2.0 / top.to(tl.float64))
        else:
            steps = u * (levels.to(tl.float32) * 0.5)
            off = tl.minimum(tl.maximum(truncate(steps), 0.0), top) - steps + 0.5
            squares = off * off
            step = scale.to(tl.float64) * (2.0 / levels.to(tl.float64))
        total = halved(tl.where(ok, squares, 0.0), N).to(tl.float64) * (step * step)
        tl.store(to + b * STRIDE, tl.where(wrong, float("nan"), tl.where(zero, 0.0, total)))


@triton.jit(do_not_specialize=["SAMPLES", "ROWS", "LOW", "COUNT"])  # else other lengths of samples compile it again
def distortion_kernel(
    x,
    m,
    table,
    sums,
    parts,
    SAMPLES,
    ROWS,
    LOW,
    COUNT,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Compute one row of sums [1 + COUNT, ROWS], the result of `distortion`. parts: scratch for the sums of groups."""
    row = tl.program_id(0).to(tl.int64)
    fields = find_sample(row, table, SAMPLES, FIELDS)
    x_row = x + tl.load(fields) + row * H
    m_row = m + tl.load(fields + 1) + row * H
    delta = tl.load(fields + 2)
    at, ok = tile_of(H)
    values = to_float(tl.load(x_row + at, mask=ok, other=0))
    tl.store(sums + row, halved(values * values, H).to(tl.float64))
    FULL: tl.constexpr = H // GROUP
    TAIL: tl.constexpr = H % GROUP
    out = sums + ROWS + row
    if GROUP == H:
        measure_group(load_group(x_row, m_row, delta, H), out, LOW, COUNT, ROWS, H, STOCHASTIC)
    else:
        GROUPS: tl.constexpr = FULL + (TAIL + GROUP - 1) // GROUP
        own = parts + row * COUNT * GROUPS
        for g in range(FULL):
            v = load_group(x_row + g * GROUP, m_row + g * GROUP, delta, GROUP)
            measure_group(v, own + g, LOW, COUNT, GROUPS, GROUP, STOCHASTIC)
        if TAIL:
            v = load_group(x_row + FULL * GROUP, m_row + FULL * GROUP, delta, TAIL)
            measure_group(v, own + FULL, LOW, COUNT, GROUPS, TAIL, STOCHASTIC)
        tl.debug_barrier()  # other threads of this program have stored the sums
        place, valid = tile_of(GROUPS)
        for b in range(COUNT):
            tl.store(out + b * ROWS, halved(tl.load(own + b * GROUPS + place, mask=valid, other=0.0), GROUPS))


@triton.jit(do_not_specialize=["limit", "ROWS", "LOW", "HIGH", "FIRST_TRY"])
def choose_kernel(sums, chosen, limit, ROWS, LOW, HIGH, FIRST_TRY, BLOCK: tl.constexpr):
    """Reduce sums [1 + HIGH - LOW + 1, ROWS] in place, then set chosen[0] to the bits that `ops.fewest_bits` chooses.

    limit: largest squared error over the squared norm, as the bit pattern of a float64.
    """
    k = tl.arange(0, 16)
    n = ROWS
    while n > 1:
        half = n // 2
        for start in range(0, half, BLOCK):
            j = start + tl.arange(0, BLOCK)[None, :]
            ok = (j < half) & (k[:, None] < HIGH - LOW + 2)
            of_k = sums + k[:, None].to(tl.int64) * ROWS
            z = tl.load(of_k + j, mask=ok, other=0.0) + tl.load(of_k + half + j, mask=ok, other=0.0)
            odd = ok & (j < n % 2)
            z = tl.where(odd, z + tl.load(of_k + (n - 1) + 0 * j, mask=odd, other=0.0), z)
            tl.store(of_k + j, z, mask=ok)
        tl.debug_barrier()
        n = half
    norm = tl.load(sums)
    largest = tl.full([], limit, tl.int64).to(tl.float64, bitcast=True) * norm
    bits = k
    known = (bits >= LOW) & (bits <= HIGH)
    errors = tl.load(sums + (1 + bits - LOW).to(tl.int64) * ROWS, mask=known, other=0.0)
    tried = bits == FIRST_TRY
    best = FIRST_TRY
    for _ in range(9):  # each iteration tries at least one more number of bits, or changes nothing
        fitting = tl.min(tl.where(tried & (errors <= largest), bits, 16))
        none = fitting == 16
        below = tl.max(tl.where(tried & (bits < fitting), bits + 1, LOW))
        best = tl.where(none, tl.max(tl.where(tried, bits, 0)), fitting)
        guess = tl.sum(tl.where(bits == best, errors, 0.0))
        for _ in range(8):
            more = none & (best < HIGH) & (guess > largest)
            fewer = (fitting < 16) & (best > below) & (4.0 * guess <= largest)
            guess = tl.where(more, guess * 0.25, tl.where(fewer, guess * 4.0, guess))
            best += tl.where(more, 1, tl.where(fewer, -1, 0))
        tried = tried | (((bits == best) | (bits == best - 1)) & known)
    overflow = tl.max((tried & ((errors == float("inf")) | (errors != errors))).to(tl.int32)) > 0
    tl.store(chosen, tl.where(overflow | (norm == float("inf")) | (norm != norm), HIGH, best).to(tl.int64))


@operation
@torch.no_grad()
def fit(items: Sequence[EncodeItem], error: float, low: int, high: int, payload: Tensor | None) -> int:
    # The GPU chooses without encoding, and the host waits for it once.
    batch = _DeviceBatch.of(items) if payload is None else None
    return 0 if batch is None else int(batch.choose(error, low, high))


@operation
@torch.no_grad()
def encode_fewest(
    items: Sequence[EncodeItem], error: float, low: int, high: int, payload: Tensor
) -> tuple[Tensor, Tensor] | None:
    # One launch encodes all: they must all be changes or none, and all have an m or none.
    batch = _DeviceBatch.of(items)
    if batch is None or len({(v.delta, v.m is None) for v in batch.items}) > 1:
        return None
    chosen = batch.choose(error, low, high)
    return chosen, batch.encode(chosen, high, payload)


class _DeviceBatch:
    """Samples that one launch of each kernel can handle: same dtype, row length and options."""

    def __init__(self, items: Sequence[EncodeItem]) -> None:
        self.items = [v for v in items if v.x.numel()]
        self.first = self.items[0]
        assert self.first.options is not None
        self.options = self.first.options
        self.x = loadable(self.first.x)
        self.m = next((v.m for v in self.items if v.m is not None), self.x)
        self.shape = GroupShape((sum(len(v.x) for v in self.items), self.x.shape[1]), 8, self.options.group_size)
        self._all = items

    @classmethod
    def of(cls, items: Sequence[EncodeItem]) -> _DeviceBatch | None:
        """Make the batch; None if the samples differ, or the kernels cannot handle them."""
        filled = [v for v in items if v.x.numel()]
        kinds = {v.options and (v.options._replace(seed=0, bits=0), v.x.dtype, v.x.shape[1]) for v in filled}
        if len(kinds) != 1 or None in kinds:
            return None
        batch = cls(items)
        s = batch.shape
        lengths = {s.H, s.group, s.H % s.group or s.group, s.groups}
        odd = max(n // (n & -n) for n in lengths)
        fits = batch.options.scale == "max" and max(lengths) <= MAX_VALUES and odd <= MAX_ODD
        return batch if fits and s.rows * s.H < 1 << 31 else None

    def _make_table(self) -> SampleTable:
        """Make the table on the device.

        Two FIELDS differ: scales flags samples that are changes; codes leaves out the part that depends on the bits.
        """
        s, rows, row = self.shape, list[TableRow](), 0
        for i, v in enumerate(self._all):
            if v.x.numel():
                row += len(v.x)
                rows.append(TableRow(i, v.x, v.m, int(v.delta), 4 * s.groups * row, v.options.seed if v.options else 0))
        return make_table(s, rows, self.x, self.m, _code_values(self.options.rounding))

    def choose(self, error: float, low: int, high: int) -> Tensor:
        """Choose the bits, int64 [1] on the device."""
        s, device, count = self.shape, self.x.device, high - low + 1
        t = self._table = self._make_table()
        sums = torch.empty((1 + count, s.rows), dtype=torch.float64, device=device)
        parts = torch.empty(s.rows * count * s.groups if s.groups > 1 else 1, dtype=torch.float64, device=device)
        chosen = torch.empty(1, dtype=torch.int64, device=device)
        values = (self.x, self.m, t.fields, sums, parts, t.samples, s.rows, low, count)
        kind = {"H": s.H, "GROUP": s.group, "STOCHASTIC": self.options.rounding == "stochastic", "FIELDS": FIELDS}
        launch(distortion_kernel, (s.rows,), *values, **kind, num_warps=warps(triton.next_power_of_2(s.H)))
        limit = int(np.float64(error * error).view(np.int64))  # Triton would convert a float to float32
        numbers = (limit, s.rows, low, high, min(max(FIRST_TRY, low), high))
        launch(choose_kernel, (1,), sums, chosen, *numbers, BLOCK=SUM_BLOCK, num_warps=16)
        return chosen

    def encode(self, chosen: Tensor, high: int, payload: Tensor) -> Tensor:
        """Encode with the bits in `chosen`, at most `high`; return the flag of `encode_batch`."""
        bad = torch.full((1,), ALL_FINITE, dtype=torch.int64, device=payload.device)
        first = self.first._replace(options=self.options._replace(bits=high))
        launch_encode(first, self.x, self.m, payload, self._table, bad, chosen)
        return bad


@cache
def _code_values(rounding: str) -> Tensor:
    """Decoded values of the codes of 1 bit, 2 bits, ..., 8 bits, one after the other, float32."""
    return torch.tensor([w for bits in range(1, 9) for w in code_values(bits, rounding)], dtype=torch.float32)
