"""What a rank of `pipecomp train` makes of its arguments: batches, kinds of files, configuration, earlier plans."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from pipecomp.checkpoint import manifest
from pipecomp.distributed.rendezvous import AllRanks
from pipecomp.errors import ConfigError, DataError, writable
from pipecomp.plan.options import PlanOptions
from pipecomp.recipes import planned
from pipecomp.report.recorder import PLAN


def arguments(folder: Path, *more: str) -> argparse.Namespace:
    needed = ["--deepspeed_config", f"{folder}/c.json", "--model", "m", "--tokenizer", "m", "--lr", "1e-3"]
    return planned.arguments().parse_args([*needed, "--run", str(folder), *more])


@pytest.mark.parametrize(
    ("samples", "replicas", "batch"), [(1, 1, 1), (62, 1, 32), (62, 2, 32), (62, 3, 30), (62, 6, 30), (7, 5, 5)]
)
def test_replicas_share_the_batch_that_nobody_gave(samples: int, replicas: int, batch: int) -> None:
    assert planned.batch_of(None, samples, replicas) == batch


def test_batches_that_cannot_be() -> None:
    with pytest.raises(DataError, match="the text makes 2 samples, too few for 3 replicas"):
        planned.batch_of(None, 2, 3)
    with pytest.raises(ConfigError, match="--batch: got 9, allowed: at most 8"):
        planned.batch_of(9, 8)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["--train-file", "a.txt", "b.jsonl"], "--data: got 'b.jsonl', allowed: files of one kind"),
        (["--train-file", "b.JSON", "c.jsonl", "a.txt"], "--data: got 'a.txt'"),
        (["--train-file", "a.txt", "--eval-file", "b.jsonl"], "--eval: got 'b.jsonl'"),
        (["--train-file", "b.jsonl", "--eval-file", "a.txt"], "--eval: got 'a.txt'"),
    ],
)
def test_texts_and_json_lines_are_not_mixed(tmp_path: Path, files: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned.holds_documents(arguments(tmp_path, *files))


def test_kinds_of_files(tmp_path: Path) -> None:
    assert planned.holds_documents(arguments(tmp_path, "--train-file", "a.jsonl", "B.JSON", "--eval-file", "c.json"))
    assert not planned.holds_documents(arguments(tmp_path, "--train-file", "a.txt", "b", "--eval-file", "c.md"))


@pytest.mark.parametrize("more", [(), ("--checkpoint", "c")])
def test_bf16_can_be_saved_and_loaded_and_is_summed_in_float32(tmp_path: Path, more: tuple[str, ...]) -> None:
    made = planned.ds_config(arguments(tmp_path, "--dtype", "bf16", *more), {"pipecomp": {}}, tmp_path)
    assert made["bf16"] == {"enabled": True}
    assert made["zero_optimization"] == {"stage": 1}
    assert made["data_types"] == {"grad_accum_dtype": "fp32"}


def test_cluster_centers_lie_where_the_messages_of_samples_would(tmp_path: Path) -> None:
    planned_section = {"activations": {"method": "aqsgd"}, "store": {"clusters": 256}}
    made = planned.ds_config(arguments(tmp_path), {"pipecomp": planned_section}, tmp_path)
    assert made["pipecomp"]["store"] == {"path": str(tmp_path / "messages"), "clusters": 256}


def test_stages_train_their_copies_apart_where_it_is_asked_for(tmp_path: Path) -> None:
    def made(*more: str) -> dict:
        return planned.ds_config(arguments(tmp_path, *more), {"pipecomp": {"seed": 1}}, tmp_path)["pipecomp"]

    assert made() == {"seed": 1}
    assert made("--no-tie") == {"seed": 1, "tie": False}


def test_a_plan_is_for_the_stages_and_processes_that_it_was_made_for(tmp_path: Path) -> None:
    args = arguments(tmp_path, "--checkpoint", str(tmp_path), "--resume", "auto")
    finished_checkpoint(tmp_path)
    (tmp_path / PLAN).write_text(json.dumps({"config": {}, "cuts": [0, 1, 4], "chosen": {"replicas": 2}, "more": 1}))
    assert planned._earlier(args, tmp_path, 2, 4) == {"config": {}, "cuts": [0, 1, 4]}
    with pytest.raises(ConfigError, match="--stages: got 4, allowed: 2, as in the plan of the run that goes on in"):
        planned._earlier(args, tmp_path, 4, 4)
    with pytest.raises(ConfigError, match="number of processes: got 2, allowed: 4, as in the plan"):
        planned._earlier(args, tmp_path, 2, 2)


def test_the_plan_of_a_run_that_goes_on_is_not_made_anew_where_rank_0_is_on_another_machine_now(tmp_path: Path) -> None:
    args = arguments(tmp_path, "--checkpoint", str(tmp_path), "--resume", "auto")
    finished_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=rf"--run: got .* allowed: a folder with the {PLAN} .* where rank 0 was then"):
        planned._earlier(args, tmp_path, 2, 2)


def finished_checkpoint(folder: Path) -> None:
    (folder / "global_step3").mkdir(parents=True)
    manifest.write(folder / "global_step3", 0)


def test_without_a_checkpoint_there_is_no_earlier_plan(tmp_path: Path) -> None:
    """A run that ran out of memory is started again with a smaller --batch: the old plan has the old one's sizes."""
    args = arguments(tmp_path, "--checkpoint", str(tmp_path / "checkpoints"), "--resume", "auto", "--batch", "8")
    (tmp_path / PLAN).write_text(json.dumps({"config": {}, "cuts": [0, 1, 4], "chosen": {"replicas": 2}}))
    (tmp_path / "checkpoints" / "global_step3").mkdir(parents=True)  # not finished
    assert planned._earlier(args, tmp_path, 2, 4) is None


def test_a_run_without_checkpoints_does_not_take_the_folder_of_one_that_has_some(tmp_path: Path) -> None:
    """It would overwrite the plan and the metrics that the other one goes on with, and empty its message store."""
    args = arguments(tmp_path)
    planned.check_unused(args, tmp_path)
    finished_checkpoint(tmp_path / "checkpoints")
    with pytest.raises(
        ConfigError, match=r"--save-every: got None, allowed: a number, as .* has checkpoints: the run goes"
    ):
        planned.check_unused(args, tmp_path)
    planned.check_unused(arguments(tmp_path, "--checkpoint", str(tmp_path / "checkpoints")), tmp_path)


@pytest.mark.parametrize("taken", ["file", "file/below"])
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, taken: str) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / taken
    with pytest.raises(ConfigError) as caught, writable("--run", folder):
        folder.mkdir(parents=True, exist_ok=True)
    told = str(planned.in_words_of_train(caught.value, str(folder)))
    assert told.startswith(f"--out: got '{folder}', allowed: a folder that can be written (")


def test_another_length_than_the_checkpoints_is_told_by_the_arguments_that_set_it() -> None:
    error = ConfigError("--resume", "auto", "the settings of the checkpoint: scheduler.params.total_num_steps is 45")
    told = str(planned.in_words_of_train(error, "run"))
    assert told.endswith("scheduler.params.total_num_steps (by --epochs, --max-steps) is 45")


@pytest.mark.parametrize(("accelerator", "taken"), [("cuda", [1]), ("cpu", [])])
def test_a_gpu_that_nobody_computes_on_is_left_alone(monkeypatch, tmp_path, accelerator, taken):
    """It may be full, or too old for this torch: even to choose it fails then."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("DS_ACCELERATOR", accelerator)
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(ConfigError, match="--data"):
        planned.main(arguments(tmp_path, "--train-file", "a.txt", "b.jsonl"))
    assert chosen == taken


def test_the_plan_is_of_the_dropout_that_is_trained_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--dropout changes the model that is built, not the configuration that is planned by."""
    wanted = []

    def run_plan(console: object, options: PlanOptions, *more: object, **settings: object) -> dict[str, object]:
        wanted.append(options)
        return {"config": {"pipecomp": {}}, "cuts": [0, 1], "chosen": {"replicas": 1}}

    monkeypatch.setattr(planned, "run_plan", run_plan)
    monkeypatch.setattr(planned, "broadcast", lambda value: value)
    monkeypatch.setattr(planned, "check_processes", lambda *given: None)
    monkeypatch.setattr(planned.rendezvous, "all_ranks", lambda: AllRanks(0, 1, torch.distributed.HashStore()))
    monkeypatch.setattr(planned.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(planned.dist, "get_rank", lambda: 0)
    for number, more in enumerate(((), ("--dropout", "0"))):
        planned.configure(arguments(tmp_path / str(number), *more), object(), 16, 32)
    assert [options.dropout for options in wanted] == [None, 0.0]
