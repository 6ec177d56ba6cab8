"""What the report says of a run whose true links are known: rates that are found again, and changes that would pay."""

from __future__ import annotations

import json

import pytest

from pipecomp.config import Config
from pipecomp.plan.network import uniform
from pipecomp.plan.simulation import play
from pipecomp.report.advice import changes
from pipecomp.report.read import read_runs
from pipecomp.report.record import RANKS, RUN
from pipecomp.report.simulated import Simulated, simulate
from pipecomp.report.words import planned, summary, told
from tests.report.runs import AQSGD, made_step, make_run, slow


def simulated(folder):
    (run,) = read_runs([folder])
    found = simulate(run)
    assert isinstance(found, Simulated), found
    return run, found


@pytest.mark.parametrize("stages", [2, 3])
def test_the_rate_of_unknown_links_is_found_from_the_step_time(tmp_path, stages):
    make_run(tmp_path, network=slow(stages), stages=stages)
    _, found = simulated(tmp_path)
    assert not found.known
    assert found.limited
    assert found.seconds == pytest.approx(found.measured_s, rel=0.01)
    assert found.network.slowest == pytest.approx(5e6, rel=0.05)


def test_links_that_cost_no_time_are_seen_not_to(tmp_path):
    make_run(tmp_path, network=uniform(2, 1e12))
    run, found = simulated(tmp_path)
    assert not found.limited
    assert found.network.slowest == float("inf")
    assert "though not for its rate" in " ".join(summary(told(run)))


def test_links_of_a_lab_are_taken_as_they_were(tmp_path):
    make_run(tmp_path, network=uniform(2, 7e6, 0.01), told=True)
    _, found = simulated(tmp_path)
    assert found.known
    assert (found.network.slowest, found.network.latency_s) == (7e6, 0.01)
    assert found.seconds == pytest.approx(found.measured_s, rel=0.01)


def test_a_change_predicts_what_a_run_with_it_takes(tmp_path):
    make_run(tmp_path, network=slow(), told=True)
    run, now = simulated(tmp_path)
    tried = {change.what: change for change in changes(run, now)}
    fewer = Config.from_dict({"activations": {**AQSGD, "forward_bits": 2}})
    truth = play(made_step(fewer), slow()).seconds
    assert tried["forward_bits 3 → 2"].step_s == pytest.approx(truth, rel=0.01)
    assert tried["backward_bits 6 → 4"].pays
    assert not tried["method none"].pays
    assert not tried["links of twice the rate"].pays  # it is no setting
    assert tried["links of twice the rate"].gain > 1.2
    (said,) = [sentence for sentence in summary(told(run)) if sentence.startswith("Next:")]
    assert "2 bits forward, 4 back predicts" in said


def test_an_uncompressed_run_over_a_slow_link_is_told_to_compress(tmp_path):
    make_run(tmp_path, {"method": "none"}, network=slow(), told=True)
    run, now = simulated(tmp_path)
    (change,) = [change for change in changes(run, now) if change.what.startswith("method aqsgd")]
    config = Config.from_dict({"activations": {"method": "aqsgd", "forward_bits": 2, "backward_bits": 4}})
    assert change.gain == pytest.approx(now.seconds / play(made_step(config), slow()).seconds, rel=0.02)
    assert change.pays


def test_fast_links_are_offered_more_bits_or_none(tmp_path):
    make_run(tmp_path, network=uniform(2, 1e10), told=True)
    run, now = simulated(tmp_path)
    free = {change.what for change in changes(run, now) if change.pays and change.costs_nothing}
    assert free == {"8 bits forward, 8 back", "method none"}


def test_uneven_stages_are_told_to_be_cut_elsewhere(tmp_path):
    make_run(tmp_path, network=uniform(2, 1e10))
    ranks = json.loads((tmp_path / RANKS).read_text())
    for when in ("halfway", "end"):
        for key in ("forward", "backward"):
            ranks[when][1]["seconds"][key] *= 3
    (tmp_path / RANKS).write_text(json.dumps(ranks))
    run, now = simulated(tmp_path)
    (change,) = [change for change in changes(run, now) if change.what == "other cuts"]
    assert change.pays
    assert "stage 1 computes 1.5 times" in change.why


@pytest.mark.parametrize(
    ("facts", "said"),
    [({"stages": 1}, "one stage"), ({"micro_batches": None}, "did not write"), ({"stages": 3}, "missing")],
)
def test_without_what_it_needs_there_is_no_advice_but_a_reason(tmp_path, facts, said):
    make_run(tmp_path, network=slow())
    (run,) = read_runs([tmp_path])
    run.facts |= facts
    assert said in simulate(run)
    assert said in " ".join(summary(told(run)))


def test_settings_that_are_not_known_give_no_advice_on_bits(tmp_path):
    make_run(tmp_path, network=slow())
    facts = json.loads((tmp_path / RUN).read_text())
    facts["settings"]["activations"]["new_key"] = 1
    (tmp_path / RUN).write_text(json.dumps(facts))
    run, now = simulated(tmp_path)
    assert not [change for change in changes(run, now) if "bits" in change.what]


def test_a_plan_is_compared_where_it_is_of_the_runs_settings(tmp_path):
    make_run(tmp_path, network=slow())
    rows = [
        {"stages": stages, "method": "aqsgd", "forward_bits": b, "backward_bits": 6, "step_s": stages * b / 20}
        for stages in (4, 2)
        for b in (2, 3)
    ]
    (tmp_path / "plan.json").write_text(json.dumps({"methods": rows}))
    (run,) = read_runs([tmp_path])
    assert planned(run)["step_s"] == 0.3
