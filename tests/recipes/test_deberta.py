"""The classification recipes as a user runs them: two processes, TSV files, a model's folder."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch

from pipecomp.buffers.admin import info
from tests.recipes.recipe_runs import ROOT, launch, run_script

RECIPES = ROOT / "recipes"
WIDTH, MICRO, ACCUMULATION, EPOCHS, BITS = 32, 4, 2, 2, 2
SAMPLES, HELD_OUT = 40, 22

pytestmark = pytest.mark.ranks


def words(**given: str) -> list[str]:
    """Arguments of a command line."""
    return [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", *value.split())]


def sentences(count: int, seed: int) -> list[tuple[str, int]]:
    """Sentences of 3 to 14 words; the last word tells the class."""
    draw = random.Random(seed)
    known = ["the", "link", "sends", "what", "a", "small", "model", "keeps", "and", "every", "stage", "repeats"]
    made = []
    for number in range(count):
        chosen = [draw.choice(known) for _ in range(draw.randint(3, 14))]
        made.append((" ".join([*chosen, "or" if number % 2 else "so"]), number % 2))
    return made


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both kinds of TSV file, a DeBERTa with a tokenizer, and a configuration."""
    folder = tmp_path_factory.mktemp("classify")
    for name, count, seed in (("train", SAMPLES, 0), ("dev", HELD_OUT, 1)):
        rows = sentences(count, seed)
        lines = [f"made\t{label}\t\t{text}\n" for text, label in rows]
        (folder / f"cola-{name}.tsv").write_text("".join(lines))
        labels = ("entailment", "not_entailment")
        lines = [f"{i}\twho {text[:9]} ?\t{text}\t{labels[label]}\n" for i, (text, label) in enumerate(rows)]
        (folder / f"qnli-{name}.tsv").write_text("".join(["index\tquestion\tsentence\tlabel\n", *lines]))
    (folder / "text.txt").write_text("".join(f"{text} .\n" for text, _ in sentences(200, 2)))
    done = run_script(
        folder,
        RECIPES / "pretrain_deberta.py",
        "--train-file",
        "text.txt",
        "--eval-file",
        "text.txt",
        "--save",
        "model",
        "--vocabulary",
        "300",
        "--layers",
        "2",
        "--width",
        str(WIDTH),
        "--heads",
        "2",
        "--block-size",
        "16",
        "--epochs",
        "2",
        "--lr",
        "1e-2",
    )
    assert done.status == 0, done.output
    section = {
        "activations": {"method": "aqsgd", "forward_bits": BITS, "backward_bits": 4},
        "store": {"backend": "lmdb", "path": "messages", "run": "kept"},
    }
    config = json.loads((RECIPES / "deberta_cola" / "ds_config_cpu.json").read_text())
    config |= {"train_micro_batch_size_per_gpu": MICRO, "train_batch_size": MICRO * ACCUMULATION, "pipecomp": section}
    config["optimizer"]["params"]["lr"] = 3e-3
    (folder / "ds_config.json").write_text(json.dumps(config))
    return folder


def lengths(work: Path, name: str) -> list[int]:
    """Tokens of each sentence with [CLS] and [SEP], by the tokenizer's own library and not by the recipe's code."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(work / "model" / "tokenizer.json"))
    lines = (work / name).read_text().splitlines()
    return [len(tokenizer.encode(line.split("\t")[3]).ids) for line in lines]


@pytest.fixture(scope="module")
def cola(work: Path) -> list[dict]:
    given = words(
        deepspeed_config="ds_config.json",
        model="model",
        tokenizer="model",
        stages="2",
        train_file="cola-train.tsv",
        eval_file="cola-dev.tsv",
        epochs=str(EPOCHS),
        seed="3",
        metrics="out/metrics.jsonl",
        save="out/model",
    )
    ended = launch(work, "deberta_cola", *given)
    assert ended.status == 0, ended.output
    assert "Traceback" not in ended.output
    assert f"{SAMPLES} training samples, {HELD_OUT} held out" in ended.output
    return [json.loads(line) for line in (work / "out" / "metrics.jsonl").read_text().splitlines()]


def test_pretraining_learns(work: Path) -> None:
    report = json.loads((work / "model" / "pretraining.json").read_text())
    assert report["uniform_loss"] == pytest.approx(math.log(300), abs=0.3)
    assert report["eval_loss"] < 0.75 * report["uniform_loss"]


def test_an_epoch_ends_with_what_the_saved_model_does(work: Path, cola: list[dict]) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(work / "out/model").eval()
    tokenizer = AutoTokenizer.from_pretrained(work / "out/model")
    assert model.config.id2label == {0: "unacceptable", 1: "acceptable"}
    losses, cells = [], torch.zeros(2, 2)
    for line in (work / "cola-dev.tsv").read_text().splitlines():
        _, label, _, text = line.split("\t")
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor([int(label)])).item())
        cells[int(label), int(logits.argmax())] += 1
    evaluated = [line for line in cola if "eval" in line]
    assert [line["epoch"] for line in evaluated] == [1, 2]
    found = evaluated[-1]["eval"]
    assert len(losses) % MICRO, "the last micro-batch should be short, to see that it is weighed right"
    assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert found["accuracy"] == pytest.approx(float(cells.trace() / cells.sum()))
    (tn, fp), (fn, tp) = cells.tolist()
    product = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    assert found["matthews"] == pytest.approx((tp * tn - fp * fn) / math.sqrt(product) if product else 0, abs=1e-6)


def test_only_real_tokens_are_on_the_wire_and_in_the_store(work: Path, cola: list[dict]) -> None:
    real, held_out = lengths(work, "cola-train.tsv"), lengths(work, "cola-dev.tsv")
    assert max(real) > 1.5 * sum(real) / len(real), "there must be padding"
    trained = [line for line in cola if "eval" not in line]
    assert len(trained) == EPOCHS * SAMPLES // (MICRO * ACCUMULATION)
    first, last = trained[len(trained) // EPOCHS - 1]["links"]["0->1"], trained[-1]["links"]["0->1"]
    tokens = sum(real)
    raw = tokens * WIDTH * 4
    headers = SAMPLES // MICRO * 100 + SAMPLES * 40
    assert first["forward_bytes_raw"] == first["backward_bytes_raw"] == raw
    assert last["forward_bytes_raw"] == last["backward_bytes_raw"] == EPOCHS * raw
    assert raw < first["forward_bytes_sent"] < raw + headers  # a first visit is whole
    codes = tokens * (WIDTH * BITS // 8 + 4)  # and a float32 scale for each token
    assert codes < last["forward_bytes_sent"] - first["forward_bytes_sent"] < codes + headers
    gradients = tokens * (WIDTH * 4 // 8 + 4)
    assert gradients < first["backward_bytes_sent"] < gradients + headers
    assert cola[-1]["links"]["0->1"]["evaluation_bytes_raw"] == EPOCHS * sum(held_out) * WIDTH * 4
    stored = info(work / "messages")
    assert [link.rank for link in stored] == [0, 1]
    for link in stored:
        assert link.samples == SAMPLES
        assert raw < link.stored_bytes < raw + 64 * SAMPLES


def test_pairs_are_cut_to_what_was_asked(work: Path) -> None:
    config = json.loads((work / "ds_config.json").read_text())
    config["pipecomp"]["store"]["path"] = "pairs"
    (work / "pairs.json").write_text(json.dumps(config))
    ended = launch(
        work,
        "deberta_qnli",
        *words(
            deepspeed_config="pairs.json",
            model="model",
            tokenizer="model",
            train_file="qnli-train.tsv",
            eval_file="qnli-dev.tsv",
            epochs="2",
            max_steps="6",
            metrics="pairs.jsonl",
            max_tokens="10",
        ),
    )
    assert ended.status == 0, ended.output
    lines = [json.loads(line) for line in (work / "pairs.jsonl").read_text().splitlines()]
    assert [line.get("step") for line in lines] == [1, 2, 3, 4, 5, 5, 6, 6]
    assert set(lines[-1]["eval"]) == {"loss", "accuracy", "matthews"}
    first, last = (line["links"]["0->1"] for line in (lines[4], lines[6]))
    assert first["forward_bytes_raw"] == SAMPLES * 10 * WIDTH * 4, "all pairs are longer"
    assert first["forward_bytes_sent"] > first["forward_bytes_raw"], "a first visit is whole"
    sent, raw = (last[f"forward_bytes_{of}"] - first[f"forward_bytes_{of}"] for of in ("sent", "raw"))
    assert raw == MICRO * ACCUMULATION * 10 * WIDTH * 4
    assert sent < 0.3 * raw
    assert [link.samples for link in info(work / "pairs")] == [SAMPLES, SAMPLES]
