"""Other machines of `pipecomp train --peers`: the files that they need, and `pipecomp peers list` and `remove`."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from pipecomp.cli.common import JsonOption, console, option, plain_errors, print_line, print_status, write_json
from pipecomp.distributed import bring_up, peer_agent, peer_question, peer_session
from pipecomp.distributed.bring_up import InputFiles, PeerPlan
from pipecomp.distributed.elastic_launcher import read_file, silent_hosts, write_file
from pipecomp.distributed.installation import DigestCache, Installation, SourceFile
from pipecomp.distributed.ssh_launcher import RankCommand, host_name, is_this_machine, working_directory
from pipecomp.errors import PipecompError, require
from pipecomp.plan.options import TrainOptions
from pipecomp.utils.tables import table
from pipecomp.utils.units import format_size

_OUTSIDE = "outside"  # in a working directory there: files that are not in the one here
_INPUTS = ("evaluate", "model", "tokenizer", "adapter", "chat_template", "plan")  # options, beside "data"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".ot")
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_FOLDERS = ("additional_chat_templates",)  # of a model's tokenizer

peers_app = typer.Typer(no_args_is_help=True, help="List and remove what was set up on other machines.")


# -- files of a run


def place_there(text: str, folder: str) -> str:
    """Return where a path of this machine is on one that was set up, relative to its working directory.

    Example:
        >>> place_there("/data/text.txt", "/home/me/run")
        'outside/data/text.txt'
    """
    path = os.path.normpath(os.path.join(folder, text))
    inside = os.path.relpath(path, folder)
    return f"{_OUTSIDE}/{path.lstrip('/')}" if inside.split("/")[0] == ".." else inside


def input_paths(options: TrainOptions) -> list[str]:
    """Return the options' values that are files or folders here; others may be names on the hub."""
    named = [*options.data, *(getattr(options, name) for name in _INPUTS)]
    return list(dict.fromkeys(str(value) for value in named if value is not None and _is_path(str(value))))


def _is_path(text: str) -> bool:
    return len(text) < 4096 and "\n" not in text and os.path.exists(text)


def find_inputs(options: TrainOptions) -> list[InputFiles]:
    """Return the files of a run: data, and what loading needs of a model, also of one of the hub that is in the cache.

    Raises:
        ConfigError: A file cannot be read.
    """
    folder, models = working_directory(), {options.model, options.tokenizer, str(options.adapter or "")}
    found = []
    for text in input_paths(options):
        path, there = Path(text), place_there(text, folder)
        if path.is_dir():
            paths = model_files(path) if text in models else [p for p in sorted(path.rglob("*")) if p.is_file()]
            prefix = "" if there == "." else f"{there}/"
            files = [SourceFile(f"{prefix}{p.relative_to(path).as_posix()}", p) for p in paths]
        else:
            files = [SourceFile(there, path)]
        found.append(InputFiles(text, tuple(files)))
    for name in hub_names(options):
        found += hub_files(name)
    for item in found:
        for file in item.files:
            require(file.source and os.access(file.source, os.R_OK), "file", str(file.source), "one that can be read")
    cache = DigestCache(bring_up.digests_path())
    cache.fill([file for item in found for file in item.files])
    return found


def hub_names(options: TrainOptions) -> list[str]:
    """Return the models of a run that may be on the hub."""
    return [name for name in dict.fromkeys(filter(None, (options.model, options.tokenizer))) if not _is_path(name)]


def hub_address(options: TrainOptions) -> str:
    """Return the address of a file on the hub that a run reads; "" if there is none."""
    names = hub_names(options)
    if not names:
        return ""
    from huggingface_hub import constants  # takes a second

    return f"{constants.ENDPOINT}/{names[0]}/resolve/main/config.json"


def model_files(folder: Path) -> list[Path]:
    """Return the files of a model's folder without weights in forms that are not read."""
    from pipecomp.stages.partition.checkpoints import WEIGHT_FILES  # imports torch, which takes seconds

    names = [name for name in WEIGHT_FILES if (folder / name).is_file()][:1]
    if names and names[0].endswith(".json"):
        names += sorted(set(json.loads((folder / names[0]).read_text(encoding="utf-8"))["weight_map"].values()))
    names += [name for name in _ADAPTERS if (folder / name).is_file()][:1]
    wanted = [path for path in sorted(folder.iterdir()) if path.is_file()]
    wanted = [path for path in wanted if path.name in names or path.suffix not in _WEIGHTS]
    for name in _FOLDERS:
        wanted += [path for path in sorted((folder / name).glob("*")) if path.is_file()]
    return wanted


def hub_files(name: str) -> list[InputFiles]:
    """Return the files of a model of the hub in this machine's cache, in its layout; empty if it is not there."""
    from huggingface_hub import try_to_load_from_cache  # takes a second

    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return []
    config = try_to_load_from_cache(name, "config.json")
    if not isinstance(config, str):
        return []
    snapshot = Path(config).parent
    repository = snapshot.parent.parent
    files = [SourceFile(f"snapshots/{snapshot.name}/{p.relative_to(snapshot)}", p) for p in model_files(snapshot)]
    refs = [p for p in sorted((repository / "refs").glob("*")) if p.is_file()]
    files += [SourceFile(f"refs/{p.name}", p) for p in refs]
    return [InputFiles(name, tuple(files), f"{peer_agent.HUB}/hub/{repository.name}")]


def options_there(options: TrainOptions, folder: str) -> TrainOptions:
    """Return a run's options with the paths of a machine that has its own working directory."""

    def there(value: Any) -> Any:
        kept = value is None or not _is_path(str(value))
        return value if kept else type(value)(place_there(str(value), folder))

    outputs = {name: getattr(options, name) for name in ("out", "store")}
    moved: dict[str, Any] = {}
    moved |= {name: None if path is None else Path(place_there(str(path), folder)) for name, path in outputs.items()}
    moved |= {name: there(getattr(options, name)) for name in _INPUTS}
    return replace(options, data=[there(path) for path in options.data], **moved)


def agree_to_copies(options: TrainOptions | None) -> bool:
    """Ask whether to take files that are missing here from the other machines of a run; False if none is missing.

    A name without an ending or a folder may be one on the hub.

    Raises:
        ConfigError: Files are missing, and there is nobody to ask.
    """
    if options is None:
        return False
    models = [text for text in (options.model, options.tokenizer) if text is not None and text.startswith((".", "/"))]
    named = [*map(str, (*options.data, options.evaluate or "")), *models, str(options.adapter or "")]
    missing = [text for text in named if text and (Path(text).suffix or text in models) and not _is_path(text)]
    if not missing:
        return False
    hint = f"Missing here: {', '.join(missing)}"
    require(sys.stdin.isatty(), "--yes", False, "given, to take files from the other machines without asking", hint)
    return typer.confirm(f"{hint}. Take what is missing from the other machines?", err=True)


# -- the machines of a run


@dataclass(frozen=True)
class PeerPlaces:
    """Places where ranks run on machines that were set up.

    Args:
        plans: Plans of these machines.
        folder: Working directory here.
    """

    plans: Mapping[str, PeerPlan]
    folder: str

    def place(self, ranks: Sequence[RankCommand]) -> list[RankCommand]:
        """Return the ranks' commands with each machine's Python, folder, variables and paths."""
        return [self._place(rank) for rank in ranks]

    def _place(self, rank: RankCommand) -> RankCommand:
        plan = self.plans.get(rank.host or "")
        if plan is None:
            return rank
        command = rank.command
        if plan.python is not None:  # -P: as `python_module_command`
            command = (plan.python, "-P", *command[command.index("-m") :])
        if plan.folder is not None:
            own = options_there(TrainOptions.from_json(command[-1]), self.folder)
            command = (*command[:-1], own.to_json())
        variables = {**rank.variables, **plan.variables}
        return replace(rank, command=command, folder=plan.folder, variables=variables, needs=())

    def results(self, rank: RankCommand) -> str | None:
        """Return where rank 0 writes the run's results, as for scp; None if that is the same path as here."""
        if rank.folder is None or rank.host is None:
            return None
        user, at, name = rank.host.rpartition("@")
        host = f"{user}{at}[{name}]" if ":" in name else rank.host
        return f"{host}:{rank.folder}/{TrainOptions.from_json(rank.command[-1]).out}"

    def write(self, host: str, path: Path, text: str) -> str | None:
        """Write a file of the run on a host; see `write_file`."""
        plan = self.plans.get(host_name(host))
        if plan is None or plan.folder is None:
            return write_file(host, path, text)
        return write_file(host, Path(place_there(str(path), self.folder)), text, plan.folder)

    def read(self, host: str, path: Path) -> str | None:
        """Return the text of a file of the run on a host; see `read_file`."""
        plan = self.plans.get(host_name(host))
        if plan is None or plan.folder is None:
            return read_file(host, path)
        return read_file(host, Path(place_there(str(path), self.folder)), plan.folder)

    def silent(self, hosts: Iterable[str]) -> dict[str, str]:
        """Return the hosts that this machine cannot log in to, and why."""
        return silent_hosts(hosts, {host: plan.folder for host, plan in self.plans.items() if plan.folder is not None})


def may_lack(hosts: Iterable[str]) -> bool:
    """Return whether a machine was set up from here before, so that it is asked at once what it has."""
    return not set(bring_up.known_peers()).isdisjoint(hosts)


def set_up_peers(
    options: TrainOptions,
    ranks: Sequence[RankCommand],
    spares: Sequence[str],
    *,
    packages: str,
    remote_folder: str,
    yes: bool,
) -> PeerPlaces:
    """Bring the other machines of a run to it; those that have everything are left as they are.

    Args:
        options: Options of the run.
        ranks: Its ranks.
        spares: Machines that take the places of lost ones.
        packages: Where the packages come from, see `bring_up.choose_environment`.
        remote_folder: Folder on the other machines.
        yes: Do not ask.

    Raises:
        ConfigError: A machine cannot be reached or set up, or there is nobody to ask.
    """
    allowed = ", ".join(bring_up.PACKAGES)
    require(packages in bring_up.PACKAGES, "--packages", packages, allowed)
    valid = re.fullmatch(r"[^\0-\x1f\x7f:]+", remote_folder) and ".." not in remote_folder.split("/")
    require(valid, "--remote-folder", remote_folder, "a folder, from the home of the other machine or with a / first")
    hosts = list(dict.fromkeys(rank.host for rank in ranks if rank.host))
    others = [host_name(host) for host in spares]
    others = [host for host in others if host not in hosts and not is_this_machine(host)]
    folder = working_directory()
    if not hosts and not others:
        return PeerPlaces({}, folder)
    command = ranks[0].command
    python = command[: command.index("-m")]
    probe = f"packaging=={Installation.version('packaging')}"
    inputs, hub = input_paths(options), hub_address(options)
    asked = peer_question.question(python, folder, inputs, remote_folder, os.environ, probe, hub)
    name = re.sub(r"[^\w.-]", "-", os.path.basename(folder))[:40] or "run"
    digest = hashlib.sha256(f"{socket.gethostname()}\0{folder}".encode()).hexdigest()[:8]

    def agree(lines: list[str]) -> None:
        for line in lines:
            print_status(line)
        if yes:
            return
        hint = "pipecomp peers remove HOST removes all of it"
        require(sys.stdin.isatty(), "--yes", False, "given, where no terminal can ask for consent", hint)
        if not typer.confirm("Set up?", err=True):
            raise typer.Exit(1)

    plans = bring_up.bring_up(
        hosts,
        others,
        asked,
        packages=packages,
        work=f"{peer_agent.WORK}/{name}-{digest}",
        inputs=lambda: find_inputs(options),
        agree=agree,
        say=print_status,
    )
    return PeerPlaces(plans, folder)


# -- commands

_Hosts = Annotated[list[str] | None, typer.Argument(metavar="[HOST]...", help="As in --peers.")]
_Folder = Annotated[
    str | None, option("Folder there; by default the one that was used, or .pipecomp in its home.", "--remote-folder")
]


def _roots(hosts: Sequence[str], remote_folder: str | None) -> dict[str, str]:
    known = bring_up.known_peers()
    return {host: remote_folder or known.get(host, bring_up.FOLDER) for host in hosts}


@peers_app.command("list")
@plain_errors()
def list_peers(hosts: _Hosts = None, remote_folder: _Folder = None, json_file: JsonOption = None) -> None:
    """List the machines that were set up from here, and what they hold; each is asked over ssh."""
    roots = _roots(hosts or list(bring_up.known_peers()), remote_folder)

    def measure(host: str) -> dict[str, Any]:
        try:
            return peer_session.request_of(host, roots[host], {"do": "measure"})
        except PipecompError as error:
            return {"problem": str(error)}

    with ThreadPoolExecutor(max(1, len(roots))) as pool:
        found = dict(zip(roots, pool.map(measure, roots), strict=True))
    lines = [{"host": host, "folder": roots[host], **found[host]} for host in roots]
    write_json(json_file, lines)
    if not lines:
        print_line("No machine was set up from here.")
        return
    headings = ("machine", "folder", "disk", "results of runs")
    rows = []
    for line in lines:
        size = format_size(line["bytes"]) if "bytes" in line else "nothing" if "problem" not in line else "no answer"
        results = format_size(line["results"]) if line.get("files") else "–"
        rows.append((line["host"], line["folder"], size, results))
    console.print(table(headings, rows, left=headings[:2]))
    for line in lines:
        if "problem" in line:
            print_status(line["problem"])


@peers_app.command("remove")
@plain_errors()
def remove_peers(
    hosts: Annotated[list[str], typer.Argument(metavar="HOST...", help="As in --peers.")],
    remote_folder: _Folder = None,
    results: Annotated[bool, option("Also remove what runs have written there, such as models.", "--results")] = False,
    yes: Annotated[bool, option("Do not ask.", "--yes")] = False,
) -> None:
    """Remove all that was set up on machines: environment, pipecomp, copies of data and models.

    pipecomp peers remove host2
    """
    roots = _roots(hosts, remote_folder)
    for host, root in roots.items():
        what = "with the results of runs" if results else "the results of runs stay"
        print_status(f"{host}: {root} is removed, {what}")
    if not yes:
        require(sys.stdin.isatty(), "--yes", False, "given, where no terminal can ask for consent")
        if not typer.confirm("Remove?", err=True):
            raise typer.Exit(1)
    for host, root in roots.items():
        left = peer_session.request_of(host, root, {"do": "remove", "keep_results": not results})
        if left.get("files"):
            print_line(
                f"{host}: removed; {format_size(left['results'])} of results are left in {root}/work (--results)"
            )
        else:
            bring_up.remember({}, gone=[host])
            print_line(f"{host}: removed" if left else f"{host}: there was nothing")
