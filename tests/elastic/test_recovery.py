"""Machines that are left bring the newest complete state to each other, and make a checkpoint of it."""

from __future__ import annotations

import json
import os
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipecomp.checkpoint import manifest
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.distributed.rendezvous import join_processes
from pipecomp.elastic import recovery
from pipecomp.elastic.index import RecordFolder, find_records
from pipecomp.elastic.record import SHARED, StateRecord
from pipecomp.elastic.recovery import find_lost_step, recover
from pipecomp.errors import PipecompError
from pipecomp.recipes import plan_file, restart
from pipecomp.report.recorder import CHECKPOINTS, PLAN
from pipecomp.trainer.checkpoints import DEEPSPEED
from tests.elastic.test_records import contents, equal, info
from tests.limits import HANG_S

pytestmark = pytest.mark.ranks


def wrote(machine: Path, own: int, steps: list[int], *, session: str = "ab", held: int | None = None) -> None:
    """Write what a machine of three has: its own rank's records, and those that it holds for the one before."""
    folder = RecordFolder(machine / "second-home" / f"rank-{own}")
    for step in steps:
        for rank in (own, (own - 1) % 3 if held is None else held):
            record = StateRecord.take(info(step, rank, session=session), contents(rank))
            record.write(folder.path)
            folder.add(record)


def recovered(rank: int, world: int, note: Any, machines: list[str], each: int = 1, after: int = -1) -> Any:
    os.environ["LOCAL_RANK"] = str(rank % each)
    join_processes()
    machine = Path(machines[rank // each])
    step = recover(machine / "second-home", machine / "checkpoints", after=after)
    dist.barrier()  # rank 0 serves the store
    return step


def recovered_with_little_room(rank: int, world: int, note: Any, machines: list[str], full: int) -> str:
    os.environ["LOCAL_RANK"] = "0"
    recovery._CHUNK_BYTES = 256  # several of each file
    join_processes()
    machine = Path(machines[rank])
    if rank == full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        recover(machine / "second-home", machine / "checkpoints")
    except PipecompError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def lost(rank: int, world: int, note: Any, machines: list[str], after: int) -> Any:
    os.environ["LOCAL_RANK"] = "0"
    join_processes()
    found = find_lost_step(Path(machines[rank]) / "second-home", after=after)
    dist.barrier()
    return found


def came_alone(rank: int, world: int, note: Any, places: list[str]) -> str:
    """Go on from what is in the folders, as `pipecomp train` does; returns the error."""
    os.environ["LOCAL_RANK"] = "0"
    join_processes()
    try:
        restart.go_on_without_lost(Path(places[rank]))
        dist.barrier()
    except PipecompError as error:
        return str(error)
    return ""


def listed_falsely(rank: int, world: int, note: Any, machines: list[str], values: dict[str, Any]) -> str:
    os.environ["LOCAL_RANK"] = "0"
    join_processes()
    machine = Path(machines[rank])
    if rank == 1:
        entries = [replace(entry, **values) for entry in find_records([machine / "second-home"])]
        recovery.find_records = lambda folders: entries
        recovery._good = lambda rows, known: rows
    try:
        recover(machine / "second-home", machine / "checkpoints")
    except PipecompError as error:
        return str(error)
    return ""


def files(machine: Path) -> dict[str, bytes]:
    found = (machine / "checkpoints").rglob("*.pt")
    return {str(path.relative_to(machine)): path.read_bytes() for path in found}


@pytest.fixture
def machines(tmp_path: Path) -> list[Path]:
    found = [tmp_path / name for name in "abc"]
    for rank, machine in enumerate(found):
        wrote(machine, rank, [2, 4])
    return found


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_without_one_of_three_machines(machines: list[Path], lost: int) -> None:
    left = [str(machine) for rank, machine in enumerate(machines) if rank != lost]
    assert run_ranks(2, recovered, left, timeout_s=HANG_S) == {0: 4, 1: 4}
    first, second = (files(Path(machine)) for machine in left)
    assert first == second
    assert len(first) == 6


def test_a_spare_machine_gets_everything(machines: list[Path], tmp_path: Path) -> None:
    spare = tmp_path / "spare"
    places = [str(machines[0]), str(spare), str(machines[2])]
    assert run_ranks(3, recovered, places, timeout_s=HANG_S) == dict.fromkeys(range(3), 4)
    assert files(spare) == files(machines[0]) != {}
    shutil.rmtree(spare / "checkpoints")
    shutil.rmtree(machines[0])
    shutil.rmtree(machines[2])
    assert run_ranks(1, recovered, [str(spare)], timeout_s=HANG_S) == {0: 4}, "it can be the only one that is left"


def test_a_full_disk_ends_all_machines(machines: list[Path], tmp_path: Path) -> None:
    """The others would wait for the machine that cannot write."""
    places = [str(machines[0]), str(tmp_path / "spare"), str(machines[2])]
    found = run_ranks(3, recovered_with_little_room, places, 1, timeout_s=HANG_S)
    assert found[1].startswith(f"CheckpointError: {tmp_path}/spare/second-home/received/step-4-rank-0.safetensors")
    assert "cannot be written: File too large" in found[1]
    for rank in (0, 2):
        assert found[rank].startswith("LinkError: rank 1 could not start: CheckpointError: ")


def test_two_ranks_on_each_machine_write_once(machines: list[Path]) -> None:
    left = [str(machine) for machine in machines[:2]]
    assert run_ranks(4, recovered, left, 2, timeout_s=HANG_S) == dict.fromkeys(range(4), 4)


def test_a_step_that_is_not_complete_is_passed_over(machines: list[Path]) -> None:
    wrote(machines[0], 0, [6])
    wrote(machines[1], 1, [6])  # the record of rank 2 is on machine a; machine c did not get as far
    (machines[0] / "second-home" / "rank-0" / "step-6-rank-2.safetensors").unlink()
    assert run_ranks(2, recovered, [str(machine) for machine in machines[:2]], timeout_s=HANG_S) == {0: 4, 1: 4}


def test_records_of_different_sessions_do_not_belong_together(machines: list[Path]) -> None:
    wrote(machines[0], 0, [8], session="cd")
    wrote(machines[1], 1, [8], session="ef")
    assert run_ranks(2, recovered, [str(machine) for machine in machines[:2]], timeout_s=HANG_S) == {0: 4, 1: 4}


def test_a_damaged_record_is_taken_from_the_other_machine(machines: list[Path]) -> None:
    path = machines[0] / "second-home" / "rank-0" / "step-4-rank-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert run_ranks(2, recovered, [str(machine) for machine in machines[:2]], timeout_s=HANG_S) == {0: 4, 1: 4}
    assert files(machines[0]) == files(machines[1])


def test_nothing_newer_or_too_little_left(machines: list[Path]) -> None:
    two = [str(machine) for machine in machines[:2]]
    assert run_ranks(2, recovered, two, 1, 4, timeout_s=HANG_S) == {0: None, 1: None}
    assert run_ranks(1, recovered, two[:1], timeout_s=HANG_S) == {0: None}
    assert not (machines[0] / "checkpoints").exists()


def test_a_state_that_went_with_two_machines_is_named(machines: list[Path]) -> None:
    """Rank 1's record was on its own machine and on the third one; both are gone."""
    for rank, machine in enumerate(machines):
        folder = RecordFolder(machine / "second-home" / f"rank-{rank}")
        folder.complete = [2, 4]
        folder.bind(4, str(machine / "checkpoint-4"))
    assert run_ranks(1, lost, [str(machines[0])], 0, timeout_s=HANG_S) == {0: (4, [1])}
    assert run_ranks(1, lost, [str(machines[0])], 4, timeout_s=HANG_S) == {0: None}, "the run goes on from there"
    both = [str(machine) for machine in machines[1:]]
    assert run_ranks(2, lost, both, 0, timeout_s=HANG_S) == dict.fromkeys(range(2), None), "nothing is missing"


def test_a_state_that_was_never_complete_is_not_missed(machines: list[Path]) -> None:
    """A machine was lost before its first record had arrived."""
    assert run_ranks(1, lost, [str(machines[0])], -1, timeout_s=HANG_S) == {0: None}


class Foreign:
    """An object of a class that no record has."""


def wrote_alone(place: Path, **more: Any) -> dict[str, Any]:
    """Write what a run of one rank leaves: its plan and a checkpoint. Returns the contents of the files that count."""
    place.mkdir(exist_ok=True)
    (place / PLAN).write_text(json.dumps({"config": {}, "cuts": [0, 4], "chosen": {}, plan_file.RECUT: True}))
    states = contents(0)
    shared = states.pop(SHARED)
    states["mp_rank_00_model_states.pt"] |= {**shared, **more}
    checkpoint = place / CHECKPOINTS / "checkpoint-7"
    (checkpoint / DEEPSPEED / "pipecomp-messages-rank-0").mkdir(parents=True)
    (checkpoint / DEEPSPEED / "pipecomp-messages-rank-0" / "data.mdb").touch()
    for name, content in states.items():
        torch.save(content, checkpoint / DEEPSPEED / name)
    (checkpoint / "trainer_state.json").write_text("{}")
    torch.save({"random": torch.arange(3)}, checkpoint / "rank_state_0.pth")
    manifest.write(checkpoint / DEEPSPEED, 0)
    inside = {f"{DEEPSPEED}/{name}": content for name, content in states.items()}
    return {**inside, "rank_state_0.pth": {"random": torch.arange(3)}}


def test_the_checkpoint_of_a_single_machine_is_brought_to_others(tmp_path: Path) -> None:
    places = [tmp_path / name for name in "abc"]
    content = wrote_alone(places[1])
    before = {path: path.stat().st_mtime_ns for path in (places[1] / CHECKPOINTS).rglob("*")}
    assert set(run_ranks(3, came_alone, list(map(str, places)), timeout_s=HANG_S).values()) == {""}
    for place in places:
        checkpoint = place / CHECKPOINTS / "checkpoint-7"
        assert (checkpoint / "trainer_state.json").read_text() == "{}"
        assert manifest.problem(checkpoint / DEEPSPEED) is None
        for name, values in content.items():
            assert equal(torch.load(checkpoint / name, weights_only=False), values)
    assert before == {path: path.stat().st_mtime_ns for path in (places[1] / CHECKPOINTS).rglob("*")}


def test_pickles_of_a_single_machine_stay_there(tmp_path: Path) -> None:
    """Loading them would run code of that machine on all."""
    places = [tmp_path / name for name in "ab"]
    wrote_alone(places[1], foreign=Foreign())
    found = run_ranks(2, came_alone, list(map(str, places)), timeout_s=HANG_S)
    assert f"{places[1]}/{CHECKPOINTS}/checkpoint-7 cannot be brought to other machines: a record has plain" in found[1]
    assert "rank 1 could not start" in found[0]
    assert not places[0].exists()


@pytest.mark.parametrize(
    "values",
    [{"rank": "0/../../../x"}, {"size": -1}, {"size": "1"}, {"session": "../x"}, {"step": 10**20}, {"world": 0}],
)
def test_a_row_that_no_record_can_have_is_refused(machines: list[Path], tmp_path: Path, values: dict[str, Any]) -> None:
    places = [str(tmp_path / "spare"), str(machines[1])]
    found = run_ranks(2, listed_falsely, places, values, timeout_s=HANG_S)
    assert found[0].startswith("rank 1 lists a record (")
    assert found[1] == found[0]


def test_records_without_room_are_not_sent(machines: list[Path], tmp_path: Path) -> None:
    places = [str(tmp_path / "spare"), str(machines[1]), str(machines[2])]
    found = run_ranks(3, listed_falsely, places, {"size": 1 << 60}, timeout_s=HANG_S)
    assert f"{tmp_path}/spare/second-home cannot be written: " in found[0]
    assert "the records of other machines take" in found[0]
    assert "could not start" in found[1]
    assert not list((tmp_path / "spare").rglob("*.part"))
