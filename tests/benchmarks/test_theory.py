"""The papers' theorems on small problems: those that hold, and where they do not."""

from __future__ import annotations

import pytest

from benchmarks import theory
from benchmarks.theory import ROOT_HALF, c_q, rows_of


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_sum_of_errors_is_below_the_lemma(bits):
    """AQ-SGD, Lemma A.2: wherever c_Q is below √½, errors are at most a multiple of the activations' changes."""
    claim = theory.delta_sum(bits)
    assert 0 < claim.measured <= claim.bound


@pytest.mark.parametrize("bits", [2, 4])
def test_gradients_fall_as_the_theorem_says(bits):
    """AQ-SGD, Theorem 3.1: 16 times as many steps divide the mean of ‖∇f‖² by at least 4, and not by much more."""
    claim = theory.rate(bits, steps=400)
    assert 0.9 * claim.bound < claim.measured <= claim.bound


def test_quantizer_constant_needs_bits_and_light_tails():
    """Theorem 3.1's condition; with 4 bits the default keeps it on Gaussian rows, with 2 bits not on heavy tails."""
    gaussian, heavy = rows_of("Gaussian"), rows_of("heavy tails")
    assert c_q(gaussian, 4) < c_q(gaussian, 2) < ROOT_HALF < c_q(gaussian, 1)
    assert c_q(heavy, 2) > ROOT_HALF > c_q(heavy, 6)
    assert c_q(gaussian, 2, rounding="stochastic") > ROOT_HALF, "unbiased rounding costs error"
    assert c_q(gaussian, 2, "rms") < c_q(gaussian, 2)


@pytest.mark.parametrize("n", [2, 4])
def test_linear_levels_are_within_theorem_3_3(n):
    [claim] = theory.theorem_3_3(n, exponential=False)
    assert 0 < claim.measured <= claim.bound


@pytest.mark.parametrize("n", [2, 5])
def test_exponential_levels_exceed_theorem_3_3_by_the_variance_of_the_reduction(n):
    stated, grown = theory.theorem_3_3(n, exponential=True, equal=True)
    assert stated.bound < stated.measured <= grown.bound


@pytest.mark.parametrize(
    "claim",
    [theory.lemma_5, theory.lemma_7, lambda: theory.convex("qsgd_mn", 4), lambda: theory.convex("qsgd_mn_ts", [4, 8])],
    ids=["Lemma 5", "Lemma 7", "Theorem 6", "Theorem 8"],
)
def test_qsgd_mn_is_within_its_bounds(claim):
    found = claim()
    assert 0 < found.measured <= found.bound


def test_casq_contracts():
    """Theorem 1: the expectation is shrunk towards the cluster's mean, and the error is below the gradient's norm."""
    assert [claim.what for claim in theory.casq_theorem_1() if not claim.holds] == []
