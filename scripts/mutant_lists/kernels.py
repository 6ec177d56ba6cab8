"""Defects in kernels/: the quantizers."""

from __future__ import annotations

from scripts.mutant_lists.mutant import Mutant

MUTANTS = (
    Mutant(
        "the delta's sign",
        "kernels/reference.py",
        "quantize(a.to(torch.float32) - m, options, name)",
        "quantize(m - a.to(torch.float32), options, name)",
        ("tests/kernels/test_quantize.py",),
        "cached activations run away from the true ones",
    ),
    Mutant(
        "codes of half the range",
        "kernels/reference.py",
        "u_RGn * float(1 << options.bits - 1)",
        "u_RGn * float(1 << options.bits)",
        ("tests/kernels/test_quantize.py",),
        "a scale that is off by one bit: large values are clipped",
    ),
    Mutant(
        "constant error: relative to the change",
        "kernels/distortion.py",
        "power_R = halved_sum(x_RH * x_RH)",
        "power_R = halved_sum(v_RH * v_RH)",
        ("tests/kernels/test_distortion.py::test_of_a_change_the_error_is_relative_to_the_value_itself",),
        "small changes get as many bits as the values themselves",
    ),
)
