"""PipelineTrainer is asked to stop, over TLS with keys from its configuration, and goes on as if it had not been."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers import TrainerCallback

import tests.dist.trainer_work as work
from pipecomp.cluster.interruption import REQUEUE_STATUS, Interrupted
from pipecomp.cluster.local_ranks import run_ranks
from tests.dist.small import gpt2, samples
from tests.limits import HANG_S
from tests.mesh.meshes import keys_for

pytestmark = pytest.mark.ranks
STOPPED = 3


class Stop(TrainerCallback):
    """Sends this process a signal while a step is made; it ends after that step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == STOPPED - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def trainings(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    from pipecomp import PipelineTrainer

    keys = f"{folder}/rank-{rank}"

    def trainer(where: str, **more: Any) -> Any:
        section = {**work.AQSGD, "transport": {"backend": "tls", "keys": keys}}
        args = work.arguments(f"{folder}/{where}", logging_steps=1)
        return PipelineTrainer(gpt2(2, 16), args, train_dataset=samples(9), pipecomp=section, report=False, **more)

    expected = trainer("undisturbed")
    expected.train()
    expected.end()
    first = trainer("stopped", callbacks=[Stop()] if rank == 1 else [])
    with pytest.raises(Interrupted) as ended:
        first.train()
    again = trainer("stopped")
    again.train(resume_from_checkpoint=True)
    found = work.losses(expected), work.losses(again), work.folders(f"{folder}/stopped")
    again.end()
    return {"found": found, "reason": ended.value.reason, "code": ended.value.code, "backend": dist.get_backend()}


@pytest.mark.timeout(HANG_S)
def test_a_training_that_is_asked_to_stop_goes_on(tmp_path: Path) -> None:
    keys_for(tmp_path, 2)
    ranks = run_ranks(2, trainings, str(tmp_path), timeout_s=HANG_S)
    for out in ranks.values():
        expected, found, folders = out["found"]
        assert found == expected
        assert folders == [f"checkpoint-{STOPPED}"]
        assert out["reason"] == "SIGTERM on rank 1"
        assert out["code"] == REQUEUE_STATUS
        assert out["backend"] == "tls"
