"""The data-parallel operations that collectives call: arguments are checked here, then a backend runs them.

d: number of values of a flat bucket, s: levels, n: workers. Inputs g are float32, float16 or bfloat16 of any shape,
read in row-major order and never modified; codes are uint8 [bytes]. `seed` and the element index decide all random
numbers (derive it with `mix_seed`), so ranks and backends agree bit for bit. `start` is the index of the first value in
the whole bucket: encoding chunks with it gives what encoding the bucket would.
The norm must be finite: look at it before encoding, a NaN or Inf of the gradient is in it.
Source: arXiv:2305.18627 (Global-QSGD).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pipecomp.errors import ConfigError, NonFiniteError, ShapeError
from pipecomp.kernels import dispatch, dithering, layout


def tree_depth(workers: int) -> int:
    """Depth of a reduction tree over n workers: ceil(log2 n)."""
    check_workers(workers)
    return (workers - 1).bit_length()


def linear_bits(levels: int, workers: int = 1) -> int:
    """Bits of an integer in [0, 2 * n * s]: of a code (n = 1), or of a sum of n of them, offset by n * s."""
    return (2 * levels * workers).bit_length()


def exponential_levels(bits: int, workers: int = 1) -> int:
    """Magnitudes other than zero that 8- or 4-bit exponential codes leave each of n workers for its values."""
    check_exponential(bits, tree_depth(workers))
    return dithering.max_exponent(bits) - tree_depth(workers)


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
    """Linear dithering: y = |g| / norm, l = floor(y * s), up with probability y * s - l; unbiased.

    levels: s, 1 to 127; or several, ascending, of which `scale_index` (uint8 [d], see `multiscale_index`) picks one
    a value.
    bits: width of a code, by default the least that holds 2 * min(levels) + 1 values.
    Returns uint8 [ceil(d * bits / 8)] holding l + min(levels).
    Source: Global-QSGD section 3; multi-scale: QSGD-MN-TS, docs/algorithms.md, 2.4.
    """
    choices = check_levels(levels, scale_index, g.numel())
    width = check_width(bits, choices)
    values = check_gradient(g, norm)
    picked = None if scale_index is None else scale_index.reshape(-1).contiguous()
    return dispatch.pick(backend, values, picked).linear_encode(values, norm, choices, picked, width, seed, start)


@torch.no_grad()
def linear_reduce(
    parts: Sequence[Tensor], d: int, levels: int, *, bits: int | None = None, backend: str = "auto"
) -> Tensor:
    """Add n workers' codes of `linear_encode`, exactly (levels: the smallest s there).

    Returns uint8 [ceil(d * b / 8)], b = linear_bits(levels, n), holding the sum of l, plus n * s.
    Source: docs/algorithms.md, 2.1.
    """
    width = check_width(bits, check_levels(levels, None, 0))
    if not parts:
        raise ConfigError("parts", [], "the codes of at least one worker")
    sum_bits = linear_bits(levels, len(parts))
    layout.check_bits(sum_bits, high=layout.MAX_PACK_BITS, key="bits of a sum")
    for codes in parts:
        check_bytes(codes, d, width)
    return dispatch.pick(backend, *parts).linear_reduce(list(parts), d, width, sum_bits)


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
    """norm / (s * n) * sum of l: values of `linear_encode`'s codes, or the workers' mean from `linear_reduce`'s sums.

    bits: width of a code, by default linear_bits(min(levels), workers).
    Returns float32 [d], new, in `out`, or add_to + values in `add_to`; not finite if the norm is not.
    """
    check_workers(workers)
    choices = check_levels(levels, scale_index, d)
    width = check_width(bits, choices, workers)
    check_bytes(codes, d, width)
    picked = None if scale_index is None else scale_index.reshape(-1).contiguous()
    target, add = flat_target(out, add_to, codes, d)
    chosen = dispatch.pick(backend, codes, target, picked)
    return chosen.linear_decode(codes, norm, choices, picked, width, workers, target, add)


@torch.no_grad()
def multiscale_index(g: Tensor, norm: float, levels: tuple[int, ...], *, backend: str = "auto") -> Tensor:
    """Index of the largest s with |g| / norm * s <= min(levels), uint8 [d]; levels ascend.

    Workers share the minimum of it, then encode with that.
    """
    choices = check_levels(levels, torch.empty(0), 0)
    values = check_gradient(g, norm)
    return dispatch.pick(backend, values).scale_index(values, norm, choices)


@torch.no_grad()
def exponential_encode(
    g: Tensor, norm: float, *, bits: int = 8, workers: int = 1, seed: int = 0, start: int = 0, backend: str = "auto"
) -> Tensor:
    """Exponential dithering of |g| / (2 * 2**ceil(log2 n) * norm); unbiased.

    bits: 8 (sign and 7-bit exponent) or 4 (sign and 3-bit exponent, two to a byte).
    Returns uint8 [d] or [ceil(d / 2)]: sign in a code's top bit, exponent e below; e = 0 is zero.
    Source: Global-QSGD, appendix B.
    """
    depth = tree_depth(workers)
    check_exponential(bits, depth)
    values = check_gradient(g, norm)
    return dispatch.pick(backend, values).exponential_encode(values, norm, bits, depth, seed, start)


@torch.no_grad()
def exponential_reduce_(a: Tensor, b: Tensor, d: int, *, bits: int = 8, seed: int = 0, backend: str = "auto") -> Tensor:
    """Add exponential codes of d values, a <- a + b, unbiased, in place. One level of the tree: `seed` of its own.

    Each level may lower an exponent by one: encode with `workers` of at least the number of codes that are reduced.
    Source: Global-QSGD, Algorithm 2.
    """
    check_exponential(bits, 0)
    check_bytes(a, d, bits)
    check_bytes(b, d, bits)
    return dispatch.pick(backend, a, b).exponential_reduce_(a, b, d, bits, seed)


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
    """Values of (reduced) codes; `workers` as encoded. divide: the mean, not the sum.

    Returns float32 [d], new, in `out`, or add_to + values in `add_to`.
    """
    depth = tree_depth(workers)
    check_exponential(bits, depth)
    check_bytes(codes, d, bits)
    target, add = flat_target(out, add_to, codes, d)
    chosen, divisor = dispatch.pick(backend, codes, target), workers if divide else 1
    return chosen.exponential_decode(codes, norm, bits, depth, divisor, target, add)


@torch.no_grad()
def kmeans_assign(x: Tensor, centers: Tensor, *, backend: str = "auto") -> Tensor:
    """Nearest center of each value, never across sign: uint8 [d].

    centers: float32 [K], ascending, 1 to 256. Values below zero only get negative centers, others only the rest, unless
    there is none on that side; halfway between two centers the upper one is taken.
    """
    if x.dtype not in layout.INPUT_DTYPES:
        raise ShapeError(f"x: dtype {x.dtype}, allowed: float32, float16, bfloat16")
    bounds = check_centers(centers)
    return dispatch.pick(backend, x, bounds).kmeans_assign(x.reshape(-1).contiguous(), bounds)


def check_centers(centers: Tensor) -> Tensor:
    """What lies between clusters, float32 [K - 1]; raises unless centers are float32 [1 to 256], finite, ascending."""
    if centers.dtype != torch.float32 or centers.dim() != 1 or not 1 <= centers.numel() <= 256:
        raise ShapeError(f"centers: {centers.dtype} {tuple(centers.shape)}, allowed: torch.float32 [1 to 256]")
    if not bool((centers[1:] >= centers[:-1]).all()) or not bool(centers.isfinite().all()):
        raise ConfigError("centers", "unsorted or not finite", "finite values in ascending order")
    return dithering.boundaries(centers)


def check_workers(workers: int) -> None:
    """Raise ConfigError unless workers is a positive int."""
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise ConfigError("workers", workers, "an integer of at least 1")


def check_levels(levels: int | tuple[int, ...], scale_index: Tensor | None, d: int) -> tuple[int, ...]:
    """Levels as a tuple; ConfigError unless one int, or ascending ints where there is a scale_index (uint8 [d])."""
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


def check_width(bits: int | None, choices: tuple[int, ...], workers: int = 1) -> int:
    """Bits of a linear code or of a sum of n of them; ConfigError unless they hold 2 * n * min(levels) + 1 values.

    A code has at most 8 bits, a sum at most 24.
    """
    least = linear_bits(min(choices), workers)
    width = least if bits is None else bits
    layout.check_bits(width, low=least, high=8 if workers == 1 else layout.MAX_PACK_BITS)
    return width


def check_exponential(bits: int, depth: int) -> None:
    """Raise ConfigError unless bits is 8 or 4 and a tree of this depth leaves an exponent."""
    if bits not in (4, 8):
        raise ConfigError("bits", bits, "8 or 4 for exponential levels")
    if depth >= dithering.max_exponent(bits):
        raise ConfigError("workers", 1 << depth, f"at most {1 << (dithering.max_exponent(bits) - 1)} at {bits} bits")


def check_gradient(g: Tensor, norm: float) -> Tensor:
    """g as a flat tensor; raises for a dtype that is not taken and for a norm that is not finite or negative."""
    if g.dtype not in layout.INPUT_DTYPES:
        raise ShapeError(f"g: dtype {g.dtype}, allowed: float32, float16, bfloat16")
    if not math.isfinite(norm) or norm < 0:
        raise NonFiniteError(f"norm: got {norm}, allowed: finite, at least 0")
    return g.reshape(-1).contiguous()


def flat_target(out: Tensor | None, add_to: Tensor | None, codes: Tensor, d: int) -> tuple[Tensor, bool]:
    """Where values go, and whether they are added there; raises unless that is contiguous float32 [d]."""
    target, add = layout.check_target(out, add_to, (d,), contiguous=True)
    return torch.empty(d, dtype=torch.float32, device=codes.device) if target is None else target, add


def check_bytes(codes: Tensor, d: int, bits: int) -> None:
    """Raise ShapeError unless codes is uint8 [ceil(d * bits / 8)]."""
    want = (d * bits + 7) // 8
    if codes.dtype != torch.uint8 or tuple(codes.shape) != (want,):
        raise ShapeError(f"codes: {codes.dtype} {tuple(codes.shape)}, allowed: torch.uint8 [{want}]")
