"""Flipped bits: a part of what tests/soak/bit_flips.py does for every position."""

from __future__ import annotations

import numpy as np
import pytest

from pipecomp.codecs import wire
from pipecomp.codecs.wire import Form, PacketKind
from pipecomp.errors import WireError
from pipecomp.stages.link.gloo import read_prefix, write_prefix
from tests.soak.bit_flips import Flips, flip_message, flip_value, markdown, recorded_messages, recorded_values


@pytest.fixture(scope="module")
def messages():
    return recorded_messages(hidden=6)


def test_every_kind_form_and_codec_is_recorded(messages):
    headers = [wire.parse(message)[0] for message in messages.values()]
    assert {header.kind for header in headers} == set(PacketKind)
    assert {header.method for header in headers} == set(wire.PayloadMethod)
    found = {(header.kind, sample.form) for header in headers for sample in header.samples}
    assert {form for _, form in found} == set(Form)
    assert found >= {
        (kind, form) for kind in (PacketKind.ACTIVATION, PacketKind.GRADIENT) for form in (Form.FULL, Form.DELTA)
    }


def test_flips_in_messages_are_found(messages):
    """Every position of one message, and of all others their headers' and a random part of their payloads'."""
    (first, whole), *others = messages.items()
    assert flip_message(first, whole).missed == ()
    rng = np.random.default_rng(0)
    for name, message in others:
        bits = {*rng.integers(0, 8 * message.size, 20).tolist(), *range(0, 8 * 59, 23)}
        for bit in bits:
            damaged = message.copy()
            damaged[bit // 8] ^= 1 << (bit % 8)
            with pytest.raises(WireError):
                wire.decode(damaged)
        wire.decode(message)
        assert len(bits) > 25, name


def test_flips_in_values_are_found():
    for name, value in recorded_values(hidden=5).items():
        done = flip_value(name, value)
        assert (done.flipped, done.missed) == (8 * len(value), ())


def test_flips_in_a_frames_beginning_are_found():
    """A changed kind or length would leave the receiver waiting for the rest."""
    frame = np.zeros(64, dtype=np.uint8)
    write_prefix(frame, 1, 44, 44)
    assert read_prefix(frame, 3) == (1, 44, 44)
    for bit in range(8 * 20):
        frame[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(WireError, match="rank 3 sent bytes"):
            read_prefix(frame, 3)
        frame[bit // 8] ^= 1 << (bit % 8)


def test_what_goes_unnoticed_is_counted():
    """Without a checksum the payload's flips pass: the count must say so."""
    message = wire.encode(
        wire.PacketHeader(kind=PacketKind.INVENTORY, method=wire.PayloadMethod.TABLE, link=0, step=0, micro_batch=0),
        np.arange(4, dtype=np.uint8),
        checksum=False,
    )
    done = flip_message("unchecked", message)
    assert set(range(8 * 59, 8 * 63)) <= set(done.missed)
    text = markdown([done, Flips("other", 1, 8, ())], "command")
    assert f"{done.flipped + 8:,} flips, {len(done.missed):,} not detected" in text
