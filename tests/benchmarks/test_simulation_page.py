"""benchmarks.simulation: measured rows predicted from their own counters."""

from __future__ import annotations

import pytest

from benchmarks import simulation, throughput
from benchmarks.throughput import findings, summaries
from pipecomp.plan.simulation import TCP_SHARE


def row(line="FP32", bits_per_s=None, C=1.0, seconds=10.0):
    """K = 2, M = 3: forward C, backward 2 C, encode 0.1 and decode 0.2 for each message; 100 bytes each way."""

    def rank(stage, update):
        parts = {"forward": 3 * C, "backward": 6 * C, "encode": 0.3, "decode": 0.6, "reduce": 0.5, "update": update}
        links = {"0->1": {"forward": 300.0, "backward": 300.0}}
        return {"stage": stage, "in_flight": 2 - stage, "seconds": {**parts, "wait": 9.0}, "links": links}

    return {
        "line": line,
        "r": 0 if bits_per_s is None else 1,
        "bits_per_s": bits_per_s,
        "seconds": seconds,
        "stages": 2,
        "micro_batches": 3,
        "delay": None,
        "ranks": [rank(0, 1.0), rank(1, 4.0)],
    }


def test_steps_are_predicted_from_counters():
    """The last stage waits in its update for the first: 0.5 + 1 s is what the end takes."""
    stock = {**row("DeepSpeed FP32"), "ranks": [None, None]}
    slow = row(bits_per_s=800 / TCP_SHARE, C=2.0)  # 1 s a message
    found = simulation.compare([row(), slow, stock])
    assert [f["line"] for f in found] == ["FP32", "FP32"]
    step = 3.3  # of a stage and micro-batch: encode and decode once each
    assert found[0]["own"] == pytest.approx(step * 4 + 1.5, abs=0.7)
    assert found[0]["free"] is None
    assert found[1]["own"] > found[1]["free"] > found[0]["own"] + 2
    text = "\n".join(simulation.measured_page(found))
    assert "of 2 within 10 %" in text
    assert "| FP32 | unlimited | 10.00 | 1" in text
    errors = row()
    for rank in errors["ranks"]:
        rank["bits"] = {"0->1": {"forward": 3.25, "backward": 5.0}}
    assert "| FP32 | unlimited | 10.00 | 3.25/5 | 1" in "\n".join(
        simulation.measured_page(simulation.compare([errors]))
    )


def test_bits_that_follow_an_error_are_counted_by_their_mean():
    found = simulation.llama()
    line, mbit = "AQ-SGD fw3 bw3, changes back", 100
    job = found[line, mbit].job
    seconds, sent = simulation.following(job, mbit, simulation.METHODS[line], None)
    assert seconds == pytest.approx(found[line, mbit].step_s)
    (first_f, first_b), (f, b) = simulation.bits_taken()
    assert 2 <= f < first_f <= 8
    assert 2 <= b < first_b <= 8
    section = simulation.constant_error.LINES[simulation.CONSTANT]
    fewer = simulation.following(job, mbit, section, (f, b))
    assert fewer[1] / sent == pytest.approx((f + b) / 6, rel=0.01)
    assert fewer[0] < seconds


def test_rounds_are_put_together_and_compared_with_what_was_to_be_shown():
    stock, line = "DeepSpeed FP32", "AQ-SGD fw3 bw6, 16 micro-batches"
    compute_s = 8 * 2 * 2**20 / (800 * 4.0)  # of a micro-batch, for r = 4
    runs = [
        {
            **row(name, None if r == 0 else 800),
            "r": r,
            "setting": "2 stages",
            "turn": turn,
            "steps": [s, s + turn],
            "micro_batches": 16,
            "compute_s": None if name == stock else compute_s / (2 if r == 0 else 7),
        }
        for turn in (1, 0)
        for name, r, s in ((stock, 0.0, 2.0), (stock, 5.8, 15.0), (line, 0.0, 2.0), (line, 5.8, 2.5))
    ]
    rows = summaries(runs)
    assert (rows["2 stages", 5.8, line]["seconds"], rows["2 stages", 5.8, line]["most"]) == (2.5, 3.5)
    said = "\n".join(findings(rows))
    assert said == f"{line}, at r = 4 (0.0 Mbit/s): 6.00 × (aim: 6 at r = 5.8)."
    assert throughput.link_rate([{**runs[4], "line": "FP32", "compute_s": 0.5}], 2, 2.0) == 8 * 2 * 2**20
    for setting in throughput.SETTINGS.values():
        assert set(setting.lines) <= set(throughput.BY_NAME)


def test_what_the_paper_measured_is_near_for_quantized_runs():
    for name in ("AQ-SGD fw3 bw6", "AQ-SGD fw4 bw8"):
        for mbit in (10_000, 300, 100):
            paper = simulation.PAPER[name][mbit]
            assert simulation.gpt2(mbit, simulation.METHODS[name]) == pytest.approx(paper, rel=0.06)
