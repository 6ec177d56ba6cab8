"""The package's shape: what a wheel holds, which way imports point, and who may know which library."""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import import_graph as house

ROOT = Path(__file__).parents[1]
FOLDERS = {"stages": "pipecomp.stages", "buffers": "pipecomp.buffers", "kernels": "pipecomp.kernels"}

# An import may point to its own room or to one on a lower level.
LEVELS = [
    {"errors", "files", "json_tree", "schedule", "stats"},
    {"kernels", "rates"},
    {"allreduce", "buffers", "data"},
    {"config", "gradient_config", "optim"},
    {"messages"},
    {"cluster"},
    {"netlab"},
    {"doctor", "stages/link"},
    {"stages/partition"},
    {"checkpoint", "plan"},
    {"engine"},
    {"demo", "recipes", "trainer"},
    {"bench"},
    {"cli"},
]
MAY_IMPORT = {
    "deepspeed": {"engine", "bench", "checkpoint", "cluster"},
    "lmdb": {"buffers"},
    # the lab slows links down; what trains and what plans does without
    "pipecomp.netlab": {"netlab", "bench", "cli", "doctor", "engine"},
    "peft": {"stages/partition", "recipes"},
    "transformers": {"stages/partition", "trainer", "demo", "recipes"},
}


def level(room: str) -> int:
    found = [i for i, rooms in enumerate(LEVELS) if room in rooms]
    assert found, f"{room} has no level: add it to LEVELS"
    return found[0]


@pytest.mark.parametrize("module", sorted(house.modules()))
def test_imports_point_one_way(module):
    modules = house.modules()
    if module in ("pipecomp", "pipecomp.stages"):  # faces: they only hand names on
        return
    own = house.room(module)
    for target in house.imported(modules[module]):
        if target in modules and target not in ("pipecomp", "pipecomp.stages"):
            assert house.room(target) == own or level(house.room(target)) < level(own), f"{module} imports {target}"
        for library, rooms in MAY_IMPORT.items():
            assert own in rooms or not f"{target}.".startswith(f"{library}."), f"{module} imports {target}"
        bare = target.split(".")[0]
        assert bare not in FOLDERS, f"{module} imports the bare name {bare}"


def test_nothing_in_the_package_imports_recipes():
    graph = house.graph()
    assert [room for room in graph if "recipes" in graph[room]] == []


def test_every_room_is_there():
    rooms = {house.room(module) for module in house.modules()} - {"pipecomp", "stages"}
    assert rooms == set().union(*LEVELS)


def test_every_folder_of_tests_is_collected(pytestconfig):
    left_out = pytestconfig.getini("norecursedirs")
    for folder in {path.parent for path in (ROOT / "tests").rglob("test_*.py")}:
        names = folder.relative_to(ROOT).parts
        assert not any(fnmatch.fnmatch(name, pattern) for name in names for pattern in left_out), folder


def test_links_and_packaging_agree():
    for folder, package in FOLDERS.items():
        link = ROOT / package.replace(".", "/")
        assert link.is_symlink()
        assert os.readlink(link) == f"../{folder}"
    assert not (ROOT / "kernels" / "__init__.py").exists()


CHECK = """
import sys
for bare in ("kernels", "stages", "buffers"):
    try:
        __import__(bare)
    except ModuleNotFoundError:
        continue
    sys.exit(f"{bare} can be imported by its bare name")
import torch
import pipecomp
from pipecomp.kernels import ops
from pipecomp.stages import split
from pipecomp.buffers import open_environment
assert pipecomp.__file__.startswith(sys.argv[1]), pipecomp.__file__
assert ops.__file__.startswith(sys.argv[1]), ops.__file__
codes, scale = pipecomp.kernels.ops.quantize(torch.ones(2, 8), 4)
assert codes.shape == (2, 4)
"""


@pytest.mark.timeout(300)
def test_a_wheel_in_an_empty_environment(tmp_path):
    source = tmp_path / "source"
    skipped = shutil.ignore_patterns(
        ".git", ".venv", "build", "runs", "*.egg-info", "*.so", "__pycache__", ".*_cache", "*-out"
    )
    shutil.copytree(ROOT, source, symlinks=True, ignore=skipped)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)], check=True, timeout=200
    )
    (wheel,) = tmp_path.glob("pipecomp-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "empty")], check=True, timeout=60)
    python = tmp_path / "empty" / "bin" / "python"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    ).stdout.strip()
    subprocess.run([*pip, "install", "--no-deps", "--target", site, str(wheel)], check=True, timeout=60)
    libraries = str(Path(pytest.__file__).parents[1])  # torch and the like; its own .pth files are not read there
    environment = {**os.environ, "PYTHONPATH": libraries}
    done = subprocess.run(
        [python, "-c", CHECK, site],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
