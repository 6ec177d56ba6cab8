"""What a recipe tells of a step, on one process with a stand-in for the engine."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipecomp.config import Config
from pipecomp.recipes import fit
from pipecomp.recipes.fit import Fit
from pipecomp.recipes.report import Report
from pipecomp.recipes.steps import Plan
from pipecomp.report.progress import LinkMeter
from tests.report.runs import AQSGD, MICRO_BATCHES, counters, made_step


@pytest.mark.parametrize("first", [True, False])
def test_speed_counts_the_tokens_of_each_replica_once(monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    """Replicas have samples of other lengths, and the last stage loads what the first one does."""
    told: dict[str, float] = {}
    sent: list[Any] = []
    monkeypatch.setattr(fit, "gathered", lambda own: sent.append(own) or [own, ({}, 0, 50, ()), ({}, 0, 0, ())])
    monkeypatch.setattr(fit.Traffic, "of", lambda stats: None)
    run: Any = object.__new__(Fit)
    run.plan, run._unit = SimpleNamespace(steps=9, epoch=lambda step: 1), "tokens"
    run._recorder = SimpleNamespace(step=lambda step, stats, **more: told.update(more))
    run._report = SimpleNamespace(step=lambda *place, **more: None, take_errors=lambda: ())
    run._trackers = SimpleNamespace(log=lambda step, values: None)
    run._meter = SimpleNamespace(spent=0.0, since_last=lambda stats: {})
    run._interruption = SimpleNamespace(wanted=0, decide=lambda wanted: None)
    engine = SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=[{"lr": 0.1}]),
        train_batch=lambda: torch.tensor(2.0),
        comm_stats=lambda: {"steps": 3, "micro_batches": [{"micro_batch": 0, "forward_s": 0.1}]},
        is_first_stage=lambda: first,
        propagate_failure=nullcontext,
    )
    run._step(engine, 3, lambda: 30)
    assert told["per_s"] * told["step_s"] == pytest.approx(80 if first else 50)
    assert sent[0][0] == {"steps": 3}, "micro-batches, of which a step may have hundreds, travel once, in the trace"


def test_what_links_carry_in_a_second_is_of_training_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loading a checkpoint before the first one, evaluating and saving between them may take as long as they like."""
    clock, made, told = [0.0], [0], []
    played = made_step(Config.from_dict({"activations": AQSGD}))

    def train_batch() -> torch.Tensor:
        clock[0] += 2.0
        made[0] += 1
        return torch.tensor(2.0)

    monkeypatch.setattr(fit, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(fit, "gathered", lambda own: [(rank, 0, 30, ()) for rank in counters(played, made[0], 0.5)])
    run: Any = object.__new__(Fit)
    run.plan, run._unit = Plan(steps=2, per_epoch=1, micro_batch=1, accumulation=1, replicas=1), "tokens"
    run._recorder = SimpleNamespace(step=lambda step, stats, **more: None)
    run._report, run._meter = Report(None, None, silent=False), LinkMeter()
    run._report.start(SimpleNamespace(model="tiny"), run.plan, Config(), 2, 2, 1)
    run._trackers = SimpleNamespace(log=lambda step, values: told.append(values))
    run._interruption = SimpleNamespace(wanted=0, decide=lambda wanted: None)
    engine = SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=[{"lr": 0.1}]),
        train_batch=train_batch,
        average_replicas=lambda: None,
        comm_stats=dict,
        is_first_stage=lambda: True,
        propagate_failure=nullcontext,
    )
    for step in (1, 2):
        clock[0] += 100.0
        run._step(engine, step, lambda: 30)
    a_second = MICRO_BATCHES * played.forward_bytes[0] / 2.0 / 1e6
    assert [values["link_forward_mb_per_s"] for values in told] == [pytest.approx(a_second)] * 2
    assert [values["link_slowest_wait"] for values in told] == [0.25] * 2
    assert capsys.readouterr().out.count("link 0->1 waits 25 %") == 2


def test_an_evaluations_line_has_what_it_sent() -> None:
    """A checkpoint at the end of an epoch is of after it: a run that goes on there has those bytes only from here."""
    told: list[Any] = []
    run: Any = object.__new__(Fit)
    run.plan, run._trackers = SimpleNamespace(epoch=lambda step: 1), SimpleNamespace(log=lambda step, values: None)
    run._recorder = SimpleNamespace(evaluated=lambda *line: told.append(line))
    run._report = SimpleNamespace(epoch=lambda *line: None)
    stats = counters(made_step(Config.from_dict({"activations": AQSGD})), 1, 0.5)
    run._epoch(SimpleNamespace(gather_comm_stats=lambda: stats), 3, {"loss": 1.0})
    assert told == [(3, {"loss": 1.0}, stats)]
