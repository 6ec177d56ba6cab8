"""Names in backticks on the contributors' pages exist: paths, dotted names, classes, rooms."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG_S

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import import_graph as house

ROOT = Path(__file__).parents[1]
PAGES = ("docs/architecture.md", "docs/algorithms.md", "docs/deepspeed.md")
TOKEN = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w.-]+(/[\w.-]+)*(/|\.(py|md|h|cpp|json|sh))")
DOTTED = re.compile(r"pipecomp(\.\w+)+")
CLASS = re.compile(r"([A-Z]\w*[a-z]\w*)((?:\.\w+)?)")
FUNCTION = re.compile(r"(\w+)\(\)")
NODE = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
THEIRS = {
    "BackwardPass",
    "TiedLayerSpec",
    "Generator.manual_seed",
    "Optimizer.load_state_dict",
    "destroy_process_group()",
}


def tokens(page: str) -> list[str]:
    """All that stands in backticks, code blocks left out."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return TOKEN.findall(text)


@functools.cache
def repository() -> frozenset[str]:
    """Every tracked file and its folders, and new files that git does not ignore."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).exists()]
    return frozenset(str(p) for file in files for p in (file, *file.parents))


@functools.cache
def defined() -> dict[str, set[str]]:
    """Names of the package's classes, each with its members, and of its functions."""
    found: dict[str, set[str]] = {}
    for path in house.modules().values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).update(members(node))
            elif isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, set())
    return found


def members(node: ast.ClassDef) -> set[str]:
    """Methods, fields and attributes of a class, inherited ones left out."""
    out = {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef):
            out.add(inner.name)
        elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
            out.add(inner.target.id)
        elif isinstance(inner, ast.Assign):
            out |= {target.id for target in inner.targets if isinstance(target, ast.Name)}
    return out


def resolves(name: str) -> bool:
    """Return True if a dotted name is a module of the package or something in one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[end:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


def wrong(token: str) -> str | None:
    """Return the problem of a token; None if its name exists, or is of no kind that this test knows."""
    node = NODE.fullmatch(token)
    if node:
        names = re.findall(r"^(?:def|class) (\w+)", (ROOT / node[1]).read_text(encoding="utf-8"), flags=re.MULTILINE)
        return None if node[2] in names else f"{token}: no such test"
    if PATH.fullmatch(token) and "NAME" not in token:
        # A bare file name stands for the file of its row; a path is taken from the root.
        places = repository()
        there = token.rstrip("/") in places or ("/" not in token and any(p.endswith(f"/{token}") for p in places))
        return None if there else f"{token}: no such file or folder"
    if DOTTED.fullmatch(token):
        return None if resolves(token) else f"{token}: cannot be imported"
    if token in THEIRS:  # DeepSpeed's and torch's
        return None
    known = defined()
    of_class = CLASS.fullmatch(token)
    if of_class:
        if of_class[1] not in known:
            return f"{token}: no such class"
        member = of_class[2].removeprefix(".")
        return f"{token}: no such member" if member and member not in known[of_class[1]] else None
    function = FUNCTION.fullmatch(token)
    return f"{token}: no such function" if function and function[1] not in known else None


@pytest.mark.parametrize("page", PAGES)
def test_what_is_named_in_backticks_is_there(page):
    found = tokens(page)
    assert len(found) > 20
    assert [problem for token in found if (problem := wrong(token))] == []


def test_the_drawing_has_every_room():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    drawing = text.partition("```mermaid")[2].partition("```")[0]
    labels = re.findall(r'\["([^":]+)', drawing)
    drawn = {room for label in labels for room in label.split(", ")}
    missing = sorted(set(house.graph()) - drawn)
    assert missing == [], "name it in the drawing of docs/architecture.md"


@pytest.mark.parametrize(
    "token",
    [
        "stages/link/upstream.py",
        "pipecomp.kernels.ops.no_such",
        "LinkUpstream",
        "LinkSender.sned",
        "no_such_function()",
    ],
)
def test_a_wrong_name_is_found(token):
    assert wrong(token)


def cited() -> list[tuple[str, str]]:
    """(file, section) of every citation of docs/algorithms.md in the sources and the tests."""
    out = []
    for path in (*house.modules().values(), *(ROOT / "tests").rglob("*.py")):
        if path == Path(__file__):
            continue
        for match in re.finditer(
            r"docs/algorithms\.md,? (?:section )?(\d+(?:\.\d+)?)", path.read_text(encoding="utf-8")
        ):
            out.append((path.relative_to(ROOT).as_posix(), match[1]))
    return out


def test_cited_sections_are_there():
    page = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    sections = set(re.findall(r"^##+ (\d+(?:\.\d+)?)[. ]", page, flags=re.MULTILINE))
    found = cited()
    assert len(found) >= 10
    assert [(file, section) for file, section in found if section not in sections] == []
