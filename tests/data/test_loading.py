"""Training data from files to samples: tokens, cuts, what is held out, the cache, and options that do not apply."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from pipecomp.data import DataOptions, TrainingData, load_data
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.errors import ConfigError, DataError, PipecompError
from tests.data import tokenizers_for_tests as made

WORDS = "the cat sat on a mat and saw what it was " * 50


@pytest.fixture(scope="module")
def tokenizer():
    return made.split(WORDS)


@pytest.fixture
def load(tmp_path, tokenizer):
    def call(data, *, said=None, **options) -> TrainingData:
        more = {key: options.pop(key) for key in ("evaluate", "vocabulary") if key in options}
        say = (said if said is not None else []).append
        return load_data(data, tokenizer, DataOptions(**options), cache=tmp_path / "cache", say=say, **more)

    return call


@pytest.fixture
def put(tmp_path):
    def call(name: str, content: str | list) -> str:
        text = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
        (tmp_path / name).write_text(text, newline="")
        return str(tmp_path / name)

    return call


def ids(samples) -> list[list[int]]:
    return [samples[i]["input_ids"].tolist() for i in range(len(samples))]


def texts(tokenizer, samples) -> list[str]:
    return [tokenizer.decode(row, clean_up_tokenization_spaces=False) for row in ids(samples)]


def test_files_are_documents_of_their_own(load, put, tokenizer):
    data = load([put("a.txt", "cat \n\n  sat\r\n"), put("b.txt", "mat")])
    assert texts(tokenizer, data.training) == ["<|begin|>cat \n\n  sat\r\n<|end|>", "<|begin|>mat<|end|>"]
    assert all(torch.equal(data.training[i]["labels"], data.training[i]["input_ids"]) for i in (0, 1))


def test_lines_are_documents_where_asked_for(load, put, tokenizer):
    data = load(put("a.txt", "cat\r\n\n  sat\rmat\n"), documents="lines")
    assert texts(tokenizer, data.training) == ["<|begin|>cat<|end|>", "<|begin|>  sat\rmat<|end|>"]
    assert data.tokens.empty == 1
    assert any("1 document" in line for line in data.notes)


def test_white_space_is_joined_where_asked_for(load, put, tokenizer):
    rows = [{"abstract": " the\n  cat\t sat "}, {"abstract": " \n"}]
    data = load(put("a.jsonl", rows), columns=["abstract"], join_white_space=True)
    assert texts(tokenizer, data.training) == ["<|begin|>the cat sat<|end|>"]


def test_blocks_join_documents(load, put, tokenizer):
    path = put("a.jsonl", [{"text": f"the cat {i}"} for i in range(50)])
    whole = [number for row in ids(load(path).training) for number in row]
    data = load(path, blocks=7)
    assert [n for row in ids(data.training) for n in row] == whole[: len(whole) // 7 * 7]
    assert data.counts.unused == len(whole) % 7
    held = load(path, blocks=7, eval_split=0.2)
    assert 0 < len(held.held_out) < len(held.training)


def test_long_text_is_divided_and_nothing_is_lost(load, put):
    path = put("a.jsonl", [{"text": WORDS}, {"text": "cat"}])
    whole = [number for row in ids(load(path).training) for number in row]
    data = load(path, max_length=20)
    assert [n for row in ids(data.training) for n in row] == whole
    assert data.training.lengths.max() == 20
    assert data.counts.split == 1
    cut = load(path, max_length=20, overflow="cut")
    assert len(cut.training) == 2
    assert cut.counts.cut == 1
    assert cut.counts.cut_tokens == len(whole) - cut.counts.tokens
    assert any(f"{cut.counts.cut_tokens:,} tokens" in line for line in cut.describe())


def test_prompts_lose_their_end_and_those_without_a_completion_are_dropped(load, put):
    rows = [{"prompt": "the cat", "completion": " sat on a mat"}, {"prompt": WORDS, "completion": " and saw"}]
    path = put("a.jsonl", rows)
    whole, data = load(path), load(path, max_length=30)
    assert len(data.training) == 1
    assert data.training[0]["labels"].tolist() == whole.training[0]["labels"].tolist()
    assert (data.counts.cut, data.counts.dropped) == (1, 1)
    with pytest.raises(ConfigError, match="--max-length"):
        load(path, max_length=3)


def test_documents_are_held_out_the_same_way_for_a_seed(load, put):
    path = put("a.jsonl", [{"text": f"the cat {i}"} for i in range(100)])
    whole = load(path)
    data, again, other = (load(path, eval_split=0.05, seed=seed) for seed in (3, 3, 4))
    assert len(data.held_out) == 5
    assert sorted(ids(data.training) + ids(data.held_out)) == sorted(ids(whole.training))
    assert ids(data.held_out) == ids(again.held_out) != ids(other.held_out)
    assert data.facts() == again.facts() != other.facts()


def test_of_one_document_the_end_is_held_out(load, put):
    path = put("a.txt", WORDS)
    for options in ({"max_length": 20}, {"blocks": 20}):
        whole, data = load(path, **options), load(path, eval_split=0.1, **options)
        assert ids(data.training) + ids(data.held_out) == ids(whole.training)
        assert len(data.held_out) == round(0.1 * len(whole.training))
    with pytest.raises(ConfigError, match="--eval-split"):
        load(path, eval_split=0.1)


def test_a_data_set_brings_its_own_split(load, tmp_path):
    from datasets import Dataset, DatasetDict

    parts = DatasetDict(train=Dataset.from_list([{"text": "cat"}] * 3), test=Dataset.from_list([{"text": "mat"}]))
    parts.save_to_disk(tmp_path / "saved")
    for data in (str(tmp_path / "saved"), [str(tmp_path / "saved")], parts):
        assert [len(x) for x in (load(data).training, load(data).held_out)] == [3, 1]


def test_held_out_files(load, put):
    data = load(put("a.txt", "the cat"), evaluate=put("b.txt", "a mat and a cat"))
    assert len(ids(data.held_out)[0]) > len(ids(data.training)[0])
    with pytest.raises(DataError, match="format"):
        load(put("a.txt", "the cat"), evaluate=put("c.jsonl", [{"prompt": "a", "completion": "b"}]))


def test_tokens_are_made_once(load, put, tmp_path):
    path = put("a.txt", WORDS)
    first = load(path)
    [arrow] = (tmp_path / "cache").glob("*.arrow")
    written = arrow.stat().st_mtime_ns
    assert ids(load(path).training) == ids(first.training)
    assert ids(load(path, blocks=10).training)  # cuts are made of the same tokens
    assert arrow.stat().st_mtime_ns == written
    put("a.txt", WORDS + "cat")
    assert load(path).digest() != first.digest()
    assert len(list((tmp_path / "cache").glob("*.arrow"))) == 2


def test_the_cache_is_a_file_that_datasets_reads(load, put, tmp_path):
    from datasets import Dataset

    data = load(put("a.jsonl", [{"prompt": "the cat", "completion": " sat"}, {"prompt": "a", "completion": " mat"}]))
    [arrow] = (tmp_path / "cache").glob("*.arrow")
    rows = Dataset.from_file(str(arrow))
    assert rows["input_ids"][:] == ids(data.training)
    assert [sum(row) for row in rows["learned"]] == [int((data.training[i]["labels"] >= 0).sum()) for i in (0, 1)]


def test_a_long_document_has_several_rows_and_one_sample(load, put, tmp_path, monkeypatch, tokenizer):
    monkeypatch.setattr("pipecomp.data.token_file._ROW", 64)
    monkeypatch.setattr("pipecomp.data.token_file._FLUSH", 200)
    data = load([put("a.txt", WORDS), put("b.txt", "cat")])
    assert ids(data.training) == [
        [*tokenizer(text, verbose=False)["input_ids"], tokenizer.eos_token_id] for text in (WORDS, "cat")
    ]


def test_samples_travel_to_workers(load, put):
    data = load(put("a.jsonl", [{"prompt": "the cat", "completion": " sat"}]))
    data.training[0]
    copy = pickle.loads(pickle.dumps(data.training))
    assert copy[0]["labels"].tolist() == data.training[0]["labels"].tolist()
    assert len(pickle.dumps(data.training)) < 2000


def test_an_error_leaves_nothing_in_the_cache(load, put, tmp_path):
    with pytest.raises(DataError, match="line 2"):
        load(put("a.jsonl", '{"text": "a"}\n{"text": 1}\n'))
    assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix in (".arrow", ".json", ".part")]


def test_one_process_of_a_machine_tokenizes(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"the cat {i}"}) + "\n" for i in range(2000)))
    made.split(WORDS).save_pretrained(tmp_path / "tokenizer")
    found = run_ranks(3, load_in_rank, str(tmp_path), timeout_s=120)
    assert len({digest for digest, _ in found.values()}) == 1
    assert sum(wrote for _, wrote in found.values()) == 1


def load_in_rank(rank, world, note, folder):
    from transformers import AutoTokenizer

    from pipecomp.data import token_file

    wrote = []
    finish = token_file.TokenWriter.finish
    token_file.TokenWriter.finish = lambda *args, **more: wrote.append(1) or finish(*args, **more)
    data = load_data(f"{folder}/a.jsonl", AutoTokenizer.from_pretrained(f"{folder}/tokenizer"), cache=Path(folder, "c"))
    return data.digest(), len(wrote)


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("a.txt", {"columns": ["text"]}, "--column"),
        ("a.jsonl", {"columns": ["none"]}, "--column"),
        ("a.jsonl", {"columns": ["=x"]}, "--column"),
        ("a.jsonl", {"documents": "lines"}, "--documents"),
        ("a.txt", {"loss": "assistant"}, "--loss"),
        ("a.txt", {"loss": "everything"}, "--loss"),
        ("p.jsonl", {"loss": "assistant"}, "--loss"),
        ("a.txt", {"chat_template": "{{ messages }}"}, "--chat-template"),
        ("p.jsonl", {"chat_template": "{{ messages }}"}, "--chat-template"),
        ("p.jsonl", {"blocks": 8}, "--blocks"),
        ("p.jsonl", {"join_white_space": True}, "--join-white-space"),
        ("a.txt", {"blocks": 8, "max_length": 8}, "--max-length"),
        ("a.txt", {"max_length": 1}, "--max-length"),
        ("a.txt", {"eval_split": 1.0}, "--eval-split"),
        ("a.txt", {"documents": "words"}, "--documents"),
        ("a.txt", {"eval_split": 0.1, "evaluate": "a.txt"}, "--eval-split"),
    ],
)
def test_options_that_do_not_apply(load, put, tmp_path, monkeypatch, name, options, key):
    monkeypatch.chdir(tmp_path)
    put("a.txt", "the cat\nsat\n")
    put("a.jsonl", [{"text": "the cat"}])
    put("p.jsonl", [{"prompt": "the cat", "completion": " sat"}])
    with pytest.raises(ConfigError) as caught:
        load(name, **options)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.txt", " \n", ["white space"]),
        ("a.jsonl", [{"text": "a"}, {"txt": "b"}], ["line 2", "txt"]),
        ("a.jsonl", [{"body": "a"}], ["body", "--column"]),
        ("a.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}], ["preferences"]),
        ("a.jsonl", [{"prompt": "a", "completion": " "}], ["line 1", "empty"]),
        ("a.jsonl", [{"instruction": "a", "output": ""}], ["line 1", "empty"]),
    ],
)
def test_wrong_data(load, put, name, content, parts):
    with pytest.raises(PipecompError) as caught:
        load(put(name, content))
    for part in (name, *parts):
        assert part in str(caught.value)


def test_a_small_vocabulary(load, put):
    with pytest.raises(DataError, match="vocabulary"):
        load(put("a.txt", "the cat"), vocabulary=10)


def test_columns_that_are_not_used_are_named(load, put):
    assert any("label, source" in line for line in load(put("a.jsonl", [{"text": "a", "source": 1, "label": 2}])).notes)


def test_progress_is_printed(load, put, monkeypatch):
    monkeypatch.setattr("pipecomp.data.loading._FIRST_S", -1.0)
    said: list[str] = []
    load(put("a.txt", WORDS), said=said)
    assert len(said) == 2
    assert "tokens" in said[-1]


def test_alpaca_without_a_template_has_the_prompt_of_alpaca(load, put, tokenizer):
    data = load(put("a.jsonl", [{"instruction": "add", "input": "1 2", "output": "3"}]))
    sample = data.training[0]
    learned = sample["input_ids"][sample["labels"] >= 0].tolist()
    assert tokenizer.decode(learned) == "3<|end|>"
    assert "### Instruction:\nadd\n\n### Input:\n1 2\n\n### Response:\n3" in texts(tokenizer, data.training)[0]


@pytest.mark.timeout(60)
def test_an_error_keeps_no_lock(tmp_path, load):
    """Its traceback refers to the lock, for which the machine's other ranks wait."""
    (tmp_path / "latin.txt").write_bytes("Zürich\n".encode("latin-1") * 9)
    with pytest.raises(DataError) as kept:
        load(str(tmp_path / "latin.txt"))
    with pytest.raises(DataError, match="UTF-8"):
        load(str(tmp_path / "latin.txt"))
    assert kept.value.__traceback__ is not None
