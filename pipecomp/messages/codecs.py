"""Codecs: a tensor of token rows to bytes and back, without memory of earlier tensors.

Shapes: T real tokens of a micro-batch (or of one sample), H hidden size. Every codec's byte count follows from T and H
alone, so a receiver can check a payload's length before it looks inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pipecomp.errors import NonFiniteError, ShapeError, WireError
from pipecomp.kernels import ops
from pipecomp.messages.wire import DType, Method

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


def to_bytes(x: Tensor) -> np.ndarray:
    """View the memory of a tensor as uint8 [n], on the host; a copy where it has to be moved."""
    return x.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()


def from_bytes(data: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Make a new tensor with the bytes of uint8 [n]."""
    if data.size == 0:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(data.copy()).view(dtype).reshape(shape).to(device)


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

    def encode(self, x_TH: Tensor, seed: int = 0) -> list[np.ndarray]:
        """uint8 arrays that make the payload, in order. `seed` drives stochastic rounding."""

    def decode(self, payload: np.ndarray, tokens: int, hidden: int, device: torch.device) -> Tensor:
        """[tokens, hidden] in float32, or in the payload's own dtype for plain values."""


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

    def encode(self, x_TH: Tensor, seed: int = 0) -> list[np.ndarray]:
        """Make the payload; see Codec."""
        y_TH = x_TH.detach().to(self.dtype)
        if self.dtype == torch.float16 and x_TH.dtype != torch.float16 and not bool(torch.isfinite(y_TH).all()):
            raise NonFiniteError(
                f"values up to {float(x_TH.abs().max()):.4g} do not fit float16 (65504): use bf16, direct or aqsgd"
            )
        return [to_bytes(y_TH)]

    def decode(self, payload: np.ndarray, tokens: int, hidden: int, device: torch.device) -> Tensor:
        """Undo `encode`; see Codec."""
        _check_length(payload, self.payload_bytes(tokens, hidden))
        return from_bytes(payload, self.dtype, (tokens, hidden), device)


@dataclass(frozen=True)
class Quantized:
    """Q_b (docs/algorithms.md, 1.2): scales (float32) of all groups, then the packed codes."""

    bits: int
    rounding: str = "nearest"
    scale: str = "max"
    group_size: int | None = None
    method: Method = Method.QUANTIZED
    payload_dtype: DType = DType.FLOAT32

    def payload_bytes(self, tokens: int, hidden: int) -> int:
        """Count the bytes of an encoded [tokens, hidden]; see Codec."""
        scales = 4 * ops.groups(hidden, self.group_size)
        return tokens * (scales + ops.row_bytes(hidden, self.bits, self.group_size))

    def encode(self, x_TH: Tensor, seed: int = 0) -> list[np.ndarray]:
        """Make the payload; see Codec."""
        codes, scale = ops.quantize(
            x_TH.detach(), self.bits, group_size=self.group_size, scale=self.scale, rounding=self.rounding, seed=seed
        )
        return [to_bytes(scale), to_bytes(codes)]

    def encode_delta_(self, x_TH: Tensor, m_TH: Tensor, seed: int = 0) -> list[np.ndarray]:
        """Payload of Q_b(x − m); m [T, H] float32 becomes what the receiver will hold."""
        codes, scale = ops.delta_quantize_(
            x_TH.detach(),
            m_TH,
            self.bits,
            group_size=self.group_size,
            scale=self.scale,
            rounding=self.rounding,
            seed=seed,
        )
        return [to_bytes(scale), to_bytes(codes)]

    def decode(self, payload: np.ndarray, tokens: int, hidden: int, device: torch.device) -> Tensor:
        """Undo `encode`; see Codec."""
        codes, scale = self._split(payload, tokens, hidden, device)
        return ops.dequantize(
            codes, scale, self.bits, (tokens, hidden), group_size=self.group_size, rounding=self.rounding
        )

    def decode_delta_(self, payload: np.ndarray, m_TH: Tensor) -> None:
        """m ← m + deq(payload), bit for bit what `encode_delta_` made of the sender's m."""
        tokens, hidden = m_TH.shape
        codes, scale = self._split(payload, tokens, hidden, m_TH.device)
        ops.dequantize(
            codes, scale, self.bits, (tokens, hidden), group_size=self.group_size, rounding=self.rounding, add_to=m_TH
        )

    def _split(self, payload: np.ndarray, tokens: int, hidden: int, device: torch.device) -> tuple[Tensor, Tensor]:
        _check_length(payload, self.payload_bytes(tokens, hidden))
        groups = ops.groups(hidden, self.group_size)
        cut = 4 * tokens * groups
        shape = (tokens,) if self.group_size is None else (tokens, groups)
        scale = from_bytes(payload[:cut], torch.float32, shape, device)
        row = ops.row_bytes(hidden, self.bits, self.group_size)
        return from_bytes(payload[cut:], torch.uint8, (tokens, row), device), scale


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

    def encode(self, x_TH: Tensor, seed: int = 0) -> list[np.ndarray]:
        """Make the payload; see Codec."""
        _, inner = self._kept(x_TH.shape[-1])
        values_TK, index_TK = ops.top_k_select(x_TH.detach(), self.share, group_size=self.group_size)
        return [to_bytes(ops.pack_positions(index_TK, x_TH.shape[-1])), *inner.encode(values_TK, seed)]

    def decode(self, payload: np.ndarray, tokens: int, hidden: int, device: torch.device) -> Tensor:
        """Undo `encode`; see Codec."""
        _check_length(payload, self.payload_bytes(tokens, hidden))
        kept, inner = self._kept(hidden)
        row = ops.position_bytes(hidden, kept)[1]
        packed = from_bytes(payload[: tokens * row], torch.uint8, (tokens, row), device)
        try:
            index_TK = ops.unpack_positions(packed, hidden, kept)
        except ShapeError as error:
            raise WireError(f"payload: {error}") from error
        values_TK = inner.decode(payload[tokens * row :], tokens, kept, device)
        return ops.top_k_scatter(values_TK, index_TK, hidden)


def _check_length(payload: np.ndarray, expected: int) -> None:
    if payload.size != expected:
        raise WireError(f"payload of {payload.size} bytes where {expected} were expected")
