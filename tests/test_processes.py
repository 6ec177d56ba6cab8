"""How this program starts itself again."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pipecomp.processes import python_module
from tests.limits import HANG_S

ROOT = Path(__file__).parents[1]


def test_another_package_in_the_working_directory_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a checkout whose package is not the one that is installed."""
    (tmp_path / "pipecomp").mkdir()
    (tmp_path / "pipecomp" / "__init__.py").write_text("raise SystemExit('of the working directory')\n")
    (tmp_path / "dataclasses.py").write_text("raise SystemExit('a file of the user')\n")
    monkeypatch.chdir(tmp_path)
    found = subprocess.run(python_module("pipecomp.rates"), capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (found.returncode, found.stderr) == (0, "")


def test_the_package_itself_is_taken_from_the_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert python_module("pipecomp.rates", "a")[1:] == ["-m", "pipecomp.rates", "a"]


def test_a_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert python_module("pipecomp.rates")[1:] == ["-P", "-m", "pipecomp.rates"]
    monkeypatch.chdir(ROOT)
