"""PipelineTrainer is asked to stop, over TLS with keys from its configuration, and goes on as if it had not been."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from transformers import TrainerCallback

import tests.dist.trainer_work as work
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.distributed.preemption import REQUEUE_STATUS, Interrupted
from pipecomp.report.recorder import METRICS
from tests.limits import HANG_S
from tests.models import gpt2, samples
from tests.tls.meshes import keys_for

pytestmark = pytest.mark.ranks
STOPPED, EVALUATED = 3, 2  # after the first epoch, and within it


class Stop(TrainerCallback):
    """Sends this process a signal while a step is made; it ends after that step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == self._step - 1:
            os.kill(os.getpid(), signal.SIGTERM)


class End(TrainerCallback):
    """Ends the training after a step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_training_stop = state.global_step == STOPPED


class Enough(TrainerCallback):
    """Ends the training after an evaluation, as early stopping does."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_training_stop = True


class Case(NamedTuple):
    """Work due after `step`; evaluated: the steps after which a whole training evaluates."""

    step: int
    changed: dict[str, Any]
    evaluated: list[int]
    callbacks: tuple[type, ...] = ()


_EPOCHS: dict[str, Any] = {
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "logging_strategy": "epoch",
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "greater_is_better": True,  # so that the first one is the best
}
CASES = {
    "an epoch": Case(STOPPED, _EPOCHS, [3, 6]),
    "the last epoch": Case(STOPPED, _EPOCHS, [3], (Enough,)),
    "a step": Case(EVALUATED, {"eval_strategy": "steps", "eval_steps": EVALUATED, "logging_steps": 6}, [2, 4, 6]),
}


def evaluations(trainer: Any) -> list[tuple[int, float]]:
    return [(line["step"], line["eval_loss"]) for line in trainer.state.log_history if "eval_loss" in line]


def counted(trainer: Any) -> Any:
    """Bytes and hits by link of the whole training, as its folder has them; rank 0 writes it."""
    file = Path(trainer.args.output_dir) / METRICS
    lines = [json.loads(line) for line in file.read_text().splitlines()] if trainer.rank == 0 else []
    return [(line["links"], line["hits"]) for line in lines if "links" in line][-1:]


def trainings(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    from pipecomp import PipelineTrainer

    keys = f"{folder}/rank-{rank}"

    def trainer(where: str, changed: dict[str, Any], **more: Any) -> Any:
        section = {**work.AQSGD, "transport": {"backend": "tls", "keys": keys}}
        args = work.arguments(f"{folder}/{where}", **changed)
        data = {"train_dataset": samples(9), "eval_dataset": samples(3, seed=6)}
        return PipelineTrainer(gpt2(2, 16), args, **data, pipecomp=section, report=False, **more)

    def facts(made: Any) -> dict[str, Any]:
        best = made.state.best_model_checkpoint
        out = {"evaluations": evaluations(made), "best": best and Path(best).name}
        if made.args.logging_steps == 1:  # else a mean since the last log, or since the resume, as with Trainer
            out["losses"] = work.losses(made)
        made.end()
        return {**out, "counted": counted(made)}

    out: dict[str, Any] = {}
    for name, (step, changed, _, callbacks) in CASES.items():
        expected = trainer(f"{name} undisturbed", changed, callbacks=[*callbacks])
        expected.train()
        first = trainer(f"{name} stopped", changed, callbacks=[*callbacks, *([Stop(step)] if rank == 1 else [])])
        with pytest.raises(Interrupted) as ended:
            first.train()
        kept, events = work.folders(f"{folder}/{name} stopped"), work.Events()
        again = trainer(f"{name} stopped", changed, callbacks=[*callbacks, events])
        again.train(resume_from_checkpoint=True)
        out[name] = {"expected": facts(expected), "found": facts(again), "kept": kept, "events": events.seen}
        out |= {"reason": ended.value.reason, "code": ended.value.code}
    last = trainer("last", _EPOCHS, callbacks=[*([Stop(STOPPED)] if rank == 1 else []), End()])
    last.train()
    out |= {"last": facts(last), "backend": dist.get_backend()}
    return out


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("signals")
    keys_for(folder, 2)
    return run_ranks(2, trainings, str(folder), timeout_s=HANG_S)


@pytest.mark.timeout(HANG_S)
@pytest.mark.parametrize("name", CASES)
def test_a_training_that_is_asked_to_stop_goes_on(ran: Any, name: str) -> None:
    """With the evaluation that was due after the step, and the end of the epoch."""
    step, _, evaluated, callbacks = CASES[name]
    for out in ran.values():
        assert out[name]["found"] == out[name]["expected"], "counters too, though nothing was logged at the step"
        assert out[name]["kept"] == [f"checkpoint-{step}"]
        assert [at for at, _ in out[name]["expected"]["evaluations"]] == evaluated
        seen = [(event, at) for event, at, _ in out[name]["events"] if not event.startswith("on_prediction")]
        due = [("on_log", step), ("on_evaluate", step)]
        ended = [("on_epoch_end", STOPPED)] if step == STOPPED else []
        assert seen[: 3 + len(ended)] == [("on_train_begin", step), *ended, *due]
        assert seen[3 + len(ended)][0] == ("on_log" if callbacks else "on_epoch_begin")
        assert out["reason"] == "SIGTERM on rank 1"
        assert out["code"] == REQUEUE_STATUS
        assert out["backend"] == "tls"


@pytest.mark.timeout(HANG_S)
def test_a_training_that_ends_after_the_step_ends_as_it_would_have(ran: Any) -> None:
    for out in ran.values():
        assert [at for at, _ in out["last"]["evaluations"]] == [STOPPED]
        assert out["last"]["evaluations"] == out["an epoch"]["expected"]["evaluations"][:1]
