"""The report of a run whose true links are known: rates that are found again, and changes that would pay."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch

from pipecomp.config import Config
from pipecomp.plan.packet_sizes import activation_bytes
from pipecomp.plan.prediction import best_in_flight
from pipecomp.plan.simulation import Channel, LinkNetwork, StageCosts, simulate_step, uniform
from pipecomp.report.advice import RunSimulation, simulate, try_changes
from pipecomp.report.page import render_page
from pipecomp.report.reader import read_runs
from pipecomp.report.recorder import METRICS, RANKS, RUN
from pipecomp.report.summary import planned_row, summarize
from pipecomp.utils.serialization import replace_nonfinite
from pipecomp.utils.units import format_duration
from tests.report.runs import (
    AQSGD,
    COSTS,
    HIDDEN,
    MICRO_BATCHES,
    SAMPLES,
    STEPS,
    TOKENS,
    counters,
    made_step,
    make_run,
    slow,
)


def simulated(folder):
    (run,) = read_runs([folder])
    found = simulate(run)
    assert isinstance(found, RunSimulation), found
    return run, found


@pytest.mark.parametrize("stages", [2, 3])
def test_the_rate_of_unknown_links_is_found_from_the_step_time(tmp_path, stages):
    make_run(tmp_path, network=slow(stages), stages=stages)
    _, found = simulated(tmp_path)
    assert not found.known
    assert found.limited
    assert found.seconds == pytest.approx(found.measured_s, rel=0.01)
    assert found.network.slowest == pytest.approx(5e6, rel=0.05)


def test_it_is_the_mean_step_that_is_played(tmp_path):
    """The configuration says how many micro-batches most steps have; an epoch's last one may have fewer."""
    make_run(tmp_path, network=slow(), micro_batches=2 * MICRO_BATCHES)
    _, found = simulated(tmp_path)
    assert found.step.micro_batches == MICRO_BATCHES
    assert found.step.stages[0].forward_s == pytest.approx(COSTS.forward_s)


def test_links_that_cost_no_time_are_seen_not_to(tmp_path):
    make_run(tmp_path, network=uniform(2, 1e12))
    run, found = simulated(tmp_path)
    assert not found.limited
    assert found.network.slowest == float("inf")
    assert "but not because of its rate" in " ".join(summarize(run).sentences())


def test_links_of_a_lab_are_taken_as_they_were(tmp_path):
    make_run(tmp_path, network=uniform(2, 7e6, 0.01), told=True)
    _, found = simulated(tmp_path)
    assert found.known
    assert (found.network.slowest, found.network.latency_s) == (7e6, 0.01)
    assert found.seconds == pytest.approx(found.measured_s, rel=0.01)


def test_every_line_of_a_lab_is_known(tmp_path):
    lines = {"forward": (Channel(bits_per_s=7e6),), "backward": (Channel(latency_s=0.01),)}
    make_run(tmp_path, network=LinkNetwork(**lines, shared=False), told=True)
    run, found = simulated(tmp_path)
    assert found.network == LinkNetwork(**lines, shared=False)
    run.facts["network"] = replace_nonfinite(asdict(slow(3)))
    assert not simulate(run).known


def with_ranks(folder, **changes):
    """Change what ranks.json says; a value None leaves a part out."""
    ranks = json.loads((folder / RANKS).read_text()) | changes
    (folder / RANKS).write_text(json.dumps({key: value for key, value in ranks.items() if value is not None}))


def with_step_seconds(folder, seconds):
    """Change what all steps took."""
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    (folder / METRICS).write_text("".join(json.dumps(line | {"step_s": seconds}) + "\n" for line in lines))


def with_plan(folder, network, at="measured"):
    """Put a plan with these links beside a run."""
    links = [
        {"forward": asdict(out), "backward": asdict(back)}
        for out, back in zip(network.forward, network.backward, strict=True)
    ]
    (folder / "plan.json").write_text(json.dumps({"links": links, "methods": [{"network": at}]}))


def test_links_that_the_ranks_measured_are_taken_and_not_fitted(tmp_path):
    """A step with 6 % that no part counts: fitted, links would be slower than they are."""
    make_run(tmp_path, network=slow())
    with_step_seconds(tmp_path, 1.06 * simulated(tmp_path)[1].measured_s)
    _, fitted = simulated(tmp_path)
    assert fitted.network.slowest < 0.95 * slow().slowest
    with_plan(tmp_path, slow())
    run, found = simulated(tmp_path)
    assert (found.known, found.accurate) == (True, True)
    assert found.network.slowest == slow().slowest
    truth = simulate_step(made_step(Config.from_dict({"activations": {**AQSGD, "forward_bits": 2}})), slow()).seconds
    tried = {change.what: change for change in try_changes(run, found)}
    assert tried["forward_bits 3 → 2"].step_s == pytest.approx(truth, rel=0.01)
    assert "as measured between the ranks" in render_page([run])


@pytest.mark.parametrize("at", ["measured", "5 Mbit/s"])
def test_links_that_a_plan_was_given_are_no_measurement(tmp_path, at):
    make_run(tmp_path, network=slow())
    with_plan(tmp_path, uniform(2, 2e6), at)
    _, found = simulated(tmp_path)
    assert found.network.slowest == pytest.approx(2e6 if at == "measured" else 5e6, rel=0.05)
    with_plan(tmp_path, uniform(3, 2e6), at)
    assert not simulated(tmp_path)[1].known, "of another number of stages"


def test_links_that_auto_bits_measured_are_known(tmp_path):
    make_run(tmp_path, network=slow(), told=True)
    run, _ = simulated(tmp_path)
    run.facts["network"]["measured"] = True
    found = simulate(run)
    assert found.network == slow().__class__(forward=slow().forward, backward=slow().backward)
    assert "as measured between the ranks" in render_page([run])


@pytest.mark.parametrize(("factor", "accurate"), [(1.09, True), (1.15, False), (0.92, True), (0.88, False)])
def test_a_simulation_that_misses_the_runs_own_seconds_predicts_nothing(tmp_path, factor, accurate):
    make_run(tmp_path, network=slow(), told=True)
    with_step_seconds(tmp_path, factor * simulated(tmp_path)[1].seconds)
    run, now = simulated(tmp_path)
    assert now.accurate == accurate
    assert bool(try_changes(run, now)) == accurate
    page = render_page([run])
    assert ("What to change next" in page) == accurate
    assert ("over 10 % off" in page) == (not accurate)
    (said,) = [text for text in summarize(run).sentences() if text.startswith(("No advice", "Next"))]
    if not accurate:
        assert f"predicts {'less' if factor > 1 else 'more'} by over 10 %" in said


def test_a_resumed_run_has_the_costs_of_its_own_steps(tmp_path):
    """Without a half time they are those of all its steps; the first part's seconds do not count."""
    step = make_run(tmp_path, network=slow())
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    seconds = lines[0]["step_s"]
    for line in lines[:10]:
        line["step_s"] = 100.0
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    end = [{**rank, "steps": STEPS} for rank in counters(step, 10, 0.0)]
    with_ranks(tmp_path, halfway=None, first_step=10, end=end)
    _, found = simulated(tmp_path)
    assert found.measured_s == pytest.approx(seconds)
    assert found.step.stages[0].forward_s == pytest.approx(COSTS.forward_s)


def test_of_replicas_the_slowest_counts_and_of_the_end_of_a_step_the_least(tmp_path):
    step = make_run(tmp_path, network=slow(), told=True)
    played = simulate_step(step, slow()).seconds
    end = counters(step, STEPS, 0.0)
    end += [{**rank, "rank": 2 + rank["rank"], "replica": 1} for rank in counters(step, STEPS, 0.0)]
    for rank, (compute_s, reduce_s, rest_s) in zip(end, [(1, 3, 4), (1, 4, 3), (2, 2, 5), (1, 5, 2)], strict=True):
        spent = {"encode": 0.0, "decode": 0.0, "forward": STEPS * compute_s, "backward": 0.0}
        spent |= {"reduce": STEPS * reduce_s, "update": STEPS * 0.5}
        rank["seconds"] = {**spent, "wait": STEPS * (played - compute_s - reduce_s - 0.5 - rest_s)}
    with_ranks(tmp_path, halfway=None, end=end)
    _, found = simulated(tmp_path)
    assert [costs.forward_s for costs in found.step.stages] == [2 / MICRO_BATCHES, 1 / MICRO_BATCHES]
    assert found.step.together_s == pytest.approx(2.5 + 2)


def test_a_change_predicts_what_a_run_with_it_takes(tmp_path):
    make_run(tmp_path, network=slow(), told=True)
    run, now = simulated(tmp_path)
    found = try_changes(run, now)
    tried = {change.what: change for change in found}
    assert len(tried) == len(found)
    assert [change.pays for change in found] == sorted((change.pays for change in found), reverse=True)
    fewer = Config.from_dict({"activations": {**AQSGD, "forward_bits": 2}})
    truth = simulate_step(made_step(fewer), slow()).seconds
    assert tried["forward_bits 3 → 2"].step_s == pytest.approx(truth, rel=0.01)
    assert tried["backward_bits 6 → 4"].pays
    assert not tried["method none"].pays
    assert not tried["links of twice the rate"].pays  # it is no setting
    assert tried["links of twice the rate"].gain > 1.2
    (said,) = [sentence for sentence in summarize(run).sentences() if sentence.startswith("Next:")]
    assert "2 bits forward, 4 back predicts" in said


def test_an_uncompressed_run_over_a_slow_link_is_told_to_compress(tmp_path):
    make_run(tmp_path, {"method": "none"}, network=slow(), told=True)
    run, now = simulated(tmp_path)
    (change,) = [change for change in try_changes(run, now) if change.what.startswith("method aqsgd")]
    config = Config.from_dict({"activations": {"method": "aqsgd", "forward_bits": 2, "backward_bits": 4}})
    assert change.gain == pytest.approx(now.seconds / simulate_step(made_step(config), slow()).seconds, rel=0.02)
    assert change.pays


def test_fast_links_are_offered_more_bits_or_none(tmp_path):
    make_run(tmp_path, network=uniform(2, 1e10), told=True)
    run, now = simulated(tmp_path)
    free = {change.what for change in try_changes(run, now) if change.pays and change.costs_nothing}
    assert free == {"8 bits forward, 8 back", "method none"}


def test_uneven_stages_are_told_to_be_cut_elsewhere(tmp_path):
    make_run(tmp_path, network=uniform(2, 1e10))
    ranks = json.loads((tmp_path / RANKS).read_text())
    for when in ("halfway", "end"):
        for key in ("forward", "backward"):
            ranks[when][1]["seconds"][key] *= 3
    (tmp_path / RANKS).write_text(json.dumps(ranks))
    with_step_seconds(tmp_path, simulated(tmp_path)[1].seconds)
    run, now = simulated(tmp_path)
    (change,) = [change for change in try_changes(run, now) if change.what == "other cuts"]
    assert change.pays
    assert "stage 1 computes 1.5 times" in change.why
    even = replace(COSTS, forward_s=2 * COSTS.forward_s, backward_s=2 * COSTS.backward_s)
    assert change.step_s == pytest.approx(simulate_step(replace(now.step, stages=[even] * 2), now.network).seconds)


def test_smaller_micro_batches_take_half_as_long_each(tmp_path):
    step = make_run(tmp_path, network=slow(), told=True)
    run, now = simulated(tmp_path)
    half = replace(
        step,
        stages=[StageCosts(**{key: value / 2 for key, value in asdict(COSTS).items()})] * 2,
        micro_batches=2 * MICRO_BATCHES,
        forward_bytes=[size / 2 for size in step.forward_bytes],
        backward_bytes=[size / 2 for size in step.backward_bytes],
        in_flight=None,
    )
    tried = {change.what: change for change in try_changes(run, now)}
    change = tried["micro-batches of 2 instead of 4, twice as many"]
    assert change.step_s == pytest.approx(best_in_flight(half, slow())[1].seconds, rel=1e-3)
    run.facts["micro_batch"] = 5
    assert not [change for change in try_changes(run, now) if change.what.startswith("micro-batches")]


def test_a_number_in_flight_that_is_too_small_is_told(tmp_path):
    make_run(tmp_path, network=uniform(2, 5e6, 0.1), told=True)
    run, now = simulated(tmp_path)
    assert "in_flight auto" not in {change.what for change in try_changes(run, now)}
    run.facts["settings"]["in_flight"] = 2
    (change,) = [change for change in try_changes(run, now) if change.what == "in_flight auto"]
    assert change.step_s == best_in_flight(now.step, now.network)[1].seconds < now.seconds
    assert change.gain == now.seconds / change.step_s


def test_first_visits_can_be_sent_with_fewer_bits(tmp_path):
    settings = {**AQSGD, "first_visit": "full"}
    step = make_run(tmp_path, settings, network=slow(), told=True)
    run, now = simulated(tmp_path)
    assert "first_visit 8" not in {change.what for change in try_changes(run, now)}
    for rank in (*run.ranks["halfway"], *run.ranks["end"]):
        for link in rank["links"].values():
            link["full_samples"] = link["delta_samples"]
    now = simulate(run)
    (change,) = [change for change in try_changes(run, now) if change.what == "first_visit 8"]
    assert change.why == "50% of the samples were new to a link"
    size = (0, [TOKENS] * SAMPLES, HIDDEN, torch.float32)
    full, eight = (
        activation_bytes(Config.from_dict({"activations": made}), *size, first_visit=True) for made in (settings, AQSGD)
    )
    later = activation_bytes(Config.from_dict({"activations": AQSGD}), *size)
    share = (eight + later) / (full + later)
    made = replace(now.step, forward_bytes=[step.forward_bytes[0] * share])
    assert change.step_s == pytest.approx(simulate_step(made, now.network).seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("facts", "said"),
    [({"stages": 1}, "one stage"), ({"micro_batches": None}, "did not record"), ({"stages": 3}, "missing")],
)
def test_without_what_it_needs_there_is_no_advice_but_a_reason(tmp_path, facts, said):
    make_run(tmp_path, network=slow())
    (run,) = read_runs([tmp_path])
    run.facts |= facts
    assert said in simulate(run)
    assert said in " ".join(summarize(run).sentences())


def test_settings_that_are_not_known_give_no_advice_on_bits(tmp_path):
    make_run(tmp_path, network=slow())
    facts = json.loads((tmp_path / RUN).read_text())
    facts["settings"]["activations"]["new_key"] = 1
    (tmp_path / RUN).write_text(json.dumps(facts))
    run, now = simulated(tmp_path)
    assert not [change for change in try_changes(run, now) if "bits" in change.what]


@pytest.mark.parametrize("bits", [3, {"error": 0.05, "min": 2, "max": 3}])
def test_a_plan_is_compared_where_it_is_of_the_runs_settings(bits, tmp_path):
    make_run(tmp_path, network=slow())
    facts = json.loads((tmp_path / RUN).read_text())
    facts["settings"]["activations"]["forward_bits"] = bits
    (tmp_path / RUN).write_text(json.dumps(facts))
    rows = [
        {"stages": stages, "method": "aqsgd", "forward_bits": b, "backward_bits": 6, "step_s": stages * b / 20}
        for stages in (4, 2)
        for b in (2, 3)
    ]
    (tmp_path / "plan.json").write_text(json.dumps({"methods": rows}))
    (run,) = read_runs([tmp_path])
    assert planned_row(run)["step_s"] == 0.3


@pytest.mark.parametrize(("new", "first", "seconds"), [(1.0, True, 0.8), (0.5, True, 0.3), (1.0, False, 0.3)])
def test_a_run_of_first_visits_is_compared_with_the_plans_first_epoch(tmp_path, new, first, seconds):
    """In a run of one epoch every sample is new to the links; an earlier plan may not include that time."""
    make_run(tmp_path, network=slow())
    row = {"stages": 2, "method": "aqsgd", "forward_bits": 3, "backward_bits": 6, "step_s": 0.3}
    (tmp_path / "plan.json").write_text(json.dumps({"chosen": row | ({"first_epoch_s": 0.8} if first else {})}))
    (run,) = read_runs([tmp_path])
    for rank in (*run.ranks["halfway"], *run.ranks["end"]):
        for link in rank["links"].values():
            samples = link["delta_samples"]
            link |= {"full_samples": new * samples, "delta_samples": (1 - new) * samples}
    one = summarize(run)
    assert one.planned_seconds() == seconds
    assert f"data-label='planned'>{format_duration(seconds)}<" in render_page([one.run])
