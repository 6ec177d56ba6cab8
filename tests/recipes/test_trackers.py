"""Curves for trackers: what Hugging Face's integrations write of a recipe's run, without a network."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
from pathlib import Path

import pytest

from tests.models import made_up_text
from tests.recipes.recipe_runs import ROOT, Ended, launch

pytestmark = pytest.mark.ranks


def run_with(folder: Path, name: str) -> Ended:
    """One process, two steps and an evaluation."""
    (folder / "a.txt").write_text(made_up_text(60, 0))
    config = str(ROOT / "recipes" / "gpt2_wikitext2" / "ds_config_cpu_fp32.json")
    files = ["--train-file", "a.txt", "--eval-file", "a.txt", "--metrics", "m.jsonl", "--out", "run"]
    model = ["--model", "tiny", "--tokenizer", "train:300", "--block-size", "16", "--max-steps", "2"]
    return launch(
        folder,
        "gpt2_wikitext2",
        *["--deepspeed_config", config, *model, *files, "--report-to", name],
        processes=1,
    )


def losses(folder: Path) -> tuple[list[float], list[float]]:
    """Return the losses of steps and of evaluations."""
    lines = [json.loads(line) for line in (folder / "m.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line], [
        line["eval"]["loss"] for line in lines if "eval" in line
    ]


def test_tensorboard_has_the_curves(tmp_path):
    pytest.importorskip("tensorboard", reason="no tensorboard (pip install tensorboard)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ended = run_with(tmp_path, "tensorboard")
    assert ended.status == 0, ended.output
    (file,) = (tmp_path / "run").rglob("events.out.tfevents.*")
    found = EventAccumulator(str(file))
    found.Reload()
    steps, evaluations = losses(tmp_path)
    assert [e.value for e in found.Scalars("train/loss")] == pytest.approx(steps)
    assert [e.step for e in found.Scalars("train/loss")] == [1, 2]
    assert [e.value for e in found.Scalars("eval/loss")] == pytest.approx(evaluations)
    assert {"train/learning_rate", "train/tokens_per_second", "eval/perplexity"} <= set(found.Tags()["scalars"])
    assert "GPT2LMHeadModel" in str(found.Tensors("model_config/text_summary"))


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="no trackio (pip install trackio)")
def test_trackio_has_the_curves(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ended = run_with(tmp_path, "trackio")
    assert ended.status == 0, ended.output
    (file,) = (tmp_path / "trackio").glob("*.db")
    rows = sqlite3.connect(file).execute("SELECT run_name, metrics FROM metrics ORDER BY id").fetchall()
    logged = [json.loads(metrics) for name, metrics in rows if name == "gpt2_wikitext2"]
    assert [values["train/loss"] for values in logged if "train/loss" in values] == pytest.approx(losses(tmp_path)[0])


def test_a_tracker_that_is_not_known_is_an_error(tmp_path):
    ended = run_with(tmp_path, "carrier-pigeon")
    assert ended.status == 1
    assert "gpt2_wikitext2: error: --report-to: got 'carrier-pigeon'" in ended.output
