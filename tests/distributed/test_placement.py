"""Numbers of ranks, of ranks on a machine, and of stages, by launchers' variables."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pipecomp.distributed import placement, rendezvous
from pipecomp.distributed.launch_env import Launch, read_launch
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.distributed.placement import machine
from pipecomp.distributed.rendezvous import check_processes, join_processes, ranks_here
from pipecomp.errors import ConfigError
from pipecomp.utils import cgroups
from tests.limits import HANG_S


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({}, None),
        ({"LOCAL_WORLD_SIZE": "3"}, 3),
        ({"LOCAL_SIZE": "2"}, 2),
        ({"LOCAL_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}, 2),  # the second by accelerate, for use_cpu
    ],
)
def test_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch, said: dict[str, str], found: int | None) -> None:
    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert ranks_here() == found


class Ranks:
    """The ranks of a run. others: what those say that are not this process."""

    def __init__(self, *others: Any) -> None:
        self._others = others

    def all_gather_object(self, value: Any) -> list[Any]:
        return [*self._others, value]


@pytest.mark.parametrize(
    ("gpu", "accelerator", "quota", "threads"),
    [
        (False, None, "max 100000", [4]),
        (False, None, "600000 100000", [3]),  # docker run --cpus 6, a pod's limit
        (True, None, "max 100000", []),
        (True, "cpu", "max 100000", [4]),
        (True, "cuda", "max 100000", []),
    ],
)
def test_those_that_compute_on_the_cpu_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpu: bool, accelerator: str | None, quota: str, threads: list[int]
) -> None:
    """Also where there is a GPU that DeepSpeed was told not to take."""
    (tmp_path / "cpu.max").write_text(quota)
    (tmp_path / "of_process").write_text("0::/\n")
    monkeypatch.setattr(cgroups, "_TOP", tmp_path)
    monkeypatch.setattr(cgroups, "_OF_PROCESS", tmp_path / "of_process")
    set_to: list[int] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr("torch.set_num_threads", set_to.append)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr(rendezvous, "join_processes", lambda config: None)
    monkeypatch.setattr(rendezvous, "all_ranks", lambda: Ranks([machine(), list(range(8))]))
    monkeypatch.setattr(placement, "own_cores", lambda: list(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("DS_ACCELERATOR", accelerator or "")
    if accelerator is None:
        monkeypatch.delenv("DS_ACCELERATOR")
    rendezvous.start_processes()
    assert set_to == threads


@pytest.mark.parametrize(
    ("others", "found"),
    [
        ([[0, 1, 2, 3]], 2),  # torchrun, deepspeed: all cores for all
        ([[4, 5, 6, 7]], 1),  # srun, mpirun: cores of its own for each
        ([[4, 5], [3, 4], [0, 1, 2, 3]], 3),
    ],
)
def test_ranks_share_the_cores_that_both_may_use(
    monkeypatch: pytest.MonkeyPatch, others: list[list[int]], found: int
) -> None:
    monkeypatch.setattr(placement, "own_cores", lambda: [0, 1, 2, 3])
    ranks: Any = Ranks(*([machine(), cores] for cores in others), ["another machine", [0, 1, 2, 3]])
    assert placement.ranks_on_cores(ranks) == found


def test_processes_of_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    check_processes("num_stages", 2)
    with pytest.raises(ConfigError, match=r"num_stages: got 3, allowed: a divisor of the 4 processes of this run"):
        check_processes("num_stages", 3)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    check_processes("num_stages", 1)
    with pytest.raises(ConfigError, match=r"--stages: got 2, .* start one process for .* --nproc-per-node 2"):
        check_processes("--stages", 2)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"RANK": "0"}, r"WORLD_SIZE: got None, allowed: a number: a launcher sets both"),
        ({"RANK": "first", "WORLD_SIZE": "2"}, r"RANK: got 'first', allowed: a whole number from 0"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"RANK: got 2, allowed: 0 to 1"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, r"RANK: got None, .* srun has started this 4 times, .* RANK=\$SLURM_PROCID "),
        (
            {"OMPI_COMM_WORLD_SIZE": "2"},
            r"RANK: got None, .* mpirun has started this 2 times, .*COMM_WORLD_LOCAL_SIZE;",
        ),
        (
            {"MV2_COMM_WORLD_SIZE": "2"},
            r"RANK: got None, .* mpirun has started this 2 times, .* RANK=\$MV2_COMM_WORLD_RANK ",
        ),
        ({"PMI_SIZE": "2"}, r"RANK: got None, .* mpirun has started this 2 times, .* RANK=\$PMI_RANK "),
    ],
)
def test_what_no_launcher_says(monkeypatch: pytest.MonkeyPatch, said: dict[str, str], message: str) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "0")
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("pipecomp.distributed.rendezvous.watch_launcher", lambda: None)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=message):
        join_processes()


@pytest.mark.parametrize(
    "said",
    [
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # a batch script, outside of srun
        {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PTY_PORT": "40001"},  # a person's shell, with tasks for cores
        {"SLURM_STEP_NUM_TASKS": "1", "OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1"},
    ],
)
def test_a_process_that_is_alone(said: dict[str, str]) -> None:
    assert read_launch(said) == Launch()


def test_a_task_of_srun_with_a_rank_is_that_rank() -> None:
    found = read_launch({"SLURM_STEP_NUM_TASKS": "2", "RANK": "1", "WORLD_SIZE": "2"})
    assert found.place == (1, 2)


def unnumbered(rank: int, world: int, note: Any) -> list[str]:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    rendezvous.machine = lambda: "one" if rank == 1 else "two"
    rendezvous.is_loopback = lambda address: False
    join_processes()
    dist.barrier()
    dist.destroy_process_group()
    return [os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]]


@pytest.mark.ranks
def test_each_machine_has_a_first_rank_where_nobody_says_which() -> None:
    found = run_ranks(3, unnumbered, timeout_s=HANG_S)
    assert found == {0: ["0", "2"], 1: ["0", "1"], 2: ["1", "2"]}
