"""PipelineSFTTrainer and PipelineDPOTrainer train what TRL's trainers train in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.dist.trl_work as work
from pipecomp.distributed.local_launcher import run_ranks
from tests.limits import HANG_S

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.ranks

LIMIT = 1e-5
ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "sft": ("messages", "--four_bits True --assistant_only_loss True --packing True"),
    "dpo": ("prompt", "--loss_type ipo"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("trl")
    work.write_model(made / "model")
    torch.set_num_threads(1)
    return made


@pytest.fixture(scope="module")
def two(folder: Path) -> dict[int, Any]:
    return run_ranks(2, work.everything, str(folder), timeout_s=2 * HANG_S)


def check(name: str, folder: Path, ranks: dict[int, Any], *, logged_too: bool = True) -> None:
    alone = work.train_alone(name, folder)
    expected = work.losses(alone)
    assert max(expected) > 1.002 * min(expected), "nothing was learned"
    found = work.compare(alone, {rank: results[name] for rank, results in ranks.items()}, logged_too=logged_too)
    assert max(found) < LIMIT, found


@pytest.mark.parametrize("name", work.CASES)
def test_two_stages(name: str, folder: Path, two: dict[int, Any]) -> None:
    check(name, folder, two)


def test_each_sequence_of_a_pair_is_cached(two: dict[int, Any]) -> None:
    for rank in (0, 1):
        found = two[rank]["cached"]
        assert found["held"] == [list(range(2 * found["pairs"]))]
        each = len(found["rates"]) // 2
        assert found["rates"] == [0.0] * each + [1.0] * each


@pytest.mark.soak
@pytest.mark.parametrize("stages", [1, 3])
def test_more_stages(stages: int, folder: Path) -> None:
    names = list(work.CASES)
    ranks = run_ranks(stages, work.train_cases, str(folder), names, timeout_s=2 * HANG_S)
    for name in names:
        check(name, folder, ranks)


@pytest.mark.soak
def test_more_cases(folder: Path) -> None:
    names = list(work.MORE_CASES)
    ranks = run_ranks(2, work.train_cases, str(folder), names, timeout_s=2 * HANG_S)
    for name in names:
        # Note: accuracies compare rewards that are both about 0 before the first update; rounding decides.
        check(name, folder, ranks, logged_too=False)


@pytest.mark.soak
def test_a_resumed_run_has_the_same_losses(folder: Path) -> None:
    """DPO's reference is the model before training, not the checkpoint's."""
    for found in run_ranks(2, work.train_resumed, str(folder), timeout_s=2 * HANG_S).values():
        for whole, resumed in found.values():
            assert resumed == whole
            assert len(whole) == 16


@pytest.mark.soak
def test_the_command(folder: Path) -> None:
    work.write_inputs(folder)
    run_ranks(2, work.train_by_command, str(folder), timeout_s=2 * HANG_S)
    for name in work.COMMAND_CASES:
        alone, found = work.train_like_command(name, folder), work.command_result(name, folder)
        difference = work.compare(alone, {0: found}, logged_too=False)
        assert difference.loss < LIMIT, name
        assert difference.weight < 2 * LIMIT, name  # AdamW's steps are as large where a gradient is only rounding noise


@pytest.mark.soak
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str, folder: Path) -> None:
    kind, options = EXAMPLES[name]
    work.data_of(kind, preferences=name == "dpo").to_json(folder / f"{name}.jsonl")
    command = f"""
        -m torch.distributed.run --standalone --nproc-per-node 2 {ROOT}/examples/{name}.py --model {folder}/model
        --data {folder / name}.jsonl --lora 4 --output_dir {folder / name} --max_steps 4 --logging_steps 1 {options}
        --use_cpu True --bf16 False --report_to none --save_strategy no
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_DATASETS_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, *command.split()],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert (folder / name / "adapter_model.safetensors").is_file()
    report = (folder / name / "metrics.jsonl").read_text()
    assert report.count('"loss"') >= 4
