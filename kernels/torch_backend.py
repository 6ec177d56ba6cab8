"""The torch backend: the reference functions under the names that `dispatch` looks for."""

from __future__ import annotations

from pipecomp.kernels.bitpack import pack_bits, unpack_bits
from pipecomp.kernels.distortion import distortion, encode_fewest, fit
from pipecomp.kernels.dithering import (
    exponential_decode,
    exponential_encode,
    exponential_reduce_,
    kmeans_assign,
    linear_decode,
    linear_encode,
    linear_reduce,
    scale_index,
)
from pipecomp.kernels.feedback import feedback_quantize_, feedback_reduce_
from pipecomp.kernels.ragged import decode_batch, encode_batch
from pipecomp.kernels.reference import delta_quantize_, dequantize, quantize
from pipecomp.kernels.sketch import sketch_decode, sketch_encode
from pipecomp.kernels.topk import select

__all__ = [
    "decode_batch",
    "delta_quantize_",
    "dequantize",
    "distortion",
    "encode_batch",
    "encode_fewest",
    "exponential_decode",
    "exponential_encode",
    "exponential_reduce_",
    "feedback_quantize_",
    "feedback_reduce_",
    "fit",
    "kmeans_assign",
    "linear_decode",
    "linear_encode",
    "linear_reduce",
    "pack_bits",
    "quantize",
    "scale_index",
    "select",
    "sketch_decode",
    "sketch_encode",
    "unpack_bits",
]
