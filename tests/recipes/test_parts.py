"""The parts that recipes are made of: arguments, plan, shared errors, text, models, what is reported."""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecomp.config import Config
from pipecomp.data import as_micro_batch, eval_batches
from pipecomp.distributed import rendezvous
from pipecomp.distributed.collectives import gathered
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.distributed.preemption import LOST_STATUS
from pipecomp.errors import ConfigError, DataError, PipecompError, StoreError
from pipecomp.recipes import language, run, steps, text
from pipecomp.recipes.report import Report
from pipecomp.recipes.resume import lock_folder
from pipecomp.recipes.written import Lines
from pipecomp.stats import DIRECTIONS, Traffic
from tests.limits import HANG_S
from tests.recipes.recipe_runs import ROOT, script

NEEDED = ["--deepspeed_config", "c.json", "--model", "tiny", "--tokenizer", "t"]


def text_arguments(*words: str) -> argparse.Namespace:
    parser = run.arguments("name", "what it does")
    text.add_arguments(parser)
    return parser.parse_args([*NEEDED, *words])


class Words:
    """Stands in for a tokenizer: a number for each word."""

    eos_token_id = 0

    def __call__(self, lines: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        assert not add_special_tokens
        return {"input_ids": [[int(word) for word in line.split()] for line in lines]}

    def __len__(self) -> int:
        return 50


class TestCommandLine:
    @pytest.mark.parametrize("place", ["--local_rank=1", "--local-rank=1"])  # deepspeed's, and older torch's
    def test_launchers_local_rank_and_both_spellings_are_taken(self, place: str) -> None:
        args = run.arguments("n", "d").parse_args(
            [place, "--deepspeed-config", "c.json", *NEEDED[2:], "--train-file", "a", "b", "--stages", "2"]
        )
        assert (args.deepspeed_config, args.train_file, args.stages, args.seed) == ("c.json", ["a", "b"], 2, None)

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["--epochs", "0"], "--epochs: got 0, allowed: a whole number of at least 1"),
            (["--stages", "two"], "--stages: invalid whole number value: 'two'"),
            (["--seed", "-1"], "--seed: got -1, allowed: a whole number from 0 to 4294967295"),
            (["--seed", "4294967296"], "--seed: got 4294967296"),
            (["--epoch", "3"], "unrecognized arguments: --epoch 3"),
        ],
    )
    def test_what_is_wrong_is_told(self, words: list[str], told: str) -> None:
        with pytest.raises(run.UsageError, match=told):
            run.arguments("n", "d").parse_args([*NEEDED, *words])

    @pytest.mark.parametrize(
        ("words", "key"),
        [
            ([], "--train-file"),
            (["--train-file", "a", "--dataset", "b"], "--train-file"),
            (["--dataset", "b", "--eval-file", "c"], "--eval-file"),
            (["--train-file", "a", "--block-size", "1"], "--block-size"),
            (["--train-file", "a", "--dropout", "1"], "--dropout"),
        ],
    )
    def test_text_arguments_that_do_not_go_together(self, words: list[str], key: str) -> None:
        with pytest.raises(ConfigError) as caught:
            text.check_arguments(text_arguments(*words))
        assert caught.value.key == key


class TestRun:
    @staticmethod
    def status(main: Any, monkeypatch: pytest.MonkeyPatch, words: list[str] = NEEDED) -> int | str | None:
        monkeypatch.setattr("sys.argv", ["train.py", *words])
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
        with pytest.raises(SystemExit) as ended:
            run.run(main, run.arguments("name", "what it does"))
        return ended.value.code

    def test_exit_status_and_one_line(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)

        def fails(args: argparse.Namespace) -> NoReturn:
            raise StoreError("no room")

        def interrupted(args: argparse.Namespace) -> NoReturn:
            raise KeyboardInterrupt

        assert self.status(lambda args: None, monkeypatch) == 0
        assert capsys.readouterr().err == ""
        assert self.status(interrupted, monkeypatch) == 130
        assert capsys.readouterr().err.startswith("name: stopped by Ctrl-C without saving a checkpoint")
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert self.status(interrupted, monkeypatch) == 130
        assert capsys.readouterr().err == "", "once on a machine"
        monkeypatch.delenv("LOCAL_RANK")
        assert self.status(fails, monkeypatch) == 1
        assert capsys.readouterr().err == "name: error: no room\n"
        assert self.status(fails, monkeypatch, ["--model", "x"]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert "--deepspeed_config" in lines[0]

    def test_other_ranks_let_the_first_one_speak_and_be_ended_and_speak_if_they_are_not(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        waited: list[float] = []
        monkeypatch.setenv("LOCAL_RANK", "1")
        monkeypatch.setattr(time, "sleep", waited.append)
        assert self.status(lambda args: None, monkeypatch, ["--model", "x"]) == 2
        assert waited == [run._FIRST_S]
        assert "--deepspeed_config" in capsys.readouterr().err, "it fails alone"

    def test_a_bug_keeps_its_traceback(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.argv", ["train.py", *NEEDED])
        with pytest.raises(ZeroDivisionError):
            run.run(lambda args: print(1 // 0), run.arguments("name", "what it does"))


def _share_errors(rank: int, world: int, note: Any, folder: str) -> list[str]:
    """Runs on each rank: the errors where one rank fails, all of them, or none; where they differ; what is printed."""
    import contextlib
    import io

    rendezvous.start_processes(5)
    told = []
    for failing in ([], [1], [0, 1]):
        try:
            with rendezvous.all_ranks().collective_errors():
                if rank in failing:
                    raise DataError("no such file")
            told.append("fine")
        except PipecompError as error:
            told.append(f"{type(error).__name__}: {error}")
    (Path(folder) / f"{rank}.json").write_text('{"train_micro_batch_size_per_gpu": 2}')
    for own in (["--seed", str(rank)], ["--out", f"{folder}/held"], ["--checkpoint", f"{folder}/held"]):
        args = text_arguments("--deepspeed_config", f"{folder}/{rank}.json", *own)
        try:
            run.train(args, run.Workload(model=None, training=range(8), trained={}))
        except PipecompError as error:
            told.append(f"{type(error).__name__}: {error}")
    heard = io.StringIO()
    with contextlib.redirect_stderr(heard):
        run._print_once("all ranks say this")
        torch.distributed.barrier()
        run._print_once(f"rank {rank} says this")
    torch.distributed.destroy_process_group()
    return [*told, heard.getvalue()]


@pytest.mark.ranks
def test_an_error_of_one_rank_ends_all_and_is_told_once(tmp_path: Path) -> None:
    lock_folder("--out", tmp_path / "held")
    found = run_ranks(2, _share_errors, str(tmp_path), timeout_s=HANG_S)
    own, everywhere = "DataError: no such file", "LinkError: rank 1 could not start: DataError: no such file"
    assert found[0][:3] == ["fine", everywhere, own]
    assert found[1][:3] == ["fine", own, own]
    for rank in (0, 1):
        assert found[rank][3].startswith("LinkError: the ranks of this run do not fit together: pipecomp.seed is ")
    for told, argument in ((4, "--out"), (5, "--checkpoint")):
        taken = f"ConfigError: {argument}: got '{tmp_path}/held', allowed: another folder: this one is in use"
        assert found[0][told].startswith(taken)
        assert found[1][told].startswith(f"LinkError: rank 0 could not start: {taken}")
    everything = found[0][6] + found[1][6]
    assert everything.count("all ranks say this\n") == 1
    assert "rank 0 says this\n" in found[0][6]
    assert "rank 1 says this\n" in found[1][6]


def _gather_with_one_killed(rank: int, world: int, note: Any) -> object:
    """Runs on each rank: exit status of those that are left."""

    def main(args: object) -> None:
        rendezvous.start_processes(5)
        gathered(rank)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(1000):
            gathered(rank)

    sys.argv = ["train.py", *NEEDED]
    with pytest.raises(SystemExit) as ended:
        run.run(main, run.arguments("name", "what it does"))
    return ended.value.code


@pytest.mark.ranks
def test_a_rank_that_is_killed_before_training_is_a_loss_for_the_others() -> None:
    """Otherwise an elastic run would end, as by an error of its own."""
    found = run_ranks(3, _gather_with_one_killed, timeout_s=HANG_S, may_die=[2])
    assert found == {0: LOST_STATUS, 1: LOST_STATUS}


class TestPlan:
    @given(
        samples=st.integers(1, 60),
        micro=st.integers(1, 4),
        accumulation=st.integers(1, 5),
        replicas=st.integers(1, 3),
        epochs=st.integers(1, 4),
        limit=st.none() | st.integers(1, 20),
    )
    @settings(deadline=None)
    def test_steps_and_epochs_are_those_of_the_micro_batches_counted_one_by_one(
        self, samples: int, micro: int, accumulation: int, replicas: int, epochs: int, limit: int | None
    ) -> None:
        config = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation}
        epoch_of = [e for e in range(1, epochs + 1) for _ in range(len(range(samples // replicas)) // micro)]
        firsts = [epoch_of[i] for i in range(0, len(epoch_of) - accumulation + 1, accumulation)][:limit]
        sizes: dict[str, Any] = {"samples": samples, "replicas": replicas, "epochs": epochs, "max_steps": limit}
        if not firsts:
            with pytest.raises(DataError, match="do not fill one batch"):
                steps.make_plan(config, **sizes)
            return
        plan = steps.make_plan(config, **sizes)
        assert [plan.epoch(step) for step in range(1, plan.steps + 1)] == firsts
        last = [step for step in range(1, plan.steps + 1) if plan.ends_epoch(step)]
        assert last == [i + 1 for i in range(len(firsts)) if i + 1 == len(firsts) or firsts[i + 1] != firsts[i]]

    def test_the_whole_batch_may_be_given_instead(self) -> None:
        config = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 24}
        plan = steps.make_plan(config, samples=240, replicas=3, epochs=1, max_steps=None)
        assert (plan.accumulation, plan.steps) == (4, 10)
        assert (
            steps.make_plan(
                {"train_micro_batch_size_per_gpu": 2}, samples=6, replicas=1, epochs=1, max_steps=None
            ).accumulation
            == 1
        )

    @pytest.mark.parametrize(
        ("config", "key"),
        [
            ({}, "train_micro_batch_size_per_gpu"),
            ({"train_micro_batch_size_per_gpu": "auto"}, "train_micro_batch_size_per_gpu"),
            ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
            ({"train_micro_batch_size_per_gpu": 2, "train_batch_size": 5}, "train_batch_size"),
            (
                {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "train_batch_size": 8},
                "train_batch_size",
            ),
        ],
    )
    def test_sizes_that_cannot_be(self, config: dict, key: str) -> None:
        with pytest.raises(ConfigError) as caught:
            steps.make_plan(config, samples=100, replicas=1, epochs=1, max_steps=None)
        assert caught.value.key == key


class TestConfiguration:
    def test_auto_becomes_numbers_and_the_seed_is_set(self) -> None:
        params = {"warmup_type": "linear", "warmup_min_lr": 0.0}
        params |= dict.fromkeys(("total_num_steps", "warmup_num_steps", "warmup_max_lr"), "auto")
        config = {"optimizer": {"params": {"lr": 0.25}}, "scheduler": {"params": params}, "pipecomp": {"seed": 4}}
        plan = steps.Plan(steps=200, per_epoch=50, micro_batch=1, accumulation=1, replicas=1)
        full = steps.complete(config, plan, 9)
        assert full["scheduler"]["params"] == {
            "warmup_type": "linear",
            "warmup_min_lr": 0.0,
            "total_num_steps": 200,
            "warmup_num_steps": 20,
            "warmup_max_lr": 0.25,
        }
        assert full["pipecomp"]["seed"] == 9
        assert steps.complete(config, plan, None)["pipecomp"]["seed"] == 4
        assert params["total_num_steps"] == "auto"  # what was given is not changed

    @pytest.mark.parametrize("key", ["warmup_max_lr", "warmup_type"])
    def test_auto_that_means_nothing(self, key: str) -> None:
        plan = steps.Plan(steps=2, per_epoch=50, micro_batch=1, accumulation=1, replicas=1)
        with pytest.raises(ConfigError, match=f"scheduler.params.{key}"):
            steps.complete({"scheduler": {"params": {key: "auto"}}}, plan, None)

    @pytest.mark.parametrize("text", ["{", "[]", '{"bf16": true}', '{"pipecomp": {"activations": {"method": "zip"}}}'])
    def test_files_that_are_no_configuration(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(ConfigError):
            steps.read_config(str(tmp_path / "c.json"))
        with pytest.raises(ConfigError, match="No such file"):
            steps.read_config(str(tmp_path / "d.json"))

    @pytest.mark.parametrize("path", sorted(Path(__file__).parents[2].glob("recipes/*/ds_config*.json")), ids=str)
    def test_shipped_configurations_are_complete(self, path: Path) -> None:
        config = steps.read_config(str(path))
        plan = steps.make_plan(config, samples=1000, replicas=1, epochs=1, max_steps=None)
        completed = steps.complete(config, plan, 1)
        by_rounds = path.parent.name == "resnet_split" and path.name != "ds_config_public.json"
        if by_rounds or path.parent.name in ("chat_lora", "chat_qlora"):
            assert "scheduler" not in completed  # the recipe has its own schedule
            return
        params = completed["scheduler"]["params"]
        assert params["total_num_steps"] == plan.steps
        assert params["warmup_type"] == "linear"  # DeepSpeed's default is logarithmic


class TestText:
    @given(lines=st.lists(st.lists(st.integers(0, 49), max_size=7), max_size=9), size=st.integers(2, 8))
    @settings(max_examples=60, deadline=None)
    def test_blocks_are_consecutive_and_stay_where_they_are(self, lines: list[list[int]], size: int) -> None:
        stream = [token for line in lines for token in line]
        rows = [" ".join(map(str, line)) for line in lines]
        if len(stream) < size:
            with pytest.raises(DataError, match=f"{len(stream)} tokens"):
                text.blocks(Words(), rows, size, vocabulary=50)
            return
        found = text.blocks(Words(), rows, size, vocabulary=50)
        assert len(found) == len(stream) // size
        for i in range(len(found)):
            assert found[i]["input_ids"].tolist() == stream[i * size : (i + 1) * size]
            assert found[i]["labels"].tolist() == found[i]["input_ids"].tolist()
            assert found[i]["input_ids"].dtype == torch.int64

    def test_a_long_text_is_tokenized_in_parts(self) -> None:
        """All tokens at once, as Python's numbers, would take thirty times the memory of the tensor."""
        asked = []

        def words(lines: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
            asked.append(len(lines))
            return Words()(lines, add_special_tokens)

        found = text.blocks(words, (str(n % 50) for n in range(2500)), 4, vocabulary=51, end=50)
        assert found.tokens_NS.flatten().tolist() == [token for n in range(2500) for token in (n % 50, 50)]
        assert asked == [1000, 1000, 500]

    def test_digest_tells_texts_apart(self) -> None:
        texts = ("1 2 3 4", "1 2 3 4", "1 2 4 3")
        one, again, other = (text.blocks(Words(), [words], 2, vocabulary=50) for words in texts)
        assert one.digest() == again.digest() != other.digest()

    def test_a_foreign_tokenizer_is_refused(self) -> None:
        with pytest.raises(DataError, match="makes token 9, "):
            text.blocks(Words(), ["1 9"], 2, vocabulary=9)

    def test_files_in_the_order_given(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_text("ä\nb")
        (tmp_path / "b").write_text("c\n")
        (tmp_path / "bad").write_bytes(b"ok\xff")
        args = text_arguments("--train-file", str(tmp_path / "b"), str(tmp_path / "a"))
        assert text.read(args) == (["c\n", "ä\n", "b"], None)
        args = text_arguments("--train-file", str(tmp_path / "a"), str(tmp_path / "b"))
        assert text.read(args) == (["ä\n", "b\n", "c\n"], None), "b and c are two words"
        with pytest.raises(DataError, match="not UTF-8: byte 2 is 0xff"):
            text.read_lines(str(tmp_path / "bad"))
        with pytest.raises(DataError, match="cannot be read"):
            text.read_lines(str(tmp_path))

    def test_a_byte_order_mark_is_no_text_and_only_line_feeds_end_lines(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_bytes('\ufeff{"text": "one\u2028two\x85 \x0c"}\r\n'.replace("\x0c", "").encode())
        assert text.read_lines(str(tmp_path / "a.jsonl")) == ['{"text": "one\u2028two\x85 "}\n']
        assert language.documents_of(str(tmp_path / "a.jsonl"), "text") == ["one\u2028two\x85 "]
        assert language.documents_of(str(tmp_path / "a.jsonl"), "text", join=True) == ["one two"]
        (tmp_path / "form feeds").write_bytes(b"one\x0ctwo\rthree\r\n")
        assert text.read_lines(str(tmp_path / "form feeds")) == ["one\x0ctwo\rthree\n"]

    def test_documents_that_are_all_empty_are_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "a.JSONL").write_text('{"text": " "}\n\n')

        def strict(lines: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
            return {"input_ids": [[1] for _ in lines] or [lines[0]]}  # an IndexError, as fast tokenizers have it

        with pytest.raises(DataError, match="the text has 0 tokens, too few for one block of 2"):
            text.blocks(strict, language.documents_of(str(tmp_path / "a.JSONL"), "text"), 2, vocabulary=50)

    def test_a_held_out_text_that_is_too_short_is_named(self) -> None:
        with pytest.raises(DataError, match="the held-out text has 1 tokens, too few for one block of 2"):
            text.blocks(Words(), ["7"], 2, vocabulary=50, what="held-out text")

    def test_a_dataset_of_text(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
        data = tmp_path / "data"
        data.mkdir()
        (data / "train.txt").write_text("one\ntwo\n")
        (data / "validation.txt").write_text("three\n")
        args = text_arguments("--dataset", str(data))
        text.check_arguments(args)
        assert text.read(args) == (["one\n", "two\n"], ["three\n"])
        with pytest.raises(ConfigError, match="--dataset"):
            text.read(text_arguments("--dataset", str(tmp_path / "nothing")))


class TestModels:
    def test_tiny_fits_the_tokenizer(self) -> None:
        source, config = text.causal_model(text_arguments("--block-size", "16", "--dropout", "0.25"), Words())
        assert (config.vocab_size, config.n_positions, config.n_layer, config.resid_pdrop) == (50, 16, 4, 0.25)
        assert source.weights is None
        _, config = text.causal_model(text_arguments(), Words())
        assert (config.n_positions, config.resid_pdrop) == (128, 0)
        assert text.block_size(text_arguments(), config) == 128

    def test_a_config_file_has_no_weights_a_folder_has(self, tmp_path: Path) -> None:
        from transformers import GPT2Config

        config = GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=50, n_positions=2048)
        config.save_pretrained(tmp_path)
        args = text_arguments("--model", str(tmp_path / "config.json"))
        source, found = text.causal_model(args, Words())
        assert (source.weights, found.n_layer, found.resid_pdrop) == (None, 1, 0.1)
        assert text.block_size(args, found) == 1024
        with pytest.raises(ConfigError, match="at most 2048"):
            text.block_size(text_arguments("--block-size", "4096"), found)
        path, _ = text.causal_model(text_arguments("--model", str(tmp_path)), Words())
        assert path == str(tmp_path)
        args = text_arguments("--model", str(tmp_path), "--dropout", "0")
        source, _ = text.causal_model(args, Words())
        assert (source.weights, source.config.resid_pdrop, source.config.dtype) == (str(tmp_path), 0, torch.float32)

    @pytest.mark.parametrize("argument", ["--model", "--tokenizer"])
    def test_names_that_are_nothing(self, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import huggingface_hub.constants

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        calls: dict[str, Callable[[], Any]] = {
            "--model": lambda: text.causal_model(text_arguments("--model", "no/thing"), Words()),
            "--tokenizer": lambda: text.load_tokenizer("no/thing", []),
        }
        with pytest.raises(ConfigError) as caught:
            calls[argument]()
        assert caught.value.key == argument
        assert "\n" not in str(caught.value)

    def test_a_folder_without_a_tokenizer(self, tmp_path: Path) -> None:
        """transformers makes one without words of GPT-2's configuration alone."""
        from transformers import GPT2Config

        GPT2Config(n_layer=1).save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match=r"--tokenizer: got .*only special tokens"):
            text.load_tokenizer(str(tmp_path), [])

    def test_dropout_of_a_model_without(self, tmp_path: Path) -> None:
        from transformers import LlamaConfig

        LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match="not llama"):
            text.causal_model(text_arguments("--model", str(tmp_path), "--dropout", "0.1"), Words())

    @pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertForSequenceClassification"])
    def test_a_model_that_predicts_no_next_token(self, kind: str, tmp_path: Path) -> None:
        """A masked model would be trained to say the tokens that it sees."""
        from transformers import BertConfig

        BertConfig(num_hidden_layers=1, architectures=[kind]).save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match=f"--model: got .*, a {kind}.*, allowed: a causal language model"):
            text.causal_model(text_arguments("--model", str(tmp_path)), Words())

    def test_a_tokenizer_is_trained_on_the_text_and_loads_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
        monkeypatch.setattr("pipecomp.recipes.text.broadcast", lambda made: made)
        rows = ["round and round it goes\n"] * 20
        tokenizer = text.load_tokenizer("train:300", rows)
        assert 257 <= len(tokenizer) <= 300
        tokenizer.save_pretrained(tmp_path)
        again = text.load_tokenizer(str(tmp_path), [])
        assert again(rows[0])["input_ids"] == tokenizer(rows[0])["input_ids"]
        assert len(again(rows[0])["input_ids"]) < len(rows[0]) / 2
        assert again.decode(again(rows[0])["input_ids"]) == rows[0]
        assert again.eos_token_id == tokenizer.eos_token_id is not None
        with pytest.raises(ConfigError, match="--tokenizer"):
            text.load_tokenizer("train:10", rows)


class TestReport:
    @staticmethod
    def rank(replica: int, links: list[str], sent: int) -> dict:
        def direction(scale: int) -> dict:
            return {"bytes_raw": 10 * scale * sent, "bytes_sent": scale * sent}

        both = {"forward": direction(1), "backward": direction(2), "evaluation": direction(3)}
        groups = {"data parallel": {"bytes_raw": 5, "bytes_sent": 4, "calls": 1}}
        return {"replica": replica, "links": dict.fromkeys(links, both), "groups": groups}

    def test_a_link_is_counted_once_for_each_replica(self) -> None:
        ranks = [self.rank(r, links, sent=r + 1) for r in (0, 1) for links in (["0->1"], ["0->1", "1->2"], ["1->2"])]
        found = Traffic.of(ranks)
        assert list(found.links) == ["0->1", "1->2"]
        for link in found.links.values():
            assert (link["forward_bytes_sent"], link["backward_bytes_raw"], link["evaluation_bytes_sent"]) == (3, 60, 9)
        assert found.groups == {"data parallel": {"bytes_raw": 30, "bytes_sent": 24}}

    def report(self, report: Report) -> None:
        plan = steps.Plan(steps=2, per_epoch=2, micro_batch=1, accumulation=1, replicas=1)
        traffic = Traffic.of([self.rank(0, ["0->1"], 7)])
        with report:
            report.start(SimpleNamespace(model="tiny"), plan, Config(), 2, 2, 1)  # type: ignore[arg-type]
            report.step(1, 1, loss=2.0, lr=0.1, per_s=9.96, traffic=traffic)
            report.step(2, 1, loss=math.nan, lr=0.1, per_s=9.96, traffic=traffic)
            report.epoch(2, 1, {"loss": 1.5, "perplexity": math.inf}, traffic)
            report.end(traffic, "folder")

    def test_lines_are_json(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.report(Report(str(tmp_path / "new" / "m.jsonl"), None, silent=False))

        def refuse(name: str) -> NoReturn:
            raise AssertionError(f"{name} is not JSON")

        lines = (tmp_path / "new" / "m.jsonl").read_text().splitlines()
        first, second, third = (json.loads(line, parse_constant=refuse) for line in lines)
        assert first["links"]["0->1"]["forward_bytes_sent"] == 7
        assert (first["tokens_per_s"], second["loss"]) == (10.0, None)
        assert third["eval"] == {"loss": 1.5, "perplexity": None}
        assert third["links"] == first["links"]
        said = capsys.readouterr().out
        assert "forward 7 B for 70 B, 10.0 times less" in said
        assert "model saved in folder" in said

    def test_lines_have_each_steps_bits(self, tmp_path: Path) -> None:
        """Mean bits of the step, over both links; None where nothing is quantized, as gradients here."""

        def counted(bits: int, values: int) -> list[dict[str, Any]]:
            ways = {"forward": (bits, values), "backward": (0, 0), "evaluation": (9, 9)}
            found = [self.rank(0, ["0->1", "1->2"], sent=1)]
            for link in found[0]["links"].values():
                link["wait_seconds"] = 0.0
                for way, (spent, of) in ways.items():
                    link[way] |= {"code_bits": spent, "values_quantized": of}
            return found

        report = Report(str(tmp_path / "m.jsonl"), None, silent=False)
        plan = steps.Plan(steps=9, per_epoch=9, micro_batch=1, accumulation=1, replicas=1)
        with report:
            report.start(SimpleNamespace(model="tiny"), plan, Config(), 2, 2, 1)  # type: ignore[arg-type]
            for step, stats in enumerate((counted(0, 0), counted(80, 10), counted(100, 20)), 1):
                report.step(step, 1, loss=2.0, lr=0.1, per_s=9.96, traffic=Traffic.of(stats), stats=stats)
        lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
        assert [line.get("forward_bits") for line in lines] == [None, 8.0, 2.0]
        assert not any("backward_bits" in line for line in lines)

    def test_a_run_that_is_stopped_says_how_it_goes_on(self, capsys: pytest.CaptureFixture[str]) -> None:
        """`pipecomp train` has no --resume: it goes on by itself."""
        for resumes, how in ((False, "the same command with --resume auto"), (True, "the same command")):
            Report(None, None, silent=False).interrupted(7, "SIGINT on rank 0", saved=True, resumes=resumes)
            assert f"after step 7: SIGINT on rank 0; {how} resumes from there\n" in capsys.readouterr().out
        Report(None, None, silent=False).interrupted(7, "SIGINT", saved=False, resumes=True)
        assert (
            "resumes from the previous checkpoint, if any, because this step could not be saved"
            in capsys.readouterr().out
        )

    def test_outside_a_terminal_there_is_a_line_every_ten_seconds(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """And one of the first and of the last step."""
        clock = [0.0]
        monkeypatch.setattr("pipecomp.recipes.report.time", SimpleNamespace(perf_counter=lambda: clock[0]))
        plan = steps.Plan(steps=6, per_epoch=6, micro_batch=1, accumulation=1, replicas=1)
        with Report(None, None, silent=False) as report:
            report.start(SimpleNamespace(model="tiny"), plan, Config(), 2, 2, 1)  # type: ignore[arg-type]
            for step, now in enumerate((1.0, 10.9, 11.0, 20.9, 21.0, 22.0), 1):
                clock[0] = now
                report.step(step, 1, loss=2.0, lr=0.1, per_s=9.96, traffic=Traffic({}, {}))
        said = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
        assert said == ["1/6", "3/6", "5/6", "6/6"]

    def test_an_epoch_whose_losses_an_earlier_run_had(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """A run that was stopped on an epoch's last step goes on with its evaluation, and may have no lines of it."""
        plan = steps.Plan(steps=6, per_epoch=3, micro_batch=1, accumulation=1, replicas=1)
        for metrics in (None, str(tmp_path / "m.jsonl")):
            for measures in (None, {"loss": 1.5}):
                with Report(metrics, None, silent=False, after=3) as report:
                    report.start(SimpleNamespace(model="tiny"), plan, Config(), 2, 2, 1)  # type: ignore[arg-type]
                    report.epoch(3, 1, measures, Traffic({}, {}))
        said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch 1 done")]
        assert [line.partition(" s")[2] for line in said] == 2 * ["", ": held-out loss 1.5000"]
        (line,) = (json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines())
        assert line["eval"] == {"loss": 1.5}
        assert "train_loss" not in line

    def test_links_that_nothing_crossed_have_no_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        plan = steps.Plan(steps=6, per_epoch=3, micro_batch=1, accumulation=1, replicas=1)
        nothing = {f"{way}_bytes_{kind}": 0 for way in DIRECTIONS for kind in ("raw", "sent")}
        with Report(None, None, silent=False, after=6) as report:
            report.start(SimpleNamespace(model="tiny"), plan, Config(), 2, 2, 1)  # type: ignore[arg-type]
            report.end(Traffic({"0->1": nothing}, {}), None)
        assert "link 0->1" not in capsys.readouterr().out

    def test_silent_ranks_write_nothing(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.report(Report(str(tmp_path / "m.jsonl"), str(tmp_path / "board"), silent=True))
        assert list(tmp_path.iterdir()) == []
        assert capsys.readouterr().out == ""

    def test_metrics_that_stay_are_never_gone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A run that goes on may be killed at any time: it does not write them again."""
        file = tmp_path / "m.jsonl"
        file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')

        def killed(*paths: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", killed)
            Lines(str(file), 2).close()
        assert file.read_text() == '{"step": 1}\n{"step": 2}\n'

    def test_a_file_that_cannot_be_written_is_known_before_training(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="--metrics"):
            Report(str(tmp_path / "file" / "m.jsonl"), None, silent=False)
        pytest.importorskip("tensorboard", reason="no tensorboard (pip install tensorboard)")
        for folder in (tmp_path / "file", tmp_path / "file" / "board"):
            with pytest.raises(ConfigError, match=r"--tensorboard: got .*file.*a folder that can be written"):
                Report(None, str(folder), silent=False)

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's own
    @pytest.mark.parametrize("late", [False, True])
    def test_a_full_disk_ends_the_curves_and_not_the_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], late: bool
    ) -> None:
        """It is said once: in a step, or at the end if only the last points do not fit.

        A thread of TensorBoard's writes, ten points behind at most.
        """
        writers = pytest.importorskip("tensorboard.summary.writer.record_writer", reason="no tensorboard")

        def full(*args: object) -> NoReturn:
            raise OSError(errno.ENOSPC, "No space left on device")

        report, told = Report(None, str(tmp_path / "board"), silent=False), []
        plan = steps.Plan(steps=9, per_epoch=9, micro_batch=1, accumulation=1, replicas=1)
        with report:
            report.start(SimpleNamespace(model="tiny"), plan, Config(), 2, 2, 1)  # type: ignore[arg-type]
            if not late:
                monkeypatch.setattr(writers.RecordWriter, "write", full)
            for step in range(1, 9):
                report.step(step, 1, loss=2.0, lr=0.1, per_s=9.96, traffic=Traffic({}, {}))
                told += report.take_errors()
            if late:
                monkeypatch.setattr(writers.RecordWriter, "flush", full)
        printed = capsys.readouterr().out.splitlines()
        said = [line for line in printed if "cannot be written" in line]
        assert ["lacks its last entries" in line for line in printed][-1]
        assert told + said == [f"--tensorboard: {tmp_path / 'board'} cannot be written: No space left on device"]
        assert (len(told), len(said)) == ((0, 1) if late else (1, 0))


def test_a_batch_of_blocks_is_what_the_engine_takes() -> None:
    found = text.blocks(Words(), ["1 2 3 4 5"], 2, vocabulary=50)
    batch = as_micro_batch(eval_batches(found, 2)[0])
    assert batch.ids == (0, 1)
    assert batch.inputs["input_ids"].tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("name", sorted(path.parent.name for path in (ROOT / "recipes").glob("*/train.py")))
def test_a_launcher_takes_no_option_of_a_recipe_for_its_own(name: str) -> None:
    """torchrun refused --run, which its own --run-path and --run_path begin with."""
    from deepspeed.launcher.runner import parse_args as deepspeed
    from torch.distributed.run import get_args_parser

    actions = script(name).arguments()._actions
    options = [option for a in actions if a.help != argparse.SUPPRESS for option in a.option_strings if option != "-h"]
    assert "--out" in options
    for option in options:
        assert get_args_parser().parse_args(["train.py", option, "x"]).training_script_args == [option, "x"]
        assert deepspeed(["train.py", option, "x"]).user_args == [option, "x"]
