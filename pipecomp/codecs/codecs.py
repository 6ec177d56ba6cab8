"""Codecs: rows of a tensor to bytes and back, without memory of earlier tensors.

Plain values (`Cast`), quantized values (`Quantized`, `Rotated`), the largest values (`TopK`), changes of cached
activations (`DeltaCodecs`), and changes from cluster centers (`Clustered`).

Shapes: T real tokens of a micro-batch, n of one sample, H hidden size, C cluster centers. A codec's byte count follows
from the shape alone, so a receiver can check a payload's length before it reads it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from pipecomp.codecs.wire import DType, PayloadMethod
from pipecomp.config.activations import ConstantError
from pipecomp.errors import NonFiniteError, ShapeError, WireError
from pipecomp.kernels import ops
from pipecomp.kernels.ops import FiniteFlag
from pipecomp.kernels.reference.channels import CACHED, SENT, block_bytes
from pipecomp.kernels.reference.reproducible import random_bits

_TORCH = {DType.FLOAT32: torch.float32, DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16}
_WIRE = {v: k for k, v in _TORCH.items()}
_METHODS = {  # by scale
    **dict.fromkeys(("max", "rms"), PayloadMethod.QUANTIZED),
    **{SENT: PayloadMethod.CHANNELS, CACHED: PayloadMethod.CACHED_CHANNELS},
}
_ROTATION_SEED = 0x5EED
_LARGEST_TILE = 1024


def wire_dtype(dtype: torch.dtype) -> DType:
    """Return the wire name of a training dtype. Raises WireError for dtypes that links do not carry."""
    if dtype not in _WIRE:
        raise WireError(f"links carry float32, float16 and bfloat16, not {dtype}")
    return _WIRE[dtype]


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return the torch dtype of a wire name."""
    return _TORCH[dtype]


def as_bytes(x: Tensor) -> Tensor:
    """View a tensor's memory as uint8 [n], in row-major order."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def of_bytes(data: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Make a new tensor from the bytes of uint8 [n], at any address."""
    return data.clone().view(dtype).reshape(shape) if data.numel() else data.new_empty(shape, dtype=dtype)


class Codec(Protocol):
    """Rows of a tensor to bytes and back. `method`, `bits` and `payload_dtype` go into the packet's header."""

    @property
    def method(self) -> PayloadMethod:
        """Coding of the values."""

    @property
    def bits(self) -> int:
        """Bits of a code; 0 for plain values."""

    @property
    def payload_dtype(self) -> DType:
        """Dtype of plain values."""

    def payload_bytes(self, tokens: int, hidden: int) -> int:
        """Return the bytes of an encoded [tokens, hidden]."""

    def encode(self, x_TH: Tensor, payload: Tensor, seed: int = 0, packet: Tensor | None = None) -> list[FiniteFlag]:
        """Encode rows into a payload.

        Args:
            x_TH: Rows in any training dtype; not modified.
            payload: uint8 [payload_bytes], beside x.
            seed: Seed of stochastic rounding.
            packet: Packet that contains the payload; quantizing codecs write its checksum on the way, see
                `ops.encode_batch`.

        Returns:
            Flags of x being encodable, to be checked before the payload is used; empty if all values are.
        """

    def decode(self, payload: Tensor, tokens: int, hidden: int) -> Tensor:
        """Return [tokens, hidden] beside the payload: float32, or the payload's own dtype for plain values."""


@dataclass(frozen=True)
class Cast:
    """Plain values in `dtype`."""

    dtype: torch.dtype
    method: PayloadMethod = PayloadMethod.CAST
    bits: int = 0

    @property
    def payload_dtype(self) -> DType:
        return wire_dtype(self.dtype)

    def payload_bytes(self, tokens: int, hidden: int) -> int:
        return tokens * hidden * self.dtype.itemsize

    def encode(self, x_TH: Tensor, payload: Tensor, seed: int = 0, packet: Tensor | None = None) -> list[FiniteFlag]:
        y_TH = x_TH.detach().to(self.dtype)
        payload.copy_(as_bytes(y_TH))
        if self.dtype != torch.float16 or x_TH.dtype == torch.float16 or not x_TH.numel():
            return []
        # The flag carries the largest magnitude for the error: x is not kept, and may have changed by then.
        low, high = torch.aminmax(x_TH.detach())
        most = torch.maximum(high, -low).to(torch.float32)  # NaN if any value is
        bits = most.view(torch.int32).to(torch.int64)
        flag = torch.where(most.to(self.dtype).isfinite(), ops.ALL_FINITE, bits).reshape(1)
        return [FiniteFlag(flag, _float16_overflow)]

    def decode(self, payload: Tensor, tokens: int, hidden: int) -> Tensor:
        _check_length(payload, self.payload_bytes(tokens, hidden))
        return of_bytes(payload, self.dtype, (tokens, hidden))


@dataclass(frozen=True)
class Quantized:
    """Q_b (docs/algorithms.md, 1.2): scales of channels, if any; scales (float32) of all groups; the packed codes.

    error: if given, each packet takes the fewest bits that keep it, at most `bits`; None: `bits` for every packet.
    gain: "least_error" or "unbiased"; with scales of channels only.
    """

    bits: int
    rounding: str = "nearest"
    scale: str = "max"
    group_size: int | None = None
    error: ConstantError | None = None
    gain: str = "least_error"
    payload_dtype: DType = DType.FLOAT32

    @property
    def method(self) -> PayloadMethod:
        return _METHODS[self.scale]

    def allows(self, bits: int) -> bool:
        """Return True if a packet may have so many bits."""
        return bits == self.bits if self.error is None else self.error.min <= bits <= self.error.max

    def with_bits(self, bits: int) -> Self:
        """Return the codec of one packet, after its bits are chosen."""
        return self if self.error is None else replace(self, bits=bits, error=None)

    def fewest_bits(self, visits: list[ops.EncodeItem]) -> int:
        """Choose the bits of a packet with these samples, each after `before`."""
        e = self.error
        return self.bits if e is None else ops.fewest_bits(visits, e.error, e.min, e.max)

    def encode_fewest(self, visits: list[ops.EncodeItem], payload: Tensor) -> tuple[Tensor, FiniteFlag]:
        """Encode these samples with the bits that `fewest_bits` chooses, into room for the most bits.

        Returns:
            The bits, int64 [1] beside the payload, whose beginning is what `with_bits` of them encodes; and the flag of
            all values being encodable.
        """
        assert self.error is not None
        return ops.encode_fewest(visits, payload, self.error.error, self.error.min, self.error.max)

    def payload_bytes(self, tokens: int, hidden: int, *, changes: bool = False) -> int:
        """Return the bytes of an encoded [tokens, hidden]. changes: from cached activations, which both ends hold."""
        sent = tokens and (self.scale == SENT or (self.scale == CACHED and not changes))
        return (block_bytes(hidden) if sent else 0) + tokens * ops.quantized_row_bytes(
            hidden, self.bits, self.group_size
        )

    def options(self, seed: int = 0) -> ops.QuantizerOptions:
        """Return the kernels' options."""
        return ops.QuantizerOptions(self.bits, self.group_size, self.scale, self.rounding, seed, self.gain)

    def before(self, x_TH: Tensor) -> Tensor:
        """Transform rows before they are quantized."""
        return x_TH.detach().contiguous()

    def after(self, y_TH: Tensor) -> Tensor:
        """Undo `before` on decoded rows."""
        return y_TH

    def encode(self, x_TH: Tensor, payload: Tensor, seed: int = 0, packet: Tensor | None = None) -> list[FiniteFlag]:
        return [ops.encode_batch([ops.EncodeItem(self.before(x_TH), None, self.options(seed))], payload, packet=packet)]

    def decode(self, payload: Tensor, tokens: int, hidden: int) -> Tensor:
        _check_length(payload, self.payload_bytes(tokens, hidden))
        y_TH = payload.new_empty((tokens, hidden), dtype=torch.float32)
        ops.decode_batch(payload, [ops.DecodeItem(y_TH, self.options())])
        return self.after(y_TH)


# Note: Rotation
# A randomized Walsh-Hadamard rotation spreads outliers, so that a few large values do not set the scale of a whole row.
# A row of H values is cut into tiles of 1024, 256, 64, 16, 4 and 1 values, the largest first: powers of 4, whose square
# roots are powers of two, so that scaling rounds nothing. Each tile's values get signs from a fixed seed and go through
# the transform, which is its own inverse up to rounding. Every operation is one float32 addition, so both ends of a
# link and all devices compute the same bits.
class Rotated(Quantized):
    """Q_b of rotated rows, rotated back after decoding. For values themselves, not for their changes."""

    def before(self, x_TH: Tensor) -> Tensor:
        return rotate(x_TH.detach())

    def after(self, y_TH: Tensor) -> Tensor:
        return rotate_back(y_TH)


def rotate(x_TH: Tensor) -> Tensor:
    """Rotate rows of any float dtype; float32 [T, H]. See Note [Rotation]."""
    return _transform(x_TH.to(torch.float32) * _signs(x_TH.shape[1], x_TH.device))


def rotate_back(y_TH: Tensor) -> Tensor:
    """Undo `rotate` up to rounding; float32 [T, H]."""
    return _transform(y_TH) * _signs(y_TH.shape[1], y_TH.device)


def tiles(hidden: int) -> list[int]:
    """Return the lengths of the tiles of a row."""
    out, length = [], _LARGEST_TILE
    while hidden:
        out += [length] * (hidden // length)
        hidden %= length
        length //= 4
    return out


@functools.lru_cache(maxsize=16)
def _signs(hidden: int, device: torch.device) -> Tensor:
    return 1.0 - 2.0 * (random_bits(_ROTATION_SEED, 0, hidden, device) & 1).to(torch.float32)


def _transform(x_TH: Tensor) -> Tensor:
    """Apply the orthonormal Walsh-Hadamard transform to each tile."""
    start, out = 0, torch.empty_like(x_TH)
    T, lengths = x_TH.shape[0], tiles(x_TH.shape[1])
    for length in sorted(set(lengths), reverse=True):
        count = lengths.count(length)
        width = length * count
        part = x_TH[:, start : start + width].reshape(T, count, length)
        step = 1
        while step < length:
            pairs = part.reshape(T, count, length // (2 * step), 2, step)
            a, b = pairs[..., 0, :], pairs[..., 1, :]
            part = torch.stack([a + b, a - b], dim=-2)
            step *= 2
        out[:, start : start + width] = part.reshape(T, width) * length**-0.5
        start += width
    return out


@dataclass(frozen=True)
class TopK:
    """The largest share of each group's values, quantized; the others decode to zero (paper, H.6: "bw8[0.2]").

    Payload: positions in their shorter form, scales, packed codes of the kept values.
    """

    bits: int
    share: float
    rounding: str = "nearest"
    scale: str = "max"
    group_size: int | None = None
    method: PayloadMethod = PayloadMethod.TOP_K
    payload_dtype: DType = DType.FLOAT32

    def _kept(self, hidden: int) -> tuple[int, Quantized]:
        """Return the number of values kept in a row, and their codec."""
        group = ops.top_k_group_size(hidden, self.share, self.group_size)
        kept = ops.top_k_kept(hidden, self.share, self.group_size)
        return kept, Quantized(self.bits, self.rounding, self.scale, group)

    def payload_bytes(self, tokens: int, hidden: int) -> int:
        kept, inner = self._kept(hidden)
        return tokens * ops.position_bytes(hidden, kept)[1] + inner.payload_bytes(tokens, kept)

    def encode(self, x_TH: Tensor, payload: Tensor, seed: int = 0, packet: Tensor | None = None) -> list[FiniteFlag]:
        kept, inner = self._kept(x_TH.shape[-1])
        cut = x_TH.shape[0] * ops.position_bytes(x_TH.shape[-1], kept)[1]
        values_TK, index_TK = ops.top_k_select(x_TH.detach(), self.share, group_size=self.group_size)
        payload[:cut] = ops.pack_positions(index_TK, x_TH.shape[-1]).reshape(-1)
        return inner.encode(values_TK, payload[cut:], seed, packet)

    def decode(self, payload: Tensor, tokens: int, hidden: int) -> Tensor:
        _check_length(payload, self.payload_bytes(tokens, hidden))
        kept, inner = self._kept(hidden)
        row = ops.position_bytes(hidden, kept)[1]
        try:
            index_TK = ops.unpack_positions(payload[: tokens * row].view(tokens, row), hidden, kept)
        except ShapeError as error:
            raise WireError(f"payload: {error}") from error
        return ops.top_k_scatter(inner.decode(payload[tokens * row :], tokens, kept), index_TK, hidden)


@dataclass(frozen=True)
class DeltaCodecs:
    """The codecs of one direction whose samples are sent as changes of cached values.

    Attributes:
        change: Codec of changes.
        first: Codec of first visits; None for plain values (`first_bits` 0).
        flags: Whether the payload begins with a bit per token: its change is sent (1), or the value itself (0).
    """

    change: Quantized
    first: Quantized | None
    flags: bool = False

    @property
    def first_bits(self) -> int:
        """Bits of first visits, as in the packet's header."""
        return 0 if self.first is None else self.first.bits

    @property
    def fixed(self) -> bool:
        """True if all packets have the same bits."""
        return self.change.error is None and (self.first is None or self.first.error is None)

    def first_visit(self, dtype: torch.dtype) -> Codec:
        """Return the codec of a first visit. dtype: of the stages."""
        return self.first or Cast(dtype)

    def allows_first(self, bits: int) -> bool:
        """Return True if a packet may have first visits of so many bits."""
        return bits == 0 if self.first is None else self.first.allows(bits)

    def with_bits(self, bits: int, first_bits: int) -> DeltaCodecs:
        """Return the codecs of one packet, after its bits are chosen."""
        first = None if self.first is None else self.first.with_bits(first_bits)
        return DeltaCodecs(self.change.with_bits(bits), first, self.flags)

    def payload_bytes(self, changed: int, new: int, hidden: int, dtype: torch.dtype) -> int:
        """Return the bytes of samples that are encoded together, without flags.

        Args:
            changed: Their tokens that are sent as changes.
            new: Their tokens that are first visits.
            hidden: H.
            dtype: Dtype of the stages.
        """
        first = self.first_visit(dtype).payload_bytes(new, hidden)
        return self.change.payload_bytes(changed, hidden, changes=True) + first

    def fitted(self, changes: list[ops.EncodeItem], firsts: list[ops.EncodeItem]) -> DeltaCodecs:
        """Return the codecs of a packet with these samples, with the fewest bits allowed where it has none."""
        first_bits = 0 if self.first is None else self.first.fewest_bits(firsts)
        return self.with_bits(self.change.fewest_bits(changes), first_bits)

    def head_bytes(self, tokens: int) -> int:
        """Return the bytes of the flags at the beginning of a payload."""
        return (tokens + 7) // 8 if self.flags else 0

    def before(self, x_nH: Tensor, *, delta: bool) -> Tensor:
        """Transform a sample's rows before they, or their change, are quantized; see `Quantized.before`."""
        return x_nH if delta or self.first is None else self.first.before(x_nH)

    def visit(self, x_nH: Tensor, m_nH: Tensor | None, *, delta: bool, seed: int = 0) -> ops.EncodeItem:
        """Describe a sample, after `before`, to the encoder: a change moves m, a first visit sets it."""
        return ops.EncodeItem(x_nH, m_nH, self._options(delta, seed), delta)

    def arriving(self, m_nH: Tensor, dtype: torch.dtype, *, delta: bool) -> ops.DecodeItem:
        """Describe a sample to the decoder. dtype: of plain values."""
        return ops.DecodeItem(m_nH, self._options(delta), delta, dtype)

    def _options(self, delta: bool, seed: int = 0) -> ops.QuantizerOptions | None:
        codec = self.change if delta else self.first
        return None if codec is None else codec.options(seed)

    def first_m(self, decoded_nH: Tensor) -> Tensor:
        """Return m after a first visit, from its decoded values."""
        return decoded_nH if self.first is None else self.first.after(decoded_nH)

    def change_is_smaller(self, change_nH: Tensor, x_nH: Tensor) -> Tensor:
        """Return bool [n]: rows that lose less as changes than as they are."""
        return self.squared_scales(change_nH) < self.squared_scales(x_nH)

    def squared_scales(self, x_nH: Tensor) -> Tensor:
        """Sum the squared scales of each row's groups, weighted by their lengths: float64 [n].

        The quantization error is proportional to it (docs/algorithms.md, 1.2).
        """
        if self.change.scale != "max":
            return x_nH.double().square().sum(1)
        n, hidden = x_nH.shape
        size = self.change.group_size or hidden
        groups, missing = -(-hidden // size), -hidden % size  # missing: of the last group
        padded = torch.nn.functional.pad(x_nH.abs(), (0, missing)) if missing else x_nH.abs()
        widths = torch.full((groups,), size, dtype=torch.float64, device=x_nH.device)
        widths[-1] -= missing
        return (padded.view(n, groups, size).amax(2).double().square() * widths).sum(1)


@dataclass(frozen=True)
class Clustered:
    """Rows as changes from cluster centers: packed numbers of their centers, scales of all changes, packed codes.

    Attributes:
        change: Codec of the changes.
        clusters: C, a power of two, so that every number of `number_bits` bits is a center's.
    """

    change: Quantized
    clusters: int

    @property
    def method(self) -> PayloadMethod:
        """Coding of the values."""
        plain = self.change.method is PayloadMethod.QUANTIZED
        return PayloadMethod.CLUSTERED if plain else PayloadMethod.CLUSTERED_CHANNELS

    @property
    def number_bits(self) -> int:
        """Bits of a center's number."""
        return (self.clusters - 1).bit_length()

    def head_bytes(self, tokens: int) -> int:
        """Return the bytes of the numbers of so many rows."""
        return (tokens * self.number_bits + 7) // 8

    def payload_bytes(self, tokens: int, hidden: int) -> int:
        """Return the bytes of an encoded [tokens, hidden]."""
        return self.head_bytes(tokens) + self.change.payload_bytes(tokens, hidden, changes=True)

    def with_bits(self, bits: int) -> Clustered:
        """Return the codec of one packet, after the bits of its changes are chosen."""
        return replace(self, change=self.change.with_bits(bits))

    def fitted(self, x_TH: Tensor, c_TH: Tensor) -> Clustered:
        """Return the codec of a packet of x, whose rows build on the centers c."""
        return self.with_bits(self.change.fewest_bits([ops.EncodeItem(x_TH, c_TH, self.change.options(), True)]))

    def encode(
        self, x_TH: Tensor, number_T: Tensor, c_TH: Tensor, payload: Tensor, packet: Tensor | None, seed: int
    ) -> FiniteFlag:
        """Encode rows, and set c to what they decode to.

        Args:
            x_TH: Rows in any training dtype.
            number_T: Numbers of their centers.
            c_TH: Their centers, float32; changed in place to what the other end computes with.
            payload: uint8 [payload_bytes] beside x.
            packet: As for `ops.encode_batch`.
            seed: Seed of stochastic rounding.

        Returns:
            The flag of all values being encodable; if not, payload and c are undefined.
        """
        head = self.head_bytes(x_TH.shape[0])
        payload[:head] = ops.pack_bits(number_T[None], self.number_bits)[0]
        visit = ops.EncodeItem(x_TH, c_TH, self.change.options(seed), True)
        return ops.encode_batch([visit], payload[head:], packet=packet)

    def numbers(self, payload: Tensor, tokens: int) -> Tensor:
        """Read the numbers of a payload's centers, int64 [tokens], all below C."""
        packed = payload[None, : self.head_bytes(tokens)]
        return ops.unpack_bits(packed, self.number_bits, tokens)[0].to(torch.int64)

    def decode(self, payload: Tensor, c_TH: Tensor) -> None:
        """Add a payload's changes to the centers of its rows, float32 [T, H], in place."""
        arriving = ops.DecodeItem(c_TH, self.change.options(), True)
        ops.decode_batch(payload[self.head_bytes(c_TH.shape[0]) :], [arriving])


def encoded(codec: Codec, x_TH: Tensor, seed: int = 0) -> Tensor:
    """Encode into a new payload. Raises NonFiniteError for values that cannot be encoded."""
    payload = x_TH.new_empty(codec.payload_bytes(*x_TH.shape), dtype=torch.uint8)
    for flag in codec.encode(x_TH, payload, seed):
        flag.check()
    return payload


def _float16_overflow(bits: int) -> NonFiniteError:
    """Make the error for a largest magnitude of these bits."""
    most = float(torch.tensor(bits, dtype=torch.int32).view(torch.float32))
    return NonFiniteError(f"values up to {most:.4g} do not fit float16 (65504): use bf16, direct or aqsgd")


def _check_length(payload: Tensor, expected: int) -> None:
    if payload.numel() != expected:
        raise WireError(f"payload of {payload.numel()} bytes where {expected} were expected")
