"""A collator's random draws: alike on both ends of a pipeline, different on replicas, and else refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import tests.dist.trainer_work as work
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.errors import DataError, PeerLostError
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


class LateDraws:
    """Draws labels, or tokens, apart on every rank, from one micro-batch on."""

    def __init__(self, key: str, first: int) -> None:
        self.key, self._left = key, first

    def __call__(self, chosen: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = work.padded(chosen)
        self._left -= 1
        if self._left < 0:
            own = torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "big"))
            batch[self.key] = torch.randint(1, 30, batch[self.key].shape, generator=own)
        return batch


def drawing_late(rank: int, world: int, note: Any) -> dict[str, str]:
    import pipecomp

    out = {}
    for key in ("input_ids", "labels"):
        data, config = samples(24), ds_config(micro_batches=4)
        engine = pipecomp.initialize(gpt2(3, 16), 3, config, data)
        collator = LateDraws(key, 6)
        rows = DataLoader(data, batch_size=2, collate_fn=collator)
        batches = iter([{**batch, "sample_ids": [0, 1]} for batch in rows])
        engine.train_batch(batches)
        with pytest.raises((DataError, PeerLostError)) as caught:
            engine.train_batch(batches)
        out[key] = f"{type(caught.value).__name__}: {caught.value}"
        engine.close()
    return out


def test_later_draws_that_differ_between_first_and_last_stage() -> None:
    ranks = run_ranks(3, drawing_late, timeout_s=HANG_S)
    for key, name in (("input_ids", "tokens"), ("labels", "labels")):
        where = f"step 1, micro-batch 2, samples [0, 1]: the first stage loaded other {name} than this one"
        assert ranks[2][key].startswith(f"DataError: {where} (CRC-32 0x"), ranks[2][key]
        assert all(where in ranks[rank][key] for rank in (0, 1)), ranks
