"""Rows' moves in an outer step: against plain arithmetic, and the same bits whatever the order of summation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pipecomp.local_steps import row_statistics
from pipecomp.local_steps.row_statistics import AHEAD, row_rates, row_sums


def replicas_of(count: int, shape: tuple[int, ...], *, noise: float) -> list[Tensor]:
    """Moves of each replica: a common part, and noise of its own."""
    draw = torch.Generator().manual_seed(count)
    common = torch.randn(shape, generator=draw)
    return [common + noise * torch.randn(shape, generator=draw) for _ in range(count)]


def rates(moved: list[Tensor], mean: Tensor | None = None) -> Tensor:
    mean = torch.stack(moved).mean(0) if mean is None else mean
    sums = torch.stack([row_sums(one, seed=7) for one in moved]).mean(0)
    return row_rates(mean, sums, len(moved))


@pytest.mark.parametrize("shape", [(400, 32), (300, 4, 8)])
@pytest.mark.parametrize("noise", [0.0, 0.5, 20.0])
def test_rows_go_as_far_as_a_replicas_own_and_four_tenths(shape, noise):
    moved = replicas_of(4, shape, noise=noise)
    lengths = torch.stack(moved).flatten(2).square().sum(2).mean(0).sqrt()
    mean = torch.stack(moved).mean(0).flatten(1).norm(dim=1)
    wanted = AHEAD * (lengths / mean).clamp(1.0, 2.0)
    # The share of noise in the mean, which has none here, is known within a tenth.
    torch.testing.assert_close(rates(moved).float(), wanted, rtol=0.15, atol=0.0)


def test_single_values_are_rows_and_exact():
    moved = replicas_of(3, (50,), noise=1.0)
    lengths = torch.stack(moved).square().mean(0).sqrt()
    wanted = AHEAD * (lengths / torch.stack(moved).mean(0).abs()).clamp(1.0, math.sqrt(3))
    torch.testing.assert_close(rates(moved).float(), wanted, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("shape", [(2, 768), (400, 32)])
def test_noise_of_a_quantized_mean_makes_no_step_shorter(shape):
    moved = replicas_of(4, shape, noise=2.0)
    mean = torch.stack(moved).mean(0)
    noisy = mean + mean.std() * 1.5 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    exact, found = rates(moved), rates(moved, noisy)
    assert float(found.mean()) == pytest.approx(float(exact.mean()), rel=0.12)
    naive = (torch.stack(moved).square().sum(2).mean(0) / noisy.square().sum(1)).sqrt().clamp(1.0, 2.0)
    assert AHEAD * naive.mean() < 0.8 * exact.mean()


def test_the_order_of_summation_changes_no_bit(monkeypatch):
    mean, order = torch.randn(64, 500, generator=torch.Generator().manual_seed(0)), torch.randperm(500)
    sums = row_sums(2 * mean, seed=0)
    wanted = row_rates(mean, sums, 4)
    assert torch.equal(row_rates(mean[:, order], sums, 4), wanted)
    monkeypatch.setattr(row_statistics, "_AT_ONCE", 1000)
    assert torch.equal(row_rates(mean, sums, 4), wanted)
    assert not torch.equal(row_rates(mean * (1 + 2**-10), sums, 4), wanted)


def test_what_has_not_moved_stays_finite():
    """A residual may come with the mean of a weight that no replica has moved, a row may be all zeros."""
    still = torch.zeros(3, 4)
    assert torch.equal(rates([still, still], still), torch.full((3,), AHEAD, dtype=torch.float64))
    assert torch.equal(rates([still, still], still + 1e-3), torch.full((3,), AHEAD, dtype=torch.float64))
    moved = [torch.eye(3), torch.eye(3)]
    moved[0][1] = moved[1][1] = 0.0
    assert torch.isfinite(rates(moved)).all()


def test_a_single_replica_is_not_moved_further():
    assert torch.equal(rates([torch.ones(5, 2)]), torch.ones(5, dtype=torch.float64))


def test_nan_stays_nan():
    moved = [torch.full((2, 3), math.nan), torch.ones(2, 3)]
    mean = torch.stack(moved).mean(0)
    assert bool((mean * rates(moved, mean)[:, None]).isnan().all())


def test_a_single_row_of_many_values_takes_no_memory_of_its_own(monkeypatch):
    """As position embeddings of shape [1, N, H] are; it has 256 directions."""
    randint, drawn = torch.randint, list[int]()
    monkeypatch.setattr(
        torch,
        "randint",
        lambda *given, generator: (drawn.append(math.prod(given[2])), randint(*given, generator=generator))[1],
    )
    moved = torch.randn(1, 100, 1000, generator=torch.Generator().manual_seed(0))
    found = row_sums(moved, seed=7)
    assert len(drawn) > 1
    assert max(drawn) <= row_statistics._AT_ONCE
    monkeypatch.setattr(row_statistics, "_AT_ONCE", 1 << 30)
    torch.testing.assert_close(found, row_sums(moved, seed=7), rtol=1e-4, atol=0.05)  # in another order
