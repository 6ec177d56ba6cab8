"""The fuzzers' committed inputs, and a few changed ones, through every target: no error but the project's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings

from tests.fuzz.run import mutated
from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
INPUTS = {target: [path.read_bytes() for path in sorted((CORPUS / target).iterdir())] for target in TARGETS}


@pytest.mark.parametrize("target", TARGETS)
def test_committed_inputs(target):
    assert INPUTS[target]
    for data in (b"", *INPUTS[target]):
        TARGETS[target](data)


@pytest.mark.parametrize("target", TARGETS)
def test_changed_inputs(target):
    @settings(max_examples=30, deadline=None, database=None)
    @given(mutated(INPUTS[target]))
    def fuzz(data: bytes) -> None:
        TARGETS[target](data)

    fuzz()
