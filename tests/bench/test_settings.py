"""Benchmarks refuse what they cannot measure before they begin, in one line."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from pipecomp.bench import store
from pipecomp.bench.kernels import OPERATIONS, cases
from pipecomp.cli import app


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("store", "--samples", "0"), "samples: got 0, allowed: a whole number of at least 1"),
        (("store", "--epochs", "0"), "epochs: got 0, allowed: a whole number of at least 1"),
        (("store", "--folder", "/no/such/folder"), "folder: got '/no/such/folder', allowed: a folder that is there"),
        (("kernels", "--operation", "quantise"), "operation: got 'quantise', allowed: delta_quantize, "),
        (("kernels", "--threads", "0"), "threads: got 0, allowed: a whole number of at least 1"),
        (("kernels", "--device", "gpu"), "device: got 'gpu', allowed: cpu or cuda"),
        (("kernels", "--device", "cuda"), "finds no CUDA device here"),
    ],
)
def test_errors_are_one_line(monkeypatch, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit), done.exception
    assert message in done.output
    assert done.output.count("\n") == 1


def test_every_kernel_can_be_asked_for_by_name():
    found = [case.operation for case in cases((2, 4, 32), (2, 4), "auto", "cpu")]
    assert list(dict.fromkeys(found)) == list(OPERATIONS)


@pytest.mark.parametrize(("samples", "put_ms"), [(4, 250.0), (8, 125.0), (12, (125.0 + 250.0) / 2)])
def test_times_are_of_the_samples_that_there_are(monkeypatch, tmp_path, samples, put_ms):
    """With a clock that ticks once a look: the last step may have fewer samples than others."""
    clock = SimpleNamespace(perf_counter=itertools.count().__next__, sleep=lambda seconds: None)
    monkeypatch.setattr(store, "time", clock)
    sizes = {"hidden": (32,), "bits": (8,), "tokens": 4, "samples": samples, "epochs": 1}
    (row,) = store.bench_store(**sizes, backends=("memory",), folder=tmp_path)
    assert row["put_ms"] == row["get_ms"] == row["prefetched_get_ms"] == put_ms
    assert row["write_ms"] == 2 * put_ms
    assert list(tmp_path.iterdir()) == []
