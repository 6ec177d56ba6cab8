"""The Triton backend: the host side of the GPU kernels under the names that `dispatch` looks for.

With TRITON_INTERPRET=1, set before triton is imported, the kernels also run on CPU tensors, slowly, for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from pipecomp.kernels import triton_buckets, triton_distortion, triton_ragged, triton_rows
from pipecomp.kernels.distortion import distortion  # torch's own operations on the GPU: a few passes over a packet

P = ParamSpec("P")
R = TypeVar("R")


def on_their_device(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function run with its first tensor's device as the current one, on which Triton launches kernels."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.device_of(first_tensor(args)):
            return function(*args, **kwargs)

    return run


def first_tensor(values: Any) -> Tensor | None:
    """Find the first tensor in values, or in lists and tuples among them."""
    for value in values:
        found = first_tensor(value) if isinstance(value, (list, tuple)) else value
        if isinstance(found, Tensor):
            return found
    return None


delta_quantize_ = on_their_device(triton_rows.delta_quantize_)
dequantize = on_their_device(triton_rows.dequantize)
feedback_quantize_ = on_their_device(triton_rows.feedback_quantize_)
feedback_reduce_ = on_their_device(triton_rows.feedback_reduce_)
pack_bits = on_their_device(triton_rows.pack_bits)
quantize = on_their_device(triton_rows.quantize)
select = on_their_device(triton_rows.select)
unpack_bits = on_their_device(triton_rows.unpack_bits)
exponential_decode = on_their_device(triton_buckets.exponential_decode)
exponential_encode = on_their_device(triton_buckets.exponential_encode)
exponential_reduce_ = on_their_device(triton_buckets.exponential_reduce_)
kmeans_assign = on_their_device(triton_buckets.kmeans_assign)
linear_decode = on_their_device(triton_buckets.linear_decode)
linear_encode = on_their_device(triton_buckets.linear_encode)
linear_reduce = on_their_device(triton_buckets.linear_reduce)
scale_index = on_their_device(triton_buckets.scale_index)
sketch_decode = on_their_device(triton_buckets.sketch_decode)
sketch_encode = on_their_device(triton_buckets.sketch_encode)
decode_batch = on_their_device(triton_ragged.decode_batch)
encode_batch = on_their_device(triton_ragged.encode_batch)
encode_fewest = on_their_device(triton_distortion.encode_fewest)
fit = on_their_device(triton_distortion.fit)

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
