"""PipelineTrainer whose replicas take local steps: they end with the same weights, however the training ends."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback

import tests.dist.trainer_work as work
from pipecomp.distributed.local_launcher import run_ranks
from tests.limits import HANG_S
from tests.models import gpt2, samples

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


def few_labels() -> list[dict[str, Any]]:
    """The first replica has one label in each sample, the other all."""
    chosen = work.unequal()
    for sample in chosen[::2]:
        sample["labels"] = sample["labels"].clone()
        sample["labels"][2:] = -100
    return chosen


def unequal_samples(
    rank: int, world: int, note: Any, folder: str, section: dict[str, Any] = GRADIENTS, steps: int = 2
) -> list[dict[str, float]]:
    """Return the logs of each replica's steps, whose samples have other numbers of labels."""
    from pipecomp import PipelineTrainer

    args = work.arguments(folder, max_steps=steps, logging_nan_inf_filter=False, weight_decay=0.0)
    made: dict[str, Any] = {"train_dataset": few_labels(), "pipecomp": section, "num_stages": 1, "report": False}
    trainer = PipelineTrainer(gpt2(2, 16), args, work.padded, **made)
    output = trainer.train()
    names = ("loss", "grad_norm", "learning_rate", "train_loss")
    logged = [{key: line[key] for key in names if key in line} for line in trainer.state.log_history]
    trainer.end()
    return [*logged, {"returned": output.training_loss}]


def mean_loss(replica: int) -> float:
    """Return the mean loss over the labels of a replica's first step."""
    batch = work.padded(few_labels()[replica::2][:4])
    logits = gpt2(2, 16)(batch["input_ids"], attention_mask=batch["attention_mask"]).logits.detach()
    return float(work.summed(SimpleNamespace(logits=logits), batch["labels"], batch["labels"][:, 1:].ge(0).sum())) / 2


@pytest.mark.timeout(HANG_S)
def test_what_is_logged_is_the_mean_of_replicas_that_each_weigh_their_own_labels(tmp_path: Path) -> None:
    ranks = run_ranks(2, unequal_samples, str(tmp_path), timeout_s=HANG_S)
    assert ranks[0] == ranks[1], "callbacks on different replicas decide alike"
    first, second, end, returned = ranks[0]
    assert first.keys() == {"loss", "grad_norm", "learning_rate"}
    own = [mean_loss(replica) for replica in (0, 1)]
    assert own[0] != pytest.approx(own[1], rel=1e-3)
    assert first["loss"] == pytest.approx(sum(own) / 2, rel=1e-5)
    assert end["train_loss"] == returned["returned"] == pytest.approx((first["loss"] + second["loss"]) / 2)


@pytest.mark.timeout(HANG_S)
def test_norms_of_gradients_that_are_not_exchanged_are_logged_alike(tmp_path: Path) -> None:
    section = {"gradients": {"method": "quantized_adam", "freeze_step": 1}}
    first, second = run_ranks(2, unequal_samples, str(tmp_path), section, 4, timeout_s=HANG_S).values()
    assert first == second
    assert len({line["grad_norm"] for line in first[:4]}) == 4


def one_step_at_a_time(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    """Log trainings whose replicas have other numbers of labels; of PipelineTrainer and of the callback."""
    from transformers import TrainingArguments

    from pipecomp import CompressionCallback, PipelineTrainer
    from tests.dist.test_callback import small_trainer

    once: dict[str, Any] = {"local_steps": 1, "outer": {"optimizer": "sgd"}}
    then: dict[str, Any] = {**once, "local_steps": 2, "local_steps_warmup": 2}
    out: dict[str, Any] = {}
    for name, more in (("plain", {}), ("once", once), ("warming up", then)):
        args = work.arguments(folder, max_steps=2)
        made: dict[str, Any] = {"train_dataset": few_labels(), "num_stages": 1, "report": False}
        section = {"gradients": {"method": "fp16", **more}}
        trainer = PipelineTrainer(gpt2(2, 16), args, work.padded, pipecomp=section, **made)
        trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        trainer.end()
        callback = CompressionCallback("fp16", **more)
        theirs = small_trainer(folder, callback, max_steps=2, logging_steps=1, per_device_train_batch_size=4)
        theirs.train_dataset, theirs.data_collator = few_labels(), work.padded
        theirs.train()
        assert isinstance(theirs.args, TrainingArguments)
        assert theirs.args.average_tokens_across_devices
        out[name] = losses, [line["loss"] for line in theirs.state.log_history if "loss" in line]
    return out


@pytest.mark.timeout(HANG_S)
def test_where_every_step_is_averaged_labels_of_all_replicas_weigh_alike(tmp_path: Path) -> None:
    for out in run_ranks(2, one_step_at_a_time, str(tmp_path), timeout_s=HANG_S).values():
        for plain, once, warm in zip(*(out[name] for name in ("plain", "once", "warming up")), strict=True):
            assert once == plain
            assert warm[0] == plain[0]


@pytest.mark.timeout(HANG_S)
def test_a_training_that_ends_early_ends_with_an_average(tmp_path: Path) -> None:
    ranks = run_ranks(2, trainings, str(tmp_path), timeout_s=HANG_S)
    for name, steps in (("stopped", 3), ("to the end", 6)):
        assert ranks[0][name][1:] == (steps, steps)
        assert ranks[0][name] == ranks[1][name]
