"""Defects in pipecomp/local_steps/: outer steps."""

from __future__ import annotations

from scripts.mutant_lists.mutant import Mutant

OUTER = ("tests/local_steps/test_outer_steps.py",)
ROWS = ("tests/local_steps/test_row_rates.py",)

MUTANTS = (
    Mutant(
        "rates of rows count the noise of quantized averages",
        "pipecomp/local_steps/row_rates.py",
        "there = lengths * share",
        "there = lengths * 1.0",
        ROWS,
        "with few bits replicas take outer steps that are too short",
    ),
    Mutant(
        "an outer step forgets the steps that were taken while it was on its way",
        "pipecomp/local_steps/common.py",
        "self._common[name] + (own - then)",
        "self._common[name] + 0 * (own - then)",
        OUTER,
        "a part of the training is done for nothing",
    ),
    Mutant(
        "the outer momentum begins anew after a resume",
        "pipecomp/local_steps/common.py",
        "if name in momentum:",
        "if False:",
        OUTER,
        "a run that goes on takes outer steps that are too short, and ends with another loss",
    ),
)
