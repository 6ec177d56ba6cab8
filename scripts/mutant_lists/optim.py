"""Defects in pipecomp/optim/: QuantizedAdam."""

from __future__ import annotations

from scripts.mutant_lists.mutant import Mutant

MUTANTS = (
    Mutant(
        "momenta are exchanged if the first of a bucket has a gradient",
        "pipecomp/optim/exchange.py",
        "if not any(piece.owner in active for piece in bucket):",
        "if bucket[0].owner not in active:",
        ("tests/test_optim.py::test_a_parameter_without_any_gradient_does_not_change",),
        "other parameters go on by old momenta, and do not learn",
    ),
    Mutant(
        "the unit of a momentum by all values",
        "pipecomp/optim/adam.py",
        "max(1, int(variance.count_nonzero()))",
        "max(1, variance.numel())",
        ("tests/test_optim.py::test_values_without_gradient_do_not_make_less_usual",),
        "where most rows of an embedding are unused, rounding errors move values that have hardly any gradient",
    ),
)
