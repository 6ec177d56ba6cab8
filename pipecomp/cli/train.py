"""`pipecomp init` and `pipecomp train`: a recipe's files to edit, and fine-tuning from a model and a text."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

import pipecomp
from pipecomp.cli.common import option, plain_errors, print_line, print_status, takes_options
from pipecomp.errors import ConfigError, PipecompError, require, writable
from pipecomp.plan.options import TrainOptions
from pipecomp.utils.files import atomic_write_text

_RANK_PROGRAM = "pipecomp.recipes.planned"
_PACKAGE = Path(pipecomp.__file__).parent
_README = "README.md"
_OUTSIDE_LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./)[^)]*\)")  # links to pages outside the copy
_SHARED_FILE = re.compile(r"recipes/((?:\w+/)?\w+\.(?:py|json))")  # files of other recipes that its commands need


# -- init


@plain_errors()
def init(
    recipe: Annotated[str | None, typer.Argument(help="Recipe name; omit to list all.")] = None,
    folder: Annotated[Path | None, typer.Argument(help="New folder; by default named after the recipe.")] = None,
) -> None:
    """Copy a recipe for editing: its script, DeepSpeed configurations and README.

    pipecomp init gpt2_wikitext2 my-run
    """
    if recipe is None:
        for name, title in recipe_names().items():
            print_line(f"{name:<16} {title}")
        return
    files = copy_recipe(recipe, folder or Path(recipe))
    print_line(f"Wrote {', '.join(map(str, files))}.")
    readme = next(path for path in files if path.name == _README)
    print_line(f"{readme} has the commands; start them in {readme.parent}.")


def recipes_folder() -> Path:
    """Return the folder of the recipes: in an installed package, or beside it in a checkout.

    Raises:
        ConfigError: The recipes are missing.
    """
    for folder in (_PACKAGE / "recipe_files", _PACKAGE.parent / "recipes"):
        if (folder / _README).is_file():
            return folder
    raise ConfigError("recipe", str(_PACKAGE), "an installation with pipecomp/recipe_files: install it again")


def recipe_names() -> dict[str, str]:
    """Return the recipes' titles by name."""
    readmes = sorted(recipes_folder().glob(f"*/{_README}"))
    return {path.parent.name: path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") for path in readmes}


def copy_recipe(recipe: str, folder: Path) -> list[Path]:
    """Copy a recipe's files, and adapt the commands in its README to the new folder.

    Args:
        recipe: One of `recipe_names`.
        folder: A new folder, or an empty one.

    Returns:
        The files.

    Raises:
        ConfigError: There is no such recipe, or the folder is not empty or cannot be written.
    """
    require(recipe in recipe_names(), "recipe", recipe, ", ".join(recipe_names()))
    source = recipes_folder() / recipe
    page = (source / _README).read_text(encoding="utf-8")
    page = _OUTSIDE_LINK.sub(r"\1", page).replace(f"recipes/{recipe}/", "")
    files = {path.name: path for path in source.iterdir() if path.is_file() and path.name != _README}
    files |= {name: recipes_folder() / name for name in _SHARED_FILE.findall(page)}
    with writable("folder", folder):
        folder.mkdir(parents=True, exist_ok=True)
        require(
            not any(folder.iterdir()), "folder", str(folder), "a new folder, or an empty one: nothing is overwritten"
        )
        for name, path in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)
        page = _SHARED_FILE.sub(r"\1", page)
        atomic_write_text(folder / _README, re.sub(r"^make setup .*\n\n?", "", page, flags=re.MULTILINE))
    return sorted(folder / name for name in (*files, _README))


# -- train


def _read_defaults(context: typer.Context, file: Path | None) -> Path | None:
    """Take the options of `--config` as defaults; those of the command line come first."""
    if file is not None:
        with plain_errors():
            context.default_map = {**(context.default_map or {}), **TrainOptions.read_file(file)}
    return file


ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", callback=_read_defaults, is_eager=True, help="YAML file of these options, name: value."),
]


@plain_errors()
@takes_options
def train(
    options: TrainOptions,
    dry_run: Annotated[
        bool, option("Print each machine's command without running it, and the predicted duration.", "--dry-run")
    ] = False,
    yes: Annotated[bool, option("Set up other machines that lack something without asking.", "--yes")] = False,
    packages: Annotated[
        str, option("Packages of machines that are set up: from an index they reach, copied from here, or auto.")
    ] = "auto",
    remote_folder: Annotated[str, option("Folder for all that is set up there, from its home.")] = ".pipecomp",
    config: ConfigOption = None,
) -> None:
    """Fine-tune a language model on a text with several processes or machines: measure, plan, explain, train.

    pipecomp train --model gpt2 --data text.txt --stages 2

    pipecomp train --model gpt2 --data text.txt --peers host1,host2

    pipecomp train --model llama --data text.txt --lora 16 --merge

    Each peer must accept this machine's ssh connections without a password. One
    that lacks Python packages, pipecomp or files gets them after a question;
    `pipecomp peers remove` removes them. --dry-run prints the
    commands to run on them by hand instead, and measures this machine to predict
    how long the training takes. Under a launcher (torchrun, srun)
    every process runs this command with --out and becomes one rank.
    """
    from pipecomp.distributed.elastic_launcher import LOCAL, Roster, launch_elastic
    from pipecomp.distributed.launch_env import read_launch
    from pipecomp.distributed.ssh_launcher import (
        LackingError,
        RankCommand,
        assign_ranks,
        check_hosts,
        lacking_hosts,
        launch_ranks,
        working_directory,
    )
    from pipecomp.report.recorder import default_folder
    from pipecomp.utils.processes import python_module_command

    launched, hint = "RANK" in os.environ, "A launcher has started this process as a rank"
    if launched:
        check_started(options, hint)
    check_sources(options)
    hosts, spares = (
        [host.strip() for host in (text or "").split(",") if text] for text in (options.peers, options.spare)
    )
    elastic = options.elastic if options.elastic is not None else len(hosts) > 1
    require(elastic or not options.rebalance, "--rebalance", True, "only with several --peers, or with --elastic")
    require(elastic or not spares, "--spare", options.spare, "only with several --peers, and without --no-elastic")
    roster = Roster.start(hosts or [LOCAL], spares)
    own = replace(options, out=options.out or default_folder("train"), peers=None, spare=None, elastic=elastic or None)
    command = python_module_command(_RANK_PROGRAM, own.to_json())
    if launched:
        require(not dry_run, "--dry-run", True, "only without a launcher", hint)
        os.execv(sys.executable, command)
    read_launch(os.environ)  # refuses srun's tasks that have no rank
    ranks = assign_ranks(command, options.stages or len(hosts) or 2, hosts)
    if dry_run:
        for rank in ranks:
            print_line(f"{rank.host or 'here'}: {rank.shell_line(working_directory(), os.environ)}")
        if options.second_home != "off" and (options.second_home or len({rank.host for rank in ranks}) > 1):
            print_status(describe_second_home(options, len(ranks)))
        if options.plan is not None:
            return
        print_status("Measuring, to predict the duration.")
        measured = python_module_command(_RANK_PROGRAM, options.to_json(), "--dry-run")
        if launch_ranks(assign_ranks(measured, 1 if hosts else len(ranks))):
            print_status("No duration is predicted: the training would fail in the same way.")
        return
    placed, needs = None, tuple[str, ...]()
    if hosts or spares:
        from pipecomp.cli.peers import input_paths, may_lack, set_up_peers

        needs = tuple(input_paths(own))
    if any(rank.host for rank in ranks) or spares:
        places = [f"rank {rank.rank} on {rank.host or 'this machine'}" for rank in ranks]
        print_status(f"Starting {', '.join(places)}.")
        ranks = [replace(rank, needs=needs) for rank in ranks]
        lacks = bool(spares) or may_lack(rank.host for rank in ranks if rank.host)
        try:
            if not lacks:
                check_hosts(ranks)
        except LackingError:
            lacks = True
        if lacks:
            placed = set_up_peers(own, ranks, spares, packages=packages, remote_folder=remote_folder, yes=yes)
            ranks = placed.place(ranks)
            if (there := placed.results(ranks[0])) is not None:
                print_status(f"Results will be in {there}.")
            check_hosts(ranks)
    if options.plan is None:
        print_status("Measuring with 1 process." if len(ranks) == 1 else f"Measuring between {len(ranks)} processes.")
    if not elastic:
        raise typer.Exit(launch_ranks(ranks))

    def command_for(world: int) -> list[str]:
        return python_module_command(_RANK_PROGRAM, replace(own, stages=world).to_json())

    each = len(ranks) // len(roster.hosts)
    if placed is None or not placed.plans:
        raise typer.Exit(launch_elastic(command_for, roster, each, out=own.out, lacking=lacking_hosts, needs=needs))
    peers, started = placed, ranks

    def place(commands: list[RankCommand]) -> list[RankCommand]:
        nonlocal started
        started = peers.place(commands)
        return started

    def lacking(commands: Sequence[RankCommand]) -> dict[str, str]:
        return lacking_hosts(peers.place(list(commands)))

    status = launch_elastic(
        command_for,
        roster,
        each,
        peers.silent,
        out=own.out,
        write=peers.write,
        read=peers.read,
        place=place,
        lacking=lacking,
        needs=needs,
    )
    if status == 0 and (results := peers.results(started[0])) is not None:
        print_status(f"Fetch the results: scp -r {shlex.quote(results)} .")
    raise typer.Exit(status)


def check_started(options: TrainOptions, hint: str) -> None:
    """Raise ConfigError for options of ranks that this command starts, and for a folder that ranks would not share."""
    require(options.peers is None, "--peers", options.peers, "only without a launcher", hint)
    require(options.spare is None, "--spare", options.spare, "only without a launcher", hint)
    require(options.elastic is None, "--elastic", options.elastic, "only without a launcher", hint)
    require(options.out is not None, "--out", None, "a folder, the same for all ranks", hint)


def describe_second_home(options: TrainOptions, ranks: int) -> str:
    """Describe how often states can go to their second home; for a model that is not here, that the run prints it."""
    from pipecomp.plan.command import describe_records  # imports torch, which takes seconds
    from pipecomp.plan.options import PlanOptions

    same = ("model", "dtype", "tie", "lora", "load_in_4bit", "load_in_8bit")
    stages = options.stages or ranks
    given = {key: getattr(options, key) for key in same}
    planned = PlanOptions(stages=stages, nodes=ranks, batch=options.batch or ranks, **given)
    if options.adapter is None and Path(options.model).is_dir():  # a name would be looked up on the hub
        with contextlib.suppress(PipecompError, OSError, ValueError):
            return describe_records(planned)
    return "second home: the run prints after how many steps the state of each machine is copied"


def read_train_options(words: Sequence[str], *, lacking: bool = False) -> TrainOptions:
    """Read the arguments of `pipecomp train` for a launcher that starts each rank itself.

    lacking: Data may be missing here, to be taken from another machine.

    Raises:
        ConfigError: A value is wrong, or says how ranks are started.
        SystemExit: An argument is missing or unknown.
    """
    found: list[TrainOptions] = []

    @takes_options
    def read(options: TrainOptions, config: ConfigOption = None) -> None:
        found.append(options)

    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command()(read)
    try:
        command(list(words), prog_name="pipecomp train")
    except SystemExit:  # with 0 at its end, otherwise after a line about the arguments
        if not found:
            raise
    options = replace(found[0], elastic=None)
    check_started(options, "Each machine starts its own processes")
    check_sources(options, lacking=lacking)
    return found[0]


def check_sources(options: TrainOptions, *, lacking: bool = False) -> None:
    """Raise ConfigError for files and folders that are no training data; names of data sets are left to the ranks."""
    from pipecomp.data import find_sources  # imports torch, which takes seconds

    for key, paths in (("--data", options.data), ("--eval", [options.evaluate] if options.evaluate else [])):
        for path in paths:
            if path.exists() or (path.suffix and not lacking):
                find_sources(path, key)
