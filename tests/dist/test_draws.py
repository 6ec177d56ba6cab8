"""A collator's random draws: alike on both ends of a pipeline, different on replicas, and else refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tests.dist.trainer_work as work
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.errors import DataError
from tests.limits import HANG_S
from tests.models import ds_config, gpt2, samples

pytestmark = pytest.mark.ranks


class OwnMasks:
    """Masks by a generator of its own."""

    def __init__(self) -> None:
        self._draw = torch.Generator().manual_seed(1)

    def __call__(self, chosen: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        ids = torch.stack([sample["input_ids"] for sample in chosen])
        return {"input_ids": ids, "labels": ids.masked_fill(torch.rand(ids.shape, generator=self._draw) < 0.5, -100)}


class Noted:
    """Draws from torch's generator, and keeps what it drew for training."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def __call__(self, chosen: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        self.drawn.append(float(torch.rand(())))
        return work.padded(chosen)


class ByEpoch:
    """Samples that are others in every epoch."""

    def __init__(self) -> None:
        self.epoch = 5

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return samples(1, seed=100 * self.epoch + i)[0]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def drawing(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    import pipecomp

    with pytest.raises(DataError) as caught:
        pipecomp.initialize(gpt2(2, 16), 2, ds_config(), samples(), collate_fn=OwnMasks())
    out: dict[str, Any] = {"initialize": str(caught.value)}
    trainer = pipecomp.PipelineTrainer(gpt2(2, 16), work.arguments(folder), OwnMasks(), samples())
    with pytest.raises(DataError) as caught:
        trainer.train()
    out["trainer"] = str(caught.value)
    noted = Noted()
    args = work.arguments(folder, max_steps=2, gradient_accumulation_steps=1)
    replicas = pipecomp.PipelineTrainer(gpt2(2, 16), args, noted, samples(), num_stages=1)
    replicas.train()
    replicas.end()
    out["drawn"] = noted.drawn[-2:]
    twice = pipecomp.PipelineTrainer(gpt2(2, 16), work.arguments(folder, num_train_epochs=2), None, ByEpoch())
    out["facts"] = []
    for _ in range(2):
        twice.train()
        out["facts"].append(str(twice.engine.data_facts))
    out["epoch"] = twice.train_dataset.epoch
    twice.end()
    return out


def test_what_a_collator_draws(tmp_path: Path) -> None:
    ranks = run_ranks(2, drawing, str(tmp_path), timeout_s=HANG_S)
    for found in ranks.values():
        assert "training_data: the same samples get other labels" in found["initialize"]
        assert "train_dataset: the same samples get other labels" in found["trainer"]
        assert len(set(found["facts"])) == 1, "as of the first epoch, also after a training that has left it"
        assert found["epoch"] == 1
    assert len({number for found in ranks.values() for number in found["drawn"]}) == 4, "each replica masks for itself"
