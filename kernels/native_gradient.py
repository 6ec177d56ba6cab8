"""The native kernels of data-parallel codes, as `dithering` defines them."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_void_p

import torch
from torch import Tensor

from pipecomp.kernels import dithering
from pipecomp.kernels.native_library import (
    DTYPES,
    ExponentialArgs,
    Library,
    LinearArgs,
    LinearDecodeArgs,
    LinearReduceArgs,
    ReduceArgs,
)
from pipecomp.kernels.rng import MASK64


class GradientKernels(Library):
    """What `gradient_ops` calls."""

    def linear_encode(
        self,
        g_d: Tensor,
        norm: float,
        levels: tuple[int, ...],
        index_d: Tensor | None,
        bits: int,
        seed: int,
        start: int,
    ) -> Tensor:
        """As `dithering.linear_encode`."""
        table = (c_float * len(levels))(*levels)
        codes = torch.empty((g_d.numel() * bits + 7) // 8, dtype=torch.uint8)
        args = LinearArgs(
            g=g_d.data_ptr(),
            index=None if index_d is None else index_d.data_ptr(),
            levels=ctypes.addressof(table),
            codes=codes.data_ptr(),
            d=g_d.numel(),
            seed=seed & MASK64,
            start=start,
            norm=norm,
            dtype=DTYPES[g_d.dtype],
            offset=min(levels),
            bits=bits,
            count=len(levels),
        )
        self.library.pipecomp_linear_encode(ctypes.byref(args), self.isa_index, self.threads)
        return codes

    def linear_reduce(self, parts: list[Tensor], d: int, bits: int, sum_bits: int) -> Tensor:
        """As `dithering.linear_reduce`."""
        parts = [part.contiguous() for part in parts]
        pointers = (c_void_p * len(parts))(*(part.data_ptr() for part in parts))
        out = torch.empty((d * sum_bits + 7) // 8, dtype=torch.uint8)
        args = LinearReduceArgs(
            codes=ctypes.addressof(pointers), out=out.data_ptr(), d=d, parts=len(parts), bits=bits, sum_bits=sum_bits
        )
        self.library.pipecomp_linear_reduce(ctypes.byref(args), self.isa_index, self.threads)
        return out

    def linear_decode(
        self,
        codes: Tensor,
        norm: float,
        levels: tuple[int, ...],
        index_d: Tensor | None,
        bits: int,
        workers: int,
        out_d: Tensor,
        add: bool,
    ) -> Tensor:
        """As `dithering.linear_decode`."""
        codes = codes.contiguous()
        factors = (c_float * len(levels))(*dithering.linear_factors(norm, levels, workers))
        args = LinearDecodeArgs(
            codes=codes.data_ptr(),
            index=None if index_d is None else index_d.data_ptr(),
            factors=ctypes.addressof(factors),
            out=out_d.data_ptr(),
            d=out_d.numel(),
            bits=bits,
            offset=workers * min(levels),
            add=add,
            count=len(levels),
        )
        self.library.pipecomp_linear_decode(ctypes.byref(args), self.isa_index, self.threads)
        return out_d

    def scale_index(self, g_d: Tensor, norm: float, levels: tuple[int, ...]) -> Tensor:
        """As `dithering.scale_index`."""
        d, count = g_d.numel(), len(levels)
        table = (c_float * count)(*levels)
        out = torch.empty(d, dtype=torch.uint8)
        dtype = DTYPES[g_d.dtype]
        self.library.pipecomp_scale_index(
            out.data_ptr(), g_d.data_ptr(), dtype, d, norm, table, count, self.isa_index, self.threads
        )
        return out

    def exponential_encode(self, g_d: Tensor, norm: float, bits: int, depth: int, seed: int, start: int) -> Tensor:
        """As `dithering.exponential_encode`."""
        codes = torch.empty((g_d.numel() * bits + 7) // 8, dtype=torch.uint8)
        args = ExponentialArgs(
            g=g_d.data_ptr(),
            codes=codes.data_ptr(),
            d=g_d.numel(),
            seed=seed & MASK64,
            start=start,
            norm=norm,
            dtype=DTYPES[g_d.dtype],
            bits=bits,
            depth=depth,
        )
        self.library.pipecomp_exponential_encode(ctypes.byref(args), self.isa_index, self.threads)
        return codes

    def exponential_decode(
        self, codes: Tensor, norm: float, bits: int, depth: int, divisor: int, out_d: Tensor, add: bool
    ) -> Tensor:
        """As `dithering.exponential_decode`."""
        codes = codes.contiguous()
        args = ExponentialArgs(
            codes=codes.data_ptr(),
            out=out_d.data_ptr(),
            d=out_d.numel(),
            norm=dithering.exponential_factor(norm, divisor),
            bits=bits,
            depth=depth,
            add=add,
        )
        self.library.pipecomp_exponential_decode(ctypes.byref(args), self.isa_index, self.threads)
        return out_d

    def exponential_reduce_(self, a: Tensor, b: Tensor, d: int, bits: int, seed: int) -> Tensor:
        """As `dithering.exponential_reduce_`."""
        target, b = a.contiguous(), b.contiguous()
        args = ReduceArgs(
            a=target.data_ptr(),
            b=b.data_ptr(),
            d=d,
            seed=seed & MASK64,
            extension_seed=dithering.extension(seed),
            bits=bits,
        )
        self.library.pipecomp_exponential_reduce(ctypes.byref(args), self.isa_index, self.threads)
        return a if target is a else a.copy_(target)

    def kmeans_assign(self, x_d: Tensor, bounds: Tensor) -> Tensor:
        """As `dithering.kmeans_assign`."""
        d, count, dtype = x_d.numel(), bounds.numel(), DTYPES[x_d.dtype]
        out = torch.empty(d, dtype=torch.uint8)
        self.library.pipecomp_kmeans_assign(
            out.data_ptr(), x_d.data_ptr(), dtype, d, bounds.data_ptr(), count, self.isa_index, self.threads
        )
        return out
