"""Other methods' codes of rows of values, in plain torch: each packs its bytes and reads them back.

Shapes: T rows (real tokens), H hidden size, N tiles of G values, R rank.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from pipecomp.codecs.codecs import Codec, Quantized, as_bytes, encoded, of_bytes
from pipecomp.errors import require
from pipecomp.kernels import ops
from pipecomp.kernels.reference import channels

RANK_BITS = 16


class Rows(Protocol):
    """Rows of values to bytes and back; no rows are no bytes."""

    def encode(self, x_TH: Tensor) -> Tensor:
        """The bytes, uint8 [n], of x in float32."""

    def decode(self, payload: Tensor, rows: int, hidden: int) -> Tensor:
        """Undo `encode`, about: float32 [rows, hidden]."""


@dataclass(frozen=True)
class Product:
    """Rows through one of the product's codecs."""

    codec: Codec

    def size(self, rows: int, hidden: int) -> int:
        """Bytes of so many rows."""
        return self.codec.payload_bytes(rows, hidden) if rows else 0

    def encode(self, x_TH: Tensor) -> Tensor:
        """See Rows."""
        return encoded(self.codec, x_TH) if len(x_TH) else x_TH.new_empty(0, dtype=torch.uint8)

    def decode(self, payload: Tensor, rows: int, hidden: int) -> Tensor:
        """See Rows."""
        return self.codec.decode(payload, rows, hidden) if rows else torch.empty(0, hidden)


@dataclass(frozen=True)
class Published:
    """DirectQ as the code of AQ-SGD's authors quantizes (DS3Lab/AC-SGD, compress/fixpoint.py).

    One scale for each hidden channel over all rows of a packet, its largest magnitude in float16. Levels are
    k / 2^(b−1) times the scale, k from −2^(b−1) to 2^(b−1) − 1: zero is one, the largest value itself is not. Rounded
    to nearest.

    Payload: scales, codes.
    """

    bits: int

    def encode(self, x_TH: Tensor) -> Tensor:
        """See Rows."""
        if not len(x_TH):
            return x_TH.new_empty(0, dtype=torch.uint8)
        half, scale_H = 1 << (self.bits - 1), x_TH.abs().amax(0).half()
        codes_TH = (x_TH / (scale_H.float() + 1e-6) * half).round().clamp(-half, half - 1) + half
        return torch.cat([as_bytes(scale_H), packed(codes_TH.to(torch.int32).reshape(-1), self.bits)])

    def decode(self, payload: Tensor, rows: int, hidden: int) -> Tensor:
        """See Rows."""
        if not rows:
            return torch.empty(0, hidden)
        half, reader = 1 << (self.bits - 1), Reader(payload)
        scale_H = reader.halves(hidden)
        codes_TH = reader.integers(rows * hidden, self.bits).reshape(rows, hidden)
        reader.end()
        return (codes_TH.float() - half) / half * scale_H


# -- rows over their channels' scales


@functools.lru_cache(maxsize=16)
def gaussian_levels(count: int) -> tuple[Tensor, Tensor]:
    """Compute the levels with the least squared error for Gaussian values (Lloyd, Max), and the bounds between them."""
    levels = torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count)
    for _ in range(2000):
        bounds = torch.cat([torch.tensor([-torch.inf]), (levels[1:] + levels[:-1]) / 2, torch.tensor([torch.inf])])
        density = (-bounds * bounds / 2).exp() / (2 * torch.pi) ** 0.5
        levels = (density[:-1] - density[1:]) / (torch.special.ndtr(bounds[1:]) - torch.special.ndtr(bounds[:-1]))
    return levels.float(), ((levels[1:] + levels[:-1]) / 2).float()


@dataclass(frozen=True)
class ChannelRows:
    """Rows over their channels' scales, then over their own rms, to the levels of `gaussian_levels`.

    levels: number of levels of every channel, 3 or a power of two; None to share `bits` out: a channel with twice the
    scale gets a bit more, from 1 to MOST_BITS, and the mean is at most `bits`. unbiased: as the product's gain.

    Payload: the product's block of channels; rms of rows, float32; codes by number of levels, five of 3 in a byte.
    """

    levels: int | None
    bits: float = 0.0
    unbiased: bool = True
    MOST_BITS: ClassVar[int] = 4

    def encode(self, x_TH: Tensor) -> Tensor:
        """See Rows."""
        if not len(x_TH):
            return x_TH.new_empty(0, dtype=torch.uint8)
        block = channels.encode_block(channels.sum_squares([x_TH]), channels.SENT)
        z_TH = x_TH / channels.decode_block(block)
        rms_T = z_TH.square().mean(1).sqrt()
        u_TH, y_TH, codes = z_TH / rms_T.clamp_min(1e-30)[:, None], torch.empty_like(z_TH), []
        levels_H = self._levels(block)
        for count in levels_H.unique().tolist():
            table, bounds = gaussian_levels(count)
            of_TN = torch.bucketize(u_TH[:, levels_H == count], bounds)
            y_TH[:, levels_H == count] = table[of_TN]
            codes.append(_packed_levels(of_TN.reshape(-1).to(torch.int32), count))
        if self.unbiased:
            rms_T = rms_T * (u_TH.square().sum(1) / (u_TH * y_TH).sum(1).clamp_min(1e-30)).clamp(0.25, 4)
        return torch.cat([block, as_bytes(rms_T), *codes])

    def decode(self, payload: Tensor, rows: int, hidden: int) -> Tensor:
        """See Rows."""
        if not rows:
            return torch.empty(0, hidden)
        reader = Reader(payload)
        block, y_TH = reader.take(hidden), torch.empty(rows, hidden)
        rms_T = of_bytes(reader.take(4 * rows), torch.float32, (rows,))
        levels_H = self._levels(block)
        for count in levels_H.unique().tolist():
            columns = levels_H == count
            of_TN = _read_levels(reader, rows * int(columns.sum()), count).reshape(rows, -1)
            y_TH[:, columns] = gaussian_levels(count)[0][of_TN]
        reader.end()
        return y_TH * rms_T[:, None] * channels.decode_block(block)

    def _levels(self, block: Tensor) -> Tensor:
        """Number of levels of each channel, int64 [H]; both ends compute it from the block."""
        if self.levels is not None:
            return torch.full((len(block),), self.levels)
        octaves_H = block.double() / 16  # a code is a sixteenth of an octave
        for sixteenth in range(16 * self.MOST_BITS, -16 * 16, -1):
            bits_H = (octaves_H - octaves_H.mean() + sixteenth / 16).round().clamp(1, self.MOST_BITS)
            if bits_H.mean() <= self.bits:
                return 1 << bits_H.long()
        return torch.full((len(block),), 2)


def _packed_levels(codes: Tensor, count: int) -> Tensor:
    """Codes below `count` as bytes: five of 3 in one, others as `packed`."""
    if count != 3:
        return packed(codes, (count - 1).bit_length())
    codes_N5 = torch.nn.functional.pad(codes, (0, -len(codes) % 5)).reshape(-1, 5)
    return (codes_N5 * torch.tensor([1, 3, 9, 27, 81])).sum(1).to(torch.uint8)


def _read_levels(reader: Reader, number: int, count: int) -> Tensor:
    """Undo `_packed_levels`: int64 [number]."""
    if count != 3:
        return reader.integers(number, (count - 1).bit_length()).long()
    bytes_N1 = reader.take((number + 4) // 5).long()[:, None]
    return (bytes_N1 // torch.tensor([1, 3, 9, 27, 81]) % 3).reshape(-1)[:number]


# -- tiles with more or fewer bits


@functools.lru_cache(maxsize=4)
def hadamard(size: int) -> Tensor:
    """The orthonormal Walsh-Hadamard matrix of a power of 2, which is its own inverse."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


@dataclass(frozen=True)
class TahQuant:
    """TAH-Quant (arXiv:2506.01352): tiles of a row, each with a zero point and a step in float16.

    A tile whose largest magnitude is at least twice the second largest swaps that value (the pivot) to its front and is
    turned by a Hadamard matrix, which spreads it over the tile. The share of the tiles whose magnitudes have the most
    entropy gets the larger number of bits; as in the paper's second version tiles, not tokens, compete for bits.

    Payload: which tiles have more bits and which are turned, a bit each; zero points; steps; places of the pivots in
    log2 G bits; codes of the tiles with fewer bits, then of those with more.
    """

    bits: tuple[int, int]
    share: float
    tile: int = 64

    def encode(self, x_TH: Tensor) -> Tensor:
        """See Rows."""
        require(x_TH.shape[1] % self.tile == 0, "tile", self.tile, f"a divisor of a row's {x_TH.shape[1]} values")
        tiles_NG = x_TH.reshape(-1, self.tile).clone()
        more_N = self._more(tiles_NG)
        two = tiles_NG.abs().topk(2, 1)
        turned_N = (two.values[:, 0] >= 2 * two.values[:, 1]) & (two.values[:, 0] > 0)
        pivots = two.indices[turned_N, 0]
        tiles_NG[turned_N] = _swapped(tiles_NG[turned_N], pivots) @ hadamard(self.tile)
        most_N = 2.0 ** self._bits_of(more_N) - 1
        zero_N = tiles_NG.amin(1).half()
        step_N = ((tiles_NG.amax(1) - zero_N.float()) / most_N).half()
        divisor_N = torch.where(step_N > 0, step_N, 1.0).float()
        codes_NG = ((tiles_NG - zero_N.float()[:, None]) / divisor_N[:, None]).round_().clamp_(min=0)
        codes_NG = codes_NG.minimum(most_N[:, None]).to(torch.int32)
        flags = [packed(mask_N.to(torch.int32), 1) for mask_N in (more_N, turned_N)]
        places = packed(pivots.to(torch.int32), self._place_bits)
        codes = [packed(codes_NG[more_N == chosen].reshape(-1), b) for chosen, b in enumerate(self.bits)]
        return torch.cat([*flags, as_bytes(zero_N), as_bytes(step_N), places, *codes])

    def decode(self, payload: Tensor, rows: int, hidden: int) -> Tensor:
        """See Rows."""
        count = rows * hidden // self.tile
        reader = Reader(payload)
        more_N, turned_N = (reader.integers(count, 1).bool() for _ in range(2))
        zero_N, step_N = (reader.halves(count) for _ in range(2))
        pivots = reader.integers(int(turned_N.sum()), self._place_bits).long()
        codes_NG = torch.empty(count, self.tile)
        for chosen, bits in enumerate(self.bits):
            mask_N = more_N == bool(chosen)
            codes_NG[mask_N] = reader.integers(int(mask_N.sum()) * self.tile, bits).float().reshape(-1, self.tile)
        reader.end()
        tiles_NG = codes_NG * step_N[:, None] + zero_N[:, None]
        tiles_NG[turned_N] = _swapped(tiles_NG[turned_N] @ hadamard(self.tile), pivots)
        return tiles_NG.reshape(rows, hidden)

    @property
    def _place_bits(self) -> int:
        return (self.tile - 1).bit_length()

    def _bits_of(self, more_N: Tensor) -> Tensor:
        return torch.where(more_N, self.bits[1], self.bits[0]).float()

    def _more(self, tiles_NG: Tensor) -> Tensor:
        """Choose the tiles that get more bits, bool [N]."""
        parts_NG = tiles_NG.abs() / tiles_NG.abs().sum(1, keepdim=True).clamp_min(1e-30)
        entropy_N = torch.special.entr(parts_NG).sum(1)
        chosen_N = torch.zeros(len(tiles_NG), dtype=torch.bool)
        chosen_N[entropy_N.topk(round(self.share * len(tiles_NG))).indices] = True
        return chosen_N


def _swapped(tiles_NG: Tensor, pivots_N: Tensor) -> Tensor:
    """Each tile with its first value and that at its pivot exchanged."""
    out_NG, each_N = tiles_NG.clone(), torch.arange(len(tiles_NG))
    out_NG[:, 0] = tiles_NG[each_N, pivots_N]
    out_NG[each_N, pivots_N] = tiles_NG[:, 0]
    return out_NG


def packed(values: Tensor, bits: int) -> Tensor:
    """Integers as bytes, uint8; nothing of none."""
    return ops.pack_bits(values, bits) if values.numel() else values.new_empty(0, dtype=torch.uint8)


class Reader:
    """Takes a payload apart, from its front."""

    def __init__(self, payload: Tensor) -> None:
        self._payload, self._at = payload, 0

    def take(self, size: int) -> Tensor:
        """The next bytes."""
        self._at += size
        return self._payload[self._at - size : self._at]

    def integers(self, count: int, bits: int) -> Tensor:
        """The next packed integers, int32 [count]."""
        size = (count * bits + 7) // 8
        return ops.unpack_bits(self.take(size), bits, count) if count else torch.empty(0, dtype=torch.int32)

    def halves(self, count: int) -> Tensor:
        """The next float16 values, float32 [count]."""
        return of_bytes(self.take(2 * count), torch.float16, (count,)).float()

    def end(self) -> None:
        """Raise ValueError unless all was taken."""
        if self._at != len(self._payload):
            raise ValueError(f"payload of {len(self._payload)} bytes where {self._at} were expected")


# -- few directions


@dataclass(frozen=True)
class LowRank:
    """All rows together as a product of two factors, of the least rank that keeps the share `energy` of the squares.

    Payload: the rank in 2 bytes; the coefficients, one row of T for each direction; the basis, R rows of H. Both go
    through `factors`, a scale for each of their rows included.
    """

    energy: float
    factors: Product = Product(Quantized(8))

    def encode(self, x_TH: Tensor) -> Tensor:
        """See Rows."""
        if not x_TH.numel():
            return x_TH.new_empty(0, dtype=torch.uint8)
        left_TQ, sizes_Q, right_QH = torch.linalg.svd(x_TH, full_matrices=False)
        squares_Q = sizes_Q.double().square()
        missing_Q = squares_Q.flip(0).cumsum(0).flip(0)  # without the directions before each
        rank = int((missing_Q > (1 - self.energy) * missing_Q[0]).sum())
        coefficients_RT = (left_TQ[:, :rank] * sizes_Q[:rank]).T.contiguous()
        head = ops.pack_bits(torch.tensor([rank], dtype=torch.int32), RANK_BITS)
        return torch.cat([head, *(self.factors.encode(part) for part in (coefficients_RT, right_QH[:rank]))])

    def decode(self, payload: Tensor, rows: int, hidden: int) -> Tensor:
        """See Rows."""
        if not rows:
            return torch.empty(0, hidden)
        reader = Reader(payload)
        rank = int(reader.integers(1, RANK_BITS))
        left_RT, right_RH = (
            self.factors.decode(reader.take(self.factors.size(rank, width)), rank, width) for width in (rows, hidden)
        )
        reader.end()
        return left_RT.T @ right_RH
