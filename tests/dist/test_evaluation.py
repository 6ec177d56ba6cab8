"""Evaluation micro-batches of more samples than links take by themselves: the trainer's, and those of a bare engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tests.dist.trainer_work as work
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.errors import ConfigError, PipecompError
from pipecomp.stages.link.packet import EVALUATED
from tests.limits import HANG_S
from tests.models import ds_config, gpt2, samples

pytestmark = pytest.mark.ranks
MANY = EVALUATED + 7


def trained(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    """Evaluations within a training and after it, the second of more samples than the first."""
    from pipecomp import PipelineTrainer
    from pipecomp.data import eval_batches

    args = work.arguments(folder, per_device_eval_batch_size=MANY, eval_strategy="epoch", num_train_epochs=1)
    held_out = samples(MANY + 2, length=8, seed=5)
    trainer = PipelineTrainer(gpt2(2, 16), args, work.padded, samples(4, length=8), held_out, pipecomp={})
    trainer.train()
    found: dict[str, Any] = {"losses": [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]}
    for size in (2, MANY + 2):
        trainer.args.per_device_eval_batch_size = size
        found["losses"].append(trainer.evaluate()["eval_loss"])
    engine = trainer.engine
    engine.allow_evaluation(MANY)
    with pytest.raises(PipecompError) as error:
        engine.eval_batch(iter(eval_batches(held_out, MANY + 1, work.padded)), num_micro_batches=2)
    found["error"] = f"{type(error.value).__name__}: {error.value}"
    trainer.end()
    return found


def test_a_trainer_evaluates_micro_batches_of_any_size(tmp_path: Any) -> None:
    ranks = run_ranks(2, trained, str(tmp_path), timeout_s=HANG_S)
    said = f"micro-batch 0 of evaluation has {MANY + 1} samples, allowed: at most {MANY}: make it smaller"
    for rank, kind in enumerate(("DataError", "PeerLostError")):
        losses = ranks[rank]["losses"]
        assert len(losses) == 3
        assert losses == pytest.approx(losses[:1] * 3, rel=1e-4)
        assert ranks[rank]["error"].startswith(kind)
        assert said in ranks[rank]["error"]
        assert f"engine.allow_evaluation({MANY + 1})" in ranks[rank]["error"]


def bare(rank: int, world: int, note: Any) -> dict[str, Any]:
    import pipecomp
    from pipecomp.data import eval_batches

    engine = pipecomp.initialize(gpt2(2, 16), num_stages=2, config=ds_config())
    found: dict[str, Any] = {}
    with pytest.raises(ConfigError, match="samples: got 0, allowed: a whole number, 1 or more"):
        engine.allow_evaluation(0)
    with pytest.raises(ConfigError, match="num_micro_batches: got 0, allowed: 1 or more"):
        engine.eval_batch(iter(()), num_micro_batches=0)
    data = samples(EVALUATED, length=8)
    found["loss"] = float(engine.eval_batch(iter(eval_batches(data, EVALUATED)), num_micro_batches=1))
    found["waited"] = [link["wait_seconds"] for link in engine.comm_stats()["links"].values()]
    batch = eval_batches(samples(3, length=8), 3)  # of training they have two
    for name, call in {
        "training": lambda engine: engine.train_batch(iter(batch * 3)),
        "differ": lambda engine: engine.allow_evaluation(100 + rank),
    }.items():
        with pytest.raises(PipecompError) as error:
            call(engine)
        found[name] = str(error.value)
        engine.close()
        engine = pipecomp.initialize(gpt2(2, 16), num_stages=2, config=ds_config())
    engine.close()
    return found


def test_a_bare_engine_says_what_it_takes() -> None:
    for found in run_ranks(2, bare, timeout_s=HANG_S).values():
        assert found["loss"] > 0
        assert found["waited"] == [0.0], "only what waits in training is a share of the training time"
        assert "micro-batch 0 of training has 3 samples, allowed: at most 2: make it smaller" in found["training"]
        assert "train_micro_batch_size_per_gpu" in found["training"]
        assert "samples of an evaluation batch is 101 on rank 1, 100 on rank 0" in found["differ"]


# -- labels


def without_labels(rank, world, note):
    """Losses of two epochs in which one step has no label, and the number of warnings of it."""
    import logging

    from pipecomp import initialize

    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("pipecomp").addHandler(handler)
    config = ds_config()
    step = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    data = [
        {**sample, "labels": torch.full_like(sample["labels"], -100) if i < step else sample["labels"]}
        for i, sample in enumerate(samples())
    ]
    engine = initialize(gpt2(), num_stages=world, config=config, training_data=data, shuffle=False)
    losses = [float(engine.train_batch()) for _ in range(2 * len(data) // step)]
    return losses, sum("no label" in record.getMessage() for record in records)


@pytest.mark.timeout(HANG_S)
def test_a_step_without_labels_has_loss_0_and_is_reported_once():
    results = run_ranks(2, without_labels, timeout_s=HANG_S)
    losses, _ = results[0]
    assert losses[0] == losses[len(losses) // 2] == 0
    assert all(0 < loss < 10 for loss in losses[1 : len(losses) // 2])
    assert results[1][1] == 1
