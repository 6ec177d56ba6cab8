"""The Triton backend: the host side of the GPU kernels under the names that `dispatch` looks for.

With TRITON_INTERPRET=1, set before triton is imported, the kernels also run on CPU tensors, slowly, for tests.
"""

from __future__ import annotations

from pipecomp.kernels.distortion import distortion, fit  # torch's own operations on the GPU: a few passes over a packet
from pipecomp.kernels.triton_buckets import (
    exponential_decode,
    exponential_encode,
    exponential_reduce_,
    kmeans_assign,
    linear_decode,
    linear_encode,
    linear_reduce,
    scale_index,
    sketch_decode,
    sketch_encode,
)
from pipecomp.kernels.triton_ragged import decode_batch, encode_batch
from pipecomp.kernels.triton_rows import (
    delta_quantize_,
    dequantize,
    feedback_quantize_,
    feedback_reduce_,
    pack_bits,
    quantize,
    select,
    unpack_bits,
)

__all__ = [
    "decode_batch",
    "delta_quantize_",
    "dequantize",
    "distortion",
    "encode_batch",
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
