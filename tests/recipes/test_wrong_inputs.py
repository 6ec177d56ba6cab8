"""Each wrong input of `pipecomp train` ends the run with one clear line, which names what is wrong and where."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from pipecomp.cli import app
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.plan.options import TrainOptions
from tests import models
from tests.data import tokenizers_for_tests
from tests.limits import HANG_S

WORDS = "the cat sat on a mat and saw what it was"
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
UNMARKED = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
STRICT = MARKED.replace("<|{{", "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}<|{{")
pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and data of which something is wrong."""
    made = tmp_path_factory.mktemp("wrong")
    tokenizer = tokenizers_for_tests.split(f"{WORDS} " * 50)
    for name, template in (("model", MARKED), ("plain", None), ("unmarked", UNMARKED), ("strict", STRICT)):
        models.gpt2(2, vocab_size=len(tokenizer), n_positions=64).save_pretrained(made / name)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(made / name)

    def write(name: str, *rows: Any) -> None:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (made / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))

    def chat(*contents: str, first: str = "user") -> dict[str, Any]:
        roles = [first, "assistant", "user", "assistant"]
        return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]}

    good = [chat(WORDS, WORDS)] * 7
    sizes = {"vocab_size": len(tokenizer), "n_positions": 64}
    adapted(models.llama(), "q_proj").save_pretrained(made / "of-llama")
    adapted(models.gpt2(4, **sizes), "c_attn").save_pretrained(made / "of-blocks")
    adapted(models.gpt2(2, 48, **sizes), "c_attn").save_pretrained(made / "of-width")
    quantized(made / "model").save_pretrained(made / "quantized")
    tokenizer.chat_template = MARKED
    tokenizer.save_pretrained(made / "quantized")
    write("good", *good)
    write("one", chat(WORDS, WORDS))
    write("empty-turn", *good, chat(WORDS, " "))
    write("broken", *good, '{"messages": [')
    write("columns", {"question": WORDS, "answer": WORDS})
    write("no-answer", *good, chat(WORDS))
    write("long", *[chat(WORDS * 9, WORDS)] * 8)
    write("system", *good, chat(WORDS, WORDS, first="system"))
    (made / "empty.jsonl").touch()
    (made / "blank.jsonl").write_text("\n\n")
    return made


def adapted(model: Any, layer: str) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=[layer], fan_in_fan_out=layer == "c_attn"))


def quantized(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=BitsAndBytesConfig(load_in_4bit=True))


GOOD = ["--model", "model", "--data", "good.jsonl"]
LORA = [*GOOD, "--lora", "4"]
# options of `pipecomp train`, and the start of the line that answers them
CASES = {
    "no chat template": (["--model", "plain", "--data", "good.jsonl"], "--chat-template: got None, allowed: a chat"),
    "no marks": (["--model", "unmarked", "--data", "good.jsonl"], "--chat-template: got None, allowed: a chat templa"),
    "role": (["--model", "strict", "--data", "system.jsonl"], "system.jsonl, line 8: the chat template refuses messa"),
    "empty turn": (["--model", "model", "--data", "empty-turn.jsonl"], "empty-turn.jsonl, line 8: message 2, of the a"),
    "no answer": (["--model", "model", "--data", "no-answer.jsonl"], "no-answer.jsonl, line 8: no token would be lear"),
    "long": (["--model", "model", "--data", "long.jsonl", "--tokens", "16"], "--tokens: got 16, allowed: a larger nu"),
    "broken": (["--model", "model", "--data", "broken.jsonl"], "broken.jsonl, line 8: not JSON: Expecting value, at c"),
    "columns": (["--model", "model", "--data", "columns.jsonl"], "columns.jsonl, line 1: has the columns question, an"),
    "empty": (["--model", "model", "--data", "empty.jsonl"], "--data: got 'empty.jsonl', allowed: a file that is not"),
    "blank": (["--model", "model", "--data", "blank.jsonl"], "blank.jsonl has no rows"),
    "one sample": (["--model", "model", "--data", "one.jsonl", "--batch", "4"], "--batch: got 4, allowed: at most 1,"),
    "target": ([*LORA, "--lora-targets", "c_attn,q_proj"], "--lora-targets: got 'q_proj', allowed: all-linear, or en"),
    "other layers": ([*GOOD, "--adapter", "of-llama"], "--adapter: got 'of-llama', allowed: an adapter of model, no"),
    "more blocks": ([*GOOD, "--adapter", "of-blocks"], "--adapter: got 'of-blocks', allowed: an adapter of model, not"),
    "other width": ([*GOOD, "--adapter", "of-width"], "--adapter: got 'of-width', allowed: an adapter of model, not o"),
    "no bitsandbytes": ([*LORA, "--load-in-4bit"], "weights of 4 bits need bitsandbytes, which is not installed: pip"),
    "merge": (["--model", "quantized", *LORA[2:], "--merge"], "--merge: got True, allowed: only with plain weights, a"),
}


def answers(rank: int, world: int, note: Any, folder: str) -> dict[str, tuple[int, str]]:
    """Run every case, with this process as the run's only rank; exit status and output by name."""
    from pipecomp.recipes import planned, run

    os.chdir(folder)
    parser = argparse.ArgumentParser(prog="train")
    parser.add_argument("options", type=TrainOptions.from_json)

    def run_rank(ranks: Sequence[Any]) -> int:
        (command,) = ranks
        given = mock.patch.object(sys, "argv", ["train", command.command[-1]])
        with given, mock.patch.dict(os.environ, command.variables), pytest.raises(SystemExit) as ended:
            run.run(lambda args: planned.main(args.options), parser)
        if dist.is_initialized():
            dist.destroy_process_group()
        return int(ended.value.code or 0)

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    found = {}
    for name, (words, _) in CASES.items():
        hidden = {"bitsandbytes": None} if name == "no bitsandbytes" else {}
        with (
            mock.patch.dict(sys.modules, hidden),
            mock.patch("pipecomp.distributed.ssh_launcher.launch_ranks", run_rank),
        ):
            result = CliRunner().invoke(app, ["train", "--stages", "1", *words])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        found[name] = (result.exit_code, result.output)
    return found


@pytest.fixture(scope="module")
def answered(folder: Path) -> dict[str, tuple[int, str]]:
    return run_ranks(1, answers, str(folder), timeout_s=HANG_S)[0]


@pytest.mark.parametrize("name", CASES)
def test_it_is_one_line(answered: dict[str, tuple[int, str]], name: str) -> None:
    status, output = answered[name]
    assert status == 1, output
    (line,) = (line for line in output.splitlines() if line.startswith(("train: error: ", "pipecomp: ")))
    assert line.removeprefix("train: error: ").removeprefix("pipecomp: ").startswith(CASES[name][1])
    assert output.rstrip().endswith(line)
    assert "Traceback" not in output
