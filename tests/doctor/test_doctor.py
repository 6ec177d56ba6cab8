"""The doctor: every check on a fact that passes and one that does not, the report, and the command as users run it."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from pipecomp.cli import app
from pipecomp.distributed import placement
from pipecomp.distributed.launch_env import Launch, read_launch
from pipecomp.distributed.placement import is_loopback
from pipecomp.doctor import examination, examine, machine, measure, packages, ranks, storage
from pipecomp.doctor.finding import OK, PROBLEM, WARNING, Finding, format_bytes, has_problem, print_report
from pipecomp.doctor.measure import LinkMeasurement
from pipecomp.doctor.ranks import RankIdentity, RankSession, RendezvousError, check_rendezvous
from pipecomp.errors import ConfigError
from pipecomp.kernels.dispatch import BackendStatus
from pipecomp.netlab.software import VARIABLE as SOFTWARE_LAB
from pipecomp.netlab.software import ThrottleSettings
from pipecomp.utils import cgroups
from tests.limits import HANG_S

GIB, MIB = 2**30, 2**20
ALONE = Launch()
ONE_MACHINE = Launch(rank=0, world=2, local_rank=0, local_world=2, master="127.0.0.1")
TWO_MACHINES = Launch(rank=0, world=2, local_rank=0, local_world=1, master="10.0.0.1")


def expect(finding: Finding, verdict: str, *words: str) -> None:
    """The verdict, words in what was found or advised, and advice wherever something is wrong."""
    assert finding.verdict == verdict, finding
    for word in words:
        assert word in finding.found + " " + finding.advice, finding
    assert finding.advice or verdict == OK, finding


# -- packages

REQUIREMENTS = [
    "torch>=2.11",
    "deepspeed<0.20,>=0.19.8",
    "lmdb>=3.0",
    'tomli>=2; python_version < "3"',
    'triton>=3.5; sys_platform == "linux" and extra == "dev"',
    'pytest>=9; extra == "dev"',
]
GOOD = {"torch": "2.13.0+cpu", "deepspeed": "0.19.8", "lmdb": "3.0.0", "triton": "3.9.0"}


def versions(gpu: bool = False, **installed: str | None) -> dict[str, Finding]:
    there = {name: version for name, version in {**GOOD, **installed}.items() if version is not None}
    return {f.check: f for f in packages.check_versions(REQUIREMENTS, there, gpu=gpu)}


def test_versions_that_fit():
    findings = versions()
    assert list(findings) == ["torch", "deepspeed", "lmdb", "triton"]
    assert {f.verdict for f in findings.values()} == {OK}
    expect(versions(torch="2.14.0")["torch"], OK, "2.14.0", "tested with 2.13.0")
    expect(versions(torch="2.14.0.dev20261101")["torch"], OK)


def test_versions_that_do_not_fit():
    expect(versions(torch="2.10.1+cu128")["torch"], PROBLEM, "2.10.1+cu128", ">=2.11", "pip install 'torch>=2.11'")
    expect(versions(deepspeed="0.20.0")["deepspeed"], PROBLEM, "0.20.0", ">=0.19.8,<0.20")
    expect(versions(lmdb=None)["lmdb"], PROBLEM, "not installed", "pip install 'lmdb>=3.0'")
    assert versions(lmdb=None)["torch"].verdict == OK


def test_triton_matters_with_a_gpu_only():
    expect(versions(triton=None)["triton"], OK)
    expect(versions(triton=None, gpu=True)["triton"], WARNING, "not installed", "pip install 'triton>=3.5'")
    expect(versions(triton="3.1.0")["triton"], WARNING, "3.1.0")
    expect(versions(triton="3.1.0", gpu=True)["triton"], PROBLEM)


def test_packages_that_fit_each_other():
    fit = packages.check_conflicts({**GOOD, "torchvision": "0.28"}, {"torchvision": ["torch==2.13.0"]})
    expect(fit, OK)


def test_what_other_packages_ask_of_ours():
    required = {
        "torchvision": ["torch==2.12.0", "pillow>=99"],
        "quiet": ['torch==1.0; extra == "old"', "no requirement at all !"],
        "pipecomp": ["torch>=99"],
    }
    finding = packages.check_conflicts({**GOOD, "torchvision": "0.27.0", "quiet": "1", "pillow": "1"}, required)
    expect(finding, PROBLEM, "torchvision 0.27.0 needs torch ==2.12.0, installed is 2.13.0+cpu", "-U torchvision")
    assert "quiet" not in finding.found
    assert "pillow" not in finding.found
    given = {**GOOD, "numpy": "2.4.6", "numba": "0.60.0"}
    stranger = packages.check_conflicts(given, {"numba": ["numpy<2.1"]})
    expect(stranger, WARNING, "numba 0.60.0 needs numpy <2.1")  # nothing here imports it


def test_imports():
    assert packages.try_imports(["json", "lmdb"], gpu=False) == {}
    failed = packages.try_imports(["json", "pipecomp_no_such_module"], gpu=False)
    assert failed is not None
    expect(packages.check_imports(failed), PROBLEM, "import pipecomp_no_such_module fails", "ModuleNotFoundError")
    expect(packages.check_imports({}), OK)
    expect(packages.check_imports(None), WARNING, "took over")


def test_an_import_that_ends_python(tmp_path, monkeypatch):
    (tmp_path / "pipecomp_ends.py").write_text("import os\nos._exit(9)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    failed = packages.try_imports(["pipecomp_ends"], gpu=False)
    assert failed is not None
    expect(packages.check_imports(failed), PROBLEM, "status 9")


def test_a_source_folder_that_was_never_installed(monkeypatch):
    monkeypatch.setattr(packages, "_installed", lambda: (GOOD, {}))
    monkeypatch.setattr(packages, "try_imports", lambda modules, gpu: {})
    first, *_ = packages.package_findings(gpu=False)
    assert first.check == "pipecomp"
    expect(first, WARNING, "not installed", "make setup")


def test_installed_packages_are_those_of_this_python():
    found, required = packages._installed()
    assert found["torch"].partition("+")[0] == torch.__version__.partition("+")[0]  # wheels may leave out "+cu132"
    assert any(r.startswith("torch") for r in required["deepspeed"])


# -- processor, threads, kernels, GPU


def test_processor():
    expect(machine.check_cpu(8, "AVX2", "x86_64"), OK, "8 cores", "AVX2")
    expect(machine.check_cpu(8, "DEFAULT", "x86_64"), WARNING, "without AVX2")
    expect(machine.check_cpu(8, "DEFAULT", "aarch64"), OK)


@pytest.mark.parametrize(
    ("cores", "local_ranks", "variable", "verdict", "words"),
    [
        (8, 2, "4", OK, ["OMP_NUM_THREADS=4", "2 ranks share 8 cores"]),
        (8, 2, "5", WARNING, ["more threads than cores", "export OMP_NUM_THREADS=4"]),
        (8, 2, "1", WARNING, ["6 of them idle", "export OMP_NUM_THREADS=4"]),
        (8, 2, "2", OK, ["2 ranks share 8 cores"]),  # one for each core that has two hyperthreads
        (8, 2, None, WARNING, ["not set", "export OMP_NUM_THREADS=4"]),
        (8, 1, None, OK, ["uses 8 cores"]),
        (8, None, None, OK, ["divided by R"]),
        (8, None, "1", OK, ["OMP_NUM_THREADS=1"]),
        (2, 3, "1", WARNING, ["take turns", "at most 2 ranks"]),
        (1, 2, None, WARNING, ["2 ranks share 1 core", "take turns", "at most 1 rank on"]),
        (8, None, "9", WARNING, ["more threads than cores"]),
        (8, 2, "many", WARNING, ["many", "not a number"]),
        (8, 2, "0", WARNING, ["not a number"]),
        (8, 2, "4,2", OK, ["OMP_NUM_THREADS=4"]),
    ],
)
def test_threads(cores, local_ranks, variable, verdict, words):
    expect(machine.check_threads(cores, local_ranks, variable, shared=False), verdict, *words)


def test_a_run_on_the_cpu_shares_out_the_cores_itself():
    expect(machine.check_threads(8, 2, None, shared=True), OK, "2 ranks share 8 cores: each computes with 4 threads")
    expect(machine.check_threads(2, 3, None, shared=True), WARNING, "take turns")


@given(cores=st.integers(1, 256), ranks=st.integers(1, 64))
def test_the_advised_threads_are_well(cores, ranks):
    finding = machine.check_threads(cores, ranks, None if ranks > 1 else str(cores + 1), shared=False)
    threads = finding.advice.removeprefix("export OMP_NUM_THREADS=")
    again = machine.check_threads(cores, ranks, threads, shared=False)
    assert again.verdict == OK or ranks > cores


def test_kernels():
    expect(machine.check_kernels(BackendStatus("cpu", "native", "avx2 code, 2 threads"), None), OK, "avx2")
    slow = BackendStatus("cpu", "torch", "native kernels are not built")
    expect(machine.check_kernels(slow, None), WARNING, "plain torch", "not built", "apt install g++", "kernels.build")
    expect(machine.check_kernels(slow, "/usr/bin/c++"), WARNING, "A compiler is here (/usr/bin/c++)", "kernels.build")
    expect(
        machine.check_kernels(BackendStatus("cuda", "torch", "triton is not installed"), None),
        WARNING,
        "install triton",
    )
    broken = BackendStatus("cuda", "torch", "triton kernels do not run here: RuntimeError: Failed to find C compiler.")
    expect(machine.check_kernels(broken, "/usr/bin/c++"), WARNING, "C compiler", "needs", "gcc", "python3-dev")


def test_kernels_without_a_compiler_as_the_machine_finds_it(monkeypatch):
    monkeypatch.setattr(
        machine.dispatch, "status", lambda: [BackendStatus("cpu", "torch", "native kernels are not built")]
    )
    monkeypatch.setattr(machine, "find_compiler", lambda: None)
    finding = next(f for f in machine.compute_findings(ALONE) if f.check == "kernels on cpu")
    expect(finding, WARNING, "apt install g++")


def gpu(number=0, free=70 * GIB):
    return machine.GpuStatus(number, "H200", 140 * GIB, free, (9, 0))


def test_gpus():
    (fine,) = machine.check_gpus([gpu(free=139 * GIB)], "12.8", None, True)
    expect(fine, OK, "H200", "140.0 GiB", "9.0", "12.8")
    (used,) = machine.check_gpus([gpu(free=69 * GIB)], "12.8", 1, True)
    expect(used, WARNING, "another process", "nvidia-smi")
    *_, shared = machine.check_gpus([gpu(0), gpu(1)], "12.8", 3, True)
    expect(shared, WARNING, "3 ranks for 2 GPUs", "gloo")
    expect(machine.check_gpus([], None, 2, False)[0], OK, "none")
    expect(machine.check_gpus([], None, 2, True)[0], WARNING, "CPU build")
    expect(machine.check_gpus([], "12.8", 2, True)[0], WARNING, "cannot use it", "nvidia-smi")


@pytest.mark.parametrize("ranks", [None, 2, 0])
def test_gpus_that_torch_sees_and_cannot_use(monkeypatch, ranks):
    """Two different GPUs: the first is full, the second too old for this torch. 0 ranks: DS_ACCELERATOR=cpu."""

    def memory(index):
        if index == 0:
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")
        return 2 * GIB, 2 * GIB

    def compute_there(*size, device):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    model = SimpleNamespace(name="GT 710", total_memory=2 * GIB, major=3, minor=5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: model)
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    monkeypatch.setattr(torch, "ones", compute_there)
    full, old = machine.check_gpus(machine.list_gpus(), "13.0", ranks, True)[:2]
    expect(full, PROBLEM if ranks != 0 else WARNING, "cannot compute on it: CUDA error: out of memory", "nvidia-smi")
    expect(old, PROBLEM if ranks == 2 else WARNING, "no kernel image", "torch for an older CUDA", "DS_ACCELERATOR=cpu")
    assert "reported later" not in full.found


def test_ranks_that_name_the_same_gpu():
    assert machine.check_shared_gpus([(0, "a"), (1, "b")]) == []
    (shared,) = machine.check_shared_gpus([(0, "a"), (1, "b"), (2, "a")])
    expect(shared, WARNING, "ranks 0, 2")


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "150000 100000"}, 2),
        ({"a.slice/b.service/cpu.max": "500000 100000", "a.slice/cpu.max": "300000 100000"}, 3),
        ({"a.slice/b.service/cpu.max": "200000 100000", "a.slice/cpu.max": "max 100000"}, 2),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "10000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
    ],
)
def test_cores_of_a_container(files, cores, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text + "\n")
    of_process = tmp_path / "of_process"
    of_process.write_text("2:cpu:/docker/0a1b\n0::/a.slice/b.service\n")
    monkeypatch.setattr(cgroups, "_TOP", tmp_path)
    monkeypatch.setattr(cgroups, "_OF_PROCESS", of_process)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert placement.usable_cores() == cores


# -- network

LO = machine.Interface("lo", ("127.0.0.1", "::1"), True, 65536, 0)
ETH = machine.Interface("eth0", ("10.0.0.7", "fe80::1"), True, 1500, 1000)
DOWN = machine.Interface("eth1", (), False, 1500, 0)
BOTH = {"lo": LO, "eth0": ETH, "eth1": DOWN}


def test_interfaces():
    expect(machine.check_interfaces(BOTH, TWO_MACHINES), OK, "eth0 10.0.0.7", "1000 Mbit/s")
    expect(machine.check_interfaces({"lo": LO}, TWO_MACHINES), WARNING, "no way to another machine")
    expect(machine.check_interfaces({"lo": LO}, ONE_MACHINE), OK)
    only_link_local = machine.Interface("eth0", ("fe80::1",), True, 1500, 0)
    expect(machine.check_interfaces({"lo": LO, "eth0": only_link_local}, TWO_MACHINES), WARNING)
    expect(machine.check_interfaces({"eth0": ETH._replace(up=False)}, TWO_MACHINES), WARNING)


def gloo(variable=None, address: str | None = "10.0.0.7", launch=TWO_MACHINES, interfaces=BOTH, towards=None):
    return machine.check_gloo(interfaces, variable, towards, machine.GlooDefault("box", address), launch)


def test_the_interface_that_gloo_takes():
    expect(gloo(), OK, "uses eth0: the host name box is 10.0.0.7")
    expect(gloo("eth0"), OK, "uses eth0 (10.0.0.7), set by GLOO_SOCKET_IFNAME")
    expect(gloo("lo,eth0"), OK, "lo (127.0.0.1), eth0 (10.0.0.7)")
    expect(gloo(address="127.0.1.1"), WARNING, "loopback", "Other machines cannot", "export GLOO_SOCKET_IFNAME=eth0")
    expect(gloo(address=None), WARNING, "box has no address")
    expect(gloo("lo"), WARNING, "Other machines cannot")
    expect(gloo(address="127.0.0.1", launch=ONE_MACHINE), OK, "Enough for ranks on this machine")
    assert gloo(address="127.0.0.1", launch=ONE_MACHINE).advice == ""
    expect(gloo(address="127.0.0.1", launch=ALONE), OK, "MASTER_ADDR")
    expect(gloo(address="127.0.1.1", towards="eth0"), OK, "uses eth0 (10.0.0.7)", "rank 0 at 10.0.0.1")
    expect(gloo(address="10.0.0.7", towards="lo"), WARNING, "uses lo", "Other machines cannot", "MASTER_ADDR")


@pytest.mark.parametrize("launch", [ALONE, ONE_MACHINE, TWO_MACHINES])
def test_an_interface_that_is_not_there(launch):
    expect(gloo("eth9", launch=launch), PROBLEM, "no such interface", "export GLOO_SOCKET_IFNAME=eth0")
    expect(gloo("eth1", launch=launch), PROBLEM, "down or has no address")


def test_where_ranks_meet_over_tls(monkeypatch):
    """MASTER_ADDR may be each machine's own there, as of torchrun's agents."""
    launch = TWO_MACHINES._replace(master="127.0.0.1")
    for keys, address, looked_at in ((None, "a:1", True), ("keys", None, True), ("keys", "a:1", False)):
        for name, value in (("PIPECOMP_KEYS", keys), ("PIPECOMP_ADDRESS", address)):
            monkeypatch.setenv(name, value or "")
        assert ("rank 0's address" in [f.check for f in machine.network_findings(launch)]) is looked_at


def test_meeting_point():
    expect(machine.check_master("10.0.0.1", "10.0.0.1", TWO_MACHINES), OK)
    expect(machine.check_master("boxx", None, TWO_MACHINES), PROBLEM, "MASTER_ADDR=boxx", "/etc/hosts")
    other = TWO_MACHINES._replace(rank=1)
    expect(machine.check_master("box", "127.0.1.1", other), WARNING, "127.0.1.1", "cannot reach")
    expect(machine.check_master("box", "127.0.1.1", TWO_MACHINES), OK)  # its own name
    expect(machine.check_master("127.0.1.1", "127.0.1.1", TWO_MACHINES), WARNING, "cannot reach")
    expect(machine.check_master("localhost", "127.0.0.1", ONE_MACHINE), OK)


def test_gloos_own_choice(monkeypatch):
    """Addresses of the host name that are not this machine's are passed over; 203.0.113.0/24 is nobody's."""
    answers = [(2, 1, 6, "", ("203.0.113.7", 0)), (2, 1, 6, "", ("127.0.0.5", 0))]
    monkeypatch.setattr(machine.socket, "gethostname", lambda: "box")
    monkeypatch.setattr(machine.socket, "getaddrinfo", lambda *a, **k: answers)
    assert machine.default_choice() == ("box", "127.0.0.5")
    monkeypatch.setattr(machine.socket, "getaddrinfo", lambda *a, **k: answers[:1])
    assert machine.default_choice() == ("box", None)

    def unknown(*a, **k):
        raise machine.socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(machine.socket, "getaddrinfo", unknown)
    assert machine.default_choice() == ("box", None)
    assert machine.resolve("box") is None


def test_interfaces_of_this_machine():
    assert any("127.0.0.1" in i.addresses and i.up for i in machine.list_interfaces().values())


def test_loopback_addresses():
    assert all(is_loopback(a) for a in ("127.0.0.1", "127.0.1.1", "::1", "localhost"))
    assert not any(is_loopback(a) for a in ("10.0.0.1", "fe80::1%eth0", "box"))


# -- launcher


def test_what_launchers_set():
    assert read_launch({}) == ALONE
    assert not ALONE.started
    assert ALONE.several_machines is None
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
    assert read_launch(torchrun) == Launch(3, 4, 1, 2, "a")
    assert read_launch(torchrun).several_machines is True
    deepspeed = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "MASTER_ADDR": "a"}
    assert read_launch(deepspeed).several_machines is False
    assert read_launch({"RANK": "0", "WORLD_SIZE": "2"}).several_machines is None
    assert read_launch({"RANK": "0", "WORLD_SIZE": "1"}).several_machines is False
    assert not read_launch({"RANK": "0", "WORLD_SIZE": "1"}).started


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0"},
        {"WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "0"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"LOCAL_WORLD_SIZE": ""},
    ],
)
def test_variables_that_cannot_be(environ, monkeypatch, tmp_path):
    with pytest.raises(ConfigError):
        read_launch(environ)
    monkeypatch.setattr(examination, "machine_findings", lambda launch, *more: [Finding("all", OK, "well")])
    told = []
    assert examine(told.extend, store=tmp_path, environ=environ)
    expect(told[0], PROBLEM, next(iter(environ)) if len(environ) == 1 and "LOCAL" in str(environ) else "")
    assert told[0].check == "launcher"


@pytest.mark.parametrize(("rate", "what"), [(10**6, "rates and delays"), (None, "simulates delays")])
def test_links_that_are_slow_for_training_alone(rate, what):
    lab = ThrottleSettings(
        state="file", node=0, procs_per_node=1, up=[rate] * 2, down=[rate] * 2, delay_s=0.01, jitter_s=0.0
    )
    (finding,) = examination.check_software_lab({SOFTWARE_LAB: lab.text()})
    expect(finding, WARNING, what)
    assert examination.check_software_lab({}) == []


# -- disk


def test_space():
    expect(storage.check_space(Path("m"), 100 * GIB), OK, "100.0 GiB")
    expect(storage.check_space(Path("m"), GIB), WARNING, "may not fit", "store.max_bytes")
    expect(storage.check_space(Path("m"), 100 * MIB), PROBLEM, "100 MiB", "does not fit")


def test_a_full_disk_is_not_written(monkeypatch, tmp_path):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: usage(GIB, GIB, 0))
    monkeypatch.setattr(storage, "measure_disk", lambda folder: pytest.fail("wrote to a full disk"))
    assert has_problem(storage.storage_findings(tmp_path))


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "lustre", "tmpfs"])
def test_file_systems_to_avoid(kind):
    expect(storage.check_file_system(Path("m"), kind), WARNING, kind, "local disk")


def test_file_systems_that_are_fine():
    expect(storage.check_file_system(Path("m"), "ext4"), OK, "ext4")
    expect(storage.check_file_system(Path("m"), None), OK)


def test_which_file_system_a_folder_is_on(tmp_path):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    mounts = [("/", "ext4"), (str(tmp_path / "a"), "nfs4"), (str(tmp_path / "ab"), "cifs"), ("/proc", "proc")]
    assert storage.file_system(inner, mounts) == "nfs4"
    assert storage.file_system(tmp_path, mounts) == "ext4"
    assert storage.file_system(inner, [*mounts, (str(tmp_path / "a"), "xfs")]) == "xfs"  # mounted over the other
    assert storage.file_system(inner, []) is None


def test_speed(tmp_path):
    expect(storage.check_speed(storage.DiskSpeed(500e6, 900e6)), OK, "500 MB/s", "900 MB/s")
    expect(storage.check_speed(storage.DiskSpeed(5e6, 900e6)), WARNING, "5 MB/s", "store.bits 8")
    expect(storage.check_speed(storage.DiskSpeed(500e6, 9e6)), WARNING)
    measured = storage.measure_disk(tmp_path)
    assert min(measured) > 0
    assert list(tmp_path.iterdir()) == []


def test_lmdb_verdicts():
    expect(storage.check_lmdb(None), OK)
    expect(storage.check_lmdb("torn"), PROBLEM, "torn", "store.path")


def test_lmdb_works_here(tmp_path):
    assert storage.try_lmdb(tmp_path) is None


def test_a_folder_without_locks(tmp_path, monkeypatch):
    def refuse(*a):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(storage.fcntl, "flock", refuse)
    assert storage._lock(tmp_path) == "ENOLCK No locks available"


def test_a_folder_whose_locks_do_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(storage.fcntl, "flock", lambda *a: None)
    assert "two ranks could write" in str(storage._lock(tmp_path))
    assert "file locks do not work here: two processes" in str(storage.try_lmdb(tmp_path))


def test_a_store_that_forgets(tmp_path, monkeypatch):
    from pipecomp import buffers

    forgetful = buffers.MemoryEnvironment
    monkeypatch.setattr(buffers, "open_environment", lambda *a, **k: forgetful())
    assert storage.try_lmdb(tmp_path) == "a message store does not work here: the values read are not the values stored"


def test_a_store_that_cannot_be_opened(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "rank-0").write_text("a file where the store's folder belongs")
    assert "rank-0" in str(storage._store(tmp_path))


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    def refuse(*a, **k):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(storage.tempfile, "TemporaryDirectory", refuse)
    last = storage.storage_findings(tmp_path / "messages")[-1]
    expect(last, PROBLEM, str(tmp_path), "Permission denied", "chmod")


def test_a_file_where_the_store_belongs(tmp_path):
    (tmp_path / "messages").write_text("")
    (finding,) = storage.storage_findings(tmp_path / "messages")
    expect(finding, PROBLEM, "not a folder")


def test_the_disk_as_it_is(tmp_path):
    findings = storage.storage_findings(tmp_path / "not" / "yet" / "there")
    assert [f.check for f in findings] == ["disk space", "file system", "disk speed", "LMDB"]
    assert findings[-1].verdict == OK
    assert list(tmp_path.iterdir()) == []


# -- limits


def test_limits():
    expect(machine.check_open_files(1024), OK)
    expect(machine.check_open_files(None), OK, "no limit")
    expect(machine.check_open_files(256), WARNING, "256", "ulimit -n")
    expect(machine.check_address_space(None), OK)
    expect(machine.check_address_space(32 * GIB), WARNING, "32.0 GiB", "ulimit -v unlimited")
    expect(machine.check_address_space(4 * GIB), PROBLEM)
    expect(machine.check_shared_memory(64 * MIB), WARNING, "64 MiB", "--shm-size")
    expect(machine.check_shared_memory(GIB), OK)
    needed = machine.LoaderSize(workers=4, tokens=16 * 2048).shared_bytes(ranks=2)  # 2 x 4 x 2 batches of 768 KiB
    assert needed == 16 * 768 << 10
    expect(machine.check_shared_memory(64 * MIB, needed), OK, "12 MiB needed")
    expect(machine.check_shared_memory(8 * MIB, needed), PROBLEM, "12 MiB needed", "prefetch_factor")
    expect(machine.check_shared_memory(None), WARNING, "no /dev/shm", "mount")


def test_limits_are_this_process_s(monkeypatch):
    soft = {machine.resource.RLIMIT_NOFILE: 100, machine.resource.RLIMIT_AS: -1}
    monkeypatch.setattr(machine.resource, "getrlimit", lambda number: (soft[number], -1))
    files, space, _ = machine.limit_findings()
    assert (files.verdict, space.verdict) == (WARNING, OK)


# -- between ranks

A = RankIdentity(0, "anna", "machine-a", None, {"torch": "2.13.0", "pipecomp": "0.1.0"})
B = RankIdentity(1, "bert", "machine-b", None, {"torch": "2.13.0", "pipecomp": "0.1.0"})
FINE = LinkMeasurement(1e9, 0.9e9, 0.0004)


def test_a_pair():
    fine = ranks.check_pair(A, B, FINE)
    expect(fine, OK, "anna and bert", "1 Gbit/s from 0 to 1", "900 Mbit/s back", "0.4 ms there and back")
    expect(ranks.check_pair(A, A._replace(rank=1), FINE), OK, "both on anna")
    expect(ranks.check_pair(A, B, FINE._replace(back_bit_s=5e5)), WARNING, "500 kbit/s back", "1 MB takes 16 s")
    expect(ranks.check_pair(A, B, FINE._replace(back_bit_s=1e8)), WARNING, "one direction", "upload of bert")
    expect(ranks.check_pair(A, B, FINE._replace(out_bit_s=1e8)), WARNING, "one direction", "upload of anna")
    expect(ranks.check_pair(A, B, FINE._replace(round_trip_s=0.8)), WARNING, "800 ms", "gradient_accumulation_steps")
    lost = ranks.check_pair(A, B, "Timed out")
    expect(lost, PROBLEM, "Timed out", "GLOO_SOCKET_IFNAME", "all TCP ports")
    expect(ranks.check_pair(A, A._replace(rank=1), "Timed out"), PROBLEM, "GLOO_SOCKET_IFNAME=lo")
    expect(ranks.check_pair(A, B, None), WARNING, "not measured")


def test_versions_of_several_machines():
    expect(ranks.check_same_versions([A, B]), OK)
    other = B._replace(versions={"torch": "2.14.0", "pipecomp": "not installed"})
    finding = ranks.check_same_versions([A, other])
    expect(finding, WARNING, 'torch is "2.14.0" on rank 1, "2.13.0" on rank 0', '"not installed" on rank 1')


def test_connections():
    expect(ranks.check_joined({}, [A, B]), OK)
    expect(ranks.check_joined({1: "connectFullMesh failed"}, [A, B]), PROBLEM, "rank 1", "connectFullMesh", "TCP ports")
    both = {0: "Connect timeout", 1: "refused, remote=[127.0.0.1]:23476"}
    expect(ranks.check_joined(both, [A, B]), PROBLEM, "ranks 0, 1 cannot", "refused, remote=")


def test_over_tls_no_advice_is_about_gloo():
    for finding in (ranks.check_joined({1: "closed"}, [A, B], "TLS"), ranks.check_pair(A, B, "closed", "TLS")):
        expect(finding, PROBLEM, "closed", "rank 0", "PIPECOMP_ADDRESS")
        assert not re.search("gloo|GLOO|all TCP ports", finding.advice)


def test_ranks_that_do_not_meet():
    expect(
        check_rendezvous(TWO_MACHINES, RendezvousError("timed out"), 30.0), PROBLEM, "in 30 s: timed out", "Start all"
    )


def test_what_keeps_a_rank_from_meeting_others_is_no_matter_of_time(monkeypatch, tmp_path):
    monkeypatch.setenv("PIPECOMP_KEYS", str(tmp_path / "keys"))
    for name in ("MASTER_ADDR", "MASTER_PORT", "PIPECOMP_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    for words in ("PIPECOMP_ADDRESS: got None", "keys/machine.pem cannot be read"):
        with pytest.raises(RendezvousError) as found:
            RankSession(TWO_MACHINES, {}, limit_s=30.0)
        finding = check_rendezvous(TWO_MACHINES, found.value, 30.0)
        expect(finding, PROBLEM, "rank 0 cannot join", words)
        assert "within" not in finding.advice
        monkeypatch.setenv("PIPECOMP_ADDRESS", "127.0.0.1:29400")


def test_pairs_of_few_ranks_are_all_pairs():
    assert ranks.choose_pairs(["a"]) == []
    assert ranks.choose_pairs(["a", "a", "b"]) == [(0, 1), (0, 2), (1, 2)]


@given(st.lists(st.sampled_from("abcdefghijklmnop"), min_size=5, max_size=40))
def test_pairs_of_many_ranks(machines):
    chosen = ranks.choose_pairs(machines)
    assert len(chosen) == len(set(chosen)) <= 28
    assert all(first < second for first, second in chosen)
    if len(set(machines)) <= 6:  # then every two machines are joined, and each shared machine has an inner pair
        joined = {frozenset((machines[a], machines[b])) for a, b in chosen}
        count = len(set(machines))
        inner = sum(machines.count(m) > 1 for m in set(machines))
        assert len(joined) == count * (count - 1) // 2 + inner


class FakePeer:
    """The other end of a link of known rates and delay; time passes only while data travels."""

    def __init__(self, out_bit_s: float, back_bit_s: float, delay_s: float) -> None:
        self.out_bit_s, self.back_bit_s, self.delay_s = out_bit_s, back_bit_s, delay_s
        self.now_s = 1000.0
        self.answer: tuple[int, int] = (-1, 0)
        self.transferred = 0

    def perf_counter(self) -> float:
        return self.now_s

    def send(self, data: torch.Tensor) -> None:
        if data.dtype == torch.int64:  # a command
            self.answer = tuple(data.tolist())
            return
        self.transferred += data.numel()
        self.now_s += 8 * data.numel() / self.out_bit_s

    def receive(self, data: torch.Tensor) -> torch.Tensor:
        command, size = self.answer
        self.now_s += self.delay_s
        if command == measure._TransferCommand.GIVE:
            assert data.numel() == size
            self.transferred += size
            self.now_s += 8 * size / self.back_bit_s
        self.now_s += self.delay_s
        return data


@settings(deadline=None, max_examples=40)
@given(out=st.floats(3e5, 1e11), back=st.floats(3e5, 1e11), delay=st.floats(0, 0.3))
def test_measuring_a_known_link(out, back, delay):
    peer = FakePeer(out, back, delay)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "time", peer)
        patch.setattr(measure, "_MOST_BYTES", 2**22)
        measured = measure.lead(peer)
    assert measured.round_trip_s == pytest.approx(2 * delay, abs=1e-6)
    if 2 * delay < 8 * 2**22 / max(out, back):  # otherwise the largest transfer is too short to tell
        assert measured.out_bit_s == pytest.approx(out, rel=0.01)
        assert measured.back_bit_s == pytest.approx(back, rel=0.01)
    assert peer.answer[0] == measure._TransferCommand.END
    assert peer.transferred <= 8 * 2**22, "each way three that are measured, and smaller ones before"
    if delay == 0:
        assert measured.spread == pytest.approx((1.0, 1.0))


def test_a_link_whose_rate_changes_has_a_spread(monkeypatch):
    class Unsteady(FakePeer):
        sent = 0

        def send(self, data):
            if data.dtype == torch.uint8:
                self.sent += 1
                self.out_bit_s = (1e8, 0.8e8, 1.1e8)[self.sent % 3]
            super().send(data)

    peer = Unsteady(1e8, 1e8, 0.0)
    monkeypatch.setattr(measure, "time", peer)
    measured = measure.lead(peer)
    assert measured.out_bit_s == pytest.approx(1e8, rel=0.01)
    assert measured.spread == pytest.approx((0.8, 1.1), rel=0.01)


def test_a_slow_link_is_not_measured_several_times(monkeypatch):
    """10 kbit/s: a transfer takes most of a minute."""
    peer = FakePeer(1e4, 1e4, 0.0)
    monkeypatch.setattr(measure, "time", peer)
    assert measure.lead(peer).out_bit_s == pytest.approx(1e4)
    assert peer.transferred == 2 * measure._FIRST_BYTES


# -- all of it


def test_sizes_for_people():
    assert (format_bytes(5 * MIB), format_bytes(1.5 * GIB)) == ("5 MiB", "1.5 GiB")


FINDINGS = [
    Finding("torch", OK, "2.13.0"),
    Finding("gloo", WARNING, "takes the loopback interface " * 8, "export GLOO_SOCKET_IFNAME=eth0"),
    Finding("[red]disk", PROBLEM, "full [bold]" + "x" * 200, "Free some."),
]


@pytest.mark.parametrize("width", [60, 100, 250])
def test_report(width):
    console = Console(width=width, record=True, file=io.StringIO())
    print_report(FINDINGS, console)
    text = console.export_text()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= min(100, width)
    assert "→ export GLOO_SOCKET_IFNAME=eth0" in text
    assert "[red]disk" in text
    assert "1 check ok, 1 warning, 1 problem." in " ".join(text.split())
    assert "x" * 200 in "".join(text.split())


def test_a_long_host_name_takes_no_room_from_what_was_found():
    console = Console(width=80, record=True, file=io.StringIO())
    host = f"rank 1 on worker-0.{'eu-central-1.' * 6}internal"
    print_report([Finding(host, PROBLEM, "it no longer answers"), *FINDINGS], console)
    first, *_ = text = console.export_text().splitlines()
    assert first.startswith("problem  rank 1 on")
    assert first.rstrip().endswith("it no longer answers")
    assert host.replace(" ", "") in "".join("".join(text[:8]).split()).replace("itnolongeranswers", "")


@pytest.fixture
def quick(monkeypatch):
    """The command without this machine's facts."""
    findings = list(FINDINGS)
    monkeypatch.setattr(examination, "machine_findings", lambda launch, *more: findings)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return findings


def test_exit_status_and_json(quick):
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout) == [f._asdict() for f in FINDINGS]
    assert list(json.loads(done.stdout)[0]) == ["check", "verdict", "found", "advice"]
    del quick[2]
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0  # a warning is no problem
    assert "1 warning" in done.stdout


def test_ranks_of_a_launcher_can_be_left_out(quick, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(examination, "RankSession", lambda *a, **k: pytest.fail("met other ranks"))
    assert CliRunner().invoke(app, ["doctor", "--json", "--no-ranks"]).exit_code == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (examination.RankFailedError("rank 1 failed:\nRuntimeError: no loopback"), "no loopback"),
        (ConfigError("TMPDIR", "/far/away", "a folder with a short path"), "short path"),
    ],
    ids=["loopback", "TMPDIR"],
)
def test_two_ranks_here_that_fail(quick, monkeypatch, error, said):
    def fail(*a, **k):
        raise error

    monkeypatch.setattr(examination, "run_ranks", fail)
    told: list[Finding] = []
    assert examine(told.extend, store=Path("m"), ranks=True, environ={})
    expect(told[-1], PROBLEM, said)


@pytest.mark.soak
def test_the_whole_command_on_this_machine(tmp_path):
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", "pipecomp.cli", "doctor", "--json", "--store", str(tmp_path / "messages")],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env=environ,
        check=False,
    )
    assert done.stdout, done.stderr
    findings = json.loads(done.stdout)
    assert all(set(f) == {"check", "verdict", "found", "advice"} for f in findings)
    assert {f["verdict"] for f in findings} <= {OK, WARNING, PROBLEM}
    checks = {f["check"] for f in findings}
    assert checks >= {
        "torch",
        "deepspeed",
        "transformers",
        "lmdb",
        "accelerate",
        "triton",
        "packages together",
        "imports",
        "processor",
        "threads",
        "kernels on cpu",
        "interfaces",
        "gloo interface",
        "disk space",
        "file system",
        "disk speed",
        "LMDB",
        "open files",
        "address space",
        "shared memory",
    }
    assert checks & {"GPU", "GPU 0"}
    assert done.returncode == has_problem(Finding(**f) for f in findings), done.stdout
    assert list(tmp_path.iterdir()) == []
