"""Restart of a run without its lost machines: the newest state that the machines of this start have together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipecomp.checkpoint.manifest import finished, problem
from pipecomp.checkpoint.reshard import saved_pipeline
from pipecomp.distributed import rendezvous
from pipecomp.distributed.collectives import gathered, while_others_wait
from pipecomp.distributed.launch_env import COMMAND, STARTS, check_progress, note_start, restarts
from pipecomp.distributed.preemption import say_here
from pipecomp.elastic import RECORDS
from pipecomp.elastic.assembly import record_checkpoint
from pipecomp.elastic.recovery import find_lost_step, recover
from pipecomp.engine.checkpointing import STATE_KEY, rank_file
from pipecomp.errors import ConfigError, require, writable
from pipecomp.recipes.plan_file import RECUT, find_plan, write_here
from pipecomp.recipes.resume import KEPT
from pipecomp.recipes.run_folder import prune_checkpoints
from pipecomp.report.recorder import CHECKPOINTS
from pipecomp.trainer.checkpoints import DEEPSPEED, STATE_FILE, folder_of, last_good, list_checkpoints, remove_after


def go_on_without_lost(folder: Path) -> None:
    """Make a checkpoint of the newest state that the machines of this start have together; every rank must call this.

    Raises:
        ConfigError: On every rank, if the newest complete state went with its machines, and there is no earlier one, or
            after MOST_STARTS starts without a newer state.
    """
    earlier, kept = find_plan(folder), -1
    if earlier is not None and len(earlier["cuts"]) - 1 == dist.get_world_size() and RECUT not in earlier:
        with contextlib.suppress(ConfigError):  # a machine that has taken another's place lacks its files
            saved, _ = last_good("--out", str(folder / CHECKPOINTS), None)
            # A machine may have come back as another rank, with the files of its former rank.
            if saved is not None and all(gathered(rank_file(Path(saved) / DEEPSPEED, dist.get_rank()).is_file())):
                kept = int(saved.rpartition("-")[2])
    elif earlier is not None and was_single(earlier) and dist.get_world_size() > 1:
        kept = record_single(folder)
    step = recover(folder / RECORDS, folder / CHECKPOINTS, after=kept)
    if step is not None:
        remove_after(str(folder / CHECKPOINTS), step, None)  # those have the files of the machines that are left only
    reached = max(kept, 0) if step is None else step
    lost = find_lost_step(folder / RECORDS, after=reached)
    if lost is None and step is None and kept < 0:
        lost = find_lost_checkpoint(folder / CHECKPOINTS)
    if lost is not None:
        check_not_lost(folder, lost, reached, (earlier or {}).get("machines", {}).get("names", []))
    prune_checkpoints(folder / CHECKPOINTS, reached, KEPT)
    if dist.get_rank() == 0 and restarts():
        say_here(f"restart {restarts()}: goes on after step {reached}")
    commands = gathered(os.environ.get(COMMAND, ""))
    with rendezvous.all_ranks().collective_errors(), writable("--out", folder):
        if os.environ.get("LOCAL_RANK", "0") == "0":
            folder.mkdir(parents=True, exist_ok=True)
            write_here(folder / STARTS, note_start(reached, commands), dist.get_rank())
        check_progress(reached)


def find_lost_checkpoint(checkpoints: Path) -> tuple[int, list[int]] | None:
    """Find the newest checkpoint if files of its ranks are on none of the machines; every rank must call this.

    Checkpoints that were not finished do not count. Returns its step, and the ranks whose files are missing.
    """
    found: dict[int, list[list[int]]] = {}  # by step: the checkpoint's ranks, and those whose files are here
    with rendezvous.all_ranks().collective_errors():
        for step, path in list_checkpoints(str(checkpoints)) if os.environ.get("LOCAL_RANK", "0") == "0" else ():
            if finished(path / DEEPSPEED):
                pipeline = saved_pipeline(path / DEEPSPEED, STATE_KEY)
                ranks = range(0 if pipeline is None else (len(pipeline.cuts) - 1) * pipeline.replicas)
                here = [rank for rank in ranks if rank_file(path / DEEPSPEED, rank).is_file()]
                found[step] = [list(ranks), here]
    machines = [{int(step): pair for step, pair in one} for one in gathered([*found.items()])]
    newest = max((step for one in machines for step in one), default=-1)
    pairs = [one[newest] for one in machines if newest in one]
    missing = {rank for ranks, _ in pairs for rank in ranks} - {rank for _, here in pairs for rank in here}
    return (newest, sorted(missing)) if missing else None


def was_single(made: Mapping[str, Any]) -> bool:
    """Return whether a plan is for a single rank."""
    return len(made["cuts"]) == 2 and made["chosen"].get("replicas", 1) == 1


def record_single(folder: Path) -> int:
    """Make a record of the newest whole checkpoint of a run that was on one machine, if a machine lacks it.

    Every rank must call this. Returns the step after which `recover` looks for records; -1 if there is no checkpoint.
    """
    first_here, checkpoints = os.environ.get("LOCAL_RANK", "0") == "0", folder / CHECKPOINTS

    def find_whole() -> list[int] | None:
        found = list_checkpoints(str(checkpoints)) if first_here else []
        whole = [step for step, path in found if (path / STATE_FILE).is_file() and problem(path / DEEPSPEED) is None]
        return whole if first_here else None

    by_rank = gathered(while_others_wait(find_whole))
    machines = [[rank, steps] for rank, steps in enumerate(by_rank) if steps is not None]
    newest = max((step for _, steps in machines for step in steps), default=-1)
    if newest < 0 or all(newest in steps for _, steps in machines):
        return newest
    holder = next(rank for rank, steps in machines if newest in steps)
    checkpoint = Path(folder_of(str(checkpoints), newest))
    make = partial(record_checkpoint, checkpoint, folder / RECORDS, step=newest, engine=DEEPSPEED)
    with rendezvous.all_ranks().collective_errors():
        while_others_wait(make if dist.get_rank() == holder else lambda: None)
    return newest - 1


def check_not_lost(folder: Path, lost: tuple[int, list[int]], reached: int, names: Sequence[str]) -> None:
    """Report that the newest complete state went with its machines.

    Args:
        folder: Folder of the run.
        lost: Its step, and the ranks whose records are missing.
        reached: The step from which the run can go on; 0 if there is none.
        names: The machine of each rank in the start that was lost, empty if unknown.

    Raises:
        ConfigError: On every rank, if there is no earlier state to go on from.
    """
    step, missing = lost
    listed = ", ".join(f"rank {rank}" + (f" on {names[rank]}" if rank < len(names) else "") for rank in missing)
    gone = f"the records of {listed} after step {step} are on none of these machines"
    hint = (
        "A record is on its own machine and, once it has arrived, on its second home. Bring one of them back, and "
        "start the same command again. --overwrite starts over"
    )
    with rendezvous.all_ranks().collective_errors():
        require(reached > 0, "--out", str(folder), f"a folder with a complete state: {gone}", hint)
    if dist.get_rank() == 0:
        say_here(f"{gone}: the run goes on from an earlier state, {step - reached} steps before")
