"""How far a stage runs ahead: more where it waits for gradients, not more than helps or memory allows."""

from __future__ import annotations

import pytest
import torch

from pipecomp.in_flight import InFlight, KeptBytes, free_bytes
from pipecomp.predict import StepCosts, order_of_work, step_seconds
from pipecomp.schedule import TrainSchedule


def run(chosen: InFlight, needed: int, steps: int = 40) -> list[int]:
    """Steps of 1 s in which a stage waits until `needed` micro-batches are in flight."""
    values = []
    for _ in range(steps):
        values.append(chosen.value)
        chosen.observe(0.1 * max(0, needed - chosen.value), 1.0)
    return values


@pytest.mark.parametrize("needed", [2, 3, 5, 8])
def test_auto_finds_what_is_needed(needed):
    values = run(InFlight("auto", 2, 8), needed)
    assert values[0] == 2
    assert values[-1] == needed
    assert max(values) <= needed + 1


def test_auto_goes_back_where_more_does_not_help():
    chosen = InFlight("auto", 2, 8)
    for _ in range(20):
        chosen.observe(0.5, 1.0)  # the next stage is slow: waiting has nothing to do with the link
    assert chosen.value == 2


def test_settled_numbers_are_tried_again():
    chosen = InFlight("auto", 2, 8)
    run(chosen, 2)
    assert run(chosen, 4, steps=200)[-1] == 4


def test_memory_limits_it():
    chosen = InFlight("auto", 2, 8)
    chosen.allow(bytes_each=100, free_bytes=800)
    assert run(chosen, 8)[-1] == 4  # a quarter of 800 bytes has room for two more


@pytest.mark.parametrize(("setting", "least", "found"), [(5, 2, 5), (1, 3, 3), (99, 2, 8), (5, 1, 1), ("auto", 1, 1)])
def test_fixed_numbers_and_the_last_stage(setting, least, found):
    chosen = InFlight(setting, least, 8)
    assert run(chosen, 8)[-1] == found


def test_what_a_forward_keeps_is_counted_once():
    x, w = torch.randn(64, 32), torch.randn(32, 16, requires_grad=True)
    kept = KeptBytes()
    with kept.counting():
        y = (x @ w).exp()
        (y * y).sum()
    assert kept.bytes >= 64 * 32 * 4 + 64 * 16 * 4
    assert kept.bytes <= 2 * (64 * 32 * 4 + 64 * 16 * 4 + 32 * 16 * 4)
    assert free_bytes(torch.device("cpu")) > 0


@pytest.mark.parametrize("in_flight", [None, 2, 3, 6, 20])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_prediction_plays_the_engines_order(stage, in_flight):
    least = 3 - stage
    value = InFlight("auto" if in_flight is None else in_flight, least, 6).value
    steps = TrainSchedule(6, 3, stage, value).steps()
    names = {"ForwardPass": "forward", "BackwardPass": "backward"}
    kinds = [names[type(i).__name__] for step in steps for i in step if type(i).__name__ in names]
    assert kinds == [what for what, _ in order_of_work(stage, 3, 6, in_flight)]


def test_running_ahead_hides_a_slow_link():
    """DESIGN: c + T a micro-batch with two in flight at K = 2, max(c, T) with three."""
    c, T = 1.0, 0.9
    costs = StepCosts(
        forward_s=[c / 3] * 2, backward_s=[2 * c / 3] * 2, forward_bytes=[T / 8], backward_bytes=[T / 8],
        micro_batches=100,
    )  # fmt: skip
    assert step_seconds(costs, 1.0) / 100 == pytest.approx(c + T, rel=0.05)
    assert step_seconds(costs, 1.0, in_flight=4) / 100 == pytest.approx(c, rel=0.05)
