"""The demo's task: a small GPT-2, pre-trained on one part of Python's own documentation, fine-tuned on another.

Nothing is downloaded: the text is the standard library's docstrings, and the tokenizer is trained on it.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipecomp.errors import DataError

FINE_TUNED_ON = ("asyncio", "email", "http", "logging", "tkinter", "unittest", "urllib", "xml")
_SKIPPED = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idlelib", "lib2to3"}


@dataclass(frozen=True, kw_only=True)
class DemoTask:
    """Token sequences for pre-training, fine-tuning and evaluation, all of equal length, and the vocabulary's size."""

    pretraining: list[list[int]]
    training: list[list[int]]
    held_out: list[list[int]]
    vocabulary: int


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield (top-level module, docstring) of everything in the standard library, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if _SKIPPED & set(parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, OSError):
            continue  # templates and test data that are not Python
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text:
                    yield parts[0].removesuffix(".py"), text


def train_tokenizer(texts: list[str], vocabulary: int) -> Any:
    """Train a byte-level BPE tokenizer of `tokenizers` on these texts."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=vocabulary, min_frequency=2, show_progress=False)
    return tokenizer


def sequences(tokenizer: Any, texts: list[str], length: int) -> list[list[int]]:
    """Join all texts to one stream, cut to sequences of `length` tokens."""
    stream = [token for text in tokenizer.encode_batch(texts) for token in text.ids]
    return [stream[i : i + length] for i in range(0, len(stream) - length + 1, length)]


def documentation_task(*, vocabulary: int, length: int, training: int, held_out: int = 96) -> DemoTask:
    """Make the demo's sequences: `training` and `held_out` from the fine-tuning modules, all others for pre-training.

    Raises DataError if these modules have too few.
    """
    general: list[str] = []
    special: list[str] = []
    for module, text in docstrings():
        (special if module in FINE_TUNED_ON else general).append(text)
    tokenizer = train_tokenizer(general + special, vocabulary)
    pool = sequences(tokenizer, special, length)
    if len(pool) < held_out + training:
        raise DataError(
            f"this Python's standard library has only {len(pool)} sequences of documentation for fine-tuning and "
            f"evaluation; needed: {held_out + training}"
        )
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = [pool[i] for i in order[: training + held_out]]
    return DemoTask(
        pretraining=sequences(tokenizer, general, length),
        training=chosen[held_out:],
        held_out=chosen[:held_out],
        vocabulary=vocabulary,
    )


class Sequences(torch.utils.data.Dataset):
    """Token sequences as samples with input_ids and labels."""

    def __init__(self, rows: list[list[int]]) -> None:
        self._rows = torch.tensor(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def gpt2(vocabulary: int, length: int, *, layers: int, width: int, heads: int, seed: int) -> Any:
    """Make a GPT-2 with random weights and without dropout, so that methods differ only in their messages."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config)


def untie(model: Any) -> None:
    """Untie a GPT-2's head from its embedding, with equal weights."""
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
