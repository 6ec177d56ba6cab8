"""`pipecomp init` and `pipecomp train`: a recipe's files to edit, and the shortest way from a model and a text."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

import pipecomp
from pipecomp.cli.common import GradientsOption, TieOption, console, plain_errors, say
from pipecomp.errors import ConfigError, require, writable
from pipecomp.utils.files import atomic_write_text

# -- The files of the recipes, which an installation holds too, and a copy of a recipe's that stands on its own."""

_HERE = Path(pipecomp.__file__).parent
_README = "README.md"
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)[^)]*\)")  # links to pages that the copy does not have
_SHARED = re.compile(r"recipes/((?:\w+/)?\w+\.(?:py|json))")  # files that its commands need of others


def recipes_folder() -> Path:
    """Find the recipes: in an installed package, or beside it in a checkout. Raises ConfigError if they are gone."""
    for folder in (_HERE / "recipe_files", _HERE.parent / "recipes"):
        if (folder / _README).is_file():
            return folder
    raise ConfigError("recipe", str(_HERE), "an installation with pipecomp/recipe_files: install it again")


def recipe_names() -> dict[str, str]:
    """List the recipes by name, with the first line of each one's README."""
    readmes = sorted(recipes_folder().glob(f"*/{_README}"))
    return {path.parent.name: path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") for path in readmes}


def lay_out(recipe: str, folder: Path) -> list[Path]:
    """Copy a recipe's files, with a README whose commands are those of the new folder.

    Args:
        recipe: One of `recipe_names`.
        folder: A new one, or an empty one.

    Returns:
        The files.

    Raises:
        ConfigError: There is no such recipe, or the folder holds something or cannot be written.
    """
    require(recipe in recipe_names(), "recipe", recipe, ", ".join(recipe_names()))
    source = recipes_folder() / recipe
    page = (source / _README).read_text(encoding="utf-8")
    page = _OUTSIDE.sub(r"\1", page).replace(f"recipes/{recipe}/", "")
    files = {path.name: path for path in source.iterdir() if path.is_file() and path.name != _README}
    files |= {name: recipes_folder() / name for name in _SHARED.findall(page)}
    with writable("folder", folder):
        folder.mkdir(parents=True, exist_ok=True)
        require(
            not any(folder.iterdir()), "folder", str(folder), "a new folder, or an empty one: nothing is overwritten"
        )
        for name, path in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)
        page = _SHARED.sub(r"\1", page)
        atomic_write_text(folder / _README, re.sub(r"^make setup .*\n\n?", "", page, flags=re.MULTILINE))
    return sorted(folder / name for name in (*files, _README))


_RANK = "pipecomp.recipes.planned"
_SECRET = re.compile("TOKEN|PASSWORD|SECRET|API_KEY")
_IN_ADDRESS = re.compile(r"://[^/\s]*@")


@plain_errors()
def init(
    recipe: Annotated[str | None, typer.Argument(help="Which one; without it all are listed.")] = None,
    folder: Annotated[Path | None, typer.Argument(help="A new folder; by default one of the recipe's name.")] = None,
) -> None:
    """Lay out a recipe for editing: its script, DeepSpeed configurations and README.

    pipecomp init gpt2_wikitext2 my-run
    """
    from pipecomp.cli.train import lay_out, recipe_names

    if recipe is None:
        for name, title in recipe_names().items():
            console.print(f"{name:<16} {title}", highlight=False, soft_wrap=True)
        return
    made = lay_out(recipe, folder or Path(recipe))
    console.print(f"Wrote {', '.join(map(str, made))}.", highlight=False, soft_wrap=True)
    readme = next(path for path in made if path.name == "README.md")
    console.print(f"{readme} has the commands; start them in {readme.parent}.", highlight=False, soft_wrap=True)


@plain_errors()
def train(
    model: Annotated[str, typer.Option(help="A causal language model: a folder, or a hub name.")],
    data: Annotated[list[Path], typer.Option(help="UTF-8 text, or JSON lines with --field; may be repeated.")],
    stages: Annotated[int | None, typer.Option(help="Pipeline stages; by default one for each peer, or 2.")] = None,
    peers: Annotated[
        str | None, typer.Option(help="Machines in the order of the stages, as ssh takes them: host1,host2.")
    ] = None,
    evaluate: Annotated[Path | None, typer.Option("--eval", help="Held-out text, evaluated after each epoch.")] = None,
    field: Annotated[str, typer.Option(help="The text's key in JSON lines.")] = "text",
    tokenizer: Annotated[str | None, typer.Option(help="A folder or hub name; by default the model's.")] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the text; of one, no sample comes back.")] = 3,
    max_steps: Annotated[int | None, typer.Option(help="Stop after so many optimizer steps.")] = None,
    lr: Annotated[float, typer.Option(help="AdamW's learning rate; it warms up, then decays to 0.")] = 5e-5,
    batch: Annotated[int | None, typer.Option(help="Samples of a step; by default 32, of a short text fewer.")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of a sample; by default what the model takes, at most 1024.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Training precision: fp32 or bf16.")] = "fp32",
    gradients: GradientsOption = None,
    tie: TieOption = True,
    dropout: Annotated[
        float | None, typer.Option(help="Of embeddings, attention and blocks; by default the model's own.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the order of samples, dropout and rounding.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for model, plan, metrics and report; by default runs/train-DATE-TIME.")
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(help="With --out: a checkpoint every N steps; the same command goes on from the last.")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="Folder on each machine's own disk for cached activations; by default in --out.")
    ] = None,
    report_to: Annotated[
        list[str] | None, typer.Option(help="Curves for tensorboard, trackio, mlflow or wandb; may be repeated.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run on each machine, and stop.")] = False,
) -> None:
    """Fine-tune a language model on a text over several processes or machines: measure, plan, say why, train.

    pipecomp train --model gpt2 --data text.txt --stages 2

    pipecomp train --model gpt2 --data text.txt --peers host1,host2

    Each peer needs the same Python, working directory and files, and must let
    this machine in by ssh without a password; --dry-run says what to run on each
    of them by hand instead. Under a launcher (torchrun, srun) every process runs
    this command with --out and is one rank.
    """
    given = {
        "--model": model,
        "--tokenizer": tokenizer or model,
        "--eval-file": evaluate,
        "--field": field,
        "--epochs": epochs,
        "--max-steps": max_steps,
        "--lr": lr,
        "--batch": batch,
        "--block-size": tokens,
        "--dtype": dtype,
        "--gradients": gradients,
        "--no-tie": None if tie else True,
        "--dropout": dropout,
        "--seed": seed,
        "--save-every": save_every,
        "--store": store,
    }
    check_arguments({**given, "--stages": stages, "--peers": peers}, data, out)
    words = arguments({**given, "--stages": stages if "RANK" in os.environ else None}, data, out, report_to or [])
    start(words, stages, None if peers is None else [host.strip() for host in peers.split(",")], dry_run=dry_run)


def check_arguments(given: dict[str, Any], data: list[Path], out: Path | None) -> None:
    """Raise ConfigError for what can be seen before several processes start to find that out."""
    from pipecomp.config import MOST_SEED

    for key, least in {"stages": 1, "epochs": 1, "max-steps": 1, "batch": 1, "save-every": 1, "block-size": 2}.items():
        value = given[f"--{key}"]
        named = "--tokens" if key == "block-size" else f"--{key}"
        require(value is None or value >= least, named, value, f"a whole number from {least}")
    require(0 <= given["--seed"] <= MOST_SEED, "--seed", given["--seed"], f"a whole number from 0 to {MOST_SEED}")
    require(0 < given["--lr"] < math.inf, "--lr", given["--lr"], "a number above 0")
    require(given["--dtype"] in ("fp32", "bf16"), "--dtype", given["--dtype"], "fp32 or bf16")
    if given["--gradients"] is not None:
        from pipecomp.plan.search import AVERAGES

        require(given["--gradients"] in AVERAGES, "--gradients", given["--gradients"], ", ".join(AVERAGES))
    if "RANK" in os.environ:
        place = "where a launcher has started this process"
        require(given["--peers"] is None, "--peers", given["--peers"], f"nothing {place} as a rank")
        require(out is not None, "--out", None, f"a folder {place}: one for all ranks")
    dropout = given["--dropout"]
    require(dropout is None or 0 <= dropout < 1, "--dropout", dropout, "0, or a share below 1")
    going_on = "a folder: with --save-every a run goes on there"
    require(given["--save-every"] is None or out is not None, "--out", None, going_on)
    for path in data:
        check_text("--data", path)
    if given["--eval-file"] is not None:
        check_text("--eval", given["--eval-file"])


def arguments(given: dict[str, Any], data: list[Path], out: Path | None, report_to: list[str]) -> list[str]:
    """Make the command line of each rank. given: by the rank's arguments; None is left out, True is a switch."""
    from pipecomp.report.recorder import CHECKPOINTS, default_folder

    folder = str(out or default_folder("train"))
    places = {"--deepspeed_config": f"{folder}/ds_config.json", "--run": folder, "--save": f"{folder}/model"}
    if given["--save-every"] is not None:
        places |= {"--checkpoint": f"{folder}/{CHECKPOINTS}", "--resume": "auto"}
    both = {key: value for key, value in (given | places).items() if value is not None}
    words = chain.from_iterable([key] if value is True else [key, str(value)] for key, value in both.items())
    return [*words, "--train-file", *map(str, data), *(["--report-to", *report_to] if report_to else [])]


def start(words: list[str], stages: int | None, hosts: list[str] | None, *, dry_run: bool) -> None:
    """Start the ranks or say how they are started, or be one that a launcher has started. Exits with their status."""
    from pipecomp.distributed.launch_env import read_launch
    from pipecomp.distributed.ssh_launcher import ranks_of, run_ranks_of, working_directory
    from pipecomp.utils.processes import python_module_command

    if "RANK" in os.environ:
        require(not dry_run, "--dry-run", True, "nothing where a launcher has started this process as a rank")
        os.execv(sys.executable, python_module_command(_RANK, *words))
    read_launch(os.environ)
    ranks = ranks_of(python_module_command(_RANK, *words), stages or len(hosts or ()) or 2, hosts or [])
    if dry_run or any(rank.host for rank in ranks):
        shown = os.environ if dry_run else without_secrets(os.environ)  # a dry run's lines are for pasting
        for rank in ranks:
            say_plain(f"{rank.host or 'here'}: {rank.line(working_directory(), shown)}")
    if not dry_run:
        several = len(ranks) > 1
        say(f"{len(ranks)} process{'es' * several}: {'they measure each other' if several else 'it measures'} first.")
        raise typer.Exit(run_ranks_of(ranks))


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Hide what logs into other places, as HF_TOKEN or a password in an address: output is kept in logs."""
    return {
        name: "..." if _SECRET.search(name) else _IN_ADDRESS.sub("://...@", value)
        for name, value in environment.items()
    }


def check_text(key: str, path: Path) -> None:
    """Raise ConfigError for what is no file to read."""
    try:
        with path.open("rb") as file:
            begin = file.read(1)
    except OSError as error:
        raise ConfigError(key, str(path), f"a text file ({error.strerror})") from error
    require(begin, key, str(path), "a text file that is not empty")


def say_plain(line: str) -> None:
    """Print a line for the shell, as it is."""
    console.print(line, highlight=False, soft_wrap=True)
