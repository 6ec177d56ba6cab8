"""A run that goes on in the middle of an epoch with other replicas, stages and batches takes every sample once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from pipecomp.data import default_collate
from pipecomp.distributed.local_launcher import run_ranks
from tests.dist import trainer_work as work
from tests.limits import HANG_S
from tests.models import ds_config, gpt2, samples

pytestmark = pytest.mark.ranks

SAMPLES = 24


def engines(folder: str) -> list[list[int]]:
    """Return the samples of each of three runs with `pipecomp.initialize`, which follow each other."""
    import pipecomp

    taken = []
    for run, (stages, micro_batch, steps) in enumerate(((2, 2, 8), (1, 2, 1), (2, 1, 13))):
        config = ds_config(micro_batch=micro_batch, micro_batches=2)
        engine = pipecomp.initialize(gpt2(seed=run), num_stages=stages, config=config, training_data=samples())
        if run:
            engine.load_checkpoint(folder)
        own: list[int] = []
        for _ in range(steps):
            if engine.is_first_stage():
                own += [i for ahead in range(2) for i in engine.loader.upcoming(ahead)]
            engine.train_batch()
        engine.save_checkpoint(folder)
        engine.close()
        taken.append(own)
    return taken


class Collator:
    """Stack samples, and list their first tokens."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def __call__(self, chosen: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        self.taken += [int(sample["input_ids"][0]) for sample in chosen]
        return default_collate(chosen)


class Stop(TrainerCallback):
    """Forget what was collated before the training; end it after a step."""

    def __init__(self, collator: Collator, last: int) -> None:
        self._collator, self._last = collator, last

    def on_train_begin(self, *given: Any, **more: Any) -> None:
        self._collator.taken.clear()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_training_stop |= state.global_step == self._last
        control.should_save = control.should_training_stop


def trainers(folder: str) -> list[tuple[list[int], int]]:
    """Return the samples of each of three trainings, which follow each other, and their last steps."""
    from pipecomp import PipelineTrainer

    data = samples(SAMPLES)
    for number, sample in enumerate(data):
        sample["input_ids"][0] = number
    out = []
    for run, (stages, micro_batch, last) in enumerate(((2, 2, 8), (1, 3, 9), (2, 2, 99))):
        options = {
            "per_device_train_batch_size": micro_batch,
            "train_sampling_strategy": "random",
            "save_strategy": "no",
        }
        args = work.arguments(folder, **options, num_train_epochs=3, eval_strategy="no")
        collator = Collator()
        trainer = PipelineTrainer(
            gpt2(seed=run), args, collator, data, callbacks=[Stop(collator, last)], pipecomp={}, num_stages=stages
        )
        trainer.train(resume_from_checkpoint=True if run else None)
        out.append((collator.taken if trainer.engine.is_first_stage() else [], trainer.state.global_step))
        trainer.end()
    return out


def every(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    return {"engines": engines(f"{folder}/engines"), "trainers": trainers(f"{folder}/trainers")}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("layouts")
    return list(run_ranks(2, every, str(folder), timeout_s=HANG_S).values())


def test_engine(ran: list[dict[str, Any]]) -> None:
    one, two, three = ([i for out in ran for i in out["engines"][run]] for run in range(3))
    assert (len(one), len(two), len(three)) == (32, 8, 26)
    assert sorted(one[:24]) == list(range(24))
    assert sorted(one[24:] + two + three[:8]) == list(range(24)), "an epoch in three layouts"
    assert len(set(three[8:])) == 18


def test_trainer(ran: list[dict[str, Any]]) -> None:
    one, two, three = ([i for out in ran for i in out["trainers"][run][0]] for run in range(3))
    assert [step for _, step in ran[0]["trainers"]] == [8, 9, 16]
    assert (len(one), len(two)) == (32, 12)
    assert sorted(one[:24]) == list(range(24))
    assert Counter(one[24:] + two + three) == Counter([*range(24)] * 2), "two epochs, of which one in three layouts"
