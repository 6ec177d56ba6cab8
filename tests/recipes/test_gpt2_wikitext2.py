"""The recipe as a user runs it: DeepSpeed's launcher, two processes, text files, a tokenizer folder."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch

from pipecomp.report.reader import read_runs
from pipecomp.report.recorder import METRICS, PAGE, RANKS, RUN, TRACE
from tests.models import made_up_text
from tests.recipes.recipe_runs import Ended, launch, launch_deepspeed, run_script

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "gpt2_wikitext2"
DATA = ROOT.parent / "shared" / "data"
BLOCK, WIDTH, MICRO, ACCUMULATION, EPOCHS, BITS = 32, 64, 4, 2, 2, 4

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, a bare GPT-2 tokenizer folder, a model's config and a DeepSpeed configuration."""
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("recipe")
    (folder / "one.txt").write_text(made_up_text(250, 0))
    (folder / "two.txt").write_text(made_up_text(150, 1))
    (folder / "held-out.txt").write_text(made_up_text(78, 2))
    bpe = ByteLevelBPETokenizer()
    bpe.train([str(folder / "one.txt")], vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    (folder / "tokenizer").mkdir()
    bpe.save_model(str(folder / "tokenizer"))
    size = bpe.get_vocab_size()
    model = {"model_type": "gpt2", "vocab_size": size, "n_positions": BLOCK, "n_embd": WIDTH, "n_layer": 2, "n_head": 2}
    model |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    (folder / "model.json").write_text(json.dumps(model))
    config = json.loads((RECIPE / "ds_config_cpu.json").read_text())
    config |= {"train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": ACCUMULATION}
    config["pipecomp"]["activations"] = {"method": "aqsgd", "forward_bits": BITS, "backward_bits": 8}
    config["pipecomp"]["store"] = {"backend": "lmdb", "path": "messages"}
    (folder / "ds_config.json").write_text(json.dumps(config))
    return folder


def arguments(**changed: str) -> list[str]:
    given = {
        "deepspeed_config": "ds_config.json",
        "model": "model.json",
        "tokenizer": "tokenizer",
        "stages": "2",
        "train-file": "one.txt two.txt",
        "eval-file": "held-out.txt",
        "epochs": str(EPOCHS),
        "seed": "3",
        "metrics": "out/metrics.jsonl",
        "save": "out/model",
        "tensorboard": "out/board",
    } | changed
    return [word for key, value in given.items() for word in (f"--{key}", *value.split())]


@pytest.fixture(scope="module")
def ended(work: Path) -> Ended:
    return launch_deepspeed(work, "gpt2_wikitext2", *arguments())


@pytest.fixture
def metrics(work: Path, ended: Ended) -> list[dict]:
    assert ended.status == 0, ended.output
    return [json.loads(line) for line in (work / "out" / "metrics.jsonl").read_text().splitlines()]


def token_blocks(work: Path, *files: str) -> torch.Tensor:
    """[N, S], by the tokenizer's own library and not by the recipe's code."""
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer.from_file(str(work / "tokenizer/vocab.json"), str(work / "tokenizer/merges.txt"))
    tokens = []
    for file in files:
        for line in (work / file).read_text().splitlines(keepends=True):
            tokens += bpe.encode(line).ids
    return torch.tensor(tokens[: len(tokens) // BLOCK * BLOCK]).view(-1, BLOCK)


def test_ends_well_and_tells_what_it_did(work: Path, ended: Ended) -> None:
    assert ended.status == 0, ended.output
    assert "Traceback" not in ended.output
    held_out = len(token_blocks(work, "held-out.txt"))
    assert ended.output.count(f"training samples, {held_out} held out") == 1  # one rank speaks
    assert "epoch 2 done" in ended.output
    assert "model saved in out/model" in ended.output
    assert list((work / "out" / "board").glob("events*"))


def test_leaves_a_folder_with_a_report_and_says_what_the_links_do(work: Path, ended: Ended) -> None:
    assert ended.status == 0, ended.output
    said = re.search(r"^report    (.*)$", ended.output, re.MULTILINE)
    assert said is not None
    folder = (work / said[1]).parent
    assert folder.name.startswith("gpt2_wikitext2-")
    assert {path.name for path in folder.iterdir()} == {RUN, METRICS, RANKS, TRACE, PAGE}
    (run,) = read_runs([folder])
    assert run.notes == []
    assert len(run.evaluations) == EPOCHS
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    counted = [line["per_s"] * line["step_s"] for line in lines if "step_s" in line]
    assert counted == pytest.approx([MICRO * ACCUMULATION * BLOCK] * len(counted)), "of the first step, too"
    assert re.search(
        r"tokens/s  [\d.]+ .?B/s forward  [\d.]+ .?B/s back  .*link 0->1 waits \d+ %$", ended.output, re.MULTILINE
    )
    assert "\r" not in ended.output


def test_metrics_have_every_step_and_every_epoch(work: Path, metrics: list[dict]) -> None:
    samples = len(token_blocks(work, "one.txt", "two.txt"))
    per_epoch = samples // MICRO
    steps = EPOCHS * per_epoch // ACCUMULATION
    trained = [line for line in metrics if "eval" not in line]
    assert [line["step"] for line in trained] == list(range(1, steps + 1))
    assert [line["epoch"] for line in trained] == [(s * ACCUMULATION) // per_epoch + 1 for s in range(steps)]
    assert trained[-1]["loss"] < trained[0]["loss"] - 0.5
    assert all(line["tokens_per_s"] > 0 for line in trained)
    assert [trained[i].get("forward_bits") for i in (0, -1)] == [None, BITS]  # a first visit is whole
    assert {line["backward_bits"] for line in trained} == {8}
    rates = [line["lr"] for line in trained]
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] < 0.2 * max(rates) <= 0.2 * 1e-3
    evaluated = [line for line in metrics if "eval" in line]
    assert [line["epoch"] for line in evaluated] == [1, 2]
    assert metrics[-1] is evaluated[-1]
    for line in evaluated:
        assert line["eval"]["perplexity"] == pytest.approx(math.exp(line["eval"]["loss"]))
        losses = [t["loss"] for t in trained if t["epoch"] == line["epoch"]]
        assert line["train_loss"] == pytest.approx(sum(losses) / len(losses))


def test_metrics_count_bytes(work: Path, metrics: list[dict]) -> None:
    trained = [line for line in metrics if "eval" not in line]
    raw = MICRO * ACCUMULATION * BLOCK * WIDTH * 4
    for line in trained:
        assert list(line["links"]) == ["0->1"]
        link = line["links"]["0->1"]
        assert link["forward_bytes_raw"] == link["backward_bytes_raw"] == raw * line["step"]
    first, last = trained[0]["links"]["0->1"], trained[-1]["links"]["0->1"]
    assert raw <= first["forward_bytes_sent"] < 1.02 * raw  # a first visit is whole
    step = next(line for line in trained if line["epoch"] == 2)["step"]
    before = trained[step]["links"]["0->1"]
    later = last["forward_bytes_sent"] - before["forward_bytes_sent"]
    codes = MICRO * ACCUMULATION * BLOCK * (WIDTH * BITS // 8 + 4)  # and a float32 scale for each token
    assert codes * (len(trained) - step - 1) <= later < 1.25 * codes * (len(trained) - step - 1)
    evaluations = token_blocks(work, "held-out.txt").numel() * WIDTH * 4
    assert last["evaluation_bytes_raw"] == evaluations  # of the first epoch; the last comes after the last step
    assert metrics[-1]["links"]["0->1"] == last | {
        "evaluation_bytes_raw": 2 * evaluations,
        "evaluation_bytes_sent": 2 * last["evaluation_bytes_sent"],
    }
    (group,) = trained[-1]["groups"].values()
    embedding = json.loads((work / "model.json").read_text())["vocab_size"] * WIDTH * 4
    assert group["bytes_raw"] == 2 * embedding * len(trained)  # a ring of two: each rank sends it once


def test_saved_model_has_the_recorded_held_out_loss(work: Path, metrics: list[dict]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(work / "out/model").eval()
    blocks = token_blocks(work, "held-out.txt")
    assert len(blocks) % MICRO, "the last micro-batch should be short, to see that it is weighed right"
    with torch.no_grad():
        losses = [model(input_ids=row[None], labels=row[None]).loss.item() for row in blocks]
    assert metrics[-1]["eval"]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    line = made_up_text(1, 5)
    again = AutoTokenizer.from_pretrained(work / "out/model")
    assert again.decode(again(line)["input_ids"]) == line


def test_an_error_is_one_line_and_ends_every_rank(work: Path) -> None:
    given = arguments(**{"train-file": "one.txt nowhere.txt", "metrics": "no.jsonl", "save": "no"})
    found = launch(work, "gpt2_wikitext2", *given)
    assert found.status != 0
    assert found.output.count("gpt2_wikitext2: error: nowhere.txt: cannot be read: No such file") == 1, found.output
    assert "Traceback" not in found.output
    assert not (work / "no.jsonl").exists()


@pytest.mark.soak
@pytest.mark.skipif(
    not (DATA / "wikitext-2/valid.txt").is_file() or not (DATA / "gpt2-tokenizer/merges.txt").is_file(),
    reason="needs ../shared/data/wikitext-2 and ../shared/data/gpt2-tokenizer",
)
def test_wikitext_with_gpt2s_tokenizer(work: Path) -> None:
    found = run_script(
        work,
        RECIPE / "train.py",
        "--deepspeed_config",
        str(RECIPE / "ds_config_cpu_fp32.json"),
        "--model",
        "tiny",
        "--tokenizer",
        str(DATA / "gpt2-tokenizer"),
        "--train-file",
        str(DATA / "wikitext-2/valid.txt"),
        "--metrics",
        "wikitext.jsonl",
        "--max-steps",
        "2",
        "--block-size",
        "64",
    )
    assert found.status == 0, found.output
    lines = [json.loads(line) for line in (work / "wikitext.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["loss"] == pytest.approx(math.log(50257), rel=0.02)  # knows nothing yet
    assert lines[0]["links"] == {}
