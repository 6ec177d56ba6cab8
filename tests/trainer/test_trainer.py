"""The parts of PipelineTrainer that one process can test: arguments, data, losses, checkpoints, logs."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset
from transformers import (
    EarlyStoppingCallback,
    GPT2LMHeadModel,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback
from transformers.trainer_pt_utils import nested_concat, nested_numpify
from transformers.training_args import OptimizerNames

import pipecomp
from pipecomp.checkpoint import manifest
from pipecomp.checkpoint.run_id import model_digest
from pipecomp.checkpoint.writing import random_state, set_random_state
from pipecomp.data import ShardedSampler, dataset_facts
from pipecomp.distributed import heartbeat
from pipecomp.errors import ConfigError, DataError, WireError
from pipecomp.stages import split
from pipecomp.trainer import PipelineTrainer, arguments, callbacks, checkpoints, model_io
from pipecomp.trainer.data_loading import (
    EvalLoader,
    LengthSampler,
    SampleSource,
    StepLoader,
    check_seeded_collator,
    loader_options,
    sample_lengths,
)
from pipecomp.trainer.deepspeed_config import engine_config
from pipecomp.trainer.evaluation import _concatenate, pack, unpack
from pipecomp.trainer.losses import StepLoss, count_labels
from pipecomp.trainer.meters import TrafficMeter
from pipecomp.trainer.optimizers import OptimizerFactories, parameter_groups
from tests.limits import HANG_S
from tests.models import gpt2

NO_WORKERS: dict[str, Any] = {"num_workers": 0}


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path_factory.mktemp("out")), use_cpu=True, report_to="none")


def changed(args: TrainingArguments, **values: Any) -> Any:
    other = copy.copy(args)
    for name, value in values.items():
        setattr(other, name, value)
    return other


def test_exported_lazily() -> None:
    assert pipecomp.PipelineTrainer is PipelineTrainer
    assert "PipelineTrainer" in pipecomp.__all__


# -- arguments


def test_every_field_of_trainings_arguments_is_known() -> None:
    """A new version of transformers must not add one that has no effect."""
    known = [arguments.SUPPORTED, arguments.IGNORED, arguments.FOR_SCRIPTS, arguments._UNSUPPORTED]
    found = Counter(name for names in known for name in names)
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert {name: found[name] for name in fields} == dict.fromkeys(fields, 1)
    more = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)} - fields
    assert more == set(arguments._UNSUPPORTED_SEQ2SEQ)


def test_a_field_of_a_newer_transformers_is_refused_by_name(usual: TrainingArguments) -> None:
    @dataclasses.dataclass
    class Newer(TrainingArguments):
        shiny: bool = False

    arguments.check(changed(usual, shiny=True))  # a field of the script's own class
    made = Newer(output_dir=usual.output_dir, use_cpu=True, report_to="none", shiny=True)
    arguments.check(made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "TrainingArguments", Newer)
        with pytest.raises(ConfigError, match="shiny: got True, allowed: False: this version"):
            arguments.check(made)


@pytest.mark.parametrize(("name", "value"), [("predict_with_generate", True), ("generation_max_length", 5)])
def test_arguments_of_seq2seq_are_refused_by_name(usual: TrainingArguments, name: str, value: Any) -> None:
    made = Seq2SeqTrainingArguments(output_dir=usual.output_dir, use_cpu=True, report_to="none")
    arguments.check(made)
    with pytest.raises(ConfigError, match=rf"{name}: .*trainer\.generate"):
        arguments.check(changed(made, **{name: value}))


def test_what_is_ignored_is_logged(usual: TrainingArguments, caplog: pytest.LogCaptureFixture) -> None:
    arguments.report_ignored(usual)
    assert not caplog.records
    arguments.report_ignored(changed(usual, ddp_find_unused_parameters=False, hub_always_push=True))
    assert [record.args[0] for record in caplog.records if record.args] == ["hub_always_push"]
    caplog.clear()
    arguments.report_ignored(changed(usual, ddp_find_unused_parameters=True, ddp_bucket_cap_mb=25))
    assert {record.args[0] for record in caplog.records} == {"ddp_find_unused_parameters", "ddp_bucket_cap_mb"}  # type: ignore[index]


@pytest.mark.parametrize("name", [name.value for name in OptimizerNames])
def test_every_optimizer_is_made_or_refused_by_name(usual: TrainingArguments, name: str) -> None:
    targets = "all-linear" if name.startswith(("galore", "apollo")) else None
    args = changed(usual, optim=OptimizerNames(name), optim_target_modules=targets, weight_decay=0.1)
    stage = split(gpt2(2, 16), num_stages=2)[1]
    refused: list[ConfigError] = []
    try:
        arguments.check(args)
    except ConfigError as error:
        refused.append(error)
    if refused:
        assert (refused[0].key, refused[0].got) == ("optim", name)
        assert refused[0].hint
        return
    made, again = OptimizerFactories().make_optimizer(args, stage, None, Trainer.get_optimizer_cls_and_kwargs)
    own = [p for group in made.param_groups for p in group["params"]]
    assert {id(p) for p in own} == {id(p) for p in stage.parameters()}
    assert {group["weight_decay"] for group in made.param_groups} == {0.1, 0.0}
    for p in own:
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in own]
    made.step()
    assert all((p != b).any() for p, b in zip(own, before, strict=True))
    assert type(again([torch.nn.Parameter(torch.ones(3))])) is type(made)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"optim_args": "momentum"}, "optim"),
        ({"optim_target_modules": "all-linear"}, "optim_target_modules"),
        ({"optim": "galore_adamw"}, "optim_target_modules"),
        ({"push_to_hub": True, "hub_strategy": "checkpoint"}, "hub_strategy"),
        ({"liger_kernel_config": {"rope": True}}, "liger_kernel_config"),
        (
            {"use_liger_kernel": True, "liger_kernel_config": {"cross_entropy": True}},
            "liger_kernel_config.cross_entropy",
        ),
    ],
)
def test_arguments_that_cannot_go_together(usual: TrainingArguments, values: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        arguments.check(changed(usual, **values))
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("auto_find_batch_size", True),
        ("batch_eval_metrics", True),
        ("bf16_full_eval", True),
        ("debug", ["tpu"]),
        ("enable_jit_checkpoint", True),
        ("fsdp", "full_shard"),
        ("parallelism_config", object()),
        ("save_on_each_node", True),
        ("use_cache", True),
        ("train_sampling_strategy", "batch_rebalance"),
        ("label_names", ["start_positions"]),
        ("skip_memory_metrics", False),
        ("dataloader_in_order", False),
        ("deepspeed_plugin", object()),
        ("gradient_checkpointing_kwargs", {"every_n_layers": 2}),
        ("fp16", True),
        ("activation_checkpointing_kwargs", {"offload": True}),
    ],
)
def test_what_a_pipeline_cannot_do_is_named(usual: TrainingArguments, name: str, value: Any) -> None:
    arguments.check(usual)
    with pytest.raises(ConfigError) as caught:
        arguments.check(changed(usual, **{name: value}))
    assert caught.value.key == {"deepspeed_plugin": "ACCELERATE_USE_DEEPSPEED"}.get(name, name)


@pytest.mark.parametrize(("end", "value"), [("", True), ("_kwargs", {"use_reentrant": True})])
def test_the_old_name_of_activation_checkpointing_does_not_part_from_the_new_one(
    usual: TrainingArguments, end: str, value: Any
) -> None:
    old, new = f"gradient_checkpointing{end}", f"activation_checkpointing{end}"
    with pytest.raises(ConfigError, match=f"^{old}: .*{new}"):
        arguments.check(changed(usual, **{old: value}))
    arguments.check(changed(usual, **{old: value, new: value}))
    arguments.check(changed(usual, **{new: value}))
    assert arguments.checkpointing(changed(usual, **{new: value}), end) == value


def test_accelerators_settings_are_refused(usual: TrainingArguments) -> None:
    other = copy.deepcopy(usual.accelerator_config)
    other.split_batches = True  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"accelerator_config\.split_batches"):
        arguments.check(changed(usual, accelerator_config=other))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ACCELERATE_USE_FSDP", "true"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true"),
    ],
)
def test_what_accelerate_launch_says_is_refused(
    usual: TrainingArguments, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    for nothing in ("no", "false", ""):
        monkeypatch.setenv(name, nothing)
        arguments.check(usual)
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        arguments.check(usual)


def test_the_precision_of_accelerate_launch_is_that_of_the_arguments(usual: TrainingArguments) -> None:
    with pytest.raises(ConfigError, match="ACCELERATE_MIXED_PRECISION: got 'bf16'"):
        arguments.check(changed(usual, mixed_precision="bf16"))
    arguments.check(changed(usual, mixed_precision="bf16", bf16=True))


def test_combinations_that_cannot_work(usual: TrainingArguments) -> None:
    with pytest.raises(ConfigError, match="save_only_model"):
        arguments.check(changed(usual, save_only_model=True, load_best_model_at_end=True, metric_for_best_model="loss"))
    with pytest.raises(ConfigError, match="metric_for_best_model"):
        arguments.check(changed(usual, load_best_model_at_end=True))


def test_no_clipping(usual: TrainingArguments) -> None:
    for value in (None, 0.0, -1.0):
        for section in ({}, {"pipecomp": {}, "gradient_clipping": value or 0}):
            config = engine_config(changed(usual, max_grad_norm=value), section)
            assert config["gradient_clipping"] == float("inf")


def test_configuration_from_arguments(usual: TrainingArguments) -> None:
    args = changed(usual, per_device_train_batch_size=3, gradient_accumulation_steps=5, max_grad_norm=0.7, seed=11)
    config = engine_config(args, {"activations": {"method": "aqsgd"}})
    assert config["train_micro_batch_size_per_gpu"] == 3
    assert config["gradient_accumulation_steps"] == 5
    assert config["gradient_clipping"] == 0.7
    assert "optimizer" not in config
    assert config["pipecomp"] == {
        "activations": {"method": "aqsgd", "scale": "auto"},
        "seed": 11,
        "store": {"path": f"{args.output_dir}/messages", "in_checkpoints": True},
    }
    for section in ({"method": "direct", "scale": "rms"}, {"method": "bf16"}):
        assert engine_config(args, {"activations": section})["pipecomp"]["activations"] == section
    assert engine_config(changed(args, max_grad_norm=0.0), None)["gradient_clipping"] == float("inf")
    half = engine_config(changed(args, bf16=True), None)
    assert half["bf16"] == {"enabled": True}
    assert half["zero_optimization"]["stage"] == 1
    assert half["data_types"] == {"grad_accum_dtype": "fp32"}


def test_a_whole_configuration_from_dict_file_and_argument(usual: TrainingArguments, tmp_path: Path) -> None:
    whole = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": 1.0,
        "steps_per_print": 7,
        "zero_optimization": {"stage": 1},
        "pipecomp": {"activations": {"method": "fp16"}, "seed": 5},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.999], "weight_decay": 0.0}},
    }
    before = copy.deepcopy(whole)
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(whole))
    expected = engine_config(usual, whole)
    assert whole == before
    assert expected["steps_per_print"] == 7
    assert expected["train_micro_batch_size_per_gpu"] == usual.per_device_train_batch_size
    assert expected["pipecomp"] == whole["pipecomp"]
    assert engine_config(usual, str(file)) == expected
    assert engine_config(changed(usual, deepspeed=whole), None) == expected
    assert engine_config(changed(usual, deepspeed=str(file)), None) == expected
    rest = {key: value for key, value in whole.items() if key != "pipecomp"}
    assert engine_config(changed(usual, deepspeed=rest), whole["pipecomp"]) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "given", "key"),
    [
        ({}, {"pipecomp": {}, "train_micro_batch_size_per_gpu": 3}, "train_micro_batch_size_per_gpu"),
        ({}, {"pipecomp": {}, "gradient_clipping": 0.5}, "gradient_clipping"),
        ({}, {"pipecomp": {}, "train_batch_size": 64}, "train_batch_size"),
        ({}, {"pipecomp": {}, "bf16": {"enabled": True}}, "bf16.enabled"),
        ({"bf16": True}, {"pipecomp": {}, "bf16": {"enabled": False}}, "bf16.enabled"),
        ({"bf16": True}, {"pipecomp": {}, "zero_optimization": {"stage": 0}}, "zero_optimization.stage"),
        ({}, {"pipecomp": {}, "zero_optimization": {"stage": 2}}, "zero_optimization.stage"),
        ({}, {"pipecomp": {}, "optimizer": {"type": "SGD"}}, "optimizer.type"),
        ({}, {"pipecomp": {}, "optimizer": {"params": {"lr": 1.0}}}, "optimizer.params.lr"),
        ({}, {"pipecomp": {}, "optimizer": {"params": {"amsgrad": True}}}, "optimizer.params.amsgrad"),
        ({}, {"pipecomp": {}, "scheduler": {"type": "WarmupLR"}}, "scheduler"),
        ({}, {"pipecomp": {}, "fp16": None}, "fp16"),
        ({}, {"pipecomp": 3}, "pipecomp"),
        ({}, 3, "pipecomp"),
        ({}, "no/such/file.json", "pipecomp"),
        ({}, {"activations": {"methd": 1}}, "activations.methd"),
        ({"deepspeed": {"pipecomp": {}}}, {"pipecomp": {}}, "deepspeed"),
        ({"deepspeed": {"pipecomp": {"seed": 1}}}, {"seed": 2}, "pipecomp"),
        (
            {"weight_decay": 0.1},
            {"gradients": {"method": "quantized_adam", "freeze_step": 2}},
            "weight_decay",
        ),
    ],
)
def test_a_configuration_that_contradicts(usual: TrainingArguments, values: dict, given: Any, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        engine_config(changed(usual, **values), given)
    assert caught.value.key == key


def test_groups_of_all_stages_are_trainers(usual: TrainingArguments) -> None:
    args = changed(usual, weight_decay=0.3)
    model = gpt2(3, 16, tied=False)
    decaying = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    expected = {name: 0.3 if name in decaying else 0.0 for name, _ in model.named_parameters()}
    found = {}
    for stage in split(model, num_stages=3):
        names = {id(p): name for name, p in stage.named_parameters()}
        for group in parameter_groups(args, stage):
            found |= {names[id(p)]: group["weight_decay"] for p in group["params"]}
    assert found == expected
    assert set(found.values()) == {0.0, 0.3}


def test_callbacks_take_up_what_the_checkpoint_has_of_them() -> None:
    trainer, patient = object.__new__(PipelineTrainer), EarlyStoppingCallback(1)
    handler = CallbackHandler([DefaultFlowCallback, patient], None, None, None, None)
    trainer.callback_handler, trainer.control = handler, TrainerControl()
    saved = EarlyStoppingCallback(4)
    saved.early_stopping_patience_counter = 3
    states = {"EarlyStoppingCallback": saved.state(), "TrainerControl": TrainerControl(should_save=True).state()}
    trainer.state = TrainerState(stateful_callbacks=states | {"Other": {}})  # type: ignore[arg-type]
    callbacks.restore(trainer)
    found = handler.callbacks[1]
    assert isinstance(handler.callbacks[0], DefaultFlowCallback)
    assert (found.early_stopping_patience, found.early_stopping_patience_counter) == (4, 3)
    assert trainer.control.should_save


@pytest.mark.parametrize(("given", "told"), [(lambda: 5, ()), (lambda trial: (5, trial), (5, None))])
def test_a_models_maker_may_take_a_trial(given: Any, told: Any) -> None:
    assert model_io.make_model(given) == (told or 5)
    with pytest.raises(ConfigError, match="model_init"):
        model_io.make_model(lambda one, two: 5)
    with pytest.raises(ConfigError, match="model_init"):
        model_io.make_model(lambda: None)


# -- data


@settings(deadline=None, max_examples=60)
@given(samples=st.integers(1, 40), replicas=st.integers(1, 4), micro=st.integers(1, 5), shuffle=st.booleans())
def test_short_last_micro_batches_leave_no_sample_out(samples: int, replicas: int, micro: int, shuffle: bool) -> None:
    if samples < replicas:
        with pytest.raises(DataError):
            ShardedSampler(samples, micro, replicas=replicas, replica=replicas - 1, drop_last=False)
        return
    made = [
        ShardedSampler(samples, micro, replicas=replicas, replica=r, seed=2, shuffle=shuffle, drop_last=False)
        for r in range(replicas)
    ]
    assert len({sampler.per_epoch for sampler in made}) == 1
    for epoch in (0, 1):
        seen: list[int] = []
        lengths = set()
        for r, sampler in enumerate(made):
            batches = [sampler.batch(epoch * sampler.per_epoch + n) for n in range(sampler.per_epoch)]
            own = [i for batch in batches for i in batch]
            assert all(len(batch) == micro for batch in batches[:-1])
            assert 1 <= len(batches[-1]) <= micro
            assert {i % replicas for i in own} == {r}
            assert len(own) - len(set(own)) <= 1
            lengths.add(len(own))
            seen += own
        assert set(seen) == set(range(samples))
        assert len(lengths) == 1


def test_lengths_are_grouped_and_no_sample_is_lost() -> None:
    lengths = torch.randperm(64, generator=torch.Generator().manual_seed(0)).tolist()
    sampler, plain = (LengthSampler(lengths, 4, 2, seed=1, drop_last=False), ShardedSampler(64, 2, seed=1))
    epochs = [[sampler.batch(e * sampler.per_epoch + n) for n in range(sampler.per_epoch)] for e in (0, 1)]
    for batches in epochs:
        assert sorted(i for batch in batches for i in batch) == list(range(64))
    assert epochs[0] != epochs[1]

    def spread(batches: list[list[int]]) -> int:
        return sum(max(lengths[i] for i in ids) - min(lengths[i] for i in ids) for ids in batches)

    assert spread(epochs[0]) < spread([plain.batch(n) for n in range(32)]) / 3


def test_lengths_from_a_column_or_counted() -> None:
    rows = [{"input_ids": [1] * n} for n in (2, 5)]
    assert sample_lengths(rows, "length", "input_ids") == [2, 5]

    class Again:  # a dataset that begins anew where others raise IndexError
        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: int) -> dict[str, list[int]]:
            assert i < 100, "it is read without end"
            return rows[i % 2]

    assert sample_lengths(Again(), "length", "input_ids") == [2, 5, 2]
    table = Dataset.from_dict({"input_ids": [[1, 2], [], [3] * 1001], "text": ["a", "b", "c"]})
    assert sample_lengths(table, "length", "input_ids") == [2, 0, 1001]
    assert sample_lengths(SimpleNamespace(lengths=np.array([4, 6])), "length", "input_ids") == [4, 6]
    table = SimpleNamespace(column_names=["length"])
    with pytest.raises(DataError, match="group_by_length"):
        sample_lengths([{"words": 3}], "length", "input_ids")
    with pytest.raises(TypeError):
        sample_lengths(table, "length", "input_ids")  # a column is read from the table itself
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"input_ids": [[1], [1, 2]], "length": [7, 8]})
    assert sample_lengths(made, "length", "input_ids") == [7, 8]
    kept = SampleSource.of(made, list, ["input_ids", "labels"], "train_dataset")
    assert kept.data.column_names == ["input_ids"]
    with pytest.raises(DataError, match="has the columns"):
        SampleSource.of(made, list, ["pixels"], "train_dataset")


class Counted(IterableDataset):
    """It says how many samples it has, and has no numbers for them."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[dict]:
        return iter([{"input_ids": [1]}] * 3)


@pytest.mark.parametrize("data", [None, [], (x for x in "ab"), Counted()])
def test_what_is_not_a_dataset(data: Any) -> None:
    with pytest.raises(DataError, match="train_dataset"):
        SampleSource.of(data, list, None, "train_dataset")


class Noise:
    """Draws from every generator that a collator might use."""

    def __call__(self, chosen: list[int]) -> dict[str, torch.Tensor]:
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        ids = torch.tensor([[i, *(int(x * 1e6) for x in drawn)] for i in chosen])
        return {"input_ids": ids, "attention_mask": (ids % 3 > 0).long(), "labels": ids}


def noisy(start: int = 0, *, seed: int = 4, options: dict[str, Any] = NO_WORKERS) -> StepLoader:
    loader = StepLoader(
        SampleSource(list(range(7)), Noise()), ShardedSampler(7, 2, seed=seed, drop_last=False), seed, options
    )
    loader.begin_epoch(0, start)
    return loader


def content(batches: list) -> list:
    return [(batch.ids, batch.inputs["input_ids"].tolist()) for batch in batches]


def test_every_stage_makes_the_same_micro_batches_from_any_start() -> None:
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[union-attr]
    loader = noisy()
    expected = content(list(islice(loader, 11)))
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]  # type: ignore[union-attr]
    assert torch.equal(torch.get_rng_state(), states[2])
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    assert content(list(islice(noisy(), 11))) == expected
    assert content(list(islice(noisy(5), 6))) == expected[5:]
    assert content(list(islice(noisy(seed=5), 11))) != expected
    assert [ids for ids, _ in expected[:4]] != [ids for ids, _ in expected[4:8]], "a new order every epoch"
    assert len(expected[3][0]) == 1, "seven samples: three pairs and one"


def test_worker_processes_make_the_same_micro_batches() -> None:
    options = {"num_workers": 1, "multiprocessing_context": "fork", "prefetch_factor": 2}
    assert content(list(islice(noisy(options=options), 5))) == content(list(islice(noisy(), 5)))


class ByEpoch:
    """Samples that are others in every epoch, as of a dataset that draws anew when it is told the epoch."""

    epoch = -1

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": torch.tensor([self.epoch, i])}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def stack_ids(chosen: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.stack([sample["input_ids"] for sample in chosen])}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_is_told_the_epoch_also_in_worker_processes(workers: int) -> None:
    # A fork of this process, which has other tests' threads, may die of a lock that one of them holds.
    options = {"num_workers": workers, "multiprocessing_context": "forkserver" if workers else None}
    samples = SampleSource.of(ByEpoch(), stack_ids, None, "")
    loader = StepLoader(samples, ShardedSampler(4, 2), 0, options)
    handed = iter(loader)
    for epoch in range(3):
        loader.begin_epoch(epoch, epoch * len(loader))
        batches = list(islice(handed, len(loader)))
        assert {int(epoch) for batch in batches for epoch in batch.inputs["input_ids"][:, 0]} == {epoch}
    assert loader.taken == 6


class OwnMasks:
    """A collator with a generator of its own: two stages that use it would mask differently."""

    def __init__(self) -> None:
        self._draw = torch.Generator().manual_seed(1)

    def __call__(self, chosen: list[int]) -> dict[str, torch.Tensor]:
        ids = torch.randint(9, (len(chosen), 20), generator=self._draw)
        return {"input_ids": ids, "labels": ids}


def test_labels_that_follow_from_draws_of_an_own_generator_are_refused() -> None:
    check_seeded_collator(SampleSource(list(range(7)), Noise()), 2, 0, "train_dataset")
    with pytest.raises(DataError, match="train_dataset: the same samples get other labels"):
        check_seeded_collator(SampleSource(list(range(7)), OwnMasks()), 2, 0, "train_dataset")


def test_micro_batches_are_pinned_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data._utils.pin_memory import pin_memory

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x, *_: x + 1000)  # a CPU pins nothing
    (batch,) = noisy().begin_step(1)
    pinned = pin_memory(batch)
    assert pinned.ids == batch.ids
    assert torch.equal(pinned.inputs["input_ids"], batch.inputs["input_ids"] + 1000)
    assert torch.equal(pinned.labels, batch.labels + 1000)


def test_a_steps_micro_batches_are_made_ahead_and_handed_out_once() -> None:
    loader = noisy()
    ahead = loader.begin_step(3)
    assert loader.taken == 0
    assert [loader.upcoming(n) for n in range(3)] == [list(batch.ids) for batch in ahead]
    handed = iter(loader)
    assert content([next(handed), next(handed)]) == content(ahead[:2])
    assert loader.taken == 2
    assert list(next(handed).ids) == list(ahead[2].ids)
    shapes = [batch.inputs["input_ids"].numel() for batch in ahead]
    assert loader.tokens == sum(shapes)
    assert loader.real_tokens == sum(int(batch.inputs["attention_mask"].sum()) for batch in ahead) < loader.tokens
    assert len(loader.dataset) == 7
    loader.begin_step(2)
    loader.begin_epoch(2, 8)
    assert content([next(handed)]) == content(list(islice(noisy(8), 1)))


@pytest.mark.parametrize(("pad", "real"), [(None, 21), (1, 14)])
def test_tokens_without_a_mask_are_known_by_the_id_of_padding(pad: int | None, real: int) -> None:
    def collate(chosen: list[int]) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[5, 6, 1]] * len(chosen))}

    sampler = ShardedSampler(7, 2, drop_last=False)
    loader = StepLoader(SampleSource(list(range(7)), collate), sampler, 0, NO_WORKERS, pad)
    list(islice(loader, 4))
    assert (loader.tokens, loader.real_tokens) == (21, real)


@given(samples=st.integers(1, 30), size=st.integers(1, 6), replicas=st.integers(1, 4), drop=st.booleans())
@settings(deadline=None, max_examples=20)
def test_replicas_share_out_an_evaluation(samples: int, size: int, replicas: int, drop: bool) -> None:
    def loader(replica: int) -> EvalLoader:
        made = SampleSource(list(range(samples)), Noise())
        return EvalLoader(made, size, 0, NO_WORKERS, drop_last=drop, replicas=replicas, replica=replica)

    if drop and samples < size:
        with pytest.raises(DataError):
            loader(0)
        return
    parts = [loader(r) for r in range(replicas)]
    found = sorted((n, batch.ids) for part in parts for n, batch in zip(part.own, part, strict=True))
    seen = [i for _, ids in found for i in ids]
    assert seen == list(range(len(seen)))
    assert len(seen) == (samples // size * size if drop else samples)
    assert [n for n, _ in found] == list(range(len(found)))
    assert {len(part) for part in parts} == {max(len(part.own) for part in parts)}, "steps of each one's progress"


class Pids:
    """Collates to the process that does it."""

    def __call__(self, chosen: list[int]) -> dict[str, torch.Tensor]:
        ids = torch.tensor(chosen)[:, None]
        return {"input_ids": ids, "labels": ids * 0 + os.getpid()}


@pytest.mark.parametrize("stay", [True, False])
def test_workers_of_an_evaluation_stay_if_they_shall(usual: TrainingArguments, stay: bool) -> None:
    args = changed(
        usual, dataloader_persistent_workers=stay, dataloader_num_workers=1, dataloader_multiprocessing_context="fork"
    )
    loader = EvalLoader(SampleSource(list(range(5)), Pids()), 2, 0, loader_options(args))
    workers = [{int(x) for batch in loader for x in batch.labels.flatten()} for _ in range(2)]
    assert (workers[0] == workers[1]) is stay
    assert os.getpid() not in workers[0]


# -- losses


@settings(deadline=None, max_examples=30)
@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=5), causal=st.booleans())
def test_every_label_of_a_step_counts_alike(counts: list[int], causal: bool) -> None:
    """Weighed micro-batch means add up to the mean over all labels."""
    torch.manual_seed(0)
    config = gpt2(1, 16).config if causal else None
    if config is None:
        from transformers import BertConfig

        config = BertConfig(vocab_size=97, num_labels=97, architectures=["BertForMaskedLM"])
    else:
        config.architectures = ["GPT2LMHeadModel"]
    loss = StepLoss(config)
    assert loss.causal is causal
    logits = [torch.randn(2, 6, 97) for _ in counts]
    labels = []
    for count in counts:
        row = torch.full((12,), -100)
        places = torch.tensor([i for i in range(12) if i % 6 or not causal])
        row[places[torch.randperm(len(places))[:count]]] = torch.randint(0, 97, (count,))
        if causal:
            row[0] = 5  # nothing predicts a first token
        labels.append(row.view(2, 6))
        assert count_labels(labels[-1], causal=causal) == count
    loss.set_share(labels, 1, None, torch.device("cpu"))
    mean = torch.stack([loss(x, y) for x, y in zip(logits, labels, strict=True)]).mean()
    everything, wanted = torch.cat(logits), torch.cat(labels)
    if sum(counts) == 0:
        assert float(mean) == 0
        return
    if causal:
        everything, wanted = everything[:, :-1], wanted[:, 1:]
    expected = torch.nn.functional.cross_entropy(everything.reshape(-1, 97), wanted.reshape(-1))
    assert float(mean) == pytest.approx(float(expected), rel=1e-5)


def test_equal_micro_batches_are_not_touched() -> None:
    config = gpt2(1, 16).config
    config.architectures = ["GPT2LMHeadModel"]
    loss, logits, labels = StepLoss(config), torch.randn(2, 24, 97), torch.randint(0, 97, (2, 24))
    for micro_batches in range(1, 8):
        loss.set_share([labels] * micro_batches, 1, None, torch.device("cpu"))
        assert torch.equal(loss(logits, labels), loss.plain(logits, labels))


def test_a_loss_of_the_users_own_may_have_labels_below_0() -> None:
    """A hinge loss has classes -1 and 1; all but -100 count, as Trainer counts them."""

    def hinge(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
        return (1 - outputs.logits[:, 0] * labels).clamp(min=0).sum() / num_items_in_batch

    from transformers import BertConfig

    loss = StepLoss(BertConfig(num_labels=1, architectures=["BertForSequenceClassification"]), own=hinge)
    logits, labels = torch.tensor([[0.5], [0.2]]), [torch.tensor([-1, -1]), torch.tensor([1, -1])]
    loss.set_share(labels, 1, None, torch.device("cpu"))
    found = [loss(logits, given) for given in labels]
    assert torch.stack(found).mean() == pytest.approx((1.5 + 1.2 + 0.5 + 1.2) / 4)


def test_a_micro_batch_without_labels_reaches_the_other_stages() -> None:
    config = gpt2(1, 16).config
    config.architectures = ["GPT2LMHeadModel"]
    logits = torch.randn(1, 4, 97, requires_grad=True)
    loss = StepLoss(config)(logits, torch.full((1, 4), -100))
    assert float(loss.detach()) == 0
    loss.backward()
    assert logits.grad is not None
    assert not logits.grad.any()


def test_label_smoothing_of_classes_that_exclude_none() -> None:
    from transformers import BertConfig

    config = BertConfig(num_labels=4, architectures=["BertForSequenceClassification"])
    config.problem_type = "multi_label_classification"
    with pytest.raises(ConfigError, match="label_smoothing_factor"):
        StepLoss(config, 0.1)
    config.problem_type = None  # labels tell then
    with pytest.raises(ConfigError, match=r"label_smoothing_factor: got 0\.1, allowed: 0 with floating-point labels"):
        StepLoss(config, 0.1)(torch.zeros(2, 4), torch.ones(2, 4))


@pytest.mark.parametrize(
    ("classes", "labels", "problem"),
    [
        (1, torch.ones(2), "regression"),
        (3, torch.ones(2, dtype=torch.int64), "single_label_classification"),
        (3, torch.ones(2, 3), "multi_label_classification"),
    ],
)
def test_a_classifiers_problem_is_named_as_the_model_names_it(classes: int, labels: torch.Tensor, problem: str) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = BertConfig(num_labels=classes, architectures=["BertForSequenceClassification"], **sizes)
    model = BertForSequenceClassification(copy.deepcopy(config))
    model(torch.ones(2, 3, dtype=torch.int64), labels=labels)
    for loss in (StepLoss(config, 0.1), StepLoss(config, own=lambda *_, **__: labels.sum())):
        loss.set_problem_type(config, labels)
        assert config.problem_type is None, "the model does not see the labels"
    plan: Any = SimpleNamespace(architecture="bert", blocks=1)
    before = model_digest(plan, config)
    StepLoss(config).set_problem_type(config, labels)
    assert model_digest(plan, config) == before, "its messages stay its own"
    assert config.problem_type == model.config.problem_type == problem
    StepLoss(config).set_problem_type(config, None)
    assert config.problem_type == problem


class Weighted(GPT2LMHeadModel):
    """A script's own model, whose forward computes another loss."""

    def forward(self, *inputs: Any, **more: Any) -> Any:
        return super().forward(*inputs, **more)


class Named(GPT2LMHeadModel):
    """One that only has another name."""


def test_a_loss_of_the_models_own_is_not_lost() -> None:
    model = gpt2(1, 16)
    weighted, named = Weighted(model.config), Named(model.config)
    changed, patched = gpt2(1, 16), gpt2(1, 16)
    changed.loss_function = torch.nn.functional.cross_entropy
    patched.forward = MethodType(lambda self, **inputs: None, patched)
    for own, what in ((weighted, "Weighted with its own forward"), (patched, "forward"), (changed, "loss_function")):
        with pytest.raises(ConfigError, match=rf"model: got '.*{what}', allowed: .*compute_loss_func"):
            StepLoss.of(own.config, type(own), own, 0.0, None)
        StepLoss.of(own.config, type(own), own, 0.0, lambda *_, **__: None)  # type: ignore[arg-type, return-value]
        StepLoss.of(own.config, type(own), own, 0.1, None)  # smoothing goes by the logits, with Trainer too
    for usual in (model, named):
        StepLoss.of(usual.config, type(usual), usual, 0.0, None)
    StepLoss.of(model.config, type(model), "a/folder", 0.0, None)


# -- logits


@pytest.mark.parametrize("widths", [(3, 3), (2, 5, 3), (4,)])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_joined_as_trainer_joins(widths: tuple[int, ...], dims: int) -> None:
    shapes = [(2 + i, width, 4)[:dims] for i, width in enumerate(widths)]
    parts = [torch.arange(int(np.prod(shape)), dtype=torch.float32).view(shape) for shape in shapes]
    expected = parts[0]
    for part in parts[1:]:
        expected = nested_concat(expected, part, padding_index=-100)
    assert np.array_equal(_concatenate([part.numpy() for part in parts]), expected.numpy())
    pairs = [(part.numpy(), {"a": part.numpy()}) for part in parts]
    both = _concatenate(pairs)
    assert isinstance(both, tuple)
    assert np.array_equal(both[1]["a"], nested_numpify(expected))


@pytest.mark.parametrize(
    "value",
    [
        None,
        "text",
        -3,
        float("inf"),
        True,
        [],
        (),
        {},
        np.arange(6, dtype=np.int64).reshape(2, 3),
        np.zeros((0, 4), dtype=np.float32),
        np.float16(0.5),
        [(np.ones(3, dtype=np.float32), {"a": [np.array(7), None], 2: (1, [2])}), np.array([True, False])],
        np.arange(12, dtype=">f8").reshape(3, 4)[:, ::2],
    ],
    ids=str,
)
def test_what_ranks_send_each_other_arrives(value: Any) -> None:
    np.testing.assert_equal(unpack(pack(value)), value)


def test_other_bytes_are_refused() -> None:
    whole = pack([np.arange(5), "a"])
    for cut in range(len(whole)):
        with pytest.raises(WireError):
            unpack(whole[:cut])
    for bad in (
        whole + b"0",
        pack("x")[:8] + b"!!!",
        whole.replace(b"<i8", b"|O8"),
        whole.replace(b"[5]", b"[6]"),
        whole.replace(b"[5]", b"[-5]"),
    ):
        with pytest.raises(WireError):
            unpack(bad)
    for value in (np.array(["text"]), np.array([None]), {1, 2}, object()):
        with pytest.raises(DataError, match="cannot send"):
            pack(value)


# -- logs


def stats(raw: int, sent: int, *, wait: float, full: int = 0, delta: int = 0, groups: dict | None = None) -> list[dict]:
    def way(share: int) -> dict[str, int]:
        counted = {"bytes_raw": raw // share, "bytes_sent": sent // share}
        return {**counted, "values_quantized": raw // share // 4, "code_bits": raw // share // 4 * 3}

    link = {
        "forward": way(2),
        "backward": way(2),
        "evaluation": way(1),
        "wait_seconds": wait,
        "full_samples": full,
        "delta_samples": delta,
    }
    return [{"replica": 0, "links": {"0->1": link}, "groups": groups or {}} for _ in range(2)]


def test_logs_tell_what_changed_since_the_last() -> None:
    meter = TrafficMeter()
    first = meter.since_last(stats(800, 400, wait=1.0, full=4))
    bits = {"forward_bits": 3.0, "backward_bits": 3.0}
    assert first == {"link_compression": 2.0, "link_wait_seconds": 1.0, "store_hit_rate": 0.0, **bits}
    gradients = {"data parallel": {"bytes_raw": 90, "bytes_sent": 30}}
    second = meter.since_last(stats(2800, 500, wait=1.5, full=5, delta=3, groups=gradients))
    assert second == {
        "link_compression": 20.0,
        "link_wait_seconds": 0.5,
        "store_hit_rate": 0.75,
        "grad_compression": 3.0,
        **bits,
    }
    assert meter.since_last(stats(2800, 500, wait=1.5, full=5, delta=3, groups=gradients)) == {}
    gradients["data parallel"] = {"bytes_raw": 180, "bytes_sent": 30}  # a thread has not counted what it sent yet
    assert meter.since_last(stats(2800, 500, wait=1.5, full=5, delta=3, groups=gradients)) == {}


# -- checkpoints


def test_random_generators_go_on_where_they_were() -> None:
    state = random_state()
    expected = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    set_random_state(state)
    assert [random.random(), float(np.random.rand()), float(torch.rand(()))] == expected


def test_a_state_that_is_written_in_part_makes_no_whole_checkpoint(tmp_path: Path) -> None:
    class Ended(TrainerState):
        def save_to_json(self, json_path: str) -> None:
            Path(json_path).write_text('{"epoch": ')
            seen.extend(path.name for path in tmp_path.glob("*"))
            raise KeyboardInterrupt

    plan: Any = SimpleNamespace(cuts=(0, 1, 2))
    seen: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        checkpoints.complete(str(tmp_path), Ended(), plan, 1)
    assert checkpoints.STATE_FILE not in seen  # as a kill in that moment would leave it
    checkpoints.complete(str(tmp_path), TrainerState(), plan, 1)
    assert (tmp_path / checkpoints.STATE_FILE).is_file()


def test_the_one_that_was_written_last_stays_where_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(checkpoints.dist, "barrier", lambda group: None)
    monkeypatch.setattr(checkpoints.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(checkpoints, "broadcast", lambda value, group: value)
    plan: Any = SimpleNamespace(cuts=(0, 1, 2))
    for number in range(1, 6):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        checkpoints.complete(str(folder), TrainerState(), plan, 1)
        if number < 3:
            os.utime(folder, (4e9 + 10 * number, 4e9 + 10 * number))  # by the clock as it was then
        checkpoints.rotate(str(tmp_path), 2, None, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-5"]


@pytest.mark.parametrize("name", [checkpoints.PIPELINE_FILE, checkpoints.STATE_FILE])
def test_a_checkpoint_of_which_a_file_was_cut_off_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / checkpoints.DEEPSPEED).mkdir()
    checkpoints.complete(str(tmp_path), TrainerState(), SimpleNamespace(cuts=(0, 1, 2)), 1)  # type: ignore[arg-type]
    (tmp_path / name).write_text((tmp_path / name).read_text()[:5])
    monkeypatch.setattr(checkpoints.dist, "get_rank", lambda: 0)
    told: list[Any] = []
    monkeypatch.setattr(checkpoints, "broadcast", lambda value, group: told.append(value) or value)
    with pytest.raises(ConfigError, match=f"resume_from_checkpoint: got '.*{name}'"):
        checkpoints.find(str(tmp_path), str(tmp_path), {}, None)
    assert told  # the other ranks do not wait for an answer


@pytest.mark.parametrize(
    "names",
    [
        ["../beside"],
        ["checkpoint-1/../../beside"],
        ["{beside}"],
        [".."],
        ["outputs"],
        [7],
        "checkpoint-1",
        {"checkpoint-1"},
    ],
)
def test_rank_0_names_no_folder_beside_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: Any
) -> None:
    output, beside = tmp_path / "run", tmp_path / "beside"
    for folder in (output / "checkpoint-1", output / "outputs", beside):
        folder.mkdir(parents=True)
    said = [str(beside) if name == "{beside}" else name for name in names] if isinstance(names, list) else names
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(checkpoints.dist, "barrier", lambda group: None)
    monkeypatch.setattr(checkpoints.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(checkpoints, "broadcast", lambda value, group: said)
    with pytest.raises(WireError, match=r"rank 0 asks to delete .*checkpoint-\*"):
        checkpoints.rotate(str(output), 1, None, None)
    with pytest.raises(WireError):
        checkpoints.keep_only(str(output), "checkpoint-2", None)
    assert all(folder.is_dir() for folder in (output / "checkpoint-1", output / "outputs", beside))


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this process rank 0 or 1 of several. It is given what the others answer: for the steps, then for each."""

    def prepare(*others: list[Any], rank: int = 0) -> None:
        answers = iter(others)
        monkeypatch.setenv("LOCAL_RANK", "0")
        monkeypatch.setattr(checkpoints.dist, "get_rank", lambda: rank)
        monkeypatch.setattr(checkpoints, "broadcast", lambda value, group: value)
        monkeypatch.setattr(checkpoints, "while_others_wait", lambda act, group: act())
        monkeypatch.setattr(checkpoints, "gathered", lambda own, group: [own, *next(answers, [])])

    return prepare


LAYOUT = {"cuts": [0, 1, 2], "replicas": 1}


@pytest.mark.parametrize("step", ["../beside", "7", None, True, 7.0])
def test_a_rank_names_no_checkpoint_elsewhere(tmp_path: Path, reading: Callable[..., None], step: Any) -> None:
    """Loading unpickles: a rank looks only into folders that it was told of itself."""
    reading([[step]])
    with pytest.raises(WireError, match=r"a rank names the checkpoint of step .*, allowed: a whole number"):
        checkpoints.find(True, str(tmp_path), {}, None)


def whole(folder: Path, step: int) -> Path:
    """A checkpoint that is complete and has a manifest."""
    made = folder / f"checkpoint-{step}"
    (made / checkpoints.DEEPSPEED).mkdir(parents=True)
    (made / checkpoints.DEEPSPEED / "weights.pt").write_text("weights")
    manifest.write(made / checkpoints.DEEPSPEED, 0)
    plan: Any = SimpleNamespace(cuts=(0, 1, 2))
    checkpoints.complete(str(made), TrainerState(global_step=step), plan, 1)
    return made


def test_the_last_checkpoint_is_one_that_is_whole_on_every_machine(
    tmp_path: Path, reading: Callable[..., None]
) -> None:
    """Another machine may lack the newest one, or have one more; second ranks of machines have nothing to say."""
    for step in (600, 700):
        whole(tmp_path, step)
    reading([[600, 700], []], [None, ""])
    found = checkpoints.find(True, str(tmp_path), LAYOUT, None)
    assert found is not None
    assert found.folder == str(tmp_path / "checkpoint-700")
    reading([[600, 800], []], [None, ""], ["it was not finished", ""], [None, ""])
    assert checkpoints.last_good("--checkpoint", str(tmp_path), None) == (
        str(tmp_path / "checkpoint-600"),
        {800: "on rank 0's machine it is missing", 700: "on rank 1's machine it was not finished"},
    )


def test_a_run_does_not_begin_anew_where_one_machine_has_lost_its_checkpoints(
    tmp_path: Path, reading: Callable[..., None]
) -> None:
    """The next one would take the place of those that the others have. A killed run leaves unfinished ones."""
    for step in (600, 700):
        whole(tmp_path, step)
    for answers in (([[]], ["it is missing"], ["it is missing"]), ([[800]], [None], ["x was changed"], ["x"])):
        reading(*answers)
        with pytest.raises(ConfigError, match=r"--checkpoint: .* a folder with the run's checkpoints on every machine"):
            checkpoints.last_good("--checkpoint", str(tmp_path), None)
    reading([[700]], ["it was not finished"], ["it was not finished"])
    assert checkpoints.last_good("--checkpoint", str(tmp_path), None)[0] is None


def test_a_checkpoint_that_is_passed_over_is_not_trained_from(tmp_path: Path, reading: Callable[..., None]) -> None:
    """Without another checkpoint, people decide."""
    reading()
    (whole(tmp_path, 700) / checkpoints.DEEPSPEED / "weights.pt").write_text("weighty")
    (tmp_path / "checkpoint-800").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    told = "checkpoint of PipelineTrainer. checkpoint-800: it has no deepspeed: .*700: weights.pt was changed"
    with pytest.raises(ConfigError, match=told):
        checkpoints.find(True, str(tmp_path), LAYOUT, None)


def test_older_checkpoints_than_a_good_one_are_not_read(
    tmp_path: Path, reading: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading()
    for step in (1, 2, 3, 10):
        whole(tmp_path, step)
    (tmp_path / "checkpoint-10" / checkpoints.STATE_FILE).unlink()
    read, look = [], manifest.problem
    monkeypatch.setattr(manifest, "problem", lambda path: read.append(path.parent.name) or look(path))
    found = checkpoints.last_good("--checkpoint", str(tmp_path), None)
    assert found == (str(tmp_path / "checkpoint-3"), {10: "it was not finished"})
    assert read == ["checkpoint-3"]


def test_ranks_meet_while_one_is_reading(
    tmp_path: Path, reading: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective waits half an hour; a checkpoint may take longer to read."""
    met, three_times = [], threading.Event()

    def gathered(mine: object, group: Any) -> list:
        met.append(mine)
        if met.count(False) == 3:
            three_times.set()
        return [mine]

    wait = checkpoints.while_others_wait
    reading()
    monkeypatch.setattr(checkpoints, "while_others_wait", wait)
    monkeypatch.setattr("pipecomp.distributed.collectives.gathered", gathered)
    monkeypatch.setattr("pipecomp.distributed.collectives._ROUND_S", 0.01)
    monkeypatch.setattr(manifest, "problem", lambda path: None if three_times.wait(HANG_S) else "nobody met")
    whole(tmp_path, 3)
    assert checkpoints.last_good("--checkpoint", str(tmp_path), None)[0] == str(tmp_path / "checkpoint-3")


def test_each_rank_goes_on_from_the_folder_that_it_knows(
    tmp_path: Path, reading: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's may be another on its machine, and so may the best one's."""
    for resume, here in ((True, tmp_path / "run"), (str(tmp_path / "own" / "checkpoint-7"), tmp_path / "own")):
        reading([[7]], [None], rank=1)
        whole(here, 7)
        answer = ({"best_model_checkpoint": "/theirs/run/checkpoint-3"}, True, (), None, {})
        monkeypatch.setattr(checkpoints, "broadcast", lambda value, group, answer=answer: answer)
        found = checkpoints.find(resume, str(tmp_path / "run"), {}, None)
        assert found is not None
        assert found.folder == str(here / "checkpoint-7")
        assert found.state.best_model_checkpoint == str(here / "checkpoint-3")


def test_checkpoints_of_later_steps_go_before_a_run_that_goes_back_writes_one(
    tmp_path: Path, reading: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading(rank=1)
    monkeypatch.setattr(checkpoints.dist, "barrier", lambda group: None)
    for step in (50, 100, 120, 187):
        whole(tmp_path, step)
    checkpoints.remove_after(str(tmp_path), 100, None)
    assert [step for step, _ in checkpoints.list_checkpoints(str(tmp_path))] == [50, 100]


@pytest.mark.parametrize(
    ("changed_argument", "value", "refused"),
    [
        ("num_train_epochs", 9, False),
        ("max_steps", 70, False),
        ("per_device_train_batch_size", 7, False),
        ("gradient_accumulation_steps", 7, False),
        ("logging_steps", 7, False),
        ("lr_scheduler_type", "cosine", False),
        ("max_grad_norm", 0.3, False),
        ("learning_rate", 0.7, True),
        ("weight_decay", 0.7, True),
        ("adam_beta2", 0.7, True),
        ("optim", "adamw_torch", True),
        ("seed", 77, True),
        ("data_seed", 77, True),
    ],
)
def test_what_may_change_on_resuming(
    usual: TrainingArguments, changed_argument: str, value: Any, *, refused: bool
) -> None:
    """The rows of the table in docs/reliability.md. A checkpoint of another version has fewer or none of them."""
    saved = json.loads(json.dumps(arguments.kept(usual)))
    arguments.check_kept(usual, saved)
    now = changed(usual, **{changed_argument: value})
    arguments.check_kept(now, {})
    if not refused:
        arguments.check_kept(now, saved)
        return
    with pytest.raises(ConfigError, match=f"{changed_argument}: got .*, the value of the checkpoint"):
        arguments.check_kept(now, saved)


def test_a_training_does_not_begin_over_the_results_of_another(tmp_path: Path, reading: Callable[..., None]) -> None:
    reading()
    checkpoints.check_unused(str(tmp_path), None)
    (tmp_path / "checkpoint-6").mkdir()  # unfinished
    checkpoints.check_unused(str(tmp_path), None)
    whole(tmp_path, 5)
    with pytest.raises(ConfigError, match=r"output_dir: .* It has checkpoint-5: resume_from_.*overwrite=True of"):
        checkpoints.check_unused(str(tmp_path), None)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="It has a trained model, checkpoint-5: "):
        checkpoints.check_unused(str(tmp_path), None)


def test_every_machine_deletes_its_own_old_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2, 3):
        (tmp_path / f"checkpoint-{number}").mkdir()
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(checkpoints.dist, "barrier", lambda group: None)
    monkeypatch.setattr(checkpoints.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(checkpoints, "broadcast", lambda value, group: ["checkpoint-0", "checkpoint-1"])
    checkpoints.rotate(str(tmp_path), 2, None, None)  # the other is not here, or gone already
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3"]
    monkeypatch.setattr(checkpoints, "broadcast", lambda value, group: value)
    checkpoints.keep_only(str(tmp_path), "elsewhere/checkpoint-3", None)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


# -- what all ranks have alike


class Scattering:
    """Samples that draw at random whenever they are read, from a generator of their own or from torch's."""

    def __init__(self, own: bool) -> None:
        self._draw = torch.Generator().manual_seed(7) if own else None

    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": torch.randint(0, 9, (4,), generator=self._draw), "labels": i}


def facts(data: Any) -> dict[str, Any]:
    return dataset_facts(data, "train_dataset")


def test_another_order_or_content_of_a_dataset_is_noticed() -> None:
    rows = [{"input_ids": [i, i + 1], "labels": i % 2, "text": str(i), "extra": (None, 1.5)} for i in range(30)]
    mixed = list(rows)
    random.Random(3).shuffle(mixed)
    other = [{**row, "labels": 1 - row["labels"]} for row in rows]
    turned = [dict(reversed(row.items())) for row in rows]
    assert facts(rows) == facts(turned), "the order of a sample's keys says nothing"
    assert len({json.dumps(facts(data), sort_keys=True) for data in (rows, mixed, other, rows[:-1])}) == 4


@pytest.mark.parametrize("kind", [torch.tensor, np.array, lambda x: torch.tensor(x, dtype=torch.bfloat16), np.float32])
def test_values_of_all_kinds_are_compared(kind: Any) -> None:
    assert facts([{"x": kind(1.0)}]) == facts([{"x": kind(1.0)}]) != facts([{"x": kind(2.0)}])


def test_samples_that_draw_are_read_with_the_same_draws() -> None:
    before = torch.get_rng_state()
    assert len(facts(Scattering(own=False))) == 2
    assert facts(Scattering(own=False)) == facts(Scattering(own=False))
    assert torch.equal(torch.get_rng_state(), before)
    assert list(facts(Scattering(own=True))) == ["length of train_dataset"]


# -- trackers


class Gone(TrainerCallback):
    """A tracker whose server is gone from the second log on."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.calls.append("begin")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        self.calls.append("log")
        if state.global_step == 2:
            raise ConnectionError("no server\nat all")

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.calls.append("end")


def train_with(handler: Any, args: Any, steps: int) -> None:
    state, control = TrainerState(is_world_process_zero=True), TrainerControl()
    handler.on_train_begin(args, state, control)
    for state.global_step in range(1, steps + 1):
        handler.on_log(args, state, control, {"loss": 1.0})
    handler.on_train_end(args, state, control)


def test_a_tracker_that_fails_is_done_without(
    usual: TrainingArguments, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(callbacks, "get_reporting_integration_callbacks", lambda names: [Gone])
    handler = callbacks.default_handler(usual, None, None)
    tracker = next(callback for callback in handler.callbacks if isinstance(callback, Gone))
    train_with(handler, usual, 5)
    assert tracker.calls == ["begin", "log", "log"]
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2
    assert "Gone failed after step 2 (ConnectionError: no server)" in said[0]
    assert "nothing of steps 3 to 5" in said[1]
    train_with(handler, usual, 1)  # the next training tries again
    assert tracker.calls[3:] == ["begin", "log", "end"]
    assert capfd.readouterr().err == ""
    assert handler.pop_callback(Gone) is tracker


class Blocking(Gone):
    """A tracker whose server takes the second log and never answers."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        self.calls.append("log")
        if state.global_step == 2:
            threading.Event().wait()


def test_a_tracker_that_does_not_answer_is_done_without(
    usual: TrainingArguments, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heartbeat, "DEFAULT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(callbacks, "_TRACKER_S", 0.5)
    monkeypatch.setattr(callbacks, "get_reporting_integration_callbacks", lambda names: [Blocking])
    handler = callbacks.default_handler(usual, None, None)
    tracker = next(callback for callback in handler.callbacks if isinstance(callback, Blocking))
    rank = heartbeat.Heartbeat(0, 1, torch.distributed.HashStore())
    try:
        train_with(handler, usual, 5)
    finally:
        rank.end()
    assert tracker.calls == ["begin", "log", "log"]
    said = capfd.readouterr().err.splitlines()
    assert "Blocking failed after step 2 (StalledError: rank 0 on " in said[0]
    assert "is in the tracker Blocking.on_log since 0 s" in said[0]
    assert "nothing of steps 3 to 5" in said[1]


def test_a_callback_of_the_user_raises(usual: TrainingArguments) -> None:
    handler = callbacks.default_handler(usual, None, None)
    handler.add_callback(Gone)
    with pytest.raises(ConnectionError):
        train_with(handler, usual, 2)


def test_curves_that_cannot_be_written(
    usual: TrainingArguments, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "file" / "curves"))
    args = changed(usual, report_to=["tensorboard"], output_dir=str(tmp_path / "file"))
    train_with(callbacks.default_handler(args, None, None), args, 2)
    said = capfd.readouterr().err
    assert "TensorBoard failed after step 0" in said
    assert "nothing of steps 1 to 2" in said
