"""Ranks whose data loader or callback never answers: every rank ends, with an error that names it."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import TrainerCallback

import tests.dist.trainer_work as work
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.errors import PipecompError
from pipecomp.utils import activity
from tests.limits import HANG_S
from tests.models import ds_config, gpt2, samples

pytestmark = pytest.mark.ranks
LIMIT_S = 3  # from the step on in which something hangs: before, a busy machine may take longer


class Stuck:
    """Samples of which one is never read."""

    def __init__(self, stuck: int) -> None:
        self._made, self._stuck = samples(16), stuck

    def __len__(self) -> int:
        return len(self._made)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        if i == self._stuck:
            time.sleep(HANG_S)
        return self._made[i]


def error_of(call: Any) -> str:
    with pytest.raises(PipecompError) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def own_loader(rank: int, world: int, note: Any) -> str:
    """A loader of the user's, whose worker hangs on the first stage alone."""
    import pipecomp

    engine = pipecomp.initialize(gpt2(), 2, ds_config())
    loader = DataLoader(Stuck(9 if rank == 0 else -1), batch_size=2, num_workers=1, collate_fn=work.padded)  # type: ignore[arg-type]
    batches = ({**batch, "sample_ids": [0, 1]} for batch in loader)
    engine.train_batch(batches)
    if rank == 0:
        activity.limits.data_s = LIMIT_S
    return error_of(lambda: engine.train_batch(batches))


def test_a_worker_that_loses_a_batch() -> None:
    ranks = run_ranks(2, own_loader, timeout_s=HANG_S)
    error = rf"StalledError: rank 0 on {socket.gethostname()} waits for its data since {LIMIT_S} s"
    assert re.match(rf"{error} at .*, step 2\. The loader is generator\(\)", ranks[0])
    assert re.match(rf"PeerLostError: rank 0 stopped: {error} .*Last report of rank 0 on .*, stage 0: step 2", ranks[1])
    assert "Run the same command again" in ranks[1]


def trainers(rank: int, world: int, note: Any, folder: str) -> list[str]:
    """A trainer's own loader hangs in the main process, and then a callback on one rank."""
    import pipecomp

    class Slow(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == 2:
                time.sleep(HANG_S)

    class DataLimit(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == 2:
                activity.limits.data_s = LIMIT_S

    class CallbackLimit(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            activity._OTHERS = LIMIT_S / activity.DATA_TIMEOUT_S

    found = []
    for data, callbacks in (
        (Stuck(10 if rank == 0 else -1), [DataLimit] if rank == 0 else []),
        (samples(16), [CallbackLimit, Slow] if rank == 1 else []),
    ):
        args = work.arguments(f"{folder}/{len(found)}", gradient_accumulation_steps=2)
        trainer = pipecomp.PipelineTrainer(gpt2(), args, work.padded, data, num_stages=2, callbacks=callbacks)
        found.append(error_of(trainer.train))
    return found


def test_a_trainers_data_and_callbacks(tmp_path: Path) -> None:
    ranks = run_ranks(2, trainers, str(tmp_path), timeout_s=HANG_S)
    waits = f"rank 0 on {socket.gethostname()} waits for its data since {LIMIT_S} s"
    assert ranks[0][0].startswith(f"StalledError: {waits}")
    assert f"PeerLostError: rank 0 stopped: StalledError: {waits}" in ranks[1][0]
    waits = f"rank 1 on {socket.gethostname()} is in the callback Slow.on_step_end since {LIMIT_S} s"
    assert ranks[1][1].startswith(f"StalledError: {waits}")
    assert "rank 1 stopped: StalledError" in ranks[0][1]
