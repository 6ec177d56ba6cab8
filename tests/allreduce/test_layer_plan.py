"""The plan of adaptive compression: against all plans of small cases, under its limit, for many layers."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecomp.allreduce.adaptive import STEPS, choose_values

positive = st.floats(1e-6, 1e6)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[float]], list[list[float]], int, float]:
    """Errors that fall and bytes that rise from one value to the next, as bits have them."""
    layers, values = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    rows = st.lists(positive, min_size=values, max_size=values)
    errors = [sorted(draw(rows), reverse=True) for _ in range(layers)]
    costs = [sorted(draw(rows)) for _ in range(layers)]
    return errors, costs, draw(st.integers(0, values - 1)), draw(st.floats(0.3, 3))


def total(rows: list[list[float]], plan: list[int]) -> float:
    return sum(row[i] for row, i in zip(rows, plan, strict=True))


@settings(max_examples=300, deadline=None)
@given(case=cases())
def test_no_plan_under_the_limit_takes_fewer_bytes(
    case: tuple[list[list[float]], list[list[float]], int, float],
) -> None:
    """Rounding errors up costs at most a step for each layer: plans with that much room below the limit are beaten."""
    errors, costs, own, factor = case
    layers, uniform = len(errors), [own] * len(errors)
    limit = factor * total(errors, uniform)
    found = choose_values(errors, costs, own, factor)
    every = list(itertools.product(range(len(errors[0])), repeat=layers))
    fitting = [list(plan) for plan in every if total(errors, list(plan)) <= limit * (1 - layers / STEPS)]
    if fitting:
        assert total(errors, found) <= limit * (1 + 1e-9)
        assert total(costs, found) <= min(total(costs, plan) for plan in fitting) * (1 + 1e-9)
    if factor >= 1:
        assert total(costs, found) <= total(costs, uniform)
    if not any(total(errors, list(plan)) <= limit for plan in every):
        assert total(errors, found) == min(total(errors, list(plan)) for plan in every)


def test_layers_of_different_scale_need_fewer_bytes_than_one_width_for_all() -> None:
    """Errors as of b-bit rounding, d · scale² · 4^-b: a value's bits should follow the logarithm of its scale."""
    bits, own = [2, 3, 4, 5, 6, 8], 2
    draw = torch.Generator().manual_seed(0)
    sizes = [1000 + int(10_000 * float(torch.rand((), generator=draw))) for _ in range(200)]
    scales = [10 ** (3 * float(torch.rand((), generator=draw))) for _ in range(200)]
    errors = [[d * scale**2 * 4.0**-b for b in bits] for d, scale in zip(sizes, scales, strict=True)]
    costs = [[d * b / 8 for b in bits] for d in sizes]
    uniform = [own] * len(sizes)
    found = choose_values(errors, costs, own, 1.0)
    assert total(errors, found) <= total(errors, uniform)
    assert total(costs, found) < 0.8 * total(costs, uniform)
    more = choose_values(errors, costs, own, 2.0)
    assert total(costs, more) < total(costs, found)
    assert total(errors, more) <= 2 * total(errors, uniform)


def test_without_errors_all_layers_keep_their_own_value() -> None:
    assert choose_values([[0.0, 0.0]] * 3, [[1.0, 2.0]] * 3, 1, 1.0) == [1, 1, 1]


def test_the_own_value_fits_where_rounding_says_that_nothing_does() -> None:
    """A third of the limit for each of three layers is no whole number of steps."""
    assert choose_values([[1.0, 1.0]] * 3, [[1.0, 2.0]] * 3, 1, 1.0) == [1, 1, 1]
