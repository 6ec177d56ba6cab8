"""Micro-batches in flight: more where stages wait for gradients, not more than helps or memory allows."""

from __future__ import annotations

from collections import Counter
from itertools import chain, pairwise

import pytest
import torch

from pipecomp.schedule import InFlight, SavedTensorBytes, in_flight_counts, train_order


def run(chosen: InFlight, needed: int, steps: int = 40) -> list[int]:
    """Steps of 1 s in which a stage waits until `needed` micro-batches are in flight."""
    values = []
    for _ in range(steps):
        values.append(chosen.value)
        chosen.observe(0.1 * max(0, needed - chosen.value), 1.0)
    return values


@pytest.mark.parametrize("needed", [2, 3, 5, 8])
def test_auto_finds_what_is_needed(needed):
    values = run(InFlight("auto", 0, 2, 8), needed)
    assert values[0] == 2
    assert values[-1] == needed
    assert max(values) <= needed + 1


def test_auto_goes_back_where_more_does_not_help():
    chosen = InFlight("auto", 0, 2, 8)
    seen = set()
    for _ in range(250):  # it is tried again meanwhile
        seen.add(chosen.value)
        chosen.observe(0.5, 1.0)  # the next stage is slow: waiting has nothing to do with the link
    assert seen == {2, 3}
    assert chosen.value == 2


def test_a_single_slow_step_changes_nothing():
    chosen = InFlight("auto", 0, 2, 8)
    chosen.observe(0.5, 1.0)
    chosen.observe(0.0, 1.0)
    assert chosen.value == 2
    assert not chosen.observing


def test_settled_numbers_are_tried_again():
    chosen = InFlight("auto", 0, 2, 8)
    run(chosen, 2)
    assert run(chosen, 4, steps=200)[-1] == 4


def test_stages_told_the_same_stay_in_step():
    stages = [InFlight("auto", k, 4, 12) for k in range(4)]
    seen = set()
    for step in range(30):
        assert len({s.observing for s in stages}) == 1
        waited = max(0.0, 0.6 - 0.2 * stages[0].slack)
        for s in stages:
            s.observe(waited, 1.0)
        seen.add(tuple(s.value for s in stages))
        assert tuple(s.value for s in stages) in {(4, 3, 2, 1), (7, 5, 3, 1), (10, 7, 4, 1), (12, 9, 5, 1)}, step
    assert stages[0].value == 10
    assert len(seen) > 2


@pytest.mark.parametrize("slack", [1, 2, 3, 9])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 4), (2, 1), (3, 5), (5, 20)])
def test_a_stage_has_fewer_than_the_one_before(slack, stages, micro_batches):
    found = in_flight_counts(slack, stages, micro_batches)
    assert found[-1] == 1
    assert all(a > b or a == b == micro_batches for a, b in pairwise(found))
    assert max(found) <= micro_batches


def test_memory_limits_it():
    chosen = InFlight("auto", 0, 2, 8)
    chosen.limit_by_memory(bytes_each=100, free_bytes=800)
    assert run(chosen, 8)[-1] == 4  # a quarter of 800 bytes has room for two more
    middle = InFlight("auto", 1, 4, 20)
    middle.limit_by_memory(bytes_each=100, free_bytes=1600)
    assert middle.limit == 3  # 1 + 2 × 3 in flight, where 1F1B has 1 + 2


@pytest.mark.parametrize(
    ("setting", "stage", "stages", "found"),
    [(5, 0, 2, 5), (1, 0, 3, 3), (99, 0, 2, 8), (5, 1, 2, 1), (7, 1, 3, 4), ("auto", 1, 2, 1), ("auto", 0, 1, 1)],
)
def test_fixed_numbers_and_the_last_stage(setting, stage, stages, found):
    chosen = InFlight(setting, stage, stages, 8)
    if stages == 1 or stage == stages - 1 or setting != "auto":
        assert run(chosen, 8)[-1] == found


def test_what_a_forward_keeps_is_counted_once():
    x, w = torch.randn(64, 32), torch.randn(32, 16, requires_grad=True)
    kept = SavedTensorBytes()
    with kept.counting():
        y = (x @ w).exp()
        (y * y).sum()
    assert kept.bytes == 64 * 32 * 4 + 64 * 16 * 4  # x, and y, which three operations keep


def test_stages_below_the_lowest_trained_one_have_forwards_alone():
    def kinds(stage, in_flight):
        actions = chain(*train_order(stage, 4, 3, in_flight, lowest=2))
        return Counter(action.kind for action in actions)

    assert in_flight_counts(2, 4, 9, lowest=2) == (1, 1, 3, 1)
    assert kinds(0, 1) == {"load": 3, "forward": 3, "send activation": 3}
    assert kinds(1, 1) == {"receive activation": 3, "forward": 3, "send activation": 3}
    both = {"receive activation": 3, "forward": 3, "backward": 3}
    assert kinds(2, 2) == {**both, "send activation": 3, "receive gradient": 3}
    assert kinds(3, 1) == {**both, "load": 3, "send gradient": 3}
    assert [InFlight(3, stage, 4, 8, lowest=2).value for stage in range(4)] == [1, 1, 3, 1]
    assert not InFlight("auto", 0, 4, 8, lowest=3).observing, "no stage waits for gradients"
