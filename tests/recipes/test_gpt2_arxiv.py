"""Abstracts in files, and the recipe as a user runs it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from pipecomp.errors import DataError
from pipecomp.recipes import language, run, text
from tests.recipes.recipe_runs import ROOT, launch

TEXTS = ["We study links.", "A model\nof two   stages\n", "Messages are sent once."]


def test_documents_of_a_text_are_its_lines(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("We study links.\n\n  A model of  two stages \n")
    assert language.documents_of(str(path), "abstract") == ["We study links.", "  A model of  two stages "]
    assert language.documents_of(str(path), "abstract", join=True) == ["We study links.", "A model of two stages"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_documents_of_json_lines(tmp_path, name):
    path = tmp_path / name
    lines = [json.dumps({"id": "1", "title": "no", "abstract": TEXTS[1]}), "", json.dumps(TEXTS[0])]
    path.write_text("\n".join(lines) + "\n")
    assert language.documents_of(str(path), "abstract") == [TEXTS[1], TEXTS[0]]
    assert language.documents_of(str(path), "abstract", join=True) == ["A model of two stages", "We study links."]
    with pytest.raises(DataError, match=r"a\.json.*, line 1: has the keys id, title, abstract; needed: .*'text'"):
        language.documents_of(str(path), "text")
    path.write_text('{"abstract": "fine"}\n{"abstract": 3}\n')
    with pytest.raises(DataError, match=r"line 2: has a value of type int; needed: .*'abstract'"):
        language.documents_of(str(path), "abstract")
    for broken in ("{", "[" * 100_000):
        path.write_text(broken + "\n")
        with pytest.raises(DataError, match="line 1: not JSON"):
            language.documents_of(str(path), "abstract")
    path.write_text('"an emoji: \\ud83d\\ude00"\n"cut off: \\ud83d"\n')
    with pytest.raises(DataError, match=r"line 2: \\ud83d is an unpaired surrogate"):
        language.documents_of(str(path), "abstract")


def test_a_dataset_gives_its_column(monkeypatch):
    asked = []

    def split(name, splits, columns):
        asked.append((name, splits, columns))
        return {columns[0]: [f"{splits[0]}  text", " "]}

    monkeypatch.setattr(text, "dataset_split", split)
    parser = run.arguments("n", "d")
    language.add_document_arguments(parser)
    words = ["--deepspeed_config", "c", "--model", "m", "--tokenizer", "t", "--dataset", "some/arxiv"]
    words += ["--field", "summary"]
    found = language.read_documents(parser.parse_args(words), join=True)
    assert found == (["train text"], ["validation text"])
    assert asked == [
        ("some/arxiv", ("train",), ("summary",)),
        ("some/arxiv", ("validation", "test"), ("summary",)),
    ]


def test_documents_are_joined_with_an_end_between_them():
    class Letters:
        def __call__(self, lines, add_special_tokens):
            assert not add_special_tokens
            return {"input_ids": [[ord(c) - 96 for c in line] for line in lines]}

    found = text.blocks(Letters(), ["ab", "c", "de"], 4, vocabulary=30, end=29)
    assert found.tokens_NS.tolist() == [[1, 2, 29, 3], [29, 4, 5, 29]]
    with pytest.raises(DataError, match=r"token 29, .* has 20"):
        text.blocks(Letters(), ["ab"], 2, vocabulary=20, end=29)


@pytest.mark.ranks
def test_the_recipe(tmp_path: Path) -> None:
    abstracts = [f"In paper {n} we show that the method of paper {n + 1} sends fewer bytes ." for n in range(80)]
    lines = "".join(json.dumps({"abstract": text}) + "\n" for text in abstracts[:60])
    (tmp_path / "train.jsonl").write_text(lines)
    (tmp_path / "held-out.txt").write_text("\n".join(abstracts[60:]))
    config = json.loads((ROOT / "recipes" / "gpt2_arxiv" / "ds_config_cpu.json").read_text())
    config |= {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    config["pipecomp"]["store"]["path"] = str(tmp_path / "messages")
    (tmp_path / "c.json").write_text(json.dumps(config))
    found = launch(
        tmp_path,
        "gpt2_arxiv",
        "--deepspeed_config",
        "c.json",
        "--model",
        "tiny",
        "--tokenizer",
        "train:300",
        "--block-size",
        "16",
        "--train-file",
        "train.jsonl",
        "--eval-file",
        "held-out.txt",
        "--epochs",
        "2",
        "--seed",
        "1",
        "--metrics",
        "metrics.jsonl",
        "--save",
        "model",
    )
    assert found.status == 0, found.output
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line for line in metrics if "eval" in line]
    assert [line["epoch"] for line in evaluated] == [1, 2]
    assert evaluated[1]["eval"]["loss"] < evaluated[0]["eval"]["loss"]
    assert evaluated[1]["eval"]["perplexity"] == pytest.approx(math.exp(evaluated[1]["eval"]["loss"]))

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    stream = [i for text in abstracts[60:] for i in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    rows = torch.tensor(stream[: len(stream) // 16 * 16]).view(-1, 16)
    with torch.no_grad():
        loss = model(input_ids=rows, labels=rows).loss.item()
    assert loss == pytest.approx(evaluated[1]["eval"]["loss"], rel=1e-4), "abstracts end with the end of text"
