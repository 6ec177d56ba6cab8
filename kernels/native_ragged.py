"""The native kernels of ragged batches, as `ragged` defines them: one call for all samples of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, c_int32

import torch
from torch import Tensor

from pipecomp.kernels.layout import Options
from pipecomp.kernels.native_library import DTYPES, DequantizeArgs, Library, QuantizeArgs, layout_of
from pipecomp.kernels.ragged import FINE, FINE_FLAG, Arriving, Visit, payload_bytes
from pipecomp.kernels.rng import MASK64

_QUANTIZE, _DEQUANTIZE = layout_of(QuantizeArgs), layout_of(DequantizeArgs)


class RaggedKernels(Library):
    """What `ragged_ops` calls."""

    def encode_batch(self, visits: Sequence[Visit], payload: Tensor, packet: Tensor | None) -> Tensor:
        """As `ragged.encode_batch`."""
        table = (QuantizeArgs * len(visits))()
        at, values = payload.data_ptr(), 0
        for i, (x, m, o, delta) in enumerate(visits):
            n, H = x.shape
            if not n:
                continue
            codes, scales, group = _places(at, n, H, o)
            moved, fresh = 0, 0 if m is None else m.data_ptr()
            if delta:
                moved, fresh = fresh, moved
            how = (0, DTYPES[x.dtype], 0, 0, 0, 0)
            if o is not None:
                stochastic, bf16_scale = o.rounding == "stochastic", o.scale_dtype == torch.bfloat16
                how = (o.seed & MASK64, how[1], o.bits, o.scale == "rms", stochastic, bf16_scale)
            pointers = (x.data_ptr(), moved, fresh, codes, scales)
            _QUANTIZE.pack_into(table, i * _QUANTIZE.size, *pointers, H, H, n, H, group, *how)
            at += payload_bytes(n, H, o, x.dtype)
            values += n * H
        where = (None, 0) if packet is None else (packet.data_ptr(), packet.numel())
        call = self.library.pipecomp_encode_batch
        flag = call(table, len(visits), values, *where, self.isa_index, self.threads)
        return FINE_FLAG if flag == FINE else torch.tensor([flag])

    def decode_batch(self, payload: Tensor, samples: Sequence[Arriving]) -> None:
        """As `ragged.decode_batch`."""
        table = (DequantizeArgs * len(samples))()
        at, values = payload.data_ptr(), 0
        for i, (m, o, delta, dtype) in enumerate(samples):
            n, H = m.shape
            if not n * H:
                continue
            codes, scales, group = _places(at, n, H, o)
            how = (DTYPES[dtype], 0, 0, 0)
            if o is not None:
                how = (how[0], o.bits, o.rounding == "stochastic", delta)
            _DEQUANTIZE.pack_into(table, i * _DEQUANTIZE.size, codes, scales, m.data_ptr(), H, n, H, group, *how)
            at += payload_bytes(n, H, o, dtype)
            values += n * H
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
        values, room = sum(v.x.numel() for v in visits), None if payload is None else payload.data_ptr()
        call = self.library.pipecomp_fewest_bits
        return call(
            _measured(visits), len(visits), values, error * error, low, high, room, self.isa_index, self.threads
        )


def _measured(visits: Sequence[Visit]) -> Array[QuantizeArgs]:
    table = (QuantizeArgs * len(visits))()
    for args, v in zip(table, visits, strict=True):
        o, (n, H) = v.options, v.x.shape
        assert o is not None
        args.x, args.x_stride, args.m_stride, args.rows, args.H = v.x.data_ptr(), H, H, n, H
        m = None if v.m is None else v.m.data_ptr()
        args.m, args.fresh = (m, None) if v.delta else (None, m)
        args.group, args.dtype, args.rms = _group(o, H), DTYPES[v.x.dtype], o.scale == "rms"
        args.stochastic, args.bf16_scale = o.rounding == "stochastic", o.scale_dtype == torch.bfloat16
    return table


def _group(o: Options, H: int) -> int:
    return H if o.group_size is None else min(o.group_size, H)


def _places(at: int, n: int, H: int, o: Options | None) -> tuple[int, int, int]:
    """Where a part that begins at `at` has its codes and its scales, and the length of its groups."""
    if o is None:
        return at, 0, 0
    group = _group(o, H)
    return at + 4 * n * -(-H // group), at, group
