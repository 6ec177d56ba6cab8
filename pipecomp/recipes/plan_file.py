"""A run's plan in its file: read, checked for a start that goes on or was given it, and written."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipecomp.config.checks import batch_sizes
from pipecomp.distributed import rendezvous
from pipecomp.distributed.collectives import gathered
from pipecomp.distributed.launch_env import restarts
from pipecomp.errors import ConfigError, require
from pipecomp.plan.options import AUTO
from pipecomp.rank_layout import STAGES_ACROSS
from pipecomp.report.recorder import PLAN
from pipecomp.utils.files import UNFINISHED, atomic_write

RECUT = "recut"  # in a plan: the checkpoints of this machine are of another cut


def read_plan(folder: Path) -> dict[str, Any] | None:
    """Read the plan of the run that resumes in a folder; None without one. Raises ConfigError if it cannot be read."""
    return read_plan_file(folder / PLAN, "--out", str(folder), f"a folder with its run's {PLAN}")


def read_plan_file(path: Path, option: str, given: str, allowed: str) -> dict[str, Any] | None:
    """Read a plan; None if there is no such file. Raises ConfigError for the option if it cannot be read."""
    try:
        made: dict[str, Any] = json.loads(path.read_text())
        return {**made, "config": dict(made["config"]), "cuts": list(made["cuts"]), "chosen": dict(made["chosen"])}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(option, given, f"{allowed} ({error})") from error


def find_plan(folder: Path) -> dict[str, Any] | None:
    """Return the first machine's plan, or one with a new cut; None if there is none. Every rank must call this."""
    with rendezvous.all_ranks().collective_errors():
        own = read_plan(folder) if os.environ.get("LOCAL_RANK", "0") == "0" else None
    plans = [made for made in gathered(own) if made is not None]
    return next((made for made in plans if RECUT in made), plans[0] if plans else None)


def read_given_plan(path: Path, stages: int, world: int, batch: int | None, samples: int) -> dict[str, Any] | None:
    """Read the plan that `--plan` names; None after a restart, if it is for other stages or the first machine lacks it.

    Raises:
        ConfigError: It cannot be read, or is for another number of stages, processes or samples per step.
    """
    allowed = f"the {PLAN} of a run, on the first machine"
    made = read_plan_file(path, "--plan", str(path), allowed)
    if restarts() and (made is None or len(made["cuts"]) - 1 != stages):
        return None
    if made is None:
        raise ConfigError("--plan", str(path), allowed)
    check_stages(made, stages, world, f"So many has {path}")
    planned = plan_batch(made, made["chosen"]["replicas"])
    require(batch in (None, planned), "--batch", batch, f"{planned}, as in {path}, or no --batch")
    require(planned <= samples, "--plan", str(path), f"a plan with at most {samples} samples per step, those of --data")
    return {key: value for key, value in made.items() if key not in ("machines", "start", RECUT)}


def check_plan(made: dict[str, Any] | None, folder: Path, stages: int | None, world: int) -> dict[str, Any]:
    """Return the plan of the run that resumes.

    Args:
        made: The plan, None if no machine has it.
        folder: Folder of the run.
        stages: Its number of stages in this start; None if it may differ from the plan's.
        world: Processes of this start.

    Raises:
        ConfigError: There is none, or it has another number of stages or processes.
    """
    if made is None:
        raise ConfigError("--out", str(folder), f"a folder with its run's {PLAN} on one of the machines")
    if stages is not None:
        hint = f"This run resumes the one in {folder}. To start over, give --overwrite or another folder"
        check_stages(made, stages, world, hint)
    return made


def check_stages(made: Mapping[str, Any], stages: int, world: int, hint: str) -> None:
    """Raise ConfigError unless a plan is for so many stages and processes."""
    K, replicas = len(made["cuts"]) - 1, made["chosen"]["replicas"]
    require(stages == K, "--stages", stages, str(K), hint)
    require(K * replicas == world, "number of processes", world, str(K * replicas), hint)


def plan_batch(made: Mapping[str, Any], replicas: int) -> int:
    """Return a plan's samples per step."""
    micro, accumulation = batch_sizes(made["config"], replicas)
    return micro * accumulation * replicas


def suits(made: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Return whether the machines of a start may keep a plan's cuts: a new cut is for its machines in their order."""
    return RECUT not in made or made["machines"]["names"] == list(names)


def with_layout(made: dict[str, Any], layout: str, replicas: int) -> dict[str, Any]:
    """Return a plan with the layout that the options name; "auto" keeps the plan's, as long as there are replicas."""
    section = dict(made["config"]["pipecomp"])
    planned = section.pop("layout", STAGES_ACROSS)
    chosen = layout if layout != AUTO else planned if replicas > 1 else STAGES_ACROSS
    if chosen != STAGES_ACROSS:
        section["layout"] = chosen
    return {**made, "config": {**made["config"], "pipecomp": section}}


def write_here(path: Path, content: Any, rank: int) -> None:
    """Write a JSON file. Ranks of several machines write at the same time, perhaps into one shared folder."""
    with atomic_write(path, part=path.with_name(f"{path.name}.{rank}{UNFINISHED}")) as part:
        part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
