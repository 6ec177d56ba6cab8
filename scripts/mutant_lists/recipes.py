"""Defects in pipecomp/recipes/: resuming."""

from __future__ import annotations

from scripts.mutant_lists.mutant import Mutant

MUTANTS = (
    Mutant(
        "a checkpoint that one machine lacks",
        "pipecomp/recipes/resume.py",
        "return set.intersection(",
        "return set.union(",
        ("tests/recipes/test_resume.py",),
        "machines go on from different steps, or not at all",
    ),
)
