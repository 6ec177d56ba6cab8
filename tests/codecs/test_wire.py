"""The wire format: golden bytes, round trips, and that nothing but a whole message is accepted."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecomp.codecs import wire
from pipecomp.codecs.wire import DType, Form, PacketHeader, PacketKind, PayloadMethod, Sample, decode, encode
from pipecomp.errors import WireError

HEADER = PacketHeader(
    kind=PacketKind.ACTIVATION,
    method=PayloadMethod.QUANTIZED,
    dtype=DType.BFLOAT16,
    payload_dtype=DType.FLOAT32,
    bits=4,
    first_bits=8,
    link=2,
    step=258,
    micro_batch=3,
    tokens=5,
    hidden=6,
    group_size=4,
    tokens_crc=0x0A0B0C0D,
    labels_crc=0x01020304,
    samples=(Sample(7, Form.DELTA, 1, 4, 9, 10), Sample(2**40, Form.FULL, 0, 5, 0, 11)),
)
GOLDEN = (
    "50434d50"
    "0200"
    "01"
    "01"
    "02"
    "04"
    "08"
    "02"
    "00"
    "0200"
    "0201000000000000"
    "03000000"
    "02000000"
    "05000000"
    "06000000"
    "04000000"
    "0300000000000000"
    "0d0c0b0a"
    "04030201"
    "0700000000000000"
    "02"
    "01000000"
    "04000000"
    "0900000000000000"
    "0a00000000000000"
    "0000000000010000"
    "01"
    "00000000"
    "05000000"
    "0000000000000000"
    "0b00000000000000"
    "aabbcc"
)


def payload(text: str) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(text), dtype=np.uint8)


def test_golden_bytes():
    import zlib

    body = bytes.fromhex(GOLDEN)
    message = encode(HEADER, payload("aabbcc"))
    assert message.tobytes().hex() == GOLDEN + zlib.crc32(body).to_bytes(4, "little").hex()
    header, data = decode(message)
    assert header == HEADER
    assert data.tobytes() == bytes.fromhex("aabbcc")


def test_golden_without_checksum():
    message = encode(HEADER, payload("aabbcc"), checksum=False)
    assert message.tobytes().hex() == GOLDEN[:14] + "00" + GOLDEN[16:] + "00000000"
    assert decode(message)[0] == HEADER


@pytest.mark.parametrize("read", [wire.parse, wire.decode])
def test_more_samples_than_allowed_are_not_read(read, monkeypatch):
    message = encode(HEADER, payload("aabbcc"))
    read(message, max_samples=2)
    monkeypatch.setattr(wire, "Sample", lambda *fields: pytest.fail("a sample was read"))
    with pytest.raises(WireError, match="packet claims 2 samples, above the limit of 1"):
        read(message, max_samples=1)


samples = st.builds(
    lambda i, form, start, count, base, version: Sample(i, form, start, count, base, version),
    st.integers(0, 2**64 - 1),
    st.sampled_from(Form),
    st.integers(0, 500),
    st.integers(0, 500),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
)
headers = st.builds(
    PacketHeader,
    kind=st.sampled_from(PacketKind),
    method=st.sampled_from(PayloadMethod),
    link=st.integers(0, 65535),
    step=st.integers(0, 2**64 - 1),
    micro_batch=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(DType),
    payload_dtype=st.sampled_from(DType),
    bits=st.integers(0, 255),
    first_bits=st.integers(0, 255),
    tokens=st.integers(1000, 2**32 - 1),
    hidden=st.integers(0, 2**32 - 1),
    group_size=st.integers(0, 2**32 - 1),
    tokens_crc=st.integers(0, 2**32 - 1),
    labels_crc=st.integers(0, 2**32 - 1),
    samples=st.lists(samples, max_size=5).map(tuple),
)


@settings(max_examples=100)
@given(headers, st.lists(st.binary(max_size=40), max_size=3), st.booleans())
def test_round_trip(header, parts, checksum):
    message = encode(header, np.frombuffer(b"".join(parts), dtype=np.uint8), checksum=checksum)
    back, data = decode(message)
    assert back == header
    assert data.tobytes() == b"".join(parts)
    assert wire.parse(message)[0] == header


@settings(max_examples=200)
@given(st.integers(0, 8 * (59 + 66 + 3 + 4) - 1))
def test_every_flipped_bit_is_refused(bit):
    message = encode(HEADER, payload("aabbcc"))
    message[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(WireError):
        decode(message)


@given(st.binary(max_size=300))
def test_foreign_bytes_are_refused(data):
    with pytest.raises(WireError):
        decode(np.frombuffer(data, dtype=np.uint8))


@given(st.binary(max_size=120))
def test_foreign_bytes_with_our_beginning_are_refused(data):
    with pytest.raises(WireError):
        decode(np.frombuffer(b"PCMP\x02\x00" + data, dtype=np.uint8))


@pytest.mark.parametrize("cut", [0, 1, 50, 54, 60, 123])
def test_truncated(cut):
    with pytest.raises(WireError, match="bytes"):
        decode(encode(HEADER, payload("aabbcc"))[:cut])


def test_what_differed_is_named():
    message = encode(HEADER, payload(""))
    other_version = message.copy()
    other_version[4] = 9
    with pytest.raises(WireError, match="version 9, this rank reads 2"):
        decode(other_version)
    with pytest.raises(WireError, match="not from pipecomp"):
        decode(np.full(200, 65, dtype=np.uint8))
    with pytest.raises(WireError, match="limit of 2"):
        decode(encode(HEADER, payload("aabbcc")), max_payload_bytes=2)


def test_tokens_outside_the_sample_are_refused():
    beyond = dataclasses.replace(HEADER, samples=(Sample(1, Form.PLAIN, 3, 3),))
    with pytest.raises(WireError, match=r"tokens 3\.\.6 of 5"):
        decode(encode(beyond, payload("")))


@pytest.mark.parametrize("more", [1, 4, 40])
def test_bytes_behind_a_packet_are_refused(more):
    """Without a checksum nothing else would tell."""
    packet = encode(HEADER, payload("aabbcc"), checksum=False)
    with pytest.raises(WireError, match=rf"packet has {packet.size + more} bytes where its header says {packet.size}"):
        decode(np.concatenate([packet, np.zeros(more, dtype=np.uint8)]))


def test_flags_of_another_version_are_refused():
    """Without a checksum nothing else would tell."""
    packet = encode(HEADER, payload("aabbcc"), checksum=False)
    packet[7] = 4
    with pytest.raises(WireError, match="unknown flags 0x4"):
        decode(packet)


def test_values_count_with_the_bits_of_their_visits():
    header = dataclasses.replace(HEADER, samples=(*HEADER.samples, Sample(8, Form.NOT_KEPT, 0, 2)))
    assert header.quantized() == (11 * 6, (4 * 4 + 5 * 8 + 2 * 8) * 6)
    gradient = dataclasses.replace(header, kind=PacketKind.GRADIENT)  # where that form says nothing of the values
    assert gradient.quantized() == (11 * 6, (4 * 4 + 5 * 8 + 2 * 4) * 6)
    assert dataclasses.replace(header, first_bits=0).quantized() == (4 * 6, 4 * 4 * 6)


def test_a_changed_value_is_found_by_the_checksum_alone():
    packet = encode(HEADER, payload("aabbcc"))
    packet[-5] ^= 1  # the payload's last bit: no length and no code is wrong
    with pytest.raises(WireError, match="changed on the way"):
        decode(packet)
