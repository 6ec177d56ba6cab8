"""Second moments of which replicas share the rows' means."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from pipecomp.config.gradients import LocalSteps
from pipecomp.local_steps.outer_steps import OuterSteps
from pipecomp.local_steps.row_statistics import SecondMoments
from tests.local_steps.test_outer_steps import Meeting

SIZES = {"matrix": (3, 2), "bias": (4,), "scale": (), "images": (2, 3, 2, 2)}


class Replica:
    """Weights with Adam's states; the first row of the matrix is met by the first replica alone."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.weights = {name: torch.ones(size, requires_grad=True) for name, size in SIZES.items()}
        self.adam = torch.optim.Adam(self.weights.values(), lr=0.1)
        self.moments = SecondMoments(self.weights, lambda: self.adam.state)

    def step(self, step: int) -> None:
        draw = torch.Generator().manual_seed(100 * step + self.number)
        for name, weight in self.weights.items():
            weight.grad = torch.randn(SIZES[name], generator=draw)
            if name == "matrix" and self.number:
                weight.grad[0] = 0
        self.adam.step()

    def v(self, name: str) -> Tensor:
        found: Tensor = self.adam.state[self.weights[name]]["exp_avg_sq"]
        return found


def test_rows_take_the_mean_and_keep_what_is_within_them():
    replicas = [Replica(0), Replica(1)]
    for replica in replicas:
        replica.step(0)
    own = [replica.moments.rows(SIZES) for replica in replicas]
    means = {name: torch.stack([each[name] for each in own]).mean(0) for name in SIZES}
    before = [{name: replica.v(name).clone() for name in SIZES} for replica in replicas]
    for replica, rows, held in zip(replicas, own, before, strict=True):
        replica.moments.scale_to(rows, means)
        for name, size in SIZES.items():
            rows_now = replica.v(name).reshape(size[0] if size else 1, -1).mean(1)
            torch.testing.assert_close(rows_now, means[name])
            assert replica.v(name).shape == held[name].shape
        within = replica.v("matrix")[1:] / held["matrix"][1:]
        torch.testing.assert_close(within[:, 0], within[:, 1])
    assert torch.equal(replicas[1].v("matrix")[0], means["matrix"][0].expand(2)), "what it has not met"
    torch.testing.assert_close(replicas[0].v("bias"), replicas[1].v("bias"))


def test_nothing_is_shared_of_an_optimizer_without_second_moments():
    weight = torch.ones(3, requires_grad=True)
    sgd = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(3)
    sgd.step()
    assert SecondMoments({"w": weight}, lambda: sgd.state).rows(["w"]) == {}


def test_a_weight_without_a_gradient_takes_part_with_zeros():
    replica = Replica(0)
    replica.weights["bias"].grad = torch.ones(4)
    replica.adam.step()
    rows = replica.moments.rows(SIZES)
    assert {name: (row.numel(), bool(row.any())) for name, row in rows.items()} == {
        "matrix": (3, False),
        "bias": (4, True),
        "scale": (1, False),
        "images": (2, False),
    }
    replica.moments.scale_to(rows, {name: row + 1 for name, row in rows.items()})
    assert set(replica.adam.state) == {replica.weights["bias"]}


def test_a_replica_that_has_not_trained_yet_exchanges_what_the_others_do():
    """Its samples gave none of its weights a gradient. Whoever looked for a state has left an empty one."""
    replicas = [Replica(0), Replica(1)]
    assert not replicas[1].adam.state[replicas[1].weights["bias"]]
    outer = start(replicas, True, LATE)
    for step in range(5):
        for replica, each in zip(replicas, outer, strict=True):
            each.start(step)
            if replica.number == 0 or step > 3:
                replica.step(step)
        for each in outer:
            each.after_step(step + 1)
    for name in SIZES:
        with outer[0].common_weights(), outer[1].common_weights():
            assert torch.equal(replicas[0].weights[name], replicas[1].weights[name])
    assert outer[0].stats()["outer_steps"] == outer[1].stats()["outer_steps"] == 1


def test_a_row_next_to_nothing_does_not_divide_what_the_others_have():
    replica = Replica(0)
    replica.step(0)
    replica.v("matrix")[0] = torch.tensor([1e-45, 0.0])
    rows = replica.moments.rows(SIZES)
    replica.moments.scale_to(rows, {**rows, "matrix": torch.ones(3)})
    torch.testing.assert_close(replica.v("matrix")[0], torch.ones(2))


def start(replicas: list[Replica], shared: bool, options: LocalSteps) -> list[OuterSteps]:
    weights, moments = Meeting(len(replicas)), Meeting(len(replicas))
    return [
        OuterSteps(
            options,
            replica.weights,
            set(),
            weights.of(r),
            len(replicas),
            moments.of(r) if options.shares_rows else None,
            replica.moments if shared else None,
        )
        for r, replica in enumerate(replicas)
    ]


def train(replicas: list[Replica], outer: list[OuterSteps], steps: range) -> None:
    for step in steps:
        for replica, each in zip(replicas, outer, strict=True):
            each.start(step)
            replica.step(step)
        for each in outer:
            each.after_step(step + 1)


LATE = LocalSteps(local_steps=3, overlap=1, mixing=0.5)


@pytest.mark.parametrize("shared", [True, False])
def test_outer_steps_share_what_was_sent_and_keep_what_came_since(shared):
    replicas, alone = [Replica(0), Replica(1)], [Replica(0), Replica(1)]
    outer = start(replicas, shared, LATE)
    train(replicas, outer, range(4))
    wanted = []
    for replica in alone:
        for step in range(3):
            replica.step(step)
        wanted.append(replica.v("matrix").mean(1))
        replica.step(3)
    mean = (wanted[0] + wanted[1]) / 2
    for replica, other, own in zip(replicas, alone, wanted, strict=True):
        v = other.v("matrix").clone()
        if shared:
            v[own == 0] += mean[own == 0, None]
            now = v.mean(1)
            v[own > 0] *= ((mean + (now - own).clamp(min=0.0)) / now)[own > 0, None]
        torch.testing.assert_close(replica.v("matrix"), v)


@pytest.mark.parametrize("stop", [3, 4, 5])
def test_going_on_is_as_if_it_had_not_stopped(stop):
    replicas = [Replica(0), Replica(1)]
    outer = start(replicas, True, LATE)
    train(replicas, outer, range(stop))
    saved = [
        (copy.deepcopy(e.state_dict()), copy.deepcopy(r.adam.state_dict()))
        for e, r in zip(outer, replicas, strict=True)
    ]
    commons: list[dict[str, Any]] = []
    for each, replica in zip(outer, replicas, strict=True):
        with each.common_weights():
            commons.append({name: w.detach().clone() for name, w in replica.weights.items()})
    train(replicas, outer, range(stop, 9))
    again = [Replica(0), Replica(1)]
    resumed = start(again, True, LATE)
    for replica, common in zip(again, commons, strict=True):
        with torch.no_grad():
            for name, w in replica.weights.items():
                w.copy_(common[name])
    for each, replica, (state, adam) in zip(resumed, again, saved, strict=True):
        replica.adam.load_state_dict(adam)
        each.load_state_dict(state, stop)
    train(again, resumed, range(stop, 9))
    for replica, straight in zip(again, replicas, strict=True):
        for name in SIZES:
            assert torch.equal(replica.weights[name], straight.weights[name])
            assert torch.equal(replica.v(name), straight.v(name))


def test_a_row_that_grew_while_its_mean_was_on_its_way_is_not_multiplied_by_what_it_was_short_of():
    """As of a token that one replica met before what is sent, and the other after it: its steps would end."""
    replica = Replica(0)
    replica.step(0)
    v = replica.v("matrix")
    with torch.no_grad():
        v[1] = 1e-14
    own = replica.moments.rows(["matrix"])
    with torch.no_grad():
        v[1] = 1e-9
        v[2] *= 0.5
    kept = float(own["matrix"][2])
    replica.moments.scale_to(own, {"matrix": torch.tensor([float(own["matrix"][0]), 5e-10, kept])})
    torch.testing.assert_close(v[1], torch.full_like(v[1], 1.5e-9), rtol=1e-3, atol=0.0)
    torch.testing.assert_close(v[2].mean(), torch.tensor(kept))
