"""The recipes chat_lora and chat_qlora on two processes, with the model and the chats that prepare.py makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recipes.recipe_runs import ROOT, Ended, launch, run_script

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.ranks
PREPARE = ROOT / "recipes" / "chat_lora" / "prepare.py"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    found = run_script(folder, PREPARE, "--out", "chat", "--chats", "24", "--steps", "8")
    assert found.status == 0, found.output
    config = json.loads((ROOT / "recipes" / "chat_lora" / "ds_config_cpu.json").read_text())
    config |= {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    config["optimizer"]["params"]["lr"] = 1e-2
    config["pipecomp"]["store"]["path"] = "messages"
    (folder / "ds_config.json").write_text(json.dumps(config))
    return folder


def test_held_out_chats_ask_for_facts_of_no_training_chat(work: Path) -> None:
    said = []
    for name in ("train", "held-out"):
        rows = [json.loads(line)["messages"] for line in (work / "chat" / f"{name}.jsonl").read_text().splitlines()]
        said.append({m["content"] for row in rows for m in row if m["role"] == "assistant"})
    assert all(said)
    assert not said[0] & said[1]


def launched(work: Path, recipe: str, *more: str, **changed: str) -> Ended:
    given = {
        "deepspeed_config": "ds_config.json",
        "model": "chat/model",
        "tokenizer": "chat/model",
        "train-file": "chat/train.jsonl",
        "eval-file": "chat/held-out.jsonl",
        "epochs": "3",
        "lora-rank": "16",
        "metrics": f"{recipe}.jsonl",
        "save": recipe,
    } | changed
    return launch(work, recipe, *[word for key, value in given.items() for word in (f"--{key}", value)], *more)


@pytest.mark.parametrize("recipe", ["chat_lora", "chat_qlora"])
def test_the_saved_adapter_has_the_recorded_loss_of_what_the_assistant_says(work: Path, recipe: str) -> None:
    if recipe == "chat_qlora":
        pytest.importorskip("bitsandbytes")
    found = launched(work, recipe)
    assert found.status == 0, found.output
    assert "Samples are packed into rows" in found.output
    lines = [json.loads(line) for line in (work / f"{recipe}.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "eval" not in line]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    assert steps[0]["lr"] == pytest.approx(1e-2 / max(1, round(0.1 * len(steps)))), "no step has the rate 0"
    link = steps[-1]["links"]["0->1"]
    assert link["forward_bytes_sent"] < 0.3 * link["forward_bytes_raw"]
    assert lines[-1]["eval"]["loss"] == pytest.approx(loss_of(work, recipe), rel=1e-4)


def loss_of(work: Path, recipe: str) -> float:
    """The loss of transformers and peft on the held-out chats, a mean over the tokens that the assistant says."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    options: dict[str, Any] = {}
    if recipe == "chat_qlora":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        )
    base = AutoModelForCausalLM.from_pretrained(work / "chat" / "model", dtype=torch.float32, **options)
    model = peft.PeftModel.from_pretrained(base, work / recipe).eval()
    tokenizer = AutoTokenizer.from_pretrained(work / recipe)
    total = learned = 0.0
    for line in (work / "chat" / "held-out.jsonl").read_text().splitlines():
        chat = json.loads(line)["messages"]
        made = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        ids = torch.tensor([made["input_ids"]])
        labels = ids.masked_fill(torch.tensor([made["assistant_masks"]]) == 0, -100)
        count = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=labels).loss) * count
        learned += count
    return total / learned


@pytest.mark.parametrize(
    ("more", "changed", "message"),
    [
        ([], {"tokenizer": "train:300"}, "--tokenizer: got 'train:300', allowed: the model's own tokenizer"),
        (["--loss", "completion"], {}, "--loss: got 'completion', allowed: assistant, all"),
        (["--eval-split", "0.1"], {}, "--eval-split: got 0.1, allowed: only without --eval-file"),
        ([], {"train-file": "nowhere.jsonl"}, "--train-file: got 'nowhere.jsonl', allowed: JSON lines"),
    ],
)
def test_wrong_arguments_are_named(work: Path, more: list[str], changed: dict[str, str], message: str) -> None:
    found = launched(work, "chat_lora", *more, **{**changed, "save": "none", "metrics": "none.jsonl"})
    assert found.status != 0
    assert message in found.output
    assert "Traceback" not in found.output
