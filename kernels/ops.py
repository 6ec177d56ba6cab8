"""The operations that codecs, stores and links call: arguments are checked here, then a backend runs them.

`backend`: "torch" runs everywhere, "native" (C++) takes CPU tensors, "triton" takes GPU tensors; "auto" picks. All
give the same bytes. Codes are uint8, scales float32. H: values in a row (the last dimension); a row is cut into groups
of `group_size` values, the last may be short; None means one group a row. K: values that top-k keeps in a row.
Errors of every function: ConfigError for an option, ShapeError for a shape, dtype or device, KernelError for a backend
that cannot run here, NonFiniteError (with `name`) for NaN, Inf or a value above 2**100.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipecomp.errors import ShapeError
from pipecomp.kernels import dispatch, layout, native, topk
from pipecomp.kernels.distortion_ops import distortion, encode_fewest, fewest_bits
from pipecomp.kernels.feedback_ops import feedback_quantize_, feedback_reduce_
from pipecomp.kernels.gradient_ops import (
    exponential_decode,
    exponential_encode,
    exponential_levels,
    exponential_reduce_,
    kmeans_assign,
    linear_bits,
    linear_decode,
    linear_encode,
    linear_reduce,
    multiscale_index,
    tree_depth,
)
from pipecomp.kernels.layout import Options, groups, quantized_row_bytes, row_bytes
from pipecomp.kernels.ragged import FINE, Arriving, Verdict, Visit, payload_bytes
from pipecomp.kernels.ragged_ops import decode_batch, encode_batch
from pipecomp.kernels.rng import mix_seed
from pipecomp.kernels.sketch import Sketch
from pipecomp.kernels.sketch_ops import sketch_decode, sketch_encode_
from pipecomp.kernels.topk import position_bytes, top_k_group_size, top_k_kept, top_k_scatter

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
NATIVE_CRC_BYTES = 4096  # below, zlib's own call is quicker

__all__ = [
    "FINE",
    "Arriving",
    "Options",
    "Sketch",
    "Verdict",
    "Visit",
    "crc32",
    "decode_batch",
    "delta_quantize_",
    "dequantize",
    "distortion",
    "encode_batch",
    "encode_fewest",
    "exponential_decode",
    "exponential_encode",
    "exponential_levels",
    "exponential_reduce_",
    "feedback_quantize_",
    "feedback_reduce_",
    "fewest_bits",
    "groups",
    "kmeans_assign",
    "linear_bits",
    "linear_decode",
    "linear_encode",
    "linear_reduce",
    "mix_seed",
    "multiscale_index",
    "pack_bits",
    "pack_positions",
    "payload_bytes",
    "position_bytes",
    "quantize",
    "quantized_row_bytes",
    "row_bytes",
    "sketch_decode",
    "sketch_encode_",
    "top_k_group_size",
    "top_k_kept",
    "top_k_scatter",
    "top_k_select",
    "tree_depth",
    "unpack_bits",
    "unpack_positions",
]


@torch.no_grad()
def quantize(
    x: Tensor,
    bits: int,
    *,
    group_size: int | None = None,
    scale: str = "max",
    rounding: str = "nearest",
    seed: int = 0,
    backend: str = "auto",
    name: str = "x",
) -> tuple[Tensor, Tensor]:
    """Quantize rows of values, Q_b(x) (arXiv:2206.01299, section 4.1).

    Args:
        x: float32, float16 or bfloat16 [..., H]; not modified.
        bits: b, 1 to 8.
        group_size: Values that share a scale; None for a whole row.
        scale: "max", or "rms", which clips (nearest rounding only).
        rounding: "nearest", or "stochastic", which is unbiased.
        seed: Of the random numbers, which follow from it and the element's index; see `mix_seed`.
        backend: "auto", "torch", "native" or "triton".
        name: What errors call `x`.

    Returns:
        Codes, uint8 [..., row_bytes(H, bits, group_size)], and scales, float32: [...] without groups, else
        [..., groups(H, group_size)].

    Raises:
        NonFiniteError: NaN, Inf or a value above 2**100.

    Example:
        >>> codes, scale = ops.quantize(torch.randn(2, 8), 4)
        >>> ops.dequantize(codes, scale, 4, (2, 8)).shape
        torch.Size([2, 8])
    """
    options = layout.check_options(bits, group_size, scale, rounding, seed)
    layout.check_input(x, name)
    return dispatch.pick(backend, x).quantize(x, options, name)


@torch.no_grad()
def dequantize(
    codes: Tensor,
    scale: Tensor,
    bits: int,
    shape: Sequence[int],
    *,
    group_size: int | None = None,
    rounding: str = "nearest",
    add_to: Tensor | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Decode what `quantize` returned.

    Args:
        codes: uint8, as returned.
        scale: float32, as returned.
        bits: As quantized.
        shape: Of the result, [..., H].
        group_size: As quantized.
        rounding: As quantized.
        add_to: float32 tensor of `shape`, changed in place to add_to + deq (one multiply and one add a value, each
            rounded) and returned.
        out: float32 tensor of `shape` that is overwritten and returned; large results come several times faster than
            in a new tensor, whose pages the system has to provide first.
        backend: As for `quantize`.

    Returns:
        float32 of `shape`.
    """
    size = tuple(int(n) for n in shape)
    options = layout.check_options(bits, group_size, "max", rounding)
    layout.check_codes(codes, scale, bits, size, group_size)
    target, add = layout.check_target(out, add_to, size)
    chosen = dispatch.pick(backend, codes, scale, target)
    return chosen.dequantize(codes, scale, bits, size, options.group_size, options.rounding, target, add)


@torch.no_grad()
def delta_quantize_(
    a: Tensor,
    m: Tensor,
    bits: int,
    *,
    group_size: int | None = None,
    scale: str = "max",
    rounding: str = "nearest",
    seed: int = 0,
    backend: str = "auto",
    name: str = "a - m",
) -> tuple[Tensor, Tensor]:
    """Quantize the change since the last visit, Q_b(a - m), and move m to m + deq (arXiv:2206.01299, Algorithm 1).

    Args:
        a: Activations, float32, float16 or bfloat16 [..., H]; not modified.
        m: What is cached of them, float32 of the same shape; changed in place.
        bits: As for `quantize`.
        group_size: As for `quantize`.
        scale: As for `quantize`.
        rounding: As for `quantize`.
        seed: As for `quantize`.
        backend: As for `quantize`.
        name: What errors call the change.

    Returns:
        Codes and scales, as `quantize`.

    Raises:
        NonFiniteError: As `quantize`; m is as it was before the call.
    """
    options = layout.check_options(bits, group_size, scale, rounding, seed)
    layout.check_input(a, name)
    layout.check_float32(m, tuple(a.shape), "m")
    return dispatch.pick(backend, a, m).delta_quantize_(a, m, options, name)


@torch.no_grad()
def top_k_select(
    x: Tensor, fraction: float, *, group_size: int | None = None, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Select the largest magnitudes of each group (arXiv:2206.01299, appendix H.6).

    Args:
        x: float32, float16 or bfloat16 [..., H].
        fraction: Of a group's n values max(1, floor(fraction * n + 1/2)) are kept; of equal magnitudes the lowest
            index, and NaN counts as largest.
        group_size: As for `quantize`.
        backend: As for `quantize`.

    Returns:
        Values, float32 [..., K], and their positions in the row, int32 [..., K], ascending, K = top_k_kept(...).
        Quantize the values with group_size=top_k_group_size(...), so that each group keeps its own scale.
    """
    layout.check_input(x, "x")
    layout.check_group_size(group_size)
    return dispatch.pick(backend, x).select(x, fraction, group_size)


def pack_positions(index: Tensor, H: int, *, backend: str = "auto") -> Tensor:
    """Positions of `top_k_select` in their shorter form: uint8 [..., position_bytes(H, K)[1]].

    A bitmap has bit i set for position i; indices take (H - 1).bit_length() bits each. Both little-endian.
    """
    return topk.pack_positions(index, H, dispatch.pick(backend, index).pack_bits)


def unpack_positions(packed: Tensor, H: int, K: int, *, backend: str = "auto") -> Tensor:
    """Undo `pack_positions`: int32 [..., K]. ShapeError if the bytes are not K positions below H a row."""
    return topk.unpack_positions(packed, H, K, dispatch.pick(backend, packed).unpack_bits)


def pack_bits(values: Tensor, bits: int, *, backend: str = "auto") -> Tensor:
    """Pack rows of unsigned integers, 1 to 24 bits each, as dense little-endian bit streams.

    values: any integer dtype [..., n], each in [0, 2**bits); higher bits are cut off.
    Returns uint8 [..., ceil(n * bits / 8)]: bit i * bits of a row is the lowest bit of value i, padding bits are zero.
    """
    layout.check_bits(bits, high=layout.MAX_PACK_BITS)
    if values.dtype not in INTEGER_DTYPES or values.dim() == 0:
        raise ShapeError(f"values: {values.dtype} {tuple(values.shape)}, allowed: integers of at least one dimension")
    return dispatch.pick(backend, values).pack_bits(values, bits)


def unpack_bits(codes: Tensor, bits: int, count: int, *, backend: str = "auto") -> Tensor:
    """Undo `pack_bits`: codes uint8 [..., ceil(count * bits / 8)] to int32 [..., count]."""
    layout.check_bits(bits, high=layout.MAX_PACK_BITS)
    want = (count * bits + 7) // 8
    if codes.dtype != torch.uint8 or codes.dim() == 0 or codes.shape[-1] != want:
        raise ShapeError(f"codes: {codes.dtype} {tuple(codes.shape)}, allowed: torch.uint8 [..., {want}]")
    return dispatch.pick(backend, codes).unpack_bits(codes, bits, count)


def crc32(data: Tensor | ReadableBuffer, value: int = 0) -> int:
    """zlib's CRC-32 of a tensor's bytes in row-major order (any dtype) or of a buffer, continuing from `value`."""
    if isinstance(data, Tensor):
        view = data.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    else:
        view = memoryview(data)
    view = view.cast("B") if view.nbytes else memoryview(b"")
    loaded = native.load() if view.nbytes >= NATIVE_CRC_BYTES else "a call costs more than it saves"
    return zlib.crc32(view, value) if isinstance(loaded, str) else loaded.crc32(view, value)
