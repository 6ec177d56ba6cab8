"""Machines that are left bring the newest complete state to each other, and make a checkpoint of it."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.distributed.rendezvous import join_processes
from pipecomp.elastic import recovery
from pipecomp.elastic.index import RecordFolder
from pipecomp.elastic.record import StateRecord
from pipecomp.elastic.recovery import find_lost_step, recover, share_checkpoint
from pipecomp.errors import PipecompError
from tests.elastic.test_records import contents, info
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
        if (machine / "checkpoint-7").exists():
            share_checkpoint(machine / "checkpoint-7", 0, [1, 2])
        else:
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


def shared(rank: int, world: int, note: Any, machines: list[str]) -> None:
    join_processes()
    share_checkpoint(Path(machines[rank]) / "checkpoint-7", 1, [0, 2])
    dist.barrier()


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


def test_a_full_disk_ends_all_machines_that_get_a_checkpoint(tmp_path: Path) -> None:
    places = [tmp_path / name for name in "abc"]
    for place in places:
        (place / "checkpoint-7").mkdir(parents=True)
    for name in ("a.pt", "b.pt"):
        (places[0] / "checkpoint-7" / name).write_bytes(bytes(1000))
    found = run_ranks(3, recovered_with_little_room, [str(place) for place in places], 1, timeout_s=HANG_S)
    assert "cannot be written: File too large" in found[1]
    assert found[0].startswith("LinkError: rank 1 could not start: CheckpointError: ")
    assert found[2] == found[0]
    assert list(places[2].iterdir()) == [places[2] / "checkpoint-7"], "no part of it is left"


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


def test_the_checkpoint_of_a_single_machine_is_brought_to_others(tmp_path: Path) -> None:
    places = [tmp_path / name for name in "abc"]
    content = {"trainer_state.json": b"{}", "deepspeed/model.pt": os.urandom(5_000_000), "deepspeed/empty": b""}
    for name, data in content.items():
        path = places[1] / "checkpoint-7" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (places[2] / "checkpoint-7").mkdir(parents=True)
    (places[2] / "checkpoint-7" / "old").touch()
    run_ranks(3, shared, [str(place) for place in places], timeout_s=HANG_S)
    for place in places:
        found = {str(p.relative_to(place / "checkpoint-7")): p for p in place.rglob("*") if p.is_file()}
        assert {name: path.read_bytes() for name, path in found.items()} == content
        assert [path.name for path in place.iterdir()] == ["checkpoint-7"]
