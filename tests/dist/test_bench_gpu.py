"""The steps of `pipecomp bench gpu` on a model that takes no time, on the CPU: each line trains over a slow link."""

from __future__ import annotations

import pytest

from pipecomp.bench import gpu_steps
from pipecomp.bench.training import Model
from pipecomp.netlab import namespaces
from tests.dist.lab_ranks import run_in_lab
from tests.limits import HANG_S

pytestmark = pytest.mark.ranks
SMALL = Model(blocks=2, width=32, heads=2, tokens=16, vocabulary=64, samples=8)


def run(lab, function, *args):
    return run_in_lab(lab, function, *args, timeout_s=HANG_S)


@pytest.fixture(autouse=True)
def software(monkeypatch):
    monkeypatch.setattr(namespaces, "missing", lambda: "no root here")


@pytest.mark.soak
def test_lines_train_alike_over_a_throttle_that_holds_stock_deepspeed_back_too():
    compute_s = gpu_steps.stage_seconds(SMALL, "cpu", repeats=1)
    rows = list(gpu_steps.measure_steps(SMALL, [5.8], compute_s, run, steps=2))
    stock, small = rows
    assert [row["line"] for row in rows] == ["DeepSpeed BF16", gpu_steps.EVERYTHING]
    assert small["loss"] == pytest.approx(stock["loss"], rel=0.02)
    packets = 2 * 8 * 2 * SMALL.tokens * SMALL.width  # of a step: both ways, 8 micro-batches of BF16 values
    assert stock["sent"] > 3 * packets
    assert all(row["least"] <= row["ms"] <= row["most"] for row in rows)


def test_waits_of_a_step():
    assert gpu_steps.find_waits(SMALL, run) == {0: [], 1: []}
