"""Triton kernels that find the fewest bits of a packet and encode with them, without telling the host.

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
from pipecomp.kernels.triton.rows import MOST_VALUES, GroupShape, loadable, operation, to_float, warps

MOST_ODD = 64  # largest odd factor of a length whose halves a program adds up in registers
SUMMED = 1024  # values that the one program that chooses adds up at once


@triton.jit
def tile_of(N: tl.constexpr):
    """Where N values lie in a tile [T, M]: T the largest power of two in N, M at least what is left; and which do."""
    T: tl.constexpr = N & -N
    M: tl.constexpr = triton.next_power_of_2(N // T)
    column = tl.arange(0, M)[None, :]
    at = tl.arange(0, T)[:, None] * (N // T) + column
    return at, (column < N // T) & (at < N)


@triton.jit
def halved(y, N: tl.constexpr):
    """Sum up N values in a tile, zero elsewhere: a scalar."""
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
    """Sum up N values, an odd number or what halving one leaves, in y [M]: a scalar."""
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
def whole(steps):
    """Cut off what is behind the point; tl.floor would take denormals for zero."""
    return steps.to(tl.int32).to(tl.float32)


@triton.jit
def load_group(x, m, delta, N: tl.constexpr):
    """Values to be quantized, float32: x, or where delta is 1, x - m."""
    at, ok = tile_of(N)
    held = tl.load(m + at, mask=ok & (at < delta * N), other=0.0)
    return to_float(tl.load(x + at, mask=ok, other=0)) - held


@triton.jit
def measure_group(v, to, LOW, COUNT, STRIDE, N: tl.constexpr, STOCHASTIC: tl.constexpr):
    """to[b * STRIDE] becomes the squared norm of what LOW + b bits leave out of N values, float64."""
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
            above = steps - whole(steps)
            squares = above * (1.0 - above)
            step = scale.to(tl.float64) * (2.0 / top.to(tl.float64))
        else:
            steps = u * (levels.to(tl.float32) * 0.5)
            off = tl.minimum(tl.maximum(whole(steps), 0.0), top) - steps + 0.5
            squares = off * off
            step = scale.to(tl.float64) * (2.0 / levels.to(tl.float64))
        left = halved(tl.where(ok, squares, 0.0), N).to(tl.float64) * (step * step)
        tl.store(to + b * STRIDE, tl.where(wrong, float("nan"), tl.where(zero, 0.0, left)))


@triton.jit(do_not_specialize=["SAMPLES", "ROWS", "LOW", "COUNT"])  # else some lengths of samples compile it again
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
    """One row of the batch: sums [1 + COUNT, ROWS] as of `distortion.distortion`. parts: room for its groups' sums."""
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
        tl.debug_barrier()  # what other threads of this program have stored
        place, there = tile_of(GROUPS)
        for b in range(COUNT):
            tl.store(out + b * ROWS, halved(tl.load(own + b * GROUPS + place, mask=there, other=0.0), GROUPS))


@triton.jit(do_not_specialize=["limit", "ROWS", "LOW", "HIGH", "FIRST_TRY"])
def choose_kernel(sums, chosen, limit, ROWS, LOW, HIGH, FIRST_TRY, BLOCK: tl.constexpr):
    """Sum up sums [1 + HIGH - LOW + 1, ROWS] in place, then chosen[0] becomes what `distortion_ops` would choose.

    limit: the share of the squared norm that may be left out, as the bit pattern of a float64.
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
    most = tl.full([], limit, tl.int64).to(tl.float64, bitcast=True) * norm
    bits = k
    known = (bits >= LOW) & (bits <= HIGH)
    left = tl.load(sums + (1 + bits - LOW).to(tl.int64) * ROWS, mask=known, other=0.0)
    looked = bits == FIRST_TRY
    taken = FIRST_TRY
    for _ in range(9):  # each time at least one is looked at, or none
        fitting = tl.min(tl.where(looked & (left <= most), bits, 16))
        none = fitting == 16
        below = tl.max(tl.where(looked & (bits < fitting), bits + 1, LOW))
        taken = tl.where(none, tl.max(tl.where(looked, bits, 0)), fitting)
        guessed = tl.sum(tl.where(bits == taken, left, 0.0))
        for _ in range(8):
            more = none & (taken < HIGH) & (guessed > most)
            fewer = (fitting < 16) & (taken > below) & (4.0 * guessed <= most)
            guessed = tl.where(more, guessed * 0.25, tl.where(fewer, guessed * 4.0, guessed))
            taken += tl.where(more, 1, tl.where(fewer, -1, 0))
        looked = looked | (((bits == taken) | (bits == taken - 1)) & known)
    wild = tl.max((looked & ((left == float("inf")) | (left != left))).to(tl.int32)) > 0
    tl.store(chosen, tl.where(wild | (norm == float("inf")) | (norm != norm), HIGH, taken).to(tl.int64))


@operation
@torch.no_grad()
def fit(items: Sequence[EncodeItem], error: float, low: int, high: int, payload: Tensor | None) -> int:
    """As `distortion.fit`, but that nothing is encoded: the GPU chooses, and the host waits for it once."""
    batch = _DeviceBatch.of(items) if payload is None else None
    return 0 if batch is None else int(batch.choose(error, low, high))


@operation
@torch.no_grad()
def encode_fewest(
    items: Sequence[EncodeItem], error: float, low: int, high: int, payload: Tensor
) -> tuple[Tensor, Tensor] | None:
    """As `distortion.encode_fewest`, of samples that are all changes, or all not, and whose m are all kept, or none."""
    batch = _DeviceBatch.of(items)
    if batch is None or len({(v.delta, v.m is None) for v in batch.items}) > 1:
        return None
    chosen = batch.choose(error, low, high)
    return chosen, batch.encode(chosen, high, payload)


class _DeviceBatch:
    """Samples that share what kernels are made for."""

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
        """Give the batch, None where there is none, or where the kernels cannot do it."""
        filled = [v for v in items if v.x.numel()]
        alike = {v.options and (v.options._replace(seed=0, bits=0), v.x.dtype, v.x.shape[1]) for v in filled}
        if len(alike) != 1 or None in alike:
            return None
        batch = cls(items)
        s = batch.shape
        lengths = {s.H, s.group, s.H % s.group or s.group, s.groups}
        odd = max(n // (n & -n) for n in lengths)
        able = batch.options.scale == "max" and max(lengths) <= MOST_VALUES and odd <= MOST_ODD
        return batch if able and s.rows * s.H < 1 << 31 else None

    def _make_table(self) -> SampleTable:
        """Make the table, on the device.

        Its fields are those of `triton_ragged.FIELDS`, but that scales' has whether the sample is a change, and codes'
        what `encode_kernel` adds to it.
        """
        s, rows, row = self.shape, list[TableRow](), 0
        for i, v in enumerate(self._all):
            if v.x.numel():
                row += len(v.x)
                rows.append((i, v.x, v.m, int(v.delta), 4 * s.groups * row, v.options.seed if v.options else 0))
        return make_table(s, rows, self.x, self.m, _code_values(self.options.rounding))

    def choose(self, error: float, low: int, high: int) -> Tensor:
        """Choose the bits: int64 [1] on the device."""
        s, device, count = self.shape, self.x.device, high - low + 1
        t = self._table = self._make_table()
        sums = torch.empty((1 + count, s.rows), dtype=torch.float64, device=device)
        parts = torch.empty(s.rows * count * s.groups if s.groups > 1 else 1, dtype=torch.float64, device=device)
        chosen = torch.empty(1, dtype=torch.int64, device=device)
        distortion_kernel[(s.rows,)](
            self.x,
            self.m,
            t.fields,
            sums,
            parts,
            t.samples,
            s.rows,
            low,
            count,
            H=s.H,
            GROUP=s.group,
            STOCHASTIC=self.options.rounding == "stochastic",
            FIELDS=FIELDS,
            num_warps=warps(triton.next_power_of_2(s.H)),
            enable_fp_fusion=False,
        )
        choose_kernel[(1,)](
            sums,
            chosen,
            int(np.float64(error * error).view(np.int64)),  # Triton would make a float32 of it
            s.rows,
            low,
            high,
            min(max(FIRST_TRY, low), high),
            BLOCK=SUMMED,
            num_warps=16,
            enable_fp_fusion=False,
        )
        return chosen

    def encode(self, chosen: Tensor, high: int, payload: Tensor) -> Tensor:
        """Encode with the bits that `choose` gave, `high` at most: the flag of `ragged.encode_batch`."""
        bad = torch.full((1,), ALL_FINITE, dtype=torch.int64, device=payload.device)
        first = self.first._replace(options=self.options._replace(bits=high))
        launch_encode(first, self.x, self.m, payload, self._table, bad, chosen)
        return bad


@cache
def _code_values(rounding: str) -> Tensor:
    """What the codes of 1 bit, 2 and so on to 8 stand for, one after the other, float32."""
    return torch.tensor([w for bits in range(1, 9) for w in code_values(bits, rounding)], dtype=torch.float32)
