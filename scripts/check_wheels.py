"""Check wheels before they are published: python scripts/check_wheels.py FOLDER

Each has the compiled kernels, for a platform that other systems take (manylinux), every source module, the recipes and
the command. Exit status 1 with a line for each problem.
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import import_graph as house


def problems(wheel: Path, *, platform: str = "manylinux") -> list[str]:
    """Describe what is wrong with a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        commands = [archive.read(name).decode() for name in names if name.endswith(".dist-info/entry_points.txt")]
    found = []
    if platform not in wheel.name:
        found.append(f"{wheel.name} is not for {platform}")
    built = [name for name in names if name.startswith("pipecomp/kernels/_native") and name.endswith(".so")]
    if len(built) != 1:
        found.append(f"{wheel.name} has {len(built)} compiled kernels, and should have 1")
    for module, path in house.modules().items():
        name = module.replace(".", "/")
        file = f"{name}/__init__.py" if path.name == "__init__.py" else f"{name}.py"
        if file not in names:
            found.append(f"{wheel.name} lacks {file}")
    if "pipecomp/recipe_files/README.md" not in names:
        found.append(f"{wheel.name} lacks the recipes")
    if not any("pipecomp = pipecomp.cli:app" in text for text in commands):
        found.append(f"{wheel.name} lacks the command pipecomp")
    return found


def main(arguments: Sequence[str]) -> int:
    """Check the wheels of a folder."""
    wheels = sorted(Path(arguments[0]).glob("*.whl"))
    found = [problem for wheel in wheels for problem in problems(wheel)]
    for problem in found or ([] if wheels else [f"no wheel in {arguments[0]}"]):
        print(problem, file=sys.stderr)
    return 1 if found or not wheels else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
