"""The command that starts this program again, and memory that goes back to the system."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import pipecomp
from pipecomp.utils.processes import python_module_command
from tests.limits import HANG_S

ROOT = Path(__file__).parents[1]


def test_another_package_in_the_working_directory_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a checkout whose package is not the one that is installed."""
    (tmp_path / "pipecomp").mkdir()
    (tmp_path / "pipecomp" / "__init__.py").write_text("raise SystemExit('of the working directory')\n")
    (tmp_path / "dataclasses.py").write_text("raise SystemExit('a file of the user')\n")
    monkeypatch.chdir(tmp_path)
    found = subprocess.run(
        python_module_command("pipecomp.utils.units"), capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")


def test_the_package_itself_is_taken_from_the_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert python_module_command("pipecomp.utils.units", "a")[1:] == ["-m", "pipecomp.utils.units", "a"]


def test_a_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert python_module_command("pipecomp.utils.units")[1:] == ["-P", "-m", "pipecomp.utils.units"]
    monkeypatch.chdir(ROOT)


SERVED = """
import multiprocessing
from pipecomp.distributed.local_launcher import run_ranks

def where(rank, world, note):
    import pipecomp
    return pipecomp.__file__

if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["pipecomp.utils.units"])
    print(run_ranks(1, where, timeout_s=600)[0])
"""


def test_ranks_that_a_server_forks_are_of_the_same_package(tmp_path: Path) -> None:
    (tmp_path / "served.py").write_text(SERVED)
    (tmp_path / "here" / "pipecomp").mkdir(parents=True)
    (tmp_path / "here" / "pipecomp" / "__init__.py").write_text("raise SystemExit('of the working directory')\n")
    command = [sys.executable, str(tmp_path / "served.py")]
    found = subprocess.run(command, cwd=tmp_path / "here", capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (found.returncode, found.stdout.strip()) == (0, pipecomp.__file__), found.stderr


KEEPS = """
import os, sys, numpy as np
from pipecomp.utils.processes import return_large_blocks
if sys.argv[1] == "returned":
    return_large_blocks()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
first = np.ones(30 << 20, np.uint8)
del first  # by default, smaller blocks come from the heap from now on
before, blocks, between = resident(), [], []
for _ in range(20):
    blocks.append(np.ones(12 << 20, np.uint8))
    between.append(np.ones(100_000, np.uint8))
del blocks
print((resident() - before) >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_large_blocks_that_are_freed_go_back_to_the_system():
    def kept(mode: str, **variables: str) -> int:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC", "GLIBC"))}
        command = [sys.executable, "-c", KEEPS, mode]
        done = subprocess.run(command, env=own | variables, capture_output=True, text=True, timeout=HANG_S, check=True)
        return int(done.stdout)

    assert kept("returned") < 20
    assert kept("as they are") > 150
    assert kept("returned", MALLOC_MMAP_THRESHOLD_=str(32 << 20)) > 150, "the user's own setting"
