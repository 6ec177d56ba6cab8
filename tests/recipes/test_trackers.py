"""Curves for trackers: what Hugging Face's integrations write of a recipe's run, without a network."""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3

import pytest
import torch
import torch.distributed as dist

from pipecomp.errors import ConfigError
from pipecomp.recipes.trackers import Trackers

VALUES = {"loss": 2.5, "learning_rate": 1e-3, "tokens_per_second": 100.0, "link_forward_mb_per_s": 1.5}


def tell(names, folder):
    with Trackers(names, folder, "my run") as trackers:
        trackers.begin({"model": "GPT2LMHeadModel", "stages": 2})
        for step in (1, 2):
            trackers.log(step, {**VALUES, "loss": VALUES["loss"] / step})
        trackers.log(2, {"eval_loss": 1.25})


def test_tensorboard_has_the_curves(tmp_path):
    pytest.importorskip("tensorboard", reason="no tensorboard (pip install tensorboard)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tell(["tensorboard"], tmp_path)
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    found = EventAccumulator(str(file))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("train/loss")] == [(1, 2.5), (2, 1.25)]
    assert [e.value for e in found.Scalars("train/link_forward_mb_per_s")] == [1.5, 1.5]
    assert [e.value for e in found.Scalars("eval/loss")] == [1.25]
    assert "GPT2LMHeadModel" in str(found.Tensors("model_config/text_summary"))


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="no trackio (pip install trackio)")
def test_trackio_has_the_curves(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tell(["trackio"], tmp_path)
    (file,) = (tmp_path / "trackio").glob("*.db")
    rows = sqlite3.connect(file).execute("SELECT run_name, metrics FROM metrics ORDER BY id").fetchall()
    logged = [json.loads(metrics) for name, metrics in rows if name == "my run"]
    assert [values["train/loss"] for values in logged if "train/loss" in values] == [2.5, 1.25]
    assert logged[0]["train/link_forward_mb_per_s"] == 1.5


def test_a_ranks_environment_and_threads_stay(tmp_path, monkeypatch):
    """As deepspeed's launcher starts the first of two ranks of a machine; accelerate would have it for itself."""
    from accelerate.state import AcceleratorState

    threads = torch.get_num_threads()
    monkeypatch.setattr("transformers.integrations.get_reporting_integration_callbacks", lambda names: [])
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    before = dict(os.environ)
    try:
        torch.set_num_threads(3)
        tell(["none of them"], tmp_path)
        assert torch.get_num_threads() == 3
        assert dict(os.environ) == before
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)
        AcceleratorState._reset_state(reset_partial_state=True)


def test_without_names_nothing_is_loaded_or_written(tmp_path):
    tell([], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_that_is_not_known_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="--report-to: got 'carrier-pigeon'"):
        Trackers(["carrier-pigeon"], tmp_path, "run")
