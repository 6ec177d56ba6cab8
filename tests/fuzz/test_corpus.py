"""The fuzzers' committed inputs, and a few changed ones, through every target: no error but the project's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings

from pipecomp.codecs.codecs import Clustered, TopK
from pipecomp.codecs.wire import Form, PacketKind, PayloadMethod
from pipecomp.stages.link.delta_coding import DeltaCoder
from tests.fuzz.run import mutated
from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
INPUTS = {target: [path.read_bytes() for path in sorted((CORPUS / target).iterdir())] for target in TARGETS}


@pytest.mark.parametrize("target", TARGETS)
def test_committed_inputs(target):
    assert INPUTS[target]
    for data in (b"", *INPUTS[target]):
        TARGETS[target](data)


def test_every_decoder_is_reached(monkeypatch):
    """And packets are not only refused before: changes both ways, channels, top-k gradients, cluster centers."""
    decode, found, methods = DeltaCoder.decode, set(), set()
    reached = {kind: [] for kind in (TopK, Clustered)}
    for kind, done in reached.items():
        monkeypatch.setattr(kind, "decode", _noting(kind.decode, done))

    def noted(self, header, *args):
        decoded = decode(self, header, *args)
        methods.add(header.method)
        found.update((header.kind, sample.form) for sample in header.samples)
        return decoded

    monkeypatch.setattr(DeltaCoder, "decode", noted)
    for data in INPUTS["wire"]:
        TARGETS["wire"](data)
    assert found >= {
        (kind, form) for kind in (PacketKind.ACTIVATION, PacketKind.GRADIENT) for form in (Form.FULL, Form.DELTA)
    }
    assert methods >= {PayloadMethod.CHANNELS, PayloadMethod.CACHED_CHANNELS}
    assert all(reached.values()), reached


def _noting(decode, done):
    def noted(*args, **options):
        decoded = decode(*args, **options)
        done.append(1)
        return decoded

    return noted


@pytest.mark.parametrize("target", TARGETS)
def test_changed_inputs(target):
    @settings(max_examples=30, deadline=None, database=None)
    @given(mutated(INPUTS[target]))
    def fuzz(data: bytes) -> None:
        TARGETS[target](data)

    fuzz()
