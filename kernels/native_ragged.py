"""The native kernels of ragged batches, as `ragged` defines them: one call for all samples of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, c_int32

import torch
from torch import Tensor

from pipecomp.kernels.distortion import encode_fewest
from pipecomp.kernels.layout import Options, group_length
from pipecomp.kernels.native_library import DTYPES, DequantizeArgs, Library, QuantizeArgs, layout_of
from pipecomp.kernels.ragged import FINE, FINE_FLAG, Arriving, Visit, payload_bytes
from pipecomp.kernels.rng import MASK64

_QUANTIZE, _DEQUANTIZE = layout_of(QuantizeArgs), layout_of(DequantizeArgs)


class RaggedKernels(Library):
    """What `ragged_ops` calls."""

    def encode_batch(self, visits: Sequence[Visit], payload: Tensor, packet: Tensor | None) -> Tensor:
        """As `ragged.encode_batch`."""
        table, values = _table(visits, payload.data_ptr())
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
        table, values = _table(visits)
        out = torch.empty(1 + len(bits), sum(v.x.shape[0] for v in visits), dtype=torch.float64)
        numbers = (c_int32 * len(bits))(*bits)
        call = self.library.pipecomp_distortion
        call(table, len(visits), values, numbers, len(bits), out.data_ptr(), self.isa_index, self.threads)
        return out

    encode_fewest = staticmethod(encode_fewest)

    def fit(self, visits: Sequence[Visit], error: float, low: int, high: int, payload: Tensor | None) -> int:
        """As `distortion.fit`: for max scales and nearest rounding."""
        table, values = _table(visits)
        call, room = self.library.pipecomp_fewest_bits, None if payload is None else payload.data_ptr()
        return call(table, len(visits), values, error * error, low, high, room, self.isa_index, self.threads)


def _table(visits: Sequence[Visit], at: int = 0) -> tuple[Array[QuantizeArgs], int]:
    """A call's argument, and how many values it has. at: where the samples' parts begin, if they have places."""
    table, values = (QuantizeArgs * len(visits))(), 0
    for i, (x, m, o, delta) in enumerate(visits):
        n, H = x.shape
        codes, scales, group = _places(at, n, H, o)
        moved, fresh = 0, 0 if m is None else m.data_ptr()
        if delta:
            moved, fresh = fresh, moved
        how = (0, DTYPES[x.dtype], 0, 0, 0)
        if o is not None:
            how = (o.seed & MASK64, how[1], o.bits, o.scale == "rms", o.rounding == "stochastic")
        pointers = (x.data_ptr(), moved, fresh, codes, scales)
        _QUANTIZE.pack_into(table, i * _QUANTIZE.size, *pointers, H, H, n, H, group, *how)
        values += n * H
        at += payload_bytes(n, H, o, x.dtype) if at else 0
    return table, values


def _places(at: int, n: int, H: int, o: Options | None) -> tuple[int, int, int]:
    """Where a part that begins at `at` has its codes and its scales, and the length of its groups."""
    if o is None:
        return at, 0, 0
    group = group_length(H, o.group_size)
    return at + 4 * n * -(-H // group), at, group
