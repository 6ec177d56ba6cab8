"""The operations that codecs, stores and links call. Each checks its arguments, and a backend runs it.

`backend`: "torch" runs everywhere, "native" (C++) takes CPU tensors, "triton" takes GPU tensors; "auto" chooses. All
produce the same bytes. Codes are uint8, scales float32. H: values in a row (the last dimension); a row is cut into
groups of `group_size` values, the last may be short; None means one group a row. K: values that top-k keeps in a row.
Errors of every function: ConfigError for an option, ShapeError for a shape, dtype or device, KernelError for a backend
that cannot run here, NonFiniteError (with `name`) for NaN, Inf or a value above 2**100.

To add an operation: define it in `reference`, add a function here or in `gradient_ops`, and implement it under the same
name in `native.backend` (with its C++ kernel) and in `triton`. A backend without an implementation runs the reference.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipecomp.errors import ConfigError, ShapeError
from pipecomp.kernels import dispatch
from pipecomp.kernels.gradient_ops import (
    exponential_decode,
    exponential_encode,
    exponential_levels,
    exponential_reduce_,
    feedback_quantize_,
    feedback_reduce_,
    kmeans_assign,
    linear_bits,
    linear_decode,
    linear_encode,
    linear_reduce,
    multiscale_index,
    sketch_decode,
    sketch_encode_,
    tree_depth,
)
from pipecomp.kernels.reference import batches, layout, rows
from pipecomp.kernels.reference.batches import (
    ALL_FINITE,
    DecodeItem,
    EncodeItem,
    FiniteFlag,
    batch_bytes,
    payload_bytes,
)
from pipecomp.kernels.reference.channels import block_bytes
from pipecomp.kernels.reference.gradients import Sketch
from pipecomp.kernels.reference.layout import QuantizerOptions, groups, quantized_row_bytes, row_bytes
from pipecomp.kernels.reference.reproducible import halved_sum, mix_seed
from pipecomp.kernels.reference.rows import position_bytes, top_k_group_size, top_k_kept, top_k_scatter

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
NATIVE_CRC_BYTES = 4096  # smaller buffers are faster with zlib's own call


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
        seed: Seed of the random numbers, which depend on it and the element's index; see `mix_seed`.
        backend: "auto", "torch", "native" or "triton".
        name: Name of `x` in errors.

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
    return dispatch.implementation(rows.quantize, backend, x)(x, options, name)


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
    """Decode the result of `quantize`.

    Args:
        codes: uint8, as returned.
        scale: float32, as returned.
        bits: As quantized.
        shape: Shape of the result, [..., H].
        group_size: As quantized.
        rounding: As quantized.
        add_to: float32 tensor of `shape`, changed in place to add_to + deq (one multiply and one add a value, each
            rounded) and returned.
        out: float32 tensor of `shape`, overwritten and returned. Large results take a fraction of the time of a new
            tensor, for which the system has to provide pages first.
        backend: As for `quantize`.

    Returns:
        float32 of `shape`.
    """
    size = tuple(int(n) for n in shape)
    options = layout.check_options(bits, group_size, "max", rounding)
    layout.check_codes(codes, scale, bits, size, group_size)
    target, add = layout.check_target(out, add_to, size)
    return dispatch.implementation(rows.dequantize, backend, codes, scale, target)(
        codes, scale, options, size, target, add
    )


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
        m: Their cached version, float32 of the same shape; changed in place.
        bits: As for `quantize`.
        group_size: As for `quantize`.
        scale: As for `quantize`.
        rounding: As for `quantize`.
        seed: As for `quantize`.
        backend: As for `quantize`.
        name: Name of the change in errors.

    Returns:
        Codes and scales, as `quantize`.

    Raises:
        NonFiniteError: As `quantize`; m is as it was before the call.
    """
    options = layout.check_options(bits, group_size, scale, rounding, seed)
    layout.check_input(a, name)
    layout.check_float32(m, tuple(a.shape), "m")
    return dispatch.implementation(rows.delta_quantize_, backend, a, m)(a, m, options, name)


@torch.no_grad()
def top_k_select(
    x: Tensor, fraction: float, *, group_size: int | None = None, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Select the largest magnitudes of each group (arXiv:2206.01299, appendix H.6).

    Args:
        x: float32, float16 or bfloat16 [..., H].
        fraction: Share of values to keep: max(1, floor(fraction * n + 1/2)) of a group's n; of equal magnitudes the
            lowest index, and NaN counts as largest.
        group_size: As for `quantize`.
        backend: As for `quantize`.

    Returns:
        Values, float32 [..., K], and their positions in the row, int32 [..., K], ascending, K = top_k_kept(...).
        Quantize the values with group_size=top_k_group_size(...), so that each group keeps its own scale.
    """
    layout.check_input(x, "x")
    layout.check_group_size(group_size)
    return dispatch.implementation(rows.select, backend, x)(x, fraction, group_size)


def pack_positions(index: Tensor, H: int, *, backend: str = "auto") -> Tensor:
    """Pack positions of `top_k_select` in their shorter form.

    A bitmap has bit i set for position i; indices take (H - 1).bit_length() bits each. Both are little-endian.

    Args:
        index: int32 [..., K], ascending in a row.
        H: Values in a row.
        backend: As for `quantize`.

    Returns:
        uint8 [..., position_bytes(H, K)[1]].
    """
    return rows.pack_positions(index, H, dispatch.implementation(rows.pack_bits, backend, index))


def unpack_positions(packed: Tensor, H: int, K: int, *, backend: str = "auto") -> Tensor:
    """Undo `pack_positions`.

    Args:
        packed: uint8 [..., position_bytes(H, K)[1]].
        H: Values in a row.
        K: Positions in a row.
        backend: As for `quantize`.

    Returns:
        int32 [..., K].

    Raises:
        ShapeError: The bytes are not K positions below H a row.
    """
    return rows.unpack_positions(packed, H, K, dispatch.implementation(rows.unpack_bits, backend, packed))


def pack_bits(values: Tensor, bits: int, *, backend: str = "auto") -> Tensor:
    """Pack rows of unsigned integers as dense little-endian bit streams.

    Args:
        values: Any integer dtype [..., n], each in [0, 2**bits); higher bits are cut off.
        bits: 1 to 24 for each integer.
        backend: As for `quantize`.

    Returns:
        uint8 [..., ceil(n * bits / 8)]: bit i * bits of a row is the lowest bit of value i, padding bits are zero.
    """
    layout.check_bits(bits, high=layout.MAX_PACK_BITS)
    if values.dtype not in INTEGER_DTYPES or values.dim() == 0:
        raise ShapeError(f"values: {values.dtype} {tuple(values.shape)}, allowed: integers of at least one dimension")
    return dispatch.implementation(rows.pack_bits, backend, values)(values, bits)


def unpack_bits(codes: Tensor, bits: int, count: int, *, backend: str = "auto") -> Tensor:
    """Undo `pack_bits`.

    Args:
        codes: uint8 [..., ceil(count * bits / 8)].
        bits: As packed.
        count: Integers in a row.
        backend: As for `quantize`.

    Returns:
        int32 [..., count].
    """
    layout.check_bits(bits, high=layout.MAX_PACK_BITS)
    want = (count * bits + 7) // 8
    if codes.dtype != torch.uint8 or codes.dim() == 0 or codes.shape[-1] != want:
        raise ShapeError(f"codes: {codes.dtype} {tuple(codes.shape)}, allowed: torch.uint8 [..., {want}]")
    return dispatch.implementation(rows.unpack_bits, backend, codes)(codes, bits, count)


def encode_batch(
    items: Sequence[EncodeItem], payload: Tensor, *, packet: Tensor | None = None, backend: str = "auto"
) -> FiniteFlag:
    """Encode a micro-batch's samples, of different lengths, into one payload.

    The bytes are those of `quantize` and `delta_quantize_` sample by sample: scales, then codes; or the values
    themselves. Scales of channels, if any, come first; see `reference.channels`.

    Args:
        items: The samples; see `EncodeItem`.
        payload: uint8 [bytes], contiguous, exactly long enough, on the samples' device, at any address.
        packet: uint8, contiguous, around the payload; its last four bytes become the CRC-32 of all before them.
        backend: As for `quantize`.

    Returns:
        A flag that the caller has to check. If a value could not be encoded, the payload and every m are undefined.

    Example:
        >>> x, options = torch.randn(64, 256), ops.QuantizerOptions(4, None)
        >>> payload = torch.empty(ops.payload_bytes(64, 256, options, x.dtype), dtype=torch.uint8)
        >>> ops.encode_batch([ops.EncodeItem(x, None, options)], payload).check()
    """
    size, others = batches.head_bytes(items), [packet]
    for x, m, options, delta in items:
        layout.check_input(x, "x")
        shape = x.shape
        if len(shape) != 2 or not x.is_contiguous():
            raise ShapeError(f"x: {tuple(shape)}, allowed: contiguous [n, H]")
        if m is not None:
            layout.check_float32(m, shape, "m", contiguous=True)
        elif delta:
            raise ShapeError("m: None, allowed: contiguous [n, H] for a change")
        size += payload_bytes(shape[0], shape[1], options, x.dtype)
        others += (x, m)
    _check_payload(payload, size)
    flag = dispatch.implementation(batches.encode_batch, backend, payload, *others)(items, payload, packet)
    return FiniteFlag(flag, batches.non_finite_error(items), has_checksum=packet is not None)


def decode_batch(payload: Tensor, items: Sequence[DecodeItem], *, backend: str = "auto") -> None:
    """Undo `encode_batch`: every sample's m, float32 [n, H], contiguous, moves by its change or is set.

    Args:
        payload: uint8 [bytes], contiguous, on the samples' device, at any address.
        items: The samples; see `DecodeItem`.
        backend: As for `quantize`.

    Raises:
        ShapeError: The payload is shorter or longer than the samples.
    """
    for item in items:
        layout.check_float32(item.m, item.m.shape, "m", contiguous=True)
    _check_payload(payload, batch_bytes(items))
    dispatch.implementation(batches.decode_batch, backend, payload, *(item.m for item in items))(payload, items)


@torch.no_grad()
def distortion(items: Sequence[EncodeItem], bits: Sequence[int], *, backend: str = "auto") -> Tensor:
    """Measure the quantization error of samples.

    Args:
        items: Samples; see `EncodeItem`. Nothing of them is changed, and the bits of their options do not matter.
        bits: Numbers of bits, each 1 to 8.
        backend: As for `quantize`.

    Returns:
        float64 [1 + len(bits), R], R the rows of all samples: the squared norm of each row of x, and for each number of
        bits the squared norm of the row's error, with stochastic rounding its expectation.
    """
    for b in bits:
        layout.check_bits(b)
    return dispatch.implementation(batches.distortion, backend, *_measurable(items))(items, tuple(bits))


@torch.no_grad()
def fewest_bits(items: Sequence[EncodeItem], error: float, low: int, high: int, *, backend: str = "auto") -> int:
    """Choose the fewest bits for samples that are sent together.

    Args:
        items: The samples; see `EncodeItem`. Nothing of them is changed.
        error: The largest norm of the error of all samples together, over the norm of all their x: for a change too it
            is relative to x.
        low: The fewest bits allowed.
        high: The most bits allowed; chosen where even they do not suffice, and where x or its square, in float32, is
            not finite.
        backend: As for `quantize`; all choose the same.

    Returns:
        Bits that suffice while one less does not. On a GPU this waits for all earlier launches.

    Raises:
        ConfigError: Bits or an error out of range.

    Example:
        >>> x = torch.randn(64, 256)
        >>> ops.fewest_bits([ops.EncodeItem(x, None, ops.QuantizerOptions(8, None))], 0.1, 2, 8)
        5
    """
    filled, tensors = _choosable(items, error, low, high)
    return _search_bits(filled, tensors, error, low, high, None, backend)[0] if filled else low


@torch.no_grad()
def encode_fewest(
    items: Sequence[EncodeItem], payload: Tensor, error: float, low: int, high: int, *, backend: str = "auto"
) -> tuple[Tensor, FiniteFlag]:
    """Encode samples with the fewest bits that keep an error; most searches encode in the same pass.

    On a GPU nothing waits if all samples are changes or none is, scales are "max", and rows are dense, of up to
    16,384 values, a small number times a power of two.

    Args:
        items: As for `encode_batch`, all with options, whose bits do not matter.
        payload: As for `encode_batch`, as long as the most bits need; bytes beyond the chosen bits' are undefined.
        error: As for `fewest_bits`.
        low: As for `fewest_bits`.
        high: As for `fewest_bits`.
        backend: As for `quantize`.

    Returns:
        The bits that `fewest_bits` chooses, int64 [1] on the samples' device, and the flag of `encode_batch`, which the
        caller has to check. The payload begins with the bytes of `encode_batch` for these bits, and every m has moved.

    Raises:
        ConfigError: As `fewest_bits`.
    """
    _check_payload(payload, _quantized_bytes(items, high))
    bits, encoded = low, False
    filled, tensors = _choosable(items, error, low, high)
    if filled:
        on_device = dispatch.implementation(batches.encode_fewest, backend, *tensors)
        if (result := on_device(items, error, low, high, payload)) is not None:
            return result[0], FiniteFlag(result[1], batches.non_finite_error(items))
        bits, encoded = _search_bits(filled, tensors, error, low, high, payload, backend)
    chosen = torch.full((1,), bits, dtype=torch.int64, device=payload.device)
    if encoded:
        return chosen, FiniteFlag(batches.ALL_FINITE_FLAG, batches.non_finite_error(items))
    items = [item._replace(options=item.options and item.options._replace(bits=bits)) for item in items]
    return chosen, encode_batch(items, payload[: _quantized_bytes(items, bits)], backend=backend)


def crc32(data: Tensor | ReadableBuffer, value: int = 0) -> int:
    """Compute zlib's CRC-32.

    Args:
        data: A buffer, or a tensor of any dtype and device, whose bytes are read in row-major order.
        value: The checksum to continue from.

    Returns:
        The checksum, 0 to 2**32 - 1.
    """
    if isinstance(data, Tensor):
        view = data.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    else:
        view = memoryview(data)
    view = view.cast("B") if view.nbytes else memoryview(b"")
    native = dispatch.load_native() if view.nbytes >= NATIVE_CRC_BYTES else ""
    return zlib.crc32(view, value) if isinstance(native, str) else native.crc32(view, value)


def _check_payload(payload: Tensor, size: int) -> None:
    """Raise ShapeError unless the payload is uint8 [size], contiguous."""
    if payload.dtype != torch.uint8 or payload.shape != (size,) or not payload.is_contiguous():
        raise ShapeError(
            f"payload: {payload.dtype} {tuple(payload.shape)}, allowed: torch.uint8 [{size}] for these samples"
        )


def _choosable(items: Sequence[EncodeItem], error: float, low: int, high: int) -> tuple[list[EncodeItem], list[Tensor]]:
    """Check the arguments; return the samples that the bits depend on, with their tensors. None: no choice to make."""
    layout.check_bits(low)
    layout.check_bits(high, low=low)
    if not 0 < error < 1:
        raise ConfigError("error", error, "a number above 0 and below 1")
    filled = [item for item in items if item.x.numel()] if low < high else []
    return filled, _measurable(filled)


def _measurable(items: Sequence[EncodeItem]) -> list[Tensor]:
    """Check samples whose error is to be measured, and list their tensors."""
    for x, m, options, delta in items:
        layout.check_input(x, "x")
        if x.dim() != 2 or not x.is_contiguous() or options is None or (delta and m is None):
            raise ShapeError(f"x: {tuple(x.shape)}, allowed: contiguous [n, H] with options, and m for a change")
        if m is not None:
            layout.check_float32(m, tuple(x.shape), "m", contiguous=True)
    return [tensor for item in items for tensor in (item.x, item.m) if tensor is not None]


def _quantized_bytes(items: Sequence[EncodeItem], bits: int) -> int:
    """Count the bytes of all samples at `bits` bits."""
    total = batches.head_bytes(items)
    for x, _, options, _ in items:
        if options is None or x.dim() != 2 or not x.shape[1]:
            raise ShapeError(f"x: {tuple(x.shape)}, allowed: [n, H], H >= 1, with options")
        total += x.shape[0] * layout.quantized_row_bytes(x.shape[1], bits, options.group_size)
    return total


def _search_bits(
    items: Sequence[EncodeItem],
    tensors: Sequence[Tensor],
    error: float,
    low: int,
    high: int,
    payload: Tensor | None,
    backend: str,
) -> tuple[int, bool]:
    """Find the fewest bits of samples that are not empty, and whether the payload holds their encoding."""
    if bits := dispatch.implementation(batches.fit, backend, *tensors)(items, error, low, high, payload):
        return bits, True
    measure = dispatch.implementation(batches.distortion, backend, *tensors)
    errors: dict[int, float] = {}  # squared, by bits
    tries = [min(max(batches.FIRST_TRY, low), high)]
    while True:
        norm, *measured = halved_sum(measure(items, tries)).tolist()
        errors |= zip(tries, measured, strict=True)
        if not all(map(math.isfinite, (norm, *measured))):
            return high, False
        bits = _guess_bits(errors, error * error * norm, low, high)
        tries = [b for b in (bits - 1, bits) if low <= b and b not in errors]
        if not tries:
            return bits, False


def _guess_bits(errors: dict[int, float], limit: float, low: int, high: int) -> int:
    """Extrapolate the fewest bits with an error of at most `limit`: each further bit divides the squared error by 4."""
    fitting = min((b for b in errors if errors[b] <= limit), default=None)
    if fitting is None:
        bits = max(errors)
        guess = errors[bits]
        while bits < high and guess > limit:
            bits, guess = bits + 1, guess / 4
        return bits
    low = max([low, *(b + 1 for b in errors if b < fitting)])
    guess = errors[fitting]
    while fitting > low and 4 * guess <= limit:
        fitting, guess = fitting - 1, guess * 4
    return fitting
