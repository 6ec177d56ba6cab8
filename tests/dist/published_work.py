"""The scripts of tests/dist/published on every rank, one after another, and in one process as they were."""

from __future__ import annotations

import csv
import gc
import json
import os
import random
import re
import runpy
import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.models import byte_pairs, gpt2, made_up_text, save_qwen3, tokenizer_for

FOLDER = Path(__file__).parent / "published"
SCRIPTS = tuple(sorted(path.stem for path in FOLDER.glob("*.py")))
ARGUMENTS = {
    "01_language_model": """
        --model_name_or_path gpt2 --train_file wiki.train.txt --validation_file wiki.test.txt --output_dir clm
        --do_train --do_eval --per_device_train_batch_size 4 --learning_rate 5e-3 --max_steps 4 --logging_steps 1
    """
}
WAY_OF_STREAMS = "datasets.Dataset.from_list(list(stream.take(100_000)))"
_CHANGED = re.compile(r"^( *)(.*?)  # was: (.*)$", re.MULTILINE)


def changes(script: str) -> list[tuple[str, str]]:
    """The lines that changed: as they were, and as they are."""
    return [(old, new) for _, new, old in _CHANGED.findall((FOLDER / f"{script}.py").read_text())]


def stock(script: str) -> str:
    """The script as it was published."""
    return _CHANGED.sub(r"\1\3", (FOLDER / f"{script}.py").read_text())


def row(script: str, error: str | None) -> str:
    """The line of docs/scripts.md. error: of the script over a pipeline."""
    text = (FOLDER / f"{script}.py").read_text()
    shows = text.partition('"""')[2].partition('"""')[0].rstrip(".")
    lines = "<br>".join(f"`{new}`" for _, new in changes(script))
    end = "runs" if error is None else f"refused: `{error}`"
    return f"| [{script}](../tests/dist/published/{script}.py) | {shows} | {lines} | {end} |"


# -- what a reader has: models of the hub as small folders, and data


def write_inputs(folder: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    draw = random.Random(0)
    words = {0: ["bad", "dull", "long", "weak"], 1: ["good", "bright", "short", "strong"]}

    def review() -> dict[str, Any]:
        label = draw.randrange(2)
        return {
            "text": " ".join(draw.choices(words[label] + ["film", "the", "was"], k=draw.randint(4, 12))),
            "label": label,
        }

    (folder / "imdb").mkdir(parents=True)
    for name, count in (("train", 32), ("test", 16)):
        _write_lines(folder / "imdb" / f"{name}.jsonl", [review() for _ in range(count)])
    with (folder / "reviews.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "label"])
        writer.writeheader()
        writer.writerows(review() for _ in range(40))
    for name, seed in (("train", 1), ("test", 2)):
        (folder / f"wiki.{name}.txt").write_text(made_up_text(60, seed))
    pairs = [tuple(made_up_text(draw.randint(1, 2), 10 * i + k).strip() for k in range(3)) for i in range(24)]
    chats = [[_says("user", question), _says("assistant", answer)] for question, answer, _ in pairs]
    _write_lines(folder / "chats.jsonl", [{"messages": chat} for chat in chats])
    rows = [
        {"prompt": chat[:1], "chosen": chat[1:], "rejected": [_says("assistant", other)]}
        for chat, (_, _, other) in zip(chats, pairs, strict=True)
    ]
    _write_lines(folder / "preferences.jsonl", rows)
    (folder / "instructions.json").write_text(json.dumps([{"instruction": q, "output": a} for q, a, _ in pairs]))

    text = (folder / "wiki.train.txt").read_text()
    gpt2(2, vocab_size=300, n_positions=64, n_head=2).save_pretrained(folder / "gpt2")
    byte_pairs(text.splitlines(keepends=True)).save_model(str(folder / "gpt2"))
    save_qwen3(folder / "Qwen" / "Qwen3-0.6B", [text, *chats])
    tokenizer = tokenizer_for([" ".join(row) for row in words.values()], pad_token="<|endoftext|>")
    tokenizer.model_max_length = 64
    tokenizer.save_pretrained(folder / "bert-base-uncased")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, pad_token_id=0, **sizes)
    BertForSequenceClassification(config).save_pretrained(folder / "bert-base-uncased")


def _says(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _write_lines(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# -- what scripts do


class Seen:
    """What the trainers of a script did, as the events that every trainer fires tell it."""

    def __init__(self) -> None:
        self.steps: list[int] = []  # at the end of every training
        self.changed: list[bool] = []  # whether it changed the weights that this process has
        self.logged: list[str] = []
        self.losses: list[float] = []
        self.warned: list[str] = []
        self._before: list[torch.Tensor] = []

    def event(self, name: str, state: Any, model: Any, logs: Any) -> None:
        if name == "on_train_begin":
            self._before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
        elif name == "on_train_end":
            now = [p for p in model.parameters() if p.requires_grad]
            same = [torch.equal(a, b) for a, b in zip(self._before, now, strict=True)]
            self.changed.append(not all(same))
            self.steps.append(state.global_step)
        elif name == "on_log":
            self.logged += [key for key in logs if key not in self.logged]
            self.losses += [logs["loss"]] if "loss" in logs else []


def create_repo(hub: Any, name: str, **options: Any) -> Any:
    """In place of the hub's."""
    return SimpleNamespace(repo_id=name, url=name)


def upload_folder(hub: Any, **options: Any) -> Any:
    names = sorted(path.name for path in Path(options["folder_path"]).iterdir())
    with open("uploads.jsonl", "a") as file:
        file.write(json.dumps({"message": options["commit_message"], "files": names}) + "\n")
    return options["repo_id"]


@contextmanager
def watched() -> Iterator[tuple[Seen, list[Any]]]:
    """What trainers do while this lasts, and pipecomp's own ones."""
    from huggingface_hub import HfApi
    from transformers.trainer_callback import DefaultFlowCallback

    from pipecomp import PipelineTrainer

    seen, made = Seen(), list[Any]()
    init = PipelineTrainer.__init__

    def told(event: str) -> Any:
        def method(
            self: Any, args: Any, state: Any, control: Any, model: Any = None, logs: Any = None, **more: Any
        ) -> None:
            seen.event(event, state, model, logs)

        return method

    def noted(self: Any, *given: Any, **more: Any) -> None:
        made.append(weakref.ref(self))
        init(self, *given, **more)

    noted.__wrapped__ = init  # type: ignore[attr-defined]  # its signature
    with (
        # Every trainer has this callback; these two events are none of its own.
        mock.patch.multiple(
            DefaultFlowCallback, **{name: told(name) for name in ("on_train_begin", "on_train_end", "on_log")}
        ),
        mock.patch.object(PipelineTrainer, "__init__", noted),
        mock.patch.multiple(HfApi, create_repo=create_repo, upload_folder=upload_folder),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        yield seen, made
        seen.warned = [str(warning.message) for warning in warned]


def run_script(script: str, path: Path) -> dict[str, Any]:
    """Run a script as a program; what it did, or its error's line."""
    torch.manual_seed(0)
    with watched() as (seen, made), mock.patch.object(sys, "argv", [str(path), *ARGUMENTS.get(script, "").split()]):
        try:
            names = runpy.run_path(str(path), run_name="__main__")
            error = None
        except Exception as raised:
            names, error = {}, f"{type(raised).__name__}: {raised}"
            if os.environ.get("PUBLISHED_RAISE"):
                raise
        for trainer in filter(None, (reference() for reference in made)):
            trainer.end()
        names.clear()
    gc.collect()
    return {**{name: value for name, value in vars(seen).items() if name[0] != "_"}, "error": error}


def run_scripts(rank: int, world: int, note: Any, folder: str, scripts: tuple[str, ...]) -> dict[str, Any]:
    """Run scripts with their two lines changed on this rank."""
    _enter(folder)
    found = {}
    for script in scripts:
        note((script, "begins"))
        found[script] = run_script(script, FOLDER / f"{script}.py")
    text = (FOLDER / "18_stream.py").read_text().replace("train_dataset=stream", f"train_dataset={WAY_OF_STREAMS}")
    path = Path(f"way-{rank}.py")
    path.write_text("import datasets\n" + text)
    return {**found, "18_stream, the way": run_script("18_stream", path)}


def run_stock(rank: int, world: int, note: Any, folder: str, scripts: tuple[str, ...]) -> dict[str, Any]:
    """Run scripts as they were, in this process alone."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)
    _enter(folder)
    found = {}
    for script in scripts:
        path = Path(f"{script}.py")
        path.write_text(stock(script))
        found[script] = run_script(script, path)
    return found


def _enter(folder: str) -> None:
    import datasets

    os.chdir(folder)
    datasets.config.HF_DATASETS_CACHE = Path(folder) / "cache"
    datasets.disable_progress_bars()
