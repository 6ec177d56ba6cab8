"""The native kernels of error-feedback methods, as `feedback` defines them."""

from __future__ import annotations

import ctypes
from ctypes import c_void_p

import torch
from torch import Tensor

from pipecomp.kernels import layout
from pipecomp.kernels.native_library import DTYPES, FeedbackArgs, FeedbackReduceArgs, Library


class FeedbackKernels(Library):
    """What `feedback_ops` calls."""

    def feedback_quantize_(
        self, x_d: Tensor, e_d: Tensor, bits: int, group_size: int, mean: bool
    ) -> tuple[Tensor, Tensor]:
        """As `feedback.feedback_quantize_`."""
        x_d = x_d.contiguous()
        args, codes, scales = feedback_args(x_d, e_d, bits, group_size, mean)
        self.library.pipecomp_feedback_quantize(ctypes.byref(args), self.isa_index, self.threads)
        return codes, scales

    def feedback_reduce_(
        self, codes: list[Tensor], scales: list[Tensor], bits: int, e_d: Tensor, group_size: int, mean: bool
    ) -> tuple[Tensor, Tensor]:
        """As `feedback.feedback_reduce_`."""
        codes, scales = [c.contiguous() for c in codes], [s.contiguous() for s in scales]
        pointers = [(c_void_p * len(codes))(*(t.data_ptr() for t in row)) for row in (codes, scales)]
        to, out_codes, out_scales = feedback_args(e_d, e_d, bits, group_size, mean)
        scratch = torch.empty(self.threads, to.group, dtype=torch.float32)
        args = FeedbackReduceArgs(
            to=to,
            scratch=scratch.data_ptr(),
            in_codes=ctypes.addressof(pointers[0]),
            in_scales=ctypes.addressof(pointers[1]),
            parts=len(codes),
        )
        self.library.pipecomp_feedback_reduce(ctypes.byref(args), self.isa_index, self.threads)
        return out_codes, out_scales


def feedback_args(
    x_d: Tensor, e_d: Tensor, bits: int, group_size: int, mean: bool
) -> tuple[FeedbackArgs, Tensor, Tensor]:
    """Make what both calls take, with the codes and scales that they write."""
    d = e_d.numel()
    codes = torch.empty(layout.row_bytes(d, bits, group_size), dtype=torch.uint8)
    scales = torch.empty(layout.groups(d, group_size), dtype=torch.float32)
    args = FeedbackArgs(
        x=x_d.data_ptr(),
        e=e_d.data_ptr(),
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
        d=d,
        group=min(group_size, d),
        dtype=DTYPES[x_d.dtype],
        bits=bits,
        mean=mean,
    )
    return args, codes, scales
