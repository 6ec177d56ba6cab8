"""Defects in pipecomp/messages/: codecs and packets."""

from __future__ import annotations

from scripts.mutant_lists.mutant import Mutant

CONSTANT_ERROR = (
    "tests/stages/test_constant_error.py::test_changes_have_the_fewest_bits_that_keep_the_error_of_the_values",
)
WIRE = ("tests/messages/test_wire.py",)
CODEC_LENGTHS = ("tests/messages/test_codecs.py::test_a_payload_of_another_length_is_refused",)

MUTANTS = (
    Mutant(
        "a delta is set, not added",
        "pipecomp/messages/link_codecs.py",
        "codec.options(), delta, dtype",
        "codec.options(), False, dtype",
        ("tests/stages/test_link.py::test_algorithm_1",),
        "the next stage trains on the last change alone",
    ),
    Mutant(
        "constant error: always the most bits",
        "pipecomp/messages/codecs.py",
        "return self.bits if e is None else ops.fewest_bits(visits, e.error, e.min, e.max)",
        "return self.bits",
        CONSTANT_ERROR,
        "packets are as long as if no error had been set",
    ),
    Mutant(
        "constant error: any bits are taken",
        "pipecomp/messages/codecs.py",
        "if self.error is None else self.error.min <= bits <= self.error.max",
        "if self.error is None else True",
        ("tests/stages/test_constant_error.py::test_bits_out_of_range_are_refused",),
        "a packet that was not made by this configuration is taken for one",
    ),
    Mutant(
        "a payload longer than its values need",
        "pipecomp/messages/codecs.py",
        "if payload.numel() != expected:",
        "if payload.numel() < expected:",
        CODEC_LENGTHS,
        "a packet that was not made by this code is taken for one",
    ),
    Mutant(
        "top-k's rounding without the seed",
        "pipecomp/messages/codecs.py",
        "inner.encode(values_TK, payload[cut:], seed, packet)",
        "inner.encode(values_TK, payload[cut:], 0, packet)",
        ("tests/stages/test_link_exact.py::test_rounding_draws_anew_for_another",),
        "the same rounding noise in every step: errors that should average out add up",
    ),
    Mutant(
        "bytes behind a packet",
        "pipecomp/messages/wire.py",
        "if packet.size != expected:",
        "if packet.size < expected:",
        WIRE,
        "a packet that was not made by this code is taken for one",
    ),
    Mutant(
        "a packet's checksum is not compared",
        "pipecomp/messages/wire.py",
        "if check != sent_check:",
        "if False:",
        WIRE,
        "a flipped bit becomes part of training",
    ),
)
