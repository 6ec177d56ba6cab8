"""Names in the documentation exist: tests, settings, files."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from pipecomp.config import Config
from tests.pages import PAGES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
NODE = re.compile(r"(tests/[\w/]+\.py)((?:::\w+)+)")
COLUMNS = ("fault", "what happens (within)", "test")


def rows() -> list[list[str]]:
    """The cells of the table of faults, its headings and the rows between its parts left out."""
    lines = PAGE.read_text().partition("\n## Faults\n")[2].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert tuple(cells[0]) == COLUMNS
    return [row for row in cells[2:] if any(row[1:])]


def defined(path: Path) -> set[str]:
    """Tests of a file, as pytest names them without their parameters."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(f"::{node.name}")
        elif isinstance(node, ast.ClassDef):
            found.add(f"::{node.name}")
            found |= {f"::{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def test_every_fault_has_a_test_and_says_what_happens():
    found = rows()
    assert len(found) >= 25
    assert len({row[0] for row in found}) == len(found)
    for row in found:
        assert len(row) == len(COLUMNS), row
        assert row[0], row
        assert row[1], row
        assert NODE.search(row[-1]), row


def test_every_test_that_is_named_is_there():
    named = NODE.findall(PAGE.read_text())
    assert len(named) >= 25
    for file, name in named:
        assert (ROOT / file).is_file(), file
        assert name in defined(ROOT / file), f"{file}{name}"


def test_every_setting_that_is_named_is_there():
    sections = {name: getattr(Config.from_dict({}), name) for name in Config.model_fields}
    named = re.findall(r"`(store|transport|activations|gradients)\.(\w+)`", PAGE.read_text())
    assert named
    for section, key in named:
        assert hasattr(sections[section], key), f"{section}.{key}"


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_is_linked_is_there(page):
    page = ROOT / page
    links = re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", page.read_text())
    for link in links:
        assert (page.parent / link).exists(), link
