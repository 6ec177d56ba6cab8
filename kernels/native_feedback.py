"""The native kernels of error-feedback methods, as `feedback` defines them."""

from __future__ import annotations

import ctypes
from ctypes import c_void_p

import torch
from torch import Tensor

from pipecomp.kernels import layout
from pipecomp.kernels.native_library import DTYPES, FeedbackArgs, Library, MeanArgs


class FeedbackKernels(Library):
    """What `feedback_ops` calls."""

    def feedback_scales(self, x_d: Tensor, e_d: Tensor, group_size: int, mean: bool) -> Tensor:
        """As `feedback.feedback_scales`."""
        x_d = x_d.contiguous()
        scales = torch.empty(layout.groups(x_d.numel(), group_size), dtype=torch.float32)
        args = feedback_args(x_d, e_d, scales, group_size)
        args.mean = mean
        self.library.pipecomp_feedback_scales(ctypes.byref(args), self.isa_index, self.threads)
        return scales

    def feedback_quantize_(self, x_d: Tensor, e_d: Tensor, scale_G: Tensor, bits: int, group_size: int) -> Tensor:
        """As `feedback.feedback_quantize_`."""
        x_d, scale_G = x_d.contiguous(), scale_G.contiguous()
        codes = torch.empty(layout.row_bytes(x_d.numel(), bits, group_size), dtype=torch.uint8)
        args = feedback_args(x_d, e_d, scale_G, group_size)
        args.codes, args.bits = codes.data_ptr(), bits
        self.library.pipecomp_feedback_quantize(ctypes.byref(args), self.isa_index, self.threads)
        return codes

    def dequantize_mean(
        self, codes: list[Tensor], scales: list[Tensor], bits: int, group_size: int, out_d: Tensor
    ) -> Tensor:
        """As `feedback.dequantize_mean`."""
        codes, scales = [c.contiguous() for c in codes], [s.contiguous() for s in scales]
        pointers = [(c_void_p * len(codes))(*(t.data_ptr() for t in row)) for row in (codes, scales)]
        d = out_d.numel()
        args = MeanArgs(
            codes=ctypes.addressof(pointers[0]),
            scales=ctypes.addressof(pointers[1]),
            out=out_d.data_ptr(),
            d=d,
            group=min(group_size, d),
            parts=len(codes),
            bits=bits,
        )
        self.library.pipecomp_dequantize_mean(ctypes.byref(args), self.isa_index, self.threads)
        return out_d


def feedback_args(x_d: Tensor, e_d: Tensor, scales: Tensor, group_size: int) -> FeedbackArgs:
    """What both calls take."""
    return FeedbackArgs(
        x=x_d.data_ptr(),
        e=e_d.data_ptr(),
        scales=scales.data_ptr(),
        d=x_d.numel(),
        group=min(group_size, x_d.numel()),
        dtype=DTYPES[x_d.dtype],
    )
