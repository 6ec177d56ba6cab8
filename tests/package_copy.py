"""A copy of the package in a folder of a test, to be changed as a contributor would, and used by another process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.limits import HANG_S

ROOT = Path(__file__).parents[1]
ROOMS = ("kernels", "stages", "buffers")  # at the top level of the repository; `pipecomp` has links to them


class PackageCopy:
    """`pipecomp/` as files of its own, the rest of the product as links. `edited` are the files that were touched."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.edited = folder, list[str]()
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "pipecomp", folder / "pipecomp", symlinks=True, ignore=ignored)
        for room in ROOMS:
            (folder / room).symlink_to(ROOT / room)

    def add(self, path: str, text: str) -> None:
        """Write a new file."""
        target = self.folder / path
        assert not target.exists(), f"{path} is no new file"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        self.edited.append(path)

    def edit(self, path: str, *changes: tuple[str, str]) -> None:
        """Replace texts, each of which the file has once."""
        target = self.folder / path
        text = target.read_text()
        for old, new in changes:
            assert text.count(old) == 1, f"{path} has {text.count(old)} times {old!r}"
            text = text.replace(old, new)
        target.write_text(text)
        self.edited.append(path)

    def run(self, script: str) -> str:
        """Return the output of a script that imports this package; its first argument is the copy's folder."""
        (self.folder / "use.py").write_text(script)
        done = subprocess.run(
            [sys.executable, "use.py", str(self.folder)],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def named_files(row: str) -> list[str]:
    """The files that docs/architecture.md tells to touch to add something: paths in the row's second cell."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if line.startswith(f"| **{row}**")]
    return [name for name in line.split("|")[2].split("`")[1::2] if "/" in name or name == "README.md"]
