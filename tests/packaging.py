"""Helpers of the tests of packaging: copies of this tree without symbolic links, builds, and a check that one works.

Every time limit guards against hangs only: a build takes seconds on a machine that is not busy.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest

from pipecomp.distributed.installation import distribution_files
from pipecomp.distributed.local_launcher import run_ranks

ROOT = Path(__file__).parents[1]
HANGS_S = 600
NO_COMPILER = {"CC": "false", "CXX": "false"}  # the kernels are an optional extension; compiling them takes a minute
LEFT_OUT = (
    ".git",
    ".venv",
    "build",
    "dist",
    "runs",
    "*.egg-info",
    "*.so",
    "__pycache__",
    ".*_cache",
    "*-out",
    ".hypothesis",
)

WORKS = """
import sys
import torch
import pipecomp
from pipecomp.buffers import open_environment
from pipecomp.kernels.reference import rows
from pipecomp.stages import link, partition, split
folder, backend = sys.argv[1:]
for module in (pipecomp, rows, link, partition, pipecomp.buffers, pipecomp.kernels.ops):
    assert module.__file__.startswith(folder), module.__file__
codes, scale = pipecomp.kernels.ops.quantize(torch.ones(2, 8), 4, backend=backend)
assert codes.shape == (2, 4)
"""
NO_BARE_NAMES = """
import importlib.util
for name in ("kernels", "stages", "buffers"):
    assert importlib.util.find_spec(name) is None, f"{name} can be imported by its bare name"
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Return a command's output; fail with it if its status is not 0."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def committed(folder: Path) -> Path:
    """This tree as it is now, with all that is not ignored, as a git repository of one commit."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    origin = folder / "origin"
    shutil.copytree(ROOT, origin, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for words in ("init -q", "add -A", "-c user.name=test -c user.email=test@localhost commit -q -m tree"):
        run("git", *words.split(), cwd=origin)
    return origin


def clone_without_links(origin: Path, folder: Path) -> Path:
    """A checkout as on a system without symbolic links: small text files stand in their place."""
    clone = folder / "clone"
    run("git", "clone", "-q", "-c", "core.symlinks=false", origin, clone, cwd=folder)
    return clone


def unpacked_archive(origin: Path, folder: Path) -> Path:
    """The ZIP that code hosts offer, unpacked by a program that makes no symbolic links."""
    run("git", "archive", "--format=zip", "-o", folder / "tree.zip", "HEAD", cwd=origin)
    with zipfile.ZipFile(folder / "tree.zip") as archive:
        archive.extractall(folder / "archive")
    return folder / "archive"


def unpacked_sdist(origin: Path, folder: Path) -> Path:
    """The sdist, unpacked."""
    command = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", command, folder, cwd=origin)
    (path,) = folder.glob("pipecomp-*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(folder / "sdist", filter="data")
    (tree,) = (folder / "sdist").iterdir()
    return tree


def wheel(source: Path, folder: Path, **environment: str) -> Path:
    """The wheel of a source tree."""
    words = ("--disable-pip-version-check", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source)
    run(sys.executable, "-m", "pip", *words, cwd=folder, **environment)
    (path,) = folder.glob("pipecomp-*.whl")
    return path


def repacked(distribution: Distribution, folder: Path) -> Path:
    """An installed package as a wheel, without its scripts, which pip and uv write anew."""
    lines = (distribution.read_text("WHEEL") or "").splitlines()
    tags = [line.partition(":")[2].strip().split("-") for line in lines if line.startswith("Tag:")]
    tag = "-".join(".".join(dict.fromkeys(part)) for part in zip(*tags, strict=True))
    files = {file.path: file.source for file in distribution_files([distribution])}
    listed = (distribution.read_text("RECORD") or "").splitlines()
    path = folder / f"{distribution.metadata['Name'].replace('-', '_')}-{distribution.version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, source in files.items():
            if not name.endswith(".dist-info/RECORD"):
                archive.write(str(source), name)
        record = next(name for name in files if name.endswith(".dist-info/RECORD"))
        archive.writestr(record, "".join(f"{line}\n" for line in listed if line.split(",")[0] in files))
    return path


def works(folder: Path, backend: str = "torch") -> None:
    """Import pipecomp from `folder` in a process of its own, and quantize."""
    run_ranks(1, _works, str(folder), backend, timeout_s=HANGS_S)


def _works(rank: int, world: int, note: Any, folder: str, backend: str) -> None:
    for name in [name for name in sys.modules if f"{name}.".startswith("pipecomp.")]:
        del sys.modules[name]
    os.chdir(Path(folder).parent)
    sys.dont_write_bytecode = True  # what is in the tree is compared with what should be
    sys.path.insert(0, folder)
    sys.argv = ["", folder, backend]
    exec(WORKS, {})


class Empty:
    """A virtual environment without packages; it sees this one's libraries, but not what these .pth files add."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "empty"
        run(sys.executable, "-m", "venv", "--without-pip", self.folder, cwd=folder)
        (site,) = self.folder.glob("lib/python*/site-packages")
        # Not by PYTHONPATH, which comes first: this environment's own editable install could hide the one to be tested.
        (site / "libraries.pth").write_text(str(Path(pytest.__file__).parents[1]))

    def install(self, *what: str | Path, **environment: str) -> None:
        """Install as pip does, without touching what is installed here."""
        words = ("-q", "--no-deps", "--no-build-isolation", "--ignore-installed", "--prefix", self.folder, *what)
        command = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *words)
        run(*command, cwd=self.folder, **environment)

    def works(self, source: Path, backend: str = "torch") -> None:
        """Check that an installed package imports from under `source` and quantizes; its folders have no bare names."""
        command = (self.folder / "bin" / "python", "-c", NO_BARE_NAMES + WORKS, source, backend)
        run(*command, cwd=self.folder, PYTHONPATH="")
