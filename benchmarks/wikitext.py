"""The convergence benchmark's task: a small GPT-2 on WikiText-2.

It is pre-trained on the training text and fine-tuned on articles of the validation text. Tokens and pre-trained weights
are cached, so that a second run starts at once. Pre-training ends with the same bits on every x86-64 processor: it has
one thread, orders that follow from whole-number seeds, and the instructions that all of them have (ANY_PROCESSOR).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from pipecomp.demo.task import sequences, train_tokenizer
from pipecomp.errors import DataError
from pipecomp.recipes.pretraining import pretrain
from pipecomp.utils.files import atomic_write

VOCABULARY, LENGTH = 2048, 32
TRAINING, HELD_OUT = 512, 128
WIDTH, HEADS = 128, 4
PRETRAINING = {"tokens": 800_000, "batch": 16, "epochs": 1, "lr": 2e-3}
ANY_PROCESSOR = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
"""Environment of a process whose sums of products do not depend on the processor."""
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
        return _pretrained(task, file, seed, partial(new_model, seed, task.pretraining.shape[1], width))


def pretrained_llama(task: Task, cache: Path, seed: int) -> Any:
    """The same for `new_llama`; the model alone."""
    file = cache / f"pretrained-llama-{seed}.pt"
    with one_at_a_time(file):
        return _pretrained(task, file, seed, partial(new_llama, seed, task.pretraining.shape[1]))[0]


def _pretrained(task: Task, file: Path, seed: int, make: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    length = task.pretraining.shape[1]
    settings = json.dumps([PRETRAINING, length, VOCABULARY, ANY_PROCESSOR], sort_keys=True)
    if not file.exists() or torch.load(file, weights_only=True)["settings"] != settings:
        order = torch.randperm(len(task.pretraining), generator=torch.Generator().manual_seed(seed))
        rows = task.pretraining[order[: int(PRETRAINING["tokens"]) // length]].tolist()
        process = multiprocessing.get_context("spawn").Process(
            target=_pretrain, args=(make, rows, seed, file, settings)
        )
        with mock.patch.dict(os.environ, ANY_PROCESSOR):  # libraries read it when they are loaded
            process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"pre-training for {file} ended with status {process.exitcode}; its error is above")
    record = torch.load(file, weights_only=True)
    model = make()
    model.load_state_dict(record["weights"])
    return model, record["report"]


def _pretrain(make: Callable[[], Any], rows: list[list[int]], seed: int, file: Path, settings: str) -> None:
    torch.set_num_threads(1)
    model, began = make(), time.perf_counter()
    options: dict[str, Any] = {key: PRETRAINING[key] for key in ("epochs", "batch", "lr")}
    loss = pretrain(model, rows, seed=seed, **options)
    report = {"pretraining_loss": loss, "pretraining_seconds": time.perf_counter() - began}
    with atomic_write(file, synced=False) as part:
        torch.save({"settings": settings, "weights": model.state_dict(), "report": report}, part)


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """The first worker makes a file, the others wait for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
