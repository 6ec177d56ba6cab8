"""The report of continuations, as a user makes it."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from pipecomp.errors import PipecompError
from tests.models import tokenizer_for
from tests.recipes.recipe_runs import ROOT, Ended, run_script

SCRIPT = ROOT / "recipes" / "gpt2_wikitext2" / "generate.py"
PROMPT, NEW, CASES = 6, 5, 3


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, and three models: two alike, one with other weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("generate")
    lines = [f"line {i} tells that | stage {i + 1} sends what it was given to stage {i + 2} ." for i in range(20)]
    (folder / "test.txt").write_text("= Title =\n" + "\n".join(lines) + "\nshort line\n")
    tokenizer = tokenizer_for(lines, bos_token="<|endoftext|>")
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        torch.manual_seed(seed)
        config = GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=PROMPT + NEW,
            n_embd=16,
            n_layer=1,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
        GPT2LMHeadModel(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def generate(work: Path, *more: str) -> Ended:
    return run_script(
        work,
        SCRIPT,
        "--model",
        "FP32=one",
        "--model",
        "AQ-SGD=same",
        "--model",
        "DirectQ=other",
        "--eval-file",
        "test.txt",
        "--prompt-tokens",
        str(PROMPT),
        "--new-tokens",
        str(NEW),
        "--cases",
        str(CASES),
        *more,
    )


def test_report(work: Path) -> None:
    found = generate(work, "--report", "out/report.md", "--seed", "4")
    assert found.status == 0, found.output
    page = (work / "out" / "report.md").read_text()
    assert page.count("## Case") == CASES
    assert f"| AQ-SGD | {CASES} of {CASES} | {NEW}.0 of {NEW} |" in page
    assert re.search(rf"\| DirectQ \| 0 of {CASES} \| [0-4]\.\d of {NEW} \|", page)
    assert page.splitlines()[4] in found.output, "the summary is printed too"

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(work / "one")
    model = AutoModelForCausalLM.from_pretrained(work / "one").eval()
    losses = []
    prompts = re.findall(r"\| Prompt \| (.*) \|", page)
    assert len(set(prompts)) == CASES
    for prompt, gold, ours in zip(
        prompts, re.findall(r"\| Gold \| (.*) \|", page), re.findall(r"\| FP32 \| (.*) \|", page)[1:], strict=True
    ):
        prompt = prompt.replace("\\|", "|")
        (line,) = [one for one in (work / "test.txt").read_text().splitlines() if one.startswith(prompt)]
        ids = tokenizer(line)["input_ids"][: PROMPT + NEW]
        assert tokenizer.decode(ids[PROMPT:]).strip() == gold.replace("\\|", "|")
        tokens = ids[:PROMPT]
        with torch.no_grad():
            while len(tokens) < PROMPT + NEW:
                best = int(model(torch.tensor([tokens])).logits[0, -1].argmax())
                tokens.append(best)
                if best == tokenizer.eos_token_id:
                    break
            logits = model(torch.tensor([ids])).logits[0, PROMPT - 1 : -1]
        expected = " ".join(tokenizer.decode(tokens[PROMPT:], skip_special_tokens=True).split()) or "(nothing)"
        assert ours == expected.replace("|", "\\|")
        losses.append(float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[PROMPT:]))))
    told = float(re.findall(r"\| FP32 \|  \|  \| ([\d.]+) \|", page)[0])
    assert told == pytest.approx(sum(losses) / len(losses), abs=1e-4)


def test_an_error_is_one_line(work: Path) -> None:
    found = generate(work, "--cases", "50")
    assert found.status == 1
    assert found.output.endswith("generate: error: test.txt: 20 lines have 11 tokens, 50 are asked for\n")
    assert "Traceback" not in found.output


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--model", "one"), "--model: got 'one', allowed: NAME=FOLDER"),
        (("--model", "FP32=other"), "allowed: each name once"),
        (("--model", "more=nowhere"), "--tokenizer: got 'nowhere', allowed: a folder"),
        (("--new-tokens", "6"), "--prompt-tokens: got 6, allowed: at most 11 with --new-tokens"),
    ],
)
def test_what_is_refused(work: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], told: str) -> None:
    found = importlib.util.spec_from_file_location("generate", SCRIPT)
    assert found is not None
    assert found.loader is not None
    script = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "generate", script)
    found.loader.exec_module(script)
    monkeypatch.chdir(work)
    words = ["--model", "FP32=one", "--eval-file", "test.txt", "--prompt-tokens", str(PROMPT), "--new-tokens", str(NEW)]
    with pytest.raises(PipecompError, match=re.escape(told)):
        script.main(script.arguments().parse_args([*words, *more]))
