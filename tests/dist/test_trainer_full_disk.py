"""PipelineTrainer where the disk refuses checkpoints: all ranks say which and why, and the training goes on."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

import tests.dist.trainer_work as work
from pipecomp.distributed.local_launcher import run_ranks
from tests.dist.reliability_work import error_of, redirect
from tests.limits import HANG_S
from tests.models import gpt2, samples

pytestmark = [pytest.mark.ranks, pytest.mark.soak]
REFUSED = {2: (1, "model-00002"), 3: (0, "trainer_state.json"), 4: (1, "mp_rank"), 5: (0, "training_args.bin")}


def refuse(rank: int, folder: str) -> None:
    """From now on the disk is full for one file of each of these checkpoints, on one of the ranks."""
    import safetensors.torch as safetensors
    from safetensors import SafetensorError

    import pipecomp.checkpoint.writing as writing
    from pipecomp.trainer import checkpoints, model_io

    def full(path: Any) -> bool:
        wanted = [(r, f"checkpoint-{step}/", name) for step, (r, name) in REFUSED.items()]
        return any(rank == r and place in str(path) and name in str(path) for r, place, name in wanted)

    save_file, write_state, complete = safetensors.save_file, writing.write_state, checkpoints.complete

    def saves(tensors: Any, path: str, **more: Any) -> None:
        if full(path):
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save_file(tensors, path, **more)

    def writes(state: Any, path: Any) -> None:
        if full(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write_state(state, path)

    def completes(where: str, *more: Any) -> None:
        if full(f"{where}/trainer_state.json"):
            Path(where, "trainer_state.json").write_text("{")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{where}/trainer_state.json")
        complete(where, *more)

    safetensors.save_file, checkpoints.complete = saves, completes
    writing.write_state = model_io.write_state = checkpoints.write_state = writes


def trains(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    from pipecomp import PipelineTrainer

    redirect(f"{folder}/said-{rank}")

    def trainer(where: str, **more: Any) -> Any:
        args = work.arguments(f"{folder}/{where}", **more)
        return PipelineTrainer(gpt2(2, 16), args, train_dataset=samples(9), pipecomp=work.AQSGD, report=False)

    expected = trainer("undisturbed")
    expected.train()
    expected.end()
    refuse(rank, folder)
    found = trainer("full", save_strategy="steps", save_steps=1, save_total_limit=3)
    found.train()
    again = error_of(lambda: found.save_model(f"{folder}/checkpoint-2/model"))
    found.end()
    same = work.losses(found) == work.losses(expected)
    return {"same": same, "folders": work.folders(f"{folder}/full"), "saved": again}


@pytest.mark.timeout(HANG_S)
def test_training_goes_on_without_the_checkpoints_that_the_disk_refuses(tmp_path: Path) -> None:
    ranks = run_ranks(2, trains, str(tmp_path), timeout_s=HANG_S)
    for rank, out in ranks.items():
        said = (tmp_path / f"said-{rank}").read_text()
        assert out["same"]
        assert out["folders"] == ["checkpoint-1", "checkpoint-6"], said
        for step, (refused, name) in REFUSED.items():
            lines = [line for line in said.splitlines() if f"Training continues without checkpoint-{step}" in line]
            assert len(lines) == 1, said
            assert f"rank {refused}: " in lines[0], lines
            assert name in lines[0], lines
            assert "No space left on device" in lines[0], lines
            assert f"checkpoint-{step}" in lines[0].partition("No space")[0]
        assert out["saved"].startswith("OutputError: the model cannot be written to ")
        assert "rank 1: " in out["saved"]
        for word in ("Traceback", "Exception ignored", "frame #0"):
            assert word not in said
    for step in (1, 6):
        assert (tmp_path / "full" / f"checkpoint-{step}" / "trainer_state.json").is_file()
