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
from transformers import TrainerState

from pipecomp.checkpoint import manifest
from pipecomp.errors import ConfigError
from pipecomp.recipes import run, steps
from pipecomp.recipes import text as recipe_text
from pipecomp.recipes.report import Report
from pipecomp.recipes.resume import (
    DATA,
    RunCheckpoints,
    check_no_results,
    loaded_text,
    lock_folder,
    what_is_trained,
)
from pipecomp.recipes.trainer import RecipeSetup
from pipecomp.report.recorder import RUN
from pipecomp.stats import Traffic
from pipecomp.trainer.checkpoints import DEEPSPEED, complete
from tests.models import made_up_text
from tests.recipes.recipe_runs import ROOT, launch


def checkpoint(folder: Path, step: int, *, manifests: tuple[int, ...] = (0,), **run: dict) -> Path:
    """Return the folder of the engine's files. run: settings of the run, as they are recorded."""
    whole = folder / f"checkpoint-{step}"
    path = whole / DEEPSPEED
    (path / "inner").mkdir(parents=True)
    plan: Any = SimpleNamespace(cuts=(0, 1))
    complete(str(whole), TrainerState(global_step=step), plan, 1, run={"settings": {"lr": 1}, **run})
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


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank."""
    monkeypatch.setattr("pipecomp.distributed.collectives.gathered", lambda mine, group: [mine])
    for module in ("pipecomp.recipes.resume", "pipecomp.trainer.checkpoints", "pipecomp.distributed.collectives"):
        monkeypatch.setattr(f"{module}.gathered", lambda mine, group=None: [mine])
    monkeypatch.setattr("pipecomp.trainer.checkpoints.broadcast", lambda mine, group=None: mine)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setenv("LOCAL_RANK", "0")


@pytest.mark.usefixtures("alone")
class TestResume:
    def found(
        self, tmp_path: Path, *more: str, settings: dict | None = None, trained: dict | None = None
    ) -> tuple[RunCheckpoints, str]:
        args = given("--checkpoint", str(tmp_path), "--resume", "auto", *more)
        checkpoints = RunCheckpoints(args, {}, settings or {"lr": 1}, trained or {"--crop": 4})
        return checkpoints, checkpoints.find()

    def test_begins_where_there_is_none(self, tmp_path: Path) -> None:
        checkpoints, words = self.found(tmp_path)
        assert (checkpoints.step, words) == (0, "no good checkpoint: starts from the beginning")

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
        assert loaded_text(SimpleNamespace(exact=True)).startswith("with the cached activations of that step")
        assert "in common" in loaded_text(SimpleNamespace(exact=False))
        assert loaded_text(None) == "all state restored"

    def test_other_settings_are_refused(self, tmp_path: Path) -> None:
        checkpoint(tmp_path, 5)
        with pytest.raises(ConfigError, match="lr is 2 in this run, 1 in the checkpoint; new is 3 in this run"):
            self.found(tmp_path, settings={"lr": 2, "new": 3})

    def test_what_is_trained_must_be_the_same(self, tmp_path: Path) -> None:
        checkpoint(tmp_path, 5, trained={"--crop": 4, "--no-flip": False, "hash of the training data": "ab"})
        self.found(tmp_path, trained={"--crop": 4.0, "--no-flip": False, "hash of the training data": "ab"})
        with pytest.raises(ConfigError) as caught:
            self.found(tmp_path, trained={"--crop": 4, "--no-flip": True, "hash of the training data": "cd"})
        told = (
            '--no-flip is true in this run, false in the checkpoint; hash of the training data is "cd" in this run, '
            '"ab" in the checkpoint'
        )
        anew = f"To start over, give --overwrite or another folder than {tmp_path}"
        assert str(caught.value) == f"--resume: got 'auto', allowed: the settings of the checkpoint: {told}. {anew}"

    def test_another_versions_checkpoint_is_compared_in_what_both_know(self, tmp_path: Path) -> None:
        checkpoint(tmp_path, 5)
        assert self.found(tmp_path)[0].step == 5, "checkpoints had only the configuration once"
        checkpoint(tmp_path, 6, trained={"--crop": 4, "--gone": 1})
        assert self.found(tmp_path, trained={"--crop": 4, "--new": 1})[0].step == 6
        with pytest.raises(ConfigError, match=r": --crop is 3 in this run, 4 in the checkpoint\. To start over, "):
            self.found(tmp_path, trained={"--crop": 3, "--new": 1})

    def test_how_bytes_go_and_are_kept_may_change(self, tmp_path: Path) -> None:
        before = {"pipecomp.transport.timeout_s": 120, "pipecomp.store.run": None, "pipecomp.store.bits": 8}
        checkpoint(tmp_path, 5, settings=before)
        after = {"pipecomp.transport.timeout_s": 600, "pipecomp.store.run": "mine", "pipecomp.in_flight": 3}
        assert self.found(tmp_path, settings={**before, **after})[0].step == 5
        with pytest.raises(ConfigError, match=r"pipecomp\.store\.bits is 4 in this run"):
            self.found(tmp_path, settings={**before, "pipecomp.store.bits": 4})

    def test_when_it_saves(self, tmp_path: Path) -> None:
        for more, expected in (((), [3, 6, 7]), (("--save-every", "2"), [2, 4, 6, 7])):
            checkpoints, _ = self.found(tmp_path, *more)
            due = [step for step in range(1, 8) if checkpoints.is_due(step, ends_epoch=step % 3 == 0, last=step == 7)]
            assert due == expected
            assert checkpoints.record() == {"settings": {"lr": 1}, "trained": {"--crop": 4}}


CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
    "pipecomp": {"activations": {"method": "aqsgd", "forward_bits": 4}, "store": {"path": "m"}},
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("words", "section", "config", "refused"),
    [
        (["--epochs", "5"], {}, {}, ""),
        (["--max-steps", "70"], {}, {}, ""),
        (["--out", "o", "--save", "s", "--metrics", "m", "--trace", "t", "--no-report", "--keep", "5"], {}, {}, ""),
        (["--eval-file", "e", "--save-every", "9", "--no-save-on-signal", "--deepspeed_config", "other"], {}, {}, ""),
        ([], {"transport": {"timeout_s": 600}, "in_flight": 3}, {}, ""),
        ([], {"store": {"path": "m", "in_checkpoints": True, "on_write_error": "continue", "overwrite": True}}, {}, ""),
        ([], {}, {"gradient_accumulation_steps": 4}, "samples of a step"),
        ([], {}, {"optimizer": {"type": "AdamW", "params": {"lr": 2e-3}}}, "optimizer.params.lr"),
        ([], {}, {"gradient_clipping": 1.0}, "gradient_clipping"),
        ([], {"activations": {"method": "aqsgd", "forward_bits": 3}}, {}, "pipecomp.activations.forward_bits"),
        (["--seed", "7"], {}, {}, "pipecomp.seed"),
        (["--dropout", "0.2"], {}, {}, "--dropout"),
        (["--block-size", "64"], {}, {}, "--block-size"),
        (["--train-file", "other"], {}, {}, DATA),
    ],
)
def test_what_may_change_on_resuming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], section: dict, config: dict, refused: str
) -> None:
    """The rows of the table in docs/reliability.md, for recipes and `pipecomp train`."""
    monkeypatch.setattr("pipecomp.recipes.trainer.lock_folder", lambda argument, folder: None)

    def setup(*words: str, **config: Any) -> RunCheckpoints:
        parser = run.arguments("mine", "")
        recipe_text.add_arguments(parser)
        required = ["--deepspeed_config", "c", "--model", "m", "--tokenizer", "t", "--train-file", "a"]
        saving = ["--checkpoint", str(tmp_path), "--resume", "auto"]
        args = parser.parse_args([*required, *saving, *words])
        whole = json.loads(json.dumps({**CONFIG, **config}))
        plan = steps.make_plan(whole, samples=200, replicas=1, epochs=args.epochs, max_steps=args.max_steps)
        trained = what_is_trained(args, {DATA: " ".join(args.train_file)})
        return RecipeSetup.of(args, whole, plan, trained, 2).checkpoints

    checkpoint(tmp_path, 20, **setup().record())
    resumed = setup(*words, **config, pipecomp={**CONFIG["pipecomp"], **section})
    if not refused:
        assert resumed.find() == "continues after step 20"
        return
    with pytest.raises(ConfigError, match=f"the settings of the checkpoint: .*{refused} is "):
        resumed.find()


def test_what_another_run_has_finished_is_not_overwritten(tmp_path: Path) -> None:
    out, model = tmp_path / "out", tmp_path / "model"
    check_no_results(out, model)
    out.mkdir()
    (out / RUN).write_text('{"status": "interrupted"}')
    check_no_results(out, model)
    (out / RUN).write_text('{"status": "finished"}')
    with pytest.raises(ConfigError, match=r"--out: got .* allowed: a folder without a finished run. --overwrite "):
        check_no_results(out, model)
    model.mkdir()
    (model / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"--save: got .* allowed: a folder without a trained model. --overwrite "):
        check_no_results(None, model)


def fitted(folder: Path, micro_batches: int, replicas: int, stages: int = 1, **config: Any) -> RecipeSetup:
    """A recipe that goes on from a folder of checkpoints. config: DeepSpeed's, beside the samples of a step."""
    args = given("--checkpoint", str(folder), "--resume", "auto")
    config |= {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": micro_batches}
    plan = steps.make_plan(config, samples=100, replicas=replicas, epochs=3, max_steps=None)
    return RecipeSetup.of(args, config, plan, {}, stages)


@pytest.mark.usefixtures("alone")
class TestWhoseTheyAre:
    def test_a_run_does_not_begin_where_another_has_checkpoints(self, tmp_path: Path) -> None:
        args = given("--checkpoint", str(tmp_path))
        assert RunCheckpoints(args, {}, {"lr": 1}, {}).find() == ""
        checkpoint(tmp_path, 900)
        checkpoint(tmp_path, 1000, manifests=())
        with pytest.raises(ConfigError) as caught:
            RunCheckpoints(args, {}, {"lr": 1}, {}).find()
        told = "a folder without checkpoints. It has step 900, 1000; --resume auto resumes from the last good one. -"
        assert str(caught.value).startswith(f"--checkpoint: got '{tmp_path}', allowed: {told}")
        checkpoints = RunCheckpoints(given("--checkpoint", str(tmp_path), "--overwrite"), {}, {"lr": 1}, {})
        assert (checkpoints.find(), checkpoints.found) == ("", None)

    def test_older_ones_are_named(self, tmp_path: Path) -> None:
        (tmp_path / "global_step30").mkdir()
        with pytest.raises(ConfigError, match=r"It has global_step30 of an earlier version, which engine\.load_"):
            RunCheckpoints(given("--checkpoint", str(tmp_path), "--resume", "auto"), {}, {"lr": 1}, {}).find()

    def test_nor_goes_one_on_with_other_samples_of_a_step(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As with another number of replicas: steps that are made would stand for other passes over the data."""
        monkeypatch.setattr("pipecomp.recipes.trainer.lock_folder", lambda argument, folder: None)
        path = tmp_path / "checkpoints"

        def fit(replicas: int, micro_batches: int, total: int | str = "auto") -> RecipeSetup:
            scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": total}}
            return fitted(path, micro_batches, replicas, scheduler=scheduler)

        assert fit(1, 2).plan.steps != fit(2, 1).plan.steps, "an epoch leaves out other samples"
        one = fit(1, 2).checkpoints
        checkpoint(path, 3, settings=one._settings, trained=one._trained)
        assert one.find() == "continues after step 3"
        with pytest.raises(ConfigError, match="samples of a step is 16 in this run, 8 in the checkpoint"):
            fit(2, 2).checkpoints.find()
        assert fit(2, 1).checkpoints.find() == "continues after step 3", "as many samples, otherwise shared"
        with pytest.raises(ConfigError, match="total_num_steps is 500 in this run"):
            fit(2, 1, 500).checkpoints.find()

    def test_one_stage_or_one_replica_goes_on_without_settings_of_what_several_exchange(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pipecomp.recipes.trainer.lock_folder", lambda argument, folder: None)
        path = tmp_path / "checkpoints"

        def fit(stages: int, replicas: int, **section: dict) -> RunCheckpoints:
            return fitted(path, 4 // replicas, replicas, stages, pipecomp=section).checkpoints

        links = {"activations": {"method": "aqsgd"}, "store": {"bits": 8}}
        replicas = {"gradients": {"method": "global_qsgd"}}
        both = fit(2, 2, **links, **replicas)
        checkpoint(path, 3, settings=both._settings, trained=both._trained)
        assert fit(1, 2, **replicas).find() == "continues after step 3"
        assert fit(2, 1, **links).find() == "continues after step 3"
        with pytest.raises(ConfigError, match=r"pipecomp\.gradients\.method is \"none\" in this run"):
            fit(1, 2).find()
        with pytest.raises(ConfigError, match=r"pipecomp\.activations\.method is \"none\" in this run"):
            fit(2, 1).find()
        tied = fit(2, 1, **links, **replicas)  # whose two stages share weights
        checkpoint(path, 4, settings=tied._settings, trained=tied._trained)
        assert fit(1, 1).find() == "continues after step 4"
        alone = fit(1, 1)
        checkpoint(path, 5, settings=alone._settings, trained=alone._trained)
        assert both.find() == "continues after step 5", "with what has come back"

    def test_nor_where_another_machine_has_some(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pipecomp.recipes.resume.gathered", lambda mine: [mine, [[], []], [[900], []], [[], []]])
        with pytest.raises(ConfigError, match="It has step 900;"):
            RunCheckpoints(given("--checkpoint", str(tmp_path)), {}, {"lr": 1}, {}).find()


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


def test_one_run_at_a_time_writes_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setenv("PIPECOMP_RESTARTS", "1")  # then a rank of the start before may still end
    threading.Timer(0.5, os.close, [end]).start()
    lock_folder("--out", tmp_path)
    os.waitpid(holder, 0)
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

    def trained(*more: str) -> tuple[str, list[dict[str, Any]]]:
        words = ["--deepspeed_config", config, *model, *files, *saving, *more]
        ended = launch(tmp_path, "gpt2_wikitext2", *words, processes=1)
        assert ended.status == 0, ended.output
        lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
        return ended.output, [line.get("eval") or {key: line[key] for key in ("step", "loss", "lr")} for line in lines]

    _, whole = trained()
    manifest.remove(tmp_path / "saved" / "checkpoint-4" / DEEPSPEED)  # as if it was killed while it wrote that
    said, resumed = trained()
    assert "continues after step 2; skipped step 4: it was not finished" in said
    assert resumed == whole
    assert "continues after step 4" in trained()[0], "with nothing left to train"
    said, longer = trained("--epochs", "4", "--max-steps", "8")
    assert "continues after step 4" in said
    assert [line["step"] for line in longer if "step" in line] == list(range(1, 9))
    assert longer[:4] == whole[:4]
    rates = [line["lr"] for line in longer if "lr" in line][4:]
    assert rates == pytest.approx([1e-3 * (9 - step) / (8 - 2) for step in range(4, 8)])  # those of eight steps
    assert not any((tmp_path / "saved" / f"checkpoint-{step}").exists() for step in (2, 4))
