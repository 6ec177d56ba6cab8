"""The package's shape: what a wheel holds, which way imports point, and who may know which library."""

from __future__ import annotations

import ast
import fnmatch
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"stages": "pipecomp.stages", "buffers": "pipecomp.buffers", "kernels": "pipecomp.kernels"}

# An import may point to its own layer or to a lower one.
LAYERS = [
    {"errors", "wire", "kernels", "local", "plain"},
    {
        "config", "config_file", "gradient_config", "codecs", "stats", "data", "in_flight", "netlab", "order",
        "rotation", "interfaces", "random_state", "sealing", "bf16_products",
    },
    {"buffers"},
    {"stages", "allreduce", "trace"},
    {
        "schedule", "export", "failure", "handshake", "join", "optim", "plan", "doctor", "replicas", "reduction",
        "guarding", "reports", "runs", "watch", "recut", "recutting", "checkpointing",
        "engine", "linking", "recomputing", "build",
    },
    {
        "trainer", "callback", "demo", "demo_task", "demo_plot", "recipe", "recipe_data", "recipe_report",
        "recipe_text", "recipe_classify", "recipe_encoder", "recipe_images", "recipe_resnet",
        "recipe_language", "recipe_lora", "recipe_plan", "recipe_resume",
    },
    {"cli_common"},
    {"cli_bench", "cli_store"},
    {"cli"},
]
MAY_IMPORT = {
    "deepspeed": {
        "engine", "reduction", "recut", "recutting", "schedule", "build", "join", "recipe", "doctor", "bench_stock",
        "trainer",
    },
    "lmdb": {"buffers"},
    "peft": {"stages", "recipe_lora"},
    "transformers": {"stages", "trainer", "callback", "demo_task", "recipe", "recipe_text", "recipe_encoder"},
}


def modules() -> dict[str, Path]:
    """Dotted name -> file, of every module of the package."""
    found = {f"pipecomp.{p.stem}": p for p in (ROOT / "pipecomp").glob("*.py")}
    for path in (ROOT / "pipecomp").glob("*/*.py"):
        if not path.parent.is_symlink():
            found[f"pipecomp.{path.parent.name}.{path.stem}"] = path
    for folder, package in FOLDERS.items():
        found |= {f"{package}.{p.stem}": p for p in (ROOT / folder).glob("*.py")}
    return found


def imported(path: Path) -> set[str]:
    """Every module that a file imports, also inside functions."""
    out = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            out |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return out


def part(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def layer(name: str) -> int | None:
    return next((i for i, names in enumerate(LAYERS) if name in names or (name.startswith("bench_") and i == 5)), None)


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_point_one_way(module):
    if module.endswith("__init__") and part(module) == "__init__":
        return
    own = layer(part(module))
    assert own is not None, f"{module} has no layer: add it to LAYERS"
    for target in imported(modules()[module]):
        if target.startswith("pipecomp.") and part(target) in set().union(*LAYERS):
            assert layer(part(target)) <= own, f"{module} imports {target}, which lies above it"
        library = target.split(".")[0]
        if library in MAY_IMPORT:
            assert part(module) in MAY_IMPORT[library], f"{module} imports {library}"
        assert library not in FOLDERS, f"{module} imports the bare name {library}"


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
        check=True, capture_output=True, text=True, timeout=30,
    ).stdout.strip()  # fmt: skip
    subprocess.run([*pip, "install", "--no-deps", "--target", site, str(wheel)], check=True, timeout=60)
    libraries = str(Path(pytest.__file__).parents[1])  # torch and the like; its own .pth files are not read there
    environment = {**os.environ, "PYTHONPATH": libraries}
    done = subprocess.run(
        [python, "-c", CHECK, site], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
