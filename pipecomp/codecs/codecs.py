"""Codecs: a tensor of token rows to bytes and back, without memory of earlier tensors.

Shapes: T real tokens of a micro-batch (or of one sample), H hidden size. Every codec's byte count follows from T and H
alone, so a receiver can check a payload's length before it looks inside.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from pipecomp.codecs.wire import DType, Method
from pipecomp.config.activations import ConstantError
from pipecomp.errors import NonFiniteError, ShapeError, WireError
from pipecomp.kernels import ops

_TORCH = {DType.FLOAT32: torch.float32, DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16}
_WIRE = {v: k for k, v in _TORCH.items()}


def wire_dtype(dtype: torch.dtype) -> DType:
    """Wire name of a training dtype. Raises WireError for dtypes that links do not carry."""
    if dtype not in _WIRE:
        raise WireError(f"links carry float32, float16 and bfloat16, not {dtype}")
    return _WIRE[dtype]


def torch_dtype(dtype: DType) -> torch.dtype:
    """Find the torch dtype behind a wire name."""
    return _TORCH[dtype]


def as_bytes(x: Tensor) -> Tensor:
    """View a tensor's memory as uint8 [n], in row-major order."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def of_bytes(data: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Make a new tensor with the bytes of uint8 [n], which may lie at any address."""
    return data.clone().view(dtype).reshape(shape) if data.numel() else data.new_empty(shape, dtype=dtype)


class Codec(Protocol):
    """A tensor of rows to bytes and back. `method`, `bits` and `payload_dtype` go into the packet's header."""

    @property
    def method(self) -> Method:
        """How values are coded."""

    @property
    def bits(self) -> int:
        """Bits of a code; 0 where values are not quantized."""

    @property
    def payload_dtype(self) -> DType:
        """The dtype of plain values."""

    def payload_bytes(self, tokens: int, hidden: int) -> int:
        """Bytes of an encoded [tokens, hidden]."""

    def encode(
        self, x_TH: Tensor, payload: Tensor, seed: int = 0, packet: Tensor | None = None
    ) -> list[ops.FiniteFlag]:
        """Write the payload, uint8 [payload_bytes] beside x. `seed` drives stochastic rounding.

        packet: in which the payload lies; what quantizes makes its check on the way, see `ops.encode_batch`. Returns
        what tells whether x could be encoded, to be checked before the payload is used; nothing if all can.
        """

    def decode(self, payload: Tensor, tokens: int, hidden: int) -> Tensor:
        """[tokens, hidden] in float32, or in the payload's own dtype for plain values, beside the payload."""


@dataclass(frozen=True)
class Cast:
    """Plain values in `dtype`."""

    dtype: torch.dtype
    method: Method = Method.CAST
    bits: int = 0

    @property
    def payload_dtype(self) -> DType:
        """The dtype of plain values."""
        return wire_dtype(self.dtype)

    def payload_bytes(self, tokens: int, hidden: int) -> int:
        """Count the bytes of an encoded [tokens, hidden]; see Codec."""
        return tokens * hidden * self.dtype.itemsize

    def encode(
        self, x_TH: Tensor, payload: Tensor, seed: int = 0, packet: Tensor | None = None
    ) -> list[ops.FiniteFlag]:
        """Write the payload; see Codec."""
        y_TH = x_TH.detach().to(self.dtype)
        payload.copy_(as_bytes(y_TH))
        if self.dtype != torch.float16 or x_TH.dtype == torch.float16 or not x_TH.numel():
            return []
        # What is said of values that do not fit travels with the flag: x is not kept, and may have changed by then.
        low, high = torch.aminmax(x_TH.detach())
        most = torch.maximum(high, -low).to(torch.float32)  # NaN if any value is
        bits = most.view(torch.int32).to(torch.int64)
        flag = torch.where(most.to(self.dtype).isfinite(), ops.ALL_FINITE, bits).reshape(1)
        return [ops.FiniteFlag(flag, _too_large)]

    def decode(self, payload: Tensor, tokens: int, hidden: int) -> Tensor:
        """Undo `encode`; see Codec."""
        _check_length(payload, self.payload_bytes(tokens, hidden))
        return of_bytes(payload, self.dtype, (tokens, hidden))


@dataclass(frozen=True)
class Quantized:
    """Q_b (docs/algorithms.md, 1.2): scales (float32) of all groups, then the packed codes.

    error: keeps it with the fewest bits of each packet; `bits` are then the most. None: `bits` of every packet.
    """

    bits: int
    rounding: str = "nearest"
    scale: str = "max"
    group_size: int | None = None
    error: ConstantError | None = None
    method: Method = Method.QUANTIZED
    payload_dtype: DType = DType.FLOAT32

    def may_have(self, bits: int) -> bool:
        """Whether a packet may have so many."""
        return bits == self.bits if self.error is None else self.error.min <= bits <= self.error.max

    def of_packet(self, bits: int) -> Self:
        """Make the codec of one packet, which has so many bits."""
        return self if self.error is None else replace(self, bits=bits, error=None)

    def fewest(self, visits: list[ops.EncodeItem]) -> int:
        """Choose the bits of a packet with these samples, each after `before`."""
        e = self.error
        return self.bits if e is None else ops.fewest_bits(visits, e.error, e.min, e.max)

    def encode_fewest(self, visits: list[ops.EncodeItem], payload: Tensor) -> tuple[Tensor, ops.FiniteFlag]:
        """Encode these samples with the bits of `fewest`, where there is room for the most.

        Returns the bits, int64 [1] beside the payload, whose beginning is what `of_packet` of them encodes; and what
        `encode` does.
        """
        assert self.error is not None
        return ops.encode_fewest(visits, payload, self.error.error, self.error.min, self.error.max)

    def payload_bytes(self, tokens: int, hidden: int) -> int:
        """Count the bytes of an encoded [tokens, hidden]; see Codec."""
        return tokens * ops.quantized_row_bytes(hidden, self.bits, self.group_size)

    def options(self, seed: int = 0) -> ops.QuantizerOptions:
        """What kernels are told."""
        return ops.QuantizerOptions(self.bits, self.group_size, self.scale, self.rounding, seed)

    def before(self, x_TH: Tensor) -> Tensor:
        """Make what is quantized of x."""
        return x_TH.detach().contiguous()

    def after(self, y_TH: Tensor) -> Tensor:
        """Undo `before`, of decoded values."""
        return y_TH

    def encode(
        self, x_TH: Tensor, payload: Tensor, seed: int = 0, packet: Tensor | None = None
    ) -> list[ops.FiniteFlag]:
        """Write the payload; see Codec."""
        return [ops.encode_batch([ops.EncodeItem(self.before(x_TH), None, self.options(seed))], payload, packet=packet)]

    def decode(self, payload: Tensor, tokens: int, hidden: int) -> Tensor:
        """Undo `encode`; see Codec."""
        _check_length(payload, self.payload_bytes(tokens, hidden))
        y_TH = payload.new_empty((tokens, hidden), dtype=torch.float32)
        ops.decode_batch(payload, [ops.DecodeItem(y_TH, self.options())])
        return self.after(y_TH)


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
    method: Method = Method.TOP_K
    payload_dtype: DType = DType.FLOAT32

    def _kept(self, hidden: int) -> tuple[int, Quantized]:
        group = ops.top_k_group_size(hidden, self.share, self.group_size)
        return ops.top_k_kept(hidden, self.share, self.group_size), Quantized(
            self.bits, self.rounding, self.scale, group
        )

    def payload_bytes(self, tokens: int, hidden: int) -> int:
        """Count the bytes of an encoded [tokens, hidden]; see Codec."""
        kept, inner = self._kept(hidden)
        return tokens * ops.position_bytes(hidden, kept)[1] + inner.payload_bytes(tokens, kept)

    def encode(
        self, x_TH: Tensor, payload: Tensor, seed: int = 0, packet: Tensor | None = None
    ) -> list[ops.FiniteFlag]:
        """Write the payload; see Codec."""
        kept, inner = self._kept(x_TH.shape[-1])
        cut = x_TH.shape[0] * ops.position_bytes(x_TH.shape[-1], kept)[1]
        values_TK, index_TK = ops.top_k_select(x_TH.detach(), self.share, group_size=self.group_size)
        payload[:cut] = ops.pack_positions(index_TK, x_TH.shape[-1]).reshape(-1)
        return inner.encode(values_TK, payload[cut:], seed, packet)

    def decode(self, payload: Tensor, tokens: int, hidden: int) -> Tensor:
        """Undo `encode`; see Codec."""
        _check_length(payload, self.payload_bytes(tokens, hidden))
        kept, inner = self._kept(hidden)
        row = ops.position_bytes(hidden, kept)[1]
        try:
            index_TK = ops.unpack_positions(payload[: tokens * row].view(tokens, row), hidden, kept)
        except ShapeError as error:
            raise WireError(f"payload: {error}") from error
        return ops.top_k_scatter(inner.decode(payload[tokens * row :], tokens, kept), index_TK, hidden)


def encoded(codec: Codec, x_TH: Tensor, seed: int = 0) -> Tensor:
    """Encode into a new payload. Raises NonFiniteError where that cannot be."""
    payload = x_TH.new_empty(codec.payload_bytes(*x_TH.shape), dtype=torch.uint8)
    for verdict in codec.encode(x_TH, payload, seed):
        verdict.check()
    return payload


def _too_large(bits: int) -> NonFiniteError:
    """Make the error for values up to that of these bits."""
    most = float(torch.tensor(bits, dtype=torch.int32).view(torch.float32))
    return NonFiniteError(f"values up to {most:.4g} do not fit float16 (65504): use bf16, direct or aqsgd")


def _check_length(payload: Tensor, expected: int) -> None:
    if payload.numel() != expected:
        raise WireError(f"payload of {payload.numel()} bytes where {expected} were expected")
