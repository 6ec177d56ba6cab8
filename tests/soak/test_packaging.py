"""Installed from every kind of source: with pip into an empty environment, and as a tool with uv and pipx."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tests.packaging as packaging
from pipecomp.distributed.installation import needed_distributions
from tests.models import metrics, save_model, write_text

sys.path.insert(0, str(packaging.ROOT / "scripts"))
import check_wheels

pytestmark = [pytest.mark.soak, pytest.mark.timeout(packaging.HANGS_S * 3)]

WITH_LINKS = "with links"
SOURCES = {
    WITH_LINKS: lambda origin, _: origin,
    "without links": packaging.clone_without_links,
    "archive": packaging.unpacked_archive,
    "sdist": packaging.unpacked_sdist,
}


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return SOURCES[request.param](packaging.committed(tmp_path), tmp_path)


def test_an_editable_install(source, tmp_path):
    empty = packaging.Empty(tmp_path)
    empty.install("-e", source, **packaging.NO_COMPILER)
    empty.works(source)


def test_an_ordinary_install(source, tmp_path):
    empty = packaging.Empty(tmp_path)
    empty.install(source, **packaging.NO_COMPILER)
    empty.works(empty.folder)


@pytest.mark.parametrize("source", [WITH_LINKS], indirect=True)
class TestCompiled:
    """As a user's pip does it; once each, as it takes a minute of one core."""

    def test_a_wheel(self, source, tmp_path):
        empty = packaging.Empty(tmp_path)
        wheel = packaging.wheel(source, tmp_path)
        assert check_wheels.problems(wheel, platform="linux") == []
        empty.install(wheel)
        empty.works(empty.folder, "native")

    def test_an_editable_install(self, source, tmp_path):
        empty = packaging.Empty(tmp_path)
        empty.install("-e", source)
        empty.works(source, "native")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages that are installed here as wheels, in place of an index."""
    folder = tmp_path_factory.mktemp("packages")
    for distribution in needed_distributions().values():
        packaging.repacked(distribution, folder)
    return folder


def own_wheel(folder: Path) -> str:
    return f"{packaging.wheel(packaging.committed(folder), folder, **packaging.NO_COMPILER)}[lora]"


def git_address(folder: Path) -> str:
    return f"pipecomp[lora] @ git+file://{packaging.committed(folder)}"


@pytest.mark.parametrize("source", [own_wheel, git_address])
@pytest.mark.parametrize("tool", ["uv", "pipx"])
def test_a_tool(tmp_path: Path, packages: Path, tool: str, source: Callable[[Path], str]) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"needs {tool}")
    bin_folder, work = tmp_path / "bin", tmp_path / "work"
    variables = {"UV_NO_INDEX": "1", "UV_OFFLINE": "1", "UV_FIND_LINKS": str(packages)}
    variables |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(packages), "PYTHONPATH": ""}
    places = {"UV_TOOL_DIR": "tools", "UV_TOOL_BIN_DIR": "bin", "UV_CACHE_DIR": "cache"}
    places |= {"PIPX_HOME": "tools", "PIPX_BIN_DIR": "bin"}
    variables |= {name: str(tmp_path / place) for name, place in places.items()} | packaging.NO_COMPILER
    python = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    words = [tool, "tool", "install"] if tool == "uv" else [tool, "install"]
    packaging.run(*words, "--python", python, source(tmp_path), cwd=tmp_path, **variables)
    work.mkdir()
    save_model(work / "model", write_text(work / "text.txt"))
    # Also the ranks, and the programs that doctor starts, are those of the tool's own environment.
    variables |= {"PATH": f"{bin_folder}:{os.defpath}", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = bin_folder / "pipecomp"
    assert list(tmp_path.glob("tools/**/site-packages/peft")), "a package of the extra"
    assert packaging.run(command, "--version", cwd=work, **variables).startswith("pipecomp ")
    found = packaging.run(command, "doctor", cwd=work, **variables)
    assert " 0 problems" in " ".join(found.split())
    given = ["--model", "model", "--data", "text.txt", "--stages", "2", "--batch", "8", "--max-steps", "2"]
    packaging.run(command, "train", *given, "--out", "run", cwd=work, **variables)
    assert [line["step"] for line in metrics(work / "run") if "loss" in line] == [1, 2]
