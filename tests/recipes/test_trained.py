"""A recipe's comparison with its checkpoint before it resumes: the command line and the data of every run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipecomp.distributed import rendezvous
from pipecomp.distributed.consistency import AllRanks
from pipecomp.recipes import run
from pipecomp.recipes.resume import DATA, what_is_trained
from tests.models import tokenizer_for
from tests.recipes.recipe_runs import ROOT, script

peft = pytest.importorskip("peft")

TEXTS = [f"the link of stage {n} sends what stage {n + 1} keeps" for n in range(30)]
LANGUAGE, ENCODERS = ("gpt2_wikitext2", "gpt2_arxiv", "llama_lora"), ("deberta_qnli", "deberta_cola")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of training data, each in two versions, and a Llama with its tokenizer and two adapters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("trained")
    for name, texts in (("a", TEXTS), ("b", [TEXTS[1], *TEXTS[1:]])):
        (folder / f"{name}.txt").write_text("\n".join(texts) + "\n")
        rows = [f"{n % 2}\t{text}\t{text[:9]}" for n, text in enumerate(texts)]
        (folder / f"{name}.tsv").write_text("\n".join(["label\tsentence\tquestion", *rows]) + "\n")
        pixels = np.full((6, 8, 8, 3), 3, dtype=np.uint8)
        pixels[5] = ord(name)
        np.savez(folder / f"{name}.npz", x=pixels, y=np.arange(6) % 3)
    (folder / "again.txt").write_bytes((folder / "a.txt").read_bytes())
    tokenizer = tokenizer_for(TEXTS)
    settings = json.loads((ROOT / "recipes" / "llama_lora" / "llama_tiny.json").read_text())
    settings |= {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**settings | {"max_position_embeddings": 64}))
    for name in ("llama", "elsewhere/llama", "other"):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for alpha in (4.0, 8.0):
        lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=alpha, target_modules=["q_proj"])
        peft.get_peft_model(LlamaForCausalLM(model.config), lora).save_pretrained(folder / f"adapter-{alpha:g}")
    return folder


def given(name: str, **changed: str) -> list[str]:
    """A command line. changed: value "" for a flag."""
    ends = {"deberta": "tsv", "resnet_": "npz"}.get(name[:7], "txt")
    least = {"deepspeed-config": "c.json", "train-file": f"a.{ends}"}
    if name != "resnet_split":
        least |= {"model": "tiny", "tokenizer": "train:300"}
    if name == "llama_lora":
        least |= {"model": "llama", "tokenizer": "llama"}
    values = least | {key.replace("_", "-"): value for key, value in changed.items()}
    return [word for key, value in values.items() for word in (f"--{key}", *value.split())]


@pytest.fixture
def trained(work: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Return the record that `run.train` gets, or resnet_split's own, for a recipe and changes of its command line."""

    kept: dict[str, Any] = {}
    monkeypatch.chdir(work)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr("pipecomp.recipes.text.broadcast", lambda made: made)
    monkeypatch.setattr(rendezvous, "start_processes", lambda seed, config=None: None)
    monkeypatch.setattr(rendezvous, "all_ranks", lambda: AllRanks(0, 1, torch.distributed.HashStore()))
    monkeypatch.setattr(run, "train", lambda args, work: kept.update(trained=work.trained))

    def find(name: str, **changed: str) -> dict[str, Any]:
        module = script(name)
        args: argparse.Namespace = module.arguments().parse_args(given(name, **changed))
        if name == "resnet_split":
            _, (task, _) = module.read(args, 2, 1, 0)
            return what_is_trained(args, module.meanings(args, {}, task))
        module.main(args)
        return dict(kept["trained"])

    return find


def differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Keys, but for those of the model's configuration."""
    return {key for key in one.keys() | other.keys() if one.get(key) != other.get(key) and not key.startswith("model.")}


@pytest.mark.parametrize(
    ("name", "changed", "keys"),
    [
        *((name, {"train_file": "b.txt"}, {DATA}) for name in LANGUAGE),
        *((name, {"train_file": "b.tsv"}, {DATA}) for name in ENCODERS),
        *((name, {"block_size": "16"}, {DATA, "--block-size"}) for name in LANGUAGE),
        *((name, {"dropout": "0.1"}, {"--dropout"}) for name in (*LANGUAGE[:2], *ENCODERS)),
        *((name, {"max_tokens": "64"}, {"--max-tokens"}) for name in ENCODERS),
        *((name, {"max_tokens": "6"}, {DATA, "--max-tokens"}) for name in ENCODERS),
        ("gpt2_wikitext2", {"tokenizer": "train:280"}, {DATA}),
        ("gpt2_arxiv", {"field": "summary"}, {"--field"}),
        ("llama_lora", {"lora_rank": "4"}, {"--lora-rank"}),
        ("llama_lora", {"lora_alpha": "4"}, {"--lora-alpha"}),
        ("llama_lora", {"lora_dropout": "0.5"}, {"--lora-dropout"}),
        ("llama_lora", {"lora_targets": "v_proj q_proj"}, {"--lora-targets"}),
        ("llama_lora", {"model": "other"}, {"--model"}),
        ("resnet_split", {"train_file": "b.npz"}, {DATA}),
        ("resnet_split", {"clients": "2"}, {"--clients"}),
        ("resnet_split", {"concentration": "2"}, {"--concentration"}),
        ("resnet_split", {"crop": "2"}, {"--crop"}),
        ("resnet_split", {"no_flip": ""}, {"--no-flip"}),
        ("resnet_split", {"unmatched": ""}, {"--unmatched"}),
        ("resnet_split", {"epochs": "2"}, {"--epochs"}),
        ("resnet_split", {"decay_rounds": "2"}, {"--decay-rounds"}),
        ("resnet_split", {"norm": "group"}, {"--norm"}),
        ("resnet_split", {"model": "tiny"}, {"--model"}),
    ],
)
def test_what_changes_the_training_is_compared(
    trained: Callable[..., dict[str, Any]], name: str, changed: dict[str, str], keys: set[str]
) -> None:
    usual = {"clients": "3"} if name == "resnet_split" else {}
    assert differing(trained(name, **usual), trained(name, **usual | changed)) == keys


OUTPUT = {
    "metrics": "m",
    "tensorboard": "t",
    "trace": "tr",
    "save": "s",
    "max_steps": "3",
    "checkpoint": "c",
    "save_every": "3",
    "keep": "1",
    "resume": "auto",
    "seed": "3",
}


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        *((name, OUTPUT | {"epochs": "7", "stages": "1"}) for name in (*LANGUAGE, *ENCODERS)),
        *((name, {"eval_file": "b.txt"}) for name in LANGUAGE),
        *((name, {"train_file": "again.txt"}) for name in LANGUAGE),
        ("gpt2_wikitext2", {"block_size": "128"}),
        ("llama_lora", {"model": "elsewhere/llama", "tokenizer": "other"}),
        ("resnet_split", OUTPUT | {"rounds": "7", "weights": "s", "eval_file": "b.npz", "decay_rounds": "20"}),
    ],
)
def test_what_changes_nothing_is_not(
    trained: Callable[..., dict[str, Any]], name: str, changed: dict[str, str]
) -> None:
    usual = {"clients": "3"} if name == "resnet_split" else {}
    assert trained(name, **usual) == trained(name, **usual | changed)


def test_an_adapters_own_settings_count(trained: Callable[..., dict[str, Any]]) -> None:
    found = trained("llama_lora", adapter="adapter-8")
    assert [found[f"--lora-{of}"] for of in ("rank", "alpha", "dropout", "targets")] == [2, 8, 0, ["q_proj"]]
    assert differing(found, trained("llama_lora", adapter="adapter-4")) == {"--lora-alpha"}


def test_a_model_is_known_by_its_configuration(trained: Callable[..., dict[str, Any]], work: Path) -> None:
    config = {"model_type": "gpt2", "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 400}
    for name, more in (("one", {}), ("two", {"activation_function": "relu"})):
        (work / f"{name}.json").write_text(json.dumps(config | more))
    one, two = (trained("gpt2_wikitext2", model=f"{name}.json") for name in ("one", "two"))
    assert {key for key in one if one[key] != two[key]} == {"model.activation_function"}
    assert one.keys() == two.keys()


def test_a_scheduler_of_the_configuration_leaves_no_decay(work: Path) -> None:
    module = script("resnet_split")
    args = module.arguments().parse_args(given("resnet_split", train_file=str(work / "a.npz"), clients="2"))
    _, (task, _) = module.read(args, 2, 1, 0)
    assert module.meanings(args, {"scheduler": {}}, task)["--decay-rounds"] is None
    assert module.meanings(args, {}, task)["--decay-rounds"] == 20
