"""Defects in pipecomp/data.py: batches and samples' ids."""

from __future__ import annotations

from scripts.mutant_lists.mutant import Mutant

MUTANTS = (
    Mutant(
        "replicas have each other's samples",
        "pipecomp/data.py",
        "torch.arange(samples)[replica::replicas]",
        "torch.arange(samples)[replicas - 1 - replica :: replicas]",
        ("tests/test_data.py",),
        "every cached activation is at the wrong replica after an update",
    ),
)
