"""Reading, tokenizing, padding and scoring of the classification recipes, against plain references."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecomp.errors import ConfigError, DataError, PipecompError
from pipecomp.recipes import classify, encoder, run
from pipecomp.recipes.classify import COLA, QNLI, ClassificationSamples, Padding, Row, counts, read_rows, scores

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
TEXTS = ["the link sends what it was given", "every stage keeps an old song", "a small model sends"] * 4


def arguments(*words: str, task: classify.ClassificationTask = COLA) -> argparse.Namespace:
    parser = run.arguments("name", "what it does")
    classify.add_arguments(parser, task)
    return parser.parse_args(["--deepspeed_config", "c.json", "--model", "tiny", "--tokenizer", "t", *words])


class TestRows:
    def test_a_file_without_names(self, tmp_path: Path) -> None:
        path = tmp_path / "cola.tsv"
        path.write_text('gj04\t1\t\tIt "is" so.\ngj04\t0\t*\tBe\u2028it\u0085so.\n\n', encoding="utf-8")
        assert read_rows(str(path), COLA) == [Row(('It "is" so.',), 1), Row(("Be\u2028it\u0085so.",), 0)]

    def test_a_file_with_names_in_any_order(self, tmp_path: Path) -> None:
        path = tmp_path / "a.tsv"
        path.write_bytes("\ufefflabel\tsentence\tindex\tquestion\r\nnot_entailment\tS\t7\tQ\r\n0\ts\t8\tq".encode())
        assert read_rows(str(path), QNLI) == [Row(("Q", "S"), 1), Row(("q", "s"), 0)]
        path.write_text("label\tsentence\n1\tdone\n")
        assert read_rows(str(path), COLA) == [Row(("done",), 1)]

    @pytest.mark.parametrize(
        ("text", "task", "told"),
        [
            ("0\tq\ts\tentailment\n", QNLI, "line 1 must name the columns.*question, sentence, label"),
            ("a\t1\t\tx\nb\t1\tx\n", COLA, "line 2 has 3 columns, not 4: source, label, mark, sentence"),
            ("a\t1\t\tx\nb\tyes\t\tx\n", COLA, "line 2: label 'yes', allowed: unacceptable, acceptable, 0, 1"),
            ("question\tsentence\tlabel\n", QNLI, "has no samples"),
            ("", COLA, "has no samples"),
        ],
    )
    def test_what_is_wrong_is_told(
        self, tmp_path: Path, text: str, task: classify.ClassificationTask, told: str
    ) -> None:
        (tmp_path / "a.tsv").write_text(text)
        with pytest.raises(DataError, match=told):
            read_rows(str(tmp_path / "a.tsv"), task)

    def test_files_in_the_order_given(self, tmp_path: Path) -> None:
        for name in "ab":
            (tmp_path / name).write_text(f"x\t1\t\t{name}\n")
        args = arguments("--train-file", str(tmp_path / "b"), str(tmp_path / "a"))
        classify.check_arguments(args)
        assert classify.read(args, COLA) == ([Row(("b",), 1), Row(("a",), 1)], None)
        args = arguments("--train-file", str(tmp_path / "a"), "--eval-file", str(tmp_path / "b"))
        assert classify.read(args, COLA)[1] == [Row(("b",), 1)]

    def test_a_dataset(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
        (tmp_path / "data").mkdir()
        for split, label in (("train", 1), ("validation", 0)):
            line = json.dumps({"question": "q", "sentence": split, "label": label, "idx": 0})
            (tmp_path / "data" / f"{split}.jsonl").write_text(line + "\n")
        args = arguments("--dataset", str(tmp_path / "data"), task=QNLI)
        assert classify.read(args, QNLI) == ([Row(("q", "train"), 1)], [Row(("q", "validation"), 0)])
        other = classify.ClassificationTask(texts=("premise",), labels=("a", "b"), max_tokens=9)
        with pytest.raises(DataError, match="needed: premise, label"):
            classify.read(args, other)

    @pytest.mark.skipif(not (DATA / "qnli/dev.tsv").is_file(), reason="needs ../shared/data/qnli and cola")
    def test_the_real_files(self) -> None:
        qnli = read_rows(str(DATA / "qnli/dev.tsv"), QNLI)
        cola = read_rows(str(DATA / "cola/in_domain_dev.tsv"), COLA)
        assert (len(qnli), sum(row.label for row in qnli)) == (5463, 2761)
        assert qnli[0].texts[1].startswith("As of that day")
        assert (len(cola), cola[0]) == (527, Row(("The sailors rode the breeze clear of the rocks.",), 1))


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--max-tokens", "3"], "--max-tokens"),
        (["--dropout", "1"], "--dropout"),
        (["--train-file", "a", "--dataset", "b"], "--train-file"),
    ],
)
def test_arguments_that_cannot_be(words: list[str], key: str) -> None:
    given = words if "--train-file" in words else ["--train-file", "a", *words]
    with pytest.raises(ConfigError) as caught:
        classify.check_arguments(arguments(*given))
    assert caught.value.key == key


class TestSamples:
    def test_pairs_are_cut_and_not_padded(self) -> None:
        tokenizer = encoder.train_tokenizer(TEXTS, 300)
        rows = [Row(("a song", "the link sends what it was given and given"), 1), Row(("a", "a"), 0)]
        found = ClassificationSamples(tokenizer, rows, 12, vocabulary=300, types=True)
        assert found.lengths() == [12, 5]
        first = found[0]
        assert first["labels"] == 1
        assert tokenizer.convert_ids_to_tokens(first["input_ids"])[0] == "[CLS]"
        ends = [place for place, token in enumerate(first["input_ids"]) if token == tokenizer.sep_token_id]
        assert len(ends) == 2
        assert ends[-1] == 11
        assert first["token_type_ids"] == [0] * (ends[0] + 1) + [1] * (11 - ends[0])
        without = ClassificationSamples(tokenizer, rows, 12, vocabulary=300, types=False)
        assert set(without[0]) == {"input_ids", "labels"}
        other = ClassificationSamples(tokenizer, [rows[0]._replace(label=0), rows[1]], 12, vocabulary=300, types=True)
        again = ClassificationSamples(tokenizer, rows, 12, vocabulary=300, types=True)
        assert again.digest() == found.digest() != other.digest()

    def test_a_foreign_tokenizer_is_refused(self) -> None:
        tokenizer = encoder.train_tokenizer(TEXTS, 300)
        row = Row(("a song",), 1)
        largest = max(ClassificationSamples(tokenizer, [row], 12, vocabulary=300, types=False)[0]["input_ids"])
        with pytest.raises(DataError, match=f"makes token {largest}, "):
            ClassificationSamples(tokenizer, [row], 12, vocabulary=largest, types=False)

    @given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), typed=st.booleans())
    @settings(max_examples=40, deadline=None)
    def test_a_batch_is_as_long_as_its_longest_sample(self, lengths: list[int], typed: bool) -> None:
        rows = [list(range(2, 2 + length)) for length in lengths]
        samples = [
            {"input_ids": row, "labels": i % 3} | ({"token_type_ids": [1] * len(row)} if typed else {})
            for i, row in enumerate(rows)
        ]
        batch = Padding(77)(samples)
        assert all(value.dtype == torch.int64 for value in batch.values())
        assert set(batch) == {"input_ids", "attention_mask", "labels"} | ({"token_type_ids"} if typed else set())
        assert batch["input_ids"].shape == (len(rows), max(lengths))
        assert batch["labels"].tolist() == [i % 3 for i in range(len(rows))]
        for i, row in enumerate(rows):
            padding = max(lengths) - len(row)
            assert batch["input_ids"][i].tolist() == row + [77] * padding
            assert batch["attention_mask"][i].tolist() == [1] * len(row) + [0] * padding
            if typed:
                assert batch["token_type_ids"][i].tolist() == [1] * len(row) + [0] * padding


class TestScores:
    @given(
        answers=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=2, max_size=40),
        sizes=st.lists(st.integers(1, 7), min_size=40, max_size=40),
    )
    @settings(max_examples=80, deadline=None)
    def test_they_are_those_of_all_samples_together(self, answers: list[tuple[int, int]], sizes: list[int]) -> None:
        """Matthews correlation as the correlation of the one-hot columns, summed over classes (Gorodkin, eq. 8)."""
        draw = torch.Generator().manual_seed(len(answers))
        logits = torch.randn(len(answers), 3, generator=draw)
        for row, (_, said) in enumerate(answers):
            logits[row, said] += 20
        labels = torch.tensor([true for true, _ in answers])
        total, start = torch.zeros(10, dtype=torch.float64), 0
        for size in sizes:
            part, of = logits[start : start + size], labels[start : start + size]
            if len(of):
                total += counts(part, of, torch.nn.functional.cross_entropy(part, of))
            start += size
        found = scores(total.tolist())
        assert found["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-5)
        assert found["accuracy"] == pytest.approx(sum(t == s for t, s in answers) / len(answers))
        columns = [[[float(pair[k] == c) for pair in answers] for c in range(3)] for k in (0, 1)]

        def covariance(one: int, other: int) -> float:
            n = len(answers)
            sums = 0.0
            for c in range(3):
                x, y = columns[one][c], columns[other][c]
                sums += sum((a - sum(x) / n) * (b - sum(y) / n) for a, b in zip(x, y, strict=True))
            return sums

        spread = covariance(0, 0) * covariance(1, 1)
        expected = covariance(0, 1) / math.sqrt(spread) if spread > 1e-9 else 0.0
        assert found["matthews"] == pytest.approx(expected, abs=1e-9)

    def test_two_classes(self) -> None:
        tn, fp, fn, tp = 50.0, 10.0, 5.0, 35.0
        product = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
        found = scores([30.0, tn, fp, fn, tp])
        assert found == pytest.approx(
            {"loss": 0.3, "accuracy": 0.85, "matthews": (tp * tn - fp * fn) / math.sqrt(product)}
        )
        assert scores([1.0, 0.0, 4.0, 0.0, 6.0])["matthews"] == 0.0  # always the same answer


class TestModels:
    def test_tokenizer_and_tiny_model_belong_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
        monkeypatch.setattr("pipecomp.recipes.text.broadcast", lambda made: made)
        tokenizer = encoder.load_tokenizer("train:300", TEXTS)
        assert len(tokenizer) <= 300
        same = encoder.train_tokenizer(TEXTS, 300)
        assert tokenizer(*TEXTS[:2])["input_ids"] == same(*TEXTS[:2])["input_ids"]
        source, config = encoder.classifier(arguments("--dropout", "0.25"), tokenizer, COLA)
        assert source.weights is None
        assert source.model_class.__name__ == "DebertaV2ForSequenceClassification"
        assert (config.vocab_size, config.pad_token_id, config.num_labels) == (len(tokenizer), 0, 2)
        assert (config.hidden_dropout_prob, config.attention_probs_dropout_prob) == (0.25, 0.25)
        assert not encoder.has_types(config)
        with pytest.raises(ConfigError, match="--tokenizer"):
            encoder.load_tokenizer("train:10", TEXTS)

    def test_an_encoder_gets_a_head_for_the_task(self, tmp_path: Path) -> None:
        from transformers import BertConfig, BertModel

        small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
        model = BertModel(BertConfig(**small, vocab_size=30, max_position_embeddings=64))
        model.save_pretrained(tmp_path)
        for name, weights in ((tmp_path, str(tmp_path)), (tmp_path / "config.json", None)):
            args = arguments("--model", str(name))
            source, config = encoder.classifier(args, None, QNLI)
            assert (source.weights, source.model_class.__name__) == (weights, "BertForSequenceClassification")
            assert config.id2label == {0: "entailment", 1: "not_entailment"}
            assert config.hidden_dropout_prob == 0.1
            assert encoder.has_types(config)
        model.config.update({"num_labels": 1, "problem_type": "regression"})
        model.save_pretrained(tmp_path)
        _, config = encoder.classifier(arguments("--model", str(tmp_path)), None, QNLI)
        assert (config.num_labels, config.problem_type) == (2, "single_label_classification")
        tokenizer: Any = SimpleNamespace(model_max_length=100)
        encoder.check_length(arguments("--max-tokens", "64"), tokenizer, config)
        with pytest.raises(ConfigError, match="at most 64"):
            encoder.check_length(arguments("--max-tokens", "65"), tokenizer, config)

    @pytest.mark.parametrize("argument", ["--model", "--tokenizer"])
    def test_names_that_are_nothing(self, argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
        import huggingface_hub.constants

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        calls: dict[str, Callable[[], Any]] = {
            "--model": lambda: encoder.classifier(arguments("--model", "no/thing"), None, COLA),
            "--tokenizer": lambda: encoder.load_tokenizer("no/thing", []),
        }
        with pytest.raises(ConfigError) as caught:
            calls[argument]()
        assert caught.value.key == argument
        assert "\n" not in str(caught.value)

    def test_a_folder_without_a_tokenizer(self, tmp_path: Path) -> None:
        """transformers makes one that knows no words of BERT's configuration alone."""
        from transformers import BertConfig

        BertConfig(num_hidden_layers=1).save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match=r"--tokenizer: got .*only special tokens"):
            encoder.load_tokenizer(str(tmp_path), [])


@pytest.fixture(scope="module")
def pretraining() -> Any:
    """The script that pre-trains a DeBERTa, as a module."""
    spec = importlib.util.spec_from_file_location("pretrain_deberta", ROOT / "recipes" / "pretrain_deberta.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (("--eval-file", "missing.txt"), "missing.txt: cannot be read"),
        (("--eval-file", "short.txt"), "too few for one block"),
        (("--save", "short.txt"), "--save: got 'short.txt'"),
        (("--max-blocks", "3"), "3 samples of 16 tokens are too few for --batch 4"),
        (("--width", "30"), "--width: got 30, allowed: a multiple of --heads, 4"),
    ],
)
def test_pretraining_says_what_is_wrong_before_it_trains(
    pretraining: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("a small model keeps what a link sends\n" * 50)
    Path("short.txt").write_text("a link\n")
    monkeypatch.setattr(pretraining, "pretrain", lambda *given, **options: pytest.fail("it has trained"))
    given = ("--train-file=text.txt", "--save=model", "--vocabulary=300", "--layers=1", "--block-size=16", "--batch=4")
    with pytest.raises(PipecompError, match=re.escape(error)):
        pretraining.main(pretraining.arguments().parse_args([*given, *more]))


def test_pretraining_hides_what_bert_hides(pretraining: Any) -> None:
    masking = pretraining.Masking(torch.nn.Identity(), mask=3, first=4, vocabulary=1000, seed=0)
    ids = torch.randint(0, 1000, (200, 500), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = 1
    seen, wanted = masking.masked(ids)
    chosen = wanted != -100
    assert torch.equal(wanted[chosen], ids[chosen])
    assert torch.equal(seen[~chosen], ids[~chosen])
    assert not bool(chosen[ids < 4].any())
    assert float(chosen.float().mean()) == pytest.approx(0.15, abs=0.005)
    assert float((seen[chosen] == 3).float().mean()) == pytest.approx(0.8, abs=0.02)
    assert float((seen[chosen] == ids[chosen]).float().mean()) == pytest.approx(0.1, abs=0.02)
    assert int(seen[chosen].min()) >= 3
    again, _ = masking.masked(ids)
    assert not torch.equal(again, seen), "each visit hides other tokens"
