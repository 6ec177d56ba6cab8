"""Outer steps of replicas in one process: what they come to, exactly, and what they keep for going on."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pipecomp.config.gradients import NESTEROV, LocalSteps, Outer
from pipecomp.local_steps.outer_steps import OuterSteps
from pipecomp.local_steps.row_statistics import SecondMoments

SIZES = {"a": (3, 2), "b": (4,), "c": (5,)}


class Meeting:
    """Averages of several replicas that take turns: means are known when all have put in, so flights need overlap."""

    def __init__(self, replicas: int) -> None:
        self._replicas, self._calls = replicas, [0] * replicas
        self._given: dict[int, list[dict[str, Tensor]]] = {}

    def of(self, replica: int) -> Meeting.Seat:
        return Meeting.Seat(self, replica)

    class Seat:
        def __init__(self, meeting: Meeting, replica: int) -> None:
            self._meeting, self._replica = meeting, replica

        def submit_named(self, tensors: dict[str, Tensor], *, label: str = "") -> Callable[[], None]:
            meeting = self._meeting
            number = meeting._calls[self._replica]
            meeting._calls[self._replica] += 1
            meeting._given.setdefault(number, []).append({k: t.clone() for k, t in tensors.items()})

            def wait() -> None:
                given = meeting._given[number]
                assert len(given) == meeting._replicas, "waited before all had sent"
                for name, tensor in tensors.items():
                    tensor.copy_(torch.stack([each[name] for each in given]).mean(0))

            return wait


def moved(replica: int, step: int, name: str) -> Tensor:
    """Return an inner step's change."""
    draw = torch.Generator().manual_seed(1000 * step + 10 * replica + ord(name))
    return torch.randn(SIZES[name], generator=draw, dtype=torch.float64)


def start(options: LocalSteps, replicas: int) -> tuple[list[dict[str, Tensor]], list[OuterSteps]]:
    draw = torch.Generator().manual_seed(0)
    first = {name: torch.randn(size, generator=draw, dtype=torch.float64) for name, size in SIZES.items()}
    weights = [{name: w.clone() for name, w in first.items()} for _ in range(replicas)]
    meeting, exact = Meeting(replicas), Meeting(replicas)
    return weights, [
        OuterSteps(options, own, {"b"}, meeting.of(r), replicas, exact.of(r) if options.shares_rows else None)
        for r, own in enumerate(weights)
    ]


def train(weights: list, outer: list[OuterSteps], steps: range) -> None:
    """Overlap lets each replica send before any waits; without it, only one replica can be played."""
    for step in steps:
        for replica, own in enumerate(weights):
            outer[replica].start(step)
            for name, w in own.items():
                w += moved(replica, step, name)
        for each in outer:
            each.after_step(step + 1)


@pytest.mark.parametrize("optimizer", [NESTEROV, Outer(lr=0.5, momentum=0.3), Outer()])
def test_one_replica_takes_the_papers_steps(optimizer):
    """Algorithm 1 of arXiv:2311.08105, line by line."""
    options = LocalSteps(local_steps=3, outer=optimizer)
    weights, outer = start(options, 1)
    common = {name: w.clone() for name, w in weights[0].items()}
    momentum = {name: torch.zeros_like(w) for name, w in common.items()}
    train(weights, outer, range(9))
    for began in (0, 3, 6):
        for name, theta in common.items():
            gradient = -sum(moved(0, step, name) for step in range(began, began + 3))
            momentum[name] = optimizer.momentum * momentum[name] + gradient
            ahead = gradient + optimizer.momentum * momentum[name]
            theta -= (optimizer.lr or 1.0) * (ahead if optimizer.optimizer == "nesterov" else momentum[name])
    for name, theta in common.items():
        torch.testing.assert_close(weights[0][name], theta, rtol=1e-12, atol=1e-12)
    assert outer[0].stats() == {"interval": 3, "began": 9, "outer_steps": 3, "averaged_at": 9, "in_flight": []}


@pytest.mark.parametrize("replicas", [2, 16])
def test_rows_move_as_far_as_replicas_do_and_four_tenths_where_no_rate_is_given(replicas):
    """In "a" all replicas move the first row alike, one alone the second, and two against each other the third."""
    weights, outer = start(LocalSteps(local_steps=1 + 1, overlap=1, mixing=0.0), replicas)
    first = weights[0]["a"].clone()
    alike = torch.tensor([3.0, -4.0], dtype=torch.float64)
    train(weights, outer, range(1))
    for replica, own in enumerate(weights):
        own["a"].copy_(first)
        own["a"][0] += alike
        own["a"][1] += alike * (replica == 0)
        own["a"][2] += alike * {0: 1.0, 1: -0.999}.get(replica, 0.0)
    for each in outer:
        each.after_step(2)
    for own, each in zip(weights, outer, strict=True):
        each.start(2)
        each.after_step(3)
        far = (own["a"] - first).norm(dim=1) / alike.norm()
        root = math.sqrt(replicas)
        opposed = 0.001 / replicas * root  # no rate is above √R
        assert far.tolist() == pytest.approx([1.4, 1.4 / root, 1.4 * opposed], rel=1e-5)
        torch.testing.assert_close(own["a"][0], first[0] + 1.4 * alike, rtol=1e-6, atol=1e-6)
        assert torch.equal(own["a"], weights[0]["a"])


def test_a_rate_that_is_given_is_that_of_all_rows():
    weights, outer = start(LocalSteps(local_steps=2, overlap=1, mixing=0.0, outer=Outer(lr=0.3)), 16)
    first = {name: w.clone() for name, w in weights[0].items()}
    train(weights, outer, range(2))
    train(weights, outer, range(2, 3))
    for name, theta in first.items():
        mean = torch.stack([moved(r, 0, name) + moved(r, 1, name) for r in range(16)]).mean(0)
        torch.testing.assert_close(weights[0][name], theta + 0.3 * mean, rtol=1e-12, atol=1e-12)


def test_an_interval_of_one_step_leaves_equal_weights_as_they_are_unless_a_rate_is_given():
    for optimizer, factor in ((Outer(), 1.0), (Outer(lr=0.5), 0.5)):
        weights, outer = start(LocalSteps(local_steps=1, outer=optimizer), 1)
        first = weights[0]["a"].clone()
        train(weights, outer, range(1))
        torch.testing.assert_close(weights[0]["a"], first + factor * moved(0, 0, "a"), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mixing", [None, 0.0, 0.5])
def test_fragments_that_arrive_late_are_mixed_with_what_replicas_have_done_since(mixing):
    """Two replicas: what they have in common is the same bits on both, and is by hand what it has to be."""
    plain = Outer(lr=1.0)
    options = LocalSteps(local_steps=4, outer=plain, fragments=2, overlap=1, mixing=mixing)
    weights, outer = start(options, 2)
    own = [{name: w.clone() for name, w in each.items()} for each in weights]
    common, sent, then = dict(own[0]), {}, [{}, {}]
    train(weights, outer, range(8))
    turns = {"b": 2, "a": 2, "c": 4}  # "b", which is tied, is in the first fragment
    for step in range(1, 9):
        for name, turn in turns.items():
            for replica in (0, 1):
                own[replica][name] = own[replica][name] + moved(replica, step - 1, name)
            if step in (turn + 1, turn + 5):
                common[name] = sent[name]
                for replica, each in enumerate(own):
                    if mixing is None:
                        each[name] = sent[name] + each[name] - then[replica][name]
                    else:
                        each[name] = mixing * each[name] + (1 - mixing) * sent[name]
            if step in (turn, turn + 4):
                sent[name] = (own[0][name] + own[1][name]) / 2
                for replica, each in enumerate(own):
                    then[replica][name] = each[name]
    for replica in (0, 1):
        for name in SIZES:
            torch.testing.assert_close(weights[replica][name], own[replica][name], rtol=1e-12, atol=1e-12)
    seen = []
    for each, held in zip(outer, weights, strict=True):
        with each.common_weights():
            seen.append({name: w.clone() for name, w in held.items()})
    for name in SIZES:
        assert torch.equal(seen[0][name], seen[1][name])
        torch.testing.assert_close(seen[0][name], common[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("mixing", "optimizer"), [(None, Outer()), (0.25, NESTEROV)])
@pytest.mark.parametrize("stop", [2, 3, 5, 8])
def test_going_on_is_as_if_it_had_not_stopped(stop, mixing, optimizer):
    """Twice: what goes on shares nothing with the state that it was given."""
    options = LocalSteps(local_steps=4, fragments=2, overlap=2, mixing=mixing, local_steps_warmup=3, outer=optimizer)
    weights, outer = start(options, 2)
    train(weights, outer, range(stop))
    states = [copy.deepcopy(each.state_dict()) for each in outer]
    commons = []
    for each, held in zip(outer, weights, strict=True):
        with each.common_weights():
            commons.append({name: w.clone() for name, w in held.items()})
    train(weights, outer, range(stop, 14))
    for _ in range(2):
        again, resumed = start(options, 2)
        for replica in (0, 1):
            for name, w in again[replica].items():
                w.copy_(commons[replica][name])
            resumed[replica].load_state_dict(states[replica], stop)
        train(again, resumed, range(stop, 14))
        for replica in (0, 1):
            for name in SIZES:
                assert torch.equal(again[replica][name], weights[replica][name])
            assert resumed[replica].stats() == outer[replica].stats()


@pytest.mark.parametrize("overlap", [1, 2])
def test_replicas_meet_when_they_are_asked_to(overlap):
    """In the middle of an interval, with a fragment on its way; twice is once."""
    weights, outer = start(LocalSteps(local_steps=4, fragments=2, overlap=overlap, mixing=0.5), 1)
    train(weights, outer, range(3))
    outer[0].synchronize(3)
    met = {name: w.clone() for name, w in weights[0].items()}
    with outer[0].common_weights():
        assert all(torch.equal(w, met[name]) for name, w in weights[0].items())
    outer[0].synchronize(3)
    assert all(torch.equal(w, met[name]) for name, w in weights[0].items())
    assert (outer[0].stats()["began"], outer[0].stats()["in_flight"]) == (3, [])


@pytest.mark.parametrize("mixing", [None, 0.5])
@pytest.mark.parametrize("overlap", [0, 1])
def test_the_end_of_a_training_takes_no_step_by_momentum_alone(overlap, mixing):
    """An interval has just ended: what it has sent arrives, and all is as it would be after the next landing."""
    replicas = 2 if overlap else 1
    options = LocalSteps(local_steps=2, outer=NESTEROV, overlap=overlap, mixing=mixing if overlap else None)
    weights, outer = start(options, replicas)
    train(weights, outer, range(6))
    for each in outer:
        each.synchronize(6)
    ahead, late = start(options, replicas)
    train(ahead, late, range(6))
    for each in late:
        each.after_step(6 + overlap)  # nothing has moved since
    for own, other in zip(weights, ahead, strict=True):
        for name in SIZES:
            if mixing is None or not overlap:
                torch.testing.assert_close(own[name], other[name], rtol=1e-12, atol=1e-12)
            assert torch.equal(own[name], weights[0][name])
    assert outer[0].stats()["outer_steps"] == 3
    state = copy.deepcopy(outer[0].state_dict())
    again, resumed = start(options, 1)
    for name, w in again[0].items():
        w.copy_(weights[0][name])
    resumed[0].load_state_dict(state, 6)
    resumed[0].synchronize(6)  # a finished training that is started again
    assert all(torch.equal(again[0][name], weights[0][name]) for name in SIZES)


@pytest.mark.parametrize("warmup", [1, 4])
def test_a_training_that_ends_with_its_warm_up_takes_no_step_by_momentum_alone(warmup):
    """The last step averaged gradients, and the next interval has begun, without any step of its own."""
    weights, outer = start(LocalSteps(local_steps=2, local_steps_warmup=warmup, outer=NESTEROV), 1)
    train(weights, outer, range(warmup))
    assert not outer[0].synchronous
    before = {name: w.clone() for name, w in weights[0].items()}
    outer[0].synchronize(warmup)
    assert outer[0].stats()["outer_steps"] == warmup
    assert all(torch.equal(w, before[name]) for name, w in weights[0].items())


def test_a_training_that_ends_when_a_fragment_has_just_arrived_takes_no_step_by_momentum_alone():
    """Replicas keep nothing of their own then."""
    weights, outer = start(LocalSteps(local_steps=2, outer=NESTEROV, overlap=1, mixing=0.0), 1)
    train(weights, outer, range(5))
    before = {name: w.clone() for name, w in weights[0].items()}
    outer[0].synchronize(5)
    assert outer[0].stats()["outer_steps"] == 2
    assert all(torch.equal(w, before[name]) for name, w in weights[0].items())


def test_an_error_under_the_common_weights_leaves_a_replica_its_own():
    """Training goes on after a checkpoint that could not be written."""
    weights, outer = start(LocalSteps(local_steps=3), 1)
    train(weights, outer, range(1))
    before = {name: w.clone() for name, w in weights[0].items()}
    with contextlib.suppress(OSError), outer[0].common_weights():
        assert not any(torch.equal(w, before[name]) for name, w in weights[0].items())
        raise OSError
    assert all(torch.equal(w, before[name]) for name, w in weights[0].items())


@pytest.mark.parametrize("shape", [(0,), (0, 3), (5, 0)])
def test_weights_without_values_are_left_out(shape):
    weights = {"a": torch.ones(3, requires_grad=True), "none": torch.empty(shape, requires_grad=True)}
    inner = torch.optim.Adam(weights.values())
    meeting, exact, moments = Meeting(1), Meeting(1), SecondMoments(weights, lambda: inner.state)
    outer = OuterSteps(LocalSteps(local_steps=2), weights, set(), meeting.of(0), 2, exact.of(0), moments)
    for step in range(2):
        outer.start(step)
        for w in weights.values():
            w.grad = torch.ones_like(w)
        inner.step()
        outer.after_step(step + 1)
    assert outer.stats()["outer_steps"] == 1
    assert set(outer.state_dict()["weights"]) == {"a"}


@pytest.mark.parametrize("local", [True, False])
def test_replicas_meet_again_after_going_back(local):
    """To a checkpoint with local steps, and to one without."""
    weights, outer = start(LocalSteps(local_steps=4), 1)
    train(weights, outer, range(2))
    first = {name: w.clone() for name, w in weights[0].items()}
    state = copy.deepcopy(outer[0].state_dict())
    train(weights, outer, range(2, 3))
    outer[0].synchronize(3)
    for name, w in weights[0].items():
        w.copy_(first[name])
    if local:
        outer[0].load_state_dict(state, 2)
    else:
        outer[0].forget()
    train(weights, outer, range(2, 3))
    outer[0].synchronize(3)
    assert outer[0].stats()["averaged_at"] == 3


def test_other_intervals_begin_anew():
    weights, outer = start(LocalSteps(local_steps=4, fragments=2, overlap=2, mixing=0.0), 2)
    train(weights, outer, range(3))
    state = copy.deepcopy(outer[0].state_dict())
    assert [flight["fragment"] for flight in state["shared"]["flights"]] == [0]
    other, resumed = start(LocalSteps(local_steps=1), 1)
    resumed[0].load_state_dict(state, 3)
    assert resumed[0].stats() == {"interval": 1, "began": 3, "outer_steps": 1, "averaged_at": 3, "in_flight": []}
    train(other, resumed, range(3, 5))


@pytest.mark.parametrize(("before", "replicas"), [(0.5, 1), (None, 2)])
def test_with_other_intervals_what_was_on_its_way_arrives_under_the_steps_since(before, replicas):
    """Replicas go on from the mean of their weights: as if the fragment had arrived when they were stopped.

    With the rate of the run that goes on, whatever the other one had.
    """
    weights, outer = start(LocalSteps(local_steps=2, outer=Outer(lr=before), overlap=1), 2)
    first = {name: w.clone() for name, w in weights[0].items()}
    train(weights, outer, range(2))
    for own in weights:  # a step that is not over
        for w in own.values():
            w += 1
    state = copy.deepcopy(outer[0].state_dict())
    state["weights"] = {name: (w + weights[1][name]) / 2 for name, w in weights[0].items()}
    again, resumed = start(LocalSteps(local_steps=3, outer=Outer(lr=0.5)), replicas)
    for name, w in again[0].items():
        w.copy_(first[name])  # what replicas had in common
    resumed[0].load_state_dict(state, 2)
    for name, theta in first.items():
        mean = torch.stack([moved(r, 0, name) + moved(r, 1, name) for r in (0, 1)]).mean(0)
        torch.testing.assert_close(again[0][name], theta + 0.5 * mean + 1, rtol=1e-12, atol=1e-12)


def test_common_weights_of_half_precision_go_on_exactly():
    """A model's file has them rounded."""
    weights = {"a": torch.full((4,), 1.0, dtype=torch.bfloat16)}
    options = LocalSteps(local_steps=1 + 1, outer=Outer(lr=0.6))
    outer = OuterSteps(options, weights, set(), Meeting(1).of(0), 1)
    outer.start(0)
    weights["a"] += 2**-7
    outer.after_step(2)
    again = {"a": weights["a"].clone()}
    resumed = OuterSteps(options, again, set(), Meeting(1).of(0), 1)
    resumed.load_state_dict(copy.deepcopy(outer.state_dict()), 2)
    for each in (outer, resumed):
        assert each._common is not None
        assert float(each._common._common["a"][0]) == pytest.approx(1 + 0.6 * 2**-7)


def test_weights_of_half_precision_start_from_what_they_were_given():
    """A common weight between two bfloat16 values does not drift where nothing moves."""
    weights = {"a": torch.full((4,), 1.0, dtype=torch.bfloat16)}
    meeting = Meeting(1)
    outer = OuterSteps(LocalSteps(local_steps=2, outer=Outer(lr=0.3)), weights, set(), meeting.of(0), 1)
    outer.start(0)
    weights["a"] += 2**-7
    for step in (1, 2):
        outer.after_step(step)
    assert outer._common is not None
    held = outer._common._common["a"].clone()
    assert float(held[0]) == pytest.approx(1 + 0.3 * 2**-7)
    for step in (3, 4):
        outer.after_step(step)
    assert torch.equal(outer._common._common["a"], held)
