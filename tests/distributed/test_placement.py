"""Numbers of ranks, of ranks on a machine, and of stages, by launchers' variables."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pipecomp.distributed import placement, rendezvous
from pipecomp.distributed.launch_env import Launch, compared_variables, read_launch
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


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The second of two ranks with 8 cores, whose process group exists. Returns the numbers of threads that are set."""
    set_to: list[int] = []
    (tmp_path / "of_process").write_text("0::/\n")
    monkeypatch.setattr(cgroups, "_TOP", tmp_path)
    monkeypatch.setattr(cgroups, "_OF_PROCESS", tmp_path / "of_process")
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    monkeypatch.setattr("torch.set_num_threads", set_to.append)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_group", Ranks)
    monkeypatch.setattr(rendezvous, "all_ranks", lambda: Ranks([machine(), list(range(8))]))
    monkeypatch.setattr(rendezvous, "_report_differences", lambda variables: None)
    monkeypatch.setattr(placement, "own_cores", lambda: list(range(8)))
    for name in ("OMP_NUM_THREADS", "MASTER_ADDR", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)
    return set_to


@pytest.mark.parametrize("join", [join_processes, rendezvous.start_processes])
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
    joined: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    join: Callable[[], None],
    gpu: bool,
    accelerator: str | None,
    quota: str,
    threads: list[int],
) -> None:
    """Also where there is a GPU that DeepSpeed was told not to take."""
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    if accelerator is not None:
        monkeypatch.setenv("DS_ACCELERATOR", accelerator)
    join()
    assert joined == threads


def test_a_number_of_threads_that_the_user_has_set_stays(joined: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    join_processes()
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    join_processes()
    assert joined == []


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


# -- the interface towards rank 0

LAN = placement.Interface("lan0", ("10.0.0.7", "2001:db8::7"), True, 1500, 1000)
VPN = placement.Interface("wg0", ("10.9.0.7",), True, 1420, 0)
LO = placement.Interface("lo", ("127.0.0.1", "::1"), True, 65536, 0)
SOURCES = {  # of connections to an address; None for no route
    "10.0.0.1": "10.0.0.7",
    "2001:db8::1": "2001:db8::7",
    "10.9.0.1": "10.9.0.7",
    "127.0.0.1": "127.0.0.1",
    "127.0.1.1": "127.0.0.1",
    "::1": "::1",
    "198.51.100.1": "10.0.0.7",
}
NAMES = {"first": "10.0.0.1", "debian": "127.0.1.1", "localhost": "127.0.0.1"}


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of three interfaces and a resolver."""

    def look_up(host: str, *rest: Any, **more: Any) -> list[Any]:
        address = NAMES.get(host, host)
        if address not in SOURCES:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0))]

    def source(host: str) -> str | None:
        return SOURCES.get(NAMES.get(host, host))

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    monkeypatch.setattr(placement, "address_towards", source)
    monkeypatch.setattr(placement, "list_interfaces", lambda: {i.name: i for i in (LO, LAN, VPN)})
    monkeypatch.setattr(placement, "_LOOKUP_S", 0.3)
    monkeypatch.setattr(placement, "_chosen", None)
    for name in ("GLOO_SOCKET_IFNAME", "LOCAL_SIZE"):
        monkeypatch.setenv(name, "")  # so that the test's end unsets what is set
        monkeypatch.delenv(name)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("master", "found"),
    [
        ("10.0.0.1", "lan0"),
        ("first", "lan0"),
        ("10.9.0.1", "wg0"),
        ("2001:db8::1", "lan0"),
        ("[2001:db8::1]", "lan0"),
        ("127.0.0.1", "lo"),
        ("localhost", "lo"),
        ("[::1]", "lo"),
        ("debian", "lan0"),  # rank 0's own name on its machine; others must reach it
    ],
)
def test_gloo_uses_the_interface_towards_rank_0(
    network: None, monkeypatch: pytest.MonkeyPatch, master: str, found: str
) -> None:
    monkeypatch.setenv("MASTER_ADDR", master)
    placement.prepare_network()
    assert os.environ["GLOO_SOCKET_IFNAME"] == found
    assert os.environ["MASTER_ADDR"] == master.strip("[]")
    assert read_launch(os.environ).master == master.strip("[]")


def test_a_name_that_is_loopback_is_enough_on_one_machine(network: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "debian")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    placement.prepare_network()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_an_interface_that_the_user_has_set_stays(network: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    placement.prepare_network()
    monkeypatch.setenv("MASTER_ADDR", "10.9.0.1")  # the next run of this process
    placement.prepare_network()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "wg0"
    assert placement.interface_of_user() is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lan0")
    placement.prepare_network()
    assert os.environ["GLOO_SOCKET_IFNAME"] == placement.interface_of_user() == "lan0"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_master_that_does_not_resolve_is_named(network: None, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setenv("MASTER_ADDR", "nobody")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ConfigError, match=r"MASTER_ADDR: got 'nobody', .*Name or service not known"):
        rendezvous.find_store(rank, 2, wait_s=1.0)


def test_a_master_that_appears_in_time_resolves(network: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "late")
    monkeypatch.setattr(placement, "_LOOKUP_S", 60.0)
    monkeypatch.setattr(placement, "_LOOK_AGAIN_S", 0.01)
    threading.Timer(0.1, NAMES.__setitem__, ("late", "10.0.0.1")).start()
    placement.prepare_network()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lan0"
    del NAMES["late"]


def test_name_servers_that_do_not_answer(network: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "slow")
    ended = threading.Event()
    monkeypatch.setattr("socket.getaddrinfo", lambda *rest, **more: ended.wait())
    with pytest.raises(ConfigError, match=r"MASTER_ADDR: got 'slow', .*no answer of the name servers"):
        placement.prepare_network()
    ended.set()


def test_a_master_over_tls_is_looked_up(network: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPECOMP_ADDRESS", "nobody:29400")
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    monkeypatch.setattr(rendezvous, "watch_launcher", lambda: None)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("PIPECOMP_KEYS", "keys")
    with pytest.raises(ConfigError, match="PIPECOMP_ADDRESS: got 'nobody'"):
        join_processes()


# -- environments


def test_compared_variables_carry_no_password() -> None:
    found = compared_variables(
        {
            "https_proxy": "http://me:secret@proxy:3128",
            "HTTP_PROXY": "me:secret@proxy",
            "OMP_NUM_THREADS": "4",
            "LD_LIBRARY_PATH": "/a/b:" * 100,
            "HOME": "/root",
        }
    )
    assert "secret" not in str(found)
    assert "proxy:3128" in found["https_proxy"]
    assert found["OMP_NUM_THREADS"] == "4"
    assert len(found["LD_LIBRARY_PATH"]) < 200
    assert set(found) == {"https_proxy", "HTTP_PROXY", "OMP_NUM_THREADS", "LD_LIBRARY_PATH"}


def with_variables(rank: int, world: int, note: Any, folder: str) -> None:
    os.environ.update({"OMP_NUM_THREADS": "1", "NVIDIA_TF32_OVERRIDE": str(rank), "PYTHONHASHSEED": "3"})
    with open(f"{folder}/{rank}", "w") as console:
        os.dup2(console.fileno(), 2)
    join_processes()
    join_processes()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.ranks
def test_variables_that_differ_are_named_once(tmp_path: Path) -> None:
    run_ranks(2, with_variables, str(tmp_path), timeout_s=HANG_S)
    said = [line for line in (tmp_path / "0").read_text().splitlines() if "variables differ" in line]
    assert len(said) == 1
    assert 'NVIDIA_TF32_OVERRIDE is "1" on rank 1, "0" on rank 0' in said[0]
    assert "PYTHONHASHSEED" not in said[0]
    assert "variables differ" not in (tmp_path / "1").read_text()
