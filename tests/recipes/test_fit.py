"""What a recipe tells of a step, on one process with a stand-in for the engine."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipecomp.recipes import fit
from pipecomp.recipes.fit import Fit


@pytest.mark.parametrize("first", [True, False])
def test_speed_counts_the_tokens_of_each_replica_once(monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    """Replicas have samples of other lengths, and the last stage loads what the first one does."""
    told: dict[str, float] = {}
    monkeypatch.setattr(fit, "gathered", lambda own: [own, ({}, 0, 50, ()), ({}, 0, 0, ())])
    monkeypatch.setattr(fit.Traffic, "of", lambda stats: None)
    run: Any = object.__new__(Fit)
    run.plan, run._unit = SimpleNamespace(steps=9, epoch=lambda step: 1), "tokens"
    run._recorder = SimpleNamespace(step=lambda step, stats, **more: told.update(more))
    run._report = SimpleNamespace(step=lambda *place, **more: None, take_refused=lambda: ())
    run._trackers = SimpleNamespace(log=lambda step, values: None)
    run._meter = SimpleNamespace(since_last=lambda stats: {})
    run._interruption = SimpleNamespace(wanted=0, decide=lambda wanted: None)
    engine = SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=[{"lr": 0.1}]),
        train_batch=lambda: torch.tensor(2.0),
        comm_stats=dict,
        is_first_stage=lambda: first,
        propagate_failure=nullcontext,
    )
    run._step(engine, 3, lambda: 30)
    assert told["per_s"] * told["step_s"] == pytest.approx(80 if first else 50)
