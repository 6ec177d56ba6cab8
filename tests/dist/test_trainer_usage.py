"""Other uses of a Trainer than training, by a PipelineTrainer on two processes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

import tests.dist.trainer_work as work
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.errors import PipecompError
from pipecomp.report.advice import simulate
from pipecomp.report.metrics import link_use
from pipecomp.report.reader import read_runs
from pipecomp.report.recorder import METRICS
from tests.limits import HANG_S
from tests.models import gpt2

pytestmark = pytest.mark.ranks


class Seen(TrainerCallback, ExportableState):
    """Return the state's tokens after every step, and the number of samples of the loader's dataset."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.samples = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **more: Any) -> None:
        self.samples = len(train_dataloader.dataset)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.tokens.append(state.num_input_tokens_seen)

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"tokens": self.tokens}}


def counted(kind: Any, folder: str) -> dict[str, Any]:
    """Tokens and operations, in every step, in a checkpoint, and when training goes on from it.

    "bytes": what the links had carried at the end of each training, as its report has them; rank 0 writes that.
    """
    carried: list[Any] = []

    def trained(resume: str | None, **changed: Any) -> tuple[Any, Seen]:
        seen = Seen()
        args = work.arguments(
            folder, logging_steps=3, include_num_input_tokens_seen="all", eval_strategy="steps", eval_steps=2, **changed
        )
        trainer = kind(gpt2(2, 16), args, work.padded, work.unequal(), work.unequal(3), callbacks=[seen])
        trainer.train(resume_from_checkpoint=resume)
        if hasattr(trainer, "engine"):
            trainer.end()
            if trainer.rank == 0:
                lines = map(json.loads, (Path(folder) / METRICS).read_text().splitlines())
                link = [line["links"]["0->1"] for line in lines if "links" in line][-1]
                carried.append({name: size for name, size in link.items() if not name.startswith("eval")})
        return trainer, seen

    first, seen = trained(None, max_steps=4, save_strategy="steps", save_steps=2)
    again, _ = trained(f"{folder}/checkpoint-2", max_steps=4)
    own = {"ignore_data_skip": True, "restore_callback_states_from_checkpoint": True}
    restored, _ = trained(f"{folder}/checkpoint-2", max_steps=4, **own)
    saved = json.loads((Path(folder) / "checkpoint-2" / "trainer_state.json").read_text())
    names = ("num_input_tokens_seen", "total_flos")
    return {
        "steps": seen.tokens,
        "restored": [each.tokens for each in restored.callback_handler.callbacks if isinstance(each, Seen)],
        "samples": seen.samples,
        "logged": [line["num_input_tokens_seen"] for line in first.state.log_history],
        "saved": {name: saved[name] for name in names},
        "ends": [{name: getattr(trainer.state, name) for name in names} for trainer in (first, again)],
        "bytes": carried,
    }


class StopsEarly(TrainerCallback):
    """When the second epoch begins."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_training_stop = state.global_step > 0


def stopped(kind: Any, folder: str) -> list[tuple[int, float]]:
    """Steps and epochs of trainings that end so, with two micro-batches in a step and with one."""
    found = []
    for accumulation in (2, 1):
        args = work.arguments(folder, gradient_accumulation_steps=accumulation)
        trainer = kind(gpt2(2, 16), args, work.padded, work.unequal(), callbacks=[StopsEarly])
        trainer.train()
        if hasattr(trainer, "engine"):
            trainer.end()
        found.append((trainer.state.global_step, trainer.state.epoch))
    return found


class Modes(torch.optim.SGD):
    """An optimizer whose weights differ in training and evaluation."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


def labelled(chosen: list[Any]) -> dict[str, torch.Tensor]:
    """Labels that are input_ids, padding and all."""
    batch = work.padded(chosen)
    return {**batch, "labels": batch["input_ids"].clone()}


def evaluated(rank: int, world: int, note: Any, folder: str) -> str:
    from pipecomp import PipelineTrainer

    trainer = PipelineTrainer(gpt2(2, 16), work.arguments(folder), labelled, None, work.unequal(3))
    try:
        trainer.evaluate()
    except PipecompError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def everything(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    from pipecomp import PipelineTrainer

    gpt2(2, 16).save_pretrained(f"{folder}/begun-{rank}")  # before the ranks join: then only the first one would write
    return {
        "counted": counted(PipelineTrainer, f"{folder}/counted"),
        "stopped": stopped(PipelineTrainer, f"{folder}/stopped"),
        "again": again(folder),
        "seed": torch.initial_seed(),
        "errors": errors(folder),
    }


def errors(folder: str) -> dict[str, str]:
    """The error of each case, on this rank; the last one ends the run."""
    from pipecomp import PipelineTrainer

    def made(model: Any = None, collate: Any = work.padded, **more: Any) -> Any:
        args = work.arguments(folder, max_steps=2)
        return PipelineTrainer(model or gpt2(2, 16), args, collate, work.unequal(), work.unequal(3), **more)

    def changed(name: str, value: float, *, after: bool) -> None:
        trainer = made()
        if after:
            trainer.evaluate()
        setattr(trainer.args, name, value)
        try:
            trainer.train()
        finally:
            trainer.end()

    def hidden_states() -> None:
        model = work.bert()
        model.config.output_hidden_states = True
        made(model)

    def best_of_modes() -> None:
        args = work.arguments(folder, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True)
        kind = (Modes, {"lr": 0.1})
        data = work.unequal(), work.unequal(3)
        PipelineTrainer(gpt2(2, 16), args, work.padded, *data, optimizer_cls_and_kwargs=kind).train()

    cases: dict[str, Any] = {
        "clipping": lambda: changed("max_grad_norm", 0.1, after=False),
        "batch": lambda: changed("per_device_train_batch_size", 1, after=False),
        "rate": lambda: changed("learning_rate", 0.1, after=True),
        "hidden states": hidden_states,
        "modes": best_of_modes,
        "no dataset": lambda: made().evaluate({"first": work.unequal(3), "second": None}),
        "ended": lambda: ended(folder),
        "labels": lambda: made(collate=labelled).train(),
    }
    out = {}
    for name, call in cases.items():
        try:
            call()
        except PipecompError as error:
            out[name] = f"{type(error).__name__}: {error}"
    return out


def ended(folder: str) -> None:
    """A trained model is saved too late, and would be the one of the folder that it began with."""
    from pipecomp import PipelineTrainer

    trainer = PipelineTrainer(
        f"{folder}/begun-{os.environ['RANK']}", work.arguments(folder, max_steps=1), work.padded, work.unequal()
    )
    for _ in range(2):  # each begins with the folder's weights
        trainer.train()
        trainer.end()
    trainer.save_model(f"{folder}/late")


def again(folder: str) -> dict[str, Any]:
    """A script's model, trained by two trainers one after the other; and by one of one stage, which trains it whole."""
    from pipecomp import PipelineTrainer

    out: dict[str, Any] = {}
    model, losses = gpt2(2, 16), []
    for _ in range(2):
        trainer = PipelineTrainer(model, work.arguments(folder, max_steps=3), work.padded, work.unequal())
        trainer.train()
        losses.append(work.losses(trainer))
        trainer.end()
    out["losses"] = losses
    trainer = PipelineTrainer(gpt2(2, 16), work.arguments(f"{folder}/twice", max_steps=2), work.padded, work.unequal())
    out["reports"] = []
    for _ in range(2):
        trainer.train()
        if trainer.rank == 0:
            (run,) = read_runs([f"{folder}/twice"])
            (link,) = link_use(run)
            found = simulate(run)
            out["reports"].append(
                {
                    "sent": (link.sent, run.ranks["end"][1]["links"]["0->1"]["forward"]["messages"]),
                    "steps": [rank["steps"] for rank in run.ranks["end"]],
                    "simulated": found if isinstance(found, str) else found.raw_bytes,
                }
            )
    trainer.end()
    try:
        model.save_pretrained(f"{folder}/model")
    except PipecompError as error:
        out["saved"] = str(error)
    whole = gpt2(2, 16)
    before = whole.lm_head.weight.detach().clone()
    args = work.arguments(folder, max_steps=1, per_device_train_batch_size=1)
    trainer = PipelineTrainer(whole, args, work.padded, work.unequal(), num_stages=1)
    args.activation_checkpointing = True  # of which the engine, made later, hears
    trainer.train()
    out["recomputed"] = any(getattr(m, "gradient_checkpointing", False) for m in trainer.engine.stage.modules())
    trainer.end()
    out["whole"] = bool((whole.state_dict()["lm_head.weight"] != before).any())
    return out


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    return run_ranks(2, everything, str(tmp_path_factory.mktemp("usage")), timeout_s=HANG_S)


def test_tokens_and_operations_are_counted_as_trainer_counts_them(ran: Any, tmp_path: Path) -> None:
    from transformers import Trainer

    expected = counted(Trainer, str(tmp_path))
    assert len(set(expected["steps"])) == len(expected["steps"]) == 4
    assert expected["restored"][0][:2] == expected["steps"][:2]
    assert expected["restored"][0][2:] != expected["steps"][2:], "from the start of the epoch"
    assert expected["ends"][0]["total_flos"] > expected["saved"]["total_flos"] > 0
    for rank in (0, 1):
        assert ran[rank]["counted"] | {"bytes": []} == expected


def test_what_links_carried_before_a_resume_stays_counted(ran: Any) -> None:
    """Also where the step of the checkpoint was evaluated, but not logged."""
    first, again, _ = ran[0]["counted"]["bytes"]
    assert first == again
    assert first["forward_bytes_sent"] > 0


def test_a_callback_that_stops_training_before_a_step_stops_it_where_trainer_does(ran: Any, tmp_path: Path) -> None:
    from transformers import Trainer

    expected = stopped(Trainer, str(tmp_path))
    assert [step for step, _ in expected] == [3, 6]
    for rank in (0, 1):
        assert ran[rank]["stopped"] == expected


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("clipping", "ConfigError: max_grad_norm: got 0.1, allowed: 1.0, the value this trainer was made with"),
        ("batch", "ConfigError: per_device_train_batch_size: got 1, allowed: "),
        ("rate", "ConfigError: learning_rate: got 0.1, allowed: 0.002, the value this trainer was made with"),
        ("hidden states", "ConfigError: config.output_hidden_states: got True"),
        ("modes", "ConfigError: load_best_model_at_end: got True, allowed: False with Modes"),
        ("no dataset", "eval_dataset: got \"None for ['second']\", allowed: a dataset for each name"),
        ("ended", "end() has closed the trained model"),
        ("labels", "labels: sample 0 has 0 at place 6, to be predicted from padding"),
    ],
)
def test_what_would_be_ignored_is_an_error_on_all_ranks(ran: Any, case: str, words: str) -> None:
    for rank in (0, 1):
        assert words in ran[rank]["errors"][case]


def test_labels_that_padding_would_predict_are_not_evaluated(tmp_path: Path) -> None:
    found = run_ranks(2, evaluated, str(tmp_path), timeout_s=HANG_S)
    for rank in (0, 1):
        assert "labels: sample 0 has 0 at place 6, to be predicted from padding" in found[rank]


def test_the_report_of_a_second_training_is_of_that_alone(ran: Any) -> None:
    first, second = ran[0]["again"]["reports"]
    assert first == second
    assert first["steps"] == [2, 2]
    assert not isinstance(first["simulated"], str)


def test_stages_draw_masks_of_their_own(ran: Any) -> None:
    """With one seed blocks of the same place in their stages would drop the same values."""
    assert ran[0]["seed"] != ran[1]["seed"]


def test_a_scripts_model_is_trained_on_and_does_not_pass_for_the_whole(ran: Any, tmp_path: Path) -> None:
    from transformers import Trainer

    model = gpt2(2, 16)
    model.loss_type = "ForCausalLM"
    losses = []
    for _ in range(2):
        trainer = Trainer(model, work.arguments(str(tmp_path), max_steps=3), work.padded, work.unequal())
        trainer.train()
        losses.append(work.losses(trainer))
    for rank in (0, 1):
        found = ran[rank]["again"]
        assert found["losses"][0] == pytest.approx(losses[0], rel=1e-4)
        assert found["losses"][1] == pytest.approx(losses[1], rel=1e-4)
        assert "trainer.save_model(folder)" in found["saved"]
        assert found["recomputed"]
        assert found["whole"], "of one stage the script's model is the trained one"
