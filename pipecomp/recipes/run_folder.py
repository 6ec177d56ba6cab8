"""The run that a folder is of: --overwrite starts over, and a machine with files of another run sets them aside.

Each run has a number, higher than those of the runs before it in the folder. Each machine notes it in NOTE, so that a
machine that was away, or was a spare, brings back nothing of an earlier run.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from pipecomp.buffers.admin import forget
from pipecomp.distributed import rendezvous
from pipecomp.distributed.collectives import gathered
from pipecomp.distributed.launch_env import COMMAND, STARTS
from pipecomp.elastic import RECORDS
from pipecomp.errors import StoreError, WireError, writable
from pipecomp.recipes.plan_file import write_here
from pipecomp.report.recorder import CHECKPOINTS, PLAN
from pipecomp.trainer.checkpoints import list_checkpoints

NOTE = "run-number.json"
_KINDS = (PLAN, STARTS, RECORDS, CHECKPOINTS)  # what a run needs to go on


@dataclass(frozen=True)
class RunNote:
    """What a machine has noted of the last start.

    Attributes:
        run: Number of the run.
        command: Name of the command whose start this was.
    """

    run: int
    command: str = ""

    @classmethod
    def read(cls, folder: Path) -> RunNote | None:
        """Read a folder's note; None for a folder without a run."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            content = json.loads((folder / NOTE).read_text(encoding="utf-8"))
            return cls(int(content["run"]), str(content["command"]))
        return cls(0) if (folder / PLAN).is_file() else None


def begin_run(folder: Path, store: Path, *, overwrite: bool) -> None:
    """Agree on the run of a folder with all other machines; every rank must call this.

    The newest run that a machine knows goes on. With `overwrite` the first start of a command begins a new one: each
    machine removes the plan, checkpoints, records and cached activations that it has. Later starts of the command go on
    with the new run, also those before the removal has reached all machines. A machine with files of another run sets
    them aside.

    Args:
        folder: Of the run.
        store: Folder of cached activations.
        overwrite: Start over.

    Raises:
        ConfigError: On every rank, if a machine cannot write the folder.
    """
    first_here, command = os.environ.get("LOCAL_RANK", "0") == "0", os.environ.get(COMMAND, "")
    own = RunNote.read(folder) if first_here else None
    begun = own is not None and bool(command) and own.command == command
    answers = gathered([None if own is None else own.run, begun, time.time_ns() // 1_000_000])
    runs = [run for run, *_ in answers if run is not None]
    if not all(type(run) is int for run in runs):
        raise WireError(f"a rank names its run {runs}")
    newest = max(runs, default=None)
    over = overwrite and not any(begun for _, begun, _ in answers)
    number = newest if newest is not None and not over else max(answers[0][2], 1 + (newest or 0))
    with rendezvous.all_ranks().collective_errors(), writable("--out", folder):
        if first_here:
            folder.mkdir(parents=True, exist_ok=True)
            if over or (own is not None and own.run != number):
                _clear(folder, store, remove=overwrite)
            # Note: last, so that a machine that is lost before does the same again.
            write_here(folder / NOTE, asdict(RunNote(number, command)), dist.get_rank())


def _clear(folder: Path, store: Path, *, remove: bool) -> None:
    """Remove or set aside what a run that is not this one has left."""
    aside, found = folder / f"earlier-{secrets.token_hex(4)}", False
    for path in (folder / name for name in _KINDS):
        if remove:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        elif path.exists():
            aside.mkdir(exist_ok=True)
            os.replace(path, aside / path.name)
            found = True
    for path in store.glob("rank-*"):
        if path.name.removeprefix("rank-").isdecimal():
            with contextlib.suppress(StoreError):  # in use, as when machines share the folder; opening it says so
                forget(store, int(path.name.removeprefix("rank-")))
    if found:
        text = f"{folder} has files of another run, which are in {aside.name} now"
        print(f"rank {dist.get_rank()}: {text}", flush=True)


def prune_checkpoints(checkpoints: Path, step: int, keep: int) -> None:
    """Delete this machine's oldest checkpoints, so that `keep` are left up to `step`; every rank may call this.

    A restart makes a checkpoint of all stages on every machine, and a machine that comes back has others than rank 0.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        earlier = [path for number, path in list_checkpoints(str(checkpoints)) if number < step]
        for path in earlier[: max(0, len(earlier) - keep + 1)]:
            shutil.rmtree(path, ignore_errors=True)
