"""The native kernels of ragged batches, as `ragged` defines them: one call for all samples of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, c_int32

import torch
from torch import Tensor

from pipecomp.kernels.layout import Options
from pipecomp.kernels.native_library import DTYPES, DequantizeArgs, Library, QuantizeArgs
from pipecomp.kernels.ragged import Arriving, Visit, parts
from pipecomp.kernels.rng import MASK64


class RaggedKernels(Library):
    """What `ragged_ops` calls."""

    def encode_batch(self, visits: Sequence[Visit], payload: Tensor, packet: Tensor | None) -> Tensor:
        """As `ragged.encode_batch`."""
        table = (QuantizeArgs * len(visits))()
        for args, v, part in zip(table, visits, parts(payload, visits), strict=True):
            if not v.x.numel():
                continue
            o, (n, H), at = v.options, v.x.shape, part.data_ptr()
            args.x, args.x_stride, args.m_stride, args.rows, args.H = v.x.data_ptr(), H, H, n, H
            args.codes, args.dtype = at, DTYPES[v.x.dtype]
            if v.m is not None:
                setattr(args, "m" if v.delta else "fresh", v.m.data_ptr())
            if o is None:
                continue
            args.group = _group(o, H)
            args.scales, args.codes = at, at + 4 * n * -(-H // args.group)
            args.seed, args.bits, args.rms = o.seed & MASK64, o.bits, o.scale == "rms"
            args.stochastic, args.bf16_scale = o.rounding == "stochastic", o.scale_dtype == torch.bfloat16
        values = sum(v.x.numel() for v in visits)
        where = (None, 0) if packet is None else (packet.data_ptr(), packet.numel())
        call = self.library.pipecomp_encode_batch
        return torch.tensor([call(table, len(visits), values, *where, self.isa_index, self.threads)])

    def decode_batch(self, payload: Tensor, samples: Sequence[Arriving]) -> None:
        """As `ragged.decode_batch`."""
        table = (DequantizeArgs * len(samples))()
        for args, s, part in zip(table, samples, parts(payload, samples), strict=True):
            if not s.m.numel():
                continue
            o, (n, H), at = s.options, s.m.shape, part.data_ptr()
            args.out, args.out_stride, args.rows, args.H = s.m.data_ptr(), H, n, H
            args.codes, args.dtype = at, DTYPES[s.dtype]
            if o is None:
                continue
            args.group = _group(o, H)
            args.scales, args.codes = at, at + 4 * n * -(-H // args.group)
            args.bits, args.stochastic, args.add = o.bits, o.rounding == "stochastic", s.delta
        values = sum(s.m.numel() for s in samples)
        self.library.pipecomp_decode_batch(table, len(samples), values, self.isa_index, self.threads)

    def distortion(self, visits: Sequence[Visit], bits: Sequence[int]) -> Tensor:
        """As `distortion.distortion`."""
        rows, values = sum(v.x.shape[0] for v in visits), sum(v.x.numel() for v in visits)
        out = torch.empty(1 + len(bits), rows, dtype=torch.float64)
        numbers = (c_int32 * len(bits))(*bits)
        call = self.library.pipecomp_distortion
        call(_measured(visits), len(visits), values, numbers, len(bits), out.data_ptr(), self.isa_index, self.threads)
        return out

    def fit(self, visits: Sequence[Visit], error: float, low: int, high: int, payload: Tensor | None) -> int:
        """As `distortion.fit`: for max scales and nearest rounding."""
        table, values = _measured(visits), sum(v.x.numel() for v in visits)
        if payload is not None:
            (args,), at = table, payload.data_ptr()
            args.scales, args.codes = at, at + 4 * args.rows * -(-args.H // args.group)
        call = self.library.pipecomp_fewest_bits
        return call(table, len(visits), values, error * error, low, high, self.isa_index, self.threads)


def _measured(visits: Sequence[Visit]) -> Array[QuantizeArgs]:
    table = (QuantizeArgs * len(visits))()
    for args, v in zip(table, visits, strict=True):
        o, (n, H) = v.options, v.x.shape
        assert o is not None
        args.x, args.x_stride, args.m_stride, args.rows, args.H = v.x.data_ptr(), H, H, n, H
        args.m = v.m.data_ptr() if v.delta and v.m is not None else None
        args.group, args.dtype, args.rms = _group(o, H), DTYPES[v.x.dtype], o.scale == "rms"
        args.stochastic, args.bf16_scale = o.rounding == "stochastic", o.scale_dtype == torch.bfloat16
    return table


def _group(o: Options, H: int) -> int:
    return H if o.group_size is None else min(o.group_size, H)
