"""Host side of the Triton kernels of rows: the quantizer, bit streams, top-k, and error feedback.

Codes and scales lie dense in GPU memory when a call returns, ready for one asynchronous copy to pinned host memory.
A quantizer call reads back one number (the first row that is not finite), which is its only wait.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from pipecomp.kernels import feedback, layout, reference, rng, topk
from pipecomp.kernels import triton_gradient as gradient
from pipecomp.kernels import triton_quantize as quantizer
from pipecomp.kernels.layout import Options

FINE = 2**63 - 1
MOST_VALUES = 16384  # of a group that one program holds in registers
BLOCK = 1024
OCT = 128


def key_table(seed: int, start: int, count: int, device: torch.device) -> tuple[Tensor, int]:
    """Keys of the blocks of elements start ... start + count - 1, int64 [blocks, 2]; and start within the first."""
    table = [rng.keys(seed, block) for block in range(start >> 32, ((start + max(count, 1) - 1) >> 32) + 1)]
    return torch.tensor(table, dtype=torch.int64).to(device, non_blocking=True), start & rng.MASK32


def loadable(x: Tensor) -> Tensor:
    """x, or the bit patterns of bfloat16 as int16: Triton's interpreter would round its denormals away."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def warps(values: int) -> int:
    """Warps of a program that holds this many values: at most 32 values a thread up to the largest program."""
    return min(16, max(1, values // 256))


def grid(units: int, count: int, chunk: int) -> tuple[int]:
    """One program per chunk of each unit of `count` values, in one dimension."""
    return (units * -(-count // chunk),)


class Shape:
    """Strides and counts of one quantizer call that every kernel takes."""

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
        """One program per group and chunk of `chunk` values; see `triton_quantize.unit_and_chunk`."""
        return grid(self.units, self.group, chunk)


def quantize(x: Tensor, options: Options, name: str = "x") -> tuple[Tensor, Tensor]:
    """As `reference.quantize`."""
    codes, scales, bad = launch_quantize(x, None, options)
    raise_if_bad(bad, name)
    return codes, scales


def delta_quantize_(a: Tensor, m: Tensor, options: Options, name: str = "a - m") -> tuple[Tensor, Tensor]:
    """As `reference.delta_quantize_`. The kernel that moves m looks at the first one's verdict itself."""
    walkable, _ = layout.with_stride(m)
    codes, scales, bad = launch_quantize(a, walkable, options)
    launch_dequantize(codes, scales, options.bits, walkable, options.group_size, options.rounding, True, bad)
    raise_if_bad(bad, name)
    if walkable is not m:
        m.copy_(walkable)
    return codes, scales


def raise_if_bad(bad: Tensor, name: str) -> None:
    """Raise NonFiniteError if a kernel noted a row."""
    row = int(bad)
    if row != FINE:
        raise reference.non_finite(name, row)


def launch_quantize(x: Tensor, m: Tensor | None, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and the first bad row (int64 [1], FINE if none)."""
    shape = tuple(x.shape)
    s = Shape(shape, options.bits, options.group_size)
    x, x_stride = layout.with_stride(x)
    x = loadable(x)
    base = x if m is None else m
    m_stride = s.H if m is None else layout.row_stride(m) or s.H
    codes = torch.empty((*shape[:-1], s.row_bytes), dtype=torch.uint8, device=x.device)
    scales = torch.empty(layout.scale_shape(shape, options.group_size), dtype=torch.float32, device=x.device)
    bad = torch.full((1,), FINE, dtype=torch.int64, device=x.device)
    if not x.numel():
        return codes, scales, bad
    keys, _ = key_table(options.seed, 0, x.numel(), x.device)
    fused = options.scale == "max" and s.group <= MOST_VALUES
    if not fused:
        where = (x_stride, m_stride, s.H, s.group, s.groups)
        largest = torch.zeros(s.units, dtype=torch.int32, device=x.device)
        quantizer.measure_kernel[s.grid(BLOCK)](x, base, largest, *where, m is not None, BLOCK, enable_fp_fusion=False)
        most = largest.view(torch.float32)
        usable = (most >= layout.SCALE_MIN) & (most <= layout.SCALE_MAX)
        sums = torch.zeros(s.units, dtype=torch.int64, device=x.device)
        if options.scale == "rms":
            safe = torch.where(usable, most, 1.0)
            quantizer.squares_kernel[s.grid(BLOCK)](
                x, base, safe, sums, *where, m is not None, BLOCK, enable_fp_fusion=False
            )
        whole = torch.full((s.groups,), s.group, dtype=torch.int64, device=x.device)
        whole[-1] = s.H - (s.groups - 1) * s.group
        found = reference.finish_scales(most, sums, whole.repeat(s.rows), options)
        scales.copy_(found.reshape(scales.shape))
        wrong = ~(found <= layout.SCALE_MAX).reshape(s.rows, s.groups).all(-1)
        row = torch.arange(s.rows, device=x.device)
        bad.copy_(torch.where(wrong, row, FINE).min().reshape(1))
    octets = triton.next_power_of_2(-(-s.group // 8)) if fused else OCT  # of one program
    quantizer.quantize_kernel[s.grid(8 * octets)](
        x,
        base,
        codes,
        scales,
        bad,
        keys,
        x_stride,
        m_stride,
        *s.sizes,
        BITS=options.bits,
        DELTA=m is not None,
        MEASURE=fused,
        STOCHASTIC=options.rounding == "stochastic",
        OCT=octets,
        num_warps=warps(8 * octets),
        enable_fp_fusion=False,
    )
    return codes, scales, bad


def launch_dequantize(
    codes: Tensor,
    scales: Tensor,
    bits: int,
    out: Tensor,
    group_size: int | None,
    rounding: str,
    add: bool,
    bad: Tensor | None = None,
) -> None:
    """Decode into `out`, whose rows can be walked; with `bad`, only if it names no row."""
    if not out.numel():
        return
    s = Shape(tuple(out.shape), bits, group_size)
    w = torch.tensor(reference.code_values(bits, rounding), dtype=torch.float32).to(out.device, non_blocking=True)
    quantizer.dequantize_kernel[s.grid(BLOCK)](
        codes,
        scales,
        w,
        out,
        codes if bad is None else bad,
        layout.row_stride(out) or s.H,
        *s.sizes,
        BITS=bits,
        ADD=add,
        GUARDED=bad is not None,
        BLOCK=BLOCK,
        enable_fp_fusion=False,
    )


def dequantize(
    codes: Tensor,
    scale: Tensor,
    bits: int,
    shape: tuple[int, ...],
    group_size: int | None,
    rounding: str,
    out: Tensor | None,
    add: bool,
) -> Tensor:
    """As `reference.dequantize`."""
    target = torch.empty(shape, dtype=torch.float32, device=codes.device) if out is None else out
    walkable, _ = layout.with_stride(target)
    launch_dequantize(codes.contiguous(), scale.contiguous(), bits, walkable, group_size, rounding, add)
    return target if walkable is target else target.copy_(walkable)


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """As `bitpack.pack_bits`."""
    values = values.contiguous()
    n = values.shape[-1]
    size = (n * bits + 7) // 8
    codes = torch.empty((*values.shape[:-1], size), dtype=torch.uint8, device=values.device)
    if codes.numel():
        gradient.pack_kernel[grid(math.prod(values.shape[:-1]), size, BLOCK)](
            codes, values, n, size, bits, BLOCK, enable_fp_fusion=False
        )
    return codes


def unpack_bits(codes: Tensor, bits: int, count: int) -> Tensor:
    """As `bitpack.unpack_bits`."""
    codes = codes.contiguous()
    values = torch.empty((*codes.shape[:-1], count), dtype=torch.int32, device=codes.device)
    if values.numel():
        gradient.unpack_kernel[grid(math.prod(codes.shape[:-1]), count, BLOCK)](
            values, codes, count, codes.shape[-1], bits, BLOCK, enable_fp_fusion=False
        )
    return values


def select(x: Tensor, fraction: float, group_size: int | None) -> tuple[Tensor, Tensor]:
    """As `topk.select`. A group that no program can hold is sorted by torch."""
    s = Shape(tuple(x.shape), 8, group_size)
    if s.group > MOST_VALUES:
        return topk.select(x, fraction, group_size)
    x, stride = layout.with_stride(x)
    x = loadable(x)
    K = topk.top_k_kept(s.H, fraction, group_size)
    values = torch.empty((*x.shape[:-1], K), dtype=torch.float32, device=x.device)
    index = torch.empty((*x.shape[:-1], K), dtype=torch.int32, device=x.device)
    if values.numel():
        kept, kept_last = topk.kept(s.group, fraction), topk.kept(s.H % s.group or s.group, fraction)
        block = triton.next_power_of_2(s.group)
        gradient.select_kernel[(s.units,)](
            values,
            index,
            x,
            stride,
            s.H,
            s.group,
            s.groups,
            K,
            kept,
            kept_last,
            BLOCK=block,
            num_warps=warps(block),
            enable_fp_fusion=False,
        )
    return values, index


def feedback_quantize_(x_d: Tensor, e_d: Tensor, bits: int, group_size: int, mean: bool) -> tuple[Tensor, Tensor]:
    """As `feedback.feedback_quantize_`: scales with torch's own operations, the quantizer's kernels on the sum."""
    return feedback.feedback_quantize_(x_d, e_d, bits, group_size, mean, quantize_sum)


def quantize_sum(sum_d: Tensor, scale_G: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Codes of values with known scales, and what they decode to."""
    s = Shape(tuple(sum_d.shape), bits, group_size)
    codes = torch.empty(s.row_bytes, dtype=torch.uint8, device=sum_d.device)
    keys, _ = key_table(0, 0, s.H, sum_d.device)
    quantizer.quantize_kernel[s.grid(8 * OCT)](
        sum_d,
        sum_d,
        codes,
        scale_G.contiguous(),
        codes,
        keys,
        s.H,
        s.H,
        *s.sizes,
        BITS=bits,
        DELTA=False,
        MEASURE=False,
        STOCHASTIC=False,
        OCT=OCT,
        num_warps=warps(8 * OCT),
        enable_fp_fusion=False,
    )
    decoded_d = torch.empty_like(sum_d)
    launch_dequantize(codes, scale_G, bits, decoded_d, group_size, "nearest", False)
    return codes, decoded_d


def feedback_reduce_(
    codes: list[Tensor], scales: list[Tensor], bits: int, e_d: Tensor, group_size: int, mean: bool
) -> tuple[Tensor, Tensor]:
    """As `feedback.feedback_reduce_`."""
    return feedback.feedback_reduce_(codes, scales, bits, e_d, group_size, mean, quantize_sum, dequantize)
