"""PipelineTrainer whose replicas take local steps: they end with the same weights, however the training ends."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

import tests.dist.trainer_work as work
from pipecomp.cluster.local_ranks import run_ranks
from tests.dist.small import gpt2, samples
from tests.limits import HANG_S

pytestmark = pytest.mark.ranks
GRADIENTS = {"gradients": {"method": "double_squeeze", "bits": 4, "local_steps": 4}}


class Stop(TrainerCallback):
    """Ends the training within an interval, as a time limit does."""

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_training_stop = state.global_step == 3


def weights(engine: Any) -> str:
    out = hashlib.sha256()
    for p in engine.stage.parameters():
        out.update(p.detach().numpy().tobytes())
    return out.hexdigest()


def trainings(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    from pipecomp import PipelineTrainer

    found = {}
    for name, callbacks in {"stopped": [Stop()], "to the end": []}.items():
        args = work.arguments(f"{folder}/{name}", max_steps=6)
        trainer = PipelineTrainer(
            gpt2(2, 16),
            args,
            train_dataset=samples(32),
            pipecomp=GRADIENTS,
            num_stages=1,
            report=False,
            callbacks=callbacks,
        )
        trainer.train()
        stats = trainer.engine.comm_stats()
        found[name] = weights(trainer.engine), stats["local_steps"]["averaged_at"], trainer.state.global_step
        trainer.end()
    return found


@pytest.mark.timeout(HANG_S)
def test_a_training_that_ends_early_ends_with_an_average(tmp_path: Path) -> None:
    ranks = run_ranks(2, trainings, str(tmp_path), timeout_s=HANG_S)
    for name, steps in (("stopped", 3), ("to the end", 6)):
        assert ranks[0][name][1:] == (steps, steps)
        assert ranks[0][name] == ranks[1][name]
