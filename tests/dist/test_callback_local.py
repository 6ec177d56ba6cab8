"""CompressionCallback with local steps under real Trainers on several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.errors import ConfigError
from tests.dist.test_callback import digest, small_trainer
from tests.limits import HANG_S

pytestmark = pytest.mark.ranks

OUTER = {"outer": {"optimizer": "nesterov", "momentum": 0.5}}
SQUEEZE = {"method": "double_squeeze", "bits": 4, "group_size": 64, **OUTER}
CASES: dict[str, dict[str, Any]] = {
    "none": {"method": "none", "local_steps": 3, **OUTER},
    "squeeze": {**SQUEEZE, "local_steps": 4},
    "streamed": {**SQUEEZE, "local_steps": 4, "fragments": 2, "overlap": 2, "local_steps_warmup": 2},
    "low rank": {"method": "powersgd", "rank": 2, "adaptive": {"every": 2, "error": 0.5}, "local_steps": 4, **OUTER},
}
RESUMED = ("squeeze", "streamed")
SAVING = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "max_steps": 7}


def train(folder: str, options: dict[str, Any], *, resume: str | None = None, **more: Any) -> dict[str, Any]:
    """Weights after every step on this process, evaluations, and what was sent."""
    from transformers import TrainerCallback

    from pipecomp import CompressionCallback

    class Weights(TrainerCallback):
        after: dict[int, str]

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.after = {**getattr(self, "after", {}), state.global_step: digest(kwargs["model"])}

    weights, callback = Weights(), CompressionCallback(**options)
    trainer = small_trainer(folder, callback, weights, seed=0 if resume is None else 5, **{**SAVING, **more})
    trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    return {
        "after": getattr(weights, "after", {}),  # nothing of a training that is over
        "last": digest(trainer.model),
        "evaluated": [row["eval_loss"] for row in history if "eval_loss" in row],
        "sum": sum(float(p.detach().double().sum()) for p in trainer.model.parameters()),
        "calls": callback.stats()["calls"],
        "sent": callback.stats()["bytes_sent"],
    }


def trainings(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    out: dict[str, Any] = {}
    for name in CASES if world == 2 else ("squeeze",):
        out[name] = train(f"{folder}/{name}", CASES[name])
    if world != 2:
        return out
    for name in RESUMED:
        out[f"{name} resumed"] = train(f"{folder}/{name}", CASES[name], resume=f"{folder}/{name}/checkpoint-3")
    epochs = {"max_steps": -1, "num_train_epochs": 1, "save_strategy": "epoch"}
    whole = train(f"{folder}/epoch", CASES["squeeze"], **epochs)
    (last,) = Path(f"{folder}/epoch").glob("checkpoint-*")
    out["started again"] = whole["last"], train(f"{folder}/epoch", CASES["squeeze"], resume=str(last), **epochs)["last"]
    plain = {"method": "global_qsgd", "seed": 3}
    once = {**plain, "local_steps": 1, "outer": {"optimizer": "sgd"}}
    out["plain"] = train(f"{folder}/plain", plain, save_strategy="no")["last"]
    out["once"] = train(f"{folder}/once", once, save_strategy="no")["last"]
    best = train(f"{folder}/best", CASES["squeeze"], load_best_model_at_end=True, learning_rate=0.5, save_total_limit=3)
    lowest = best["evaluated"].index(min(best["evaluated"]))
    kept = load_file(f"{folder}/best/checkpoint-{(3, 6, 7)[lowest]}/model.safetensors")
    out["best"] = best["sum"], sum(float(x.double().sum()) for x in kept.values())
    other = {**CASES["squeeze"], "local_steps": 2}
    with pytest.raises(ConfigError) as caught:
        train(f"{folder}/squeeze", other, resume=f"{folder}/squeeze/checkpoint-3")
    out["other"] = str(caught.value)
    return out


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    folder = tmp_path_factory.mktemp("local")
    return folder, run_ranks(2, trainings, str(folder), timeout_s=HANG_S)


@pytest.mark.parametrize("case", CASES)
def test_processes_train_apart_and_end_alike(ran, case):
    first, second = (ran[1][rank][case] for rank in (0, 1))
    same = [step for step in first["after"] if first["after"][step] == second["after"][step]]
    assert same == {"none": [0, 3, 6], "streamed": [0, 1]}.get(case, [0, 4])
    assert first["last"] == second["last"], "the last step ends with an average"
    assert first["evaluated"] == second["evaluated"], "of the weights in common"


def without_a_common_disk(rank: int, world: int, note: Any, folder: str) -> list[str]:
    own = Path(folder) / f"machine-{rank}"
    options = {"save_steps": 2, "max_steps": 6, "eval_strategy": "no", "save_total_limit": 1}
    train(str(own), CASES["squeeze"], **options)
    assert len(list(own.glob("checkpoint-*"))) == 1
    return sorted(path.name for path in own.glob("checkpoint-*/*") if path.name.startswith("pipecomp_"))


def test_old_checkpoints_go_where_the_first_process_does_not_run(tmp_path):
    for rank, files in run_ranks(2, without_a_common_disk, str(tmp_path), timeout_s=HANG_S).items():
        assert files == [f"pipecomp_gradients_{rank}.safetensors", f"pipecomp_local_steps_{rank}.pt"]


def test_three_processes_end_alike(tmp_path):
    found = run_ranks(3, trainings, str(tmp_path), timeout_s=HANG_S)
    assert len({found[rank]["squeeze"]["last"] for rank in range(3)}) == 1
    assert len({found[rank]["squeeze"]["after"][3] for rank in range(3)}) == 3


@pytest.mark.parametrize("case", RESUMED)
def test_a_training_that_stopped_within_an_interval_goes_on_with_the_same_bits(ran, case):
    for rank in (0, 1):
        whole, rest = ran[1][rank][case], ran[1][rank][f"{case} resumed"]
        assert rest["after"] == {step: whole["after"][step] for step in (3, 4, 5, 6)}
        assert rest["last"] == whole["last"]


def test_a_training_that_is_over_stays_as_it_is_when_it_is_started_again(ran):
    for rank in (0, 1):
        ended, started_again = ran[1][rank]["started again"]
        assert started_again == ended


def test_one_step_with_an_outer_sgd_of_rate_one_is_plain_averaging(ran):
    assert ran[1][0]["once"] == ran[1][0]["plain"] == ran[1][1]["once"]


def test_checkpoints_have_the_weights_in_common(ran):
    from safetensors.torch import load_file

    folder, ranks = ran
    for rank in (0, 1):
        assert ranks[rank]["best"][0] == pytest.approx(ranks[rank]["best"][1], rel=1e-9), "the best one is not changed"
    own = [torch.load(folder / f"squeeze/checkpoint-3/pipecomp_local_steps_{rank}.pt") for rank in (0, 1)]
    saved = load_file(folder / "squeeze/checkpoint-3/model.safetensors")
    name = "transformer.h.0.mlp.c_fc.weight"
    assert not torch.equal(own[0]["weights"][name], own[1]["weights"][name])
    for each in own:
        assert not torch.equal(each["weights"][name], saved[name]), "no outer step was taken yet"
    assert ranks[0]["squeeze"]["calls"] == 2  # after the fourth step and at the end


def test_a_checkpoint_of_other_intervals_is_refused(ran):
    assert "local_steps" in ran[1][0]["other"]
