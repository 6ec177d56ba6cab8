"""The same script under torchrun and under accelerate's launcher, whose environment variables it follows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.limits import HANG_S

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "accelerate_script.py"
ACCELERATE = ("accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--mixed_precision", "no")


def launch(folder: Path, *words: str) -> list[dict[str, Any]]:
    """Return the results of both ranks."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", *words, str(SCRIPT), str(folder)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


def test_accelerate_starts_stages_as_torchrun_does(tmp_path: Path) -> None:
    (tmp_path / "torchrun").mkdir()
    (tmp_path / "accelerate").mkdir()
    expected = launch(tmp_path / "torchrun", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    words = (*ACCELERATE, "--num_processes", "2", "--main_process_port", "0", "--dynamo_backend", "eager")
    found = launch(tmp_path / "accelerate", *words)
    assert [rank["stages"] for rank in found] == [2, 2]
    assert [rank["compiled"] for rank in found] == [1, 1]
    assert [rank["compiled"] for rank in expected] == [0, 0]
    for own, theirs in zip(found, expected, strict=True):
        assert own["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
