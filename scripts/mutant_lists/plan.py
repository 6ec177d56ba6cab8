"""Defects in pipecomp/plan/: bits that are found at the start."""

from __future__ import annotations

from scripts.mutant_lists.mutant import Mutant

MUTANTS = (
    Mutant(
        "bits at the start: a rate is not looked at",
        "pipecomp/plan/auto.py",
        "line if rate is None else",
        "line if True else",
        ("tests/plan/test_measure.py::TestDecision::test_given_rates_count_as_measured_ones",),
        "packets have more bits than their link hides",
    ),
)
