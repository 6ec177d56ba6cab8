"""A small text and a tiny GPT-2 with random weights for it, as folders that a user would have."""

from __future__ import annotations

import json
from pathlib import Path

TOKENS = 32


def write_text(path: Path, lines: int = 300) -> Path:
    """Lines that repeat, so that a few steps learn something."""
    path.write_text("".join(f"line {i} of {i * i} , as {i % 7} is to {i % 11} .\n" for i in range(lines)))
    return path


def save_model(folder: Path, text: Path) -> Path:
    """The model and its tokenizer, for from_pretrained."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2Config, GPT2LMHeadModel

    bpe = ByteLevelBPETokenizer()
    bpe.train([str(text)], vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    sizes = {"n_positions": TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    GPT2LMHeadModel(GPT2Config(vocab_size=300, **sizes)).save_pretrained(folder)
    bpe.save_model(str(folder))
    return folder


def metrics(run: Path) -> list[dict]:
    """The lines of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
