"""The benchmarks' lines on a model that takes no time: every kind trains, over a slow link too."""

from __future__ import annotations

import contextlib
import os
import shutil

import pytest

from benchmarks import steps
from benchmarks.steps import LINES, counted, local_lines
from pipecomp.bench.training import Model, message_bytes, rate_for
from pipecomp.config import Config

pytestmark = pytest.mark.ranks
SMALL = Model(blocks=2, width=32, heads=2, tokens=16, vocabulary=64, samples=8)

SMALL_STEPS = Model(blocks=2, width=32, heads=2, tokens=16, vocabulary=64, samples=16)


@pytest.mark.soak
def test_lines_train_alike_over_a_slow_link():
    if os.geteuid() != 0 or shutil.which("tc") is None:
        pytest.skip("network namespaces need root and iproute2")
    wanted = [line for line in LINES if line.name in ("DeepSpeed FP32", "FP32", "AQ-SGD fw3 bw6")]
    rate = rate_for(SMALL, 5.8, steps.reference_compute(SMALL, 2))
    rows = [steps.summary([{"bits_per_s": rate, **steps.measure(line, SMALL, 2, 2, rate, None)}]) for line in wanted]
    stock, plain, small = rows
    assert stock["loss"] == pytest.approx(plain["loss"], rel=0.002)  # it clips by the first stage's norm alone
    assert small["loss"] == pytest.approx(plain["loss"], rel=0.02)
    assert small["bytes"] < plain["bytes"]
    for row in rows:
        assert row["bits_per_s"] == rows[0]["bits_per_s"]
        assert row["least"] <= row["seconds"] <= row["most"]
    assert stock["ranks"] == [None, None]
    assert plain["ranks"][0]["bits"] == {"0->1": {"forward": None, "backward": None}}
    assert small["ranks"][1]["bits"] == {"0->1": {"forward": 3, "backward": 6}}
    for row in (plain, small):
        for rank in row["ranks"]:
            sent = sum(rank["links"]["0->1"].values())
            assert set(rank["seconds"]) == {"forward", "backward", "encode", "decode", "wait", "reduce", "update"}
            assert sum(rank["seconds"].values()) < row["most"]
            assert 0 < sent < row["bytes"]


def test_ranks_are_told_to_compute_on_the_cpu(monkeypatch):
    """Before they import anything."""
    seen = []

    class FakeLab(contextlib.nullcontext):
        def __init__(self, **options):
            super().__init__(self)

        def run(self, function, *args, **options):
            seen.append((function, options["environment"]))
            row = {"steps": [1.0], "wait_s": None, "in_flight": None, "compute_s": None, "bytes": 1, "loss": 1.0}
            return {0: {**row, "counted": None}}

    monkeypatch.setattr(steps, "Lab", FakeLab)
    steps.measure(LINES[0], SMALL, 2, 1, None, None)
    assert seen == [(steps.train, {"DS_ACCELERATOR": "cpu"})]


def test_a_row_has_the_bits_of_its_own_steps():
    def stats(codes, values):
        ways = {"forward": {"bytes_sent": codes // 8, "code_bits": codes, "values_quantized": values}}
        ways["backward"] = {"bytes_sent": 0, "code_bits": 0, "values_quantized": 0}
        return {"stage": 0, "in_flight": 1, "seconds": {"wait": 1.0}, "links": {"0->1": ways}}

    found = counted(stats(800, 100), stats(1120, 200), 2)
    assert found["bits"] == {"0->1": {"forward": 3.2, "backward": None}}
    assert found["links"] == {"0->1": {"forward": 20.0, "backward": 0.0}}
    row = {"ranks": [found, None]}
    assert steps.mean_bits(row) == "3.2/–"
    found["bits"]["0->1"]["forward"] = None
    assert steps.mean_bits(row) == ""


@pytest.mark.soak
def test_steps_between_averages_are_timed_together():
    if os.geteuid() != 0 or shutil.which("tc") is None:
        pytest.skip("network namespaces need root and iproute2")
    (line,) = (line for line in local_lines(4) if "2 bits every 4" in line.name)
    row = steps.measure(line, SMALL_STEPS, 2, 1, None, None)
    assert row["replicas"] == 2
    assert sum(rank["seconds"]["reduce"] for rank in row["ranks"]) > 0


def test_local_lines_have_settings_that_are_allowed():
    for line in local_lines(2) + local_lines(16):
        assert Config.from_dict(line.section).gradients.local is not None


def test_what_r_means():
    assert message_bytes(Model(samples=16, tokens=256, width=512), micro_batches=8) == 2 * 2 * 256 * 512 * 4
