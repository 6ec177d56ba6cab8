"""The layout of rows, groups and codes in memory, and the checks of arguments that depend on it.

H: values in a row. A row is cut into groups of `group_size` values (None: the whole row is one group; the last group
may be short). Each group's codes are a dense little-endian bit stream of ceil(group * bits / 8) bytes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pipecomp.errors import ConfigError, ShapeError

INPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SCALES = ("max", "rms")
ROUNDINGS = ("nearest", "stochastic")
MAX_PACK_BITS = 24

SCALE_MIN = 2.0**-100  # groups with a smaller scale count as zeros
SCALE_MAX = 2.0**100  # larger values raise NonFiniteError

# Loading factor with the least squared error for Gaussian values and 2**bits equal intervals, indexed by bits.
RMS_LOADING = (0.0, 1.596, 1.991, 2.344, 2.682, 3.01, 3.33, 3.64, 3.94)


class GroupRun(NamedTuple):
    """A run of equally long groups inside a row."""

    value_start: int  # first value of the run in the row
    byte_start: int  # first code byte of the run in the row's codes
    group_start: int  # index of the run's first group
    groups: int
    group: int  # values in each group
    group_bytes: int  # code bytes of each group


class QuantizerOptions(NamedTuple):
    """Checked options of one quantizer call."""

    bits: int
    group_size: int | None
    scale: str = "max"  # "max" or "rms"; in a batch also "channels" or "cached_channels", see channels.py
    rounding: str = "nearest"
    seed: int = 0
    gain: str = "least_error"  # or "unbiased", not with "max"

    @property
    def in_channels(self) -> QuantizerOptions:
        """The options of rows that are divided by their channels' scales."""
        return self._replace(scale="rms")


def finest_group(bits: int) -> int:
    """Return 3 * 4**bits: the number of values whose squared errors add up to the square of their scale.

    A step is scale / 2**(bits - 1), and a value's mean squared error a twelfth of its square.
    """
    return 3 * 4**bits


def check_bits(bits: int, *, low: int = 1, high: int = 8, key: str = "bits") -> None:
    """Raise ConfigError unless `bits` is an int in [low, high]."""
    if not isinstance(bits, int) or isinstance(bits, bool) or not low <= bits <= high:
        raise ConfigError(key, bits, f"an integer from {low} to {high}")


def check_group_size(group_size: int | None) -> None:
    """Raise ConfigError unless `group_size` is None or a positive int."""
    if group_size is None:
        return
    if not isinstance(group_size, int) or isinstance(group_size, bool) or group_size < 1:
        raise ConfigError("group_size", group_size, "None or an integer of at least 1")


def check_options(bits: int, group_size: int | None, scale: str, rounding: str, seed: int = 0) -> QuantizerOptions:
    """Check a quantizer's options. Raises ConfigError for the first invalid one."""
    check_bits(bits)
    check_group_size(group_size)
    if scale not in SCALES:
        raise ConfigError("scale", scale, "max or rms")
    if rounding not in ROUNDINGS:
        raise ConfigError("rounding", rounding, "nearest or stochastic")
    if rounding == "stochastic" and scale != "max":
        raise ConfigError("scale", scale, "max with stochastic rounding (rms clips, which biases the result)")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ConfigError("seed", seed, "an integer")
    return QuantizerOptions(bits, group_size, scale, rounding, seed)


def check_input(x: Tensor, name: str) -> None:
    """Raise ShapeError unless x is a float tensor of at least one dimension with non-empty rows."""
    if x.dtype not in INPUT_DTYPES:
        raise ShapeError(f"{name}: dtype {x.dtype}, allowed: float32, float16, bfloat16")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ShapeError(f"{name}: shape {tuple(x.shape)}, allowed: at least one dimension, the last one not empty")


def check_float32(x: Tensor, shape: tuple[int, ...], name: str, *, contiguous: bool = False) -> None:
    """Raise ShapeError unless x is a float32 tensor of `shape`."""
    if x.dtype != torch.float32 or x.shape != shape or (contiguous and not x.is_contiguous()):
        kind = "contiguous torch.float32" if contiguous else "torch.float32"
        raise ShapeError(f"{name}: {x.dtype} {tuple(x.shape)}, allowed: {kind} {shape}")


def check_target(
    out: Tensor | None, add_to: Tensor | None, shape: tuple[int, ...], *, contiguous: bool = False
) -> tuple[Tensor | None, bool]:
    """Choose the tensor that takes the result (None: a new one), and whether the result is added to it."""
    if out is not None and add_to is not None:
        raise ConfigError("out", "a tensor", "None where add_to is given")
    target, name = (out, "out") if add_to is None else (add_to, "add_to")
    if target is not None:
        check_float32(target, shape, name, contiguous=contiguous)
    return target, add_to is not None


def check_codes(codes: Tensor, scale: Tensor, bits: int, shape: tuple[int, ...], group_size: int | None) -> None:
    """Raise ShapeError unless codes (uint8) and scale (float32) belong to values of `shape`."""
    if not shape or shape[-1] == 0:
        raise ShapeError(f"shape: {shape}, allowed: at least one dimension, the last one not empty")
    want_codes = (*shape[:-1], row_bytes(shape[-1], bits, group_size))
    if codes.dtype != torch.uint8 or tuple(codes.shape) != want_codes:
        raise ShapeError(f"codes: {codes.dtype} {tuple(codes.shape)}, allowed: torch.uint8 {want_codes}")
    want_scale = scale_shape(shape, group_size)
    if scale.dtype != torch.float32 or tuple(scale.shape) != want_scale:
        raise ShapeError(f"scale: {scale.dtype} {tuple(scale.shape)}, allowed: torch.float32 {want_scale}")
    if codes.device != scale.device:
        raise ShapeError(f"scale: on {scale.device}, allowed: {codes.device} as codes")


def row_stride(x: Tensor) -> int | None:
    """Distance of rows of [..., H] in values; None unless rows are dense, evenly spaced and do not overlap."""
    H = x.shape[-1]
    if x.is_contiguous():
        return H
    try:
        rows_RH = x.view(-1, H)
    except RuntimeError:
        return None  # not evenly spaced
    stride, inner = rows_RH.stride()
    return stride if stride >= H and (inner == 1 or H == 1) else None


def with_row_stride(x: Tensor) -> tuple[Tensor, int]:
    """Return x, or a contiguous copy where its rows are not evenly spaced, with the row stride."""
    stride = row_stride(x)
    return (x.contiguous(), x.shape[-1]) if stride is None else (x, stride)


def group_length(H: int, group_size: int | None) -> int:
    """Number of values in each group of a row of H values, except a short last one."""
    return H if group_size is None else min(group_size, H)


def segments(H: int, bits: int, group_size: int | None) -> list[GroupRun]:
    """List the one or two runs of equal groups that make up a row of H values at `bits` bits."""
    group = group_length(H, group_size)
    full, tail = divmod(H, group)
    group_bytes = (group * bits + 7) // 8
    runs = [GroupRun(0, 0, 0, full, group, group_bytes)]
    if tail:
        runs.append(GroupRun(full * group, full * group_bytes, full, 1, tail, (tail * bits + 7) // 8))
    return runs


def groups(H: int, group_size: int | None = None) -> int:
    """Count the groups in a row of H values."""
    check_group_size(group_size)
    return 1 if group_size is None else -(-H // group_size)


def row_bytes(H: int, bits: int, group_size: int | None = None) -> int:
    """Count the code bytes of a row of H values: the sum over its groups of ceil(group * bits / 8)."""
    check_bits(bits, high=MAX_PACK_BITS)
    check_group_size(group_size)
    return sum(s.groups * s.group_bytes for s in segments(H, bits, group_size))


@lru_cache(maxsize=4096, typed=True)  # several calls for every sample of a micro-batch
def quantized_row_bytes(H: int, bits: int, group_size: int | None = None) -> int:
    """Count the bytes of a row of H values with its float32 scales."""
    return 4 * groups(H, group_size) + row_bytes(H, bits, group_size)


def scale_shape(shape: tuple[int, ...], group_size: int | None) -> tuple[int, ...]:
    """Shape of the scales for values of `shape`: [...] without groups, [..., groups] with."""
    return shape[:-1] if group_size is None else (*shape[:-1], groups(shape[-1], group_size))
