"""The package's shape: which way imports point, and who may know which library."""

from __future__ import annotations

import ast
import fnmatch
import functools
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from pipecomp.distributed.local_launcher import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import import_graph as house

ROOT = Path(__file__).parents[1]
MODULES = house.modules()
FACES = ("pipecomp", "pipecomp.stages")  # they only hand names on

# An import may point to its own room or to one on a lower level.
LEVELS = [
    {"errors", "schedule", "stats"},
    {"rank_layout", "utils"},
    {"config"},
    {"kernels", "gradient_config"},
    {"allreduce", "buffers", "tls"},
    {"local_steps", "optim"},
    {"codecs"},
    {"distributed"},
    {"netlab", "stages/link"},
    {"stages/partition"},
    {"data"},
    {"interfaces"},
    {"checkpoint"},
    {"elastic"},
    {"engine"},
    {"doctor"},
    {"plan"},
    {"report"},
    {"initialization"},
    {"demo", "trainer"},
    {"recipes"},
    {"bench", "up"},
    {"cli"},
]
# What is imported -> the rooms and modules that may; what is not named here anybody may.
MAY_IMPORT = {
    "cryptography": {"tls"},
    "deepspeed": {"engine", "bench"},
    "lmdb": {"buffers"},
    "peft": {"stages/partition", "recipes"},
    "transformers": {"stages/partition", "trainer", "demo", "recipes"},
    "pipecomp.netlab": {
        *("netlab", "bench", "cli", "demo", "doctor"),
        *("initialization", "pipecomp.recipes.planned", "pipecomp.up"),
    },
    "pipecomp.recipes": {"recipes"},
    **{name: set() for name in house.OUTSIDE},  # the bare names of folders beside pipecomp/
}


def level(room: str) -> int:
    """A room's place in LEVELS."""
    found = [i for i, rooms in enumerate(LEVELS) if room in rooms]
    assert found, f"{room} has no level: add it to LEVELS"
    return found[0]


def handed_on() -> dict[str, str]:
    """Name that a face hands on -> the module behind it."""
    found = {}
    for face in FACES:
        for node in ast.walk(ast.parse(MODULES[face].read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in MODULES:
                found |= {f"{face}.{alias.asname or alias.name}": str(node.module) for alias in node.names}
    return {name: module for name, module in found.items() if name not in MODULES}


BEHIND = handed_on()


@functools.cache
def imports(module: str) -> set[str]:
    """Return a module's imports; a face's name counts as the module behind it, the whole face as all of its modules."""
    named = house.imported(MODULES[module])
    found = {BEHIND.get(target, target) for target in named}
    for face in FACES[1:]:
        if face in named and not any(target.startswith(f"{face}.") for target in named):
            found |= {behind for name, behind in BEHIND.items() if name.startswith(f"{face}.")}
    return found - set(FACES)


def refused(module: str) -> set[str]:
    """Keys of MAY_IMPORT that a module imports and may not."""
    targets = imports(module)
    return {
        what
        for what, by in MAY_IMPORT.items()
        if not {module, house.room(module)} & by and any(f"{t}.".startswith(f"{what}.") for t in targets)
    }


@pytest.mark.parametrize("module", sorted(set(MODULES) - set(FACES)))
def test_imports_point_one_way(module):
    own = house.room(module)
    for target in imports(module) & set(MODULES):
        assert house.room(target) == own or level(house.room(target)) < level(own), f"{module} imports {target}"
    assert refused(module) == set()


def test_a_name_of_a_face_counts_as_the_module_behind_it():
    assert BEHIND["pipecomp.stages.split"] == "pipecomp.stages.partition.splitting"
    assert BEHIND["pipecomp.initialize"] == "pipecomp.initialization"
    users = [module for module in MODULES if "pipecomp.stages.build_stage" in house.imported(MODULES[module])]
    assert users
    assert all("pipecomp.stages.partition.loading" in imports(module) for module in users)


def test_nothing_in_the_package_imports_recipes():
    graph = house.graph()
    assert [room for room in graph if "recipes" in graph[room]] == []


def test_every_room_is_there():
    rooms = {house.room(module) for module in MODULES} - {"pipecomp", "stages"}
    assert rooms == set().union(*LEVELS)


@pytest.mark.timeout(600)  # against hangs only
def test_every_module_can_be_imported():
    without = "triton" if importlib.util.find_spec("triton") is None else "nothing of this name"
    chosen = [name for name in MODULES if not name.endswith("__main__") and f".{without}" not in name]
    assert run_ranks(1, import_anew, sorted(chosen, reverse=True), timeout_s=500)[0] == len(chosen)


def import_anew(rank: int, world: int, note: Any, names: list[str]) -> int:
    """In a process with the large packages, but nothing of pipecomp."""
    for name in [name for name in sys.modules if f"{name}.".startswith("pipecomp.")]:
        del sys.modules[name]
    return len({importlib.import_module(name).__name__ for name in names})


def test_every_folder_of_tests_is_collected(pytestconfig):
    left_out = pytestconfig.getini("norecursedirs")
    for folder in {path.parent for path in (ROOT / "tests").rglob("test_*.py")}:
        names = folder.relative_to(ROOT).parts
        assert not any(fnmatch.fnmatch(name, pattern) for name in names for pattern in left_out), folder


@pytest.mark.parametrize("folder", house.OUTSIDE)
def test_folders_beside_the_package_are_linked(folder):
    link = ROOT / "pipecomp" / folder
    if link.is_symlink():
        assert os.readlink(link) == f"../{folder}"
    elif link.exists():  # a checkout without symbolic links; an sdist has neither
        assert link.read_text() == f"../{folder}"
    assert (folder == "kernels") != (ROOT / folder / "__init__.py").exists()
