"""A script for transformers' Trainer, changed in the import and the class, over two processes."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tests.dist.trainer_work as work
from tests.limits import HANG_S

pytestmark = [pytest.mark.ranks, pytest.mark.soak]

ROOT = Path(__file__).parents[2]
STOCK = ROOT / "examples" / "text_classification.py"
PIPELINE = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ARGUMENTS = shlex.split("""
    --model start --train_file train.jsonl --eval_file dev.jsonl
    --per_device_train_batch_size 4 --per_device_eval_batch_size 4 --num_train_epochs 6
    --learning_rate 5e-3 --eval_strategy epoch --save_strategy epoch
    --load_best_model_at_end True --metric_for_best_model accuracy --patience 2
    --report_to none --train_sampling_strategy sequential --logging_strategy epoch
    --use_cpu True
""")


def words(path: Path) -> None:
    """A model and a tokenizer that splits at spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"[PAD]": 0, "[UNK]": 1, **{f"w{i}": i for i in range(2, work.VOCABULARY)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_max_length=work.WORDS,
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(path)
    work.bert(dropout=0.0).save_pretrained(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script")
    words(path / "start")
    for name, count, seed in (("train", 43, 0), ("dev", 18, 5)):
        rows = [
            {"text": " ".join(f"w{n}" for n in s["input_ids"]), "label": s["label"], "source": "made"}
            for s in work.sentences(count, seed=seed)
        ]
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(folder: Path, script: Path, out: str, *launcher: str, more: tuple[str, ...] = ()) -> tuple[dict[str, Any], str]:
    """Return the script's last evaluation and its output."""
    env = {**os.environ, "HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    env |= {"TRACKIO_DIR": str(folder / "kept")}
    words = [sys.executable, *launcher, str(script), *ARGUMENTS, "--output_dir", out, *more]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / out / "eval_results.json").read_text()), done.stdout + done.stderr


CURVES = {  # and how often: after each of two epochs, and the script evaluates once more at its end
    "train/loss": 2,
    "train/learning_rate": 2,
    "train/link_compression": 2,
    "train/link_forward_mb_per_s": 2,
    "train/link_slowest_wait": 2,
    "eval/accuracy": 3,
}


@pytest.fixture(scope="module")
def changed(folder: Path) -> Path:
    """The example for Trainer, with the two lines of examples/README.md changed."""
    text = STOCK.read_text()
    changes = {
        "    Trainer,\n": "",
        "from transformers import (": "from pipecomp import PipelineTrainer\nfrom transformers import (",
        "trainer = Trainer(": "trainer = PipelineTrainer(",
    }
    for old, new in changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    script = folder / "changed.py"
    script.write_text(text)
    return script


def test_two_lines_put_a_script_for_trainer_on_a_pipeline(folder: Path, changed: Path) -> None:
    theirs, _ = run(folder, STOCK, "stock")
    ours, printed = run(
        folder, changed, "pipeline", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    )
    same = ("eval_loss", "eval_accuracy", "epoch")
    assert {key: ours[key] for key in same} == pytest.approx({key: theirs[key] for key in same}, rel=1e-4)
    assert theirs["epoch"] < 6, "early stopping must have its turn"
    assert "100%" in printed, "the progress bar"
    states = [json.loads((folder / out / "trainer_state.json").read_text()) for out in ("stock", "pipeline")]
    for line, other in zip(*(state["log_history"] for state in states), strict=True):
        assert set(line) <= set(other)
        assert other.get("loss", 0.0) == pytest.approx(line.get("loss", 0.0), rel=1e-4)
    assert states[0]["best_global_step"] == states[1]["best_global_step"]

    card = (folder / "pipeline" / "README.md").read_text()
    assert "pipeline_stages: 2" in card
    assert "total_train_batch_size" not in card, "one replica: a step has one batch"
    from transformers import AutoModelForSequenceClassification

    AutoModelForSequenceClassification.from_pretrained(folder / "pipeline")


def report_to(name: str, folder: Path, script: Path) -> None:
    """A run whose curves go to one of Trainer's own integrations, without a network."""
    more = ("--report_to", name, "--num_train_epochs", "2", "--run_name", "mine", "--project", "pipes")
    run(folder, script, name, *PIPELINE, more=more)


def test_tensorboard_has_pipecomp_s_figures(folder: Path, changed: Path) -> None:
    pytest.importorskip("tensorboard", reason="no tensorboard (pip install tensorboard)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report_to("tensorboard", folder, changed)
    files = list((folder / "tensorboard").rglob("events.out.tfevents.*"))
    assert len({file.name.split(".")[-2] for file in files}) == 1, "one rank's process writes, not each"
    board = EventAccumulator(str(files[0].parent))
    board.Reload()
    for curve, times in CURVES.items():
        assert len(board.Scalars(curve)) == times, curve
    assert all(event.value == pytest.approx(1.0, abs=0.2) for event in board.Scalars("train/link_compression"))


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="no trackio (pip install trackio)")
def test_trackio_has_pipecomp_s_figures(folder: Path, changed: Path) -> None:
    report_to("trackio", folder, changed)
    logged = rows(folder / "kept" / "pipes.db")
    for curve, times in CURVES.items():
        assert sum(curve in values for values in logged) == times, curve


def rows(file: Path) -> list[dict[str, Any]]:
    """Return trackio's records of the run "mine"."""
    found = sqlite3.connect(file).execute("SELECT run_name, metrics FROM metrics ORDER BY id").fetchall()
    return [json.loads(values) for name, values in found if name == "mine"]
