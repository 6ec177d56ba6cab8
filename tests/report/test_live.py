"""The live line's figures: differences since the last one, and what they are in words."""

from __future__ import annotations

import pytest

from pipecomp.config import Config
from pipecomp.report.progress import LinkMeter, RemainingTime, format_left, format_progress
from tests.report.runs import AQSGD, MICRO_BATCHES, counters, made_step


def test_figures_are_those_since_the_last_time():
    step = made_step(Config.from_dict({"activations": AQSGD}), stages=3)
    meter = LinkMeter()
    meter.spent += 10.0
    meter.since_last(counters(step, 5, wait_s=0.1))
    for _ in range(4):
        meter.spent += 1.0
    found = meter.since_last(counters(step, 9, wait_s=0.25))
    moved = 4 * MICRO_BATCHES * sum(step.forward_bytes)
    assert found["forward_mb_per_s"] == pytest.approx(moved / 4.0 / 1e6)
    assert found["compression"] == pytest.approx(
        2 * 2 * 4 * 256 * 64 * 4 / (sum(step.forward_bytes) + sum(step.backward_bytes))
    )
    assert found["slowest_wait"] == pytest.approx((9 * 0.25 - 5 * 0.1) / 4.0)
    meter.spent += 1.0
    assert meter.since_last(counters(step, 9, wait_s=0.25)) == {}  # nothing was sent


def test_the_link_where_a_stage_waited_longest():
    meter = LinkMeter()
    step = made_step(Config.from_dict({"activations": AQSGD}), stages=3)
    for steps, wait_s, share in ((5, 4.0, 0.4), (9, 100.0, 1.0)):
        stats = counters(step, steps, wait_s=0.1)
        for rank in stats[1:]:
            rank["links"]["1->2"]["wait_seconds"] = wait_s
        meter.spent += 10.0
        found = meter.since_last(stats)
        assert (found["slowest_link"], found["slowest_wait"]) == ("1->2", pytest.approx(share))


def test_in_words():
    figures = {"forward_mb_per_s": 1.25, "backward_mb_per_s": 0.5, "compression": 7.94, "slowest_link": "0->1"}
    text = format_progress({**figures, "slowest_wait": 0.412})
    assert text == "1.2 MB/s forward  500.0 kB/s back  7.9× less  link 0->1 waits 41 %"
    assert "less" not in format_progress({**figures, "compression": 1.0, "slowest_wait": 0.0})
    assert format_progress({}) == ""


def test_the_time_left_goes_by_the_last_steps_and_what_is_between_them():
    remaining = RemainingTime(200)
    assert remaining.after(11, 50.0) is None, "the first step of a resumed run"
    assert remaining.after(12, 53.0) == 188 * 3.0
    assert remaining.after(13, 60.0) == 187 * 5.0, "an evaluation"
    for step in range(14, 151):
        left = remaining.after(step, 60.0 + step - 13)
    assert left == 50.0, "not the slow start"
    assert remaining.after(200, 400.0) == 0.0


def test_the_time_left_in_words():
    assert format_left(754.0) == "12 min 34 s left"
    assert format_left(None) == format_left(0.0) == ""
