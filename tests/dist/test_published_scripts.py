"""Scripts in the form that people publish run over two stages with two lines changed, as docs/scripts.md lists them."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

import tests.dist.published_work as work
from pipecomp.distributed.local_launcher import run_ranks
from tests.limits import HANG_S

pytest.importorskip("trl")
pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.ranks

PAGE = Path(__file__).parents[2] / "docs" / "scripts.md"
REFUSED = ("18_stream",)
STEPS = {  # of each training of a script
    "02_classification": [8],
    "05_optimizer_and_schedule": [6],
    "06_callbacks": [2],  # of 20: early stopping
    "07_resume": [2, 5],
    "08_push_to_hub": [3],
    "09_search": [2] * 5,
    "11_dpo": [3],
    "13_qlora": [3],
    "15_predict": [3],
}
USUAL_STEPS = [4]
WRITTEN = {
    "01_language_model": ("clm/model*.safetensors", "clm/all_results.json", "clm/trainer_state.json"),
    "02_classification": ("classifier/best/model*.safetensors", "classifier/checkpoint-*"),
    "06_callbacks": ("losses.csv",),
    "07_resume": ("resumable/checkpoint-5",),
    "08_push_to_hub": ("uploads.jsonl",),
    "09_search": ("search/best/model/model*.safetensors",),
    "10_sft": ("Qwen3-SFT/adapter_model*.safetensors",),
    "11_dpo": ("Qwen3-DPO/model*.safetensors",),
    "12_lora": ("lora/adapter/adapter_model*.safetensors",),
    "13_qlora": ("qlora/adapter/adapter_model*.safetensors",),
    "15_predict": ("submission.csv",),
    "16_collator": ("instructions/model*.safetensors",),
    "19_lengths_and_bf16": ("bf16/model*.safetensors",),
    "20_compile_and_tensorboard": ("compiled/**/events.out.tfevents.*",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("published")
    work.write_inputs(made)
    return made


@pytest.fixture(scope="module")
def two(folder: Path) -> dict[int, Any]:
    return run_ranks(2, work.run_scripts, str(folder), work.SCRIPTS, timeout_s=HANG_S)


@pytest.mark.parametrize("script", [script for script in work.SCRIPTS if script not in REFUSED])
def test_a_script_runs(script: str, folder: Path, two: dict[int, Any]) -> None:
    for rank in (0, 1):
        found = two[rank][script]
        assert found["error"] is None
        assert found["steps"] == STEPS.get(script, USUAL_STEPS)
        assert found["changed"] == [True] * len(found["steps"])
        assert found["losses"]
        assert not [words for words in found["warned"] if "lr_scheduler.step" in words], "an order that is right"
    for name in WRITTEN.get(script, ()):
        assert list(folder.glob(name)), name


def test_a_stream_is_refused_with_the_way(two: dict[int, Any]) -> None:
    for rank in (0, 1):
        found = two[rank]["18_stream"]
        assert found["error"].startswith("DataError: train_dataset: got IterableDataset")
        assert found["steps"] == []
        assert work.WAY_OF_STREAMS in found["error"]
        assert two[rank]["18_stream, the way"]["error"] is None
        assert two[rank]["18_stream, the way"]["changed"] == [True]


def test_files_have_what_the_scripts_write(folder: Path, two: dict[int, Any]) -> None:
    assert json.loads((folder / "clm" / "all_results.json").read_text())["perplexity"] < 300
    uploads = [json.loads(line) for line in (folder / "uploads.jsonl").read_text().splitlines()]
    assert [upload["message"] for upload in uploads] == ["End of training", "Training complete"]
    assert {"config.json", "model.safetensors.index.json", "README.md"} <= set(uploads[-1]["files"])
    rows = list(csv.reader((folder / "submission.csv").open()))
    assert len(rows) == 17
    assert len({probability for _, probability in rows[1:]}) > 8
    assert [row[0] for row in csv.reader((folder / "losses.csv").open())] == ["step", "2"]


def test_two_lines_change_in_every_script() -> None:
    assert len(work.SCRIPTS) == 20
    for script in work.SCRIPTS:
        (imported, ours), (made, ours_made) = work.changes(script)
        name = imported.rpartition(" ")[2]
        assert ours == f"from pipecomp import Pipeline{name}"
        assert ours_made == re.sub(rf"\b{name}\b", f"Pipeline{name}", made)
        text = work.stock(script)
        compile(text, script, "exec")
        assert "pipecomp" not in text.lower()
        assert "was:" not in text


def test_the_page_lists_them(two: dict[int, Any]) -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| [")]
    assert lines == [work.row(script, two[0][script]["error"]) for script in work.SCRIPTS]


@pytest.mark.soak
def test_the_scripts_as_they_were(folder: Path, two: dict[int, Any], tmp_path: Path) -> None:
    """Each runs in one process; the changed one logs all that it logs, and TRL's have its losses."""
    work.write_inputs(tmp_path / "stock")
    stock = run_ranks(1, work.run_stock, str(tmp_path / "stock"), work.SCRIPTS, timeout_s=HANG_S)[0]
    for script, found in stock.items():
        assert found["error"] is None, script
        if script in REFUSED:
            continue
        ours = two[0][script]
        assert found["steps"] == ours["steps"], script
        assert set(found["logged"]) <= {*ours["logged"], "eval_num_tokens"}, script
    assert two[0]["11_dpo"]["losses"] == pytest.approx(stock["11_dpo"]["losses"], rel=1e-5)
