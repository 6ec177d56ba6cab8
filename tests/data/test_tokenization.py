"""Tokens of long texts, made in windows, equal those of the whole text."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from pipecomp.data.tokenization import TextTokenizer, Windows
from tests.data import tokenizers_for_tests as made

ODD = (
    *("   ", "\n\n\n", " \n \n ", "12345678901234", "größe", "。", "日本語", "他们说，", "👩‍👩‍👧", "\xa0", "a\u0301"),
    *("don't", "<s>", "</s>", "<|end|>", "\t\t", "...", "!!!", "\r", "\r\n", "\u2028", "\x0c", "=" * 40, " " * 70),
)
KINDS = {
    "GPT-2": made.gpt2,
    "Llama 3": made.split,
    "Qwen": lambda text: made.split(text, made.QWEN),
    "Llama 2": made.sentencepiece,
    "tokens across words": lambda text: made.sentencepiece(text, across_words=True),
    "BERT": made.words,
    "T5": made.unigram,
}


@cache
def text() -> str:
    draw = random.Random(1)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(1, 9))) for _ in range(300)]
    prose = (f"{' '.join(draw.choices(words, k=40)).capitalize()}. {'' if i % 5 else chr(10)}" for i in range(150))
    code = (f"\n\ndef part_{i}(x):\n    if x:\n\t\tyield x + {i * 12345}\n\n    return None\r\n" for i in range(80))
    odd = (draw.choice(ODD) + draw.choice(["", "", " "]) + draw.choice(words) for _ in range(2000))
    return "".join(prose) + "".join(code) + "".join(odd)


@cache
def tokenizer(kind: str) -> Any:
    return KINDS[kind](text())


def tokens(kind: str, content: str, windows: Windows, piece: int = 777) -> tuple[list[int], TextTokenizer]:
    tokenizing = TextTokenizer(tokenizer(kind), windows=windows)
    pieces = (content[at : at + piece] for at in range(0, len(content), piece))
    return [number for ids in tokenizing.document(pieces) for number in ids.tolist()], tokenizing


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("windows", [Windows(600, 200), Windows(4000, 800)])
def test_windows_have_the_tokens_of_the_whole_text(kind, windows):
    own = tokenizer(kind)
    got, tokenizing = tokens(kind, text(), windows)
    assert got == [*own(text(), verbose=False)["input_ids"], own.eos_token_id]
    assert tokenizing.forced == 0


@pytest.mark.parametrize("kind", ["GPT-2", "Llama 3", "Llama 2"])
@pytest.mark.parametrize("run", ["7", " ", "\n", "x", "-", "ab", " \n", "é", "日"])
def test_runs_longer_than_windows_are_not_cut(kind, run):
    """Within a run nothing proves a border: three digits a token, or spaces of which the last one is put aside."""
    own = tokenizer(kind)
    content = f"{text()[:3000]} {run * 4000} {text()[3000:6000]}"
    got, tokenizing = tokens(kind, content, Windows(600, 200))
    assert got == [*own(content, verbose=False)["input_ids"], own.eos_token_id]
    assert tokenizing.forced == 0


def test_text_without_borders_is_cut_in_the_end_and_counted():
    content = "e" * 9000
    got, tokenizing = tokens("GPT-2", content, Windows(600, 200, 2000))
    assert tokenizer("GPT-2").decode(got[:-1]) == content
    assert tokenizing.forced > 0


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_stand_once_at_each_end(kind):
    own = tokenizer(kind)
    begin = own("a")["input_ids"][: -len(own("a", add_special_tokens=False)["input_ids"])]
    documents = ["one two", f"three{own.eos_token}", f"{own.bos_token or ''}four five", text()[:5000]]
    tokenizing = TextTokenizer(own, windows=Windows(600, 200))
    for content, ids in zip(documents, tokenizing.documents(documents), strict=True):
        got = [number for part in ids for number in part.tolist()]
        bare = own(content, add_special_tokens=False, verbose=False)["input_ids"]
        end = [] if bare[-1] == own.eos_token_id else [own.eos_token_id]
        assert got == [*([] if bare[:1] == begin else begin), *bare, *end]
        assert got[-2:].count(own.eos_token_id) == 1


def test_a_text_has_its_beginning_and_end_even_if_it_is_empty():
    own = tokenizer("Llama 2")
    assert [ids.tolist() for ids in TextTokenizer(own).document([])] == [[own.bos_token_id], [own.eos_token_id]]
