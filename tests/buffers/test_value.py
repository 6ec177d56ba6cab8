"""The bytes of a stored value: golden values, round trips, and that nothing damaged is ever decoded."""

import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecomp.buffers.value import HEADER_BYTES, ValueFormat, read_header, unpack
from pipecomp.errors import ConfigError, NonFiniteError, ShapeError, StoreError

M_24 = torch.tensor([[1.0, -1.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]])

# Two tokens of four values, sample 7, message version 258. Payloads worked out by hand from the format's description.
HEAD = "50434d56 0100 {bits} 00 0700000000000000 0201000000000000 02000000 04000000 {group}"
GOLDEN = {
    # u = x + 1 = 2, 0, 1.5, 1; codes floor(2u) = 4 -> 3, 0, 3, 2
    (2, None): ("02", "00000000", "0000803f 00000000 b3 00"),
    # codes floor(8u) = 16 -> 15, 0, 12, 8
    (4, None): ("04", "00000000", "0000803f 00000000 0f8c 0000"),
    # groups of three: scales 1, 0 (only a zero); each group starts on a byte
    (4, 3): ("04", "03000000", "0000803f 00000000 00000000 00000000 0f0c00 000000"),
    (8, None): ("08", "00000000", "0000803f 00000000 ff00c080 00000000"),
    (16, None): ("10", "00000000", "003c 00bc 0038 0000 0000 0000 0000 0000"),
    (32, None): ("20", "00000000", "0000803f 000080bf 0000003f 00000000" + "00000000" * 4),
}
# zlib.crc32 of the bytes before the CRC and of the payload, written down once: a change needs a new format version.
GOLDEN_CRC = {
    (2, None): "07ad8f08",
    (4, None): "c2560369",
    (4, 3): "f51a9ca4",
    (8, None): "51a358f6",
    (16, None): "e87fc62c",
    (32, None): "7883ce37",
}


def golden(bits: int, group: int | None) -> bytes:
    bits_hex, group_hex, payload = GOLDEN[bits, group]
    head = bytes.fromhex(HEAD.format(bits=bits_hex, group=group_hex))
    return head + bytes.fromhex(GOLDEN_CRC[bits, group]) + bytes.fromhex(payload)


def reference(m_nH: np.ndarray, bits: int, group: int | None) -> np.ndarray:
    """deq(Q_z(m)), one float32 operation after the other."""
    if bits == 32:
        return m_nH.copy()
    if bits == 16:
        return np.clip(m_nH, -65504, 65504).astype(np.float16).astype(np.float32)
    one, half, levels = np.float32(1), np.float32(0.5), np.float32(2 ** (bits - 1))
    out = np.zeros_like(m_nH)
    width = group or m_nH.shape[1]
    for row_in, row_out in zip(m_nH, out, strict=True):
        for start in range(0, len(row_in), width):
            x = row_in[start : start + width]
            scale = np.max(np.abs(x))
            if scale < np.float32(2.0**-100):
                continue
            u = x * (one / scale) + one
            c = np.clip(np.floor(u * levels), 0, 2**bits - 1).astype(np.float32)
            row_out[start : start + width] = scale * ((c + half) / levels - one)
    return out


def messages(max_n: int = 6, max_h: int = 40):
    """Float32 messages [n, H], n = 0 included, with a spread of magnitudes."""
    shapes = st.tuples(st.integers(0, max_n), st.integers(1, max_h), st.integers(0, 2**32 - 1), st.integers(-60, 60))
    return shapes.map(lambda s: torch.randn(s[0], s[1], generator=torch.Generator().manual_seed(s[2])) * 2.0 ** s[3])


@pytest.mark.parametrize("key", GOLDEN, ids=str)
def test_golden_bytes(key):
    bits, group = key
    value = ValueFormat(bits, group).pack(7, 258, M_24, "here")
    assert value.hex() == golden(bits, group).hex()
    message = unpack(value, "here")
    assert message.version == 258
    assert np.array_equal(message.m_nH.numpy(), reference(M_24.numpy(), bits, group))


@pytest.mark.parametrize("key", GOLDEN, ids=str)
def test_every_flipped_bit_and_every_wrong_length_is_found(key):
    value = golden(*key)
    for bit in range(8 * len(value)):
        damaged = bytearray(value)
        damaged[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(StoreError, match="store of link-3, sample 7"):
            unpack(damaged, "store of link-3, sample 7")
    for wrong in (*(value[:n] for n in range(len(value))), value + b"\0"):
        with pytest.raises(StoreError):
            unpack(bytearray(wrong), "here")


@given(messages(), st.sampled_from([2, 4, 8, 16, 32]), st.none() | st.integers(1, 50), st.integers(0, 2**64 - 1))
@settings(max_examples=150, deadline=None)
def test_round_trip_is_the_reference_and_rounds_once(m_nH, bits, group, number):
    fmt = ValueFormat(bits, group)
    value = fmt.pack(number, 2**64 - 1 - number, m_nH, "here")
    assert len(value) == fmt.size(*m_nH.shape)
    message = unpack(value, "here")
    assert message.version == 2**64 - 1 - number
    assert message.m_nH.shape == m_nH.shape
    assert message.m_nH.dtype == torch.float32
    assert np.array_equal(message.m_nH.numpy(), reference(m_nH.numpy(), bits, group))
    header = read_header(value, "here")
    assert (header.sample, header.n, header.H, header.bits) == (number, *m_nH.shape, bits)
    assert header.crc == zlib.crc32(value[40:], zlib.crc32(value[:36]))
    # The same message gives the same bytes: both ends of a link compare CRCs.
    assert fmt.pack(number, 2**64 - 1 - number, m_nH.clone(), "there") == value


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_foreign_bytes_are_refused(data):
    with pytest.raises(StoreError):
        unpack(bytearray(data), "here")


@given(st.binary(min_size=33, max_size=33))
@settings(max_examples=200, deadline=None)
def test_a_header_that_announces_a_huge_value_allocates_nothing(fields):
    # Right magic and version, any numbers, even a right CRC: the length must match before anything is decoded.
    head = b"PCMV\x01\x00" + fields[:30]
    value = bytearray(head + struct.pack("<I", zlib.crc32(head)))
    if struct.unpack_from("<I", value, 24)[0] == 0:
        return  # no tokens: such a value is complete
    with pytest.raises(StoreError):
        unpack(value, "here")


@pytest.mark.parametrize(("n", "H"), [(1 << 20, 1 << 10), (1 << 16, 1 << 16), (2**31, 2**31)])
def test_what_has_more_pieces_than_can_be_numbered_is_refused(n, H):
    """Above 4 GB: at once where it is put, and of a damaged header before anybody makes room for it."""
    with pytest.raises(ShapeError, match=r"takes \d{10,} bytes, allowed: 4000000000"):
        ValueFormat(32).check(0, 1, torch.zeros(1, 1).expand(n, H), "here")
    ValueFormat(2).check(0, 1, torch.zeros(1, 1).expand(1 << 20, 1 << 10), "here", values=False)
    with pytest.raises(StoreError, match="not a header"):
        read_header(struct.pack("<4sHBBQQIIII", b"PCMV", 1, 32, 0, 0, 1, n, H, 0, 0), "here")


def test_float16_saturates_and_other_widths_refuse_what_they_cannot_hold():
    m_nH = torch.tensor([[1e5, -1e30, 65504.0, 1.0]])
    value = ValueFormat(16).pack(0, 1, m_nH, "here")
    assert unpack(value, "here").m_nH.tolist() == [[65504.0, -65504.0, 65504.0, 1.0]]
    for bits in (2, 4, 8, 16):
        for bad in (float("nan"), float("inf"), -float("inf")):
            with pytest.raises(NonFiniteError, match="store of link-0, sample 5"):
                ValueFormat(bits).check(5, 1, torch.tensor([[0.0, bad]]), "store of link-0, sample 5")
    with pytest.raises(NonFiniteError):
        ValueFormat(8).check(5, 1, torch.tensor([[2.0**101]]), "here")
    ValueFormat(16).check(5, 1, torch.tensor([[2.0**101]]), "here")
    odd = torch.tensor([[float("nan"), float("inf"), -0.0, 1e-45]])
    ValueFormat(32).check(0, 1, odd, "here")
    raw = unpack(ValueFormat(32).pack(0, 1, odd, "here"), "here").m_nH
    assert raw.view(torch.int32).tolist() == odd.view(torch.int32).tolist()


def test_what_cannot_be_stored_is_refused():
    fmt = ValueFormat(32)
    for m_nH in (torch.zeros(3), torch.zeros(1, 2, 3), torch.zeros(2, 3, dtype=torch.float16), torch.zeros(2, 0)):
        with pytest.raises(ShapeError):
            fmt.check(0, 0, m_nH, "here")
    for sample, version in ((-1, 0), (0, -1), (2**64, 0), (0, 2**64), (True, 0), (0, 1.0)):
        with pytest.raises(ConfigError):
            fmt.check(sample, version, torch.zeros(1, 1), "here")
    for bits in (0, 1, 3, 7, 12, 64, "8", True):
        with pytest.raises(ConfigError, match=r"store\.bits"):
            ValueFormat(bits)
    with pytest.raises(ConfigError):
        ValueFormat(4, 0)


def test_packing_reads_any_layout_and_leaves_it_alone():
    base = torch.arange(24.0).reshape(4, 6)
    view = base.t()[1:4]  # not contiguous
    for bits in (2, 8, 16, 32):
        fmt = ValueFormat(bits)
        assert fmt.pack(0, 1, view, "here") == fmt.pack(0, 1, view.contiguous(), "here")
    assert torch.equal(base, torch.arange(24.0).reshape(4, 6))


def test_a_decoded_message_shares_memory_only_when_asked():
    value = ValueFormat(32).pack(0, 1, M_24, "here")
    unpack(value, "here").m_nH.zero_()
    assert torch.equal(unpack(value, "here").m_nH, M_24)
    unpack(value, "here", alias=True).m_nH.zero_()
    assert not value[HEADER_BYTES:].strip(b"\0")
