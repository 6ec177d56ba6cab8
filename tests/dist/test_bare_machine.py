"""A run that begins on a machine with Python alone, by one command over a real ssh server.

Its packages are copied over the line, or come from an index that it reaches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipecomp.distributed.installation import needed_distributions
from tests.dist.bare_machines import bare_folder, make_index, run_commands, why_not
from tests.limits import HANG_S
from tests.models import metrics, save_model, write_text

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.soak,
    pytest.mark.ranks,
    pytest.mark.timeout(3 * HANG_S),
    pytest.mark.skipif(WHY_NOT is not None, reason=f"no bare machine here: {WHY_NOT}"),
]
OTHER = "198.18.0.2"
PACKAGES = 50_000_000  # bytes of line, fewer than all packages have and more than all else
SMALL = 100_000  # bytes of questions and commands


@pytest.fixture
def folder() -> Iterator[Path]:
    with bare_folder() as path:
        yield path


@pytest.mark.parametrize(
    ("packages", "index", "origin"),
    [
        ("auto", False, "copied from here"),
        ("here", True, "copied from here"),
        ("index", True, "from its package index"),
    ],
)
def test_from_python_alone_to_training(folder, tmp_path, packages, index, origin):
    work = tmp_path / "work"
    work.mkdir()
    save_model(work / "model", write_text(work / "text.txt"))
    given = ["train", "--model", "model", "--data", "text.txt", "--peers", f"198.18.0.1,{OTHER}", "--batch", "8"]
    given += ["--max-steps", "4", "--lr", "1e-2"]
    commands = [
        [*given, "--out", "none"],
        [*given, "--out", "first", "--yes", "--packages", packages],
        [*given, "--out", "second"],  # what is there stays, wherever it came from
        ["peers", "list"],
        ["peers", "remove", OTHER, "--yes", "--results"],
        ["peers", "list"],
    ]
    wheels = make_index(folder / "wheels", needed_distributions()) if index else None
    asked, first, second, listed, removed, none = run_commands(folder, work, commands, index=wheels)
    assert asked.status == 1
    assert "--yes: got False, allowed: given, where no terminal can ask" in asked.text
    assert f"packages {'from its package index' if index else 'copied from here'}" in asked.text
    assert asked.homes[OTHER] == [], "nothing is made without consent"
    assert first.status == 0, first.text
    assert re.search(rf"198\.18\.0\.2: Python 3\.\d+ with \d+ packages {origin}", first.text)
    assert (first.sent > PACKAGES) == (origin == "copied from here"), first.sent
    assert [line["step"] for line in metrics(work / "first") if "loss" in line] == [1, 2, 3, 4]
    assert first.homes[OTHER] == [".pipecomp"], "all of it is below one folder"
    assert second.status == 0, second.text
    assert "packages" not in second.text
    assert " sent" not in second.text
    assert second.sent < SMALL
    assert [line["step"] for line in metrics(work / "second") if "loss" in line] == [1, 2, 3, 4]
    assert OTHER in listed.text
    assert "GB" in listed.text
    assert removed.status == 0, removed.text
    assert removed.homes[OTHER] == []
    assert "No machine was set up from here" in none.text
