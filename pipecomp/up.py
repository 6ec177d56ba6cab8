"""One rank of `pipecomp up`: join, compare files, run doctor and plan, and then the training script in this process.

python -m pipecomp.up CHECKS SCRIPT ARGUMENTS…
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
    preemption.end_quietly()  # for the many seconds that the imports below take

import torch.distributed as dist
from rich.console import Console

from pipecomp.config import read_json_object
from pipecomp.config.checks import batch_sizes
from pipecomp.distributed.consistency import AllRanks
from pipecomp.distributed.rendezvous import all_ranks, start_processes
from pipecomp.distributed.up_launcher import Checks
from pipecomp.doctor.examination import examine
from pipecomp.doctor.finding import Finding, print_report
from pipecomp.errors import DataError, PipecompError
from pipecomp.netlab.software import throttle_to
from pipecomp.plan.command import run_plan
from pipecomp.plan.options import PlanOptions
from pipecomp.tls.process_group import current_mesh
from pipecomp.tls.routes import RELAYED
from pipecomp.utils.tables import replace_unprintable

_DOCTOR_S = 600.0


def main(words: Sequence[str]) -> None:
    """Run a rank. An error is one line on standard error, and exit status 1."""
    replace_unprintable()
    began = time.monotonic()
    checks, command = Checks(**json.loads(words[0])), list(words[1:])
    console = Console()

    def say(text: str) -> None:
        if dist.get_rank() == 0:
            console.print(f"{text} ({time.monotonic() - began:.0f} s)", highlight=False, soft_wrap=True, markup=False)

    try:
        start_processes(config=_config(command))
        say(f"up: {dist.get_world_size()} ranks are connected over {dist.get_backend()}{_relayed()}")
        compare_files(all_ranks(), command[1:])
        say("up: all ranks have the same files")
        if checks.doctor:
            problem = examine(lambda found: _show(console, found), store=Path("messages"), limit_s=_DOCTOR_S)
            say("up: the doctor has found a problem" if problem else "up: the doctor has found no problem")
            if problem and not checks.anyway:
                raise PipecompError("not trained, because of the doctor's problems; --anyway trains in spite of them")
        if checks.plan:
            ranks = all_ranks()
            with ranks.collective_errors():
                _plan(console, command)
            say("up: planned")
    except PipecompError as error:
        print(f"pipecomp up: rank {os.environ['RANK']}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    say("up: training begins")
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).resolve().parent))
    runpy.run_path(command[0], run_name="__main__")


def _relayed() -> str:
    """Pairs of ranks whose connection is relayed, for the output; every rank must call this."""
    mesh = current_mesh()
    mine = [] if mesh is None else [r for r, way in mesh.routes.items() if way == RELAYED and r > mesh.rank]
    found = all_ranks().all_gather_object(mine)
    pairs = [f"{rank} and {other}" for rank, others in enumerate(found) for other in sorted(others)]
    return f"; {RELAYED}: {', '.join(pairs)}" if pairs else ""


def _show(console: Console, found: list[Finding]) -> None:
    if found:
        print_report(found, console)


def _config(command: Sequence[str]) -> str | None:
    """Path of DeepSpeed's configuration among the script's arguments."""
    return _value(command, "--deepspeed_config") or _value(command, "--deepspeed-config")


def _plan(console: Console, command: Sequence[str]) -> None:
    """Measure, and predict a step with each method; every rank must call this."""
    model, path = _value(command, "--model"), _config(command)
    if model is None or path is None:
        if dist.get_rank() == 0:
            console.print("up: no plan, which needs --model and --deepspeed_config among the arguments", markup=False)
        return
    ranks = all_ranks()
    try:
        with ranks.collective_errors():
            config = read_json_object("--deepspeed_config", path)
            block, stages = _value(command, "--block-size"), _value(command, "--stages")
            dropout = _value(command, "--dropout")
            replicas = dist.get_world_size() // int(stages or dist.get_world_size())
            if "train_micro_batch_size_per_gpu" not in config:  # DeepSpeed makes it of the others
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
                measure=True,
                dropout=float(dropout) if dropout else None,
            )
        run_plan(console if dist.get_rank() == 0 else Console(quiet=True), options, throttle_to)
    except (PipecompError, OSError, ValueError) as error:  # the same on all ranks: they have the same files
        if dist.get_rank() == 0:
            console.print(f"up: no plan: {error}", markup=False, highlight=False)


def _value(command: Sequence[str], flag: str) -> str | None:
    """Value of an option, given as one or two words."""
    for place, word in enumerate(command):
        if word == flag and place + 1 < len(command):
            return command[place + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


# Options of recipes for input files; several values may follow one.
_READ = (
    *("--deepspeed_config", "--deepspeed-config", "--model", "--tokenizer"),
    *("--train-file", "--eval-file", "--start", "--adapter"),
)
_MOST_NAMED = 5
_MISSING = "missing"
_CHUNK = 16 << 20


def compare_files(ranks: AllRanks, arguments: Sequence[str]) -> None:
    """Compare the content of the input files on all ranks; every rank must call this.

    Args:
        ranks: The exchanges between the ranks.
        arguments: Arguments of a recipe. Values that are files on no rank, such as hub names, are ignored.

    Raises:
        DataError: On every rank, with the files and ranks, if a file differs or is missing.
    """
    names = named(arguments)
    told: list[dict[str, str]] = ranks.all_gather_object({name: digest(Path(name)) for name in names})
    wrong = []
    for name in sorted(set().union(*told)):
        found = [of.get(name, _MISSING) for of in told]
        if len(set(found)) > 1:
            lack = [str(rank) for rank, value in enumerate(found) if value == _MISSING]
            where = f"is missing on rank {', '.join(lack)}" if lack else "is not the same on all ranks"
            wrong.append(f"{name} {where}")
    if wrong:
        ranks.leave()
        more = f" and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        raise DataError(f"the machines have different files: {'; '.join(wrong[:_MOST_NAMED])}{more}")


def named(arguments: Sequence[str]) -> list[str]:
    """Return the values of options for input files."""
    found, reads = [], False
    for word in arguments:
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            reads = flag in _READ
            if reads and value:
                found.append(value)
        elif reads:
            found.append(word)
    return found


def digest(path: Path) -> str:
    """Hash a file, or the names and contents of a folder's files; "missing" without either."""
    if path.is_file():
        return _hash_file(path)
    if not path.is_dir():
        return _MISSING
    files = sorted(p for p in path.rglob("*") if p.is_file())
    text = "".join(f"{file.relative_to(path)} {_hash_file(file)}\n" for file in files)
    return hashlib.sha256(text.encode()).hexdigest()


def _hash_file(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_CHUNK):
            found.update(part)
    return found.hexdigest()


if __name__ == "__main__":
    preemption.end_with_exception()
    main(sys.argv[1:])
