"""The command that starts this program again."""

from __future__ import annotations

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
