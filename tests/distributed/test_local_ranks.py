"""Ranks on this machine end with the function that started them, whenever that ends."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.context import ForkServerProcess
from multiprocessing.util import Finalize
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipecomp.distributed import local_launcher
from pipecomp.distributed.local_launcher import RankFailedError, run_ranks
from pipecomp.errors import ConfigError
from tests import conftest
from tests.limits import HANG_S

pytestmark = pytest.mark.ranks


def sleep(rank: int, world: int, note: Any) -> None:
    time.sleep(HANG_S)


def test_ctrl_c_between_two_starts_ends_those_that_run(monkeypatch):
    workers = []
    start = ForkServerProcess.start

    def interrupted(worker: ForkServerProcess) -> None:
        workers.append(worker)
        if len(workers) == 2:
            raise KeyboardInterrupt
        start(worker)

    monkeypatch.setattr(ForkServerProcess, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(3, sleep, timeout_s=HANG_S)
    first, second = workers
    assert not first.is_alive()
    assert first.exitcode is not None
    assert second.pid is None


def test_ranks_that_take_too_long_are_named():
    with pytest.raises(RankFailedError, match=r"ranks \[0, 1\] took over 0\.5 s"):
        run_ranks(2, sleep, timeout_s=0.5)


def variable(rank: int, world: int, note: Any) -> str | None:
    return os.environ.get("PIPECOMP_TEST")


def test_ranks_have_the_variables_that_the_caller_has_now():
    """Not those with which the server began that forks them."""
    code = (
        "import os\nfrom tests.distributed.test_local_ranks import *\nfor value in ('a', 'b', None):\n"
        "    os.environ.pop('PIPECOMP_TEST', None) if value is None else os.environ.update(PIPECOMP_TEST=value)\n"
        "    print(run_ranks(1, variable, timeout_s=HANG_S)[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=HANG_S,
        check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["a", "b", "None"]


def ends_badly(rank: int, world: int, note: Any) -> None:
    Finalize(None, os._exit, (3 * rank,), exitpriority=0)


def test_a_rank_that_ends_with_an_error_after_its_result_has_failed():
    with pytest.raises(RankFailedError, match="rank 1 failed with exit status 3"):
        run_ranks(2, ends_badly, timeout_s=HANG_S)
    assert run_ranks(2, ends_badly, timeout_s=HANG_S, may_die=(1,)) == {0: None, 1: None}


def ignores_ctrl_c(rank: int, world: int, note: Any) -> bool:
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_ctrl_c_in_a_terminal_is_for_the_caller_alone():
    """The caller ends the ranks: they and their server, which may still import, print nothing."""
    done = subprocess.run(
        [sys.executable, "-c", "from tests.distributed.test_local_ranks import *\n"
         "print(run_ranks(1, ignores_ctrl_c, timeout_s=HANG_S))\n"
         "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.stdout == "{0: True}\nTrue\n", done.stderr


def test_a_path_too_long_for_the_servers_socket_is_named(tmp_path):
    """The name of a socket has at most 107 bytes, whatever a file's may have."""
    folder = tmp_path / ("t" * 100)
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", "from pipecomp.distributed.local_launcher import *\nrun_ranks(1, len, timeout_s=1)"],
        env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.stderr.splitlines()[-1].startswith(f"pipecomp.errors.ConfigError: TMPDIR: got '{folder}', allowed: ")


@pytest.mark.parametrize(
    ("asked", "drivers", "hidden", "forked"),
    [
        (["tests"], True, True, True),
        (["tests/gpu", "tests/kernels"], True, True, True),
        (["tests/gpu/test_kernels_gpu.py::test_quantizer"], True, False, False),
        (["tests/gpu"], False, False, True),
    ],
)
def test_ranks_are_forked_from_what_has_imported_torch_where_none_uses_a_gpu(
    monkeypatch, tmp_path, asked, drivers, hidden, forked
):
    """As in all tests but those of GPUs: what they compare was computed by CPUs, and a GPU has place for one rank."""
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(local_launcher, "_NVIDIA_DRIVERS", (str(tmp_path / ("nvidiactl" if drivers else "none")),))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    told = []
    monkeypatch.setattr(multiprocessing, "set_forkserver_preload", told.append)
    where = SimpleNamespace(dir=Path(__file__).parents[2])
    conftest.pytest_configure(SimpleNamespace(args=asked, invocation_params=where))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("" if hidden else "0")
    assert ("DS_ACCELERATOR" in os.environ) == forked
    assert bool(told) == forked


@pytest.mark.parametrize(
    ("place", "number", "key"),
    [
        ("pipecomp.distributed.supervisor.Pipe", errno.EMFILE, "ulimit -n"),
        ("multiprocessing.forkserver.ensure_running", errno.EMFILE, "ulimit -n"),
        ("multiprocessing.forkserver.ensure_running", errno.ENOENT, "TMPDIR"),
    ],
)
def test_what_processes_cannot_share_is_named(
    monkeypatch: pytest.MonkeyPatch, place: str, number: int, key: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(place, refuse)
    with pytest.raises(ConfigError) as caught:
        run_ranks(1, len, timeout_s=HANG_S)
    assert caught.value.key == key
