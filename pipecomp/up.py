"""One rank of `pipecomp up`: joins the run, compares files, checks and plans, then runs the training script.

python -m pipecomp.up CHECKS SCRIPT ARGUMENTS…
python -m pipecomp.up CHECKS train OPTIONS
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pipecomp.distributed import preemption

if __name__ == "__main__":
    preemption.end_quietly()  # the imports below take seconds

import torch.distributed as dist
from rich.console import Console

from pipecomp.config import read_json_object
from pipecomp.config.checks import batch_sizes
from pipecomp.distributed.consistency import AllRanks
from pipecomp.distributed.file_transfer import share_files
from pipecomp.distributed.heartbeat import is_collective_error
from pipecomp.distributed.rendezvous import KEYS, all_ranks, certified_ranks, first_line, start_processes
from pipecomp.distributed.up_launcher import BOOK, REACHED, TRAIN, Checks
from pipecomp.doctor.examination import examine
from pipecomp.doctor.finding import Finding, print_report
from pipecomp.errors import DataError, LinkTimeoutError, PeerLostError, PipecompError
from pipecomp.netlab.software import throttle_to
from pipecomp.plan.command import run_plan
from pipecomp.plan.options import PlanOptions, TrainOptions
from pipecomp.rank_layout import STAGES_ACROSS
from pipecomp.tls.process_group import current_mesh
from pipecomp.tls.routes import RELAYED
from pipecomp.utils.files import atomic_write_text, hash_file
from pipecomp.utils.tables import replace_unprintable

_DOCTOR_S = 600.0


def main(arguments: Sequence[str]) -> None:
    """Run the checks and the script. An error is one line on standard error, with exit status 1."""
    replace_unprintable()
    began = time.monotonic()
    checks, command = Checks(**json.loads(arguments[0])), list(arguments[1:])
    trains = command[0] == TRAIN
    console = Console()

    def report(text: str) -> None:
        if dist.get_rank() == 0:
            console.print(f"{text} ({time.monotonic() - began:.0f} s)", highlight=False, soft_wrap=True, markup=False)

    try:
        start_processes(config=_config(command))
        report(f"up: {dist.get_world_size()} ranks are connected over {dist.get_backend()}{_relayed()}")
        if KEYS in os.environ:
            _write_book(all_ranks())
        files = train_files(command[1]) if trains else command[1:]
        share_files(all_ranks(), input_paths(files), take=checks.take, say=lambda text: report(f"up: {text}"))
        compare_files(all_ranks(), files)
        report("up: all ranks have the same files")
        if checks.doctor:
            problem = examine(lambda findings: _show(console, findings), store=Path("messages"), limit_s=_DOCTOR_S)
            report("up: the doctor found a problem" if problem else "up: the doctor found no problem")
            if problem and not checks.anyway:
                raise PipecompError("training not started: the doctor found problems; --anyway starts it")
        if checks.plan and not trains:  # which makes its own plan
            ranks = all_ranks()
            with ranks.collective_errors():
                _plan(console, command)
            report("up: planned")
    except PipecompError as error:
        print(f"pipecomp up: rank {os.environ['RANK']}: {error}", file=sys.stderr, flush=True)
        sys.exit(preemption.LOST_STATUS if isinstance(error, (PeerLostError, LinkTimeoutError)) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if not is_collective_error(error):
            raise
        lost = f"lost another rank, whose output says more: {first_line(error)}"
        print(f"pipecomp up: rank {os.environ['RANK']}: {lost}", file=sys.stderr, flush=True)
        sys.exit(preemption.LOST_STATUS)
    report("up: training begins")
    sys.argv = command
    if trains:
        runpy.run_module("pipecomp.recipes.planned", run_name="__main__")
        return
    sys.path.insert(0, str(Path(command[0]).resolve().parent))
    runpy.run_path(command[0], run_name="__main__")


def _write_book(ranks: AllRanks) -> None:
    """Write for this machine's launcher where each machine is reached, by its place; every rank must call this."""
    certified = certified_ranks(ranks.world) or range(ranks.world)
    place = certified[ranks.rank] // int(os.environ["LOCAL_WORLD_SIZE"])
    answers = ranks.all_gather_object([place, os.environ.get(REACHED)])
    book = {str(place): reached for place, reached in answers if reached is not None}
    mesh = current_mesh()
    if mesh is not None:
        mesh.book = book
    if os.environ["LOCAL_RANK"] == "0":
        atomic_write_text(Path(os.environ[KEYS]) / BOOK, json.dumps(book))


def _relayed() -> str:
    """Describe the pairs of ranks that rank 0 relays, "" for none; every rank must call this."""
    mesh = current_mesh()
    peers = [] if mesh is None else [r for r, route in mesh.routes.items() if route == RELAYED and r > mesh.rank]
    peers_by_rank = all_ranks().all_gather_object(peers)
    pairs = [f"{rank} and {other}" for rank, others in enumerate(peers_by_rank) for other in sorted(others)]
    return f"; {RELAYED}: {', '.join(pairs)}" if pairs else ""


def _show(console: Console, findings: list[Finding]) -> None:
    if findings:
        print_report(findings, console)


def _config(command: Sequence[str]) -> str | None:
    """Return the path of DeepSpeed's configuration, if the script has the recipes' option for it."""
    return _value(command, "--deepspeed_config") or _value(command, "--deepspeed-config")


def _plan(console: Console, command: Sequence[str]) -> None:
    """Measure all ranks and predict a step with each method; every rank must call this."""
    model, path = _value(command, "--model"), _config(command)
    if model is None or path is None:
        if dist.get_rank() == 0:
            console.print("up: no plan: it needs the arguments --model and --deepspeed_config", markup=False)
        return
    ranks = all_ranks()
    try:
        with ranks.collective_errors():
            config = read_json_object("--deepspeed_config", path)
            block, stages = _value(command, "--block-size"), _value(command, "--stages")
            dropout = _value(command, "--dropout")
            replicas = dist.get_world_size() // int(stages or dist.get_world_size())
            if "train_micro_batch_size_per_gpu" not in config:  # DeepSpeed derives it from the others
                batch, accumulation = config.get("train_batch_size"), config.get("gradient_accumulation_steps", 1)
                config["train_micro_batch_size_per_gpu"] = batch // (accumulation * replicas) if batch else 1
            micro, accumulation = batch_sizes(config, replicas)
            halves = [half for half in ("bf16", "fp16") if config.get(half, {}).get("enabled") is True]
            options = PlanOptions(
                model=model,
                stages=int(stages) if stages else None,
                batch=micro * accumulation * replicas,
                micro_batch=micro,
                tokens=int(block) if block else None,
                dtype=halves[0] if halves else "fp32",
                tie=config.get("pipecomp", {}).get("tie", True),
                layout=config.get("pipecomp", {}).get("layout", STAGES_ACROSS),
                measure=True,
                dropout=float(dropout) if dropout else None,
            )
        run_plan(console if dist.get_rank() == 0 else Console(quiet=True), options, throttle_to)
    except (PipecompError, OSError, ValueError) as error:  # the same on all ranks: they have the same files
        if dist.get_rank() == 0:
            console.print(f"up: no plan: {error}", markup=False, highlight=False)


def _value(command: Sequence[str], flag: str) -> str | None:
    """Return the value of `--flag value` or `--flag=value`; None if it is missing."""
    for index, word in enumerate(command):
        if word == flag and index + 1 < len(command):
            return command[index + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


# Options of recipes that name input files or folders; each may have several values.
_INPUT_OPTIONS = (
    *("--deepspeed_config", "--deepspeed-config", "--model", "--tokenizer"),
    *("--train-file", "--data", "--eval-file", "--weights", "--adapter"),
)
_MAX_LISTED = 5
_MISSING = "missing"


def compare_files(ranks: AllRanks, arguments: Sequence[str]) -> None:
    """Compare the contents of a recipe's input files between ranks; every rank must call this.

    Args:
        ranks: All ranks.
        arguments: A recipe's arguments. A value that is a file on no rank is ignored, such as a name on the hub, or
            "train:2048".

    Raises:
        DataError: On every rank, with the files and ranks, if a file differs or is missing on some ranks only.
    """
    own = {path: digest(Path(path)) for path in input_paths(arguments)}
    digests: list[dict[str, str]] = ranks.all_gather_object(own)
    differences = []
    for path in sorted(set().union(*digests)):
        values = [by_path.get(path, _MISSING) for by_path in digests]
        if len(set(values)) > 1:
            lacking = [str(rank) for rank, value in enumerate(values) if value == _MISSING]
            reason = f"is missing on rank {', '.join(lacking)}" if lacking else "is not the same on all ranks"
            differences.append(f"{path} {reason}")
    if differences:
        ranks.leave()
        more = f" and {len(differences) - _MAX_LISTED} more" if len(differences) > _MAX_LISTED else ""
        hint = ". With --yes a machine takes what it lacks" if any("missing" in text for text in differences) else ""
        raise DataError(f"the machines have different files: {'; '.join(differences[:_MAX_LISTED])}{more}{hint}")


def input_paths(arguments: Sequence[str]) -> list[str]:
    """List the values of the arguments that name input files or folders."""
    paths, is_input = [], False
    for word in arguments:
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            is_input = flag in _INPUT_OPTIONS
            if is_input and value:
                paths.append(value)
        elif is_input:
            paths.append(word)
    return paths


def train_files(options: str) -> list[str]:
    """Return the files of `TrainOptions` in JSON as a recipe's arguments, for `compare_files`."""
    given = TrainOptions.from_json(options)
    named = {"--model": given.model, "--tokenizer": given.tokenizer, "--adapter": given.adapter}
    named |= {"--eval-file": given.evaluate}
    one = [f"{flag}={value}" for flag, value in named.items() if value is not None]
    return ["--train-file", *map(str, given.data), *one]


def digest(path: Path) -> str:
    """Hash a file, or all files of a folder with their names; "missing" if the path does not exist."""
    if path.is_file():
        return hash_file(path)
    if not path.is_dir():
        return _MISSING
    files = sorted(p for p in path.rglob("*") if p.is_file())
    text = "".join(f"{file.relative_to(path)} {hash_file(file)}\n" for file in files)
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    preemption.end_with_exception()
    main(sys.argv[1:])
