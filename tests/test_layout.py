"""The package's shape: which way imports point, who may know which library, and how large a function may be."""

from __future__ import annotations

import ast
import fnmatch
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
    {"utils"},
    {"kernels"},
    {"allreduce", "buffers", "data", "tls"},
    {"config", "gradient_config", "local_steps", "optim"},
    {"codecs"},
    {"distributed", "stages/link"},
    {"netlab", "stages/partition"},
    {"interfaces"},
    {"checkpoint"},
    {"engine"},
    {"doctor"},
    {"plan"},
    {"report"},
    {"initialization"},
    {"demo", "recipes", "trainer"},
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

MAX_LINES, MAX_PARAMETERS = 60, 8
# module:function -> why it may have more parameters than others.
MANY_PARAMETERS = {
    "pipecomp.kernels.ops:*quantize*": "a public operation: one call for every option of the quantizer",
    "pipecomp.kernels.*linear_decode": "a public operation, and the same signature in every backend",
    "pipecomp.kernels.*:exponential_decode": "a public operation",
    "pipecomp.kernels.triton.*:*_kernel": "a Triton kernel: pointers, strides and sizes one by one",
    "pipecomp.buffers:open_environment": "the settings of the store's section, and the staging",
    "pipecomp.cli.commands:*": "typer makes an option of every parameter",
    "pipecomp.cli.train:train": "typer makes an option of every parameter",
    "pipecomp.cli.commands:up": "typer makes an option of every parameter",
    "pipecomp.initialization:initialize": "public, with the names of deepspeed.initialize and of a model's split",
    "pipecomp.optim.quantized_adam:QuantizedAdam.__init__": "a torch optimizer: Adam's parameters and the exchange's",
    "pipecomp.trainer.trainer:PipelineTrainer.__init__": "transformers.Trainer's parameters and the pipeline's",
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
    """What a module imports; a face's name counts as the module behind it, the whole face as all of its modules."""
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
    users = [module for module in MODULES if "pipecomp.stages.split" in house.imported(MODULES[module])]
    assert users
    assert all("pipecomp.stages.partition.splitting" in imports(module) for module in users)


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


class Function(NamedTuple):
    name: str  # "module:Class.function"
    lines: int
    parameters: int


def functions() -> Iterator[Function]:
    """Every function and method of the product, self and cls not counted."""
    for module, path in MODULES.items():
        waiting: list[tuple[str, ast.AST]] = [("", ast.parse(path.read_text(encoding="utf-8")))]
        while waiting:
            outer, node = waiting.pop()
            for inner in ast.iter_child_nodes(node):
                name = outer
                if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    name = f"{outer}.{inner.name}" if outer else inner.name
                if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    a = inner.args
                    every = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
                    count = sum(argument.arg not in ("self", "cls") for argument in every)
                    yield Function(f"{module}:{name}", _lines(inner) - _lines_of_docstring(inner), count)
                waiting.append((name, inner))


def _lines(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def _lines_of_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return 0 if ast.get_docstring(function) is None else _lines(function.body[0])


def test_no_function_is_too_large():
    large = set()
    used = set()
    for function in functions():
        allowed = {pattern for pattern in MANY_PARAMETERS if fnmatch.fnmatch(function.name, pattern)}
        if function.parameters > MAX_PARAMETERS:
            used |= allowed
        if function.lines > MAX_LINES or (function.parameters > MAX_PARAMETERS and not allowed):
            large.add(function.name)
    assert not large
    assert used == set(MANY_PARAMETERS), "an exception that nothing needs"


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
