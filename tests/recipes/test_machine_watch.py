"""Rank 0 decides about machines that come, and about slow ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipecomp.distributed.launch_env import CANDIDATES, RESTARTS
from pipecomp.plan.new_cut import NewCut
from pipecomp.recipes.machine_watch import MachineWatch, read_candidates


class Planned:
    """Stands for a `CutPlanner`: two machines whose stages take a second each."""

    names = ("a", "b")

    def __init__(self, step_s: dict[int, float], before_s: float = 1.0, fits: bool = True) -> None:
        self.step_s, self.before_s, self.fits = step_s, before_s, fits
        self.factors: Any = None

    def stage_seconds(self) -> list[float]:
        return [1.0, 1.0]

    def choose(self, names: Any, factors: Any = None) -> NewCut:
        self.factors = factors
        cuts, step_s = tuple(range(len(names) + 1)), self.step_s[len(names)]
        return NewCut(names=tuple(names), cuts=cuts, step_s=step_s, before_s=self.before_s, fits=self.fits)

    def plan_of(self, cut: NewCut, factors: Any) -> dict[str, Any]:
        return {"cuts": list(cut.cuts), "factors": dict(factors)}


class Run:
    """Steps of two ranks. spent: seconds of forward and backward of a step, by rank."""

    def __init__(self, planned: Any, **options: Any) -> None:
        self.waiting: list[str] = []
        self.requests: list[int] = []
        self.said: list[str] = []
        self.plans: list[Any] = []
        self.now, self.steps, self.seconds = 0.0, 0, [0.0, 0.0]
        self.watch = MachineWatch(
            planned,
            lambda: self.waiting,
            request=self.requests.append,
            say=self.said.append,
            write_plan=self.plans.append,
            clock=lambda: self.now,
            **options,
        )

    def step(self, *spent: float, seconds: float = 2.0) -> None:
        self.now, self.steps = self.now + seconds, self.steps + 1
        self.seconds = [before + new for before, new in zip(self.seconds, spent or (1.0, 1.0), strict=True)]
        parts = [{"forward": 0.25 * whole, "backward": 0.75 * whole} for whole in self.seconds]
        self.watch.end_step([{"stage": k, "steps": self.steps, "seconds": parts[k]} for k in range(2)])


def test_a_machine_is_taken_in_if_steps_get_faster():
    run = Run(Planned({3: 0.8}))
    run.step()
    assert (run.requests, run.said) == ([], [])
    run.waiting = ["c"]
    run.step()
    run.step()
    assert run.requests == [1]
    assert run.said == ["c can take part: 0.8 s a step instead of 1 s, as predicted; it is taken in, with a new cut"]


def test_a_machine_stays_a_spare_and_is_asked_about_once():
    run = Run(Planned({3: 0.95, 4: 0.6}))
    run.waiting = ["c"]
    run.step()
    run.step()
    assert run.requests == []
    assert run.said == [
        "c can take part: 0.95 s a step instead of 1 s, as predicted; under 10 % faster, so it stays a spare"
    ]
    run.waiting = ["c", "d"]  # together they help
    run.step()
    assert run.requests == [2]
    assert run.said[1].startswith("c, d can take part: 0.6 s a step instead of 1 s")


def test_no_more_machines_than_help():
    run = Run(Planned({3: 0.7, 4: 0.75}))
    run.waiting = ["c", "d"]
    run.step()
    assert run.requests == [1]


def test_several_stages_of_each_machine():
    run = Run(Planned({4: 0.7}), each=2)
    run.waiting = ["c"]
    run.step()
    assert run.requests == [1]


def test_a_prediction_that_fails_does_not_end_training():
    run = Run(Planned({}))
    run.waiting = ["c"]
    run.step()
    run.step()
    assert run.requests == []
    assert len(run.said) == 1
    assert "no prediction" in run.said[0]


@pytest.mark.parametrize("rebalance", [False, True])
def test_a_machine_that_is_slow_for_minutes(rebalance):
    planned = Planned({2: 0.8})
    run = Run(planned, rebalance=rebalance, window_s=60.0)
    for _ in range(40):
        run.step(1.0, 1.4)
    assert run.said == [], "not slow enough"
    for _ in range(40):
        run.step(1.0, 2.0)
    assert len(run.said) == 1
    assert planned.factors["a"] == pytest.approx(1.0)
    factor = planned.factors["b"]
    assert 1.5 < factor < 2.0, "of the last minute"
    assert run.said[0].startswith(
        f"slow for 1.0 minutes: b ({factor:.1f} times the planned forward and backward). A new cut: 0.8 s a step "
        "instead of 1 s, as predicted"
    )
    if rebalance:
        assert run.requests == [0]
        assert run.plans == [{"cuts": [0, 1, 2], "factors": planned.factors}]
    else:
        assert "--rebalance" in run.said[0]
        assert (run.requests, run.plans) == ([], [])


def test_a_short_pause_is_not_slow():
    run = Run(Planned({2: 0.8}), window_s=60.0)
    for number in range(60):
        run.step(1.0, 8.0 if number == 30 else 1.0)
    assert run.said == []


def test_machines_that_are_all_slow_stay_as_they_are():
    run = Run(Planned({2: 0.8}), window_s=60.0)
    for _ in range(60):
        run.step(3.0, 3.2)
    assert run.said == []


def test_a_new_cut_that_brings_little_is_not_made():
    run = Run(Planned({2: 0.95}), rebalance=True, window_s=60.0)
    for _ in range(60):
        run.step(1.0, 2.0)
    assert len(run.said) == 1
    assert "the cut stays" in run.said[0]
    assert run.requests == []


def test_a_machine_that_recovers_and_is_slow_again_is_reported_again():
    run = Run(Planned({2: 0.95}), window_s=20.0)
    for spent in (2.0, 1.0, 2.0):
        for _ in range(30):
            run.step(1.0, spent)
    assert len(run.said) == 2


def test_candidates_are_those_of_this_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_candidates(tmp_path) == []
    (tmp_path / CANDIDATES).write_text(json.dumps({"start": 2, "names": ["host4"]}))
    assert read_candidates(tmp_path) == []
    monkeypatch.setenv(RESTARTS, "2")
    assert read_candidates(tmp_path) == ["host4"]
    (tmp_path / CANDIDATES).write_text("{")
    assert read_candidates(tmp_path) == []
