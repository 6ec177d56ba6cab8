"""The run that a folder is of: --overwrite starts over, and a machine with files of another run sets them aside.

Each run has a number, higher than those of the runs before it in the folder. Each machine notes it in NOTE, so that a
machine that was away, or was a spare, brings back nothing of an earlier run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import secrets
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipecomp.buffers.admin import forget
from pipecomp.distributed import rendezvous
from pipecomp.distributed.collectives import gathered
from pipecomp.distributed.launch_env import COMMAND
from pipecomp.elastic import RECORDS
from pipecomp.errors import ConfigError, StoreError, WireError, writable
from pipecomp.recipes.plan_file import write_here
from pipecomp.recipes.resume import lock_folder
from pipecomp.report.recorder import CHECKPOINTS, PLAN
from pipecomp.trainer.checkpoints import list_checkpoints

NOTE = "run-number.json"
# Made by the rank that locks the folder, for several machines may share one. Note: the number of a file system or file
# does not tell, as each machine has its own for a shared folder; nor does what a file holds, of which a machine may see
# what it wrote itself.
_MARK = ".run-lock-"
_KINDS = (PLAN, RECORDS, CHECKPOINTS)  # what a run needs to go on


@dataclass(frozen=True)
class RunNote:
    """A machine's note of its last start.

    Attributes:
        run: Number of the run.
        commands: Names of the commands whose start this was, of all machines, which may share the folder.
    """

    run: int
    commands: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> RunNote | None:
        """Read a folder's note; None for a folder without a run."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            content = json.loads((folder / NOTE).read_text(encoding="utf-8"))
            return cls(int(content["run"]), tuple(map(str, content.get("commands", ()))))
        return cls(0) if (folder / PLAN).is_file() else None


def begin_run(folder: Path, store: Path, *, overwrite: bool, plan: Mapping[str, Any] | None = None) -> None:
    """Agree on the run of a folder with all other machines; every rank must call this.

    Restarts of a command go on with its run. The first start goes on with the newest run that a machine knows, which
    must not be newer than that of rank 0's machine; with `overwrite` it begins a new one: each machine removes the
    plan, checkpoints, records and cached activations that it has. A machine with files of another run sets them aside,
    and removes its cached activations.

    Args:
        folder: Folder of the run.
        store: Folder of cached activations.
        overwrite: Start over.
        plan: The plan of a run that starts over, if it is given: it may be that of the run before, and replaces it.

    Raises:
        ConfigError: On every rank, if a machine cannot write the folder, or has a newer run than rank 0's machine.
    """
    first_here, command = os.environ.get("LOCAL_RANK", "0") == "0", os.environ.get(COMMAND, "")
    own = RunNote.read(folder) if first_here else None
    begun = own is not None and bool(command) and command in own.commands
    answers = gathered([None if own is None else own.run, begun, time.time_ns() // 1_000_000, platform.node(), command])
    runs = [run for run, *_ in answers if run is not None]
    if not all(type(run) is int for run in runs):
        raise WireError(f"a rank names its run {runs}")
    newest, first = max(runs, default=None), answers[0][0]
    going_on = [run for run, of_command, *_ in answers if of_command]
    over = overwrite and not going_on
    if going_on:
        number = max(going_on)
    elif over or newest is None:
        number = max(answers[0][2], 1 + (newest or 0))
    elif first is not None and first < newest:
        host = next(name for run, _, _, name, _ in answers if run == newest)
        hint = f"{host} has a newer run in it than {answers[0][3]}: move it away there, start on {host}, or --overwrite"
        raise ConfigError("--out", str(folder), "a folder of one run on all machines", hint)
    else:
        number = newest
    with rendezvous.all_ranks().collective_errors(), writable("--out", folder):
        if first_here:
            folder.mkdir(parents=True, exist_ok=True)
            kinds: Sequence[str] = _KINDS
            if over and plan is not None:
                write_here(folder / PLAN, plan, dist.get_rank())
                kinds = [name for name in _KINDS if name != PLAN]
            if over or (own is not None and own.run != number and not begun):
                _clear(folder, store, kinds, remove=over)
            # Note: last, so that a machine that is lost before does the same again.
            commands = tuple(dict.fromkeys(str(name) for *_, name in answers))
            write_here(folder / NOTE, asdict(RunNote(number, commands)), dist.get_rank())


def lock_machines(folder: Path) -> None:
    """Lock a run's folder on every machine until the run ends; every rank must call this.

    Raises:
        ConfigError: On every rank, if a machine's folder cannot be made, or is in use by another run.
    """
    ranks, rank = rendezvous.all_ranks(), dist.get_rank()
    drawn = "".join(map(str, gathered(secrets.token_hex(8))))
    mark, made = folder / f"{_MARK}{hashlib.sha256(drawn.encode()).hexdigest()[:16]}", False
    try:
        for turn in (rank == 0, rank > 0 and os.environ.get("LOCAL_RANK", "0") == "0"):
            with ranks.collective_errors(), writable("--out", folder):
                if turn:
                    folder.mkdir(parents=True, exist_ok=True)
                    with contextlib.suppress(FileExistsError):  # one that shares the folder locks it
                        mark.touch(exist_ok=False)
                        made = True
                    if made:
                        lock_folder("--out", folder)
    finally:
        if made:
            with contextlib.suppress(OSError):
                mark.unlink()


def _clear(folder: Path, store: Path, kinds: Sequence[str], *, remove: bool) -> None:
    """Remove or set aside what a run that is not this one has left. kinds: Names in the folder."""
    aside, found = folder / f"earlier-{secrets.token_hex(4)}", False
    for path in (folder / name for name in kinds):
        if remove:
            _remove(path)
        elif path.exists():
            aside.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # a machine that shares the folder was first
                os.replace(path, aside / path.name)
                found = True
    for path in store.glob("rank-*"):
        if path.name.removeprefix("rank-").isdecimal():
            # In use, or gone, as when machines share the folder; opening it says so.
            with contextlib.suppress(StoreError, FileNotFoundError):
                forget(store, int(path.name.removeprefix("rank-")))
    if found:
        text = f"{folder} on {platform.node()} had files of another run, which are in {aside.name} now"
        print(f"rank {dist.get_rank()}: {text}. To remove them there: rm -r {shlex.quote(str(aside))}", flush=True)
    elif aside.is_dir():
        aside.rmdir()


def _remove(path: Path) -> None:
    """Remove a file or folder; of a link to a folder, what is in it.

    Machines that share the folder do so at the same time.
    """
    if path.is_symlink() and path.is_dir():
        for inner in path.iterdir():
            _remove(inner)
        return
    while os.path.lexists(path):
        with contextlib.suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def prune_checkpoints(checkpoints: Path, step: int, keep: int) -> None:
    """Delete this machine's oldest checkpoints, so that `keep` are left up to `step`; every rank may call this.

    A restart makes a checkpoint of all stages on every machine, and a machine that comes back has others than rank 0.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        earlier = [path for number, path in list_checkpoints(str(checkpoints)) if number < step]
        for path in earlier[: max(0, len(earlier) - keep + 1)]:
            shutil.rmtree(path, ignore_errors=True)
