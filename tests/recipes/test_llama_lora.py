"""The recipe on two processes: a small Llama in a folder, text files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipecomp.stages.partition.loading import skeleton
from tests.models import made_up_text
from tests.recipes.recipe_runs import ROOT, Ended, launch, launch_nodes

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.ranks

RECIPE, BLOCK = "llama_lora", 32
NO_LORA: dict[str, str | None] = {"lora-rank": None, "lora-targets": None}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, a Llama with its tokenizer, and a DeepSpeed configuration."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("recipe")
    (folder / "train.txt").write_text(made_up_text(200, 0))
    (folder / "held-out.txt").write_text(made_up_text(60, 1))
    bpe = ByteLevelBPETokenizer()
    bpe.train([str(folder / "train.txt")], vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(bpe.to_str()), eos_token="<|endoftext|>")
    tokenizer.save_pretrained(folder / "llama")
    settings = json.loads((ROOT / "recipes" / RECIPE / "llama_tiny.json").read_text())
    settings |= {"vocab_size": len(tokenizer), "hidden_size": 48, "intermediate_size": 64}
    settings["max_position_embeddings"] = BLOCK
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**settings)).save_pretrained(folder / "llama")
    config = json.loads((ROOT / "recipes" / RECIPE / "ds_config_cpu.json").read_text())
    config |= {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    config["optimizer"]["params"]["lr"] = 1e-2
    config["pipecomp"]["store"]["path"] = "messages"
    (folder / "ds_config.json").write_text(json.dumps(config))
    return folder


def arguments(**changed: str | None) -> list[str]:
    """The command line with some arguments changed; None leaves one out."""
    given: dict[str, str | None] = {
        "deepspeed_config": "ds_config.json",
        "model": "llama",
        "tokenizer": "llama",
        "train-file": "train.txt",
        "eval-file": "held-out.txt",
        "epochs": "2",
        "seed": "3",
        "lora-rank": "4",
        "lora-targets": "all-linear",
        "metrics": "metrics.jsonl",
        "save": "adapter",
    } | changed
    return [word for key, value in given.items() if value is not None for word in (f"--{key}", *value.split())]


@pytest.fixture(scope="module")
def ended(work: Path) -> Ended:
    return launch(work, RECIPE, *arguments())


@pytest.fixture
def metrics(work: Path, ended: Ended) -> list[dict]:
    assert ended.status == 0, ended.output
    return [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]


def test_trains_and_compresses(metrics: list[dict]) -> None:
    trained = [line for line in metrics if "eval" not in line]
    assert trained[-1]["loss"] < trained[0]["loss"] - 0.3
    link = trained[-1]["links"]["0->1"]
    assert link["forward_bytes_sent"] < 0.75 * link["forward_bytes_raw"]  # the first of two epochs goes whole
    assert link["backward_bytes_sent"] < 0.3 * link["backward_bytes_raw"]
    assert trained[-1]["groups"] == {}  # frozen weights have no gradients to exchange, tied or not


def test_saved_adapter_has_the_recorded_held_out_loss(work: Path, metrics: list[dict]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    names = {path.name for path in (work / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert not any(name.startswith("model") for name in names)
    sizes = [(work / f).stat().st_size for f in ("adapter/adapter_model.safetensors", "llama/model.safetensors")]
    assert sizes[0] < sizes[1]
    base = AutoModelForCausalLM.from_pretrained(work / "llama")
    model = peft.PeftModel.from_pretrained(base, work / "adapter").eval()
    tokenizer = AutoTokenizer.from_pretrained(work / "adapter")
    tokens: list[int] = []
    for line in (work / "held-out.txt").read_text().splitlines(keepends=True):
        tokens += tokenizer(line)["input_ids"]
    rows = torch.tensor(tokens[: len(tokens) // BLOCK * BLOCK]).view(-1, BLOCK)
    with torch.no_grad():
        losses = [model(input_ids=row[None], labels=row[None]).loss.item() for row in rows]
    assert metrics[-1]["eval"]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


@pytest.mark.soak
def test_nodes_of_a_hostfile_without_ssh(work: Path) -> None:
    """With DeepSpeed's launcher; tests/dist/test_netlab.py starts it so in every run of the tests."""
    changed = {"metrics": "nodes.jsonl", "save": "nodes", "max-steps": "2"}
    found = launch_nodes(work, RECIPE, arguments(**changed), arguments(**changed))
    assert found.status == 0, found.output
    assert (work / "nodes" / "adapter_model.safetensors").is_file()


def test_goes_on_with_the_adapter(work: Path, metrics: list[dict]) -> None:
    changed = {"adapter": "adapter", "metrics": "more.jsonl", "save": "again", "max-steps": "2"}
    found = launch(work, RECIPE, *arguments(**changed, **NO_LORA))
    assert found.status == 0, found.output
    lines = [json.loads(line) for line in (work / "more.jsonl").read_text().splitlines()]
    before = [line["loss"] for line in metrics if "eval" not in line]
    assert lines[0]["loss"] < before[0] - 0.25
    assert (work / "again" / "adapter_model.safetensors").is_file()


def model_of(words: list[str]) -> Any:
    """Return the recipe's arguments to `pipecomp.initialize`, and its config."""
    from pipecomp.recipes import lora, run, text

    parser = run.arguments(RECIPE, "")
    text.add_arguments(parser)
    lora.add_arguments(parser)
    args = parser.parse_args(words)
    lora.check_arguments(args)
    return lora.causal_model(args, None)


def test_settings_of_a_new_adapter(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are documented where nothing is given; each that is given."""
    monkeypatch.chdir(work)
    for changed, expected in (
        (NO_LORA, (8, 16, 0.0, {"q_proj", "v_proj"})),
        ({"lora-alpha": "4", "lora-dropout": "0.25", "lora-targets": "k_proj"}, (4, 4, 0.25, {"k_proj"})),
    ):
        source, _ = model_of(arguments(**changed))
        lora = skeleton(source).peft_config["default"]
        assert (lora.r, lora.lora_alpha, lora.lora_dropout, lora.target_modules) == expected


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"lora-rank": "0"}, "--lora-rank: got 0, allowed"),
        ({"lora-alpha": "0"}, "--lora-alpha"),
        ({"lora-dropout": "1"}, "--lora-dropout"),
        ({"model": "tiny"}, "--model: got 'tiny'"),
        ({"dropout": "0.1"}, "--lora-dropout"),
        ({"model": "./nowhere"}, "--model: got './nowhere'"),
        ({**NO_LORA, "adapter": "llama"}, "llama: no adapter there"),
        ({**NO_LORA, "adapter": "llama", "lora-rank": "8"}, "--lora-rank: got 8, allowed: not set with --adapter"),
        ({**NO_LORA, "adapter": "llama", "lora-alpha": "16"}, "--lora-alpha: got 16.0, allowed: not set with"),
        ({**NO_LORA, "adapter": "llama", "lora-dropout": "0"}, "--lora-dropout: got 0.0, allowed: not set with"),
        ({**NO_LORA, "adapter": "llama", "lora-targets": "q_proj"}, "--lora-targets: got ['q_proj'], allowed: not set"),
    ],
)
def test_wrong_arguments_are_named(
    work: Path, changed: dict[str, str | None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipecomp.errors import PipecompError

    monkeypatch.chdir(work)
    with pytest.raises(PipecompError) as found:
        model_of(arguments(**changed))
    assert words in str(found.value)
    assert "\n" not in str(found.value)
