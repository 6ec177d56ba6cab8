"""A recipe's report of evaluations, and its process afterwards."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerState

from pipecomp.config import Config
from pipecomp.recipes import trainer as recipe_trainer
from pipecomp.recipes.report import Report
from pipecomp.recipes.steps import Plan
from pipecomp.recipes.trainer import RecipeTrainer
from pipecomp.stats import Traffic
from tests.report.runs import AQSGD, counters, made_step


def test_what_links_carry_in_a_second_is_of_training_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """Loading a checkpoint before the first one, evaluating and saving between them may take as long as they like."""
    played = made_step(Config.from_dict({"activations": AQSGD}))
    report = Report(None, None, silent=False)
    report.start(SimpleNamespace(model="tiny"), Plan(steps=2, per_epoch=1, micro_batch=1, accumulation=1, replicas=1),
                 Config(), 2, 2, 1)  # fmt: skip
    for step in (1, 2):
        stats = counters(played, step, 0.5)
        report.step(step, 1, loss=2.0, lr=0.1, per_s=3.0, step_s=2.0, traffic=Traffic.of(stats), stats=stats)
    assert capsys.readouterr().out.count("link 0->1 waits 25 %") == 2


def test_an_evaluations_line_has_what_it_sent() -> None:
    """A checkpoint at the end of an epoch is of after it: a run that goes on there has those bytes only from here."""
    told: list[Any] = []
    stats = counters(made_step(Config.from_dict({"activations": AQSGD})), 1, 0.5)
    run: Any = SimpleNamespace(
        state=TrainerState(global_step=3),
        engine=SimpleNamespace(gather_comm_stats=lambda: stats),
        _work=SimpleNamespace(measures=("loss", "perplexity")),
        _run=SimpleNamespace(plan=SimpleNamespace(epoch=lambda step: 1)),
        _console=SimpleNamespace(epoch=lambda *line: None),
    )
    recording: Any = SimpleNamespace(evaluated=lambda *line: told.append(line))
    metrics = {"eval_loss": 1.0, "eval_perplexity": 2.7, "eval_runtime": 3.0}
    RecipeTrainer._record_evaluation(run, recording, metrics)
    assert told == [(3, {"loss": 1.0, "perplexity": 2.7}, stats)]


def test_a_ranks_environment_and_threads_stay(tmp_path, monkeypatch):
    """As deepspeed's launcher starts the first of two ranks of a machine; accelerate would have it for itself."""
    from accelerate.state import AcceleratorState

    threads = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    before = dict(os.environ)
    try:
        torch.set_num_threads(3)
        with recipe_trainer._unchanged_process():
            recipe_trainer.TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
        assert torch.get_num_threads() == 3
        assert dict(os.environ) == before
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)
        AcceleratorState._reset_state(reset_partial_state=True)
