"""`pipecomp bench pipeline` on a model that takes no time: every kind of line trains, over a slow link too."""

from __future__ import annotations

import contextlib
import os
import shutil

import pytest

from pipecomp.bench import pipeline
from pipecomp.bench.configurations import LINES, TWICE, Model, lines_of, local_lines, message_bytes, rates_of
from pipecomp.bench.pipeline import bench_pipeline, counted, pipeline_table
from pipecomp.config import Config
from pipecomp.errors import ConfigError

pytestmark = pytest.mark.ranks
SMALL = Model(blocks=2, width=32, heads=2, tokens=16, vocabulary=64, samples=8)

SMALL_STEPS = Model(blocks=2, width=32, heads=2, tokens=16, vocabulary=64, samples=16)


@pytest.mark.soak
def test_lines_train_alike_over_a_slow_link():
    if os.geteuid() != 0 or shutil.which("tc") is None:
        pytest.skip("network namespaces need root and iproute2")
    wanted = [line for line in LINES if line.name in ("DeepSpeed FP32", "FP32", "AQ-SGD fw3 bw6")]
    seen = []
    rows = bench_pipeline(lines=wanted, rates=[5.8], steps=2, model=SMALL, on_row=seen.append)
    assert seen == rows
    stock, plain, small = rows
    assert stock["loss"] == pytest.approx(plain["loss"], rel=0.002)  # it clips by the first stage's norm alone
    assert small["loss"] == pytest.approx(plain["loss"], rel=0.02)
    assert small["bytes"] < plain["bytes"]
    for row in rows:
        assert row["bits_per_s"] == rows[0]["bits_per_s"]
        assert row["least"] <= row["seconds"] <= row["most"]
    assert pipeline_table(rows).row_count == 3
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

    monkeypatch.setattr(pipeline, "Lab", FakeLab)
    pipeline.measure(LINES[0], SMALL, 2, 1, None, None)
    assert seen == [(pipeline.train, {"DS_ACCELERATOR": "cpu"})]


def test_a_row_has_the_bits_of_its_own_steps():
    def stats(codes, values):
        ways = {"forward": {"bytes_sent": codes // 8, "code_bits": codes, "values_quantized": values}}
        ways["backward"] = {"bytes_sent": 0, "code_bits": 0, "values_quantized": 0}
        return {"stage": 0, "in_flight": 1, "seconds": {"wait": 1.0}, "links": {"0->1": ways}}

    found = counted(stats(800, 100), stats(1120, 200), 2)
    assert found["bits"] == {"0->1": {"forward": 3.2, "backward": None}}
    assert found["links"] == {"0->1": {"forward": 20.0, "backward": 0.0}}
    row = {"r": 0, "line": "errors", "bits_per_s": None, "replicas": 1, "in_flight": 2, "ranks": [found, None]}
    row |= {"seconds": 1.0, "least": 1.0, "most": 1.0}
    assert list(pipeline_table([row]).columns[-1].cells) == ["3.2/–"]
    free = {**row, "line": "DeepSpeed FP32", "seconds": 4.0, "least": 3.0, "most": 5.0}
    slow = {**free, "r": 3, "bits_per_s": 2.5e6, "seconds": 16.0, "in_flight": None}
    ours = {**row, "r": 3, "bits_per_s": 2.5e6, "seconds": 2.0}
    cells = list(zip(*(column.cells for column in pipeline_table([free, row, slow, ours]).columns), strict=True))
    assert cells[2][:-1] == ("3", "2.5", "DeepSpeed FP32", "16.00", "3.00", "5.00", "1.00", "0.25", "")
    assert cells[3][:-1] == ("3", "2.5", "errors", "2.00", "1.00", "1.00", "8.00", "0.50", "2")
    found["bits"]["0->1"]["forward"] = None
    assert list(pipeline_table([row]).columns[-1].cells) == [""]


@pytest.mark.soak
def test_steps_between_averages_are_timed_together():
    if os.geteuid() != 0 or shutil.which("tc") is None:
        pytest.skip("network namespaces need root and iproute2")
    (line,) = lines_of("2 bits every 4", "4")
    (row,) = bench_pipeline(lines=[line], rates=[0], steps=1, model=SMALL_STEPS)
    assert row["replicas"] == 2
    assert sum(rank["seconds"]["reduce"] for rank in row["ranks"]) > 0


def test_local_lines_have_settings_that_are_allowed():
    for line in local_lines(2) + local_lines(16):
        assert Config.from_dict(line.section).gradients.local is not None


def test_what_r_means():
    assert message_bytes(Model(samples=16, tokens=256, width=512), micro_batches=8) == 2 * 2 * 256 * 512 * 4


def test_names_and_rates_are_checked():
    assert lines_of(None) == LINES
    assert [line.name for line in lines_of("deepspeed")] == ["DeepSpeed FP32", "DeepSpeed BF16", TWICE]
    with pytest.raises(ConfigError, match="DeepSpeed FP32"):
        lines_of("megatron")
    assert [line.period for line in lines_of("every", "8,32")] == [8] * 5 + [32] * 5
    assert lines_of(None, "4")[: len(LINES)] == LINES
    with pytest.raises(ConfigError, match="local_steps"):
        lines_of(None, "8,1")
    assert rates_of("0,5.8") == (0.0, 5.8)
    with pytest.raises(ConfigError, match="rates"):
        rates_of("fast")
