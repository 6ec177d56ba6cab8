"""The torch backend: the reference functions under the names that `dispatch` looks for."""

from __future__ import annotations

from pipecomp.kernels.bitpack import pack_bits, unpack_bits
from pipecomp.kernels.reference import delta_quantize_, dequantize, quantize
from pipecomp.kernels.topk import select

__all__ = ["delta_quantize_", "dequantize", "pack_bits", "quantize", "select", "unpack_bits"]
