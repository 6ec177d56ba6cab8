"""Averages of the papers' peers: without bias, with the bytes they say, and levels that are the best of their kind."""

from __future__ import annotations

import pytest
import torch

from benchmarks.peer_averages import BUCKET, PEERS, alq_levels, amq_levels, variance

DRAWS = 400
BIASED = "SignSGD, majority vote"


def workers(n=3, d=300):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(d, generator=draw) * 1e-3 for _ in range(n)]


@pytest.mark.parametrize("name", [name for name in PEERS if name != BIASED])
def test_averages_have_no_bias(name):
    """The mean over many draws is the mean, as far as their number allows."""
    xs = workers()
    peer = PEERS[name](len(xs), 0)
    peer.average(xs)  # IntSGD's exact first step
    means = torch.stack([peer.average(xs) for _ in range(DRAWS)])
    off = (means.mean(0) - torch.stack(xs).mean(0)) / (means.std(0) / DRAWS**0.5).clamp_min(1e-9)
    assert off.abs().max() < 5
    assert 0.7 < off.square().mean() < 1.3


def test_a_majority_votes():
    xs = [torch.tensor([1.0, -2.0, 3.0]), torch.tensor([-1.0, -1.0, 1.0]), torch.tensor([4.0, 2.0, 0.0])]
    mean = PEERS[BIASED](3, 0).average(xs)
    magnitude = sum(float(x.abs().mean()) for x in xs) / 3
    assert mean.tolist() == pytest.approx([magnitude, -magnitude, magnitude])


@pytest.mark.parametrize(
    ("name", "bits", "copies"),
    [("IntSGD, 8 bits", 8, 1.0), ("NatSGD, 9 bits", 9, 1.5), ("Qinf, 3 bits", 3, 1.5), (BIASED, 1, 1.0)],
)
def test_bytes(name, bits, copies):
    """Three workers: an all-reduce sends 4/3 of the values, a gather 2 times, which is 1.5 times as many."""
    d = 10 * BUCKET
    peer = PEERS[name](3, 0)
    peer.average([torch.ones(d)] * 3)
    stats = peer.stats()
    assert stats["bytes_raw"] == 4 * d * 4 // 3
    assert stats["bytes_sent"] / stats["bytes_raw"] == pytest.approx(copies * bits / 32, rel=2e-3)


@pytest.mark.parametrize("fit", [alq_levels, amq_levels])
def test_levels_have_less_variance_than_their_neighbours(fit):
    draw = torch.Generator().manual_seed(0)
    r = (torch.randn(20_000, generator=draw).abs() / 20).clamp_max(1).sort().values
    weight = torch.ones_like(r)
    start = torch.tensor([0.0, 0.25, 0.5, 1.0]) if fit is alq_levels else torch.tensor([0.125, 0.25, 0.5, 1.0])
    found = fit(r, weight, start)
    least = float(variance(r, weight, found))
    assert least < 0.5 * float(variance(r, weight, start))
    assert torch.all(found[1:] > found[:-1])
    for factor in (0.8, 1.25):
        moved = found.clone()
        moved[1] *= factor
        if moved[1] < moved[2] and fit is alq_levels:
            assert float(variance(r, weight, moved)) > least
