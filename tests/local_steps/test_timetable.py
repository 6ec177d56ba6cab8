"""When fragments are averaged, and which weights they hold."""

from __future__ import annotations

import math

import pytest
import torch

from pipecomp.config.gradients import LocalSteps
from pipecomp.errors import ConfigError
from pipecomp.gradient_config import Gradients
from pipecomp.local_steps.outer_steps import Timetable, fragments_of


def played(options: LocalSteps, steps: int) -> dict[int, list[int]]:
    """By step the fragments that are sent after it."""
    timetable, out = Timetable(options), {}
    for step in range(1, steps + 1):
        if due := timetable.due(step):
            out[step] = due
        timetable.finish_step(step)
    return out


@pytest.mark.parametrize(
    ("h", "fragments", "wanted"),
    [
        (3, 1, {3: [0], 6: [0], 9: [0]}),
        (4, 2, {2: [0], 4: [1], 6: [0], 8: [1]}),
        (5, 2, {3: [0], 5: [1], 8: [0]}),
        (3, 3, {step: [(step - 1) % 3] for step in range(1, 10)}),
        (1, 1, {step: [0] for step in range(1, 10)}),
    ],
)
def test_every_fragment_has_its_turn_in_each_interval(h, fragments, wanted):
    assert played(LocalSteps(local_steps=h, fragments=fragments), 9) == wanted


def test_intervals_grow_from_one_step():
    options = LocalSteps(local_steps=4, local_steps_warmup=6)
    assert list(played(options, 20)) == [1, 2, 4, 7, 11, 15, 19]


@pytest.mark.parametrize("overlap", [1, 3, 4])
@pytest.mark.parametrize("fragments", [1, 2, 3, 5])
def test_a_fragment_is_back_before_its_next_turn(overlap, fragments):
    timetable = Timetable(LocalSteps(local_steps=5, local_steps_warmup=13, fragments=fragments, overlap=overlap))
    lands: dict[int, int] = {}
    for step in range(1, 60):
        for fragment in timetable.due(step):
            assert lands.get(fragment, 0) < step
            lands[fragment] = step + timetable.overlap
        timetable.finish_step(step)
    assert len(lands) == fragments


def weights(*sizes: int) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.zeros(size) for i, size in enumerate(sizes)}


@pytest.mark.parametrize(
    ("sizes", "tied", "count", "wanted"),
    [
        ((2, 2, 4), set(), 2, [["w0", "w1"], ["w2"]]),
        ((1, 1, 1), set(), 3, [["w0"], ["w1"], ["w2"]]),
        ((100, 1, 1), set(), 3, [["w0"], ["w1"], ["w2"]]),
        ((1, 1, 100), set(), 3, [["w0"], ["w1"], ["w2"]]),
        ((4, 4, 4, 12), {"w3"}, 2, [["w3"], ["w0", "w1", "w2"]]),
        ((1, 1, 100, 100), {"w2", "w3"}, 3, [["w2", "w3"], ["w0"], ["w1"]]),
    ],
)
def test_fragments_are_of_about_equal_size(sizes, tied, count, wanted):
    assert fragments_of(weights(*sizes), tied, count) == wanted


def test_more_fragments_than_weights_are_refused():
    with pytest.raises(ConfigError, match=r"gradients\.fragments: got 3"):
        fragments_of(weights(1, 1), set(), 3)
    with pytest.raises(ConfigError, match=r"got 3, allowed: at most 2"):
        fragments_of(weights(1, 1, 1), {"w0", "w1"}, 3)


REFUSED = {
    "local_steps": {"local_steps": 0},
    "outer": {"outer": {"lr": 0.5}},
    "fragments": {"fragments": 2},
    "overlap": {"local_steps": 4, "overlap": 4},
    "second_moments": {"local_steps": 4, "second_moments": "all"},
    "mixing": {"local_steps": 4, "mixing": 0.5},
    "outer.momentum": {"local_steps": 4, "outer": {"momentum": 1.0}},
    "outer.lr": {"local_steps": 4, "outer": {"lr": 0}},
    "outer.optimizer": {"local_steps": 4, "outer": {"optimizer": "adam"}},
    "outer.rate": {"local_steps": 4, "outer": {"rate": 1}},
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_makes_no_sense_is_refused(key):
    assert_refused(key, REFUSED[key])


@pytest.mark.parametrize(
    ("key", "value"), [("local_steps_warmup", 3), ("fragments", 2), ("overlap", 1), ("second_moments", "own")]
)
def test_what_needs_several_local_steps_is_refused_with_one(key, value):
    assert_refused(key, {"local_steps": 1, key: value})
    default = LocalSteps(local_steps=1).as_dict()[key]
    assert Gradients(method="none", local_steps=1, **{key: default}).local == LocalSteps(local_steps=1)


def assert_refused(key, given):
    with pytest.raises(ConfigError) as caught:
        Gradients(method="none", **given)
    assert caught.value.key == f"gradients.{key}"


@pytest.mark.parametrize("lr", [math.nan, math.inf, 10**400], ids=["nan", "inf", "10**400"])
def test_a_rate_is_a_number_that_floats_hold(lr):
    with pytest.raises(ConfigError) as caught:
        Gradients(method="none", local_steps=4, outer={"lr": lr})
    assert caught.value.key == "gradients.outer.lr"


def test_an_optimizer_that_exchanges_takes_no_local_steps():
    with pytest.raises(ConfigError) as caught:
        Gradients(method="quantized_adam", freeze_step=2, local_steps=4)
    assert caught.value.key == "gradients.local_steps"


@pytest.mark.parametrize("h", [1, 4])
def test_defaults_are_filled_in_once(h):
    once = Gradients(method="double_squeeze", local_steps=h)
    assert once.outer == {"optimizer": "sgd", "lr": None, "momentum": 0.0}
    assert Gradients(**once.as_dict()) == once
    assert "local_steps" not in once.state_options()
    assert not set(Gradients(method="double_squeeze").as_dict()) & {"local_steps", "outer", "overlap"}
