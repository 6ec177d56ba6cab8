"""Spreads of measurements: what predictions say of them, and plans that do not change with noise."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console

from pipecomp.config import Config
from pipecomp.doctor.measure import LinkMeasurement
from pipecomp.errors import ConfigError
from pipecomp.plan import command
from pipecomp.plan.auto_bits import BatchShape, RankMeasurement, decide_bits
from pipecomp.plan.command import rank_threads, resolve_request, run_plan
from pipecomp.plan.measure import SurveyResult, network_of, slowdowns_of, slowest_profile, spread_of
from pipecomp.plan.options import PlanOptions
from pipecomp.plan.packet_sizes import with_bits
from pipecomp.plan.prediction import Estimate, MachineSpeeds, StepPrediction, as_row, predict
from pipecomp.plan.profile import Profile, count
from pipecomp.plan.search import choose, choose_bits, pays, simplest, simplicity
from pipecomp.plan.simulation import StageCosts, uniform
from tests.plan.test_plan import AQSGD, DELTA, job, llama

FREE = uniform(2, float("inf"))
NETWORKS: dict[str, Any] = {"1gbit": ((1e9,), 0.0)}


def noisy(low: float = 0.9, high: float = 1.2, **more: Any) -> Any:
    """A job whose compute was measured with this spread."""
    made = job(**more)
    return replace(made, profile=replace(made.profile, spread=(low, high)))


def test_the_ends_of_several_measurements_and_not_of_every_run():
    assert spread_of([1.0]) == (1.0, 1.0)
    assert spread_of([2.0, 2.0, 9.0]) == (1.0, 4.5)
    runs = [2.0, 2.0, 9.0] * 4 + [3.0] * 3
    low, high = spread_of(runs)
    assert (low, high) == (1.0, 1.5), "single slow runs are no measurement"


@pytest.mark.parametrize(
    ("slower", "faster", "reaches"),
    [
        ((0.9, 1.2, 1.3), (0.8, 1.0, 1.0), True),
        ((1.1, 1.2, 1.3), (0.8, 1.0, 1.05), False),
        ((1.015, 1.015, 1.015), (1.0, 1.0, 1.0), True),
        ((1.03, 1.03, 1.03), (1.0, 1.0, 1.0), False),
    ],
)
def test_seconds_that_cannot_be_told_apart(slower, faster, reaches):
    assert Estimate(*slower).reaches(Estimate(*faster)) == reaches


def test_estimates_in_words():
    assert str(Estimate(3.08, 3.2, 3.44)) == "3.1–3.4 s"
    assert str(Estimate.of(1.234)) == "1.23 s"
    assert str(Estimate(1.231, 1.234, 1.238)) == "1.23 s"


def test_a_prediction_has_the_spread_of_compute():
    found = predict(noisy(), Config(), FREE)
    assert found.spread == pytest.approx((0.9, 1.2))
    assert found.estimate.high_s == pytest.approx(1.2 * predict(job(), Config(), FREE).step_s)
    assert as_row(found)["step_range_s"] == [found.estimate.low_s, found.estimate.high_s]
    kernels = MachineSpeeds(update_s_per_parameter=1.0)
    assert predict(noisy(), Config(), FREE, kernels).spread == pytest.approx((0.9, 1.2)), "the optimizer's, too"
    assert predict(job(), Config(), FREE).spread == (1.0, 1.0)


def test_where_a_link_is_the_limit_its_spread_counts_and_not_that_of_compute():
    slow = uniform(2, 1e5)
    assert predict(noisy(), Config(), slow).spread == pytest.approx((1.0, 1.0), abs=0.01)
    found = predict(job(), Config(), replace(slow, spread=(0.8, 1.25)))
    assert found.spread == pytest.approx((1 / 1.25, 1 / 0.8), rel=0.01)


def test_where_the_disk_is_the_limit_its_spread_counts():
    sections = {"activations": {"method": "aqsgd", "forward_bits": 4, "backward_bits": 8}, "store": {"path": "m"}}
    config = Config.from_dict(sections)
    speeds = MachineSpeeds(disk_bytes_s=10.0, disk_spread=(0.8, 1.25))
    found = predict(noisy(), config, FREE, speeds)
    assert found.step_s == found.store_s
    assert found.spread == pytest.approx((1 / 1.25, 1 / 0.8), rel=0.01)
    assert predict(noisy(), config, FREE, MachineSpeeds()).spread == pytest.approx((0.9, 1.2)), "else it does not"


def test_links_have_the_spread_of_the_one_that_differs_most():
    rows = [[LinkMeasurement(1e8, 1e8, 0.0, (0.9, 1.0))], [LinkMeasurement(1e8, 1e8, 0.0, (1.0, 1.1))]]
    assert network_of(rows).spread == (0.9, 1.1)


def profile_of(block_s: float, spread: tuple[float, float]) -> Profile:
    made = job(block_s=block_s).profile
    return replace(made, spread=spread)


def test_a_machine_is_slower_only_beyond_the_spread():
    equal = [profile_of(1.0, (0.9, 1.1)), profile_of(0.9, (0.9, 1.1)), profile_of(0.5, (0.9, 1.1))]
    assert slowdowns_of(equal) == pytest.approx((1.0, 1.0, 0.5))
    sure = [replace(profile, spread=(1.0, 1.0)) for profile in equal]
    assert slowdowns_of(sure) == pytest.approx((1.0, 0.9, 0.5))
    assert slowest_profile([profile_of(1.0, (0.9, 1.05)), profile_of(0.5, (0.95, 1.2))]).spread == (0.9, 1.2)


def test_a_profile_keeps_its_spread_and_earlier_files_have_none():
    made = profile_of(1.0, (0.9, 1.1))
    kept = json.loads(json.dumps(made.as_dict()))
    assert Profile.from_dict(kept) == made
    del kept["spread"]
    assert Profile.from_dict(kept).spread == (1.0, 1.0)


# -- the simpler of two


def taken(K: int = 2, M: int = 8, **section: Any) -> StepPrediction:
    return predict(job(K=K, M=M), Config.from_dict(section), uniform(K, float("inf")))


QUANTIZED = {"method": "aqsgd", "forward_bits": 4, "backward_bits": 8}


@pytest.mark.parametrize(
    ("simple", "other"),
    [
        ({"activations": QUANTIZED}, {"K": 3}),
        ({}, {"activations": {"method": "bf16"}}),
        ({"activations": {**QUANTIZED, "method": "direct"}}, {"activations": QUANTIZED}),
        ({"activations": QUANTIZED}, {"activations": {**QUANTIZED, "backward_method": "delta"}}),
        ({"activations": QUANTIZED}, {"activations": {**QUANTIZED, "forward_bits": 3}}),
        ({"activations": QUANTIZED}, {"activations": {**QUANTIZED, "backward_bits": {"error": 0.1, "max": 6}}}),
        ({}, {"gradients": {"method": "double_squeeze"}}),
        ({"M": 4}, {"M": 8}),
        # An earlier difference counts more than all later ones.
        ({"activations": {**QUANTIZED, "forward_bits": 2}, "M": 16}, {"K": 3, "M": 1}),
        ({"activations": {**QUANTIZED, "forward_bits": 2}}, {"activations": {**QUANTIZED, "backward_method": "delta"}}),
    ],
)
def test_what_is_simpler(simple, other):
    plans = [taken(**other), taken(**simple)]
    assert simplicity(plans[1]) < simplicity(plans[0])
    for seconds, expected in (((1.0, 1.3), 1), ((1.0, 1.5), 0), ((1.5, 1.0), 1)):
        timed = [replace(p, step_s=s, spread=(0.85, 1.15)) for p, s in zip(plans, seconds, strict=True)]
        found = simplest(timed, lambda p: p)
        assert found is timed[expected], seconds


def test_compression_pays_beyond_the_spread():
    plain, other = taken(), taken(activations=QUANTIZED)
    for seconds, spread, expected in ((1.2, 1.0, True), (1.2, 1.15, False), (1.6, 1.15, True), (1.04, 1.0, False)):
        timed = [replace(p, step_s=s, spread=(1 / spread, spread)) for p, s in ((plain, seconds), (other, 1.0))]
        assert pays(*timed) == expected, (seconds, spread)


def test_bits_are_the_most_that_cannot_be_told_from_the_fewest():
    def predicted(spread):
        return lambda f, b: Estimate.of(1 + (f + b) / 100, (1 / spread, spread))

    alike = uniform(2, 1e6)
    assert choose_bits(predicted(1.0), alike)[:2] == (2, 4)
    assert choose_bits(predicted(1.02), alike)[:2] == (3, 6), "9 % beside 6 %"
    assert choose_bits(predicted(1.06), alike)[:2] == (8, 8)


def test_two_calls_on_a_busy_machine_choose_the_same():
    """Compute that is 10 % apart hides other bits; the spread of each call reaches the other's seconds."""

    def chosen(block_s: float, spread: float) -> tuple[Any, Any]:
        found = choose(noisy(1 / spread, spread, M=16, block_s=block_s), AQSGD, uniform(2, 28e6))
        return found.forward_bits, found.backward_bits

    assert chosen(0.0095, 1.0) != chosen(0.0105, 1.0)
    assert chosen(0.0095, 1.1) == chosen(0.01, 1.1) == chosen(0.0105, 1.1)


def test_where_seconds_are_not_sure_bits_are_chosen_in_large_steps():
    """Between 4 and 8 bits forward the differences are smaller than any noise."""
    made, found = noisy(1 / 1.1, 1.1, M=16), set()
    for rate in (17e6, 19e6, 20e6, 21e6, 22e6, 23e6, 25e6):
        choice = choose(made, AQSGD, uniform(2, rate))
        found.add((choice.forward_bits, choice.backward_bits))
    assert found <= {(8, 8), (4, 8), (3, 6), (2, 4)}
    assert len(found) > 1


def test_auto_bits_go_by_the_spread_and_say_it():
    costs = StageCosts(forward_s=0.02 / 3, backward_s=0.04 / 3)

    def decided(spread: tuple[float, float]) -> Any:
        link = LinkMeasurement(21e6, 21e6, 0.0)
        rows = [RankMeasurement(0, costs, link, 2, spread), RankMeasurement(1, costs, None)]
        section = {"method": "aqsgd", "forward_bits": "auto", "backward_bits": "auto"}
        config = Config.from_dict({"activations": section})
        return decide_bits(config, rows, BatchShape(samples=1, tokens=64, micro_batches=64), 1000, torch.float32)

    sure, noisy_one = decided((1.0, 1.0)), decided((0.8, 1.3))
    assert sure.forward_bits.max < noisy_one.forward_bits.max
    assert "–" in noisy_one.reason
    assert "–" not in sure.reason
    assert noisy_one.network == network_of([[LinkMeasurement(21e6, 21e6, 0.0)]])


# -- the command


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that plans with a faked measurement; it notes torch's threads, and returns plan and text."""
    threads: list[int] = []
    model = llama(8, 256)
    model.architectures = ["LlamaForCausalLM"]

    def run(
        block_s: float = 0.1, spread: tuple[float, float] = (0.95, 1.05), head_s: float = 0.0, **options: Any
    ) -> Any:
        counted = count(model, 64)

        def timed(cost: Any, seconds: float) -> Any:
            return replace(cost, forward_s=seconds / 3, backward_s=2 * seconds / 3)

        profile = replace(
            counted,
            blocks=tuple(timed(block, block_s) for block in counted.blocks),
            first=timed(counted.first, 0.0),
            last=timed(counted.last, head_s),
            spread=spread,
            measured="measured",
        )

        def survey(*given: Any, **more: Any) -> SurveyResult:
            threads.append(torch.get_num_threads())
            return SurveyResult(profile=profile, speeds=MachineSpeeds())

        monkeypatch.setattr(command, "survey_machine", survey)
        text = io.StringIO()
        given = {"model": model, "tokens": 64, "batch": 8, "measure": True, "bandwidth": "1gbit", **options}
        found = run_plan(Console(file=text, width=200), PlanOptions(**given))
        return found, " ".join(text.getvalue().split())

    run.threads = threads  # type: ignore[attr-defined]
    return run


def test_the_duration_is_that_of_the_data(measured):
    found, text = measured(stages=2, micro_batch=1, samples=100, epochs=3)
    chosen = found["plain"]
    assert not found["pays"]
    assert found["duration"]["steps"] == 3 * 100 // 8 == 37
    assert found["duration"]["seconds"] == pytest.approx(37 * chosen["step_s"])
    assert found["duration"]["low_s"] == pytest.approx(37 * chosen["step_range_s"][0])
    low, high = chosen["step_range_s"]
    assert low == pytest.approx(0.95 * chosen["step_s"], rel=0.01)
    assert high == pytest.approx(1.05 * chosen["step_s"], rel=0.01)
    minutes, seconds = divmod(round(37 * chosen["step_s"]), 60)
    expected = f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
    assert f"{low:.2g}–{high:.2g} s a step; {expected} for this data: 37 steps of 8 samples" in text
    found, text = measured(stages=2, micro_batch=1, samples=100, epochs=3, max_steps=5)
    assert found["duration"]["steps"] == 5
    found, text = measured(stages=2, micro_batch=1)
    assert found["duration"] is None
    assert "1,000 steps of 8 samples take" in text


def test_steps_of_the_first_epoch_take_their_own_time(measured):
    found, _ = measured(stages=2, micro_batch=1, samples=80, epochs=3, bandwidth="200kbit")
    chosen = found["chosen"]
    assert found["pays"]
    assert chosen["first_epoch_s"] > 1.1 * chosen["step_s"]
    expected = 10 * chosen["first_epoch_s"] + 20 * chosen["step_s"]
    assert found["duration"]["seconds"] == pytest.approx(expected)


def test_cuts_are_those_of_operations_unless_seconds_are_surely_better(measured):
    """A head that takes 1.2 blocks, of which operations show a tenth: 8 blocks are cut in the middle or after five."""
    cuts = [measured(head_s=0.12, spread=spread, stages=2)[0]["cuts"] for spread in ((1.0, 1.0), (0.8, 1.3))]
    assert cuts == [[0, 5, 8], [0, 4, 8]] or cuts[0] != cuts[1] == [0, 4, 8]
    assert measured(head_s=0.6, spread=(0.95, 1.05), stages=2)[0]["cuts"] != [0, 4, 8]


@pytest.mark.parametrize("scale", [0.93, 1.0, 1.07])
def test_a_busy_machine_plans_the_same_in_every_call(measured, scale):
    """The measured seconds change from call to call within their spread; the plan does not."""
    found, _ = measured(block_s=0.02 * scale, head_s=0.02 / scale, spread=(0.9, 1.1), nodes=4, bandwidth="30mbit")
    again, _ = measured(block_s=0.02, head_s=0.02, spread=(0.9, 1.1), nodes=4, bandwidth="30mbit")
    assert found["config"] == again["config"]
    assert found["cuts"] == again["cuts"]


def test_it_measures_with_the_threads_of_a_rank(measured, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(command, "usable_cores", lambda: 8)
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        for options, expected in (
            ({"stages": 2}, 4),
            ({"nodes": 4, "stages": 2}, 2),
            ({"stages": 16, "threads": 3}, 3),
            ({"stages": 1}, 8),
        ):
            if options["stages"] == 16:
                options["stages"] = 2
            found, text = measured(**options)
            assert measured.threads[-1] == found["threads"] == expected
            assert torch.get_num_threads() == 8, "as before"
            shared = f"Measured with {expected} threads, as {options.get('nodes', 2)} nodes share this machine's cores"
            assert (shared in text) == (expected in (4, 2))
        monkeypatch.setenv("OMP_NUM_THREADS", "5")
        torch.set_num_threads(5)
        assert measured(stages=2)[0]["threads"] == 5
    finally:
        torch.set_num_threads(before)


def test_no_rank_has_more_threads_than_torch_or_fewer_than_one(monkeypatch):
    monkeypatch.setattr(command, "usable_cores", lambda: 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    config = transformers.GPT2Config()
    request = resolve_request(PlanOptions(model=config, measure=True, stages=2), NETWORKS, None)
    assert rank_threads(request, {}) == 6
    monkeypatch.setattr(command, "usable_cores", lambda: 1)
    assert rank_threads(request, {}) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"threads": 0, "measure": True}, "threads: got 0, allowed: a whole number from 1"),
        ({"threads": 2, "speed": "1"}, "threads: got 2, allowed: no value without --measure"),
        ({"samples": 0, "speed": "1"}, "samples: got 0"),
        ({"epochs": 2, "speed": "1"}, "epochs: got 2, allowed: no value without --samples"),
        ({"max_steps": 2, "speed": "1"}, "max-steps: got 2, allowed: no value without --samples"),
        ({"samples": 9, "stages": 2}, "samples: got 9, allowed: no value without --speed"),
    ],
)
def test_options_without_effect_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        PlanOptions(model="model", **given)


def test_too_few_samples_for_a_step_are_an_error(measured):
    with pytest.raises(ConfigError, match=r"samples: got 7, allowed: at least 8"):
        measured(stages=2, micro_batch=1, samples=7)


def test_gradients_as_changes_take_no_longer_than_themselves():
    """Both have the same bits: only the first visits differ."""
    both = [predict(job(), with_bits(config, 3, 6), uniform(2, 1e7)) for config in (AQSGD, DELTA)]
    assert both[0].step_s == pytest.approx(both[1].step_s, rel=0.01)
