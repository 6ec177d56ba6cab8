"""The native operations: conversion of arguments to pointers and sizes for the C++ kernels.

ctypes releases the GIL for a call. A call uses as many threads as torch where there is enough work; results do not
depend on them.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import Array, c_float, c_int32, c_void_p

import numpy as np
import torch
from torch import Tensor

from pipecomp.errors import KernelError
from pipecomp.kernels.native.library import (
    BLOCKS,
    DTYPES,
    ChannelsArgs,
    DequantizeArgs,
    FeedbackArgs,
    Library,
    QuantizeArgs,
    struct_of,
)
from pipecomp.kernels.reference import batches, gradients, layout, rows
from pipecomp.kernels.reference.batches import ALL_FINITE, ALL_FINITE_FLAG, DecodeItem, EncodeItem, payload_bytes
from pipecomp.kernels.reference.channels import FLOORS, SENT, channel_groups, is_sent
from pipecomp.kernels.reference.gradients import LinearCodes, Sketch
from pipecomp.kernels.reference.layout import QuantizerOptions
from pipecomp.kernels.reference.reproducible import MASK64

_QUANTIZE, _DEQUANTIZE = struct_of(QuantizeArgs), struct_of(DequantizeArgs)
_CHANNELS = struct_of(ChannelsArgs)


class NativeBackend(Library):
    """The native kernels, each a method with the name and signature of its reference function."""

    def _call(self, name: str, **fields: object) -> int:
        """Call a function with the fields of its argument block. Tensors and arrays become addresses."""
        return self._call_block(name, BLOCKS[name](**{key: _value(value) for key, value in fields.items()}))

    def _call_block(self, name: str, block: ctypes.Structure) -> int:
        function = getattr(self.library, f"pipecomp_{name}")
        return function(ctypes.byref(block), self.isa_index, self.threads)

    def quantize(self, x: Tensor, options: QuantizerOptions, name: str = "x") -> tuple[Tensor, Tensor]:
        return self._quantize(x, None, options, name)

    def delta_quantize_(
        self, a: Tensor, m: Tensor, options: QuantizerOptions, name: str = "a - m"
    ) -> tuple[Tensor, Tensor]:
        spaced, _ = layout.with_row_stride(m)
        pair = self._quantize(a, spaced, options, name)
        if spaced is not m:
            m.copy_(spaced)
        return pair

    def _quantize(self, x: Tensor, m: Tensor | None, options: QuantizerOptions, name: str) -> tuple[Tensor, Tensor]:
        shape, H = tuple(x.shape), x.shape[-1]
        x, x_stride = layout.with_row_stride(x)
        codes = torch.empty((*shape[:-1], layout.row_bytes(H, options.bits, options.group_size)), dtype=torch.uint8)
        scales = torch.empty(layout.scale_shape(shape, options.group_size), dtype=torch.float32)
        if x.numel():
            strides = {"x_stride": x_stride, "m_stride": H if m is None else layout.row_stride(m) or H}
            how = {"dtype": DTYPES[x.dtype], "rms": options.scale == "rms", "seed": options.seed & MASK64}
            values = {"x": x, "m": m, "codes": codes, "scales": scales}
            bad = self._call("quantize", **values, **strides, **how, **_row_args(shape, options))
            if bad >= 0:
                raise rows.non_finite(name, bad)
        return codes, scales

    def dequantize(
        self,
        codes: Tensor,
        scale: Tensor,
        options: QuantizerOptions,
        shape: tuple[int, ...],
        out: Tensor | None,
        add: bool,
    ) -> Tensor:
        codes, scale = codes.contiguous(), scale.contiguous()
        target = torch.empty(shape, dtype=torch.float32) if out is None else out
        out, stride = layout.with_row_stride(target)
        if out.numel():
            values = {"codes": codes, "scales": scale, "out": out, "out_stride": stride, "add": add}
            self._call("dequantize", **values, **_row_args(shape, options))
        return target if out is target else target.copy_(out)

    def pack_bits(self, values: Tensor, bits: int) -> Tensor:
        values = values.contiguous()
        n = values.shape[-1]
        codes = torch.empty((*values.shape[:-1], (n * bits + 7) // 8), dtype=torch.uint8)
        size, count = values.element_size(), math.prod(values.shape[:-1])
        if codes.numel():
            self.library.pipecomp_pack(codes.data_ptr(), values.data_ptr(), size, count, n, bits, self.isa_index)
        return codes

    def unpack_bits(self, codes: Tensor, bits: int, count: int) -> Tensor:
        codes = codes.contiguous()
        values = torch.empty((*codes.shape[:-1], count), dtype=torch.int32)
        if values.numel():
            lines = math.prod(codes.shape[:-1])
            self.library.pipecomp_unpack(values.data_ptr(), codes.data_ptr(), lines, count, bits, self.isa_index)
        return values

    def select(self, x: Tensor, fraction: float, group_size: int | None) -> tuple[Tensor, Tensor]:
        H = x.shape[-1]
        x, stride = layout.with_row_stride(x)
        group = layout.group_length(H, group_size)
        K = rows.top_k_kept(H, fraction, group_size)
        values = torch.empty((*x.shape[:-1], K), dtype=torch.float32)
        index = torch.empty((*x.shape[:-1], K), dtype=torch.int32)
        kept, kept_last = rows.kept(group, fraction), rows.kept(H % group or group, fraction)
        pointers = (values.data_ptr(), index.data_ptr(), x.data_ptr())
        sizes = (DTYPES[x.dtype], stride, math.prod(x.shape[:-1]), H, group, kept, kept_last)
        call = self.library.pipecomp_select
        if values.numel() and call(*pointers, *sizes, self.isa_index, self.threads):
            raise KernelError(f"native kernels: no memory to order {group} values")
        return values, index

    def encode_batch(self, items: Sequence[EncodeItem], payload: Tensor, packet: Tensor | None) -> Tensor:
        scales = _ChannelTable(items, payload.data_ptr())
        table, values = _quantize_table(items, scales)
        checked = (None, 0) if packet is None else (packet.data_ptr(), packet.numel())
        call = self.library.pipecomp_encode_batch
        flag = call(table, len(items), values, *scales.arguments, *checked, self.isa_index, self.threads)
        return ALL_FINITE_FLAG if flag == ALL_FINITE else torch.tensor([flag])

    def decode_batch(self, payload: Tensor, items: Sequence[DecodeItem]) -> None:
        table, values = (DequantizeArgs * len(items))(), 0
        scales = _ChannelTable(items, payload.data_ptr())
        at = scales.end
        for i, (m, o, delta, dtype) in enumerate(items):
            n, H = m.shape
            if not n * H:
                continue
            codes, row_scales, group = _addresses(at, n, H, o)
            how = (DTYPES[dtype], 0, 0, 0)
            if o is not None:
                how = (how[0], o.bits, o.rounding == "stochastic", delta)
            pointers = (codes, row_scales, scales.of.get(i, 0), m.data_ptr())
            _DEQUANTIZE.pack_into(table, i * _DEQUANTIZE.size, *pointers, H, n, H, group, *how)
            at += payload_bytes(n, H, o, dtype)
            values += n * H
        call = self.library.pipecomp_decode_batch
        call(table, len(items), values, *scales.arguments, self.isa_index, self.threads)

    def distortion(self, items: Sequence[EncodeItem], bits: Sequence[int]) -> Tensor:
        scales = _ChannelTable(items)
        table, values = _quantize_table(items, scales)
        out = torch.empty(1 + len(bits), sum(item.x.shape[0] for item in items), dtype=torch.float64)
        numbers, more = (c_int32 * len(bits))(*bits), (len(bits), out.data_ptr())
        call = self.library.pipecomp_distortion
        call(table, len(items), values, *scales.arguments, numbers, *more, self.isa_index, self.threads)
        return out

    def fit(self, items: Sequence[EncodeItem], error: float, low: int, high: int, payload: Tensor | None) -> int:
        # Only max scales and nearest rounding; the kernel returns 0 for others.
        if channel_groups(items):
            return 0
        table, values = _quantize_table(items)
        call = self.library.pipecomp_fewest_bits
        out = None if payload is None else payload.data_ptr()
        return call(table, len(items), values, error * error, low, high, out, self.isa_index, self.threads)

    def feedback_quantize_(
        self, x_d: Tensor, e_d: Tensor, bits: int, group_size: int, mean: bool
    ) -> tuple[Tensor, Tensor]:
        x_d = x_d.contiguous()
        args, codes, scales = _feedback_args(x_d, e_d, bits, group_size, mean)
        self._call_block("feedback_quantize", args)
        return codes, scales

    def feedback_reduce_(
        self, codes: list[Tensor], scales: list[Tensor], bits: int, e_d: Tensor, group_size: int, mean: bool
    ) -> tuple[Tensor, Tensor]:
        codes, scales = [c.contiguous() for c in codes], [s.contiguous() for s in scales]
        pointers = [(c_void_p * len(codes))(*(t.data_ptr() for t in row)) for row in (codes, scales)]
        to, out_codes, out_scales = _feedback_args(e_d, e_d, bits, group_size, mean)
        scratch = torch.empty(self.threads, to.group, dtype=torch.float32)
        self._call(
            "feedback_reduce", to=to, scratch=scratch, in_codes=pointers[0], in_scales=pointers[1], parts=len(codes)
        )
        return out_codes, out_scales

    def linear_encode(self, g_d: Tensor, norm: float, form: LinearCodes, seed: int, start: int) -> Tensor:
        levels, index_d, bits = form
        codes, bucket = _flat_args(g_d, norm, bits, seed, start)
        table, count = (c_float * len(levels))(*levels), len(levels)
        self._call("linear_encode", **bucket, index=index_d, levels=table, offset=min(levels), count=count)
        return codes

    def linear_reduce(self, parts: list[Tensor], d: int, bits: int, sum_bits: int) -> Tensor:
        parts = [part.contiguous() for part in parts]
        pointers = (c_void_p * len(parts))(*(part.data_ptr() for part in parts))
        out = torch.empty((d * sum_bits + 7) // 8, dtype=torch.uint8)
        self._call("linear_reduce", codes=pointers, out=out, d=d, parts=len(parts), bits=bits, sum_bits=sum_bits)
        return out

    def linear_decode(
        self, codes: Tensor, norm: float, form: LinearCodes, workers: int, out_d: Tensor, add: bool
    ) -> Tensor:
        levels, index_d, bits = form
        table, count = (c_float * len(levels))(*gradients.linear_factors(norm, levels, workers)), len(levels)
        more = {"index": index_d, "factors": table, "offset": workers * min(levels), "count": count}
        self._call("linear_decode", codes=codes.contiguous(), **more, bits=bits, out=out_d, d=out_d.numel(), add=add)
        return out_d

    def scale_index(self, g_d: Tensor, norm: float, levels: tuple[int, ...]) -> Tensor:
        d, count = g_d.numel(), len(levels)
        table = (c_float * count)(*levels)
        out = torch.empty(d, dtype=torch.uint8)
        call, values = self.library.pipecomp_scale_index, (g_d.data_ptr(), DTYPES[g_d.dtype], d)
        call(out.data_ptr(), *values, norm, table, count, self.isa_index, self.threads)
        return out

    def exponential_encode(self, g_d: Tensor, norm: float, bits: int, depth: int, seed: int, start: int) -> Tensor:
        codes, bucket = _flat_args(g_d, norm, bits, seed, start)
        self._call("exponential_encode", **bucket, depth=depth)
        return codes

    def exponential_decode(
        self, codes: Tensor, norm: float, bits: int, depth: int, divisor: int, out_d: Tensor, add: bool
    ) -> Tensor:
        how = {"norm": gradients.exponential_factor(norm, divisor), "bits": bits, "depth": depth}
        self._call("exponential_decode", codes=codes.contiguous(), **how, out=out_d, d=out_d.numel(), add=add)
        return out_d

    def exponential_reduce_(self, a: Tensor, b: Tensor, d: int, bits: int, seed: int) -> Tensor:
        target, b = a.contiguous(), b.contiguous()
        more = gradients.extension(seed)
        self._call("exponential_reduce", a=target, b=b, d=d, seed=seed & MASK64, extension_seed=more, bits=bits)
        return a if target is a else a.copy_(target)

    def kmeans_assign(self, x_d: Tensor, bounds: Tensor) -> Tensor:
        out = torch.empty(x_d.numel(), dtype=torch.uint8)
        call, values = self.library.pipecomp_kmeans_assign, (x_d.data_ptr(), DTYPES[x_d.dtype], x_d.numel())
        call(out.data_ptr(), *values, bounds.data_ptr(), bounds.numel(), self.isa_index, self.threads)
        return out

    def sketch_encode(
        self, x_d: Tensor, e_d: Tensor, centers: Tensor, bounds: Tensor, sketch: Sketch
    ) -> tuple[Tensor, Tensor]:
        codes = torch.empty((x_d.numel() * sketch.bits + 7) // 8, dtype=torch.uint8)
        means = torch.zeros(sketch.counts.numel() + int(sketch.counts.sum()), dtype=torch.float32)
        means[: centers.numel()] = centers
        sums, numbers = torch.zeros_like(means, dtype=torch.float64), torch.zeros_like(means, dtype=torch.int64)
        more = {"x": x_d, "bounds": bounds.contiguous(), "sums": sums, "numbers": numbers}
        self._sketch("encode", sketch, {"codes": codes, "means": means, "out": e_d, **more})
        return codes, means

    def sketch_decode(
        self, codes: Tensor, means: Tensor, sketch: Sketch, out_d: Tensor, add: bool, divisor: int
    ) -> Tensor:
        tensors = {"codes": codes.contiguous(), "means": means.contiguous(), "out": out_d}
        self._sketch("decode", sketch, tensors, add=add, divisor=divisor)
        return out_d

    def _sketch(
        self, call: str, sketch: Sketch, tensors: dict[str, Tensor], *, add: bool = False, divisor: int = 1
    ) -> None:
        counts = sketch.counts
        tables = {
            "size": counts.to(torch.float32),
            "first": gradients.first_slots(counts).int(),
            "last": (counts - 1).clamp(min=0).int(),
        }
        sizes = {"d": tensors["out"].numel(), "slots": tensors["means"].numel(), "clusters": counts.numel()}
        how = {"seed": sketch.seed & MASK64, "bits": sketch.bits, "rounds": int(counts.max()) >= 1 << 24}
        self._call(f"sketch_{call}", **tensors, **tables, **sizes, **how, divisor=divisor, add=add)

    def crc32(self, data: memoryview, value: int) -> int:
        """Compute zlib's CRC-32 of contiguous bytes, continuing from `value`."""
        if data.readonly or not data.nbytes:  # ctypes' from_buffer accepts neither
            address: object = np.frombuffer(data, dtype=np.uint8).ctypes.data if data.nbytes else None
        else:
            address = ctypes.byref(ctypes.c_char.from_buffer(data))
        return self.library.pipecomp_crc32(value & 0xFFFFFFFF, address, data.nbytes)


def _value(field: object) -> object:
    if isinstance(field, Tensor):
        return field.data_ptr()
    return ctypes.addressof(field) if isinstance(field, Array) else field


class _ChannelTable:
    """The argument blocks of scales of channels that samples share, and the memory of these scales.

    at: address of the payload, whose beginning takes or holds their codes; 0 for none.
    of: addresses of the scales by sample. end: address of the first byte after the codes.
    """

    def __init__(self, items: Sequence[EncodeItem | DecodeItem], at: int = 0) -> None:
        groups = channel_groups(items)
        self.of: dict[int, int] = {}
        self.arguments: tuple[object, int] = (None, 0)
        if groups:
            table, self._memory = (ChannelsArgs * len(groups))(), list[Tensor]()
            for i, (delta, members) in enumerate(groups.items()):
                kind, H = batches.scale_kind(items, members), items[members[0]][0].shape[1]
                c_2H = torch.empty(2 * H)
                self._memory.append(c_2H)
                sent, address = is_sent(kind, delta), c_2H.data_ptr()
                floor = FLOORS[SENT if sent else kind]
                _CHANNELS.pack_into(table, i * _CHANNELS.size, at if sent else 0, address, H, floor, not sent)
                at += H if sent and at else 0
                self.of |= dict.fromkeys(members, address)
            self.arguments = (table, len(groups))
        self.end = at


def _quantize_table(
    items: Sequence[EncodeItem], scales: _ChannelTable | None = None
) -> tuple[Array[QuantizeArgs], int]:
    """Fill the argument blocks of a batch, and count its values. Without scales no codes are written."""
    table, values = (QuantizeArgs * len(items))(), 0
    at = scales.end if scales else 0
    for i, (x, m, o, delta) in enumerate(items):
        n, H = x.shape
        codes, row_scales, group = _addresses(at, n, H, o)
        moved, fresh = 0, 0 if m is None else m.data_ptr()
        if delta:
            moved, fresh = fresh, moved
        how = (0, DTYPES[x.dtype], 0, 0, 0, 0)
        if o is not None:
            kind = (o.scale != "max", o.rounding == "stochastic", o.gain == "unbiased")
            how = (o.seed & MASK64, how[1], o.bits, *kind)
        c = scales.of.get(i, 0) if scales else 0
        pointers = (x.data_ptr(), moved, fresh, codes, row_scales, c, c + 4 * H if c else 0)
        _QUANTIZE.pack_into(table, i * _QUANTIZE.size, *pointers, H, H, n, H, group, *how)
        values += n * H
        at += payload_bytes(n, H, o, x.dtype) if at else 0
    return table, values


def _addresses(at: int, n: int, H: int, o: QuantizerOptions | None) -> tuple[int, int, int]:
    """Addresses of the codes and the scales of a part that begins at `at`, and the length of its groups."""
    if o is None:
        return at, 0, 0
    group = layout.group_length(H, o.group_size)
    return at + 4 * n * -(-H // group), at, group


def _row_args(shape: tuple[int, ...], options: QuantizerOptions) -> dict[str, object]:
    """Make the arguments that quantizing and dequantizing rows of this shape share."""
    sizes = {"rows": math.prod(shape[:-1]), "H": shape[-1], "group": layout.group_length(shape[-1], options.group_size)}
    return {**sizes, "bits": options.bits, "stochastic": options.rounding == "stochastic"}


def _flat_args(g_d: Tensor, norm: float, bits: int, seed: int, start: int) -> tuple[Tensor, dict[str, object]]:
    """Make the codes of a flat bucket, and the arguments that its encoders share."""
    d = g_d.numel()
    codes = torch.empty((d * bits + 7) // 8, dtype=torch.uint8)
    values = {"g": g_d, "d": d, "norm": norm, "dtype": DTYPES[g_d.dtype]}
    return codes, {**values, "codes": codes, "bits": bits, "seed": seed & MASK64, "start": start}


def _feedback_args(
    x_d: Tensor, e_d: Tensor, bits: int, group_size: int, mean: bool
) -> tuple[FeedbackArgs, Tensor, Tensor]:
    """Make the arguments of both feedback calls, and the codes and scales that they write."""
    d = e_d.numel()
    codes = torch.empty(layout.row_bytes(d, bits, group_size), dtype=torch.uint8)
    scales = torch.empty(layout.groups(d, group_size), dtype=torch.float32)
    pointers = (tensor.data_ptr() for tensor in (x_d, e_d, codes, scales))
    args = FeedbackArgs(*pointers, d, min(group_size, d), DTYPES[x_d.dtype], bits, mean)
    return args, codes, scales
