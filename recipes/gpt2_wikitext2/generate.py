"""Greedy continuations of models that were trained with different messages, side by side (AQ-SGD, Appendix I).

    python recipes/gpt2_wikitext2/generate.py --model FP32=runs/fp32 --model AQ-SGD=runs/aqsgd \\
        --model DirectQ=runs/direct --eval-file test.txt --report continuations.md

Each model is a folder of `--save`, and brings its tokenizer. Prompts are beginnings of random lines of the text that
are long enough; what follows there is the gold continuation. The report has, for each model, how often it continues as
the first one does, word for word, how many tokens it does so on average, and its loss on the gold continuations.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from pipecomp.data.sources import hub_errors
from pipecomp.errors import ConfigError, DataError, PipecompError, require
from pipecomp.recipes.run import at_least
from pipecomp.recipes.text import load_tokenizer, read_lines


@dataclass(frozen=True)
class Case:
    """A prompt and what follows it in the text, int64 [tokens] each."""

    prompt: Tensor
    gold: Tensor


@dataclass(frozen=True)
class Found:
    """One model's results on all cases: its continuations, and its mean loss on the gold ones, nats a token."""

    name: str
    continuations: list[Tensor]
    gold_loss: float


def main(args: argparse.Namespace) -> None:
    """Write the report."""
    named = [_name_and_folder(text) for text in args.model]
    require(len({name for name, _ in named}) >= len(named), "--model", args.model, "each name once")
    tokenizer = load_tokenizer(named[0][1], [])
    cases = choose(tokenizer, read_lines(args.eval_file), args)
    vocabulary = tokenizer.get_vocab()
    found = []
    for name, folder in named:
        if load_tokenizer(folder, []).get_vocab() != vocabulary:
            raise DataError(f"{folder}: its tokenizer differs from that of {named[0][1]}")
        found.append(continue_all(name, folder, cases))
    text = report(tokenizer, cases, found, args)
    try:
        Path(args.report).parent.mkdir(parents=True, exist_ok=True)
        Path(args.report).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("--report", args.report, f"a file that can be written ({error.strerror})") from error
    print(summary(cases, found))
    print(f"\nreport written to {args.report}")


def _name_and_folder(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    require(name and equals and folder, "--model", text, "NAME=FOLDER")
    return name, folder


def choose(tokenizer: Any, lines: list[str], args: argparse.Namespace) -> list[Case]:
    """Random lines with a prompt and as many tokens after it as are generated. Raises DataError if too few do."""
    needed = args.prompt_tokens + args.new_tokens
    long = [line.strip() for line in lines if len(line.split()) > needed // 4]
    random.Random(args.seed).shuffle(long)
    cases: list[Case] = []
    for line in long:
        tokens = tokenizer(line, add_special_tokens=False)["input_ids"]
        if len(tokens) >= needed:
            ids = torch.tensor(tokens[:needed])
            cases.append(Case(ids[: args.prompt_tokens], ids[args.prompt_tokens :]))
        if len(cases) == args.cases:
            return cases
    raise DataError(f"{args.eval_file}: {len(cases)} lines have {needed} tokens, {args.cases} are asked for")


@torch.no_grad()
def continue_all(name: str, folder: str, cases: list[Case]) -> Found:
    """Greedy continuations by one model, each as long as the gold one or to its end of text."""
    from transformers import AutoModelForCausalLM

    with hub_errors("--model", folder):
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
    positions = getattr(model.config, "max_position_embeddings", None)
    longest = len(cases[0].prompt) + len(cases[0].gold)
    require(
        positions is None or longest <= positions,
        "--prompt-tokens",
        len(cases[0].prompt),
        f"at most {positions} with --new-tokens: {folder}",
    )
    continuations, losses = [], []
    for case in cases:
        n = len(case.prompt)
        out = model.generate(
            case.prompt[None],
            attention_mask=torch.ones(1, n, dtype=torch.int64),
            max_new_tokens=len(case.gold),
            do_sample=False,
            num_beams=1,
            pad_token_id=model.config.eos_token_id,
        )
        continuations.append(out[0, n:])
        logits = model(torch.cat([case.prompt, case.gold])[None]).logits[0, n - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits.float(), case.gold).item())
    return Found(name, continuations, sum(losses) / len(losses))


def agreement(first: Found, other: Found) -> tuple[int, float]:
    """Continuations of `other` that are the first one's, and the mean number of tokens before they part."""
    same, tokens = 0, 0
    for a, b in zip(first.continuations, other.continuations, strict=True):
        n = min(len(a), len(b))
        parted = (a[:n] != b[:n]).nonzero()
        tokens += int(parted[0]) if len(parted) else n
        same += int(torch.equal(a, b))
    return same, tokens / len(first.continuations)


def summary(cases: list[Case], found: list[Found]) -> str:
    """A Markdown table of all models."""
    first = found[0]
    lines = [
        f"| model | as {first.name}'s | tokens until they part | loss on the gold continuation |",
        "|---|---|---|---|",
    ]
    for each in found:
        same, tokens = agreement(first, each)
        alike = "" if each is first else f"{same} of {len(cases)}"
        parted = "" if each is first else f"{tokens:.1f} of {len(cases[0].gold)}"
        lines.append(f"| {each.name} | {alike} | {parted} | {each.gold_loss:.4f} |")
    return "\n".join(lines)


def report(tokenizer: Any, cases: list[Case], found: list[Found], args: argparse.Namespace) -> str:
    """The Markdown page."""

    def words(tokens: Tensor) -> str:
        text = " ".join(tokenizer.decode(tokens, skip_special_tokens=True).split())
        return text.replace("|", "\\|") or "(nothing)"

    lines = [
        "# Continuations side by side",
        "",
        f"Greedy continuations by up to {args.new_tokens} tokens of {len(cases)} random prompts of "
        f"{args.prompt_tokens} tokens from `{Path(args.eval_file).name}`, seed {args.seed}, as in AQ-SGD's Appendix I.",
        "",
        summary(cases, found),
    ]
    for number, case in enumerate(cases):
        lines += ["", f"## Case {number + 1}", "", "| | |", "|---|---|", f"| Prompt | {words(case.prompt)} |"]
        lines.append(f"| Gold | {words(case.gold)} |")
        lines += [f"| {each.name} | {words(each.continuations[number])} |" for each in found]
    return "\n".join(lines) + "\n"


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", action="append", required=True, metavar="NAME=FOLDER", help="a saved model; give several")
    add("--eval-file", required=True, metavar="FILE", help="text that no model was trained on")
    add("--report", default="continuations.md", metavar="FILE", help="Markdown (default continuations.md)")
    add("--cases", type=at_least(1), default=5, metavar="N", help="prompts (default 5)")
    add("--prompt-tokens", type=at_least(1), default=48, metavar="N", help="tokens of a prompt (default 48)")
    add("--new-tokens", type=at_least(1), default=32, metavar="N", help="tokens of a continuation (default 32)")
    add("--seed", type=int, default=0, metavar="S", help="chooses the prompts (default 0)")
    return parser


def run() -> NoReturn:
    """Exit status 0, or 1 with one line on standard error."""
    try:
        main(arguments().parse_args())
    except PipecompError as error:
        sys.exit(f"generate: error: {error}")
    sys.exit(0)


if __name__ == "__main__":
    run()
