"""Counters, products and state of a training of PipelineTrainer, on one process with a stand-in for the engine."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerState, TrainingArguments, get_scheduler

import tests.dist.trainer_work as work
from pipecomp.checkpoint.writing import CollectiveWrite
from pipecomp.config import Config
from pipecomp.data import MicroBatch, ShardedSampler
from pipecomp.distributed.preemption import Interruption
from pipecomp.errors import ConfigError, DataError
from pipecomp.report.reader import read_runs
from pipecomp.report.recorder import Recorder
from pipecomp.stages import split
from pipecomp.trainer import checkpoints, setup
from pipecomp.trainer import training as training_module
from pipecomp.trainer.data_loading import EvalLoader, LengthSampler, SampleSource, StepLoader, data_seed, make_sampler
from pipecomp.trainer.evaluation import EvaluatedBatch, Evaluation
from pipecomp.trainer.losses import StepLoss
from pipecomp.trainer.meters import LossMeter, TrainingRecorder
from pipecomp.trainer.optimizers import OptimizerFactories
from pipecomp.trainer.training import Training, TrainingLength, update_best, uses_metric
from tests.models import gpt2
from tests.report.runs import AQSGD, counters, made_step


def test_a_step_of_samples_padded_left_weighs_what_is_trained() -> None:
    """A stage knows nothing of padding, so each sample that begins with some has one label less."""
    stage = split(gpt2(2, 16), num_stages=2)[1]
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8, [0, 1, 1, 1, 1, 1, 1, 1]])
    labels = torch.randint(0, 97, mask.shape).masked_fill(mask == 0, -100)
    batch = MicroBatch((4, 2, 7), {"input_ids": labels.clamp(min=0), "attention_mask": mask}, labels)
    told: list[int] = []

    def own(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
        told.append(int(num_items_in_batch))
        return work.summed(outputs, labels, num_items_in_batch)

    for loss in (StepLoss(stage.config), StepLoss(stage.config, own=own)):
        engine = SimpleNamespace(
            is_first_stage=lambda: False,
            is_last_stage=lambda: True,
            begins_local_step=lambda: False,
            stage=stage,
            device=torch.device("cpu"),
            propagate_failure=nullcontext,
        )
        training = object.__new__(Training)
        training._engine = engine
        training._loader = SimpleNamespace(begin_step=lambda count: [batch] * count)
        training._trainer = SimpleNamespace(replicas=1)
        training._loss = loss
        training._loss_group = None
        training._load(1)
        given = stage.mask_labels(stage.layout(batch.ids, batch.inputs), labels)
        logits = torch.randn(3, 8, 97)
        assert torch.equal(loss(logits, given), loss.plain(logits, given))
    assert told == [4 + 7 + 6] * 2


@pytest.mark.parametrize("loss", [2.5, float("nan")])
def test_a_run_records_the_true_loss_and_samples_of_a_step(loss: float) -> None:
    """Trainer's filter is of what is logged: a report that goes by it would not know that training has failed."""
    told: dict[str, float] = {}
    training = object.__new__(Training)
    training._engine = SimpleNamespace(
        micro_batches=2,
        train_batch=lambda: torch.tensor(loss),
        get_global_grad_norm=lambda: None,
        was_step_applied=lambda: False,
        basic_optimizer=None,
    )
    args = SimpleNamespace(logging_nan_inf_filter=True, torch_empty_cache_steps=None, per_device_train_batch_size=2)
    training._trainer = SimpleNamespace(
        args=args,
        state=TrainerState(global_step=4),
        lr_scheduler=SimpleNamespace(get_last_lr=lambda: [0.1]),
        replicas=3,
    )
    training._length = SimpleNamespace(max_steps=9)
    training._recording = SimpleNamespace(begin_step=lambda: None, end_step=lambda step, **more: told.update(more))
    training._losses = LossMeter(4)
    training._load = lambda micro_batches: None
    training._sampler = ShardedSampler(3 * 7, 2, replicas=3, drop_last=False)
    training._step(2, 2)  # the last micro-batch of an epoch has a sample less
    assert str(told["loss"]) == str(loss)
    assert told["samples"] == 3 * 3
    assert training._losses.sum == (loss if loss == 2.5 else 0.0)


def test_a_steps_line_says_when_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written with the next one, unless there are counters before."""
    clock = [0.0]
    for module in ("report.recorder", "trainer.meters"):
        monkeypatch.setattr(f"pipecomp.{module}.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr("pipecomp.trainer.meters.broadcast", lambda value, group: value)
    args = SimpleNamespace(output_dir=str(tmp_path), gradient_accumulation_steps=1)
    engine = SimpleNamespace(describe=dict)
    state = TrainerState(global_step=0)
    trainer = SimpleNamespace(
        args=args,
        state=state,
        rank=0,
        engine=engine,
        group=None,
        _start_recorder=lambda: (Recorder(tmp_path), {"kind": "trainer", "unit": "samples"}),
        _report_step=lambda record, stats: None,
    )
    length = TrainingLength(per_epoch=3, accumulation=1, updates=3, epochs=1, max_steps=3)
    recording = TrainingRecorder(trainer, length, [])
    for step in (1, 2, 3):
        clock[0] += 5.0
        recording.begin_step()
        clock[0] += 2.0
        recording.end_step(step, loss=1.0, lr=0.1, samples=4)
        clock[0] += 10.0
    recording.interrupted()
    lines = read_runs([tmp_path])[0].steps
    assert [(line["step"], line["seconds"], line["step_s"]) for line in lines] == [(1, 7, 2), (2, 24, 2), (3, 41, 2)]
    rates = recording.rates(counters(made_step(Config.from_dict({"activations": AQSGD})), 3, 0.5))
    assert rates["link_slowest_wait"] == 0.25, "what is between steps, as evaluations, is no time to wait"


@pytest.mark.parametrize("first", [True, False])
def test_tokens_of_each_replica_count_once(monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    """Replicas have samples of other lengths, and the last stage loads what the first one does."""
    sent: list[Any] = []
    others = [({}, (60, 50), {}, 0, []), ({}, (0, 0), {}, 0, [])]
    monkeypatch.setattr(training_module, "gathered", lambda own, group: sent.append(own) or [own, *others])
    training = object.__new__(Training)
    training._engine = SimpleNamespace(
        is_first_stage=lambda: first,
        comm_stats=lambda: {"steps": 3, "micro_batches": [{"micro_batch": 0, "forward_s": 0.1}]},
        propagate_failure=nullcontext,
    )
    args = SimpleNamespace(include_num_input_tokens_seen="no")
    training._trainer = SimpleNamespace(
        args=args, group=None, flos_per_token=1, state=TrainerState(), _take_errors=lambda: []
    )
    training._loader = SimpleNamespace(tokens=40, real_tokens=30)
    training._flos_before, training._interruption = 0.0, Interruption(active=False)
    training._gather({})
    assert training._real_tokens == (80 if first else 50)
    assert sent[0][0] == {"steps": 3}, "micro-batches, of which a step may have hundreds, travel once, in the trace"


PADDED = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])


def masked_words() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(vocab_size=97, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    )


@pytest.mark.parametrize(
    ("made", "wrong", "place"),
    [
        (lambda: gpt2(2, 16), (0, 5), 5),  # what comes after the last real token is predicted from it, the next is not
        (lambda: gpt2(2, 16), (2, 1), 1),
        (masked_words, (0, 4), 4),
        (masked_words, (2, 0), 0),
    ],
)
def test_a_label_that_only_padding_predicts_is_an_error(made: Any, wrong: tuple[int, int], place: int) -> None:
    whole = made()
    causal = type(whole).__name__ == "GPT2LMHeadModel"
    whole.config.architectures = [type(whole).__name__]
    stage, alone = split(whole, num_stages=2)[1], split(whole, num_stages=1)[0]
    loss, ids = StepLoss(whole.config), torch.full(PADDED.shape, 7)
    fine = ids.masked_fill(PADDED == 0, -100)
    if causal:
        fine[0, 4] = 7
    batch = MicroBatch((4, 2, 9), {"input_ids": ids, "attention_mask": PADDED}, fine)
    (kept,) = loss.masked_labels(stage, [batch])
    assert kept[2].tolist() == ([-100, -100, -100, 7, 7, 7] if causal else [-100, -100, 7, 7, 7, 7])
    labels = fine.clone()
    labels[wrong] = 3
    other = MicroBatch(batch.ids, batch.inputs, labels)
    with pytest.raises(DataError, match=f"labels: sample {batch.ids[wrong[0]]} has 3 at place {place}"):
        loss.masked_labels(stage, [other])
    assert torch.equal(loss.masked_labels(alone, [other])[0], labels), "one stage has what the unsplit model has"
    own = StepLoss(whole.config, own=work.summed)
    assert torch.equal(own.masked_labels(stage, [other])[0][wrong], torch.tensor(3)), (
        "a loss of one's own may ignore them"
    )


@pytest.mark.parametrize("own", [None, work.summed], ids=["model's", "user's"])
def test_a_steps_labels_are_not_counted_on_the_gpu(own: Any) -> None:
    """Nothing waits for a device: torch's meta device has no values to tell, not even later."""
    config = gpt2(1, 16).config
    config.architectures = ["GPT2LMHeadModel"]
    labels = [torch.tensor([[5, 3, -100, 2]]), torch.full((1, 4), -100)]
    loss = StepLoss(config, own=own)
    for _ in range(2):
        loss.set_share(labels, 1, None, torch.device("cpu"))
        assert all(loss(torch.zeros(1, 4, 97, device="meta"), each.to("meta")).is_meta for each in labels)


def test_a_loss_of_the_users_own_is_told_an_evaluations_labels_as_trainer_tells_it() -> None:
    config = gpt2(1, 16).config
    config.architectures = ["GPT2LMHeadModel"]
    labels, told = torch.tensor([[5, 3, -100, 2], [1, 2, 3, 4]]), []

    def own(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
        told.append(num_items_in_batch)
        return outputs.logits.sum()

    StepLoss(config, own=own).plain(torch.zeros(2, 4, 97), labels)
    assert torch.is_tensor(told[0])
    assert int(told[0]) == 5


def test_nccl_is_refused_where_processes_share_a_gpu() -> None:
    """accelerate takes it wherever there is a GPU, and it would end in the first collective."""
    args = SimpleNamespace(ddp_backend=None)
    setup._check_shared_gpus(["first", "second"], args)
    setup._check_shared_gpus([None, None], args)  # over gloo
    with pytest.raises(ConfigError, match=r"^ddp_backend: got None, allowed: 'gloo' if processes share a GPU"):
        setup._check_shared_gpus(["first", "first"], args)


class Views:
    """Each sample twice, and a column that no model takes; both views share a cached activation."""

    column_names = ("input_ids", "idx")

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"input_ids": index, "idx": 0}

    def sample_id(self, index: int) -> int:
        return 100 + index // 2


class Columns(Views):
    """The same as datasets has it: what is left without a column is another dataset, which knows of no ids."""

    def remove_columns(self, names: list[str]) -> list[dict[str, int]]:
        return [{"input_ids": index} for index in range(len(self))]


def collated(chosen: list[dict[str, int]]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([[sample["input_ids"]] for sample in chosen])}


@pytest.mark.parametrize("columns", [None, ["input_ids"]])
@pytest.mark.parametrize("data", [Views(), Columns()])
@pytest.mark.parametrize("workers", [{"num_workers": 0}, {"num_workers": 1, "multiprocessing_context": "fork"}])
def test_a_datasets_own_ids_are_the_samples_ids(data: Views, columns: list[str] | None, workers: dict) -> None:
    samples = SampleSource.of(data, collated, columns, "train_dataset")
    loader = StepLoader(samples, ShardedSampler(len(data), 3, drop_last=False), 0, workers)
    batches = loader.begin_step(3)
    ids = [[data.sample_id(int(index)) for index in batch.inputs["input_ids"].flatten()] for batch in batches]
    assert sorted(i for row in ids for i in row) == sorted(2 * [100, 101, 102, 103])
    assert [list(batch.ids) for batch in batches] == ids
    assert [loader.upcoming(ahead) for ahead in range(3)] == ids
    evaluated = [i for batch in EvalLoader(samples, 3, 0, workers) for i in batch.ids]
    assert evaluated == [data.sample_id(index) for index in range(len(data))]


@pytest.mark.parametrize("kind", ["cosine", "reduce_lr_on_plateau"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 2)])
def test_a_schedule_goes_on_where_a_stage_has_another_number_of_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, before: int, after: int
) -> None:
    """The optimizer has one group for stages whose trained parameters all decay."""
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    args = TrainingArguments(output_dir=str(tmp_path), lr_scheduler_type=kind, eval_strategy="epoch")

    saved: dict[str, float] = {}

    def made(count: int) -> tuple[Any, Any]:
        groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "weight_decay": 0.0} for _ in range(count)]
        optimizer = torch.optim.SGD(groups, lr=0.1)

        def save(folder: str, tag: str) -> None:
            first = optimizer.param_groups[0]
            saved.update({key: first[key] for key in ("lr", "initial_lr") if key in first})

        def load(folder: str, tag: str) -> tuple[str, dict]:
            for group in optimizer.param_groups:
                group.update(saved)
            return folder, {}

        engine = SimpleNamespace(basic_optimizer=optimizer, state_number=0, save_checkpoint=save, load_checkpoint=load)
        return engine, OptimizerFactories().make_scheduler(args, optimizer, 20)

    def steps(engine: Any, scheduler: Any, count: int) -> list[list[float]]:
        rates = []
        for _ in range(count):
            engine.basic_optimizer.step()
            scheduler.step(*([3.0] if uses_metric(scheduler) else []))
            rates.append([group["lr"] for group in engine.basic_optimizer.param_groups])
        return rates

    engine, scheduler = made(before)
    steps(engine, scheduler, 13)
    checkpoints.save_engine(engine, str(tmp_path), scheduler, CollectiveWrite(tmp_path))
    other, again = made(after)
    checkpoints.load_engine(other, checkpoints.ResumePoint(str(tmp_path), TrainerState(), same=False), again)
    assert again.get_last_lr() == scheduler.get_last_lr()[:1] * after
    expected = [rates[:1] * after for rates in steps(engine, scheduler, 11)]
    assert steps(other, again, 11) == expected
    assert 0.1 > expected[0][0] >= expected[-1][0]


@pytest.mark.parametrize(("kind", "drop_last"), [("random", False), ("sequential", True), ("group_by_length", False)])
def test_the_order_is_the_one_that_the_arguments_name(tmp_path: Path, kind: str, drop_last: bool) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path), seed=7, data_seed=0, dataloader_drop_last=drop_last, train_sampling_strategy=kind,
        per_device_train_batch_size=2, gradient_accumulation_steps=3, use_cpu=True, report_to="none",
    )  # fmt: skip
    data = [{"input_ids": [0] * (i * 7 % 23)} for i in range(41)]
    samples = SampleSource.of(data, list, None, "train_dataset")
    made = make_sampler(samples, args, data, None, replicas=2, replica=1)
    options: dict[str, Any] = {"replicas": 2, "replica": 1, "seed": 0, "drop_last": drop_last}
    if kind == "group_by_length":
        expected: ShardedSampler = LengthSampler([len(x["input_ids"]) for x in data], 6, 2, **options)
    else:
        expected = ShardedSampler(41, 2, shuffle=kind == "random", **options)
    assert made.per_epoch == expected.per_epoch == (10 if drop_last else 11)
    for number in range(22):
        assert made.batch(number) == expected.batch(number)
    args.data_seed = None
    assert data_seed(args) == 7


@pytest.mark.parametrize(
    ("epochs", "max_steps", "expected"), [(2, -1, (2, 6)), (1.5, -1, (2, 5)), (0.1, -1, (1, 1)), (9, 4, (2, 4))]
)
def test_how_long_a_training_is(epochs: float, max_steps: int, expected: tuple[int, int]) -> None:
    args = SimpleNamespace(gradient_accumulation_steps=3, num_train_epochs=epochs, max_steps=max_steps)
    length = TrainingLength.of(args, 7)
    assert (length.epochs, length.max_steps) == expected
    assert [length.micro_batches(update) for update in range(length.updates)] == [3, 3, 1]


def test_a_checkpoint_with_other_steps_in_an_epoch_is_noticed() -> None:
    length = TrainingLength(per_epoch=10, accumulation=4, updates=3, epochs=3, max_steps=9)
    ends = [epoch + min(1.0, (update + 1) * 4 / 10) for epoch in range(3) for update in range(3)]
    assert not any(length.has_other_length(step, ends[step - 1]) for step in range(1, 10))
    assert length.has_other_length(3, 0.5), "from half as many replicas"
    assert length.has_other_length(3, 2.0)


def test_a_schedule_has_what_the_arguments_say_of_it(tmp_path: Path) -> None:
    kind, options = "cosine_with_restarts", {"num_cycles": 3}
    args = TrainingArguments(
        output_dir=str(tmp_path), lr_scheduler_type=kind, lr_scheduler_kwargs=options, warmup_steps=4
    )

    def rates(make: Any) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        scheduler, found = make(optimizer), []
        for _ in range(20):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    def trainers(optimizer: Any) -> Any:
        return get_scheduler(kind, optimizer, 4, 20, scheduler_specific_kwargs=options)

    assert rates(lambda optimizer: OptimizerFactories().make_scheduler(args, optimizer, 20)) == rates(trainers)


@pytest.mark.parametrize("greater", [True, False])
def test_the_best_evaluation(greater: bool) -> None:
    args = SimpleNamespace(metric_for_best_model="f1", greater_is_better=greater, save_strategy="steps")
    state, values = TrainerState(), [0.5, 0.7, 0.7, 0.3] if greater else [0.5, 0.3, 0.3, 0.7]
    best = []
    for step, value in enumerate(values, 1):
        state.global_step = step
        best.append(update_best(args, state, {"eval_loss": -value, "eval_f1": value}))
    assert best == [True, True, False, False]
    assert (state.best_metric, state.best_global_step) == (values[1], 2)
    with pytest.raises(ConfigError, match="metric_for_best_model: got 'f1', allowed: one of eval_loss"):
        update_best(args, state, {"eval_loss": 1.0})


def test_a_loss_of_compute_metrics_takes_the_place_of_the_mean() -> None:
    args = SimpleNamespace(eval_do_concat_batches=True, logging_nan_inf_filter=True, include_for_metrics=[])
    engine = SimpleNamespace(grid=SimpleNamespace(data_parallel_size=1))
    evaluation = Evaluation(
        engine, None, args, loss=None, compute_metrics=lambda found: {"loss": 7.0, "eval_f1": 0.5}, preprocess=None,
        on_step=lambda: None,
    )  # fmt: skip
    rows = [EvaluatedBatch(0, 2, 1.0, np.zeros((2, 2)), np.zeros(2), None)]
    samples = SampleSource.of([{"labels": 0}] * 2, list, None, "eval_dataset")
    metrics = evaluation._combine(rows, EvalLoader(samples, 2, 0, {"num_workers": 0}), "eval", 0.0)[2]
    assert (metrics["eval_loss"], metrics["eval_f1"]) == (7.0, 0.5)


@pytest.mark.parametrize("concat", [True, False])
@pytest.mark.parametrize("filtered", [True, False])
def test_an_evaluation_counts_every_sample_alike(concat: bool, filtered: bool) -> None:
    """The last micro-batch may be short."""
    told: list[Any] = []
    args = SimpleNamespace(eval_do_concat_batches=concat, logging_nan_inf_filter=filtered, include_for_metrics=["loss"])
    engine = SimpleNamespace(grid=SimpleNamespace(data_parallel_size=1))
    evaluation = Evaluation(
        engine, None, args, loss=None, compute_metrics=lambda found: told.append(found) or {}, preprocess=None,
        on_step=lambda: None,
    )  # fmt: skip
    sizes, losses = (3, 3, 1), (1.0, float("inf"), 5.0)
    rows = [
        EvaluatedBatch(number, size, loss, np.full((size, 2), number), np.full(size, number), None)
        for number, (size, loss) in enumerate(zip(sizes, losses, strict=True))
    ]
    samples = SampleSource.of([{"labels": 0}] * 7, list, None, "eval_dataset")
    metrics = evaluation._combine(rows, EvalLoader(samples, 3, 0, {"num_workers": 0}), "eval", 0.0)[2]
    assert metrics["eval_loss"] == (2.0 if filtered else float("inf"))
    (found,) = told
    assert found.losses.tolist() == [1.0] * 3 + [float("inf")] * 3 + [5.0]
    labels = np.concatenate(found.label_ids) if not concat else found.label_ids
    assert isinstance(found.label_ids, list) is not concat
    assert labels.tolist() == [0, 0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize(("epochs", "steps"), [(3, 28), (2.5, 22), (1.5, 10), (1, 8)])
def test_a_length_counts_steps_from_a_checkpoint_with_larger_ones(epochs: float, steps: int) -> None:
    """Eight steps of eight samples, in epochs of 48: epoch 2 has 32 more, in steps of four."""
    args = SimpleNamespace(gradient_accumulation_steps=2, max_steps=-1, num_train_epochs=epochs)
    length = TrainingLength.of(args, 24).beginning_at(8, 24 + 8, args)  # micro-batches of 2
    assert length.max_steps == steps
    assert [length.epoch(step) for step in (8, 15, 16, 27, 28)] == [1, 1, 2, 2, 3]
    assert [length.first_step(epoch) for epoch in (2, 3)] == [16, 28]
    numbers = [length.first_micro_batch(step) for step in range(8, 28)]
    assert numbers == list(range(32, 72, 2))
    assert length.epochs_after(16) == 2.0


def test_a_length_of_a_rest_that_is_no_multiple_of_a_step() -> None:
    args = SimpleNamespace(gradient_accumulation_steps=3, max_steps=12, num_train_epochs=9)
    length = TrainingLength.of(args, 7).beginning_at(4, 7 + 2, args)  # five micro-batches of epoch 2 are left
    assert [length.micro_batches(step) for step in range(4, 9)] == [3, 2, 3, 3, 1]
    assert [length.first_micro_batch(step) for step in range(4, 9)] == [9, 12, 14, 17, 20]
    assert (length.max_steps, length.epochs) == (12, 4), "max_steps ends it"


@pytest.mark.parametrize("replicas", [1, 4])
def test_steps_of_similar_lengths_go_on_in_another_layout(replicas: int) -> None:
    lengths = torch.randint(1, 100, (960,), generator=torch.Generator().manual_seed(1)).tolist()
    before = LengthSampler(lengths, 8, 4, seed=1)
    taken = [i for number in range(240, 240 + 4) for i in before.batch(number)]
    options = [{"replicas": replicas, "replica": replica, "seed": 1} for replica in range(replicas)]
    samplers = [LengthSampler(lengths, 4, 2, **given) for given in options]
    (number,) = {sampler.seek(before.position(240 + 4)) for sampler in samplers}
    steps = range(number, 2 * samplers[0].per_epoch, 2)
    rest = [[i for n in (step, step + 1) for s in samplers for i in s.batch(n)] for step in steps]
    assert sorted(i for step in rest for i in step) == sorted(set(range(960)) - set(taken))
    spread = [max(lengths[i] for i in step) - min(lengths[i] for i in step) for step in rest]
    assert sorted(spread)[len(spread) // 2] < 50, "the lengths of half of the steps differ by less than half"
