"""Which run a folder is of, when a command starts over and when machines bring files of other runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pipecomp.distributed.launch_env import COMMAND
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.distributed.rendezvous import join_processes
from pipecomp.elastic import RECORDS
from pipecomp.recipes import run_folder
from pipecomp.recipes.run_folder import NOTE, RunNote, begin_run, lock_machines, prune_checkpoints
from pipecomp.report.recorder import CHECKPOINTS, PLAN
from tests.limits import HANG_S

pytestmark = pytest.mark.ranks


def began(
    rank: int, world: int, note: Any, places: list[str], command: str, overwrite: bool, plan: dict[str, Any] | None
) -> int:
    names = command.split(",")
    os.environ |= {"LOCAL_RANK": "0", COMMAND: names[rank % len(names)]}
    join_processes()
    folder = Path(places[rank])
    begin_run(folder, folder / "messages", overwrite=overwrite, plan=plan)
    dist.barrier()
    found = RunNote.read(folder)
    assert found is not None
    return found.run


def begin(places: list[Path], command: str, *, overwrite: bool = False, plan: dict[str, Any] | None = None) -> int:
    found = run_ranks(len(places), began, list(map(str, places)), command, overwrite, plan, timeout_s=HANG_S)
    assert len(set(found.values())) == 1
    return found[0]


def train(place: Path) -> None:
    """Leave files as a run does."""
    (place / PLAN).write_text("{}")
    for name in (CHECKPOINTS, RECORDS, "model", "messages/rank-0"):
        (place / name).mkdir(parents=True, exist_ok=True)
        (place / name / "file").write_text("earlier")


KEPT = {PLAN, CHECKPOINTS, RECORDS}


def left(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()}


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    return [tmp_path / name for name in "ab"]


def test_a_command_starts_over_once(places: list[Path]) -> None:
    """A loss while it plans must not bring the earlier run back, nor a later one remove the new run."""
    earlier = begin(places, "one")
    for place in places:
        train(place)
    assert begin(places, "one") == begin(places, "two") == earlier, "the run goes on"
    number = begin(places, "three", overwrite=True)
    assert number > earlier
    for place in places:
        assert left(place) == {NOTE, "model", "messages"}
        train(place)
    assert begin(places, "three", overwrite=True) == number, "a restart goes on"
    assert left(places[0]) == {NOTE, "model", "messages", *KEPT}


def test_machines_that_share_a_folder_start_over(places: list[Path]) -> None:
    """Each of them removes what is there."""
    begin(places[:1], "one")
    train(places[0])
    for number in range(500):
        (places[0] / CHECKPOINTS / str(number)).mkdir()
    begin(places[:1] * 3, "two", overwrite=True)
    assert left(places[0]) == {NOTE, "model", "messages"}


@pytest.mark.parametrize("command", ["one", "two"])
def test_a_machine_that_shared_its_folder_with_a_lost_one_goes_on(places: list[Path], command: str) -> None:
    """With `up`, the command of each machine has a name of its own."""
    number = begin(places[:1] * 2, "one,two", overwrite=True)
    train(places[0])
    assert begin(places[:1], command, overwrite=True) == number
    assert left(places[0]) > KEPT


def test_a_given_plan_is_not_removed(places: list[Path]) -> None:
    """It may be the plan of the run that is replaced; a restart before the new one is written reads it again."""
    begin(places, "one")
    for place in places:
        train(place)
    given = {"cuts": [0, 1, 2]}
    begin(places, "two", overwrite=True, plan=given)
    for place in places:
        assert left(place) == {NOTE, "model", "messages", PLAN}
        assert json.loads((place / PLAN).read_text()) == given


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_machine_brings_nothing_of_an_earlier_run(places: list[Path], overwrite: bool) -> None:
    """It was a spare, or was lost before its files were removed."""
    begin(places, "one")
    for place in places:
        train(place)
    number = begin(places[:1], "two", overwrite=True)
    train(places[0])
    assert begin(places, "two", overwrite=overwrite) == number
    assert left(places[0]) > KEPT
    assert not KEPT & left(places[1])
    (aside,) = places[1].glob("earlier-*")
    assert left(aside) == KEPT


def test_a_run_goes_on_without_the_newer_run_of_a_machine(places: list[Path]) -> None:
    number = begin(places[:1], "one")
    train(places[0])
    assert begin(places[1:], "other") > number
    train(places[1])
    with pytest.raises(Exception, match="has a newer run in it"):
        begin(places, "two")
    for place in places:
        assert left(place) == {NOTE, "model", "messages", *KEPT}, "nothing is lost"
    assert begin(places, "one") == number, "a restart is of its own run"
    assert left(places[0]) == {NOTE, "model", "messages", *KEPT}
    (aside,) = places[1].glob("earlier-*")
    assert left(aside) == KEPT


def locked(rank: int, world: int, note: Any, places: list[str], other: str) -> str:
    """Lock the folders; returns what another run on the first rank's machine is told of `other`."""
    os.environ["LOCAL_RANK"] = "0"
    join_processes()
    lock_machines(Path(places[rank]))
    told = ""
    if rank == 0:
        code = f"from pipecomp.recipes.resume import lock_folder; lock_folder('--out', {other!r})"
        told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr
    dist.barrier()
    return told


@pytest.mark.parametrize("names", ["aaab", "abb", "aba"])
def test_machines_may_share_a_folder(tmp_path: Path, names: str) -> None:
    folders = [str(tmp_path / name) for name in names]
    for other in sorted(set(folders)):
        assert "in use by another run" in run_ranks(len(names), locked, folders, other, timeout_s=HANG_S)[0]
        assert not list(Path(other).iterdir())


def test_a_store_that_another_machine_removes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(store: Path, rank: int) -> None:
        raise FileNotFoundError(store / f"rank-{rank}")

    monkeypatch.setattr(run_folder, "forget", forget)
    (tmp_path / "messages" / "rank-0").mkdir(parents=True)
    run_folder._clear(tmp_path, tmp_path / "messages", (), remove=True)


def test_a_linked_folder_is_emptied(places: list[Path], tmp_path: Path) -> None:
    begin(places[:1], "one")
    train(places[0])
    (places[0] / CHECKPOINTS).rename(tmp_path / "elsewhere")
    (places[0] / CHECKPOINTS).symlink_to(tmp_path / "elsewhere")
    begin(places[:1], "two", overwrite=True)
    assert left(tmp_path / "elsewhere") == set()
    assert left(places[0]) == {NOTE, "model", "messages", CHECKPOINTS}


def test_a_new_machine_joins_the_run(places: list[Path]) -> None:
    number = begin(places[1:], "one")
    train(places[1])
    assert begin(places, "two") == number
    assert left(places[1]) == {NOTE, "model", "messages", *KEPT}
    assert [RunNote.read(place) for place in places] == [RunNote(number, ("two",))] * 2


def test_restarts_leave_few_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 deletes those that it has; this machine has others."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    for step in (5, 10, 20, 30, 40):
        (tmp_path / f"checkpoint-{step}").mkdir()
    prune_checkpoints(tmp_path, 30, 2)
    assert left(tmp_path) == {"checkpoint-20", "checkpoint-30", "checkpoint-40"}, "the run goes on from 30"
    prune_checkpoints(tmp_path, 0, 2)
    assert len(left(tmp_path)) == 3, "the run begins"
