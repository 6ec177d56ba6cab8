"""The convergence benchmark's task: a small GPT-2 on WikiText-2.

It is pre-trained on the training text and fine-tuned on articles of the validation text. Tokens and pre-trained weights
are cached, so that a second run starts at once. Pre-training has one thread, and orders that follow from whole-number
seeds; processors that multiply matrices in another order still end with other weights, which rows tell by their digest.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipecomp.demo.task import sequences, train_tokenizer
from pipecomp.errors import DataError
from pipecomp.recipes.pretraining import pretrain
from pipecomp.utils.files import atomic_write

VOCABULARY, LENGTH = 2048, 32
TRAINING, HELD_OUT = 512, 128
WIDTH, HEADS = 128, 4
PRETRAINING = {"tokens": 800_000, "batch": 16, "epochs": 1, "lr": 2e-3}
LLAMA = Path(__file__).parents[1] / "recipes" / "llama_lora" / "llama_tiny.json"
_TITLE = re.compile(r"(?m)^ = [^=\n]+ = $")


@dataclass(frozen=True, kw_only=True)
class Task:
    """Token sequences of equal length, int64 [n, length]."""

    pretraining: torch.Tensor
    training: torch.Tensor
    held_out: torch.Tensor


def articles(path: Path) -> Iterator[str]:
    """The articles of one of WikiText's files."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; --data names the folder with train.txt and valid.txt") from error
    starts = [match.start() for match in _TITLE.finditer(text)]
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        yield text[start:end]


def wikitext_task(data: Path, cache: Path, *, length: int = LENGTH, training: int = TRAINING) -> Task:
    """Sequences of the training text for pre-training; of the first validation articles, shuffled, for the rest."""
    file = cache / f"tokens-{VOCABULARY}-{length}-{training}-{HELD_OUT}.pt"
    with one_at_a_time(file):
        return _task(data, file, length, training)


def _task(data: Path, file: Path, length: int, training: int) -> Task:
    if file.exists():
        return Task(**torch.load(file, weights_only=True))
    general, special = list(articles(data / "train.txt")), list(articles(data / "valid.txt"))
    tokenizer = train_tokenizer(general, VOCABULARY)
    chosen: list[list[int]] = []
    for article in special:
        chosen += sequences(tokenizer, [article], length)
        if len(chosen) >= training + HELD_OUT:
            break
    if len(chosen) < training + HELD_OUT:
        raise DataError(f"{data / 'valid.txt'} has only {len(chosen)} sequences of {length} tokens")
    order = torch.randperm(training + HELD_OUT, generator=torch.Generator().manual_seed(0))
    pool = torch.tensor(chosen)[order]
    parts = {
        "pretraining": torch.tensor(sequences(tokenizer, general, length)),
        "training": pool[:training],
        "held_out": pool[training:],
    }
    with atomic_write(file, synced=False) as part:
        torch.save(parts, part)
    return Task(**parts)


def new_model(seed: int, length: int = LENGTH, width: int = WIDTH) -> Any:
    """GPT-2 with random weights; no dropout, so that methods differ by what they send alone."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=length,
        n_embd=width,
        n_layer=8,
        n_head=width * HEADS // WIDTH,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        activation_function="gelu_pytorch_tanh",  # the same function as gelu_new, in one kernel
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config)


def new_llama(seed: int, length: int = LENGTH) -> Any:
    """A Llama as small as `new_model`, with random weights: that of the recipe llama_lora."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = json.loads(LLAMA.read_text()) | {"vocab_size": VOCABULARY, "max_position_embeddings": length}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**settings))


def pretrained_model(task: Task, cache: Path, seed: int, *, width: int = WIDTH) -> tuple[Any, dict[str, float]]:
    """The model that all methods start from, and what its pre-training cost and reached; trained once per seed."""
    file = cache / (f"pretrained-{seed}.pt" if width == WIDTH else f"pretrained-{width}-{seed}.pt")
    with one_at_a_time(file):
        return _pretrained(task, file, seed, new_model(seed, task.pretraining.shape[1], width))


def pretrained_llama(task: Task, cache: Path, seed: int) -> Any:
    """The same for `new_llama`; the model alone."""
    file = cache / f"pretrained-llama-{seed}.pt"
    with one_at_a_time(file):
        return _pretrained(task, file, seed, new_llama(seed, task.pretraining.shape[1]))[0]


def _pretrained(task: Task, file: Path, seed: int, model: Any) -> tuple[Any, dict[str, float]]:
    length = task.pretraining.shape[1]
    settings = json.dumps([PRETRAINING, length, VOCABULARY], sort_keys=True)
    if file.exists():
        record = torch.load(file, weights_only=True)
        if record["settings"] == settings:
            model.load_state_dict(record["weights"])
            return model, record["report"]
    rows = task.pretraining
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    rows = rows[order[: int(PRETRAINING["tokens"]) // length]]
    began, threads = time.perf_counter(), torch.get_num_threads()
    options: dict[str, Any] = {key: PRETRAINING[key] for key in ("epochs", "batch", "lr")}
    torch.set_num_threads(1)
    loss = pretrain(model, rows.tolist(), seed=seed, **options)
    torch.set_num_threads(threads)
    report = {"pretraining_loss": loss, "pretraining_seconds": time.perf_counter() - began}
    with atomic_write(file, synced=False) as part:
        torch.save({"settings": settings, "weights": model.state_dict(), "report": report}, part)
    return model, report


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """The first worker makes a file, the others wait for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
