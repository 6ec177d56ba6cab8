"""Habits of public fine-tuning scripts: each works with PipelineTrainer, or an error names what to use instead.

A habit that trains is a mixin or arguments for both trainers, and must give the losses of transformers.Trainer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, WeightedRandomSampler
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, get_cosine_schedule_with_warmup

import tests.dist.trainer_work as work
from pipecomp import PipelineTrainer
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.errors import ConfigError, PipecompError
from pipecomp.trainer import hub
from pipecomp.trainer.losses import LastStageModel, StepLoss
from tests.limits import HANG_S
from tests.models import gpt2

pytestmark = pytest.mark.ranks


def bert() -> Any:
    return work.bert(dropout=0.0)


CLASSES: dict[str, Any] = {"model": bert, "collate": work.classified, "data": lambda: work.sentences(12)}
WORDS: dict[str, Any] = {"model": lambda: lm(), "collate": work.padded, "data": work.unequal}


def lm() -> Any:
    model = gpt2(2, 16)
    model.loss_type = "ForCausalLM"  # Trainer would count first tokens too: it goes by the name of the class
    return model


def made(kind: Any, folder: Path, task: dict[str, Any], mixin: type | None = None, **more: Any) -> Any:
    """Return a trainer of `kind` with a mixin; more: TrainingArguments, or the trainer's arguments in "given"."""
    given = more.pop("given", {})
    args = work.arguments(str(folder / kind.__name__), **{"max_steps": 3, **more})
    model = task["model"]()
    if callable(given):
        given = given(model)
    given = {"train_dataset": task["data"](), **given}
    kind = type(f"My{kind.__name__}", (mixin, kind), {}) if mixin else kind
    return kind(model, args, task["collate"], **given)


# -- scripts that train


class WeightedLoss:
    """Loss with weights of classes."""

    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(
            outputs.get("logits").view(-1, model.config.num_labels), labels, torch.tensor([1.0, 2.0, 3.0])
        )
        return (loss, outputs) if return_outputs else loss


class MeanLoss(WeightedLoss):
    loss_is_scaled_for_ga = False


class AddedLoss:
    """The usual loss and a penalty."""

    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        real = inputs["labels"] != -100  # stages do not compute padding
        loss, outputs = super().compute_loss(  # type: ignore[misc]
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        loss = loss + 0.01 * outputs.logits[real].pow(2).mean()
        return (loss, outputs) if return_outputs else loss


class ModelsLoss:
    """The model's own loss, halved."""

    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss / 2, outputs) if return_outputs else outputs["loss"] / 2


class SampleWeights:
    """A column of the data weighs samples."""

    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        weights, labels = inputs.pop("weight"), inputs.pop("labels")
        outputs = model(**inputs)
        loss = (nn.functional.cross_entropy(outputs.logits, labels, reduction="none") * weights).mean()
        return (loss, outputs) if return_outputs else loss


class OwnOptimizer:
    """Different rates for embeddings and the rest."""

    def create_optimizer(self: Any, model: Any = None) -> Any:
        named = list((self.model if model is None else model).named_parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for n, p in named if ".h." in n], "lr": 1e-3},
                {"params": [p for n, p in named if ".h." not in n], "lr": 4e-3},
            ]
        )
        return self.optimizer


class WrappedOptimizer:
    def create_optimizer(self: Any, *given: Any) -> Any:
        optimizer = super().create_optimizer(*given)  # type: ignore[misc]
        for group in optimizer.param_groups:
            group["lr"] = 5e-3
        return optimizer


class OwnSchedule:
    def create_scheduler(self: Any, num_training_steps: int, optimizer: Any = None) -> Any:
        optimizer = self.optimizer if optimizer is None else optimizer
        self.lr_scheduler = get_cosine_schedule_with_warmup(optimizer, 1, num_training_steps)
        return self.lr_scheduler


class OwnBoth:
    def create_optimizer_and_scheduler(self: Any, num_training_steps: int) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3, momentum=0.9)
        self.lr_scheduler = get_cosine_schedule_with_warmup(self.optimizer, 0, num_training_steps)


class Apart:
    """The same as `OwnBoth`, which transformers 5.24 documents and does not call."""

    def create_optimizer(self: Any) -> Any:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3, momentum=0.9)
        return self.optimizer

    def create_scheduler(self: Any, num_training_steps: int) -> Any:
        self.lr_scheduler = get_cosine_schedule_with_warmup(self.optimizer, 0, num_training_steps)
        return self.lr_scheduler


class NoDecay:
    def get_decay_parameter_names(self, model: Any) -> list[str]:
        return [name for name, _ in model.named_parameters() if "mlp" in name]


class StaticOptimizer:
    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
        return torch.optim.SGD, {"lr": args.learning_rate, "momentum": 0.5}


class Reversed:
    """A loader of the script's own, in another order."""

    def get_train_dataloader(self: Any) -> Any:
        order = list(range(len(self.train_dataset)))[::-1]
        return DataLoader(
            self.train_dataset, batch_sampler=BatchSampler(order, 2, False), collate_fn=self.data_collator
        )


class InOrder:
    def _get_train_sampler(self: Any, train_dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset)


class EvalFirst:
    """A loader for evaluation."""

    def get_eval_dataloader(self: Any, eval_dataset: Any = None) -> Any:
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        return self.accelerator.prepare(DataLoader(data, 3, collate_fn=self.data_collator))


def plain_sentences() -> list[dict[str, Any]]:
    return [{key: value for key, value in sample.items() if key != "idx"} for sample in work.sentences(12)]


def weighted(chosen: list[Any]) -> Any:
    return work.classified(chosen) | {"weight": torch.tensor([1.0 + s["input_ids"][0] % 2 for s in chosen])}


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def of_model(model: Any) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.2)
    return {"optimizers": (optimizer, halving(optimizer))}


def without_schedule(model: Any) -> dict[str, Any]:
    return {"optimizers": (of_model(model)["optimizers"][0], None)}


TRAINED: dict[str, Callable[[], dict[str, Any]]] = {
    "weights of classes": lambda: {"task": CLASSES, "mixin": WeightedLoss},
    "a loss that is a mean": lambda: {"task": CLASSES, "mixin": MeanLoss},
    "a loss added to the usual one": lambda: {"task": WORDS, "mixin": AddedLoss},
    "the model's loss halved": lambda: {"task": WORDS, "mixin": ModelsLoss},
    "a loss added, smoothed": lambda: {"task": WORDS, "mixin": AddedLoss, "label_smoothing_factor": 0.1},
    "weights of samples": lambda: {
        "task": {**CLASSES, "collate": weighted, "data": plain_sentences},
        "mixin": SampleWeights,
        "remove_unused_columns": False,
    },
    "create_optimizer": lambda: {"task": WORDS, "mixin": OwnOptimizer},
    "create_optimizer that changes the usual one": lambda: {"task": WORDS, "mixin": WrappedOptimizer},
    "create_scheduler": lambda: {"task": WORDS, "mixin": OwnSchedule},
    "create_optimizer_and_scheduler": lambda: {"task": WORDS, "mixin": OwnBoth},
    "create_optimizer, then create_scheduler": lambda: {"task": WORDS, "mixin": Apart},
    "get_decay_parameter_names": lambda: {"task": WORDS, "mixin": NoDecay},
    "get_optimizer_cls_and_kwargs": lambda: {"task": WORDS, "mixin": StaticOptimizer},
    "get_train_dataloader": lambda: {"task": WORDS, "mixin": Reversed},
    "_get_train_sampler": lambda: {"task": WORDS, "mixin": InOrder, "train_sampling_strategy": "random"},
    "get_eval_dataloader": lambda: {
        "task": WORDS,
        "mixin": EvalFirst,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 3,
        "given": {"eval_dataset": work.unequal(5, seed=6)},
    },
    "optimizers of the model": lambda: {"task": WORDS, "given": of_model},
    "an optimizer of the model": lambda: {"task": WORDS, "given": without_schedule},
    "optimizer_cls_and_kwargs": lambda: {
        "task": WORDS,
        "given": {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})},
    },
    "compute_loss_func": lambda: {"task": WORDS, "given": {"compute_loss_func": work.summed}},
    "optim adafactor": lambda: {"task": WORDS, "optim": "adafactor"},
    "compiled blocks": lambda: {"task": WORDS, "torch_compile": True, "torch_compile_backend": "aot_eager"},
}


def losses_of(trainer: Any) -> list[float]:
    trainer.train()
    found = [line.get("loss", line.get("eval_loss")) for line in trainer.state.log_history[:-1]]
    trainer.end()
    return found


@pytest.mark.parametrize("name", TRAINED)
def test_a_script_trains_as_with_trainer(name: str, ran: dict[int, Any], tmp_path: Path) -> None:
    script = TRAINED[name]()
    if script.get("mixin") is OwnBoth:
        script["mixin"] = Apart
    expected = losses_of(made(Trainer, tmp_path, **script))
    assert len(expected) >= 3
    for rank in (0, 1):
        assert ran[rank]["trained"][name] == pytest.approx(expected, rel=2e-5)


# -- what scripts read and call


READ: dict[str, Callable[[Any], Any]] = {
    "the model's device": lambda t: t.model.device.type == "cpu",
    "the model's dtype": lambda t: t.model.dtype is torch.float32,
    "the model's configuration": lambda t: t.model.config.n_layer == 2,
    "the model's cache": lambda t: setattr(t.model.config, "use_cache", False) is None,
    "the wrapped model": lambda t: t.model_wrapped is t.model,
    "the optimizer's rate": lambda t: t.optimizer.param_groups[0]["lr"] >= 0,
    "all rates": lambda t: t.get_learning_rates() == [group["lr"] for group in t.optimizer.param_groups],
    "a parameter's group": lambda t: t.get_optimizer_group(next(iter(t.model.parameters())))["lr"] >= 0,
    "the schedule's rate": lambda t: t.lr_scheduler.get_last_lr(),
    "the number of trained values": lambda t: (
        t.get_num_trainable_parameters() == sum(p.numel() for p in lm().parameters())
    ),
    "main process": lambda t: t.accelerator.is_main_process == (t.rank == 0),
    "number of processes": lambda t: (t.accelerator.num_processes, t.accelerator.process_index) == (t.world, t.rank),
    "the accelerator's device": lambda t: t.accelerator.device.type == "cpu",
    "unwrapping": lambda t: t.accelerator.unwrap_model(t.model) is t.model,
    "waiting": lambda t: t.accelerator.wait_for_everyone() is None,
    "printing": lambda t: t.accelerator.print("printed") is None,
    "world process zero": lambda t: t.is_world_process_zero() == t.state.is_world_process_zero == (t.rank == 0),
    "local process zero": lambda t: t.is_local_process_zero() is (t.rank == 0),
    "FSDP": lambda t: not t.is_fsdp_enabled,
    "the tokenizer": lambda t: t.tokenizer is t.processing_class,
    "callbacks": lambda t: [type(c).__name__ for c in t.callback_handler.callbacks],
    "the state's step": lambda t: t.state.global_step == t.state.max_steps == 3,
    "the log": lambda t: [line["loss"] for line in t.state.log_history if "loss" in line],
    "the search's backend": lambda t: t.hp_search_backend is None,
    "the loss function": lambda t: t.can_return_loss and t.label_names == ["labels"],
    "steps of an epoch": lambda t: len(t.get_train_dataloader()) == 5,
    "a batch": lambda t: next(iter(t.get_train_dataloader()))["input_ids"].shape[0] == 2,
    "a batch of evaluation": lambda t: next(iter(t.get_eval_dataloader()))["input_ids"].shape[0] == 2,
    "a batch of a test": lambda t: next(iter(t.get_test_dataloader(work.unequal(3))))["labels"].shape[0] == 2,
    "the number of samples": lambda t: t.num_examples(t.get_train_dataloader()) == work.SAMPLES,
    "metrics of evaluation": lambda t: t.evaluate()["eval_loss"] > 0,
    "predictions": lambda t: t.predict(work.unequal(3)).predictions.shape[0] == 3,
    "the best model": lambda t: t.state.best_model_checkpoint is None,
    "another callback": lambda t: t.add_callback(TrainerCallback) is None and t.pop_callback(TrainerCallback),
    "metrics in files": lambda t: (
        t.log_metrics("eval", {"eval_loss": 1.0}) is None and t.save_metrics("eval", {"eval_loss": 1.0}) is None
    ),
    "the state in a file": lambda t: t.save_state() is None,
    "the training's arguments": lambda t: t.args.train_batch_size == 2,
    "training or not": lambda t: not t.is_in_train,
    "whether attributes exist": lambda t: not hasattr(t, "deepspeed") and not hasattr(t, "no_such_thing"),
}


@pytest.mark.parametrize("name", READ)
def test_what_scripts_read(name: str, ran: dict[int, Any]) -> None:
    for rank in (0, 1):
        assert ran[rank]["read"][name] == "works"


OPTIONS: list[dict[str, Any]] = [{}, {"do_sample": True, "top_k": 5}, {"num_beams": 2}, {"repetition_penalty": 1.4}]


def generated(trainer: Any, folder: Path) -> list[Any]:
    """The tokens of the saved model and of the stages, with each of the options."""
    trainer.save_model(str(folder / "saved"))
    trainer.accelerator.wait_for_everyone()
    whole = type(lm()).from_pretrained(folder / "saved")
    ids, mask = torch.tensor([[0, 0, 5, 7, 9], [3, 4, 5, 6, 7]]), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    out = []
    for options in OPTIONS:
        given = {"attention_mask": mask, "max_new_tokens": 6, "pad_token_id": 0, **options}
        found = []
        for model in (whole, trainer.model):
            torch.manual_seed(3)
            found.append(model.generate(ids, **given).tolist())
        out.append(found)
    return out


def test_generated_tokens_are_the_models(ran: dict[int, Any]) -> None:
    for rank in (0, 1):
        for whole, stages in ran[rank]["generated"]:
            assert whole == stages
            assert len(whole[0]) == 11
    assert len(ran[0]["generated"]) == len(OPTIONS)


# -- what has another way here

SET: dict[str, tuple[Any, str]] = {
    "model": (5, "a new PipelineTrainer"),
    "optimizer": (5, r"create_optimizer of a subclass"),
    "lr_scheduler": (5, "create_scheduler of a subclass"),
    "compute_loss": (print, "compute_loss_func="),
    "training_step": (print, "compute_loss, or TrainerCallback"),
    "label_smoother": (5, "label_smoothing_factor"),
    "neftune_noise_alpha": (5, "TrainingArguments"),
    "compute_loss_func": (5, "an argument of PipelineTrainer"),
    "prediction_step": (print, "compute_metrics"),
}
CALLED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "hyperparameter_search": (lambda t: t.hyperparameter_search(), "a loop over settings"),
    "training_step": (lambda t: t.training_step(t.model, {}), "compute_loss"),
    "prediction_step": (lambda t: t.prediction_step, "preprocess_logits_for_metrics"),
    "evaluation_loop": (lambda t: t.evaluation_loop, "evaluate"),
    "_load_from_checkpoint": (lambda t: t._load_from_checkpoint("x"), "resume_from_checkpoint"),
    "_save_checkpoint": (lambda t: t._save_checkpoint(t.model, None), "save_model"),
    "_prepare_inputs": (lambda t: t._prepare_inputs({}), "data_collator"),
    "floating_point_ops": (lambda t: t.floating_point_ops({}), "state.total_flos"),
    "deepspeed": (lambda t: t.deepspeed.zero3, "trainer.engine"),
    "_tune_save_checkpoint": (lambda t: t._tune_save_checkpoint, "only transformers.Trainer calls it"),
    "save_pretrained": (lambda t: t.model.save_pretrained("x"), "trainer.save_model"),
    "push_to_hub": (lambda t: t.model.push_to_hub("x"), "trainer.save_model"),
    "num_parameters": (lambda t: t.model.num_parameters(), "trainer.save_model"),
    "backward": (lambda t: t.accelerator.backward(5), "methods of PipelineTrainer"),
}
OVERRIDDEN = {
    "training_step": "compute_loss",
    "prediction_step": "compute_metrics",
    "evaluation_loop": "evaluate",
    "_inner_training_loop": "a TrainerCallback",
    "_save": "save_model",
    "_save_checkpoint": "TrainerCallback.on_save",
    "_maybe_log_save_evaluate": "log, evaluate",
    "_prepare_inputs": "data_collator",
    "_get_eval_sampler": "get_eval_dataloader",
    "compute_loss_context_manager": "bf16 or fp16",
    "_move_model_to_device": "nothing: this trainer does not call it",
}


@pytest.mark.parametrize("name", SET)
def test_what_cannot_be_set_names_the_way(name: str, ran: dict[int, Any]) -> None:
    for rank in (0, 1):
        assert re.search(rf"^ConfigError: .*\.{name}: got .*{SET[name][1]}", ran[rank]["set"][name])


@pytest.mark.parametrize("name", CALLED)
def test_what_cannot_be_called_names_the_way(name: str, ran: dict[int, Any]) -> None:
    for rank in (0, 1):
        assert re.search(rf"^AttributeError: .*{name}.*{CALLED[name][1]}", ran[rank]["called"][name])


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_what_cannot_be_overridden_names_the_way(name: str) -> None:
    mixin = type("Mixin", (), {name: lambda self: None})
    with pytest.raises(ConfigError, match=rf"Mixin\.{name}: got 'a method', allowed: .*{OVERRIDDEN[name]}"):
        type("Mine", (mixin, PipelineTrainer), {})


class CallsTwice:
    def compute_loss(self: Any, model: Any, inputs: Any, **more: Any) -> Any:
        return model(**inputs).loss + model(**inputs).loss


class CallsWithOther:
    def compute_loss(self: Any, model: Any, inputs: Any, **more: Any) -> Any:
        return model(input_ids=inputs["input_ids"].flip(0), labels=inputs["labels"]).loss


class WantsHidden:
    def compute_loss(self: Any, model: Any, inputs: Any, **more: Any) -> Any:
        return model(**inputs, output_hidden_states=True).loss


class Streams:
    def get_train_dataloader(self: Any) -> Any:
        return [work.padded(work.unequal(2))]


class TooLarge:
    def get_train_dataloader(self: Any) -> Any:
        return DataLoader(self.train_dataset, 4, collate_fn=self.data_collator)


class OfOtherParameters:
    def create_optimizer(self: Any) -> Any:
        self.optimizer = torch.optim.AdamW(lm().parameters())
        return self.optimizer


REFUSED: dict[str, tuple[type, str]] = {
    "calls twice": (CallsTwice, "compute_loss calls the model again"),
    "calls with other inputs": (CallsWithOther, "compute_loss calls the model with other input_ids"),
    "wants hidden states": (WantsHidden, "output_hidden_states is not available"),
    "streams": (Streams, "get_train_dataloader: got list, allowed: a torch DataLoader"),
    "large batches": (TooLarge, "batches of 4 samples, allowed: per_device_train_batch_size, 2"),
    "other parameters": (OfOtherParameters, "create_optimizer: got 'AdamW', allowed: .* this process's stage"),
}
ENDING = ("calls twice", "calls with other inputs", "wants hidden states")  # end the run: the last stage meets them


def error_of(call: Callable[[], Any]) -> str:
    try:
        return "works" if call() is not False else "fails"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def refused(folder: Path, name: str) -> str:
    trainer = made(PipelineTrainer, folder, WORDS, REFUSED[name][0])
    found = error_of(trainer.train)
    trainer.end()
    return found


@pytest.mark.parametrize("name", [name for name in REFUSED if name not in ENDING])
def test_a_subclass_that_cannot_work(name: str, ran: dict[int, Any]) -> None:
    for rank in (0, 1):
        assert re.search(REFUSED[name][1], ran[rank]["refused"][name])


class Loss:
    """The arguments of `compute_loss` on the last stage, without a pipeline."""

    def __init__(self) -> None:
        self.stage = lm()
        self.inputs = {"input_ids": torch.ones(2, 3, dtype=torch.int64), "labels": torch.ones(2, 3, dtype=torch.int64)}
        self.stage.config.architectures = [type(self.stage).__name__]
        loss = StepLoss(self.stage.config)
        self.model = LastStageModel(self.stage, loss, torch.zeros(2, 3, 97), self.inputs)


@pytest.mark.parametrize("name", ENDING)
def test_a_loss_that_needs_more_than_the_pipeline_has_computed(name: str) -> None:
    mixin, words = REFUSED[name]
    given = Loss()
    with pytest.raises(PipecompError, match=words):
        mixin().compute_loss(given.model, given.inputs)


# -- whole programs


def loop(folder: Path) -> dict[str, Any]:
    """Trainings one after the other: new trainers of one model, and one trainer with model_init."""
    model, found, ends = lm(), [], []
    for rate in (1e-3, 2e-3):
        args = work.arguments(str(folder), max_steps=1, learning_rate=rate, neftune_noise_alpha=5.0)
        args.torch_compile, args.torch_compile_backend = True, "eager"
        trainer = PipelineTrainer(model, args, work.padded, work.unequal())
        trainer.train()
        found.append(changes(model))
        trainer.end()
        found.append(changes(model))
    args = work.arguments(str(folder), max_steps=2)
    trainer = PipelineTrainer(args=args, model_init=lm, data_collator=work.padded, train_dataset=work.unequal())
    for rate in (1e-3, 3e-3, 1e-3):
        args.learning_rate = rate
        ends.append(trainer.train().training_loss)
    trainer.end()
    return {"changes": found, "ends": ends}


def changes(model: Any) -> tuple[bool, int]:
    """Hooks on the embedding, and the number of compiled blocks."""
    blocks = model.transformer.h
    return bool(model.transformer.wte._forward_hooks), sum(b._compiled_call_impl is not None for b in blocks)


def test_a_loop_over_settings_leaves_no_hooks_or_compiled_code(ran: dict[int, Any]) -> None:
    for rank in (0, 1):
        assert ran[rank]["loop"]["changes"] == [(rank == 0, 1), (False, 0)] * 2
        ends = ran[rank]["loop"]["ends"]
        assert ends[0] == ends[2] != ends[1]


def noise(folder: Path) -> list[float]:
    """First losses and evaluations without noise, with little and with much."""
    out: list[float] = []
    for alpha in (None, 1e-4, 30.0):
        trainer = made(PipelineTrainer, folder, WORDS, neftune_noise_alpha=alpha, max_steps=1, learning_rate=0.0)
        trainer.train()
        out += [work.losses(trainer)[0], trainer.evaluate(work.unequal(3))["eval_loss"]]
        trainer.end()
    return out


def test_noise_on_embeddings(ran: dict[int, Any]) -> None:
    """Its size follows alpha, only in training."""
    first = ran[1]["noise"]
    assert first[2] == pytest.approx(first[0], rel=1e-3)
    assert abs(first[4] - first[0]) > 1e-2
    assert first[1] == first[3] == first[5]


class Hub:
    """In place of huggingface_hub's API."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails, self.calls = fails, list[tuple[str, Any]]()

    def create_repo(self, name: str, **options: Any) -> Any:
        self.calls.append(("create", name))
        if self.fails:
            raise ConnectionError("no hub\nat all")
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(self, **options: Any) -> Any:
        self.calls.append((options["commit_message"], sorted(p.name for p in Path(options["folder_path"]).iterdir())))
        return options["repo_id"]


def pushed(folder: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        api, said = Hub(), list[str]()
        patch.setattr(hub, "HfApi", lambda: api)
        patch.setattr(hub, "say_here", said.append)
        trainer = made(PipelineTrainer, folder / "hub", WORDS, push_to_hub=True, hub_model_id="mine", max_steps=1)
        trainer.train()
        out["again"] = trainer.push_to_hub(commit_message="again", blocking=False)
        trainer.save_model()
        trainer.end()
        out["calls"], out["id"] = list(api.calls), trainer.hub_model_id
        api.fails = True
        trainer = made(PipelineTrainer, folder / "fails", WORDS, push_to_hub=True, max_steps=1)
        out["steps"] = trainer.train().global_step
        trainer.end()
        out["said"] = said
    return out


def test_the_model_is_pushed_at_the_end_by_rank_0(ran: dict[int, Any]) -> None:
    found = ran[0]["pushed"]
    assert [name for name, _ in found["calls"]] == ["create", "End of training", "again", "Model save"]
    assert {"config.json", "README.md", "training_args.bin"} <= set(found["calls"][1][1])
    assert found["again"] == found["id"] == "me/mine"
    assert ran[1]["pushed"]["calls"] == []


def test_a_hub_that_fails_does_not_end_the_run(ran: dict[int, Any]) -> None:
    assert [ran[rank]["pushed"]["steps"] for rank in (0, 1)] == [1, 1]
    assert ran[1]["pushed"]["said"] == []
    said = ran[0]["pushed"]["said"]
    assert len(said) == 2  # at the start, and at the end, when the model is not there
    assert all("ConnectionError: no hub)" in line for line in said)


class Weighted:
    def _get_train_sampler(self: Any, train_dataset: Any = None) -> Any:
        return WeightedRandomSampler([1.0 + i for i in range(len(self.train_dataset))], len(self.train_dataset))


def drawn(folder: Path) -> list[list[float]]:
    """Losses with a sampler that draws, twice and after a resume."""
    found = []
    for resume in (None, None, "checkpoint-2"):
        trainer = made(PipelineTrainer, folder, WORDS, Weighted, max_steps=4, save_strategy="steps", save_steps=2)
        trainer.train(resume_from_checkpoint=resume and str(Path(trainer.args.output_dir) / resume))
        found.append(work.losses(trainer))
        trainer.end()
    return found


def test_a_sampler_that_draws_gives_the_same_in_every_run(ran: dict[int, Any]) -> None:
    for rank in (0, 1):
        assert ran[rank]["drawn"][0] == ran[rank]["drawn"][1] == ran[rank]["drawn"][2]


def classified(folder: Path) -> dict[str, Any]:
    trainer = made(
        PipelineTrainer,
        folder / "classified",
        CLASSES,
        max_steps=-1,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        given={
            "eval_dataset": work.sentences(6, seed=3),
            "compute_metrics": work.accuracy,
            "callbacks": [EarlyStoppingCallback(1)],
        },
    )
    trainer.train()
    out = {"best": trainer.state.best_model_checkpoint, **trainer.evaluate()}
    trainer.end()
    return out


def test_a_classifier_with_metrics_early_stopping_and_the_best_model(ran: dict[int, Any]) -> None:
    assert all(ran[rank]["classified"]["best"] and "eval_accuracy" in ran[rank]["classified"] for rank in (0, 1))


def test_a_folders_model_has_its_configuration_before_it_is_loaded(ran: dict[int, Any]) -> None:
    for rank in (0, 1):
        layers, error = ran[rank]["unloaded"]
        assert layers == 2
        assert "trainer.engine" in error


# -- on two ranks


def everything(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    path = Path(folder)
    out: dict[str, Any] = {"trained": {n: losses_of(made(PipelineTrainer, path, **of())) for n, of in TRAINED.items()}}
    out |= {"loop": loop(path), "noise": noise(path), "pushed": pushed(path), "drawn": drawn(path)}
    out |= {"classified": classified(path), "refused": {n: refused(path, n) for n in REFUSED if n not in ENDING}}
    trainer = made(PipelineTrainer, path, WORDS, given={"eval_dataset": work.unequal(4)})
    trainer.train()
    out["read"] = {name: error_of(partial(read, trainer)) for name, read in READ.items()}
    out["set"] = {name: error_of(partial(setattr, trainer, name, value)) for name, (value, _) in SET.items()}
    out["called"] = {name: error_of(partial(call, trainer)) for name, (call, _) in CALLED.items()}
    out["generated"] = generated(trainer, path)
    trainer.end()
    of_folder = PipelineTrainer(str(path / "saved"), work.arguments(str(path / "again")), work.padded, work.unequal(3))
    out["unloaded"] = (of_folder.model.config.n_layer, error_of(lambda: of_folder.model.device))
    dist.barrier()  # rank 0 serves the store
    return out


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    return run_ranks(2, everything, str(tmp_path_factory.mktemp("habits")), timeout_s=HANG_S)
