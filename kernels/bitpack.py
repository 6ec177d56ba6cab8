"""Rows of small unsigned integers as dense little-endian bit streams, in plain torch.

Bit i * bits of a row's stream is the lowest bit of value i; stream bit k is bit k mod 8 of byte k div 8; padding bits
are zero. R: rows, n: values in a row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """Pack values (any integer dtype, [..., n], each in [0, 2**bits); higher bits are cut off), bits 1 to 24.

    Returns uint8 [..., ceil(n * bits / 8)].
    """
    n = values.shape[-1]
    size_bytes = (n * bits + 7) // 8
    lead = values.shape[:-1]
    if n == 0 or values.numel() == 0:
        return torch.zeros((*lead, size_bytes), dtype=torch.uint8, device=values.device)
    values_Rn = values.reshape(-1, n)
    if bits > 8:
        # Whole bytes first, then the rest: a stream of `bits`-bit values is one of single bits.
        bits_Rk = (values_Rn.to(torch.int64).unsqueeze(-1) >> torch.arange(bits, device=values.device)) & 1
        return pack_bits(bits_Rk.flatten(1).to(torch.uint8), 1).reshape(*lead, size_bytes)
    values_Rn = pad(values_Rn, (0, -n % 8)).to(torch.int64) & ((1 << bits) - 1)
    octets = values_Rn.reshape(values_Rn.shape[0], -1, 8)
    word = octets[..., 0].clone()
    for i in range(1, 8):
        word |= octets[..., i] << (i * bits)
    packed_Rk = word.unsqueeze(-1).view(torch.uint8)[..., :bits].flatten(1)
    return packed_Rk[:, :size_bytes].reshape(*lead, size_bytes)


def unpack_bits(codes: Tensor, bits: int, count: int) -> Tensor:
    """Undo `pack_bits`: codes uint8 [..., ceil(count * bits / 8)] to int32 [..., count]."""
    lead = codes.shape[:-1]
    if count == 0 or codes.numel() == 0:
        return torch.zeros((*lead, count), dtype=torch.int32, device=codes.device)
    codes_Rk = codes.reshape(-1, codes.shape[-1])
    if bits > 8:
        bits_Rk = unpack_bits(codes_Rk, 1, count * bits).reshape(codes_Rk.shape[0], count, bits)
        shift = torch.arange(bits, dtype=torch.int32, device=codes.device)
        return (bits_Rk << shift).sum(-1, dtype=torch.int32).reshape(*lead, count)
    codes_Rk = pad(codes_Rk, (0, -codes_Rk.shape[1] % bits))
    word = pad(codes_Rk.reshape(codes_Rk.shape[0], -1, bits), (0, 8 - bits)).contiguous().view(torch.int64)
    shift = torch.arange(0, 8 * bits, bits, device=codes.device)
    values = ((word >> shift) & ((1 << bits) - 1)).to(torch.int32)
    return values.flatten(1)[:, :count].reshape(*lead, count)
