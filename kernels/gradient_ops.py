"""The operations of data-parallel collectives, which `ops` exports: dithering, k-means, error feedback, sketches.

d: number of values of a flat bucket, s: levels, n: workers, K: clusters. Inputs g are float32, float16 or bfloat16 of
any shape, read in row-major order and never modified; codes are uint8 [bytes]. `seed` and the element index decide all
random numbers (derive it with `mix_seed`), so ranks and backends agree bit for bit. `start` is the index of the first
value in the whole bucket: encoding chunks with it equals encoding the bucket. The norm must be finite: check it before
encoding, because a NaN or Inf of the gradient shows in it.

All backends produce the same bytes, except for means of sketches on a GPU, where values are added in any order.
Errors as in `ops`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pipecomp.errors import ConfigError, NonFiniteError, ShapeError
from pipecomp.kernels import dispatch
from pipecomp.kernels.reference import gradients, layout
from pipecomp.kernels.reference.gradients import LinearCodes, Sketch

FEEDBACK_SCALES = ("max", "mean")


def tree_depth(workers: int) -> int:
    """Compute the depth of a reduction tree over n workers, ceil(log2 n).

    Raises:
        ConfigError: `workers` is not a positive integer.
    """
    _check_workers(workers)
    return (workers - 1).bit_length()


def linear_bits(levels: int, workers: int = 1) -> int:
    """Count the bits of an integer in [0, 2 * n * s]: a code (n = 1), or a sum of n codes, offset by n * s."""
    return (2 * levels * workers).bit_length()


def exponential_levels(bits: int, workers: int = 1) -> int:
    """Count the nonzero magnitudes of 8- or 4-bit exponential codes that remain for each of n workers' values."""
    _check_exponential(bits, tree_depth(workers))
    return gradients.max_exponent(bits) - tree_depth(workers)


@torch.no_grad()
def linear_encode(
    g: Tensor,
    norm: float,
    levels: int | tuple[int, ...],
    *,
    bits: int | None = None,
    scale_index: Tensor | None = None,
    seed: int = 0,
    start: int = 0,
    backend: str = "auto",
) -> Tensor:
    """Encode by linear dithering: y = |g| / norm, l = floor(y * s), plus 1 with probability y * s - l; unbiased.

    Source: Global-QSGD (arXiv:2305.18627), section 3; multi-scale: QSGD-MN-TS, docs/algorithms.md, 2.4.

    Args:
        g: The bucket, d values.
        norm: Finite, at least 0.
        levels: s, 1 to 127; or several, ascending, of which `scale_index` selects one a value.
        bits: Width of a code, by default the least that holds 2 * min(levels) + 1 values.
        scale_index: uint8 [d]; see `multiscale_index`.
        seed: Seed of the random numbers.
        start: Index of g's first value in the whole bucket.
        backend: As for `ops.quantize`.

    Returns:
        uint8 [ceil(d * bits / 8)] holding l + min(levels).

    Raises:
        NonFiniteError: The norm is negative or not finite.

    Example:
        >>> g = torch.randn(1000)
        >>> codes = ops.linear_encode(g, float(g.abs().max()), 7)
        >>> ops.linear_decode(codes, 1000, float(g.abs().max()), 7).shape
        torch.Size([1000])
    """
    form = _linear_codes(levels, bits, scale_index, g.numel())
    values = _check_gradient(g, norm)
    run = dispatch.implementation(gradients.linear_encode, backend, values, form.index_d)
    return run(values, norm, form, seed, start)


@torch.no_grad()
def linear_reduce(
    parts: Sequence[Tensor], d: int, levels: int, *, bits: int | None = None, backend: str = "auto"
) -> Tensor:
    """Add n workers' codes of `linear_encode`, exactly (docs/algorithms.md, 2.1).

    Args:
        parts: The workers' codes.
        d: Values in each.
        levels: The smallest s of the encoding.
        bits: As encoded.
        backend: As for `ops.quantize`.

    Returns:
        uint8 [ceil(d * b / 8)], b = linear_bits(levels, n), holding the sum of l, plus n * s.
    """
    width = _check_width(bits, _check_levels(levels, None, 0))
    if not parts:
        raise ConfigError("parts", [], "the codes of at least one worker")
    sum_bits = linear_bits(levels, len(parts))
    layout.check_bits(sum_bits, high=layout.MAX_PACK_BITS, key="bits of a sum")
    for codes in parts:
        _check_bytes(codes, d, width)
    return dispatch.implementation(gradients.linear_reduce, backend, *parts)(list(parts), d, width, sum_bits)


@torch.no_grad()
def linear_decode(
    codes: Tensor,
    d: int,
    norm: float,
    levels: int | tuple[int, ...],
    *,
    bits: int | None = None,
    workers: int = 1,
    scale_index: Tensor | None = None,
    out: Tensor | None = None,
    add_to: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Decode norm / (s * n) * sum of l: codes of `linear_encode`, or the workers' mean from sums of `linear_reduce`.

    Args:
        codes: uint8, as returned.
        d: Values in the bucket.
        norm: As encoded; the result is not finite if it is not.
        levels: As encoded.
        bits: Width of a code, by default linear_bits(min(levels), workers).
        workers: n, whose codes were added.
        scale_index: As encoded.
        out: Contiguous float32 [d], overwritten.
        add_to: Contiguous float32 [d], to which the values are added.
        backend: As for `ops.quantize`.

    Returns:
        float32 [d]: `out`, `add_to` or a new tensor.
    """
    _check_workers(workers)
    form = _linear_codes(levels, bits, scale_index, d, workers)
    _check_bytes(codes, d, form.bits)
    target, add = _flat_target(out, add_to, codes, d)
    run = dispatch.implementation(gradients.linear_decode, backend, codes, target, form.index_d)
    return run(codes, norm, form, workers, target, add)


@torch.no_grad()
def multiscale_index(g: Tensor, norm: float, levels: tuple[int, ...], *, backend: str = "auto") -> Tensor:
    """Find the index of the largest s with |g| / norm * s <= min(levels) for each value.

    Workers share the minimum of it, then encode with that.

    Args:
        g: The bucket, d values.
        norm: Finite, at least 0.
        levels: Ascending.
        backend: As for `ops.quantize`.

    Returns:
        uint8 [d].
    """
    choices = _check_levels(levels, torch.empty(0), 0)
    values = _check_gradient(g, norm)
    return dispatch.implementation(gradients.scale_index, backend, values)(values, norm, choices)


@torch.no_grad()
def exponential_encode(
    g: Tensor, norm: float, *, bits: int = 8, workers: int = 1, seed: int = 0, start: int = 0, backend: str = "auto"
) -> Tensor:
    """Encode |g| / (2 * 2**ceil(log2 n) * norm) by exponential dithering; unbiased (Global-QSGD, appendix B).

    Args:
        g: The bucket, d values.
        norm: Finite, at least 0.
        bits: 8 (sign and 7-bit exponent) or 4 (sign and 3-bit exponent, two codes to a byte).
        workers: n, the number of codes that will be reduced at most.
        seed: Seed of the random numbers.
        start: Index of g's first value in the whole bucket.
        backend: As for `ops.quantize`.

    Returns:
        uint8 [d] or [ceil(d / 2)]: sign in a code's top bit, exponent e below; e = 0 is zero.

    Raises:
        NonFiniteError: The norm is negative or not finite.
    """
    depth = tree_depth(workers)
    _check_exponential(bits, depth)
    values = _check_gradient(g, norm)
    run = dispatch.implementation(gradients.exponential_encode, backend, values)
    return run(values, norm, bits, depth, seed, start)


@torch.no_grad()
def exponential_reduce_(a: Tensor, b: Tensor, d: int, *, bits: int = 8, seed: int = 0, backend: str = "auto") -> Tensor:
    """Add exponential codes, a <- a + b, unbiased, in place: one level of the tree (Global-QSGD, Algorithm 2).

    Each level may lower an exponent by one: encode with `workers` of at least the number of codes that are reduced.

    Args:
        a: uint8 codes; changed in place.
        b: uint8 codes; not modified.
        d: Values in each.
        bits: As encoded.
        seed: Seed of the random numbers, different at each level.
        backend: As for `ops.quantize`.

    Returns:
        a.
    """
    _check_exponential(bits, 0)
    _check_bytes(a, d, bits)
    _check_bytes(b, d, bits)
    return dispatch.implementation(gradients.exponential_reduce_, backend, a, b)(a, b, d, bits, seed)


@torch.no_grad()
def exponential_decode(
    codes: Tensor,
    d: int,
    norm: float,
    *,
    bits: int = 8,
    workers: int = 1,
    divide: bool = True,
    out: Tensor | None = None,
    add_to: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Decode codes of `exponential_encode`, or reduced ones.

    Args:
        codes: uint8, as returned.
        d: Values in the bucket.
        norm: As encoded.
        bits: As encoded.
        workers: As encoded.
        divide: Whether the result is the workers' mean, not their sum.
        out: Contiguous float32 [d], overwritten.
        add_to: Contiguous float32 [d], to which the values are added.
        backend: As for `ops.quantize`.

    Returns:
        float32 [d]: `out`, `add_to` or a new tensor.
    """
    depth = tree_depth(workers)
    _check_exponential(bits, depth)
    _check_bytes(codes, d, bits)
    target, add = _flat_target(out, add_to, codes, d)
    run = dispatch.implementation(gradients.exponential_decode, backend, codes, target)
    return run(codes, norm, bits, depth, workers if divide else 1, target, add)


@torch.no_grad()
def kmeans_assign(x: Tensor, centers: Tensor, *, backend: str = "auto") -> Tensor:
    """Find the nearest center of each value, never across zero.

    Values below zero get negative centers, others the rest, unless there is none on that side. Halfway between two
    centers the upper one is taken.

    Args:
        x: d values of any float dtype.
        centers: float32 [K], ascending, 1 to 256.
        backend: As for `ops.quantize`.

    Returns:
        Indices of centers, uint8 [d].
    """
    if x.dtype not in layout.INPUT_DTYPES:
        raise ShapeError(f"x: dtype {x.dtype}, allowed: float32, float16, bfloat16")
    bounds = _check_centers(centers)
    return dispatch.implementation(gradients.kmeans_assign, backend, x, bounds)(x.reshape(-1).contiguous(), bounds)


@torch.no_grad()
def feedback_quantize_(
    x: Tensor, e: Tensor, bits: int, *, group_size: int, scale: str = "max", backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Quantize x plus the residual e, Q_b(x + e), with nearest rounding; e becomes (x + e) - deq, in place.

    Source: arXiv:1905.05957 (DoubleSqueeze), Algorithm 1.

    Args:
        x: float32, float16 or bfloat16 [d].
        e: float32 [d], contiguous; changed in place.
        bits: b, 1 to 8.
        group_size: Values that share a scale.
        scale: "max" (the largest magnitude) or "mean" (twice the mean magnitude: one-bit codes then decode to plus or
            minus the mean), rounded up to a bfloat16 number.
        backend: As for `ops.quantize`.

    Returns:
        Codes, uint8 [row_bytes(d, bits, group_size)], and scales, float32 [groups(d, group_size)], for
        `ops.dequantize`. A group with NaN, Inf or a sum above 2**100 keeps its residual and has the scale NaN; a group
        with a scale below 2**-100 counts as zeros.
    """
    _check_feedback(x, e, bits, group_size, scale)
    run = dispatch.implementation(gradients.feedback_quantize_, backend, x, e)
    return run(x, e, bits, group_size, scale == "mean")


@torch.no_grad()
def feedback_reduce_(
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    bits: int,
    e: Tensor,
    *,
    group_size: int,
    scale: str = "max",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Quantize the mean y of several workers' values plus the residual e; e becomes (y + e) - deq, in place.

    The values are decoded, added one by one, then divided.
    Source: arXiv:1905.05957 (DoubleSqueeze), Algorithm 1, the server's part.

    Args:
        codes: The workers' codes of `feedback_quantize_`.
        scales: The workers' scales.
        bits: As quantized, also for the result.
        e: float32 [d], contiguous; changed in place.
        group_size: As quantized.
        scale: As quantized.
        backend: As for `ops.quantize`.

    Returns:
        Codes and scales, as `feedback_quantize_`.
    """
    _check_feedback(e, e, bits, group_size, scale)
    if not codes or len(codes) != len(scales):
        raise ConfigError("codes", f"{len(codes)} codes, {len(scales)} scales", "at least one, and as many scales")
    for packed, scale_G in zip(codes, scales, strict=True):
        layout.check_codes(packed, scale_G, bits, tuple(e.shape), group_size)
    run = dispatch.implementation(gradients.feedback_reduce_, backend, e, *codes, *scales)
    return run(list(codes), list(scales), bits, e, group_size, scale == "mean")


@torch.no_grad()
def sketch_encode_(
    x: Tensor, e: Tensor, centers: Tensor, sketch: Sketch, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Sketch values (CASQ, docs/algorithms.md, 2.5): cluster numbers and means of hash buckets; e <- x - decoded.

    Args:
        x: float32 [d], contiguous, finite.
        e: float32 [d], contiguous; overwritten.
        centers: As for `kmeans_assign`, 2**bits of them.
        sketch: Parameters, equal on all ranks.
        backend: As for `ops.quantize`.

    Returns:
        Packed cluster numbers, uint8 [ceil(d * bits / 8)], and means, float32 [K + Σ counts]: centers first, then
        buckets.
    """
    d = x.numel()
    layout.check_float32(x, (d,), "x", contiguous=True)
    layout.check_float32(e, (d,), "e", contiguous=True)
    bounds = _check_centers(centers)
    _check_sketch(sketch, d)
    if centers.numel() != sketch.counts.numel():
        raise ShapeError(f"centers: {centers.numel()}, allowed: {sketch.counts.numel()} at {sketch.bits} bits")
    run = dispatch.implementation(gradients.sketch_encode, backend, x, e)
    return run(x, e, centers.to(x.device), bounds.to(x.device), sketch)


@torch.no_grad()
def sketch_decode(
    codes: Tensor,
    means: Tensor,
    sketch: Sketch,
    out: Tensor,
    *,
    add: bool = False,
    divisor: int = 1,
    backend: str = "auto",
) -> Tensor:
    """Decode the result of `sketch_encode_`: out = (out + values) / divisor, without `add` values / divisor.

    Args:
        codes: uint8, as returned.
        means: float32, as returned.
        sketch: As encoded.
        out: float32 [d], contiguous; changed in place.
        add: Whether the values are added to out.
        divisor: Number of workers of a mean, 1 for none.
        backend: As for `ops.quantize`.

    Returns:
        out.

    Raises:
        ShapeError: Codes or means do not belong to d values and the sketch's counts.
    """
    layout.check_float32(out, (out.numel(),), "out", contiguous=True)
    _check_sketch(sketch, out.numel())
    _check_bytes(codes, out.numel(), sketch.bits)
    layout.check_float32(means, (sketch.counts.numel() + int(sketch.counts.sum()),), "means")
    run = dispatch.implementation(gradients.sketch_decode, backend, out, codes, means)
    return run(codes, means, sketch, out, add, divisor)


def _check_centers(centers: Tensor) -> Tensor:
    """Check centers, float32 [1 to 256], finite, ascending; return the boundaries between them, float32 [K - 1]."""
    if centers.dtype != torch.float32 or centers.dim() != 1 or not 1 <= centers.numel() <= 256:
        raise ShapeError(f"centers: {centers.dtype} {tuple(centers.shape)}, allowed: torch.float32 [1 to 256]")
    if not bool((centers[1:] >= centers[:-1]).all()) or not bool(centers.isfinite().all()):
        raise ConfigError("centers", "unsorted or not finite", "finite values in ascending order")
    return gradients.boundaries(centers)


def _check_workers(workers: int) -> None:
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise ConfigError("workers", workers, "an integer of at least 1")


def _check_levels(levels: int | tuple[int, ...], scale_index: Tensor | None, d: int) -> tuple[int, ...]:
    """Return levels as a tuple: one int, or ascending ints with a scale_index (uint8 [d])."""
    choices = (levels,) if isinstance(levels, int) else tuple(levels)
    if not choices or any(not isinstance(s, int) or isinstance(s, bool) or s < 1 for s in choices):
        raise ConfigError("levels", levels, "positive integers")
    if list(choices) != sorted(set(choices)) or choices[0] > 127 or len(choices) > 256:
        raise ConfigError("levels", levels, "ascending, at most 256 of them, the smallest at most 127")
    if (scale_index is None) != isinstance(levels, int):
        raise ConfigError("levels", levels, "one integer without scale_index, several with it")
    if scale_index is not None and d and (scale_index.dtype != torch.uint8 or scale_index.numel() != d):
        raise ShapeError(f"scale_index: {scale_index.dtype} {tuple(scale_index.shape)}, allowed: torch.uint8 [{d}]")
    return choices


def _check_width(bits: int | None, choices: tuple[int, ...], workers: int = 1) -> int:
    """Return the bits of a linear code (at most 8), or of a sum of n codes (at most 24).

    ConfigError unless they hold 2 * n * min(levels) + 1 values.
    """
    least = linear_bits(min(choices), workers)
    width = least if bits is None else bits
    layout.check_bits(width, low=least, high=8 if workers == 1 else layout.MAX_PACK_BITS)
    return width


def _linear_codes(
    levels: int | tuple[int, ...], bits: int | None, scale_index: Tensor | None, d: int, workers: int = 1
) -> LinearCodes:
    """Check the form of linear codes of d values, or of their sums over workers."""
    choices = _check_levels(levels, scale_index, d)
    index_d = None if scale_index is None else scale_index.reshape(-1).contiguous()
    return LinearCodes(choices, index_d, _check_width(bits, choices, workers))


def _check_exponential(bits: int, depth: int) -> None:
    """Raise ConfigError unless bits is 8 or 4 and a tree of this depth leaves an exponent."""
    if bits not in (4, 8):
        raise ConfigError("bits", bits, "8 or 4 for exponential levels")
    if depth >= gradients.max_exponent(bits):
        raise ConfigError("workers", 1 << depth, f"at most {1 << (gradients.max_exponent(bits) - 1)} at {bits} bits")


def _check_gradient(g: Tensor, norm: float) -> Tensor:
    """Return g as a flat tensor; raise for other dtypes and for a negative or non-finite norm."""
    if g.dtype not in layout.INPUT_DTYPES:
        raise ShapeError(f"g: dtype {g.dtype}, allowed: float32, float16, bfloat16")
    if not math.isfinite(norm) or norm < 0:
        raise NonFiniteError(f"norm: got {norm}, allowed: finite, at least 0")
    return g.reshape(-1).contiguous()


def _flat_target(out: Tensor | None, add_to: Tensor | None, codes: Tensor, d: int) -> tuple[Tensor, bool]:
    """Return the tensor for the values, contiguous float32 [d], and whether they are added to it."""
    target, add = layout.check_target(out, add_to, (d,), contiguous=True)
    return torch.empty(d, dtype=torch.float32, device=codes.device) if target is None else target, add


def _check_bytes(codes: Tensor, d: int, bits: int) -> None:
    """Raise ShapeError unless codes is uint8 [ceil(d * bits / 8)]."""
    want = (d * bits + 7) // 8
    if codes.dtype != torch.uint8 or tuple(codes.shape) != (want,):
        raise ShapeError(f"codes: {codes.dtype} {tuple(codes.shape)}, allowed: torch.uint8 [{want}]")


def _check_feedback(x: Tensor, e: Tensor, bits: int, group_size: int, scale: str) -> None:
    """Check x, a float tensor [d], d at least 1; e, contiguous float32 like it; and the options."""
    layout.check_bits(bits)
    if scale not in FEEDBACK_SCALES:
        raise ConfigError("scale", scale, " or ".join(FEEDBACK_SCALES))
    layout.check_group_size(group_size)
    if group_size is None:
        raise ConfigError("group_size", group_size, "an integer of at least 1")
    layout.check_input(x, "x")
    if x.dim() != 1:
        raise ShapeError(f"x: shape {tuple(x.shape)}, allowed: [d]")
    layout.check_float32(e, tuple(x.shape), "e", contiguous=True)


def _check_sketch(sketch: Sketch, d: int) -> None:
    counts, bits = sketch.counts, sketch.bits
    layout.check_bits(bits)
    if counts.dtype != torch.int64 or tuple(counts.shape) != (1 << bits,) or counts.device.type != "cpu":
        raise ShapeError(f"counts: {counts.dtype} {tuple(counts.shape)}, allowed: torch.int64 [{1 << bits}] on the CPU")
    if bool((counts < 0).any()) or int(counts.sum()) >= 1 << 31 or d >= 1 << 32:
        raise ConfigError("counts", counts.tolist(), "at least 0, together below 2**31, of fewer than 2**32 values")
