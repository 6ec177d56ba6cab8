"""The counter-based random numbers: uniform, and uncorrelated between neighbouring elements and neighbouring seeds."""

from __future__ import annotations

import pytest
import torch

from pipecomp.kernels.ops import mix_seed
from pipecomp.kernels.reference import reproducible

N = 1 << 16
SEEDS = [0, 1, 2, 12345, 2**63 - 1]


@pytest.mark.parametrize("seed", SEEDS)
def test_uniform_over_intervals_and_bits(seed):
    u = reproducible.uniform(seed, 0, N)
    assert float(u.min()) >= 0
    assert float(u.max()) < 1
    counts = torch.histc(u, 256, 0, 1)
    chi_square = ((counts - N / 256) ** 2 / (N / 256)).sum()
    assert 150 < chi_square < 380  # 255 degrees of freedom: beyond 5 standard deviations on either side
    bits = (reproducible.random_bits(seed, 0, N).unsqueeze(1) >> torch.arange(32)) & 1
    assert float((bits.double().mean(0) - 0.5).abs().max()) < 5 * 0.5 / N**0.5


@pytest.mark.parametrize("seed", SEEDS)
def test_neighbouring_elements_are_uncorrelated(seed):
    u = reproducible.uniform(seed, 0, N + 4096).double() - 0.5
    for lag in (1, 2, 3, 7, 8, 64, 768, 1024, 1600, 4096):
        assert abs(float((u[:N] * u[lag : N + lag]).mean())) * 12 < 5 / N**0.5, lag


def test_neighbouring_seeds_are_uncorrelated():
    streams = torch.stack([reproducible.uniform(seed, 0, N) for seed in [*range(10), *(2**k for k in range(5, 60, 9))]])
    correlation = torch.corrcoef(streams.double()) - torch.eye(len(streams))
    assert float(correlation.abs().max()) < 5.5 / N**0.5
    for seed in range(6):
        differ = reproducible.random_bits(seed, 0, N) ^ reproducible.random_bits(seed + 1, 0, N)
        shares = ((differ.unsqueeze(1) >> torch.arange(32)) & 1).double().mean(0)
        assert float((shares - 0.5).abs().max()) < 5 * 0.5 / N**0.5


def test_same_position_over_many_seeds_is_uniform_and_serially_uncorrelated():
    draws = torch.cat([reproducible.uniform(seed, 17, 1) for seed in range(8192)]).double()
    counts = torch.histc(draws, 64, 0, 1)
    assert float(((counts - 128) ** 2 / 128).sum()) < 130  # 63 degrees of freedom
    centered = draws - 0.5
    assert abs(float((centered[1:] * centered[:-1]).mean())) * 12 < 5 / 8192**0.5


def test_a_range_is_part_of_the_whole_also_across_a_block_of_two_to_the_32():
    whole = reproducible.random_bits(7, 2**32 - 50, 100)
    assert torch.equal(whole[30:70], reproducible.random_bits(7, 2**32 - 20, 40))
    assert torch.equal(whole[50:], reproducible.random_bits(7, 2**32, 50))
    assert not torch.equal(reproducible.random_bits(7, 0, 50), reproducible.random_bits(7, 2**32, 50))
    assert reproducible.random_bits(7, 5, 0).numel() == 0


def test_golden_values():
    assert reproducible.random_bits(1, 0, 3).tolist() == [668435567, 456100299, 2364436956]
    assert mix_seed(1, 2, 3) == 2483275583555102644


def test_mixed_seeds_differ_by_value_order_and_count():
    seeds = {mix_seed(*v) for v in [(), (0,), (0, 0), (1,), (0, 1), (1, 0), (-1,), (2**64,), (2**64 - 1,)]}
    assert len(seeds) == 7  # -1 is 2**64 - 1, and 2**64 is 0, in 64 bits
    assert all(0 <= s < 2**63 for s in seeds)
    many = {mix_seed(a, b, c) for a in range(20) for b in range(20) for c in range(20)}
    assert len(many) == 8000
