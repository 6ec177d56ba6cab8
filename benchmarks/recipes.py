"""Run the recipes as their READMEs start them on a machine without a GPU: losses, bytes, time.

    python -m benchmarks recipes [--only RECIPE ...] [--methods FP32 AQ-SGD DirectQ] [--data FOLDER] [--work FOLDER]
                                 [--out FOLDER] [--redraw]

DeepSpeed's launcher with two processes (three for resnet_split) of one thread each. Models are pre-trained first, with
the recipes' own commands, and kept in --work. FP32 and DirectQ have the recipe's configuration with another method.
Writes continuations.md too when all three GPT-2s are there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import page
from benchmarks.page import Row, prose, share
from benchmarks.runner import ROOT, SHARED, Runs, arguments, digest

SETUP = "1"  # of the kept runs' keys
METHODS = ("FP32", "AQ-SGD", "DirectQ")
LANGUAGE = "--train-file finetune.txt --eval-file held-out.txt --seed 1"
DEBERTA = "--model deberta --tokenizer deberta --epochs 3 --seed 1"
CHAT = (
    "--model chat/model --tokenizer chat/model --train-file chat/train.jsonl --eval-file chat/held-out.jsonl "
    "--lora-rank 16 --lora-alpha 32 --epochs 3 --seed 1"
)
PRETRAIN = "--tokenizer train:2048 --block-size 128 --train-file pretrain.txt --eval-file held-out.txt"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One recipe's CPU-sized run. before: the model it starts from. measures: what its evaluations have."""

    arguments: str
    before: str
    measures: tuple[str, ...] = ("loss",)
    config: str = "ds_config_cpu.json"
    processes: int = 2


RECIPES = {
    "gpt2_wikitext2": Recipe(arguments=f"--model gpt2 --tokenizer gpt2 --epochs 5 {LANGUAGE}", before="gpt2"),
    "deberta_cola": Recipe(
        arguments=f"{DEBERTA} --train-file cola/in_domain_train.tsv --eval-file cola/in_domain_dev.tsv",
        before="deberta",
        measures=("loss", "accuracy", "matthews"),
    ),
    "deberta_qnli": Recipe(
        arguments=f"{DEBERTA} --train-file qnli/train_10k.tsv --eval-file qnli/dev.tsv --max-tokens 64",
        before="deberta",
        measures=("loss", "accuracy", "matthews"),
    ),
    "llama_lora": Recipe(
        arguments=f"--model llama --tokenizer llama --lora-targets all-linear --epochs 3 {LANGUAGE}", before="llama"
    ),
    "resnet_split": Recipe(
        arguments="--model tiny --norm group --train-file clients.npz --eval-file clients.npz --rounds 8 "
        "--decay-rounds 6 --seed 1 --weights resnet",
        before="resnet",
        measures=("loss", "accuracy"),
        processes=3,
    ),
    "chat_lora": Recipe(arguments=CHAT, before="chat"),
    "chat_qlora": Recipe(arguments=CHAT, before="chat"),
    "gpt2_arxiv": Recipe(
        arguments="--model gpt2 --tokenizer gpt2 --epochs 5 --train-file documents.txt --eval-file held-out.txt "
        "--seed 1",
        before="gpt2",
    ),
}
PRETRAINING = {
    "gpt2": f"2 gpt2_wikitext2 ds_config_cpu_fp32.json --model tiny {PRETRAIN}",
    "llama": f"2 gpt2_wikitext2 ds_config_cpu_fp32.json --model llama_tiny.json {PRETRAIN}",
    "resnet": "3 resnet_split ds_config_public.json --model tiny --norm group --train-file public.npz "
    "--eval-file public.npz --clients 1 --epochs 10 --rounds 1 --seed 1",
}


def lay_out(data: Path, work: Path) -> None:
    """The files that the commands name, made of the datasets."""
    import numpy as np

    lines = {part: (data / "wikitext-2" / f"{part}.txt").read_text().splitlines() for part in ("train", "valid")}
    texts = {"pretrain": lines["train"][:14000], "finetune": lines["train"][-2500:], "held-out": lines["valid"][:1000]}
    texts["documents"] = [line for line in texts["finetune"] if len(line) >= 300]
    for name, chosen in texts.items():
        (work / f"{name}.txt").write_text("\n".join(chosen) + "\n")
    for name in ("wikitext-2", "cola", "qnli"):
        if not (work / name).exists():
            (work / name).symlink_to((data / name).resolve())
    shutil.copy(ROOT / "recipes" / "llama_lora" / "llama_tiny.json", work)
    with np.load(data / "cifar10" / "cifar10_4k_1k.npz") as images:
        tests = {key: images[key] for key in ("x_test", "y_test")}
        order = np.random.default_rng(0).permutation(len(images["y_train"]))
        for name, chosen in (("public", order[:2000]), ("clients", order[2000:])):
            np.savez(
                work / f"{name}.npz", x_train=images["x_train"][chosen], y_train=images["y_train"][chosen], **tests
            )


def command(work: Path, *words: str) -> float:
    """Run to the end in `work`, its output in a file there; seconds. RuntimeError with the end of the output."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    began = time.monotonic()
    with (work / "output.txt").open("w") as output:
        status = subprocess.run(words, cwd=work, env=env, stdout=output, stderr=subprocess.STDOUT).returncode
    if status:
        raise RuntimeError(f"{' '.join(words)}: status {status}\n{(work / 'output.txt').read_text()[-2000:]}")
    return time.monotonic() - began


def launched(work: Path, processes: int, recipe: str, config: str, *arguments: str) -> float:
    """The recipe under DeepSpeed's launcher; seconds."""
    from pipecomp.distributed.placement import free_port

    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", str(processes)]
    script = str(ROOT / "recipes" / recipe / "train.py")
    return command(work, *launcher, f"--master_port={free_port()}", script, "--deepspeed_config", config, *arguments)


def pretrained(work: Path, name: str) -> float | None:
    """Make the model that recipes start from, unless it is there; seconds."""
    if (work / name).exists():
        return None
    saved = ["--save", f"{name}.partial"]
    if name == "deberta":
        script = str(ROOT / "recipes" / "pretrain_deberta.py")
        seconds = command(work, sys.executable, script, "--train-file", "wikitext-2/train.txt", *saved)
    elif name == "chat":
        script = str(ROOT / "recipes" / "chat_lora" / "prepare.py")
        seconds = command(work, sys.executable, script, "--out", f"{name}.partial")
    else:
        processes, recipe, config, *arguments = PRETRAINING[name].split()
        config = str(ROOT / "recipes" / recipe / config)
        seconds = launched(work, int(processes), recipe, config, *arguments, *saved)
    (work / f"{name}.partial").replace(work / name)
    return seconds


def shipped(recipe: str) -> dict[str, Any]:
    """The recipe's own configuration."""
    config: dict[str, Any] = json.loads((ROOT / "recipes" / recipe / RECIPES[recipe].config).read_text())
    return config


def with_method(config: dict[str, Any], method: str) -> dict[str, Any]:
    """A recipe's configuration with this method."""
    section = config["pipecomp"]
    activations, store = section["activations"], {**section["store"], "path": "messages"}
    if method == "AQ-SGD":
        return {**config, "pipecomp": {**section, "store": store}}
    of_changes = ("first_visit", "backward_first_visit", "backward_method")
    direct = {key: value for key, value in activations.items() if key not in of_changes} | {"method": "direct"}
    others = {key: value for key, value in section.items() if key != "store"}
    return {**config, "pipecomp": {**others, "activations": {"method": "none"} if method == "FP32" else direct}}


def run(recipe: str, method: str, setup: str, work: Path) -> Row:
    """One run. setup: `_setup` of the recipe, kept with it."""
    chosen = RECIPES[recipe]
    before_s = pretrained(work, chosen.before)
    (work / "ds_config.json").write_text(json.dumps(with_method(shipped(recipe), method)))
    saved = work / f"{recipe}-{method}"
    shutil.rmtree(saved, ignore_errors=True)
    given = [*chosen.arguments.split(), "--metrics", "metrics.jsonl", "--save", saved.name]
    seconds = launched(work, chosen.processes, recipe, "ds_config.json", *given)
    lines = [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]
    ends = [line for line in lines if "eval" in line]
    sent = {
        f"{way}_{kind}": sum(link[f"{way}_bytes_{kind}"] for link in ends[-1]["links"].values())
        for way in ("forward", "backward")
        for kind in ("raw", "sent")
    }
    return {
        "recipe": recipe,
        "method": method,
        "recipe_setup": setup,
        "steps": ends[-1]["step"],
        "train_loss": ends[-1]["train_loss"],
        "eval": ends[-1]["eval"],
        **sent,
        "seconds": seconds,
        "before_s": before_s,
    }


def results(rows: list[Row]) -> list[str]:
    """The page."""
    text = f"""
        # The recipes on a machine without a GPU

        `python -m benchmarks recipes`, on {page.machine(rows)}, which other work may have shared: the seconds, of the
        whole command, are rough and say nothing about which method is faster. One run each, seed 1; benchmarks over
        several seeds are beside this page.

        Each recipe's own CPU-sized command and configuration on WikiText-2, CoLA, 10,000 pairs of QNLI and 4,000 images
        of CIFAR-10 (2,000 to start from, 2,000 for the clients); gpt2_arxiv has paragraphs of WikiText-2 in place of
        abstracts. DirectQ and FP32: the same with another method. Training loss: mean over the last epoch. Held out:
        evaluated after the last epoch without compression. Bytes: of all links and the whole run, first visits
        included, as shares of the values'.
    """
    cells = {
        "recipe": lambda row: row["recipe"],
        "method": lambda row: row["method"],
        "steps": lambda row: row["steps"],
        "training loss": lambda row: f"{row['train_loss']:.4f}",
        "held out": _held_out,
        "forward bytes": lambda row: share(row["forward_sent"], row["forward_raw"]),
        "backward bytes": lambda row: share(row["backward_sent"], row["backward_raw"]),
        "seconds": lambda row: f"{row['seconds']:.0f}",
    }
    order = list(RECIPES)
    lines = page.columns(cells, sorted(rows, key=lambda x: (order.index(x["recipe"]), METHODS.index(x["method"]))))
    before = [f"{RECIPES[x['recipe']].before} {x['before_s']:.0f} s" for x in rows if x["before_s"]]
    return [*prose(text), *lines, *([f"Pre-training: {', '.join(before)}."] if before else [])]


def continuations(work: Path, out: Path) -> None:
    """The generation check on the three GPT-2s, if they are there."""
    folders = {method: work / f"gpt2_wikitext2-{method}" for method in METHODS}
    if not all(folder.exists() for folder in folders.values()):
        return
    script = str(ROOT / "recipes" / "gpt2_wikitext2" / "generate.py")
    models = [word for method, folder in folders.items() for word in ("--model", f"{method}={folder.name}")]
    command(work, sys.executable, script, *models, "--eval-file", "wikitext-2/test.txt", "--report", "continuations.md")
    shutil.copy(work / "continuations.md", out)


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    given = arguments(
        argv,
        __doc__,
        only=(list(RECIPES), "all recipes or some of them", RECIPES),
        methods=(METHODS, "all methods or some of them", METHODS),
        data=(SHARED, "folder of the datasets"),
        work=(ROOT / "runs" / "recipes", "where files and models are made"),
    )
    work = given.work.resolve()
    setups = {(name, method): _setup(name, method, shipped(name)) for name in RECIPES for method in METHODS}

    def current(row: Row) -> bool:
        return row["recipe_setup"] == setups[row["recipe"], row["method"]]

    runs = Runs(given, "recipes", SETUP, ("recipe", "method", "recipe_setup"), current=current)
    cases = [(name, method, setups[name, method]) for method in given.methods for name in given.only]
    if runs.missing(cases):
        work.mkdir(parents=True, exist_ok=True)
        lay_out(given.data, work)
    runs.complete(
        run,
        cases,
        work,
        line=lambda row: f"train {row['train_loss']:.4f}, held out {_held_out(row)}, {row['seconds']:.0f} s",
        page=results,
    )
    if not given.redraw:
        continuations(work, given.out)


def _setup(recipe: str, method: str, config: dict[str, Any]) -> str:
    """A mark of all that a run depends on, so that a recipe's change makes only the runs anew that it is in."""
    chosen = RECIPES[recipe]
    return digest([chosen.arguments, chosen.before, PRETRAINING.get(chosen.before), with_method(config, method)])


def _held_out(row: Row) -> str:
    return ", ".join(f"{key} {row['eval'][key]:.4f}" for key in RECIPES[row["recipe"]].measures)
