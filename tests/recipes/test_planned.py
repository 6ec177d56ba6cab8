"""Arguments of a rank of `pipecomp train`: batches, kinds of files, configuration, earlier plans."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipecomp.distributed.rendezvous import AllRanks
from pipecomp.errors import ConfigError, DataError, PeerLostError, writable
from pipecomp.plan.options import PlanOptions, TrainOptions
from pipecomp.recipes import plan_file, planned, run_folder
from pipecomp.recipes.steps import warmup_decay
from pipecomp.report.recorder import CHECKPOINTS, PLAN
from pipecomp.trainer.checkpoints import STATE_FILE


def options_of(folder: Path, *data: str, **more: Any) -> TrainOptions:
    files = [Path(file) for file in data or ("a.txt",)]
    return TrainOptions(model="m", data=files, lr=1e-3, out=folder, **more)


@pytest.mark.parametrize(
    ("samples", "replicas", "batch"), [(1, 1, 1), (62, 1, 32), (62, 2, 32), (62, 3, 30), (62, 6, 30), (7, 5, 5)]
)
def test_replicas_share_the_batch_that_nobody_gave(samples: int, replicas: int, batch: int) -> None:
    assert planned.choose_batch(None, samples, replicas) == batch


@pytest.mark.parametrize(
    ("samples", "epochs", "batch"), [(1000, 3, 32), (200, 3, 8), (147, 1, 2), (8, 3, 1), (600, 3, 32)]
)
def test_a_short_run_has_smaller_batches(samples: int, epochs: int, batch: int) -> None:
    """Rather than a handful of steps, in which hardly a weight moves."""
    assert planned.choose_batch(None, samples, 1, epochs) == batch
    assert batch == 1 or epochs * samples // batch >= planned.FEWEST_STEPS
    assert planned.choose_batch(None, 147, 1, 1, 6) == 16, "six steps are asked for"


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 100])
def test_every_step_has_a_rate(steps: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = warmup_decay(steps, optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    warmup = max(1, steps // 10)
    assert rates[0] == pytest.approx(2.0 / warmup)
    assert max(rates) == rates[warmup - 1] == 2.0
    assert min(rates) > 0
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert optimizer.param_groups[0]["lr"] == 0


@pytest.mark.parametrize(
    ("given", "rate"), [({}, 5e-5), ({"lora": 4}, 2e-4), ({"adapter": Path("a")}, 2e-4), ({"lora": 4, "lr": 1.0}, 1.0)]
)
def test_adapters_have_a_rate_of_their_own(given: dict[str, Any], rate: float) -> None:
    options = TrainOptions(model="m", data=[Path("a.txt")], **given)
    assert options.rate == rate
    made = planned.deepspeed_config(options, {"pipecomp": {}}, Path("out"))
    assert made["optimizer"]["params"]["lr"] == rate


def test_options_of_adapters_reach_the_recipe(tmp_path: Path) -> None:
    args = planned.recipe_arguments(options_of(tmp_path, lora=4))
    assert (args.lora_rank, args.lora_alpha, args.lora_targets) == (4, 8, ["all-linear"])
    args = planned.recipe_arguments(
        options_of(tmp_path, lora=4, lora_alpha=4.0, lora_targets="q_proj,v_proj", dora=True)
    )
    assert (args.lora_alpha, args.lora_targets, args.dora) == (4.0, ["q_proj", "v_proj"], True)
    args = planned.recipe_arguments(options_of(tmp_path, adapter=tmp_path / "a"))
    assert (args.lora_rank, args.lora_targets, args.adapter) == (None, None, str(tmp_path / "a"))


def test_a_file_of_options_is_read_as_it_was_written(tmp_path: Path) -> None:
    given = TrainOptions(
        model="m", data=[Path("a b.txt"), Path("ü.txt")], evaluate=Path("e"), lora=4, lora_alpha=3.5, tie=False,
        report_to=["mlflow"], lr=1e-5, out=Path("out"),
    )  # fmt: skip
    (tmp_path / "run.yaml").write_text(given.to_yaml(batch=8), encoding="utf-8")
    values = TrainOptions.read_file(tmp_path / "run.yaml")
    assert values["batch"] == 8
    assert "out" not in values
    assert values["data"] == ["a b.txt", "ü.txt"]
    values |= {"data": given.data, "evaluate": Path("e"), "out": Path("out"), "batch": None}
    assert TrainOptions(**values) == given


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lra: 3", r"--config: .*: got 'lra', allowed: model, data"),
        ("- 3", "--config: got .* allowed: lines such as"),
        ("a: [", "--config: got .* allowed: YAML: "),
    ],
)
def test_a_file_that_has_no_options_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        TrainOptions.read_file(tmp_path / "run.yaml")


def test_batches_that_cannot_be() -> None:
    with pytest.raises(DataError, match="the data have 2 samples, too few for 3 replicas"):
        planned.choose_batch(None, 2, 3)
    with pytest.raises(ConfigError, match="--batch: got 9, allowed: at most 8"):
        planned.choose_batch(9, 8)


def test_texts_of_all_forms_train_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n two")
    (tmp_path / "b.jsonl").write_text('{"body": "three"}\n')
    (tmp_path / "c.jsonl").write_text('{"messages": [{"role": "user", "content": "four"}]}\n')
    files = [str(tmp_path / name) for name in ("a.txt", "b.jsonl", "c.jsonl")]
    assert planned.tokenizer_texts(options_of(tmp_path, files[0], tokenizer="train:300")) == ["one\n two"]
    assert planned.tokenizer_texts(options_of(tmp_path, files[1], tokenizer="train:300", field="body")) == ["three"]
    assert planned.tokenizer_texts(options_of(tmp_path, files[2], tokenizer="train:300")) == ["four"]
    assert planned.tokenizer_texts(options_of(tmp_path, files[2])) == []


@pytest.mark.parametrize("more", [{}, {"save_every": 1}])
def test_bf16_can_be_saved_and_loaded_and_is_summed_in_float32(tmp_path: Path, more: dict[str, int]) -> None:
    made = planned.deepspeed_config(options_of(tmp_path, dtype="bf16", **more), {"pipecomp": {}}, tmp_path)
    assert made["bf16"] == {"enabled": True}
    assert made["zero_optimization"] == {"stage": 1}
    assert made["data_types"] == {"grad_accum_dtype": "fp32"}


def test_cluster_centers_lie_where_the_messages_of_samples_would(tmp_path: Path) -> None:
    planned_section = {"activations": {"method": "aqsgd"}, "store": {"clusters": 256}}
    made = planned.deepspeed_config(options_of(tmp_path), {"pipecomp": planned_section}, tmp_path)
    assert made["pipecomp"]["store"] == {"path": str(tmp_path / "messages"), "clusters": 256}


def test_the_second_home_follows_the_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(machines: int, ranks: int, **more: Any) -> str:
        return planned.choose_second_home(options_of(tmp_path, **more), machines, ranks)

    assert [chosen(1, 2), chosen(2, 2), chosen(1, 2, elastic=True), chosen(1, 1, elastic=True)] == [
        *("off", "next", "next", "off")
    ]
    assert [chosen(3, 3, second_home=home) for home in ("off", "2", "host3")] == ["off", "2", "host3"]
    monkeypatch.setenv("PIPECOMP_RESTARTS", "1")
    assert [chosen(2, 2, second_home=home) for home in ("off", "2", "host3")] == ["off", "next", "next"]
    made = planned.deepspeed_config(options_of(tmp_path), {"pipecomp": {}}, tmp_path, "2")
    assert made["pipecomp"]["elastic"]["second_home"] == 2


def test_stages_train_their_copies_apart_where_it_is_asked_for(tmp_path: Path) -> None:
    def made(**more: bool) -> dict:
        return planned.deepspeed_config(options_of(tmp_path, **more), {"pipecomp": {"seed": 1}}, tmp_path)["pipecomp"]

    assert made() == {"seed": 1}
    assert made(tie=False) == {"seed": 1, "tie": False}


def test_a_run_goes_on_in_the_layout_that_its_options_name() -> None:
    def section(earlier: dict[str, Any], layout: str, replicas: int = 2) -> dict[str, Any]:
        made = plan_file.with_layout({"config": {"pipecomp": {"seed": 1, **earlier}}}, layout, replicas)
        found: dict[str, Any] = made["config"]["pipecomp"]
        return found

    other = {"layout": "replicas-across"}
    assert section({}, "auto") == section(other, "stages-across") == {"seed": 1}
    assert section(other, "auto") == section({}, "replicas-across") == {"seed": 1, **other}
    assert section(other, "auto", 1) == {"seed": 1}, "without replicas there is one order"
    assert section({}, "replicas-across", 1) == {"seed": 1, **other}, "refused where the engine is made"


def test_a_plan_is_for_the_stages_and_processes_that_it_was_made_for(tmp_path: Path) -> None:
    finished_checkpoint(tmp_path / CHECKPOINTS)
    assert planned.resumes(options_of(tmp_path, save_every=1), tmp_path)
    assert not planned.resumes(options_of(tmp_path), tmp_path)
    made = {"config": {}, "cuts": [0, 1, 4], "chosen": {"replicas": 2}, "more": 1}
    (tmp_path / PLAN).write_text(json.dumps(made))
    assert plan_file.read_plan(tmp_path) == made
    assert plan_file.check_plan(made, tmp_path, 2, 4) == made
    with pytest.raises(ConfigError, match=r"--stages: got 4, allowed: 2\."):
        plan_file.check_plan(made, tmp_path, 4, 4)
    with pytest.raises(ConfigError, match=r"number of processes: got 2, allowed: 4\."):
        plan_file.check_plan(made, tmp_path, 2, 2)
    assert plan_file.check_plan(made, tmp_path, None, 3) == made, "an elastic run may have lost a machine"


def test_a_given_plan_is_for_as_many_stages_processes_and_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    made = {"config": sizes, "cuts": [0, 1, 4], "chosen": {"replicas": 1}}
    file = tmp_path / "earlier.json"
    with pytest.raises(ConfigError, match=r"--plan: got .*earlier\.json"):
        plan_file.read_given_plan(file, 2, 2, None, 100)
    file.write_text(json.dumps({**made, "machines": {"names": ["a", "b"]}, "recut": True}))
    assert plan_file.read_given_plan(file, 2, 2, None, 100) == made, "machines are those of this start"
    assert plan_file.read_given_plan(file, 2, 2, 8, 8) == made
    for stages, world, batch, samples, key in (
        *((3, 3, None, 100, "--stages"), (2, 4, None, 100, "number of processes")),
        *((2, 2, 16, 100, "--batch"), (2, 2, None, 7, "--plan")),
    ):
        with pytest.raises(ConfigError, match=f"{key}: got"):
            plan_file.read_given_plan(file, stages, world, batch, samples)
    monkeypatch.setenv("PIPECOMP_RESTARTS", "1")
    assert plan_file.read_given_plan(file, 1, 1, None, 100) is None, "a machine was lost before the first checkpoint"
    assert plan_file.read_given_plan(tmp_path / "none", 2, 2, None, 100) is None, "it was the first one, with the file"


def test_a_run_that_goes_on_needs_its_plan_on_one_of_the_machines(tmp_path: Path) -> None:
    assert plan_file.read_plan(tmp_path) is None
    with pytest.raises(ConfigError, match=rf"--out: got .* allowed: a folder with its run's {PLAN}"):
        plan_file.check_plan(None, tmp_path, 2, 2)
    (tmp_path / PLAN).write_text('{"config": {}')
    with pytest.raises(ConfigError, match=rf"--out: got .* allowed: a folder with its run's {PLAN}"):
        plan_file.read_plan(tmp_path)


def test_options_reach_the_ranks_as_they_are(tmp_path: Path) -> None:
    given = options_of(tmp_path, "a b.txt", evaluate=tmp_path / "e", store=Path("s"), report_to=["mlflow"], tie=False)
    assert TrainOptions.from_json(given.to_json()) == given


def finished_checkpoint(folder: Path) -> None:
    (folder / "checkpoint-3").mkdir(parents=True)
    (folder / "checkpoint-3" / STATE_FILE).touch()


def test_without_a_checkpoint_there_is_no_earlier_plan(tmp_path: Path) -> None:
    """A run that ran out of memory is started again with a smaller --batch: the old plan has the old one's sizes."""
    (tmp_path / PLAN).write_text(json.dumps({"config": {}, "cuts": [0, 1, 4], "chosen": {"replicas": 2}}))
    (tmp_path / CHECKPOINTS / "checkpoint-3").mkdir(parents=True)  # not finished
    assert not planned.resumes(options_of(tmp_path, save_every=1, batch=8), tmp_path)


def test_a_run_without_checkpoints_does_not_take_the_folder_of_one_that_has_some(tmp_path: Path) -> None:
    """It would overwrite the plan and the metrics that the other one goes on with, and empty its message store."""
    planned.check_unused(options_of(tmp_path), tmp_path)
    finished_checkpoint(tmp_path / CHECKPOINTS)
    with pytest.raises(ConfigError, match=r"--save-every: got None, allowed: a number\. .* has checkpoints"):
        planned.check_unused(options_of(tmp_path), tmp_path)
    planned.check_unused(options_of(tmp_path, save_every=1), tmp_path)


@pytest.mark.parametrize("taken", ["file", "file/below"])
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, taken: str) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / taken
    with pytest.raises(ConfigError) as caught, writable("--out", folder):
        folder.mkdir(parents=True, exist_ok=True)
    told = str(planned.translate_error(caught.value, str(folder)))
    assert told.startswith(f"--out: got '{folder}', allowed: a folder that can be written (")


def test_a_finished_run_is_overwritten_only_if_asked(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "adapter_model.safetensors").touch()
    for save_every in (None, 5):
        with pytest.raises(ConfigError, match=r"--out: got .*/model', allowed: a folder without a trained model"):
            planned.check_unused(options_of(tmp_path, save_every=save_every), tmp_path)
        planned.check_unused(options_of(tmp_path, save_every=save_every, overwrite=True), tmp_path)
    finished_checkpoint(tmp_path / CHECKPOINTS)  # more epochs
    planned.check_unused(options_of(tmp_path, save_every=5), tmp_path)
    assert "overwrite" not in options_of(tmp_path, overwrite=True).to_yaml()


@pytest.mark.parametrize(("accelerator", "taken"), [("cuda", [1]), ("cpu", [])])
def test_a_gpu_that_nobody_computes_on_is_left_alone(monkeypatch, tmp_path, accelerator, taken):
    """It may be full, or too old for this torch: even to choose it fails then."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("DS_ACCELERATOR", accelerator)
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(ConfigError, match="--column"):
        planned.main(options_of(tmp_path, "a.txt", column=["=text"]))
    assert chosen == taken


def alone(monkeypatch: pytest.MonkeyPatch) -> list[PlanOptions]:
    """Let `plan_run` be of one rank; the plans that it makes."""
    wanted: list[PlanOptions] = []

    def run_plan(console: object, options: PlanOptions, *more: object, **settings: object) -> dict[str, object]:
        wanted.append(options)
        return {"config": {"pipecomp": {}}, "cuts": [0, 1], "chosen": {"replicas": 1}}

    monkeypatch.setattr(planned, "run_plan", run_plan)
    monkeypatch.setattr(planned, "broadcast", lambda value: value)
    monkeypatch.setattr(planned, "gathered", lambda value: [value])
    monkeypatch.setattr(run_folder, "gathered", lambda value: [value])
    monkeypatch.setattr(planned, "check_processes", lambda *given: None)
    monkeypatch.setattr(planned.rendezvous, "all_ranks", lambda: AllRanks(0, 1, torch.distributed.HashStore()))
    monkeypatch.setattr(planned.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(planned.dist, "get_rank", lambda: 0)
    return wanted


def test_the_plan_is_of_the_dropout_that_is_trained_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--dropout changes the model that is built, not the configuration that is planned by."""
    wanted = alone(monkeypatch)
    for number, dropout in enumerate((None, 0.0)):
        given = options_of(tmp_path / str(number), dropout=dropout)
        made, cuts = planned.plan_run(given, planned.recipe_arguments(given), object(), 16, 32)
        assert (tmp_path / str(number) / "ds_config.json").read_text() == json.dumps(made, indent=2) + "\n"
        assert cuts == [0, 1]
    assert [options.dropout for options in wanted] == [None, 0.0]


def test_the_plan_of_the_run_that_is_replaced_survives_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine is lost after the files of the run before are removed, and before the new plan is written."""

    def lose(folder: Path) -> None:
        raise PeerLostError("lost rank 1", 1)

    wanted = alone(monkeypatch)
    monkeypatch.setenv("PIPECOMP_COMMAND", "one")
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    (tmp_path / "plan.json").write_text(
        json.dumps({"config": {**sizes, "pipecomp": {}}, "cuts": [0, 7], "chosen": {"replicas": 1}})
    )
    given = options_of(tmp_path, plan=tmp_path / "plan.json", overwrite=True, elastic=True)
    monkeypatch.setattr(planned, "go_on_without_lost", lose)
    with pytest.raises(PeerLostError):
        planned.plan_run(given, planned.recipe_arguments(given), object(), 16, 32)
    monkeypatch.setenv("PIPECOMP_RESTARTS", "1")
    monkeypatch.setattr(planned, "go_on_without_lost", lambda folder: None)
    assert planned.plan_run(given, planned.recipe_arguments(given), object(), 16, 32)[1] == [0, 7]
    assert not wanted


@pytest.mark.parametrize(("peers", "stages", "threads"), [("a,b", None, 8), ("a,b", 4, 4), (None, 1, None)])
def test_a_dry_run_plans_for_the_machines_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peers: str | None, stages: int | None, threads: int | None
) -> None:
    """One process measures with a rank's share of the cores; nothing is written."""
    made: list[PlanOptions] = []
    monkeypatch.setattr(planned, "run_plan", lambda console, options, *given, **more: made.append(options))
    monkeypatch.setattr(planned, "usable_cores", lambda: 8)
    monkeypatch.setattr(planned.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(planned.dist, "get_rank", lambda: 0)
    together = SimpleNamespace(collective_errors=contextlib.nullcontext)
    monkeypatch.setattr(planned.rendezvous, "all_ranks", lambda: together)
    options = options_of(tmp_path / "out", peers=peers, stages=stages, epochs=2, max_steps=9, batch=8)
    planned.predict_run(options, planned.recipe_arguments(options), "model", 32, 100)
    [found] = made
    K = stages or 2
    assert (found.stages, found.nodes, found.threads) == (K, None if peers is None else K, threads)
    assert (found.batch, found.samples, found.epochs, found.max_steps, found.tokens) == (8, 100, 2, 9, 32)
    assert list(tmp_path.iterdir()) == []


def test_machines_write_the_plan_of_a_shared_folder_at_once(tmp_path, monkeypatch):
    synced = os.fsync

    def other_machine(file: int) -> None:
        monkeypatch.setattr(os, "fsync", synced)
        plan_file.write_here(tmp_path / PLAN, {"cuts": [0, 1]}, 1)
        synced(file)

    monkeypatch.setattr(os, "fsync", other_machine)
    plan_file.write_here(tmp_path / PLAN, {"cuts": [0, 1]}, 0)
    assert [path.name for path in tmp_path.iterdir()] == [planned.PLAN]
    assert json.loads((tmp_path / planned.PLAN).read_text()) == {"cuts": [0, 1]}


def test_a_new_cut_is_for_its_machines_in_their_order(monkeypatch, tmp_path):
    cut = {"cuts": [0, 3, 4], "machines": {"names": ["a", "b"]}, plan_file.RECUT: True}
    assert plan_file.suits(cut, ["a", "b"])
    assert not plan_file.suits(cut, ["b", "a"])
    assert plan_file.suits({"cuts": [0, 2, 4]}, ["b", "a"])
    older = {"cuts": [0, 2, 4], "machines": {"names": ["a", "b"]}}
    monkeypatch.setattr(planned.rendezvous, "all_ranks", lambda: AllRanks(0, 1, torch.distributed.HashStore()))
    for plans, found in (([None, older, cut], cut), ([None, older], older), ([None], None)):
        monkeypatch.setattr(plan_file, "gathered", lambda own, plans=plans: plans)
        assert plan_file.find_plan(tmp_path) == found
