"""Choice of the checkpoint from which a recipe resumes, and its output."""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipecomp.checkpoint import manifest
from pipecomp.errors import CheckpointError, ConfigError
from pipecomp.recipes import run, steps
from pipecomp.recipes.report import Report
from pipecomp.recipes.resume import RunCheckpoints, lock_folder
from pipecomp.recipes.trainer import RecipeSetup
from pipecomp.stats import Traffic
from tests.limits import HANG_S
from tests.models import made_up_text
from tests.recipes.recipe_runs import ROOT, launch


def checkpoint(folder: Path, step: int, *, manifests: tuple[int, ...] = (0,), **state: dict) -> Path:
    """state: of the recipe, beside the weights."""
    path = folder / f"global_step{step}"
    (path / "inner").mkdir(parents=True)
    torch.save({"module": {}, "recipe": {"lr": 1}, **state}, path / "mp_rank_00_model_states.pt")
    (path / "weights.pt").write_bytes(bytes(range(200)) * 7)
    (path / "inner" / "data.mdb").write_bytes(b"m" * 999)
    (path / "data.tmp").write_bytes(b"left by somebody")
    for rank in manifests:
        manifest.write(path, rank)
    return path


class TestSeals:
    def test_a_whole_one_is_good(self, tmp_path: Path) -> None:
        path = checkpoint(tmp_path, 3, manifests=(0, 4))
        assert manifest.problem(path) is None
        (path / "data.tmp").unlink()  # nobody vouches for it
        assert manifest.problem(path) is None

    def test_each_seal_is_looked_at(self, tmp_path: Path) -> None:
        """Machines without a common disk have files of their own."""
        path = checkpoint(tmp_path, 3)
        (path / "of-another").write_bytes(b"x")
        manifest.write(path, 4)
        (path / "of-another").unlink()
        assert manifest.problem(path) == "of-another is missing"

    def test_what_is_deleted_halfway_is_not_finished(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = checkpoint(tmp_path, 3)
        monkeypatch.setattr(manifest.shutil, "rmtree", lambda folder, ignore_errors: None)
        manifest.remove_after(tmp_path, 2)
        assert not manifest.finished(path)

    def test_without_a_seal_it_was_not_finished(self, tmp_path: Path) -> None:
        assert manifest.problem(checkpoint(tmp_path, 3, manifests=())) == "it was not finished"
        path = checkpoint(tmp_path, 4)
        manifest.remove(path)
        assert manifest.problem(path) == "it was not finished"

    @pytest.mark.parametrize("name", ["weights.pt", "inner/data.mdb"])
    def test_what_changed_is_named(self, tmp_path: Path, name: str) -> None:
        path = checkpoint(tmp_path, 3)
        content = bytearray((path / name).read_bytes())
        content[len(content) // 2] ^= 4
        (path / name).write_bytes(content)
        assert manifest.problem(path) == f"{name} was changed"
        (path / name).write_bytes(content[:-1])
        assert manifest.problem(path) == f"{name} was changed"
        (path / name).unlink()
        assert manifest.problem(path) == f"{name} is missing"

    def test_a_damaged_manifest(self, tmp_path: Path) -> None:
        path = checkpoint(tmp_path, 3)
        (listed,) = path.glob("pipecomp-seal-*")
        for text in ("", "{}", "[]", '{"files": {"weights.pt": 3}}'):
            listed.write_text(text)
            assert "cannot be read" in str(manifest.problem(path)), text

    def test_the_oldest_are_removed(self, tmp_path: Path) -> None:
        for step in (2, 10, 9):
            checkpoint(tmp_path, step)
        (tmp_path / "global_step_mine").mkdir()
        manifest.remove_old(tmp_path, 2, written=10)
        assert list(manifest.steps(tmp_path)) == [9, 10]
        assert (tmp_path / "global_step_mine").is_dir()

    def test_one_that_cannot_be_removed_ends_no_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Somebody has protected it, or the disk takes no writes any more."""
        for step in (5, 10, 15):
            checkpoint(tmp_path, step)
        unlink = Path.unlink

        def refuse(path: Path, missing_ok: bool = False) -> None:
            if path.parent.name == "global_step5":
                raise PermissionError(13, "Permission denied", str(path))
            unlink(path, missing_ok)

        monkeypatch.setattr(Path, "unlink", refuse)
        manifest.remove_old(tmp_path, 1, written=15)
        assert list(manifest.steps(tmp_path)) == [5, 15]
        assert manifest.problem(tmp_path / "global_step5") is None, "it is whole"

    def test_the_one_just_written_stays_and_unfinished_ones_do_not_count(self, tmp_path: Path) -> None:
        for step, manifests in ((5, (0,)), (10, (0, 4)), (12, ()), (15, (0,)), (20, ())):
            checkpoint(tmp_path, step, manifests=manifests)
        manifest.remove_old(tmp_path, 3, written=10)
        assert list(manifest.steps(tmp_path)) == [5, 10, 15]
        manifest.remove_old(tmp_path, 1, written=10)
        assert list(manifest.steps(tmp_path)) == [10]


def test_to_make_room_all_go_but_the_last_good_one(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        checkpoint(tmp_path, step)
    (tmp_path / "global_step15" / "weights.pt").write_bytes(b"")
    manifest.keep_last_good(tmp_path)
    assert list(manifest.steps(tmp_path)) == [10]
    (tmp_path / "global_step10" / "weights.pt").unlink()
    manifest.keep_last_good(tmp_path)
    assert list(manifest.steps(tmp_path)) == [10], "nothing goes where none is good"


def given(*words: str) -> argparse.Namespace:
    parser = run.arguments("mine", "")
    return parser.parse_args(["--deepspeed_config", "c", "--model", "m", "--tokenizer", "t", *words])


class TestArguments:
    @pytest.mark.parametrize(
        "words", [("--resume", "auto"), ("--save-every", "3"), ("--keep", "1"), ("--save-on-signal",)]
    )
    def test_without_a_folder_they_have_no_effect(self, words: tuple[str, ...]) -> None:
        with pytest.raises(ConfigError, match=f"{words[0]}: got .*, allowed: only with --checkpoint"):
            RunCheckpoints(given(*words), {}, {}, {})

    def test_a_run_is_saved_when_it_is_asked_to_stop_unless_told_otherwise(self, tmp_path: Path) -> None:
        folder = ("--checkpoint", str(tmp_path / "c"))
        assert RunCheckpoints(given(*folder), {}, {}, {}).on_signal
        assert RunCheckpoints(given(*folder, "--save-on-signal"), {}, {}, {}).on_signal
        assert not RunCheckpoints(given(*folder, "--no-save-on-signal"), {}, {}, {}).on_signal
        assert not RunCheckpoints(given(), {}, {}, {}).on_signal

    def test_what_deepspeed_cannot_load_is_known_before_training(self, tmp_path: Path) -> None:
        args = given("--checkpoint", str(tmp_path / "c"))
        with pytest.raises(ConfigError, match=r"zero_optimization\.stage 1"):
            RunCheckpoints(args, {"bf16": {"enabled": True}}, {}, {})
        RunCheckpoints(args, {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}, {}, {})

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="--checkpoint"):
            RunCheckpoints(given("--checkpoint", str(tmp_path / "file" / "c")), {}, {}, {})


class Engine:
    """Part of an engine that `RunCheckpoints` needs."""

    global_steps = 0

    def __init__(self, *, exact: bool | None = None) -> None:
        self.resumed = None if exact is None else SimpleNamespace(exact=exact)
        self.saved: list[tuple] = []

    def load_checkpoint(self, folder: str, tag: str) -> tuple[str, dict]:
        self.loaded = (folder, tag)
        return folder, {"recipe_evaluation_due": True}

    def save_checkpoint(self, folder: str, client_state: dict) -> None:
        self.saved.append((folder, client_state))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank."""
    monkeypatch.setattr("pipecomp.distributed.collectives.gathered", lambda mine, group: [mine])
    monkeypatch.setattr("pipecomp.recipes.resume.gathered", lambda mine: [mine])
    monkeypatch.setattr("pipecomp.checkpoint.writing.gathered", lambda mine, group=None: [mine])
    monkeypatch.setenv("LOCAL_RANK", "0")


@pytest.mark.usefixtures("alone")
class TestResume:
    def found(
        self, tmp_path: Path, *more: str, settings: dict | None = None, trained: dict | None = None
    ) -> tuple[RunCheckpoints, str]:
        args = given("--checkpoint", str(tmp_path), "--resume", "auto", *more)
        checkpoints = RunCheckpoints(args, {}, settings or {"lr": 1}, trained or {"--crop": 4})
        return checkpoints, checkpoints.find()

    def test_older_ones_than_a_good_one_are_not_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        read, look = [], manifest.problem
        monkeypatch.setattr(manifest, "problem", lambda path: read.append(path.name) or look(path))
        for step in (1, 2, 3):
            checkpoint(tmp_path, step)
        checkpoint(tmp_path, 4, manifests=())
        assert self.found(tmp_path)[1] == "continues after step 3; skipped step 4: it was not finished"
        assert read == ["global_step4", "global_step3"]

    def test_ranks_meet_while_one_is_reading(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A collective waits half an hour; a checkpoint may take longer to read."""
        met, three_times = [], threading.Event()

        def gathered(mine: object) -> list:
            met.append(mine)
            if met.count(False) == 3:
                three_times.set()
            return [mine]

        monkeypatch.setattr("pipecomp.distributed.collectives.gathered", lambda mine, group: gathered(mine))
        monkeypatch.setattr("pipecomp.recipes.resume.gathered", gathered)
        monkeypatch.setattr("pipecomp.distributed.collectives._ROUND_S", 0.01)
        monkeypatch.setattr(manifest, "problem", lambda path: None if three_times.wait(HANG_S) else "nobody met")
        checkpoint(tmp_path, 3)
        assert self.found(tmp_path)[1] == "continues after step 3"

    def test_begins_where_there_is_none(self, tmp_path: Path) -> None:
        checkpoints, words = self.found(tmp_path)
        assert (checkpoints.step, words) == (0, "no good checkpoint: starts from the beginning")
        engine = Engine()
        assert checkpoints.load(engine) == ""
        assert not hasattr(engine, "loaded")

    def test_goes_on_from_the_last_good_one(self, tmp_path: Path) -> None:
        checkpoint(tmp_path, 5)
        checkpoint(tmp_path, 10)
        (checkpoint(tmp_path, 15) / "weights.pt").write_bytes(b"")
        checkpoint(tmp_path, 20, manifests=())
        checkpoints, words = self.found(tmp_path)
        assert checkpoints.step == 10
        assert words == (
            "continues after step 10; skipped step 15: weights.pt was changed; skipped step 20: it was not finished"
        )
        engine = Engine(exact=True)
        assert checkpoints.load(engine).startswith("with the cached activations of that step")
        assert engine.loaded == (str(tmp_path), "global_step10")
        assert checkpoints.evaluation_due
        assert "in common" in checkpoints.load(Engine(exact=False))
        assert checkpoints.load(Engine()) == "all state restored"

    def test_other_settings_are_refused(self, tmp_path: Path) -> None:
        checkpoint(tmp_path, 5)
        with pytest.raises(ConfigError, match="lr is 2 in this run, 1 in the checkpoint; new is 3 in this run"):
            self.found(tmp_path, settings={"lr": 2, "new": 3})

    def test_what_is_trained_must_be_the_same(self, tmp_path: Path) -> None:
        checkpoint(tmp_path, 5, recipe_trained={"--crop": 4, "--no-flip": False, "hash of the training data": "ab"})
        self.found(tmp_path, trained={"--crop": 4.0, "--no-flip": False, "hash of the training data": "ab"})
        with pytest.raises(ConfigError) as caught:
            self.found(tmp_path, trained={"--crop": 4, "--no-flip": True, "hash of the training data": "cd"})
        told = (
            '--no-flip is true in this run, false in the checkpoint; hash of the training data is "cd" in this run, '
            '"ab" in the checkpoint'
        )
        anew = f"To start over, choose another folder than {tmp_path}"
        assert str(caught.value) == f"--resume: got 'auto', allowed: the settings of the checkpoint: {told}. {anew}"

    def test_another_versions_checkpoint_is_compared_in_what_both_know(self, tmp_path: Path) -> None:
        checkpoint(tmp_path, 5)
        assert self.found(tmp_path)[0].step == 5, "checkpoints had only the configuration once"
        checkpoint(tmp_path, 6, recipe_trained={"--crop": 4, "--gone": 1})
        assert self.found(tmp_path, trained={"--crop": 4, "--new": 1})[0].step == 6
        with pytest.raises(ConfigError, match=r": --crop is 3 in this run, 4 in the checkpoint\. To start over, "):
            self.found(tmp_path, trained={"--crop": 3, "--new": 1})

    def test_how_bytes_go_and_are_kept_may_change(self, tmp_path: Path) -> None:
        before = {"pipecomp.transport.timeout_s": 120, "pipecomp.store.run": None, "pipecomp.store.bits": 8}
        checkpoint(tmp_path, 5, recipe=before)
        after = {"pipecomp.transport.timeout_s": 600, "pipecomp.store.run": "mine", "pipecomp.in_flight": 3}
        assert self.found(tmp_path, settings={**before, **after})[0].step == 5
        with pytest.raises(ConfigError, match=r"pipecomp\.store\.bits is 4 in this run"):
            self.found(tmp_path, settings={**before, "pipecomp.store.bits": 4})

    def test_when_it_saves(self, tmp_path: Path) -> None:
        for more, expected in (((), [3, 6, 7]), (("--save-every", "2"), [2, 4, 6, 7])):
            checkpoints, _ = self.found(tmp_path, *more)
            engine = Engine()
            written = []
            for step in range(1, 8):
                if checkpoints.is_due(step, ends_epoch=step % 3 == 0, last=step == 7):
                    assert checkpoints.save(engine, last=step == 7)
                    written.append(step)
            assert written == expected
            assert engine.saved[0] == (str(tmp_path), {"recipe": {"lr": 1}, "recipe_trained": {"--crop": 4}})
            assert checkpoints.save_now(engine, evaluation_due=True)
            assert engine.saved[-1][1] == {**engine.saved[0][1], "recipe_evaluation_due": True}


def fitted(folder: Path, micro_batches: int, replicas: int, stages: int = 1, **config: Any) -> RecipeSetup:
    """A recipe that goes on from a folder of checkpoints. config: DeepSpeed's, beside the samples of a step."""
    args = given("--checkpoint", str(folder), "--resume", "auto")
    config |= {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": micro_batches}
    plan = steps.make_plan(config, samples=100, replicas=replicas, epochs=3, max_steps=None)
    return RecipeSetup.of(args, config, plan, {}, stages)


class Writing(Engine):
    """Writes checkpoints, whole ones, but as often as is said none."""

    refusals = 0

    def save_checkpoint(self, folder: str, client_state: dict) -> None:
        if self.refusals:
            self.refusals -= 1
            raise CheckpointError("no room")
        checkpoint(Path(folder), self.global_steps)


@pytest.mark.usefixtures("alone")
class TestWhoseTheyAre:
    @pytest.mark.parametrize(("last", "then"), [(False, "the run continues"), (True, "the run ends")])
    def test_what_becomes_of_a_run_that_cannot_write(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, last: bool, then: str
    ) -> None:
        engine = Writing()
        engine.refusals = 2
        assert not RunCheckpoints(given("--checkpoint", str(tmp_path)), {}, {"lr": 1}, {}).save(engine, last=last)
        assert f"{then} without this checkpoint" in "".join(capsys.readouterr())

    def test_a_run_does_not_begin_where_another_has_checkpoints(self, tmp_path: Path) -> None:
        args = given("--checkpoint", str(tmp_path))
        assert RunCheckpoints(args, {}, {"lr": 1}, {}).find() == ""
        checkpoint(tmp_path, 900)
        checkpoint(tmp_path, 1000, manifests=())
        with pytest.raises(ConfigError) as caught:
            RunCheckpoints(args, {}, {"lr": 1}, {}).find()
        told = "a folder without checkpoints. It has step 900, 1000; --resume auto resumes from the last good one."
        assert str(caught.value) == f"--checkpoint: got '{tmp_path}', allowed: {told}"

    def test_nor_goes_one_on_with_other_samples_of_a_step(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As with another number of replicas: steps that are made would stand for other passes over the data."""
        monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)  # rank 0 would hold the folder
        path = tmp_path / "checkpoints"

        def fit(replicas: int, micro_batches: int, total: int | str = "auto") -> RecipeSetup:
            scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": total}}
            return fitted(path, micro_batches, replicas, scheduler=scheduler)

        assert fit(1, 2).plan.steps != fit(2, 1).plan.steps, "an epoch leaves out other samples"
        one = fit(1, 2).checkpoints
        checkpoint(path, 3, recipe=one._settings, recipe_trained=one._trained)
        assert one.find() == "continues after step 3"
        with pytest.raises(ConfigError, match="samples of a step is 16 in this run, 8 in the checkpoint"):
            fit(2, 2).checkpoints.find()
        assert fit(2, 1).checkpoints.find() == "continues after step 3", "as many samples, otherwise shared"
        with pytest.raises(ConfigError, match="total_num_steps is 500 in this run"):
            fit(2, 1, 500).checkpoints.find()

    def test_one_stage_or_one_replica_goes_on_without_settings_of_what_several_exchange(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)  # rank 0 would hold the folder
        path = tmp_path / "checkpoints"

        def fit(stages: int, replicas: int, **section: dict) -> RunCheckpoints:
            return fitted(path, 4 // replicas, replicas, stages, pipecomp=section).checkpoints

        links = {"activations": {"method": "aqsgd"}, "store": {"bits": 8}}
        replicas = {"gradients": {"method": "global_qsgd"}}
        both = fit(2, 2, **links, **replicas)
        checkpoint(path, 3, recipe=both._settings, recipe_trained=both._trained)
        assert fit(1, 2, **replicas).find() == "continues after step 3"
        assert fit(2, 1, **links).find() == "continues after step 3"
        with pytest.raises(ConfigError, match=r"pipecomp\.gradients\.method is \"none\" in this run"):
            fit(1, 2).find()
        with pytest.raises(ConfigError, match=r"pipecomp\.activations\.method is \"none\" in this run"):
            fit(2, 1).find()
        tied = fit(2, 1, **links, **replicas)  # whose two stages share weights
        checkpoint(path, 4, recipe=tied._settings, recipe_trained=tied._trained)
        assert fit(1, 1).find() == "continues after step 4"
        alone = fit(1, 1)
        checkpoint(path, 5, recipe=alone._settings, recipe_trained=alone._trained)
        assert both.find() == "continues after step 5", "with what has come back"

    def test_nor_where_another_machine_has_some(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pipecomp.recipes.resume.gathered", lambda mine: [mine, [], [900], []])
        with pytest.raises(ConfigError, match="It has step 900;"):
            RunCheckpoints(given("--checkpoint", str(tmp_path)), {}, {"lr": 1}, {}).find()

    def test_what_it_was_taken_back_from_goes_before_it_writes(self, tmp_path: Path) -> None:
        """Killed while it wrote step 187, after which another machine has lost step 120."""
        for step, manifests in ((50, (0,)), (100, (0,)), (120, (0,)), (187, ())):
            checkpoint(tmp_path, step, manifests=manifests)
        checkpoints = RunCheckpoints(given("--checkpoint", str(tmp_path), "--resume", "auto"), {}, {"lr": 1}, {})
        checkpoints.find()
        checkpoints.step = 100
        engine = Writing()
        checkpoints.load(engine)
        assert list(manifest.steps(tmp_path)) == [50, 100, 120, 187], "until there is something in their place"
        for before, engine.global_steps in ((100, 110), (110, 187)):
            assert checkpoints.save_now(engine)
            assert list(manifest.steps(tmp_path)) == [before, engine.global_steps]
            assert manifest.problem(tmp_path / f"global_step{engine.global_steps}") is None

    def test_a_run_that_finds_none_that_is_good_keeps_its_own(self, tmp_path: Path) -> None:
        checkpoint(tmp_path, 900, manifests=())
        checkpoints = RunCheckpoints(given("--checkpoint", str(tmp_path), "--resume", "auto"), {}, {"lr": 1}, {})
        checkpoints.find()
        engine = Writing()
        for engine.global_steps in (100, 200, 300):
            checkpoints.save_now(engine)
        assert list(manifest.steps(tmp_path)) == [200, 300]

    @pytest.mark.parametrize("keep", [1, 3])
    def test_as_many_are_kept_as_it_is_told(self, tmp_path: Path, keep: int) -> None:
        checkpoints = RunCheckpoints(given("--checkpoint", str(tmp_path), "--keep", str(keep)), {}, {"lr": 1}, {})
        engine = Writing()
        for engine.global_steps in range(1, 6):
            checkpoints.save_now(engine)
        assert list(manifest.steps(tmp_path)) == [1, 2, 3, 4, 5][-keep:]

    @pytest.mark.parametrize("refusals", [1, 2])
    def test_a_disk_that_refuses_is_asked_once_more_without_the_older_ones(self, tmp_path: Path, refusals: int) -> None:
        checkpoints = RunCheckpoints(given("--checkpoint", str(tmp_path)), {}, {"lr": 1}, {})
        engine = Writing()
        for engine.global_steps in (1, 2):
            checkpoints.save_now(engine)
        engine.global_steps, engine.refusals = 3, refusals
        assert checkpoints.save_now(engine) is (refusals == 1)
        assert list(manifest.steps(tmp_path)) == [2, 3][: 3 - refusals]


def test_metrics_go_on(tmp_path: Path) -> None:
    """Lines after the checkpoint's step are written anew, and bytes are counted from the start of the first run."""

    def traffic(count: int) -> Traffic:
        link = {f"{d}_bytes_{k}": count for d in ("forward", "backward", "evaluation") for k in ("raw", "sent")}
        return Traffic({"0->1": link}, {"data parallel": {"bytes_raw": count, "bytes_sent": count}})

    def run(after: int, first: int, last: int, counted: int) -> None:
        with Report(str(tmp_path / "m.jsonl"), None, silent=False, after=after) as report:
            plan = steps.Plan(steps=9, per_epoch=3, micro_batch=1, accumulation=1, replicas=1)
            report.start(given(), plan, Config(), 2, 3, 1)
            for step in range(first, last + 1):
                epoch = plan.epoch(step)
                report.step(step, epoch, loss=float(step), lr=0.1, per_s=1.0, traffic=traffic(10 * (step - counted)))
                if plan.ends_epoch(step):
                    report.epoch(step, epoch, {"loss": 0.0}, traffic(10 * (step - counted) + 1))

    from pipecomp.config import Config

    run(0, 1, 5, 0)
    with (tmp_path / "m.jsonl").open("a") as file:
        file.write('{"step": 6, "epo')  # killed in the middle
    run(4, 5, 7, 4)
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 3, 4, 5, 6, 6, 7]
    sent = [line["links"]["0->1"]["forward_bytes_sent"] for line in lines]
    assert sent == [10, 20, 30, 31, 40, 50, 60, 61, 70]
    assert [line["groups"]["data parallel"]["bytes_raw"] for line in lines] == sent
    assert [line["train_loss"] for line in lines if "eval" in line] == [2.0, 5.0]


@pytest.mark.parametrize("period", ["epoch", "round"])
def test_without_metrics_losses_and_bytes_are_those_of_the_runs_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], period: str
) -> None:
    """An epoch's mean is over all of its steps, and bytes are since the start, also of those before a break."""
    from pipecomp.config import Config

    link = {f"{d}_bytes_{k}": 3000 for d in ("forward", "backward", "evaluation") for k in ("raw", "sent")}
    kept = [{"step": 3, "epoch": 1, "loss": 1.0}, {"step": 3, "eval": {"loss": 1.0}}]
    kept += [{"step": 4, "epoch": 2, "loss": 4.0, "links": {"0->1": link}, "groups": {}}]
    plan = steps.Plan(steps=6, per_epoch=3, micro_batch=1, accumulation=1, replicas=1)
    with Report(None, None, silent=False, period=period, after=4, kept=kept) as report:
        report.start(given(), plan, Config(), 2, 3, 1)
        for step in (5, 6):
            report.step(step, 2, loss=7.0, lr=0.1, per_s=1.0, traffic=Traffic({"0->1": link}, {}))
        report.epoch(6, 2, None, Traffic({"0->1": link}, {}))
        report.end(Traffic({"0->1": link}, {}), None)
    said = capsys.readouterr().out
    assert f"{period} 2 done in 0 s: mean training loss 6.0000" in said
    assert "link 0->1: forward 6.0 kB" in said


def test_the_checkpoint_that_is_good_on_every_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine lacks the newest one here, and has one more; second ranks of machines say nothing."""
    for step in (10, 20, 30):
        checkpoint(tmp_path, step)

    told = [(None, {}), ([40, 20, 10], {30: "it was not finished"}), (None, {})]
    monkeypatch.setattr("pipecomp.recipes.resume.while_others_wait", lambda act: act())
    monkeypatch.setattr("pipecomp.recipes.resume.gathered", lambda mine: [mine, *told])
    monkeypatch.setenv("LOCAL_RANK", "0")
    checkpoints = RunCheckpoints(given("--checkpoint", str(tmp_path), "--resume", "auto"), {}, {"lr": 1}, {})
    said = checkpoints.find()
    assert checkpoints.step == 20
    assert said == "continues after step 20; skipped step 30: it was not finished"


def test_a_run_does_not_begin_anew_where_one_machine_alone_has_lost_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next checkpoint would take the place of those that the others have. One that was killed leaves some file."""
    for step in (10, 20):
        checkpoint(tmp_path, step)
    others: list[tuple] = [(None, {}), ([], {}), (None, {})]

    monkeypatch.setattr("pipecomp.recipes.resume.while_others_wait", lambda act: act())
    monkeypatch.setattr("pipecomp.recipes.resume.gathered", lambda mine: [mine, *others])
    checkpoints = RunCheckpoints(given("--checkpoint", str(tmp_path), "--resume", "auto"), {}, {"lr": 1}, {})
    with pytest.raises(ConfigError, match="rank 2's machine has no checkpoints, and others have step 10, 20"):
        checkpoints.find()
    others[1] = ([], {20: "weights.pt was changed", 30: "it was not finished"})
    told = r"rank 2.s machine has no good ones \(step 20: weights.pt was changed; step 30: .*\), and others have step"
    with pytest.raises(ConfigError, match=told):
        checkpoints.find()
    others[1] = ([30], {20: "weights.pt was changed"})
    with pytest.raises(ConfigError, match=r"no step is good on all, rank 0's has step 20, 10; rank 2's has step 30\."):
        checkpoints.find()
    others[1] = ([], {20: "it was not finished"})
    assert checkpoints.find().startswith("no good checkpoint: starts")


def test_one_run_at_a_time_writes_to_a_folder(tmp_path: Path) -> None:
    def hold(until: int, *others: int) -> None:
        for descriptor in others:
            os.close(descriptor)
        lock_folder("--out", tmp_path)
        lock_folder("--out", tmp_path)  # it is its own
        child = os.fork()
        if child == 0:  # and outlives the run
            os.close(until)
            (tmp_path / "forked").touch()  # until then it still has the run's files
            os.read(forever, 1)
            os._exit(0)
        (tmp_path / "held").touch()
        os.read(until, 1)
        os._exit(0)

    forever, end_all = os.pipe()
    until, end = os.pipe()
    holder = os.fork()
    if holder == 0:
        hold(until, end, end_all)
    while not ((tmp_path / "held").exists() and (tmp_path / "forked").exists()):
        time.sleep(0.01)
    with pytest.raises(ConfigError, match=r"--out: got '.*', allowed: another folder: this one is in use"):
        lock_folder("--out", tmp_path)
    os.close(end)
    os.waitpid(holder, 0)
    lock_folder("--out", tmp_path)
    for descriptor in (end_all, until, forever):
        os.close(descriptor)


@pytest.mark.ranks
def test_a_run_goes_on_with_the_losses_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(made_up_text(60, 0))
    config = str(ROOT / "recipes" / "gpt2_wikitext2" / "ds_config_cpu_fp32.json")
    files = ["--train-file", "a.txt", "--eval-file", "a.txt", "--metrics", "m.jsonl", "--out", "run"]
    model = ["--model", "tiny", "--tokenizer", "train:300", "--block-size", "16", "--dropout", "0.1"]
    files += ["--epochs", "2", "--max-steps", "4"]
    saving = ["--checkpoint", "saved", "--resume", "auto", "--save-every", "2"]

    def trained() -> tuple[str, list[dict[str, Any]]]:
        ended = launch(tmp_path, "gpt2_wikitext2", "--deepspeed_config", config, *model, *files, *saving, processes=1)
        assert ended.status == 0, ended.output
        lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
        return ended.output, [line.get("eval") or {key: line[key] for key in ("step", "loss", "lr")} for line in lines]

    _, whole = trained()
    manifest.remove(tmp_path / "saved" / "global_step4")  # as if it was killed while it wrote that
    said, resumed = trained()
    assert "continues after step 2; skipped step 4: it was not finished" in said
    assert resumed == whole
    assert "continues after step 4" in trained()[0], "with nothing left to train"
