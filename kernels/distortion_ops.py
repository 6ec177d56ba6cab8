"""The fewest bits that keep an error: arguments are checked, then a backend measures."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pipecomp.errors import ConfigError, ShapeError
from pipecomp.kernels import dispatch, layout
from pipecomp.kernels.backend import Backend
from pipecomp.kernels.distortion import FIRST_LOOK, halved_sum
from pipecomp.kernels.ragged import FINE_FLAG, Verdict, Visit, bad_visit
from pipecomp.kernels.ragged_ops import check_payload, encode_batch


@torch.no_grad()
def distortion(visits: Sequence[Visit], bits: Sequence[int], *, backend: str = "auto") -> Tensor:
    """Measure what quantizing would leave out.

    Args:
        visits: Samples; see `Visit`. Nothing of them is changed, and the bits of their options do not matter.
        bits: Numbers of bits, each 1 to 8.
        backend: As for `quantize`.

    Returns:
        float64 [1 + len(bits), R], R the rows of all samples: the squared norm of each row of x, and for each number of
        bits the squared norm of the row's error, with stochastic rounding its expectation.
    """
    for b in bits:
        layout.check_bits(b)
    return _checked(visits, backend).distortion(visits, tuple(bits))


@torch.no_grad()
def fewest_bits(visits: Sequence[Visit], error: float, low: int, high: int, *, backend: str = "auto") -> int:
    """Choose the fewest bits for samples that are sent together.

    Args:
        visits: The samples; see `Visit`. Nothing of them is changed.
        error: The largest norm of what is left out of all samples together, over the norm of all their x: of a change
            too it is relative to x.
        low: The fewest bits allowed.
        high: The most bits allowed, which are taken where even they do not suffice, and where x or its square, in
            float32, is not finite.
        backend: As for `quantize`; all choose the same.

    Returns:
        Bits that suffice while one less does not. On a GPU this waits for what was launched before.

    Raises:
        ConfigError: Bits or an error out of range.

    Example:
        >>> x = torch.randn(64, 256)
        >>> ops.fewest_bits([ops.Visit(x, None, ops.Options(8, None))], 0.1, 2, 8)
        5
    """
    return _fitted(visits, error, low, high, _choosing(visits, error, low, high, backend), None)[0]


@torch.no_grad()
def encode_fewest(
    visits: Sequence[Visit], payload: Tensor, error: float, low: int, high: int, *, backend: str = "auto"
) -> tuple[Tensor, Verdict]:
    """Encode samples with the fewest bits that keep an error, mostly in the pass over them that finds these bits.

    A GPU goes on without waiting: where all samples are changes, or none is, with max scales, of dense rows of up to
    16,384 values, a small number times a power of two.

    Args:
        visits: As for `encode_batch`, all with options, whose bits do not matter.
        payload: As for `encode_batch`, as long as the most bits need; what the bits chosen do not need is undefined.
        error: As for `fewest_bits`.
        low: As for `fewest_bits`.
        high: As for `fewest_bits`.
        backend: As for `quantize`.

    Returns:
        The bits that `fewest_bits` chooses, int64 [1] on the samples' device, with which the payload begins as
        `encode_batch` makes it, every m having followed; and whether all could be encoded, which the caller has to
        check.

    Raises:
        ConfigError: As `fewest_bits`.
    """
    check_payload(payload, _total(visits, high))
    choosing = _choosing(visits, error, low, high, backend)
    if choosing is not None and (found := choosing.encode_fewest(visits, error, low, high, payload)) is not None:
        return found[0], Verdict(found[1], bad_visit(visits))
    bits, encoded = _fitted(visits, error, low, high, choosing, payload)
    chosen = torch.full((1,), bits, dtype=torch.int64, device=payload.device)
    if encoded:
        return chosen, Verdict(FINE_FLAG, bad_visit(visits))
    visits = [v._replace(options=v.options and v.options._replace(bits=bits)) for v in visits]
    return chosen, encode_batch(visits, payload[: _total(visits, bits)], backend=backend)


def _choosing(visits: Sequence[Visit], error: float, low: int, high: int, backend: str) -> Backend | None:
    """Check the arguments; the backend that chooses, None where there is nothing to choose."""
    layout.check_bits(low)
    layout.check_bits(high, low=low)
    if not 0 < error < 1:
        raise ConfigError("error", error, "a number above 0 and below 1")
    filled = [v for v in visits if v.x.numel()]
    return _checked(filled, backend) if filled and low < high else None


def _total(visits: Sequence[Visit], bits: int) -> int:
    """Count the bytes of all parts."""
    total = 0
    for x, _, options, _ in visits:
        if options is None or x.dim() != 2 or not x.shape[1]:
            raise ShapeError(f"x: {tuple(x.shape)}, allowed: [n, H], H >= 1, with options")
        total += x.shape[0] * layout.quantized_row_bytes(x.shape[1], bits, options.group_size)
    return total


def _checked(visits: Sequence[Visit], backend: str) -> Backend:
    """Choose the backend for samples that can be measured."""
    for v in visits:
        layout.check_input(v.x, "x")
        if v.x.dim() != 2 or not v.x.is_contiguous() or v.options is None or (v.delta and v.m is None):
            raise ShapeError(f"x: {tuple(v.x.shape)}, allowed: contiguous [n, H] with options, and m for a change")
        if v.m is not None:
            layout.check_float32(v.m, tuple(v.x.shape), "m", contiguous=True)
    others = [tensor for v in visits for tensor in (v.x, v.m)]
    return dispatch.pick(backend, visits[0].x, *others)


def _fitted(
    visits: Sequence[Visit], error: float, low: int, high: int, chosen: Backend | None, payload: Tensor | None
) -> tuple[int, bool]:
    """The fewest bits, and whether the payload, if one is given, is what they make of the samples."""
    if chosen is None:
        return low, False
    visits = [v for v in visits if v.x.numel()]
    if found := chosen.fit(visits, error, low, high, payload):
        return found, True
    left: dict[int, float] = {}  # out, by bits
    look = [min(max(FIRST_LOOK, low), high)]
    while True:
        norm, *measured = halved_sum(chosen.distortion(visits, look)).tolist()
        left |= zip(look, measured, strict=True)
        if not all(map(math.isfinite, (norm, *measured))):
            return high, False
        taken = _fewest(left, error * error * norm, low, high)
        look = [b for b in (taken - 1, taken) if low <= b and b not in left]
        if not look:
            return taken, False


def _fewest(left: dict[int, float], most: float, low: int, high: int) -> int:
    """The fewest bits that leave at most `most`, as far as what some leave tells: a quarter with every further bit."""
    fitting = min((b for b in left if left[b] <= most), default=None)
    if fitting is None:
        bits = max(left)
        guessed = left[bits]
        while bits < high and guessed > most:
            bits, guessed = bits + 1, guessed / 4
        return bits
    low = max([low, *(b + 1 for b in left if b < fitting)])
    guessed = left[fitting]
    while fitting > low and 4 * guessed <= most:
        fitting, guessed = fitting - 1, guessed * 4
    return fitting
