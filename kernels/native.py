"""The native backend: C++ kernels for CPU tensors, called through ctypes, which releases the GIL for the call.

Threads: as many as torch uses, where there is enough to do; results do not depend on them.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from pipecomp.errors import KernelError
from pipecomp.kernels import layout, native_library, reference, topk
from pipecomp.kernels.layout import Options
from pipecomp.kernels.native_feedback import FeedbackKernels
from pipecomp.kernels.native_gradient import GradientKernels
from pipecomp.kernels.native_library import DTYPES, DequantizeArgs, QuantizeArgs
from pipecomp.kernels.native_ragged import RaggedKernels
from pipecomp.kernels.native_sketch import SketchKernels
from pipecomp.kernels.rng import MASK64
from pipecomp.kernels.self_check import self_check


class NativeBackend(GradientKernels, FeedbackKernels, SketchKernels, RaggedKernels):
    """The native kernels under the names that `dispatch` looks for, on one instruction set; see Library."""

    def quantize(self, x: Tensor, options: Options, name: str = "x") -> tuple[Tensor, Tensor]:
        """As `reference.quantize`."""
        return self._quantize(x, None, options, name)

    def delta_quantize_(self, a: Tensor, m: Tensor, options: Options, name: str = "a - m") -> tuple[Tensor, Tensor]:
        """As `reference.delta_quantize_`."""
        walkable, _ = layout.with_stride(m)
        pair = self._quantize(a, walkable, options, name)
        if walkable is not m:
            m.copy_(walkable)
        return pair

    def _quantize(self, x: Tensor, m: Tensor | None, options: Options, name: str) -> tuple[Tensor, Tensor]:
        shape, H = tuple(x.shape), x.shape[-1]
        x, x_stride = layout.with_stride(x)
        codes = torch.empty((*shape[:-1], layout.row_bytes(H, options.bits, options.group_size)), dtype=torch.uint8)
        scales = torch.empty(layout.scale_shape(shape, options.group_size), dtype=torch.float32)
        args = QuantizeArgs(
            x=x.data_ptr(),
            m=None if m is None else m.data_ptr(),
            codes=codes.data_ptr(),
            scales=scales.data_ptr(),
            x_stride=x_stride,
            m_stride=H if m is None else layout.row_stride(m) or H,
            rows=math.prod(shape[:-1]),
            H=H,
            group=layout.group_length(H, options.group_size),
            seed=options.seed & MASK64,
            dtype=DTYPES[x.dtype],
            bits=options.bits,
            rms=options.scale == "rms",
            stochastic=options.rounding == "stochastic",
        )
        if x.numel():
            bad = self.library.pipecomp_quantize(ctypes.byref(args), self.isa_index, self.threads)
            if bad >= 0:
                raise reference.non_finite(name, bad)
        return codes, scales

    def dequantize(
        self,
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
        codes, scale = codes.contiguous(), scale.contiguous()
        target = torch.empty(shape, dtype=torch.float32) if out is None else out
        out, stride = layout.with_stride(target)
        args = DequantizeArgs(
            codes=codes.data_ptr(),
            scales=scale.data_ptr(),
            out=out.data_ptr(),
            out_stride=stride,
            rows=math.prod(shape[:-1]),
            H=shape[-1],
            group=layout.group_length(shape[-1], group_size),
            bits=bits,
            stochastic=rounding == "stochastic",
            add=add,
        )
        if out.numel():
            self.library.pipecomp_dequantize(ctypes.byref(args), self.isa_index, self.threads)
        return target if out is target else target.copy_(out)

    def pack_bits(self, values: Tensor, bits: int) -> Tensor:
        """As `bitpack.pack_bits`."""
        values = values.contiguous()
        n = values.shape[-1]
        codes = torch.empty((*values.shape[:-1], (n * bits + 7) // 8), dtype=torch.uint8)
        size, rows = values.element_size(), math.prod(values.shape[:-1])
        if codes.numel():
            self.library.pipecomp_pack(codes.data_ptr(), values.data_ptr(), size, rows, n, bits, self.isa_index)
        return codes

    def unpack_bits(self, codes: Tensor, bits: int, count: int) -> Tensor:
        """As `bitpack.unpack_bits`."""
        codes = codes.contiguous()
        values = torch.empty((*codes.shape[:-1], count), dtype=torch.int32)
        rows = math.prod(codes.shape[:-1])
        if values.numel():
            self.library.pipecomp_unpack(values.data_ptr(), codes.data_ptr(), rows, count, bits, self.isa_index)
        return values

    def select(self, x: Tensor, fraction: float, group_size: int | None) -> tuple[Tensor, Tensor]:
        """As `topk.select`."""
        H = x.shape[-1]
        x, stride = layout.with_stride(x)
        group = layout.group_length(H, group_size)
        K = topk.top_k_kept(H, fraction, group_size)
        values = torch.empty((*x.shape[:-1], K), dtype=torch.float32)
        index = torch.empty((*x.shape[:-1], K), dtype=torch.int32)
        kept, kept_last = topk.kept(group, fraction), topk.kept(H % group or group, fraction)
        if values.numel() and self.library.pipecomp_select(
            values.data_ptr(),
            index.data_ptr(),
            x.data_ptr(),
            DTYPES[x.dtype],
            stride,
            math.prod(x.shape[:-1]),
            H,
            group,
            kept,
            kept_last,
            self.isa_index,
            self.threads,
        ):
            raise KernelError(f"native kernels: no memory to order {group} values")
        return values, index

    def crc32(self, data: memoryview, value: int) -> int:
        """As `zlib.crc32`, of contiguous bytes."""
        if data.readonly or not data.nbytes:  # what gives an address at once takes neither
            where: object = np.frombuffer(data, dtype=np.uint8).ctypes.data if data.nbytes else None
        else:
            where = ctypes.byref(ctypes.c_char.from_buffer(data))
        return self.library.pipecomp_crc32(value & 0xFFFFFFFF, where, data.nbytes)


@cache
def load() -> NativeBackend | str:
    """Load the backend on this CPU's best instruction set; a sentence saying why where there is none."""
    path = native_library.library_path()
    if path is None:
        return "native kernels are not built (no C++ compiler at install time, or one that is too old?)"
    try:
        backend = NativeBackend(path)
        self_check(backend, f"native kernels ({backend.isa} code)")
    except KernelError as error:
        return str(error)
    return backend
