"""PipelineTrainer on two processes, against transformers.Trainer in one and against a loop over the engine."""

from __future__ import annotations

import gc
import json
import shutil
import stat
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tests.dist.trainer_work as work
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.errors import ConfigError, PipecompError
from pipecomp.report.metrics import link_use, rank_times
from pipecomp.report.reader import read_runs
from tests.limits import HANG_S
from tests.models import gpt2, samples

pytestmark = pytest.mark.ranks

VARIANTS: dict[str, dict[str, Any]] = {
    "usual": {},
    "smoothed": {
        "label_smoothing_factor": 0.1,
        "max_grad_norm": 0.0,
        "dataloader_drop_last": True,
        "num_train_epochs": 1,
    },
    "by its metric": {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 0.5},  # no evaluation is so much better than another
        "warmup_steps": 0,
        "eval_on_start": True,
        "save_strategy": "best",
        "num_train_epochs": 1.5,
    },
}


# -- what every rank does


def everything(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    from pipecomp import PipelineTrainer  # noqa: F401

    gc.freeze()  # DeepSpeed collects garbage in every step of bf16, in all that was imported
    return {
        "like": {name: like(f"{folder}/{name}", changed) for name, changed in VARIANTS.items()},
        "replicas": replicas(f"{folder}/replicas"),
        "recut": recut(folder),
        "loop": loop(f"{folder}/loop"),
        "units": units(f"{folder}/units"),
        "resumed": {name: resumed(f"{folder}/{name}", changed) for name, changed in RESUMED.items()},
        "classified": classified(f"{folder}/bert"),
        "stopped": stopped(f"{folder}/stopped"),
        "refused": refused(folder),
    }


def like(folder: str, changed: dict[str, Any]) -> dict[str, Any]:
    from pipecomp import PipelineTrainer

    trainer, output, events = work.like_trainer(PipelineTrainer, folder, changed)
    trainer.save_model(f"{folder}/model")
    out = {
        "history": trainer.state.log_history,
        "steps": output.global_step,
        "loss": output.training_loss,
        "events": events.seen,
        "gradients": events.gradients,
        "best": trainer.state.best_model_checkpoint,
        "folders": work.folders(folder),
    }
    trainer.end()
    return out


def replicas(folder: str) -> dict[str, Any]:
    """The same samples to a step, but each of the two ranks is a whole pipeline of one stage."""
    from pipecomp import PipelineTrainer

    changed = {
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "save_strategy": "no",
        "load_best_model_at_end": False,
    }
    trainer, _, events = work.like_trainer(PipelineTrainer, folder, changed, num_stages=1)
    out = {"history": trainer.state.log_history, "predicted": trainer.predict(work.unequal(5, seed=6)).predictions}
    out["weights"] = work.digest(trainer.engine)
    out["prediction steps"] = [name for name, *_ in events.seen].count("on_prediction_step")
    trainer.end()
    return out


def recut(folder: str) -> list[dict[str, Any]]:
    """A checkpoint of two stages, gone on with as two replicas of one stage."""
    from pipecomp import PipelineTrainer

    args = work.arguments(
        f"{folder}/recut", **{**work.LIKE_TRAINER, "per_device_train_batch_size": 1, "load_best_model_at_end": False}
    )
    model = gpt2(2, 16, seed=9)
    trainer = PipelineTrainer(
        model, args, work.padded, work.unequal(), work.unequal(5, seed=6), pipecomp={}, num_stages=1
    )
    trainer.train(resume_from_checkpoint=f"{folder}/usual/checkpoint-4")
    trainer.end()
    return trainer.state.log_history


def loop(folder: str) -> dict[str, Any]:
    """Trainer and engine, uncompressed and compressed, shuffled. The trainer's scales are automatic."""
    import pipecomp
    from pipecomp.trainer.optimizers import parameter_groups

    out: dict[str, Any] = {}
    steps = 5
    for name, section in (("plain", {}), ("direct", {"activations": {"method": "direct"}})):
        args = work.arguments(
            folder,
            max_steps=steps,
            dataloader_drop_last=True,
            train_sampling_strategy="random",
            lr_scheduler_type="constant",
            gradient_accumulation_steps=3,
        )
        trainer = pipecomp.PipelineTrainer(gpt2(), args, train_dataset=samples(), pipecomp=section)
        trainer.train()
        theirs = work.losses(trainer), work.digest(trainer.engine)
        groups = [(len(g["params"]), g["weight_decay"]) for g in trainer.engine.optimizer.param_groups]
        logged = [set(line) for line in trainer.state.log_history if "loss" in line]
        trainer.end()
        engine = pipecomp.initialize(
            gpt2(),
            num_stages=2,
            training_data=samples(),
            parameter_groups=partial(parameter_groups, args),
            optimizer=lambda groups: torch.optim.AdamW(groups, lr=2e-3, fused=True),
            config={
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 3,
                "gradient_clipping": 1.0,
                "steps_per_print": 10**9,
                "pipecomp": {**{key: {**value, "scale": "auto"} for key, value in section.items()}, "seed": 3},
            },
        )
        ours = [float(engine.train_batch()) for _ in range(steps)], work.digest(engine)
        out[name] = {"ours": ours, "theirs": theirs, "groups": groups, "logged": logged}
        out[name]["norms"] = sum("ln_" in n or "bias" in n for n, _ in engine.stage.named_parameters())
        engine.close()
    return out


def units(folder: str) -> dict[int, list[float]]:
    """The length of each sample's gradient in each of three epochs, as it is kept; the weights stay what they are."""
    from pipecomp import PipelineTrainer

    args = work.arguments(folder, learning_rate=0.0, num_train_epochs=3, train_sampling_strategy="random")
    section = {"activations": {"method": "aqsgd", "backward_method": "delta"}, "store": {"backend": "memory"}}
    trainer = PipelineTrainer(gpt2(2, 16), args, train_dataset=samples(7), pipecomp=section)
    found: dict[int, list[float]] = {}
    link = trainer.engine.links.to_previous
    if link is not None:
        send = link.send_gradient

        def noting(g_BSH: torch.Tensor, layout: Any, at: Any, *, unit: float) -> None:
            for sample, g_SH in zip(layout.ids, g_BSH, strict=True):
                found.setdefault(sample, []).append(unit * float(g_SH.norm()))
            send(g_BSH, layout, at, unit=unit)

        link.send_gradient = noting
    trainer.train()
    trainer.end()
    return found


RESUMED: dict[str, dict[str, Any]] = {
    "aqsgd": {"pipecomp": work.AQSGD},
    "2 bits kept": {
        "pipecomp": {**work.AQSGD, "store": {"bits": 2}},
        "num_train_epochs": 2,
        "train_sampling_strategy": "group_by_length",
        "dataloader_num_workers": 1,
        "dataloader_multiprocessing_context": "fork",
    },
    "bf16": {"bf16": True, "gradient_checkpointing": True, "num_train_epochs": 2},
}


def resumed(folder: str, changed: dict[str, Any]) -> dict[str, Any]:
    """Epochs of three steps, saved after steps 2, 4, 6, …; and again from two of them, in the middle of an epoch."""
    from pipecomp import PipelineTrainer

    usual = {"train_sampling_strategy": "random", "num_train_epochs": 3, "save_strategy": "steps", "save_steps": 2}
    changed = {**usual, **changed}
    section = changed.pop("pipecomp", {})

    def trainer(seed: int) -> Any:
        model = gpt2(2, 16, seed=seed)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.1
        return PipelineTrainer(model, work.arguments(folder, **changed), Masking(), work.unequal(), pipecomp=section)

    whole = trainer(0)
    whole.train()
    held = messages(whole.engine)
    expected = work.losses(whole), work.digest(whole.engine), held
    whole.end()
    out: dict[str, Any] = {"expected": expected, "folders": work.folders(folder), "steps": whole.state.global_step}
    for number in (2, 4) if section else (4,):
        again = trainer(9)
        if number == 2:
            again.engine  # noqa: B018 (made before the stores are those of the checkpoint)
        last = not section
        if last and torch.distributed.get_rank() == 0:
            shutil.rmtree(f"{folder}/checkpoint-6")
            Path(f"{folder}/checkpoint-9").mkdir()  # as if it had been interrupted while it was saved
        torch.distributed.barrier()
        again.train(resume_from_checkpoint=last or f"{folder}/checkpoint-{number}")
        blocks = [m for m in again.engine.stage.modules() if getattr(m, "gradient_checkpointing", False)]
        out["recomputed"] = len(blocks)
        out[number] = work.losses(again), work.digest(again.engine), messages(again.engine)
        out[f"epoch {number}"] = [line["epoch"] for line in again.state.log_history if "loss" in line]
        again.end()
    return out


def messages(engine: Any) -> dict[str, list]:
    """(sample, digest of its message) for each link."""
    return {str(end.index): [(h.sample, h.digest) for h in end.store.inventory()] for end in engine.links if end.store}


class Masking:
    """A collator that draws at random: both stages must draw alike, and alike after a resume."""

    def __call__(self, chosen: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = work.padded(chosen)
        hidden = torch.rand(batch["labels"].shape) < 0.2
        batch["input_ids"] = batch["input_ids"].masked_fill(hidden, 1)
        batch["labels"] = batch["labels"].masked_fill(~hidden & (torch.rand(()) < 0.1), -100)
        return batch


def classified(folder: str) -> dict[str, Any]:
    """A classifier from a folder, with metrics, early stopping, the best model at the end, curves and predictions."""
    from transformers import EarlyStoppingCallback

    from pipecomp import PipelineTrainer

    if torch.distributed.get_rank() == 0:
        work.bert().save_pretrained(f"{folder}/start")
    torch.distributed.barrier()
    args = work.arguments(
        folder,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        num_train_epochs=12,
        learning_rate=1e-2,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="one_accuracy",
        report_to="tensorboard",
        save_total_limit=1,
        train_sampling_strategy="random",
        logging_strategy="epoch",
        per_device_eval_batch_size=4,
        include_for_metrics=["loss", "inputs"],
    )
    seen: list[tuple[int, int]] = []

    def metrics(found: Any) -> dict[str, float]:
        seen.append((found.inputs.shape[0], found.losses.shape[0]))
        return work.accuracy(found)

    held_out = work.sentences(22, seed=5)
    trainer = PipelineTrainer(
        f"{folder}/start",
        args,
        work.classified,
        work.sentences(61),
        {"one": held_out, "two": held_out[:6]},
        pipecomp={"activations": {"method": "aqsgd", "forward_bits": 4}},
        compute_metrics=metrics,
        callbacks=[EarlyStoppingCallback(3)],
        preprocess_logits_for_metrics=lambda logits, labels: logits.to(torch.float32),
    )
    output = trainer.train()
    trainer.save_model(f"{folder}/model")
    out = {
        "steps": output.global_step,
        "max": trainer.state.max_steps,
        "history": trainer.state.log_history,
        "best": (trainer.state.best_metric, trainer.state.best_global_step),
        "folders": work.folders(folder),
        "again": trainer.evaluate(held_out),
        "seen": seen,
        "predicted": trainer.predict(held_out),
        "unlabelled": trainer.predict(work.sentences(5, labels=False)),
    }
    trainer.end()
    return out


def stopped(folder: str) -> dict[str, Any]:
    """Errors of user code on one rank; callbacks that end epochs; a last checkpoint that is not whole."""
    from transformers import TrainerCallback

    from pipecomp import PipelineTrainer

    class ShortEpochs(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            control.should_epoch_stop = state.global_step % 2 == 0

    def broken(found: Any) -> dict[str, float]:
        raise KeyError("no such thing")

    out: dict[str, Any] = {}
    args = work.arguments(folder, save_strategy="epoch", save_only_model=True)
    trainer = PipelineTrainer(gpt2(2, 16), args, work.padded, work.unequal(), work.unequal(3), callbacks=[ShortEpochs])
    trainer.train()
    out["short"] = (trainer.state.global_step, [line.get("epoch") for line in trainer.state.log_history])
    trainer.compute_metrics = broken
    try:
        trainer.evaluate()
    except (KeyError, PipecompError) as error:
        out["broken"] = f"{type(error).__name__}: {error}"
    trainer.compute_metrics = None
    out["works"] = trainer.evaluate()["eval_loss"]
    out["files"] = sorted(path.name for path in (Path(folder) / "checkpoint-2").iterdir())
    for name, resume in (("only model", f"{folder}/checkpoint-2"), ("no folder", f"{folder}/nothing")):
        try:
            trainer.train(resume_from_checkpoint=resume)
        except ConfigError as error:
            out[name] = str(error)
    trainer.end()
    return out


def refused(folder: str) -> dict[str, str]:
    """Refusals that need several processes."""
    from pipecomp import CompressionCallback, PipelineTrainer

    out = {}
    for name, more in {
        "stages": {"num_stages": 3},
        "cut": {"cuts": [0, 1, 1, 2]},
        "callback": {"callbacks": [CompressionCallback("fp16")]},
        "optimizer": {"optimizers": (torch.optim.SGD([torch.zeros(1)]), None)},
        "section": {"pipecomp": {"activations": {"bits": 3}}},
        "config": {"pipecomp": {"gradient_accumulation_steps": 7, "pipecomp": {}}},
    }.items():
        try:
            PipelineTrainer(gpt2(2, 16), work.arguments(folder), train_dataset=samples(), **more)  # type: ignore[arg-type]
        except PipecompError as error:
            out[name] = str(error)
    trainer = PipelineTrainer(gpt2(2, 16), work.arguments(f"{folder}/aqsgd", gradient_accumulation_steps=1))
    for name, call in {
        "none": lambda: PipelineTrainer(gpt2(2, 16), work.arguments(f"{folder}/empty"), None, samples()).train(True),
        "data": lambda: trainer.train(),
    }.items():
        try:
            call()
        except PipecompError as error:
            out[name] = str(error)
    return out


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("trainer")
    return folder, run_ranks(2, everything, str(folder), timeout_s=HANG_S)


# -- transformers.Trainer


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of Trainer in this process."""
    from transformers import Trainer

    folder = tmp_path_factory.mktemp("reference")
    torch.set_num_threads(1)
    return {name: work.like_trainer(Trainer, str(folder / name), changed) for name, changed in VARIANTS.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_trains_as_trainer_does(ran: Any, reference: Any, variant: str) -> None:
    folder, ranks = ran
    trainer, output, events = reference[variant]
    for out in (ranks[0]["like"][variant], ranks[1]["like"][variant]):
        assert out["steps"] == output.global_step > 1
        assert out["loss"] == pytest.approx(output.training_loss, rel=1e-5)
        for ours, theirs in zip(out["history"], trainer.state.log_history, strict=True):
            same = [key for key in theirs if "second" not in key and "runtime" not in key]
            assert {key: ours[key] for key in same} == pytest.approx({key: theirs[key] for key in same}, rel=1e-4)
        assert out["events"] == events.seen
        for event in ("on_pre_optimizer_step", "on_optimizer_step", "on_step_end"):
            assert out["gradients"][event] == events.gradients[event]
        best = trainer.state.best_model_checkpoint
        assert Path(out["best"]).name == Path(best).name
        assert out["folders"] == work.folders(trainer.args.output_dir)
    model = type(trainer.model).from_pretrained(folder / variant / "model")
    ours, theirs = dict(model.named_parameters()), dict(trainer.model.named_parameters())
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).detach().abs().max()) for name in ours) < 1e-4


def test_replicas_train_as_one_with_all_their_samples(ran: Any, reference: Any) -> None:
    """Nine samples for two replicas: one's tenth place is filled with an own sample, so an epoch's end differs."""
    _, ranks = ran
    trainer, *_ = reference["usual"]
    theirs = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    for out in (ranks[0]["replicas"], ranks[1]["replicas"]):
        ours = [line["loss"] for line in out["history"] if "loss" in line]
        assert len(ours) == len(theirs)
        assert ours[:2] == pytest.approx(theirs[:2], rel=1e-5)
        assert out["weights"] == ranks[0]["replicas"]["weights"]
        assert out["predicted"].shape == ranks[0]["replicas"]["predicted"].shape
        assert out["prediction steps"] == 4 * 3  # four evaluations; the replica that has less waits for the other
    assert np.array_equal(ranks[0]["replicas"]["predicted"], ranks[1]["replicas"]["predicted"])


def test_stages_go_on_as_replicas(ran: Any) -> None:
    """Step 5 has the same samples; step 6, the end of an epoch, has not."""
    _, ranks = ran
    for rank in (0, 1):
        expected = {line["step"]: line for line in ranks[rank]["like"]["usual"]["history"] if "loss" in line}
        found = [line for line in ranks[rank]["recut"] if "loss" in line]
        assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
        assert found[4]["loss"] == pytest.approx(expected[5]["loss"], rel=1e-5)
        assert found[4]["learning_rate"] == expected[5]["learning_rate"]
        assert found[5]["loss"] < found[0]["loss"]


def test_is_a_loop_over_the_engine(ran: Any) -> None:
    _, ranks = ran
    for name in ("plain", "direct"):
        for out in (ranks[0]["loop"][name], ranks[1]["loop"][name]):
            assert out["ours"] == out["theirs"]
            assert out["ours"][0][-1] < out["ours"][0][0]
            assert [decay for _, decay in out["groups"]] == [0.1, 0.0]
            assert out["groups"][1][0] == out["norms"]
            for logged in out["logged"]:
                assert logged >= {"loss", "grad_norm", "learning_rate", "epoch"}
                assert logged >= {"link_compression", "link_wait_seconds", "link_slowest_wait"}
                assert logged >= {"link_forward_mb_per_s", "link_backward_mb_per_s"}
                assert not logged & {"store_hit_rate", "grad_compression"}
    assert ranks[0]["loop"]["plain"]["ours"][0] != ranks[0]["loop"]["direct"]["ours"][0]


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_training_is_the_same_training(ran: Any, name: str) -> None:
    _, ranks = ran
    for out in (ranks[0]["resumed"][name], ranks[1]["resumed"][name]):
        losses, weights, messages = out["expected"]
        assert len(losses) == out["steps"] == 3 * (3 if name == "aqsgd" else 2)
        assert losses[-1] < losses[0]
        for number in [key for key in out if isinstance(key, int)]:
            assert out[number][0] == losses, f"from step {number}"  # those before it come from the checkpoint
            assert out[number][1] == weights
            assert out[number][2] == messages
            epochs = [e + part for e in range(3) for part in (0.4, 0.8, 1)]
            assert out[f"epoch {number}"] == pytest.approx(epochs[: len(losses)])
        assert (out["recomputed"] > 0) == (name == "bf16")
        if name != "bf16":
            assert [sample for sample, _ in messages["0"]] == list(range(work.SAMPLES))
    expected = [ranks[rank]["resumed"][name]["expected"] for rank in (0, 1)]
    assert expected[0][2] == expected[1][2], "both ends hold the same messages"


def test_classifier_is_evaluated_as_trainer_does(ran: Any, tmp_path: Path) -> None:
    from transformers import BertForSequenceClassification, Trainer

    folder, ranks = ran
    held_out = work.sentences(22, seed=5)
    args = work.arguments(str(tmp_path), per_device_eval_batch_size=4)
    model = BertForSequenceClassification.from_pretrained(folder / "bert" / "model")
    assert model.config.problem_type == "single_label_classification"
    trainer = Trainer(model, args, work.classified, compute_metrics=work.accuracy)
    expected, predicted = trainer.evaluate(held_out), trainer.predict(held_out)
    for out in (ranks[0]["classified"], ranks[1]["classified"]):
        for key in ("eval_loss", "eval_accuracy"):
            assert out["again"][key] == pytest.approx(expected[key], rel=1e-5)
        assert out["again"]["eval_accuracy"] == pytest.approx(out["best"][0]), "the best model was loaded at the end"
        assert np.allclose(out["predicted"].predictions, predicted.predictions, atol=1e-5)
        assert np.array_equal(out["predicted"].label_ids, predicted.label_ids)
        assert out["predicted"].metrics["test_loss"] == pytest.approx(predicted.metrics["test_loss"], rel=1e-5)
        assert out["unlabelled"].predictions.shape == (5, 3)
        assert out["unlabelled"].label_ids is None
        assert "test_loss" not in out["unlabelled"].metrics
    assert ranks[0]["classified"]["seen"][:2] == [(22, 22), (6, 6)]
    assert ranks[1]["classified"]["seen"] == []


def test_early_stopping_best_model_and_curves(ran: Any) -> None:
    folder, ranks = ran
    for out in (ranks[0]["classified"], ranks[1]["classified"]):
        best, at = out["best"]
        accuracies = {line["step"]: line["eval_one_accuracy"] for line in out["history"] if "eval_one_accuracy" in line}
        assert best == max(accuracies.values()) > 0.5
        assert at == min(step for step, value in accuracies.items() if value == best)
        assert out["steps"] == at + 3 * 8 < out["max"], "stopped three evaluations after the best"
        assert out["folders"] == [f"checkpoint-{at}"]
        rates = [line["store_hit_rate"] for line in out["history"] if "loss" in line]
        assert rates[0] == 0
        assert set(rates[1:]) == {1.0}
        training = [line["loss"] for line in out["history"] if "loss" in line]
        assert training[-1] < training[0]
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tags: set[str] = set()
    for events in (folder / "bert").rglob("events.out.tfevents.*"):
        tags |= set(accumulator.EventAccumulator(str(events)).Reload().Tags()["scalars"])
    assert {"train/loss", "train/link_compression", "train/link_forward_mb_per_s", "eval/one_accuracy"} <= tags


def test_a_training_leaves_what_a_report_shows(ran: Any) -> None:
    folder, ranks = ran
    (run,) = read_runs([folder / "bert"])
    steps = ranks[0]["classified"]["steps"]
    assert [line["step"] for line in run.steps] == list(range(1, steps + 1))
    assert (run.facts["kind"], run.facts["status"], run.facts["hidden"]) == ("trainer", "finished", 16)
    assert run.notes == []
    (link,) = link_use(run)
    assert 1 < link.raw / link.sent < 8
    assert [rank.stage for rank in rank_times(run)] == [0, 1]
    assert (folder / "bert" / "report.html").stat().st_size > 1e6


def test_checkpoint_is_a_model_folder(ran: Any) -> None:
    from transformers import GPT2LMHeadModel

    folder, ranks = ran
    checkpoint = folder / "aqsgd" / "checkpoint-4"
    model = GPT2LMHeadModel.from_pretrained(checkpoint)
    assert not any(bool(p.isnan().any()) for p in model.parameters())
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert state["global_step"] == 4
    pipeline = json.loads((checkpoint / "pipeline.json").read_text())
    assert (pipeline["cuts"], pipeline["replicas"]) == ([0, 1, 2], 1)
    assert (checkpoint / "deepspeed" / "pipecomp-messages-rank-1" / "data.mdb").is_file()
    for path in (checkpoint, *checkpoint.rglob("*")):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, f"{path} can be read by others"
    light = ranks[0]["stopped"]["files"]
    assert "deepspeed" not in light
    assert {"config.json", "trainer_state.json", "training_args.bin"} <= set(light)


def test_errors_of_one_rank_end_all(ran: Any) -> None:
    _, ranks = ran
    assert ranks[0]["stopped"]["broken"] == "KeyError: 'no such thing'"
    assert ranks[1]["stopped"]["broken"] == "PipecompError: evaluation failed on rank 0: KeyError: 'no such thing'"
    assert ranks[0]["stopped"]["works"] == ranks[1]["stopped"]["works"]


def test_callbacks_end_epochs(ran: Any) -> None:
    _, ranks = ran
    for out in (ranks[0]["stopped"], ranks[1]["stopped"]):
        steps, epochs = out["short"]
        assert steps == 4  # two epochs of two steps instead of three
        assert epochs == pytest.approx([0.4, 0.8, 1.4, 1.8, 1.8])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("stages", "num_stages: got 3, allowed"),
        ("cut", "cuts"),
        ("callback", "callbacks: got 'CompressionCallback'"),
        ("optimizer", "optimizers[0]: got 'SGD'"),
        ("section", "activations.bits"),
        ("config", "gradient_accumulation_steps: got 7, allowed: 'auto' or 2"),
        ("none", "resume_from_checkpoint: got True"),
        ("data", "train_dataset: got NoneType"),
    ],
)
def test_refused(ran: Any, name: str, words: str) -> None:
    _, ranks = ran
    assert words in ranks[0]["refused"][name]
    assert ranks[1]["refused"][name] == ranks[0]["refused"][name]


def test_a_gradient_is_kept_in_a_unit_that_a_short_step_does_not_move(ran: Any) -> None:
    """Epochs of a step of four samples and one of three, in micro-batches of two samples and one."""
    _, ranks = ran
    lengths = ranks[1]["units"]
    assert len(lengths) == 7
    for found in lengths.values():
        assert found == pytest.approx([found[0]] * 3, rel=0.05)


@pytest.mark.parametrize(("name", "words"), [("only model", "save_only_model"), ("no folder", "trainer_state.json")])
def test_not_a_checkpoint(ran: Any, name: str, words: str) -> None:
    _, ranks = ran
    for out in (ranks[0], ranks[1]):
        assert words in out["stopped"][name]
        assert out["stopped"][name].startswith("resume_from_checkpoint: got")


def test_nothing_is_left_in_the_working_directory(ran: Any) -> None:
    assert not Path("messages").exists()
    shutil.rmtree(ran[0])
