"""`pipecomp init` and `pipecomp train` as a user runs them, on one machine; tests/dist/test_train_peers.py has two."""

from __future__ import annotations

import json
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from pipecomp.cli import app
from pipecomp.cli.train import recipe_names, recipes_folder
from pipecomp.plan.options import TrainOptions
from tests import models
from tests.data import tokenizers_for_tests
from tests.limits import HANG_S
from tests.models import metrics, save_model, write_text
from tests.recipes.recipe_runs import environment, run


def told(*arguments: str, status: int = 0) -> str:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == status, done.output
    return " ".join(done.output.split())


class TestInit:
    @pytest.mark.parametrize("recipe", recipe_names())
    def test_a_recipe_stands_on_its_own(self, recipe, tmp_path):
        folder = tmp_path / "mine"
        text = told("init", recipe, str(folder))
        there = {path.name for path in folder.iterdir()}
        assert {path.name for path in (recipes_folder() / recipe).iterdir() if path.is_file()} <= there
        page = (folder / "README.md").read_text()
        assert str(folder / "README.md") in text
        assert f"recipes/{recipe}/" not in page
        assert "](../" not in page
        named = set(re.findall(r"[\w/]*\b(?:\w+\.py|ds_config\w*\.json|llama_tiny\.json)\b", page))
        assert "train.py" in named
        assert [name for name in named if not (folder / name).is_file()] == []

    def test_its_script_starts_in_the_new_folder(self, tmp_path):
        told("init", "gpt2_wikitext2", str(tmp_path))
        done = subprocess.run(
            [sys.executable, "train.py", "--help"], cwd=tmp_path, env=environment(), capture_output=True, text=True,
            timeout=HANG_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "--deepspeed_config" in done.stdout

    def test_nothing_is_overwritten(self, tmp_path):
        (tmp_path / "train.py").write_text("mine")
        text = told("init", "gpt2_wikitext2", str(tmp_path), status=1)
        assert "nothing is overwritten" in text
        assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
        assert (tmp_path / "train.py").read_text() == "mine"

    def test_a_recipe_that_is_not_there(self, tmp_path):
        text = told("init", "gpt5", str(tmp_path / "new"), status=1)
        assert "recipe: got 'gpt5', allowed: chat_lora, chat_qlora, deberta_cola, " in text
        assert not (tmp_path / "new").exists()

    def test_they_are_listed(self):
        text = told("init")
        assert all(name in text for name in recipe_names())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere.txt"], "--data: got 'nowhere.txt', allowed: JSON lines, "),
        (["--data", "empty.txt"], "--data: got 'empty.txt', allowed: a file that is not empty"),
        (["--data", "text.txt", "--eval", "."], "--eval: got 'empty.txt', allowed: a file that is not empty"),
        (["--data", "text.txt", "--documents", "words"], "--documents: got 'words', allowed: files, lines, joined"),
        (["--data", "text.txt", "--loss", "none"], "--loss: got 'none', allowed: assistant, completion, all"),
        (["--data", "text.txt", "--eval-split", "5"], "--eval-split: got 5.0, allowed: a share between 0 and 1"),
        (["--data", "text.txt", "--epochs", "0"], "--epochs: got 0, allowed: a whole number from 1"),
        (["--data", "text.txt", "--stages", "0"], "--stages: got 0, allowed: a whole number from 1"),
        (["--data", "text.txt", "--lr", "inf"], "--lr: got inf, allowed: a number above 0"),
        (["--data", "text.txt", "--seed", "-1"], "--seed: got -1, allowed: a whole number from 0 to 4294967295"),
        (["--data", "text.txt", "--seed", "4294967296"], "--seed: got 4294967296"),
        (["--data", "text.txt", "--peers", "a,-oProxyCommand=b"], "got 'a,-oProxyCommand=b', allowed: host names"),
        (["--data", "text.txt", "--lr", "0"], "--lr: got 0.0, allowed: a number above 0"),
        (["--data", "text.txt", "--dtype", "int8"], "--dtype: got 'int8', allowed: fp32 or bf16"),
        (["--data", "text.txt", "--gradients", "topk"], "--gradients: got 'topk', allowed: none, fp16, global_qsgd,"),
        (["--data", "text.txt", "--dropout", "1"], "--dropout: got 1.0, allowed: 0, or a share below 1"),
        (["--data", "text.txt", "--save-every", "5"], "--out: got None, allowed: a folder: with --save-every"),
        (["--data", "text.txt", "--lora", "0"], "--lora: got 0, allowed: a whole number from 1"),
        (["--data", "text.txt", "--dora"], "--dora: got True, allowed: only with --lora RANK"),
        (["--data", "text.txt", "--lora-alpha", "4"], "--lora-alpha: got 4.0, allowed: only with --lora RANK"),
        (["--data", "text.txt", "--adapter", "a", "--rslora"], "--rslora: got True, allowed: only without --adapter"),
        (["--data", "text.txt", "--adapter", "a", "--lora", "4"], "allowed: only without --lora"),
        (["--data", "text.txt", "--merge"], "--merge: got True, allowed: only with --lora or --adapter"),
        (["--data", "text.txt", "--lora", "4", "--dropout", "0"], "--dropout: got 0.0, allowed: only without adapters"),
        (["--data", "text.txt", "--peers", "a,,b"], "--peers: got 'a,,b', allowed: host names with commas"),
        (["--data", "text.txt", "--peers", "a,a"], "--peers: got 'a,a', allowed: each host once"),
        (["--data", "text.txt", "--peers", "a,b", "--stages", "3"], "--stages: got 3, allowed: a multiple of 2"),
        (["--data", "text.txt", "--peers", "no.such.host.invalid,b"], "host names that this machine can resolve"),
        (["--data", "text.txt", "--spare", "c"], "--spare: got 'c', allowed: only with several --peers"),
        (["--data", "text.txt", "--peers", "a,b", "--spare", "b"], "--spare: got 'b', allowed: machines that are not"),
        (
            ["--data", "text.txt", "--peers", "a,b", "--spare", "c", "--no-elastic"],
            "--spare: got 'c', allowed: only with",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pipecomp.distributed.ssh_launcher.launch_ranks", lambda ranks: pytest.fail("it starts"))
    write_text(tmp_path / "text.txt")
    (tmp_path / "empty.txt").touch()
    assert message in told("train", "--model", "model", *arguments, status=1)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--peers", "a,b"], "--peers: got 'a,b', allowed: only without a launcher"),
        (["--out", "shared", "--spare", "c"], "--spare: got 'c', allowed: only without a launcher"),
        (["--out", "shared", "--elastic"], "--elastic: got True, allowed: only without a launcher"),
        (["--out", "shared", "--dry-run"], "--dry-run: got True, allowed: only without a launcher"),
        ([], "--out"),
    ],
)
def test_under_a_launcher_the_command_is_one_rank(more, message, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "text.txt")
    started = []
    monkeypatch.setattr("os.execv", lambda program, words: started.append(words) or sys.exit(0))
    given = ["train", "--model", "model", "--data", "text.txt"]
    assert message in told(*given, *more, status=1)
    assert started == []
    told(*given, "--out", "shared", "--stages", "2")
    ((python, *words),) = started
    options = TrainOptions.from_json(words[3])
    assert (python, words[:3]) == (sys.executable, ["-P", "-m", "pipecomp.recipes.planned"])
    assert (options.model, options.stages, options.out) == ("model", 2, Path("shared"))
    assert options == TrainOptions(model="model", data=[Path("text.txt")], stages=2, out=Path("shared"))


def test_tasks_that_srun_has_started_without_a_rank_start_nothing(tmp_path, monkeypatch):
    """Each would start a run of its own, all of them in one folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setattr("pipecomp.distributed.ssh_launcher.launch_ranks", lambda ranks: pytest.fail("it starts"))
    write_text(tmp_path / "text.txt")
    message = told("train", "--model", "gpt2", "--data", "text.txt", "--out", "shared", status=1)
    assert "RANK: got None, allowed: a number: srun has started this 2 times, and each would train alone" in message


def test_a_dry_run_says_what_each_machine_would_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "my text.txt")
    monkeypatch.setenv("PIPECOMP_KEYS", "my keys")
    peers = "198.51.100.1,me@198.51.100.2"
    monkeypatch.setattr("pipecomp.distributed.ssh_launcher.launch_ranks", lambda ranks: measuring.append(ranks) or 0)
    measuring = []
    given = ["train", "--model", "gpt2", "--data", "my text.txt", "--peers", peers, "--stages", "4", "--no-tie"]
    text = told(*given, "--dry-run")
    [[alone]] = measuring
    assert (alone.host, alone.variables["WORLD_SIZE"], alone.command[-1]) == (None, "1", "--dry-run")
    assert TrainOptions.from_json(alone.command[-2]).peers == peers
    lines = text.split(" -m pipecomp.recipes.planned")
    assert len(lines) == 5
    for rank, (host, line) in enumerate(zip(["198.51.100.1:", "me@198.51.100.2:"] * 2, sorted(lines[:4]), strict=True)):
        assert "MASTER_ADDR=198.51.100.1 MASTER_PORT=29500" in line, (rank, host)
    assert text.count("me@198.51.100.2: cd ") == text.count(" 198.51.100.1: cd ") + 1 == 2
    assert "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2" in text
    assert "'PIPECOMP_KEYS=my keys'" in text
    for line in lines[1:]:
        program = "-m pipecomp.recipes.planned" + line
        options = TrainOptions.from_json(shlex.split(program)[2])
        assert (options.data, options.stages, options.tie, options.peers) == ([Path("my text.txt")], 4, False, None)
    assert "tie" not in told(*given[:-1], "--dry-run")


def test_a_file_has_the_options_that_the_command_line_does_not_give(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "text.txt")
    monkeypatch.setattr("pipecomp.distributed.ssh_launcher.launch_ranks", lambda ranks: 0)
    (tmp_path / "run.yaml").write_text("model: gpt2\ndata: text.txt\nlora: 4\nlora-alpha: 2\nlr: 1e-3\nepochs: 7\n")
    text = told("train", "--config", "run.yaml", "--epochs", "2", "--dry-run")
    options = TrainOptions.from_json(shlex.split(text[text.index("planned ") :])[1])
    found = (options.model, options.data, options.lora, options.lora_alpha, options.lr, options.epochs)
    assert found == ("gpt2", [Path("text.txt")], 4, 2.0, 1e-3, 2)
    assert "--config: got 'none.yaml', allowed: a file of options" in told("train", "--config", "none.yaml", status=1)


@pytest.mark.parametrize("status", [0, 1])
def test_a_dry_run_measures_the_ranks_of_this_machine_together(tmp_path, monkeypatch, status):
    monkeypatch.chdir(tmp_path)
    measuring = []
    monkeypatch.setattr(
        "pipecomp.distributed.ssh_launcher.launch_ranks", lambda ranks: measuring.append(ranks) or status
    )
    write_text(tmp_path / "text.txt")
    text = told("train", "--model", "gpt2", "--data", "text.txt", "--stages", "3", "--dry-run")
    assert text.count(" -m pipecomp.recipes.planned") == 3, "the commands of the run"
    [ranks] = measuring
    assert [rank.variables["WORLD_SIZE"] for rank in ranks] == ["3"] * 3
    assert all(rank.command[-1] == "--dry-run" for rank in ranks)
    assert ("No duration is predicted" in text) == bool(status)


def test_only_a_dry_run_shows_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    checked = []
    monkeypatch.setattr("pipecomp.distributed.ssh_launcher.check_hosts", checked.append)
    monkeypatch.setattr("pipecomp.distributed.ssh_launcher.launch_ranks", lambda ranks: 0)
    monkeypatch.setattr("pipecomp.distributed.elastic_launcher.launch_elastic", lambda *given, **more: 0)
    write_text(tmp_path / "text.txt")
    given = ["train", "--model", "gpt2", "--data", "text.txt", "--peers", "198.51.100.1,198.51.100.2"]
    text = told(*given)
    assert "rank 1 on 198.51.100.2" in text
    assert "hf_mine" not in text
    assert "cd " not in text
    assert [rank.host for rank in checked[0]] == ["198.51.100.1", "198.51.100.2"]
    assert "HF_TOKEN=hf_mine" in told(*given, "--dry-run")


def test_errors_name_what_people_have_given():
    from pipecomp.errors import ConfigError
    from pipecomp.recipes.planned import translate_error

    told = translate_error(ConfigError("--block-size", 4096, "at most 128, the positions of the model"), "mine")
    assert str(told) == "--tokens: got 4096, allowed: at most 128, the positions of the model"
    told = translate_error(ConfigError("--resume", "auto", "the settings: --block-size is 64 in this run"), "mine")
    assert str(told) == "--out: got 'mine', allowed: the settings: --tokens is 64 in this run"
    told = translate_error(ConfigError("--batch", 99, "at most 9"), "mine")
    assert str(told) == "--batch: got 99, allowed: at most 9"


COMMAND = """train --model model --data text.txt --eval held-out.txt --lr 1e-2 --batch 8 --stages 2 --max-steps 8 \
    --out mine --save-every 4 --store elsewhere"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run, and the same command again; its folder, and what they said."""
    folder = tmp_path_factory.mktemp("train")
    save_model(folder / "model", write_text(folder / "text.txt"))
    write_text(folder / "held-out.txt", lines=40)
    command = [sys.executable, "-m", "pipecomp.cli", *shlex.split(COMMAND)]
    parts = [run(folder, *command) for _ in range(2)]
    assert [part.status for part in parts] == [0, 0], parts
    return folder, *[part.output for part in parts]


@pytest.mark.ranks
@pytest.mark.soak
class TestTrain:
    def test_it_says_what_it_chose_and_why(self, ended):
        _, first, again = ended
        text = " ".join(first.split())
        assert "Stages (measured" in text
        assert "for 8 samples per step, 32 tokens each" in text
        assert "Compressing activations does not pay on these links" in text or "Take AQ-SGD with" in text
        assert "Traceback" not in first
        assert "continues after step 8" in again
        assert "Stages (measured" not in again, "its plan was made before"

    def test_it_trains_and_saves(self, ended):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        out = ended[0] / "mine"
        lines = [line for line in metrics(out) if "loss" in line]
        assert [line["step"] for line in lines] == list(range(1, 9))
        assert lines[-1]["loss"] < lines[0]["loss"]
        assert any("eval" in line for line in metrics(out))
        assert AutoModelForCausalLM.from_pretrained(out / "model").config.n_layer == 2
        AutoTokenizer.from_pretrained(out / "model")

    def test_the_plan_is_beside_the_run_and_is_what_ran(self, ended):
        out = ended[0] / "mine"
        plan, config = (json.loads((out / name).read_text()) for name in ("plan.json", "ds_config.json"))
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            assert plan["config"][key] == config[key]
        assert plan["config"]["pipecomp"].get("activations") == config["pipecomp"].get("activations")
        assert config["optimizer"]["params"]["lr"] == 1e-2
        facts = json.loads((out / "run.json").read_text())
        assert facts["stages"] == len(plan["cuts"]) - 1 == 2
        assert (out / "report.html").stat().st_size > 100_000

    def test_a_plan_of_an_earlier_run_makes_the_same_losses(self, ended):
        folder = ended[0]
        given = "train --model model --data text.txt --lr 1e-2 --max-steps 8 --stages 2 --plan mine/plan.json --out two"
        found = run(folder, sys.executable, "-m", "pipecomp.cli", *given.split())
        assert found.status == 0, found.output
        assert "Stages (measured" not in found.output
        plans = [json.loads((folder / out / "plan.json").read_text()) for out in ("mine", "two")]
        assert plans[0]["config"] == plans[1]["config"]
        losses = [[line["loss"] for line in metrics(folder / out) if "loss" in line] for out in ("mine", "two")]
        assert losses[0] == losses[1]

    def test_a_dry_run_predicts_the_duration_and_writes_nothing(self, ended):
        folder = ended[0]
        given = "train --model model --data text.txt --lr 1e-2 --batch 8 --stages 2 --max-steps 8 --dry-run"
        before = sorted(folder.rglob("*"))
        found = run(folder, sys.executable, "-m", "pipecomp.cli", *given.split())
        assert found.status == 0, found.output
        text = " ".join(found.output.split())
        assert re.search(r" s a step; [\d.]+ m?s for this data: 8 steps of 8 samples", text), found.output
        assert "measured, 1 thread" in text
        assert sorted(folder.rglob("*")) == before

    def test_errors_of_ranks_are_one_line(self, ended):
        folder = ended[0]
        (folder / "latin.txt").write_bytes("Zürich\n".encode("latin-1") * 99)
        found = run(folder, sys.executable, "-m", "pipecomp.cli", "train", "--model", "model", "--data", "latin.txt")
        assert found.status == 1
        assert found.output.count("train: error: latin.txt: not UTF-8: byte 1 is 0xfc") == 1, found.output
        assert "Traceback" not in found.output
        assert not Path(folder, "runs").exists()


@pytest.mark.ranks
@pytest.mark.soak
def test_adapters_in_one_command(tmp_path):
    """The adapter is peft's own, the merged model answers as both together, and training can go on from it."""
    from transformers import AutoModelForCausalLM

    peft = pytest.importorskip("peft")
    save_model(tmp_path / "model", write_text(tmp_path / "text.txt"))
    given = "train --model model --data text.txt --lora 4 --merge --lr 1e-2 --batch 8 --max-steps 8 --out one"
    found = run(tmp_path, sys.executable, "-m", "pipecomp.cli", *given.split())
    assert found.status == 0, found.output
    assert "adapters  LoRA of rank 4, alpha 8, layers: all-linear" in found.output
    assert "merged model saved in one/merged" in found.output
    losses = [line["loss"] for line in metrics(tmp_path / "one") if "loss" in line]
    assert losses[-1] < losses[0] - 0.05
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    ids = torch.arange(9)[None]
    with torch.no_grad():
        plain = base(ids).logits
        expected = peft.PeftModel.from_pretrained(base, tmp_path / "one" / "model")(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "one" / "merged").eval()(ids).logits
    assert torch.allclose(merged, expected, atol=1e-5)
    assert float((expected - plain).abs().max()) > 1e-2
    (tmp_path / "again.yaml").write_text("model: model\ndata: text.txt\nadapter: one/model\nbatch: 8\nmax-steps: 2\n")
    found = run(tmp_path, sys.executable, "-m", "pipecomp.cli", "train", "--config", "again.yaml", "--out", "two")
    assert found.status == 0, found.output
    again = [line["loss"] for line in metrics(tmp_path / "two") if "loss" in line]
    assert again[0] == pytest.approx(losses[-1], abs=0.3)
    assert again[0] < losses[0]


WORDS = "the cat sat on a mat and saw what it was"
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def save_chat_model(folder, make=models.gpt2, **settings):
    """A small model of these words with a chat template; its tokenizer."""
    own = tokenizers_for_tests.split(f"{WORDS} " * 50)
    own.chat_template = TEMPLATE
    make(vocab_size=len(own), **settings).save_pretrained(folder)
    own.save_pretrained(folder)
    return own


def drawn(draw, most):
    return " ".join(draw.choices(WORDS.split(), k=draw.randint(1, most)))


def first_loss(folder, *options):
    """The loss of a run's only step, with all samples in it, and what the run said."""
    given = "train --model model --stages 2 --batch 16 --max-steps 1 --out"
    found = run(folder, sys.executable, "-m", "pipecomp.cli", *given.split(), options[-1].strip("-"), *options)
    assert found.status == 0, found.output
    [line] = [line for line in metrics(folder / options[-1].strip("-")) if "loss" in line]
    return line["loss"], found.output


def mean_loss(folder, samples):
    """The mean loss of transformers over all labels of (tokens, labels), each sample by itself."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    total = learned = 0.0
    for ids, labels in samples:
        labels = torch.tensor([labels])
        count = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            total += float(model(torch.tensor([ids]), labels=labels).loss) * count
        learned += count
    return total / learned


@pytest.mark.ranks
def test_a_chat_is_trained_with_the_loss_of_the_assistant(tmp_path):
    """Packed and padded, the losses are those of transformers on each sample."""
    own = save_chat_model(tmp_path / "model", n_positions=64)
    draw = random.Random(0)
    texts = [[drawn(draw, most) for most in (9, 5)] for _ in range(16)]
    chats = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in texts]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    samples = []
    for chat in chats:
        made = own.apply_chat_template(chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = made["input_ids"], made["assistant_masks"]
        samples.append((ids, [i if one else -100 for i, one in zip(ids, mask, strict=True)]))
    expected = mean_loss(tmp_path / "model", samples)
    for option in ("--packing", "--no-packing"):
        loss, said = first_loss(tmp_path, "--data", "chat.jsonl", option)
        assert loss == pytest.approx(expected, rel=1e-5)
        assert "what the assistant says" in said
        sample = json.loads((tmp_path / option.strip("-") / "sample.json").read_text())
        assert sample == [[f"<|user|>{texts[0][0]}<|assistant|>", False], [f"{texts[0][1]}<|end|>", True]]


@pytest.mark.ranks
def test_documents_are_packed_whole(tmp_path):
    """Packed and padded, the losses are those of transformers on each document; longer ones are divided."""
    own = save_chat_model(tmp_path / "model", n_positions=24)
    draw = random.Random(0)
    texts = [drawn(draw, 20) for _ in range(15)] + [f"{WORDS} " * 4]
    for number in range(2):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[number::2]]
        (tmp_path / f"{number}.jsonl").write_text("".join(lines))
    samples = []
    for text in texts:
        ids = [*own(text)["input_ids"], own.eos_token_id]
        samples += [(ids[at : at + 24],) * 2 for at in range(0, len(ids), 24)]
    expected = mean_loss(tmp_path / "model", samples)
    for option in ("--packing", "--no-packing"):
        data = ["--data", "0.jsonl", "--data", "1.jsonl", "--batch", str(len(samples))]
        loss, _ = first_loss(tmp_path, *data, option)
        assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.ranks
def test_a_model_that_refuses_packing_pads_unless_packing_was_asked_for(tmp_path):
    """BLOOM takes no position_ids."""
    from transformers import BloomConfig, BloomForCausalLM

    def bloom(**settings):
        sizes = {"hidden_size": 32, "n_layer": 4, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0}
        return BloomForCausalLM(BloomConfig(**sizes, **settings))

    save_chat_model(tmp_path / "model", bloom)
    draw = random.Random(0)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": drawn(draw, 20)}) + "\n" for _ in range(16)))
    loss, said = first_loss(tmp_path, "--data", "a.jsonl", "--tokens", "32", "--tie")
    padded, _ = first_loss(tmp_path, "--data", "a.jsonl", "--tokens", "32", "--no-packing")
    assert loss == pytest.approx(padded, rel=1e-6)
    assert "padding samples are padded, not packed: BloomForCausalLM takes no position_ids" in " ".join(said.split())
    given = "train --model model --data a.jsonl --stages 2 --tokens 32 --packing"
    found = run(tmp_path, sys.executable, "-m", "pipecomp.cli", *given.split())
    assert found.status == 1
    assert "packing: BloomForCausalLM takes no position_ids" in found.output
    assert "Traceback" not in found.output
